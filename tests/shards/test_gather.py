"""How outputs are joined: rows in order, scalars weighed by rows, and everything else refused with its cure."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import GatherError
from parawrap.shards import GatherRules, gather


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None


def joined(*outputs, sizes=None, device=None, **rules):
    return gather(list(outputs), sizes or (2,) * len(outputs), GatherRules(**rules), device)


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def test_tensors_are_joined_along_the_dim_in_lane_order():
    """Rows come back in the order of the lanes."""
    parts = torch.arange(12.0).view(4, 3).split([3, 1])
    assert torch.equal(joined(*parts, sizes=(3, 1)), torch.arange(12.0).view(4, 3))
    parts = torch.arange(12.0).view(3, 4).split([3, 1], dim=1)
    for dim in (1, -1):
        assert torch.equal(joined(*parts, sizes=(3, 1), dim=dim), torch.arange(12.0).view(3, 4))


def test_a_mean_loss_stays_a_scalar_weighed_by_rows():
    """The mean over shards of sizes 3 and 1 is the mean over the 4 rows."""
    rows = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    loss = joined(rows[:3].mean(), rows[3:].mean(), sizes=(3, 1))
    assert loss.ndim == 0
    assert loss.item() == pytest.approx(rows.mean().item())
    loss.backward()
    assert torch.allclose(rows.grad, torch.full((4,), 0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_mean_keeps_its_dtype(dtype):
    """Weighing by rows does not promote."""
    assert joined(scalar(1, dtype), scalar(2, dtype), scalar(3, dtype), sizes=(2, 2, 1)).dtype == dtype


def test_reduce_sum_and_stack_and_a_function():
    """The other ways: a sum, a value a lane, and any function of that vector."""
    values = [scalar(1.0), scalar(4.0)]
    assert joined(*values, reduce="sum").item() == 5
    assert joined(*values, reduce="stack").tolist() == [1, 4]
    assert joined(*values, reduce=torch.max).item() == 4
    assert joined(*values, sizes=(9, 1), reduce="sum").item() == 5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a_0d_integer_has_no_mean(dtype):
    """A count or a flag is not averaged: the message says what to write."""
    with pytest.raises(GatherError, match=r'reduce="sum".*reduce="stack"'):
        joined(scalar(1, dtype), scalar(0, dtype))
    assert joined(scalar(1, dtype), scalar(0, dtype), reduce="sum").item() == 1
    assert joined(scalar(1, dtype), scalar(0, dtype), reduce="stack").dtype == dtype


@pytest.mark.parametrize("reduce", ["median", None, 3])
def test_a_reduce_that_is_none_is_refused_at_once(reduce):
    """The rules are checked when they are made."""
    with pytest.raises(GatherError, match="reduce"):
        GatherRules(reduce=reduce)


def test_a_join_that_is_none_is_refused_at_once():
    """Only "cat" and "list" are ways to join."""
    with pytest.raises(GatherError, match="join"):
        GatherRules(join="stack")


def test_keys_must_agree():
    """A lane that returned other keys is named, with the keys of both."""
    with pytest.raises(GatherError, match=r"output.*'a'.*lane 1.*'b'"):
        joined({"a": torch.zeros(2)}, {"b": torch.zeros(2)})


def test_the_order_of_keys_does_not_matter():
    """A dict is joined by its keys."""
    found = joined({"a": torch.zeros(2), "b": torch.ones(2)}, {"b": torch.ones(2), "a": torch.zeros(2)})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0] * 4, [1] * 4)


@pytest.mark.parametrize("shapes", [((3, 2), (3, 2)), ((1, 2), (1, 2)), ((4, 2), (6, 2)), ((0, 2), (2, 2))])
def test_outputs_that_hold_no_rows_are_refused(shapes):
    """A layer dim or a feature dim where the rows should be, or rows left out, would be joined into something else."""
    with pytest.raises(GatherError, match="does not hold the rows"):
        joined(*(torch.zeros(shape) for shape in shapes), sizes=(2, 2))


def test_several_rows_for_each_row_are_joined():
    """A model that returns a row for each token of each row is one that treats rows independently."""
    assert joined(torch.zeros(6, 2), torch.ones(3, 2), sizes=(2, 1)).shape == (9, 2)


@pytest.mark.parametrize(
    "outputs",
    [
        (OrderedDict(a=torch.zeros(1), b=torch.ones(1)), OrderedDict(b=torch.ones(1), a=torch.zeros(1))),
        ({1: torch.zeros(1)}, {"1": torch.zeros(1)}),
        (deque([torch.zeros(1)], maxlen=2), deque([torch.zeros(1)], maxlen=3)),
        (defaultdict(lambda: 0, a=torch.zeros(1)), defaultdict(lambda: 0, a=torch.zeros(1))),
        (namedtuple("Twin", "a")(torch.zeros(1)), namedtuple("Twin", "b")(torch.zeros(1))),
    ],
    ids=["order-of-an-OrderedDict", "keys-of-two-types", "deque", "factories", "two-classes-of-one-name"],
)
def test_structures_that_differ_in_little_are_joined_or_refused_as_any_others(outputs):
    """Whatever makes two structures unequal, the error is a GatherError, and never one of the search for it."""
    try:
        found = joined(*outputs)
    except GatherError:
        return
    assert type(found) is type(outputs[0])


def test_a_leaf_beside_a_container_is_refused():
    """A lane that returned a tensor where another returned a list is named by the place."""
    with pytest.raises(GatherError, match=r'output\["a"\] differs'):
        joined({"a": torch.zeros(2)}, {"a": [torch.zeros(2)]})


def test_ragged_shapes_are_refused_with_both_shapes_and_the_cure():
    """Outputs padded to each shard's own length cannot be joined; join="list" is the way."""
    with pytest.raises(GatherError, match=r'output\["h"\]\[0\].*\(2, 5\).*\(2, 7\).*join="list"'):
        joined({"h": [torch.zeros(2, 5)]}, {"h": [torch.zeros(2, 7)]})
    with pytest.raises(GatherError, match=r"\(2, 5\).*\(2,\)"):
        joined(torch.zeros(2, 5), torch.zeros(2))


@pytest.mark.parametrize("outputs", [(scalar(1.0), torch.zeros(2)), (torch.zeros(2), scalar(1.0))])
def test_a_scalar_beside_rows_is_refused(outputs):
    """One lane's 0-d tensor and another's rows have nothing in common."""
    with pytest.raises(GatherError, match=r"\(\)"):
        joined(*outputs)


def test_an_output_without_the_dim_is_refused():
    """A vector has no dim 1 to be joined along."""
    with pytest.raises(GatherError, match="dim 1"):
        joined(torch.zeros(2), torch.zeros(2), dim=1)


@pytest.mark.parametrize("value", [None, 3, "text", True, math.nan, torch.float32, (1, 2), [], {}, Output("a")])
def test_equal_values_collapse_to_one(value):
    """What is no tensor and equal in every lane is the call's; two NaNs are equal."""
    found = joined([torch.zeros(2), value], [torch.zeros(2), value], [torch.zeros(2), value])[1]
    assert found == value or (found != found and value != value)


def test_nans_of_two_lanes_are_equal():
    """NaN objects made apart collapse too."""
    assert math.isnan(joined(float("nan"), float("nan")))


@pytest.mark.parametrize("values", [(1, 2), ("a", "b"), (None, 1), (1, 1.0), (True, 1), (None, torch.zeros(2))])
def test_unequal_values_are_refused_with_what_they_were(values):
    """No lane's value is taken for the others'; the place, the types and the values are told."""
    with pytest.raises(GatherError, match=r'output\["n"\].*join="list"'):
        joined({"n": values[0]}, {"n": values[1]})


def test_values_that_cannot_be_compared_are_unequal():
    """An object whose == raises, or gives no single truth, does not collapse."""

    class Moody:
        __hash__ = None

        def __eq__(self, other):
            raise TypeError

    with pytest.raises(GatherError, match="Moody"):
        joined(Moody(), Moody())
    same = Moody()
    assert joined(same, same) is same


def test_none_stays_none():
    """An output that was not asked for is None."""
    assert joined(Output(torch.zeros(2)), Output(torch.zeros(2))).loss is None


@pytest.mark.parametrize(
    "per_row",
    [lambda: ["cat", "cat"], lambda: [1, 1], lambda: [0.5, 0.5], lambda: [[1], [1]]],
    ids=["texts", "integers", "floats", "lists"],
)
def test_a_list_with_an_item_a_row_is_never_thinned(per_row):
    """Two lanes that each return a list of one label a row do not give the labels of one lane for the call.

    Rows in are rows out: such a list is joined, or refused as the same list is among the arguments.
    """
    try:
        found = joined({"labels": per_row(), "x": torch.zeros(2)}, {"labels": per_row(), "x": torch.zeros(2)})
    except GatherError:
        return
    assert len(found["labels"]) == 4


def test_the_same_tensor_from_every_lane_is_one():
    """A parameter that every lane hands out is not repeated."""
    shared = torch.zeros(3)
    assert joined({"w": shared}, {"w": shared})["w"] is shared
    assert joined(shared, shared) is shared


def test_containers_keep_their_types():
    """Namedtuples, dataclasses and mappings come back as what they were."""
    pair = namedtuple("Pair", "a b")
    found = joined(*(pair(Output(torch.zeros(2), scalar(1.0)), OrderedDict(k=torch.ones(2))) for _ in range(2)))
    assert type(found) is pair
    assert type(found.a) is Output
    assert type(found.b) is OrderedDict
    assert found.a.logits.shape == (4,)
    assert found.a.loss.item() == 1


def test_join_list_returns_what_the_lanes_returned():
    """The outputs as they are, one a lane, also from one lane."""
    ragged = [torch.zeros(2, 5), torch.zeros(2, 7)]
    found = joined(*ragged, join="list")
    assert all(one is other for one, other in zip(found, ragged, strict=True))
    assert joined("only", join="list") == ["only"]
    assert joined(1, "a", join="list") == [1, "a"]


def test_one_lanes_output_is_the_calls():
    """With one shard nothing is joined, and nothing is refused."""
    flag = scalar(3, torch.int64)
    assert joined(flag) is flag


def test_outputs_are_brought_to_the_output_device():
    """Whatever way they are joined, tensors end on the device that was asked for."""
    meta = torch.device("meta")
    outputs = [{"y": torch.zeros(2), "n": 1, "loss": scalar(1.0)} for _ in range(2)]
    found = joined(*outputs, device=meta)
    assert (found["y"].device, found["loss"].device, found["n"]) == (meta, meta, 1)
    assert [one["y"].device for one in joined(*outputs, device=meta, join="list")] == [meta, meta]
    assert joined(outputs[0], device=meta)["y"].device == meta
    shared = torch.zeros(3)
    assert joined(shared, shared, device=meta).device == meta


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_packed_sequence_is_brought_to_the_output_device(lanes):
    """A packed sequence moves as a tensor does, from one lane and from several."""
    outputs = [rnn.pack_sequence([torch.ones(3), torch.ones(2)]) for _ in range(lanes)]
    assert joined(*outputs, device=torch.device("meta")).data.device.type == "meta"


def test_packed_sequences_are_joined_by_their_sequences():
    """The sequences of the lanes come back in order, also of unequal lengths."""
    sequences = [torch.arange(3.0), torch.arange(1.0), torch.arange(4.0), torch.arange(2.0)]
    parts = [rnn.pack_sequence(sequences[:2]), rnn.pack_sequence(sequences[2:])]
    found = rnn.unpack_sequence(joined(*parts))
    assert all(map(torch.equal, found, sequences))


def test_the_same_packed_sequence_from_every_lane_is_one():
    """What every lane hands out as it got it is not repeated: the rule of tensors."""
    packed = rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert len(rnn.unpack_sequence(joined({"p": packed}, {"p": packed})["p"])) == 2
