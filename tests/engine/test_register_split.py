"""Classes with their own rules: registered by the user, packed sequences, and plain sequences."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.engine.cut import Cutter
from parawrap.engine.rules.registry import register_split
from parawrap.errors import ShardError
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
    """With the batch, as the batch, and in outputs, also if the class is a container."""
    words = registered(base)
    shards = cut(Cutter(), torch.zeros(3), {"w": [words("abc")]})
    assert [shard.args[1]["w"][0].items for shard in shards] == [["a", "b"], ["c"]]
    found = joined(*(shard.args[1] for shard in shards), sizes=(2, 1), out_dims={"w": [0]})
    assert found["w"][0].items == ["a", "b", "c"]
    assert [shard.rows for shard in cut(Cutter(), words("abcde"), lanes=3)] == [2, 2, 1]


def test_a_class_can_be_registered_late():
    """Its values are refused before, and cut afterwards, by the same cutter."""
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

    register_split(Table, split=lambda _, sizes: list(sizes), join=sum, rows=lambda table: table.height)
    shards = cut(Cutter(), Table())
    assert [shard.args[0] for shard in shards] == [3, 2]
    words, _, join = new_class()
    register_split(words, split=lambda value, sizes: [value] * 3, join=join)
    with pytest.raises(ShardError, match="the split of Words returned 3 parts for 2 sizes"):
        cut(Cutter(), torch.zeros(4), words("abcd"))


def test_registered_rows_must_agree():
    """In the call, and in the output unless it is declared as ragged or as one value."""
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
    """`in_dims` and `out_dims` of None, and another output device."""
    packed, again = (rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]) for _ in range(2))
    for shard in cut(cutter(in_dims={"y": None}), torch.zeros(5), packed):
        assert torch.equal(shard.args[1].data, packed.data)
    assert joined(packed, again, out_dims=None) is packed
    assert joined(packed, sizes=(2,), device=META).data.device == META
