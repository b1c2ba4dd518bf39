"""The outputs that DataParallel and gather join, and those that they refuse: no row is lost or
mixed up.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, GatherError, TupleParallel, cat, default_collate, parallel
from parawrap.backends import ignore_speed_warnings
from tests.helpers.calling import Calls
from tests.helpers.cures import options_of
from tests.helpers.same import assert_same

TWO = ["cpu"] * 2
ROWS = [4, 5, 6, 8, 10]


def labels(x):
    return x.argmax(1).tolist()


JOINED = {
    # As many layers as rows
    "tensors": lambda x: {"y": x, "past": [(x + layer, x * 2) for layer in range(4)]},
    "two layers": lambda x: [x, x * 2],
    "heads": lambda x: [None, x, x.long()[:, :1]],
    "lists": lambda x: [x, x.sum(1, keepdim=True), [x * 2]],
    "nothing": lambda x: (None, [None, None], [], x),
}
ITEMS = {  # lists with one item per row
    "numbers": labels,
    "dicts": lambda x: [{"score": 1.0, "name": None} for _ in x],
    "boxes": lambda x: [
        {"boxes": torch.ones(1 + i, 4), "labels": torch.full((1 + i,), i)} for i in labels(x)
    ],
    "equal boxes": lambda x: [row.repeat(7, 1) for row in x],
    "scores": lambda x: [{"score": row.sum()} for row in x],
    "sums": lambda x: [row.sum() for row in x],
    "rows": lambda x: [*x],
}
OTHERS = {
    "in a dict": lambda x: {"ids": ["a"] * len(x), "y": x},
    "pairs": lambda x: tuple((int(i), 1.0, "a", None, 0) for i in x.argmax(1)),
    "columns": lambda x: (labels(x), ["a"] * len(x)),
    "boxes or None": lambda x: [
        {"boxes": row.repeat(1 + i, 1), "mask": None} for i, row in enumerate(x)
    ],
    "keys": lambda x: [{i: row[None]} for i, row in zip(labels(x), x, strict=True)],
    "vectors": lambda x: [x.sum(1), x.mean(1)],  # or two rows, if each lane has two
    "stacks": lambda x: {"out": [{"hm": x}, {"hm": x * 2}]},
    "mixed": lambda x: [{"y": x}, (x, x)],
}


@pytest.mark.parametrize("name", [*JOINED, *ITEMS, *OTHERS])
def test_lists_are_joined_or_refused(name):
    """Lists of tensors with the rows are joined item by item; others are refused, with cures that
    work.

    A list of one structure is joined whatever the number of rows, or refused whatever it is.
    """
    model = Calls((JOINED | ITEMS | OTHERS)[name])
    net = DataParallel(model, TWO)
    for rows in (1, *ROWS) if name in OTHERS else ROWS:
        x = torch.eye(4)[torch.arange(rows) % 2]
        if name in JOINED or rows == 1:
            assert_same(net(x), model(x))
            continue
        with pytest.raises(GatherError, match=r"parallel\(model, devices") as refused:
            net(x)
        if name in ITEMS:
            cure = options_of(str(refused.value))
            with torch.no_grad(), parallel(model, TWO, **cure) as p:
                assert_same(p(x), model(x))
    net.close()


class Attributions(torch.nn.Module):
    """Keeps the outputs of a layer under the layer itself, as captum does: its hooks hold the layer
    in their cells.
    """

    def __init__(self, net, layer):
        super().__init__()
        self.net, self.saved = net, {}

        def wrap(original):
            return lambda _module, _inputs, output: self.saved.setdefault(original, []).append(
                output.detach()
            )

        layer.register_forward_hook(wrap(layer))


def test_hooks_keep_their_cells():
    """A hook finds the original layer in its closure, as in torch.nn.DataParallel, and not the
    replica that calls it.
    """
    layer = torch.nn.Linear(3, 2)
    kept = Attributions(torch.nn.Sequential(layer, torch.nn.ReLU()), layer)
    x = torch.randn(6, 3)
    with torch.no_grad():
        DataParallel(kept.net, TWO)(x)
    assert list(kept.saved) == [layer]
    found = torch.cat(kept.saved[layer])  # in the order of the lanes' ends
    assert_close(found.sort(0).values, layer(x).detach().sort(0).values)


# -- lists of dicts: auxiliary outputs of DETR, stacks of CenterNet, boxes of images


class Detr(nn.Module):
    """Returns the outputs of its last layer, and those of the other layers in a list."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))

    def forward(self, images):
        x, found = images[:, None].repeat(1, 4, 1), []
        for layer in self.layers:
            x = layer(x).tanh()
            found.append({"pred_logits": x, "pred_boxes": x[..., :2].sigmoid()})
        return {**found[-1], "aux_outputs": found[:-1]}


@pytest.mark.parametrize("layers", [3, 4, 5, 6])
@pytest.mark.parametrize("rows", ROWS)
def test_auxiliary_outputs(rows, layers):
    """Auxiliary outputs are joined item by item, also with as many layers as rows in a lane."""
    model, images = Detr(layers), torch.randn(rows, 3)
    plain = model(images)
    parts = default_collate(2)(list(images))
    tuples = TupleParallel(model, TWO)
    for outputs in (
        DataParallel(model, TWO)(images),
        TupleParallel(model, TWO, reduction=cat)(parts),
        cat(tuples(parts)),
    ):
        assert_close(outputs, plain)
    with parallel(model, TWO, out_dims=0):
        assert_close(model(images), plain)


def test_boxes_next_to_other_boxes():
    """Items that differ in shape from the tensors next to the list are not its
    auxiliary outputs.
    """
    x = torch.arange(8.0).view(4, 2)
    model = Calls(
        lambda x: {"boxes": x[:, :1], "images": [{"boxes": row.repeat(2, 1)} for row in x]}
    )
    with pytest.raises(GatherError, match="one item per row, or parts of every row"):
        DataParallel(model, TWO)(x)
    with pytest.raises(GatherError, match="one item per row, or all rows in each item"):
        TupleParallel(model, TWO, reduction=cat)(x.split(2))
    with ignore_speed_warnings(), parallel(model, TWO) as p:
        assert_close(p(x), model(x))


class CenterNet(nn.Module):
    """Returns one dict per stack."""

    def __init__(self, stacks, kind=list):
        super().__init__()
        self.stacks, self.kind = nn.ModuleList(nn.Linear(3, 3) for _ in range(stacks)), kind

    def forward(self, images):
        return self.kind({"hm": stack(images), "wh": stack(images)[:, :2]} for stack in self.stacks)


@pytest.mark.parametrize("rows", ROWS)
def test_lists_with_a_dict_per_stack(rows):
    """DataParallel refuses a list of dicts, and `cat` refuses one with as many dicts as rows.

    The cures of the message work with any number of rows.
    """
    model, images = CenterNet(2), torch.randn(rows, 3)
    parts = images.tensor_split(2)
    with pytest.raises(GatherError, match="Return a tuple"):
        DataParallel(model, TWO)(images)
    joined = TupleParallel(model, TWO, reduction=cat)
    if rows == 4:
        with pytest.raises(GatherError, match="Return a tuple"):
            joined(parts)
    else:
        assert_close(joined(parts), model(images))
    as_tuple = CenterNet(2, tuple)
    assert_close(DataParallel(as_tuple, TWO)(images), as_tuple(images))
    assert_close(TupleParallel(as_tuple, TWO, reduction=cat)(parts), as_tuple(images))
    with ignore_speed_warnings(), parallel(model, TWO) as p:
        assert_close(p(images), model(images))


@pytest.mark.parametrize("boxes", [2, 4])
def test_lists_of_images(boxes):
    """Boxes of different images are never put together."""
    model = Calls(lambda images: [{"boxes": image.sum().expand(boxes, 4)} for image in images])
    images = [torch.full((3, 2, 2), float(number)) for number in range(4)]
    net = TupleParallel(model, TWO, reduction=cat)
    if boxes == 4:
        assert_close(net((images[:2], images[2:])), model(images))
    else:  # as many boxes as images in a lane
        with pytest.raises(GatherError, match="one item per row, or all rows in each item"):
            net((images[:2], images[2:]))
