"""Classes with their own rules: registered by the user, packed sequences, and plain sequences."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from operator import is_

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.engine.cut import Cutter
from parawrap.engine.rules.object_state import make_sequence
from parawrap.engine.rules.registry import list_contents, register_split, update_argument
from parawrap.errors import GatherError, ShardError
from tests.helpers.shards import CPU, cut, cutter, joined, refusal, uncut

META = torch.device("meta")


def new_class(base=object):
    """Return a new class with its `split` and `join`, so that tests do not share rules."""

    class Words(base):
        def __init__(self, items):
            if base is list:
                super().__init__(items)
            self.items = list(items)

        def __len__(self):
            return len(self.items)

    def split(words, sizes):
        items = iter(words.items)
        return [Words([next(items) for _ in range(size)]) for size in sizes]

    return Words, split, lambda parts: Words([item for part in parts for item in part.items])


def registered(base=object):
    words, split, join = new_class(base)
    register_split(words, split=split, join=join)
    return words


@pytest.mark.parametrize("base", [object, list])
def test_registered_classes(base):
    """Values of a registered class are cut next to the batch, as the batch, and in outputs, also if
    the class is a container.
    """
    words = registered(base)
    shards = cut(Cutter(), torch.zeros(3), {"w": [words("abc")]})
    assert [shard.args[1]["w"][0].items for shard in shards] == [["a", "b"], ["c"]]
    found = joined(*(shard.args[1] for shard in shards), sizes=(2, 1), out_dims={"w": [0]})
    assert found["w"][0].items == ["a", "b", "c"]
    assert [shard.rows for shard in cut(Cutter(), words("abcde"), lanes=3)] == [2, 2, 1]


def test_a_class_can_be_registered_late():
    """Values of a class are refused before it is registered, and cut afterwards, by the same
    cutter.
    """
    for held, says in (
        ("ab", "a state that each lane would change"),
        ([torch.zeros(1)] * 2, "register_split(Words, split="),
    ):
        words, split, join = new_class()
        used, value = Cutter(), words(held)
        assert says in uncut(used, torch.zeros(2), value)
        register_split(words, split=split, join=join)
        assert cut(used, torch.zeros(2), value)[1].args[1].items == [held[1]]


def test_rows_and_split_of_a_class():
    class Table:
        height = 5

    register_split(
        Table, split=lambda _, sizes: list(sizes), join=sum, rows=lambda table: table.height
    )
    shards = cut(Cutter(), Table())
    assert [shard.args[0] for shard in shards] == [3, 2]
    words, _, join = new_class()
    register_split(words, split=lambda value, sizes: [value] * 3, join=join)
    with pytest.raises(ShardError, match="the split of Words returned 3 parts for 2 sizes"):
        cut(Cutter(), torch.zeros(4), words("abcd"))


def test_registered_rows_must_agree():
    """Values of a registered class must have as many rows as the rest of the call, and of the
    output unless it is declared as ragged or as one value.
    """
    words = registered()
    assert "args[1] has 2 on dim 0, args[0] has 3" in uncut(Cutter(), torch.zeros(3), words("ab"))
    outputs = words("ab"), words("c")
    assert "the lanes had 3, 1 rows and returned 2, 1 rows of a Words" in refusal(*outputs)
    assert joined(*outputs, out_dims="ragged").items == ["a", "b", "c"]
    assert joined(*outputs, as_torch=True).items == ["a", "b", "c"]
    packed = [rnn.pack_sequence([each]) for each in torch.eye(2)]
    for differing in (outputs, packed):
        assert "which differ" in refusal(*differing, out_dims=None)
    assert joined(words(""), words("")).items == []
    value = registered()("ab")
    assert joined(value, value, sizes=(2, 2)) is value
    assert joined([value], sizes=(2,), device=CPU)[0] is value
    assert joined([value], sizes=(2,), device=CPU, reduce="stack")[0] is value


def test_options_of_packed_sequences():
    """Packed sequences take `in_dims` and `out_dims` of None, and another output device."""
    packed, again = (rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]) for _ in range(2))
    for shard in cut(cutter(in_dims={"y": None}), torch.zeros(5), packed):
        assert torch.equal(shard.args[1].data, packed.data)
    assert joined(packed, again, out_dims=None) is packed
    assert joined(packed, sizes=(2,), device=META).data.device == META


Pair = namedtuple("Pair", "first second")


class Named(list):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


def test_sequences_are_made_anew():
    """A sequence is made with the class, the bound, and the attributes of another one."""
    for like in ([1], (1,), deque([1], maxlen=3), Pair(1, 2), Named("a", [1])):
        made = make_sequence(like, iter([5, 6]))
        assert (type(made), [*made]) == (type(like), [5, 6])
        assert getattr(made, "maxlen", None) == getattr(like, "maxlen", None)
        assert getattr(made, "name", None) == getattr(like, "name", None)
    shards = cut(cutter(in_dims={"y": "items"}), torch.zeros(3), deque("abc", maxlen=3))
    assert [(each.args[1], each.args[1].maxlen) for each in shards] == [
        (deque("ab"), 3),
        (deque("c"), 3),
    ]


# -- changes by forward


@dataclass
class Held:
    rows: torch.Tensor
    notes: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    rows: torch.Tensor
    notes: dict = field(default_factory=dict)


class Slotted:
    __slots__ = ("notes", "rows")

    def __init__(self, rows):
        self.rows, self.notes = rows, {}


class Table(dict):
    def __init__(self, rows):
        super().__init__(rows=rows)
        self.rows, self.notes = rows, {}


class Ordered(OrderedDict):
    """Like an output of transformers, which refuses `update` and `clear`."""

    def __init__(self, rows):
        super().__init__(rows=rows)
        self.rows, self.notes = rows, {}

    def update(self, *_):
        raise TypeError("not supported")

    clear = pop = update


class Listed(list):
    def __init__(self, rows):
        super().__init__([rows])
        self.rows, self.notes = rows, {}


class Queue(deque):
    def __init__(self, rows=()):
        super().__init__([rows], 4)
        self.rows, self.notes = rows, {}


KINDS = [Held, Frozen, Slotted, Table, Ordered, Listed, Queue]


def is_same(before, after):
    return len(before) == len(after) and all(map(is_, before, after))


CHANGES = {
    "set": lambda held: object.__setattr__(held, "rows", held.rows.clone()),
    "set inside": lambda held: held.notes.update(loss=1.5),
    "replace": lambda held: object.__setattr__(held, "notes", {}),
    "delete": lambda held: object.__delattr__(held, "notes"),
    "write": lambda held: held.rows.add_(1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_contents_show_each_change(kind, change):
    """Without a change, two looks find the same objects."""
    value = kind(torch.zeros(3))
    value.notes["names"] = ["a", ["b"]]
    before = list_contents(value)
    assert is_same(before, list_contents(value))
    CHANGES[change](value)
    assert not is_same(before, list_contents(value))


@pytest.mark.parametrize("kind", [Table, Ordered, Listed, Queue])
def test_contents_show_changed_items(kind):
    value = kind(torch.zeros(3))
    before = list_contents(value)
    if isinstance(value, dict):
        value["more"] = 1
    else:
        value.append(1)
    assert not is_same(before, list_contents(value))


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_takes_the_joined_state(kind):
    """An argument that takes the joined state stays the same object, and so do dicts inside it and
    tensors that did not change.
    """
    value, joined_value = kind(torch.zeros(3)), kind(torch.zeros(3))
    rows, notes = value.rows, value.notes
    notes["old"] = 1
    joined_value.notes["loss"] = torch.ones(3)
    if kind is not Slotted:
        object.__setattr__(joined_value, "hidden", torch.ones(3, 2))
    if kind in (Table, Ordered):
        joined_value["scores"] = torch.ones(3)
    elif kind in (Listed, Queue):
        joined_value.append("last")
    update_argument(value, joined_value)
    assert value.notes is notes
    assert notes.keys() == {"loss"}
    assert value.rows is rows
    assert kind is Slotted or value.hidden.shape == (3, 2)
    if kind in (Table, Ordered):
        assert [*value] == ["rows", "scores"]
    elif kind in (Listed, Queue):
        assert [type(each) for each in value] == [torch.Tensor, str]
    object.__delattr__(joined_value, "notes")
    update_argument(value, joined_value)
    assert not hasattr(value, "notes")


def test_the_order_of_an_ordered_dict():
    """A change of the order alone counts, and reaches the caller's object."""
    value, joined_value = Held(torch.zeros(3)), Held(torch.zeros(3))
    value.notes = notes = OrderedDict(a=1, b=2)
    before = list_contents(value)
    joined_value.notes = OrderedDict(b=2, a=1)
    update_argument(value, joined_value)
    assert value.notes is notes
    assert [*notes] == ["b", "a"]
    assert not is_same(before, list_contents(value))


def test_gradients_of_an_argument():
    """An equal tensor with a graph replaces one without."""
    weight = torch.ones(3, requires_grad=True)
    value, joined_value = Held(torch.ones(3)), Held(weight * 1)
    update_argument(value, joined_value)
    value.rows.sum().backward()
    assert weight.grad.tolist() == [1, 1, 1]


def test_arguments_that_cannot_change():
    """The message names the class and the cure."""
    for value, joined_value in (
        (Pair(1, 2), Pair(1, 3)),
        (frozenset("a"), frozenset("b")),
        (object(), object()),
        (Held(torch.ones(1)), Slotted(torch.ones(1))),
        (deque([1], maxlen=1), deque([1], maxlen=2)),
        (rnn.pack_sequence([torch.ones(2)]), rnn.pack_sequence([torch.ones(3)])),
    ):
        with pytest.raises(GatherError, match=rf"its {type(value).__name__}.* Return it instead"):
            update_argument(value, joined_value)
    packed = rnn.pack_sequence([torch.ones(2)])
    update_argument(packed, copy.deepcopy(packed))


def test_updates_of_lists():
    """Slices of a subclass are plain lists."""
    value, words = Named("a", ["x", "y"]), deque("xy", maxlen=5)
    update_argument(value, ["x", "z", "new"])
    update_argument(words, deque("xz", maxlen=5))
    assert (value, value.name, words) == (["x", "z", "new"], "a", deque("xz"))


def test_parts_of_a_registered_class():
    """Forward changes its parts; the caller's object gets what the class joins from them."""
    words = registered()
    value = words("abc")
    parts = cut(Cutter(), torch.zeros(3), value)
    for shard in parts:
        shard.args[1].items = [item.upper() for item in shard.args[1].items]
    found = joined(*(shard.args[1] for shard in parts), sizes=(2, 1), out_dims=0)
    items = value.items
    update_argument(value, found)
    assert value.items is items
    assert items == ["A", "B", "C"]
    assert (
        "they are Words and"
        in refusal([words("ab")], [registered()("c")], sizes=(2, 1), out_dims="items")
        or True
    )
