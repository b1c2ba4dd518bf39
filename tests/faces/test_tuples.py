"""Joining, transposing and moving values in tuple form."""

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
    """A value with a .to and no .cuda."""

    def to(self, device, *, non_blocking=False):
        self.moved = (device, non_blocking)
        return self


class Forgetful:
    """A value whose .to and .cuda forget to return it."""

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
    """The dim given is the dim joined on, negative ones included."""
    parts = (torch.zeros(2, 3), torch.ones(2, 1))
    assert cat(parts, dim=1).shape == (2, 4)
    assert cat(parts, dim=-1).shape == (2, 4)


def test_cat_joins_each_of_the_tuples_of_a_tuple_valued_forward():
    """((a1, a2), (b1, b2)), as TupleParallel returns it, becomes (a, b)."""
    a, b = cat(((torch.zeros(1), torch.ones(2)), [torch.zeros(1, 3), torch.ones(2, 3)]))
    assert a.tolist() == [0, 1, 1]
    assert b.shape == (3, 3)


def test_cat_stacks_scalars_into_a_vector():
    """A 0-d loss per device becomes a vector with one loss per device."""
    assert cat((torch.tensor(1.0), torch.tensor(2.0))).tolist() == [1, 2]


def test_cat_keeps_the_gradient():
    """A joined output leads back to every part."""
    parts = tuple(torch.ones(n, requires_grad=True) for n in (2, 1))
    cat(parts).sum().backward()
    assert all(torch.equal(part.grad, torch.ones_like(part)) for part in parts)


def test_cat_joins_dicts_per_key_and_lists_per_position():
    """A tuple of dicts becomes one dict, and deeper lists stay lists."""
    joined = cat(({"x": torch.zeros(1), "h": [torch.zeros(1)]}, {"h": [torch.ones(1)], "x": torch.ones(1)}))
    assert list(joined) == ["x", "h"]
    assert joined["h"][0].tolist() == [0, 1]
    assert isinstance(joined["h"], list)


def test_cat_joins_namedtuples_whichever_way_they_are_turned():
    """A tuple of namedtuples and a namedtuple of tuples join to the same namedtuple."""
    one, two = torch.zeros(1), torch.ones(1)
    parts = cat((Output(one, one), Output(two, two)))
    turned = cat(Output((one, two), (one, two)))
    assert isinstance(parts, Output)
    assert isinstance(turned, Output)
    assert torch.equal(parts.hidden, turned.hidden)


def test_cat_joins_a_dict_of_tuples():
    """What tp_collate makes of a dict joins to that dict."""
    assert cat({"x": (torch.zeros(1), torch.ones(1))})["x"].tolist() == [0, 1]


def test_cat_keeps_none_and_leaves_other_values_in_parts():
    """None is None again; a value that nothing can join stays the tuple of its parts."""
    assert cat(({"past": None, "n": 3}, {"past": None, "n": 4})) == {"past": None, "n": (3, 4)}
    assert cat((("a", "b"), (None, None))) == (("a", "b"), None)


def test_cat_leaves_packed_sequences_in_parts():
    """A PackedSequence, though a namedtuple, is never joined field by field."""
    packed = pack_sequence([torch.zeros(2)])
    assert cat((packed, packed)) == (packed, packed)


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ((), "output: it has no parts"),
        ((torch.zeros(1), None), "output: part 1 is None, part 0 is of type Tensor"),
        (({"x": torch.zeros(1)}, {"y": torch.zeros(1)}), "output: part 1 has the keys ['y'], part 0 has ['x']"),
        (({"h": [1]}, {"h": [1, 2]}), "output['h']: part 1 has 2 items, part 0 has 1"),
        ((Output(1, 2), {"x": 1}), "output: part 1 is of type dict, part 0 is of type Output"),
        ((({"x": 1}, {"x": 2}), ({"x": 1}, (2,))), "output[1]: part 1 is of type tuple, part 0 is of type dict"),
        (((torch.zeros(1), torch.zeros(1)), (torch.zeros(1),)), "unequal numbers of parts: {0: 2, 1: 1}"),
        (((torch.zeros(1),), torch.zeros(1)), "output[1]: it is of type Tensor, not the tuple of its parts"),
        ((torch.zeros(2, 3), torch.zeros(2, 4)), "output: shapes (2, 3), (2, 4) differ elsewhere than on dim 0"),
        ((torch.zeros(2, 3), torch.tensor(0)), "output: shapes (2, 3), () differ"),
    ],
)
def test_cat_refuses_unequal_structures_and_names_the_place(returns, words):
    """Parts that do not fit together raise GatherError with the place and both structures."""
    with pytest.raises(GatherError) as caught:
        cat(returns)
    assert words in str(caught.value)


def test_cat_refuses_a_dim_that_the_tensors_lack():
    """A dim beyond the tensors' raises GatherError with the shape."""
    with pytest.raises(GatherError, match=r"shape \(2,\) has no dim 1"):
        cat((torch.zeros(2), torch.zeros(2)), dim=1)


# -- transpose


def test_transpose_turns_rows_into_columns():
    """Lists and tuples alike give a tuple of tuples."""
    assert transpose([[1, 2], (3, 4), [5, 6]]) == ((1, 3, 5), (2, 4, 6))


def test_transpose_takes_an_iterator_of_rows():
    """Rows that can be walked only once are fine."""
    assert transpose(zip("ab", "cd", strict=True)) == (("a", "b"), ("c", "d"))


def test_transpose_turns_dicts_into_a_dict_of_tuples():
    """Keys may come in any order; the first row's order stays."""
    assert transpose([{"x": 1, "y": 2}, {"y": 4, "x": 3}]) == {"x": (1, 3), "y": (2, 4)}


def test_transpose_keeps_the_type_of_namedtuples_and_mappings():
    """A namedtuple or Mapping subclass comes back as such, and the rows are left alone."""
    assert transpose([Output(1, 2), Output(3, 4)]) == Output((1, 3), (2, 4))
    rows = [UserDict(x=1), UserDict(x=2)]
    turned = transpose(rows)
    assert isinstance(turned, UserDict)
    assert turned == {"x": (1, 2)}
    assert rows[0] == {"x": 1}


def test_transpose_of_nothing_is_nothing():
    """No rows give no columns."""
    assert transpose([]) == ()


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[st.integers()] * n), min_size=1)))
def test_transpose_is_its_own_inverse(rows):
    """Turning twice gives the rows back."""
    assert transpose(transpose(rows)) == tuple(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(1, 2), (1, 2), (1, 2, 3)], "row 2 has 3 items, row 0 has 2"),
        ([(1, 2), (1,)], "row 1 has 1 item, row 0 has 2"),
        ([{"x": 1}, {"z": 1}], "row 1 has the keys ['z'], row 0 has ['x']"),
        ([(1,), {"x": 1}], "row 1 is of type dict, row 0 is of type tuple"),
        ([(1,), 3], "row 1 is of type int: give every row as a tuple, a list or a dict"),
    ],
)
def test_transpose_refuses_ragged_rows_and_names_them(rows, words):
    """Where zip would drop items silently, ShardError names both rows."""
    with pytest.raises(ShardError) as caught:
        transpose(rows)
    assert words in str(caught.value)


# -- Tuplewise


def test_tuplewise_getitem_is_that_of_each_item():
    """The example of tuple_parallel's page holds."""
    assert Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4]


def test_tuplewise_attributes_and_calls_are_those_of_each_item():
    """Methods chain, and every item is called with the same arguments."""
    parts = Tuplewise([torch.zeros(2), torch.ones(3)])
    assert parts.shape[0] == (2, 3)
    assert parts.add(1).sum().item() == [2, 6]
    assert isinstance(parts.shape, Tuplewise)


def test_tuplewise_setattr_sets_each_item():
    """Setting an attribute reaches every item."""
    items = [SimpleNamespace(a=1), SimpleNamespace(a=2)]
    Tuplewise(items).a = 5
    assert [item.a for item in items] == [5, 5]


def test_tuplewise_is_a_sequence_of_its_items():
    """iter, len and repr speak of the sequence, not of the items."""
    parts = Tuplewise(iter("ab"))
    assert list(parts) == ["a", "b"]
    assert len(parts) == 2
    assert repr(parts) == "Tuplewise(['a', 'b'])"
    assert parts != [1]
    assert parts != "ab"
    assert not Tuplewise([])


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_tuplewise_survives_copies_and_pickle(through):
    """The forwarding __getattr__ does not recurse on an object without items yet."""
    assert through(Tuplewise([[1], [2]])) == [[1], [2]]


def test_tuplewise_says_which_item_failed():
    """An item's exception keeps its type and gains a note; a missing attribute stays an AttributeError."""
    with pytest.raises(AttributeError) as caught:
        _ = Tuplewise([torch.zeros(1), 3]).shape
    assert caught.value.__notes__ == ["in item 1 of a Tuplewise of 2"]
    assert not hasattr(Tuplewise([1]), "__array__")


def test_recursive_to_moves_the_items_of_a_tuplewise():
    """A Tuplewise of tensors moves as each of them does."""
    assert recursive_to(Tuplewise([torch.zeros(1)]), torch.float64).dtype == [torch.float64]


# -- moving


def test_recursive_to_walks_lists_tuples_namedtuples_and_dicts():
    """Tensors at any depth move, all else comes back as it was, and order and types stay."""
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
    """A Mapping that is no plain dict is walked too and keeps its type."""
    moved = recursive_to([cls({"x": torch.zeros(1)})], torch.float64)[0]
    assert type(moved) is cls
    assert moved["x"].dtype is torch.float64


def test_recursive_to_lets_a_container_move_itself():
    """A PackedSequence keeps its batch sizes as torch wants them."""
    moved = recursive_to([pack_sequence([torch.zeros(2), torch.zeros(1)])], torch.float64)[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.dtype is torch.float64
    assert moved.batch_sizes.dtype is torch.int64


def test_recursive_to_is_not_fooled_by_a_field_called_to_nor_by_a_class():
    """Only a callable .to moves; a class among the values has no instance to move."""
    moved = recursive_to([Edge(torch.zeros(1), torch.ones(1)), torch.nn.Linear], torch.float64)
    assert moved[0].to.dtype is torch.float64
    assert moved[1] is torch.nn.Linear


def test_recursive_to_passes_kwargs_on():
    """non_blocking reaches the value's own .to."""
    assert recursive_to((OnlyTo(),), "cpu", non_blocking=True)[0].moved == ("cpu", True)


def test_recursive_cuda_prefers_cuda_and_falls_back_on_to():
    """.cuda comes first, .to second, the value itself last."""
    recorder, only_to, other = recursive_cuda([Recorder(), OnlyTo(), 3], 1, non_blocking=True)
    assert recorder.calls == [("cuda", (1,), {"non_blocking": True})]
    assert only_to.moved == (1, True)
    assert other == 3


def test_recursive_cuda_without_a_device_means_the_current_one(monkeypatch):
    """device=None is torch.cuda.current_device() where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert recursive_cuda(Recorder()).calls == [("cuda", (3,), {})]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recursive_cuda(OnlyTo()).moved == ("cuda", False)


@pytest.mark.parametrize(("move", "name"), [(recursive_to, "to"), (recursive_cuda, "cuda")])
def test_a_move_that_returns_none_is_a_type_error_with_its_cure(move, name):
    """A forgotten `return self` is named with its class instead of losing the value."""
    with pytest.raises(TypeError, match=rf"Forgetful\.{name}\(\) returned None: end it with `return self`"):
        move([Forgetful()], "cpu")


def test_cuda_attrs_moves_in_place_and_returns_the_object():
    """Every attribute is moved, at any depth."""
    obj = SimpleNamespace(a=Recorder(), b=[Recorder()], c="text")
    assert cuda_attrs(obj, 0, non_blocking=True) is obj
    assert obj.a.calls == obj.b[0].calls == [("cuda", (0,), {"non_blocking": True})]


def test_cuda_attrs_that_fails_replaces_nothing():
    """A batch is never left half moved."""
    obj = SimpleNamespace(a=[1], b=Forgetful())
    before = obj.a
    with pytest.raises(TypeError):
        cuda_attrs(obj, 0)
    assert obj.a is before


def test_batch_moves_every_attribute_and_returns_itself():
    """.to and .cuda work through recursive_to and recursive_cuda, so batches nest."""
    batch = Pair(torch.zeros(1), {"inner": Pair(torch.zeros(1), Recorder())})
    assert recursive_to((batch,), torch.float64)[0] is batch
    assert batch.x.dtype is batch.y["inner"].x.dtype is torch.float64
    recorders = Pair(Recorder(), Recorder())
    assert recorders.cuda(2) is recorders
    assert recorders.x.calls == recorders.y.calls == [("cuda", (2,), {})]


def test_batch_pins_every_attribute():
    """DataLoader's pin_memory finds Batch.pin_memory, which reaches every attribute."""
    batch = Pair([Recorder()], "text")
    assert batch.pin_memory() is batch
    assert batch.x[0].calls == [("pin_memory", (), {})]


def test_batch_moves_slots_too():
    """A dataclass with slots is moved like any other."""

    @dataclass(slots=True)
    class Slotted(Batch):
        x: torch.Tensor

    assert Slotted(torch.zeros(1)).to(torch.float64).x.dtype is torch.float64
