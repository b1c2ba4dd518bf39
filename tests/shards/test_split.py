"""register_split: values of one's own that are cut and joined."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import ParawrapError, ShardError
from parawrap.shards import Cutter, GatherRules, gather, register_split
from parawrap.shards._split import splitter_of

CPU = torch.device("cpu")


def new_class(base=object):
    """A fresh class of words, so that no test sees another's splitter."""

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

    def join(parts):
        return Words([item for part in parts for item in part.items])

    return Words, split, join


def cut(*args, lanes=2, **kwargs):
    plan, leaves = Cutter().plan(args, kwargs, lanes)
    return plan.scatter(leaves, [CPU] * lanes)


@pytest.mark.parametrize("base", [object, list])
def test_a_registered_class_is_cut_and_joined(base):
    """Instances are cut with the batch and joined from outputs, also where the class is a container."""
    words, split, join = new_class(base)
    register_split(words, split=split, join=join)
    shards = cut(torch.zeros(3), {"w": [words("abc")]})
    assert [shard.args[1]["w"][0].items for shard in shards] == [["a", "b"], ["c"]]
    found = gather([shard.args[1] for shard in shards], (2, 1), GatherRules(), None)
    assert found["w"][0].items == ["a", "b", "c"]


def test_a_class_may_be_registered_after_its_values_were_seen():
    """A class that was shared until now is cut from now on, by a cutter in use too."""
    words, split, join = new_class()
    cutter, call = Cutter(), (torch.zeros(2), words("ab"))
    before = cutter.plan(call, {}, 2)
    assert before[0].scatter(before[1], [CPU] * 2)[1].args[1] is call[1]
    register_split(words, split=split, join=join)
    after = cutter.plan(call, {}, 2)
    assert after[0].scatter(after[1], [CPU] * 2)[1].args[1].items == ["b"]


def test_its_rows_must_agree_with_the_batch():
    """A registered value has rows like any other."""
    words, split, join = new_class()
    register_split(words, split=split, join=join)
    with pytest.raises(ShardError, match=r"args\[1\] has 2.*args\[0\] has 3"):
        cut(torch.zeros(3), words("ab"))


def test_it_alone_can_be_the_batch():
    """A call of one registered value and no tensor is cut."""
    words, split, join = new_class()
    register_split(words, split=split, join=join)
    assert [shard.rows for shard in cut(words("abcde"), lanes=3)] == [2, 2, 1]


def test_rows_may_be_counted_in_another_way_than_by_len():
    """`rows` says how many there are."""

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
    assert gather([shard.args[0] for shard in shards], (3, 2), GatherRules(), None).height == 5


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_a_split_that_returns_another_number_of_parts_is_refused(wrong):
    """One part a size: neither is a part dropped, nor is a lane left without."""
    words, _, join = new_class()
    register_split(words, split=lambda value, sizes: [value] * wrong, join=join)
    with pytest.raises(ParawrapError, match="Words"):
        cut(torch.zeros(4), words("abcd"))


def test_the_same_object_from_every_lane_is_not_joined():
    """A registered value that every lane hands out as it got it is the call's, as a tensor is."""
    words, split, join = new_class()
    register_split(words, split=split, join=join)
    shared = words("ab")
    assert gather([shared, shared], (2, 2), GatherRules(), None).items == ["a", "b"]


def test_an_output_of_one_lane_is_unwrapped():
    """With one shard the value comes back as it is."""
    words, split, join = new_class()
    register_split(words, split=split, join=join)
    value = words("ab")
    assert gather([[value]], (2,), GatherRules(), CPU)[0] is value


def test_a_packed_sequence_round_trips_with_its_order():
    """Cut and joined, the sequences and their order are what they were, batched features too."""
    sequences = [torch.randn(length, 2) for length in (1, 4, 2, 3, 1)]
    packed = rnn.pack_sequence(sequences, enforce_sorted=False)
    for lanes in (2, 3, 5):
        shards = cut(packed, lanes=lanes)
        found = gather([shard.args[0] for shard in shards], [shard.rows for shard in shards], GatherRules(), None)
        assert all(map(torch.equal, rnn.unpack_sequence(found), sequences))


def test_gradients_flow_through_a_packed_sequence():
    """Cutting it is differentiable."""
    x = torch.ones(3, requires_grad=True)
    packed = rnn.pack_sequence([x, x[:2] * 2])
    sum(shard.args[0].data.sum() for shard in cut(packed)).backward()
    assert x.grad.tolist() == [3, 3, 1]


def test_sequences_are_cut_by_slices():
    """What in_dims cuts has a splitter too: slices of the type that it was."""
    splitter = splitter_of(["a", "b", "c"])
    assert splitter.split(["a", "b", "c"], (2, 1)) == [["a", "b"], ["c"]]
    assert splitter.join([("a",), ("b", "c")]) == ("a", "b", "c")
    assert splitter.rows("abc") == 3
