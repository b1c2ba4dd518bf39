"""`register_split`: user-defined classes are cut and joined by user-defined functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import ParawrapError, ShardError
from parawrap.shards import Cutter, JoinRules, join, register_split
from parawrap.shards._register_split import splitter_of

CPU = torch.device("cpu")


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

    def put_together(parts):
        return Words([item for part in parts for item in part.items])

    return Words, split, put_together


def registered(base=object):
    words, split, put_together = new_class(base)
    register_split(words, split=split, join=put_together)
    return words


def cut(*args, lanes=2, cutter=None):
    cutter = cutter or Cutter()
    flat = cutter.flatten(args, {})
    plan = cutter.plan(flat, lanes)
    return plan.scatter(flat, [CPU] * len(plan.sizes))


@pytest.mark.parametrize("base", [object, list])
def test_a_registered_class_is_cut_and_joined(base):
    """Instances are cut with the batch and joined from outputs, also if the class is a container."""
    words = registered(base)
    shards = cut(torch.zeros(3), {"w": [words("abc")]})
    assert [shard.args[1]["w"][0].items for shard in shards] == [["a", "b"], ["c"]]
    found = join([shard.args[1] for shard in shards], (2, 1), JoinRules(out_dims={"w": [0]}))
    assert found["w"][0].items == ["a", "b", "c"]


def test_a_class_can_be_registered_after_values_were_passed():
    """Values of a class without tensors are refused until it is registered, and cut afterwards."""
    words, split, put_together = new_class()
    cutter, value = Cutter(), words("ab")
    with pytest.raises(ShardError, match="a state that each lane would change"):
        cut(torch.zeros(2), value, cutter=cutter)
    register_split(words, split=split, join=put_together)
    assert cut(torch.zeros(2), value, cutter=cutter)[1].args[1].items == ["b"]


def test_a_class_that_holds_tensors_is_refused_until_it_is_registered():
    """The error names `register_split`."""
    words, split, put_together = new_class()
    value = words([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(ShardError, match=r"register_split\(Words, split=\.\.\., join=\.\.\.\)"):
        cut(torch.zeros(2), value)
    register_split(words, split=split, join=put_together)
    assert [len(shard.args[1]) for shard in cut(torch.zeros(2), value)] == [1, 1]


def test_rows_of_a_registered_value_must_agree_with_the_batch():
    """A registered value with another row count than the batch is refused."""
    words = registered()
    with pytest.raises(ShardError, match=r"args\[1\] has 2.*args\[0\] has 3"):
        cut(torch.zeros(3), words("ab"))


def test_a_registered_value_can_be_the_batch():
    """A call with a registered value and without tensors is cut."""
    words = registered()
    assert [shard.rows for shard in cut(words("abcde"), lanes=3)] == [2, 2, 1]


def test_rows_can_replace_len():
    """If `rows` is given, it returns the row count instead of `len`."""

    class Table:
        def __init__(self, height):
            self.height = height

    register_split(
        Table,
        split=lambda table, sizes: [Table(size) for size in sizes],
        join=lambda parts: Table(sum(part.height for part in parts)),
        rows=lambda table: table.height,
    )
    shards = cut(Table(5))
    assert [shard.args[0].height for shard in shards] == [3, 2]
    assert join([shard.args[0] for shard in shards], (3, 2), JoinRules()).height == 5


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_split_that_returns_another_number_of_parts_is_refused(wrong):
    """`split` must return one part per size."""
    words, _, put_together = new_class()
    register_split(words, split=lambda value, sizes: [value] * wrong, join=put_together)
    with pytest.raises(ParawrapError, match="Words"):
        cut(torch.zeros(4), words("abcd"))


def test_the_same_object_from_every_lane_is_not_joined():
    """If every lane returns the same registered object, the output is that object."""
    shared = registered()("ab")
    assert join([shared, shared], (2, 2), JoinRules()) is shared


def test_a_value_of_one_shard_is_returned_unchanged():
    """With one shard, the output is the same object."""
    value = registered()("ab")
    assert join([[value]], (2,), JoinRules(), CPU)[0] is value
    assert join([[value]], (2,), JoinRules(reduce="stack"), CPU)[0] is value


def test_a_packed_sequence_keeps_its_order():
    """A packed sequence that is cut and joined has the data, order, and indices of the original."""
    sequences = [torch.randn(length, 2) for length in (1, 4, 2, 3, 1)]
    packed = rnn.pack_sequence(sequences, enforce_sorted=False)
    for lanes in (2, 3, 5):
        shards = cut(packed, lanes=lanes)
        found = join([shard.args[0] for shard in shards], [shard.rows for shard in shards], JoinRules(out_dims=0))
        for one, other in zip(found, packed, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", [(4, 3, 3, 1), (2, 2, 2, 2)])
def test_a_packed_sequence_without_sorted_indices_stays_without_them(lengths):
    """If the caller sorted the sequences, `sorted_indices` is None in the lanes and in the output."""
    packed = rnn.pack_sequence([torch.randn(length, 2) for length in lengths])
    shards = cut(packed, lanes=3)
    assert [shard.args[0].sorted_indices for shard in shards] == [None] * 3
    found = join([shard.args[0] for shard in shards], [shard.rows for shard in shards], JoinRules(out_dims=0))
    assert (found.sorted_indices, found.unsorted_indices) == (None, None)
    assert torch.equal(found.data, packed.data)
    assert torch.equal(found.batch_sizes, packed.batch_sizes)


def test_gradients_flow_through_a_packed_sequence():
    """Cutting a packed sequence is differentiable."""
    x = torch.ones(3, requires_grad=True)
    packed = rnn.pack_sequence([x, x[:2] * 2])
    sum(shard.args[0].data.sum() for shard in cut(packed)).backward()
    assert x.grad.tolist() == [3, 3, 1]


def test_sequences_are_cut_by_slices():
    """A sequence is split into slices of the same type."""
    splitter = splitter_of(["a", "b", "c"])
    assert splitter.split(["a", "b", "c"], (2, 1)) == [["a", "b"], ["c"]]
    assert splitter.join([("a",), ("b", "c")]) == ("a", "b", "c")
    assert splitter.rows("abc") == 3
