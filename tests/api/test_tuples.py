"""`cat`, `transpose`, `Tuplewise`, `recursive_to`, `recursive_cuda`, `cuda_attrs`, and `Batch`."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parawrap import Batch, Tuplewise, cat, cuda_attrs, recursive_cuda, recursive_to, transpose
from parawrap.errors import GatherError, ShardError

Output = namedtuple("Output", ["logits", "hidden"])
Edge = namedtuple("Edge", ["start", "to"])


class Recorder:
    """A value that records how it was moved."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def cuda(self, *args, **kwargs):
        self.calls.append(("cuda", args, kwargs))
        return self

    def to(self, *args, **kwargs):
        self.calls.append(("to", args, kwargs))
        return self

    def pin_memory(self):
        self.calls.append(("pin_memory", (), {}))
        return self


class OnlyTo:
    """A value with `to` but without `cuda`."""

    def to(self, device, *, non_blocking=False):
        self.moved = (device, non_blocking)
        return self


class Forgetful:
    """A value with `to` and `cuda` methods that return None."""

    def to(self, device):
        self.device = device

    cuda = to


class Pair(Batch):
    """A batch with two attributes."""

    def __init__(self, x, y) -> None:
        self.x, self.y = x, y


# -- cat


def test_cat_joins_a_tuple_of_tensors_on_dim_0():
    """One output per device becomes one tensor with the rows in order."""
    assert torch.equal(cat((torch.arange(3), torch.arange(3, 5))), torch.arange(5))


def test_cat_joins_on_another_dim():
    """`dim` may be negative."""
    parts = (torch.zeros(2, 3), torch.ones(2, 1))
    assert cat(parts, dim=1).shape == (2, 4)
    assert cat(parts, dim=-1).shape == (2, 4)


def test_cat_joins_each_tuple_of_a_tuple():
    """A tuple ((a1, a2), (b1, b2)), as TupleParallel returns it, becomes (a, b)."""
    a, b = cat(((torch.zeros(1), torch.ones(2)), [torch.zeros(1, 3), torch.ones(2, 3)]))
    assert a.tolist() == [0, 1, 1]
    assert b.shape == (3, 3)


def test_cat_stacks_scalars_into_a_vector():
    """0-d losses become a vector with one loss per device."""
    assert cat((torch.tensor(1.0), torch.tensor(2.0))).tolist() == [1, 2]


def test_cat_keeps_gradients():
    """Gradients flow from the joined output to every part."""
    parts = tuple(torch.ones(n, requires_grad=True) for n in (2, 1))
    cat(parts).sum().backward()
    assert all(torch.equal(part.grad, torch.ones_like(part)) for part in parts)


def test_cat_joins_dicts_per_key_and_tuples_per_position():
    """A tuple of dicts becomes one dict. Nested tuples stay tuples."""
    joined = cat(({"x": torch.zeros(1), "h": (torch.zeros(1),)}, {"h": (torch.ones(1),), "x": torch.ones(1)}))
    assert list(joined) == ["x", "h"]
    assert joined["h"][0].tolist() == [0, 1]
    assert isinstance(joined["h"], tuple)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["r0", "r1"], ["r2", "r3"]),
        (["r0", "r1"], ["r2"]),
        ([{"boxes": 1}], [{"boxes": 2}]),
        ([torch.zeros(2, 4), torch.zeros(2, 4)], [torch.ones(2, 4), torch.ones(2, 4)]),
        ([torch.zeros(2, 4)], [torch.ones(1, 4), torch.ones(3, 4)]),
    ],
    ids=["texts", "a short part", "dicts", "tensors of one size", "tensors"],
)
def test_cat_puts_lists_per_row_together(first, second):
    """A list in a part has one item per row: no item is lost, and their order is that of the rows."""
    in_dicts = cat(({"ids": first}, {"ids": second}))
    transposed = cat({"ids": (first, second)})
    assert [*map(id, in_dicts["ids"])] == [*map(id, transposed["ids"])] == [*map(id, (*first, *second))]


def test_cat_puts_lists_of_texts_together():
    """Lists without tensors are parts, also outside a dict."""
    assert cat((["r0", "r1"], ["r2"])) == ["r0", "r1", "r2"]


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("per_channel", [False, True])
def test_cat_refuses_quantized_parts_of_different_scales(per_channel):
    """torch.cat takes the scale of the first part for all. Parts of one scale are joined."""

    def quantized(scale):
        x = torch.full((2, 3), 1.0)
        if per_channel:
            return torch.quantize_per_channel(x, torch.full((3,), scale), torch.zeros(3), 1, torch.quint8)
        return torch.quantize_per_tensor(x, scale, 0, torch.quint8)

    with pytest.raises(GatherError, match=r"different scales, or per channel. Return tensor.dequantize\(\)"):
        cat((quantized(0.1), quantized(1.0)))
    if not per_channel:
        assert cat((quantized(0.5), quantized(0.5))).dequantize().tolist() == [[1.0] * 3] * 4


def test_cat_joins_namedtuples_inside_or_outside():
    """A tuple of namedtuples and a namedtuple of tuples give the same namedtuple."""
    one, two = torch.zeros(1), torch.ones(1)
    parts = cat((Output(one, one), Output(two, two)))
    turned = cat(Output((one, two), (one, two)))
    assert isinstance(parts, Output)
    assert isinstance(turned, Output)
    assert torch.equal(parts.hidden, turned.hidden)


def test_cat_joins_a_dict_of_tuples():
    """A dict of tuples, as tp_collate returns it, becomes a dict of tensors."""
    assert cat({"x": (torch.zeros(1), torch.ones(1))})["x"].tolist() == [0, 1]


def test_cat_keeps_none_and_tuples_of_other_values():
    """Parts that are all None become None. Values that cannot be joined stay a tuple."""
    assert cat(({"past": None, "n": 3}, {"past": None, "n": 4})) == {"past": None, "n": (3, 4)}
    assert cat((("a", "b"), (None, None))) == (("a", "b"), None)


def test_cat_keeps_tuples_of_packed_sequences():
    """PackedSequences are not joined field by field, although they are namedtuples."""
    packed = pack_sequence([torch.zeros(2)])
    assert cat((packed, packed)) == (packed, packed)


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ((), "output: it has no parts"),
        ((torch.zeros(1), None), "output: part 1 is None, part 0 is of type Tensor"),
        (({"x": torch.zeros(1)}, {"y": torch.zeros(1)}), "output: part 1 has the keys ['y'], part 0 has ['x']"),
        (({"h": (1,)}, {"h": (1, 2)}), "output['h']: part 1 has 2 items, part 0 has 1"),
        ((Output(1, 2), {"x": 1}), "output: part 1 is of type dict, part 0 is of type Output"),
        ((({"x": 1}, {"x": 2}), ({"x": 1}, (2,))), "output[1]: part 1 is of type tuple, part 0 is of type dict"),
        (((torch.zeros(1), torch.zeros(1)), (torch.zeros(1),)), "different numbers of parts: {0: 2, 1: 1}"),
        (((torch.zeros(1),), torch.zeros(1)), "output[1]: it is of type Tensor. Give the tuple of its parts"),
        ((torch.zeros(2, 3), torch.zeros(2, 4)), "output: shapes (2, 3), (2, 4) differ beyond dim 0"),
        ((torch.zeros(2, 3), torch.tensor(0)), "output: shapes (2, 3), () differ"),
    ],
)
def test_cat_refuses_unequal_structures(returns, words):
    """The GatherError names the place and both structures."""
    with pytest.raises(GatherError) as caught:
        cat(returns)
    assert words in str(caught.value)


def test_cat_refuses_a_dim_out_of_range():
    """The GatherError names the shape."""
    with pytest.raises(GatherError, match=r"shape \(2,\) has no dim 1"):
        cat((torch.zeros(2), torch.zeros(2)), dim=1)


# -- transpose


def test_transpose_turns_rows_into_columns():
    """Rows that are lists or tuples give a tuple of tuples."""
    assert transpose([[1, 2], (3, 4), [5, 6]]) == ((1, 3, 5), (2, 4, 6))


def test_transpose_accepts_an_iterator():
    """The rows are read only once."""
    assert transpose(zip("ab", "cd", strict=True)) == (("a", "b"), ("c", "d"))


def test_transpose_turns_dicts_into_a_dict_of_tuples():
    """Keys may be in any order; the result has the first row's order."""
    assert transpose([{"x": 1, "y": 2}, {"y": 4, "x": 3}]) == {"x": (1, 3), "y": (2, 4)}


def test_transpose_keeps_the_type_of_namedtuples_and_mappings():
    """A namedtuple or Mapping keeps its type, and the rows do not change."""
    assert transpose([Output(1, 2), Output(3, 4)]) == Output((1, 3), (2, 4))
    rows = [UserDict(x=1), UserDict(x=2)]
    turned = transpose(rows)
    assert isinstance(turned, UserDict)
    assert turned == {"x": (1, 2)}
    assert rows[0] == {"x": 1}


def test_transpose_of_an_empty_list():
    """An empty list gives an empty tuple."""
    assert transpose([]) == ()


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[st.integers()] * n), min_size=1)))
def test_transpose_is_its_own_inverse(rows):
    """Transposing twice gives the rows again."""
    assert transpose(transpose(rows)) == tuple(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(1, 2), (1, 2), (1, 2, 3)], "row 2 has 3 items, row 0 has 2"),
        ([(1, 2), (1,)], "row 1 has 1 item, row 0 has 2"),
        ([{"x": 1}, {"z": 1}], "row 1 has the keys ['z'], row 0 has ['x']"),
        ([(1,), {"x": 1}], "row 1 is of type dict, row 0 is of type tuple"),
        ([(1,), 3], "row 1 is of type int. Give every row as a tuple, a list, or a dict"),
    ],
)
def test_transpose_refuses_ragged_rows(rows, words):
    """Rows with different items raise ShardError, which names both rows, instead of dropping items as zip does."""
    with pytest.raises(ShardError) as caught:
        transpose(rows)
    assert words in str(caught.value)


# -- Tuplewise


def test_tuplewise_indexes_each_item():
    """Indexing indexes every item, as in the documentation of tuple_parallel."""
    assert Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4]


def test_tuplewise_reads_attributes_of_and_calls_each_item():
    """Attributes and calls apply to every item and can be chained."""
    parts = Tuplewise([torch.zeros(2), torch.ones(3)])
    assert parts.shape[0] == (2, 3)
    assert parts.add(1).sum().item() == [2, 6]
    assert isinstance(parts.shape, Tuplewise)


def test_tuplewise_sets_attributes_of_each_item():
    """Setting an attribute sets it on every item."""
    items = [SimpleNamespace(a=1), SimpleNamespace(a=2)]
    Tuplewise(items).a = 5
    assert [item.a for item in items] == [5, 5]


def test_tuplewise_is_a_sequence_of_its_items():
    """Iteration, `len`, `repr`, and comparison apply to the sequence, not to its items."""
    parts = Tuplewise(iter("ab"))
    assert list(parts) == ["a", "b"]
    assert len(parts) == 2
    assert repr(parts) == "Tuplewise(['a', 'b'])"
    assert parts != [1]
    assert parts != "ab"
    assert not Tuplewise([])


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_tuplewise_can_be_copied_and_pickled(through):
    """`__getattr__` does not recurse on an instance that has no items yet."""
    assert through(Tuplewise([[1], [2]])) == [[1], [2]]


def test_tuplewise_notes_the_item_that_failed():
    """An item's exception keeps its type and gains a note with the item's index."""
    with pytest.raises(AttributeError) as caught:
        _ = Tuplewise([torch.zeros(1), 3]).shape
    assert caught.value.__notes__ == ["in item 1 of a Tuplewise of 2"]
    assert not hasattr(Tuplewise([1]), "__array__")


def test_recursive_to_moves_the_items_of_a_tuplewise():
    """recursive_to moves each tensor of a Tuplewise."""
    assert recursive_to(Tuplewise([torch.zeros(1)]), torch.float64).dtype == [torch.float64]


# -- moving to devices and dtypes


def test_recursive_to_walks_lists_tuples_namedtuples_and_dicts():
    """Tensors at any depth are moved; other values, order, and container types stay the same."""
    value = {"b": [torch.zeros(1), "text", None], "a": Output((torch.zeros(1), 3), OrderedDict(x=torch.zeros(1)))}
    moved = recursive_to(value, torch.float64)
    assert list(moved) == ["b", "a"]
    assert moved["b"][0].dtype is moved["a"].hidden["x"].dtype is moved["a"].logits[0].dtype is torch.float64
    assert moved["b"][1:] == ["text", None]
    assert isinstance(moved["a"], Output)
    assert isinstance(moved["a"].hidden, OrderedDict)
    assert value["b"][0].dtype is torch.float32


@pytest.mark.parametrize("cls", [UserDict, MappingProxyType, type("Named", (dict,), {})])
def test_recursive_to_keeps_mapping_subclasses(cls):
    """A Mapping of another type than dict keeps its type."""
    moved = recursive_to([cls({"x": torch.zeros(1)})], torch.float64)[0]
    assert type(moved) is cls
    assert moved["x"].dtype is torch.float64


def test_recursive_to_uses_a_containers_own_to():
    """A PackedSequence is moved by its own `to`, so its batch sizes stay int64."""
    moved = recursive_to([pack_sequence([torch.zeros(2), torch.zeros(1)])], torch.float64)[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.dtype is torch.float64
    assert moved.batch_sizes.dtype is torch.int64


def test_recursive_to_ignores_fields_named_to_and_classes():
    """A field named `to` is not called, and a class among the values stays the same."""
    moved = recursive_to([Edge(torch.zeros(1), torch.ones(1)), torch.nn.Linear], torch.float64)
    assert moved[0].to.dtype is torch.float64
    assert moved[1] is torch.nn.Linear


def test_recursive_to_passes_kwargs_on():
    """Keyword arguments such as `non_blocking` are passed to the value's `to`."""
    assert recursive_to((OnlyTo(),), "cpu", non_blocking=True)[0].moved == ("cpu", True)


def test_recursive_cuda_falls_back_to_to():
    """A value is moved by `cuda` if it has one, otherwise by `to`, and otherwise stays the same."""
    recorder, only_to, other = recursive_cuda([Recorder(), OnlyTo(), 3], 1, non_blocking=True)
    assert recorder.calls == [("cuda", (1,), {"non_blocking": True})]
    assert only_to.moved == (1, True)
    assert other == 3


def test_recursive_cuda_uses_the_current_device_by_default(monkeypatch):
    """Without `device`, values go to torch.cuda.current_device(), or to "cuda" if CUDA is not available."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert recursive_cuda(Recorder()).calls == [("cuda", (3,), {})]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recursive_cuda(OnlyTo()).moved == ("cuda", False)


@pytest.mark.parametrize(("move", "name"), [(recursive_to, "to"), (recursive_cuda, "cuda")])
def test_a_move_that_returns_none_raises(move, name):
    """A `to` or `cuda` without `return self` raises TypeError, which names the class."""
    with pytest.raises(TypeError, match=rf"Forgetful\.{name}\(\) returned None\. End it with `return self`"):
        move([Forgetful()], "cpu")


def test_cuda_attrs_moves_in_place_and_returns_the_object():
    """Tensors in attributes are moved, at any depth."""
    obj = SimpleNamespace(a=Recorder(), b=[Recorder()], c="text")
    assert cuda_attrs(obj, 0, non_blocking=True) is obj
    assert obj.a.calls == obj.b[0].calls == [("cuda", (0,), {"non_blocking": True})]


def test_cuda_attrs_that_fails_replaces_nothing():
    """If one attribute cannot be moved, no attribute changes."""
    obj = SimpleNamespace(a=[1], b=Forgetful())
    before = obj.a
    with pytest.raises(TypeError):
        cuda_attrs(obj, 0)
    assert obj.a is before


def test_batch_moves_every_attribute_and_returns_itself():
    """`to` and `cuda` move every attribute, also nested batches."""
    batch = Pair(torch.zeros(1), {"inner": Pair(torch.zeros(1), Recorder())})
    assert recursive_to((batch,), torch.float64)[0] is batch
    assert batch.x.dtype is batch.y["inner"].x.dtype is torch.float64
    recorders = Pair(Recorder(), Recorder())
    assert recorders.cuda(2) is recorders
    assert recorders.x.calls == recorders.y.calls == [("cuda", (2,), {})]


def test_batch_pins_every_attribute():
    """`pin_memory`, which DataLoader calls, pins every attribute."""
    batch = Pair([Recorder()], "text")
    assert batch.pin_memory() is batch
    assert batch.x[0].calls == [("pin_memory", (), {})]


def test_batch_moves_slots_too():
    """A dataclass with slots is moved like any other batch."""

    @dataclass(slots=True)
    class Slotted(Batch):
        x: torch.Tensor

    assert Slotted(torch.zeros(1)).to(torch.float64).x.dtype is torch.float64
