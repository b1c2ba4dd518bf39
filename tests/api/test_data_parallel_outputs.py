"""The outputs that DataParallel and gather join, and those that they refuse: no row is lost or mixed up."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import (
    DataParallel,
    GatherError,
    ShardError,
    data_parallel,
    gather,
    parallel,
    register_split,
    tuple_fn,
)

TWO = ["cpu"] * 2
CLASSES = torch.eye(3)[[0, 1, 0, 1]]  # equal labels in both lanes


class Returns(nn.Module):
    """Returns what a function returns."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@dataclasses.dataclass
class Labelled:
    """An output with one label per row."""

    scores: torch.Tensor
    labels: list


def labels(x):
    return x.argmax(1).tolist()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (labels, [0, 1, 0, 1]),
        (lambda x: tuple(labels(x)), (0, 1, 0, 1)),
        (lambda x: [str(label) for label in labels(x)], ["0", "1", "0", "1"]),
        (lambda x: {"x": x, "labels": labels(x)}, {"x": CLASSES, "labels": [0, 1, 0, 1]}),
        (lambda x: Labelled(x, labels(x)).labels, [0, 1, 0, 1]),
    ],
    ids=["numbers", "tuple", "texts", "in a dict", "of a dataclass"],
)
def test_equal_lists_of_the_lanes_are_put_together(function, expected):
    """Lists with one item per row are not one value, although all lanes return equal ones."""
    joined = DataParallel(Returns(function), TWO)(CLASSES)
    assert_close(joined, expected) if isinstance(joined, dict) else None
    assert isinstance(joined, dict) or joined == expected


def boxes(x):
    """One box for rows of class 0, two for others."""
    return [torch.full((1 + label, 4), float(label)) for label in labels(x)]


@pytest.mark.parametrize(
    "function",
    [
        boxes,
        lambda x: [{"boxes": each, "labels": each[:, 0]} for each in boxes(x)],
        lambda x: [torch.full((5, 4), float(label)) for label in labels(x)],
        lambda x: [each if value else None for each, value in zip(boxes(x), x[:, 2].tolist(), strict=True)],
    ],
    ids=["tensors", "dicts", "tensors of one size", "some without boxes"],
)
def test_detections_are_put_together(function):
    """A list with the boxes of each image has one item per image, in order, as plainly."""
    model = Returns(function)
    x = CLASSES.clone()
    x[1, 2] = 0.5  # the rows of the lanes differ in what the last function reads
    assert_close(DataParallel(model, TWO)(x), model(x))


@pytest.mark.parametrize(("rows", "count"), [(2, 1), (4, 2)])
def test_dicts_with_as_many_boxes_as_rows_are_refused(rows, count):
    """Two lanes with one image and one box each may mean either. Both cures of the error work."""

    def detect(x):
        return [{"boxes": torch.full((count, 4), float(label))} for label in labels(x)]

    model, x = Returns(detect), CLASSES[:rows]
    with pytest.raises(GatherError, match=r'out_dims="items".*Return a tuple'):
        DataParallel(model, TWO)(x)
    with torch.no_grad(), parallel(model, TWO, out_dims="items") as p:
        assert_close(p(x), model(x))
    levels = Returns(lambda x: tuple({"f": x * level} for level in range(rows // 2)))
    assert_close(DataParallel(levels, TWO)(x), levels(x))


def test_caches_of_layers_are_joined_item_by_item():
    """A list with one tuple of tensors per layer, all with the rows, as many layers as rows."""
    model = Returns(lambda x: {"y": x, "past": [(x + layer, x * 2) for layer in range(4)]})
    x = torch.randn(8, 4)
    assert_close(DataParallel(model, TWO)(x), model(x))


def test_losses_in_a_list_become_vectors():
    """0-d tensors in a list are joined item by item, whatever the number of rows."""
    model = Returns(lambda x: [x.mean(), x.sum()])
    for rows in (4, 8):
        with pytest.warns(UserWarning, match="0-d tensors"):
            joined = DataParallel(model, TWO)(torch.ones(rows, 4))
        assert_close(joined, [torch.ones(2), torch.full((2,), 2.0 * rows)])


def test_gather_joins_one_tensor_twice():
    """Parts that are one object are two parts: gather gets them, and no lane returned them."""
    part, loss = torch.ones(2, 3), torch.tensor(1.0)
    assert gather([part, part], "cpu").shape == (4, 3)
    with pytest.warns(UserWarning, match="0-d tensors"):
        assert gather([loss, loss], "cpu").tolist() == [1, 1]


@pytest.mark.parametrize("outputs", [{"a": torch.ones(2)}, "ab"], ids=["dict", "text"])
def test_gather_refuses_one_output(outputs):
    """A dict or a text is one output, not one per device."""
    with pytest.raises(GatherError, match=r"Give a list with one output per device"):
        gather(outputs, "cpu")


def test_an_override_that_calls_the_parent_joins_as_the_parent():
    """The row counts of the call reach the inherited gather."""

    class Passing(DataParallel):
        def gather(self, outputs, output_device):
            return super().gather(outputs, output_device)

    model = Returns(boxes)
    assert_close(Passing(model, TWO)(CLASSES), model(CLASSES))


def test_an_iterator_is_refused():
    """Lanes would take turns with its items."""
    with pytest.raises(ShardError, match="list_iterator"):
        DataParallel(Returns(lambda x, items: x * next(items)), TWO)(CLASSES, iter([1, 2]))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_lists_of_tensors_with_the_rows_are_joined_item_by_item(levels):
    """As in torch: the feature maps of a backbone are a list of tensors that all have the rows."""
    model = Returns(lambda x: [x * level for level in range(levels)])
    for rows in range(2, 9):
        x = torch.randn(rows, 3)
        assert_close(DataParallel(model, TWO)(x), model(x))


def test_gather_refuses_lists_that_may_be_detections():
    """Gather has no row counts. It joins lists of feature maps, and refuses lists of tensors of other sizes."""
    x, y = torch.ones(2, 4), torch.zeros(1, 4)
    assert_close(gather([[x, x], [y, y]], "cpu"), [torch.cat([x, y])] * 2)
    with pytest.raises(GatherError, match="may have one item per row"):
        gather([[x, y], [y, x]], "cpu")
    assert_close(gather([(x, y), (y, x)], "cpu"), (torch.cat([x, y]), torch.cat([y, x])))  # the cure


def test_a_count_of_each_lane_is_refused():
    """Two lanes that both count 3 rows are 6."""
    with pytest.raises(GatherError, match=r'output\["n"\].*two lanes that both count 3 are 6'):
        DataParallel(Returns(lambda x: {"n": len(x)}), TWO)(torch.zeros(6, 2))


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_outputs_of_different_scales_are_refused():
    """torch.cat would give all rows the scale of lane 0. The cure of the error works."""

    def quantized(x):
        return torch.quantize_per_tensor(x, float(x.max()) / 255, 0, torch.quint8)

    x = torch.cat([torch.ones(3, 2), torch.full((3, 2), 100.0)])
    with pytest.raises(GatherError, match=r"different scales.*Return tensor.dequantize\(\)"):
        DataParallel(Returns(quantized), TWO)(x)
    with pytest.raises(GatherError, match="different scales"):
        gather([quantized(x[:3]), quantized(x[3:])], "cpu")
    assert_close(DataParallel(Returns(lambda x: quantized(x).dequantize()), TWO)(x), x)
    one_scale = Returns(lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8))
    assert_close(DataParallel(one_scale, TWO)(x).dequantize(), x)


class Words:
    """An output of an unknown class."""

    def __init__(self, rows):
        self.rows = rows


def test_the_cure_for_an_object_in_an_output_works():
    """The error names register_split with its arguments."""
    model = Returns(lambda x: {"words": Words(x.tolist())})
    x = torch.arange(5.0)
    with pytest.raises(GatherError, match=r"register_split\(Words, split=\.\.\., join=\.\.\., rows=\.\.\.\)"):
        DataParallel(model, TWO)(x)

    def put_together(parts):
        return Words([row for part in parts for row in part.rows])

    register_split(Words, split=None, join=put_together, rows=lambda words: len(words.rows))
    assert DataParallel(model, TWO)(x)["words"].rows == x.tolist()


def test_a_generator_among_the_arguments_is_drawn_from_in_lane_order():
    """Lanes that get the same generator run one after another: one seed gives one result."""
    net = DataParallel(Returns(lambda x, generator: x + torch.rand(x.shape, generator=generator)), TWO)
    x = torch.zeros(4, 1)
    expected = torch.rand(4, 1, generator=torch.Generator().manual_seed(0))
    for _ in range(300):
        assert torch.equal(net(x, torch.Generator().manual_seed(0)), expected)


def test_an_error_in_a_lane_names_its_rows_and_the_whole_arguments():
    """A list of lengths goes whole to every lane, as in torch; the note of the model's error says so."""
    net = DataParallel(Returns(lambda x, lengths, scale: x[lengths[len(x)]]), TWO)
    with pytest.raises(IndexError) as caught:
        net(torch.zeros(4, 2), [9, 9, 9, 9], scale=2)
    note = 'in lane 0 on cpu, shard 0 of 2: 2 of 4 rows. Every lane got args[1], kwargs["scale"] whole'
    assert caught.value.__notes__[0] == note


def test_a_call_without_tensors_runs_once_per_device():
    """As in torch, values that are not cut go to every device, and outputs are joined."""
    net = Returns(lambda number: torch.full((1,), number))
    assert data_parallel(net, (2.0,), TWO).tolist() == [2.0, 2.0]


def test_tuple_fn_draws_in_lane_order_or_warns():
    """Parts that require gradients run one after another; others get a warning if the function draws."""
    dropout = tuple_fn(nn.functional.dropout, parallel=True)
    part = torch.ones(100, 4, requires_grad=True)
    torch.manual_seed(0)
    first, second = nn.functional.dropout(part), nn.functional.dropout(part)
    for _ in range(50):
        torch.manual_seed(0)
        assert torch.equal(torch.stack(dropout((part, part))), torch.stack([first, second]))
    with pytest.warns(UserWarning, match="drew from it at the same time"):
        dropout((part.detach(), part.detach()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuple_fn(torch.neg, parallel=True)((part.detach(), part.detach()))[0].sum() == -400
