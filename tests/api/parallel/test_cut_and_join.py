"""What the rules for cutting and joining refuse, with cures that work, and what lanes may write
into their rows.
"""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from parawrap import GatherError, ShardError, TupleParallel, parallel, register_split
from tests.helpers.calling import Stateful
from tests.helpers.cures import cures_of, options_of

# Of small batches
pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
TWO = ["cpu"] * 2


def refused(error, target, *args, options=None, **kwargs):
    """Return the message of the error of a cut call."""
    with parallel(target, TWO, **(options or {})) as p, pytest.raises(error) as caught:
        p(*args, **kwargs)
    return str(caught.value)


# Rows that lanes write into


def write_under_no_grad(model, x):
    with torch.no_grad():
        x.clamp_(min=0)
    return x * model.bias


WRITES = {
    "a parameter": lambda model, x: x.add_(model.bias),
    "ReLU": lambda model, x: torch.relu_(x) * model.bias,
    "a view": lambda model, x: x[:, 0].mul_(2) * model.bias[0],
    "without a graph": write_under_no_grad,
    "nothing": lambda model, x: x * model.bias,
}
INPUTS = {
    "constant": lambda start: start.detach(),
    "transposed": lambda start: start.detach().T.contiguous().T,
    "with a graph": lambda start: start * 2,
    "transposed, with a graph": lambda start: start.T.contiguous().T * 2,
}


def model_that(write):
    """Return a model that writes into its input, as a first layer with ``inplace=True`` does."""
    return Stateful(WRITES[write], bias=nn.Parameter(torch.tensor([0.5, -1.0, 2.0])))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("source", INPUTS)
def test_writes_into_rows(write, source):
    """Output, gradients, also of what made the rows, and the changed argument are those of the
    plain call.
    """
    found = []
    for lanes in (1, 2, 3):
        model, start = model_that(write), torch.arange(-10.0, 11).view(7, 3).requires_grad_()
        x = INPUTS[source](start)
        with parallel(model, ["cpu"] * lanes):
            y = model(x)
        loss = y.square().sum() + (x * 3).sum()
        found.append(
            (
                y,
                x,
                x.requires_grad,
                torch.autograd.grad(loss, [model.bias, start], materialize_grads=True),
            )
        )
    for other in found[1:]:
        assert_close(other, found[0])


def test_torch_refuses_writes_into_leaves():
    model, x = model_that("a parameter"), torch.zeros(7, 3, requires_grad=True)
    with parallel(model, TWO), pytest.raises(RuntimeError, match="leaf Variable"):
        model(x)


def test_parts_keep_their_memory_format():
    x = torch.randn(7, 3, 4, 4).to(memory_format=torch.channels_last)
    with parallel(
        lambda x: (x + 0, x.is_contiguous(memory_format=torch.channels_last)),
        TWO,
        out_dims=(0, None),
    ) as p:
        assert p(x)[1]


def test_inference_tensors_are_arguments():
    with torch.inference_mode():
        x = torch.ones(7, 3)
    with parallel(lambda x: x * 2, TWO) as p:
        assert p(x).tolist() == [[2.0] * 3] * 7


# Attributes of tensors


class Boxes(torch.Tensor):
    """A tensor with attributes, as torchvision's."""


def boxes(*shape):
    value = torch.ones(shape).as_subclass(Boxes)
    value.canvas = (8, 8)
    return value


def area(found):
    return found.as_subclass(torch.Tensor).sum(1) * getattr(found, "canvas", [1])[0]


def test_attributes_of_tensors_are_refused():
    """A tensor with attributes is refused, also after a call of the same shape without them. Size-1
    tensors go whole, and keep theirs.
    """
    noted = torch.ones(5, 4)
    with parallel(area, TWO) as p:
        p(torch.ones(5, 4))
        noted.canvas = (8, 8)
        for value, says in ((boxes(5, 4), r"register_split\(Boxes"), (noted, "register_split")):
            for call in (lambda value=value: p(value), lambda value=value: p(found=value)):
                with pytest.raises(
                    ShardError, match=rf"attributes of its own \(canvas\).*{says}.*in_dims"
                ) as caught:
                    call()
        assert cures_of(str(caught.value)) == [{"found": None}]
    with parallel(lambda x, found: x + found.canvas[0], TWO) as p:
        assert p(torch.zeros(5), boxes(1)).tolist() == [8.0] * 5
    with parallel(lambda x, found: x + found.canvas[0], TWO, in_dims={"found": None}) as p:
        assert p(torch.zeros(5), boxes(5)).tolist() == [8.0] * 5


def test_attributes_of_outputs_are_refused():
    def target(x):
        y = x + 1
        y.scale = 2
        return y

    for output in (target, lambda x: {"y": target(x)}):
        message = refused(GatherError, output, torch.zeros(5))
        assert "attributes of their own (scale)" in message
        assert "register_split" in message
    with parallel(lambda x: (x + 1, {"scale": 2}), TWO, out_dims=(0, None)) as p:
        assert p(torch.zeros(5))[1] == {"scale": 2}


def test_registered_tensors_keep_attributes():
    class Kept(torch.Tensor):
        """A class of its own, since rules stay registered."""

    def with_canvas(part, canvas):
        part = part.as_subclass(Kept)
        part.canvas = canvas
        return part

    def split(value, sizes):
        return [
            with_canvas(part, value.canvas)
            for part in value.as_subclass(torch.Tensor).split(list(sizes))
        ]

    register_split(
        Kept, split=split, join=lambda parts: with_canvas(torch.cat(list(parts)), parts[0].canvas)
    )
    value = with_canvas(torch.ones(5, 4), (8, 8))
    with parallel(area, TWO) as p:
        assert_close(p(value), area(value))
        assert len(p.stats().shards) == 2
    with parallel(lambda found: found, TWO) as p:
        assert p(value).canvas == (8, 8)


# Mappings of tensors


class Encoding(UserDict):
    """Like BatchEncoding of transformers."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self._encodings = encodings
        self._n_sequences = None

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize("encodings", [None, [object() for _ in range(5)]], ids=["slow", "fast"])
def test_a_batch_encoding_is_cut(encodings):
    """A cut batch encoding keeps its class, and its list with one item per row follows the rows."""
    seen = []

    def target(batch, scale):
        seen.append((type(batch), batch._encodings and len(batch._encodings), len(batch.ids)))
        return {"y": batch["ids"].sum(1) * scale, "batch": batch}

    batch = Encoding({"ids": torch.arange(10).view(5, 2), "mask": torch.ones(5, 2)}, encodings)
    with parallel(target, TWO) as p:
        found = p(batch, 2)
        assert p.stats().shards == (3, 2)
    assert sorted(size for _, _, size in seen) == [2, 3]
    assert {kind for kind, _, _ in seen} == {Encoding}
    assert all(count in (None, size) for _, count, size in seen)
    assert_close(found["y"], target(batch, 2)["y"])
    assert_close(found["batch"].ids, batch.ids)
    assert found["batch"]._encodings == encodings


# Cures


def test_a_dict_of_parameters_needs_one_try():
    """The error of MAML's call names every parameter, and its first cure works."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    params = dict(model.named_parameters())

    def target(params, x):
        return functional_call(model, params, (x,))

    for rows in (7, 12):
        x = torch.randn(rows, 3)
        message = refused(ShardError, target, params, x)
        assert all(f'args[0]["{name}"]' in message for name in params)
        for cure in cures_of(message)[:1]:
            assert cure == {"params": None}
            with parallel(target, TWO, in_dims=cure) as p:
                assert_close(p(params, x), target(params, x))
                assert len(p.stats().shards) == 2


def test_all_keys_are_named_at_once():
    def target(batch, labels):
        return batch["x"] * labels[:, None] + batch["table"].sum() + batch["other"].sum()

    batch = {
        "x": torch.randn(7, 2),
        "also": torch.ones(7),
        "table": torch.ones(4),
        "other": torch.ones(5),
    }
    message = refused(ShardError, target, batch, labels=torch.ones(7))
    cure = {"batch": {"table": None, "other": None}}
    assert cure in cures_of(message)
    with parallel(target, TWO, in_dims=cure) as p:
        assert_close(p(batch, labels=torch.ones(7)), target(batch, torch.ones(7)))
    message = refused(
        ShardError, target, batch, options={"in_dims": {"labels": None}}, labels=torch.ones(1)
    )
    assert {"labels": None} | cure in cures_of(message)


def test_all_lists_are_named_at_once():
    def target(x, names, flags):
        return x * len(names) + len(flags)

    x, names, flags = torch.ones(7), list("abcdefg"), [object()] * 7
    message = refused(ShardError, target, x, names, flags)
    assert cures_of(message) == [
        {"names": "items", "flags": "items"},
        {"names": None, "flags": None},
    ]
    for cure, expected in zip(cures_of(message), ([8.0] * 4 + [6.0] * 3, [14.0] * 7), strict=True):
        with parallel(target, TWO, in_dims=cure) as p:
            assert p(x, names, flags).tolist() == expected


def test_offsets_into_another_argument():
    bag = nn.EmbeddingBag(10, 3)
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 4])
    with torch.no_grad():
        plain = bag(indices, offsets)
        with parallel(bag, TWO) as p:
            with pytest.raises(
                ShardError,
                match=r"offsets into another argument.*`map` of the block, or TupleParallel",
            ):
                bag(indices, offsets)
            assert_close(next(p.map([(indices, offsets)])), plain)
        assert_close(TupleParallel(bag, TWO)((indices, indices), (offsets, offsets))[1], plain)


# Joining


def positive(x):
    return int((x[:, 0] > 0).sum())


BUILT = {
    # a target, and `out_dims` that declare equality
    "text": (lambda x: f"{positive(x)} positive", None),
    "dict": (lambda x: {"y": x, "summary": f"{positive(x)} positive"}, {"y": 0, "summary": None}),
    "tuple": (lambda x: (x, f"{positive(x)} positive"), (0, None)),
    "list": (lambda x: ["dog"] * positive(x), None),
    "list in a dict": (lambda x: {"y": x, "found": ["dog"] * positive(x)}, {"found": None}),
    "dicts": (lambda x: [{"label": "dog"}] * positive(x), None),
    "set": (lambda x: {f"{positive(x)} positive"}, None),
}


@pytest.mark.parametrize(("target", "declared"), BUILT.values(), ids=BUILT)
def test_texts_that_are_equal_by_chance(target, declared):
    """Equal texts of all lanes are refused: one positive row in each shard makes "1 positive"
    twice, which is not "1 positive".

    `out_dims` declares equality.
    """
    x = torch.tensor([[1.0], [0], [0], [0], [0], [1], [0], [0]])
    message = refused(GatherError, target, x)
    assert "None is for one value that is the same in every lane" in message
    for cure in (options_of(message), {"out_dims": declared}):
        with parallel(target, TWO, **cure) as p:
            assert p(x) is not None
