"""`Cutter`: leaves that are cut, leaves that are broadcast, and calls that are refused."""

from __future__ import annotations

import array
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import itertools
import pathlib
import random
import threading
from collections import UserList, deque, namedtuple
from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import ShardError
from parawrap.shards import Cutter, Parameters

numpy = pytest.importorskip("numpy")

CPU = torch.device("cpu")
Words = namedtuple("Words", "texts")


def forward(x, y=None, *rest, texts=None, mask=None):
    return x


def planned(cutter, *args, lanes=2, **kwargs):
    flat = cutter.flatten(args, kwargs)
    return cutter.plan(flat, lanes), flat


def cut(cutter, *args, lanes=2, **kwargs):
    plan, flat = planned(cutter, *args, lanes=lanes, **kwargs)
    return plan.scatter(flat, [CPU] * len(plan.sizes))


def cutter(**options):
    return Cutter(parameters=Parameters(forward), **options)


def test_unequal_row_counts_are_refused():
    """The error names both arguments, both row counts, and the `in_dims` to set."""
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(64, 3), mask=torch.zeros(2, 3))
    message = str(caught.value)
    for part in ('kwargs["mask"]', "args[0]", "64", "2", 'in_dims={"mask": None}'):
        assert part in message


def test_the_error_names_the_parameter_of_a_positional_argument():
    """The error names the parameter, also for values inside a container and for `*rest`."""
    with pytest.raises(ShardError, match=r'args\[1\]\["k"\].*in_dims=\{"y": \{"k": None\}\}'):
        cut(cutter(), torch.zeros(4), {"k": torch.zeros(3)})
    with pytest.raises(ShardError, match=r'args\[3\].*in_dims=\{"rest": None\}'):
        cut(cutter(), torch.zeros(4), None, None, torch.zeros(3))


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_tensor_of_one_row_next_to_more_rows_is_broadcast(rows):
    """A tensor with one row goes whole to every lane, as in torch's broadcasting."""
    one = torch.ones(1, 3)
    shards = cut(cutter(), torch.zeros(rows, 3), one)
    assert all(shard.args[1] is one for shard in shards)
    assert sum(shard.rows for shard in shards) == rows


def test_a_batch_of_one_row_is_one_shard():
    """If every tensor has one row, the call has one shard."""
    (shard,) = cut(cutter(), torch.zeros(1, 3), torch.zeros(1), lanes=4)
    assert shard.rows == 1


def test_one_row_next_to_an_empty_batch_is_broadcast():
    """An empty batch stays empty next to a tensor of one row."""
    (shard,) = cut(cutter(), torch.zeros(0, 3), torch.zeros(1, 3), lanes=4)
    assert shard.rows == 0


def test_a_0d_tensor_and_a_tensor_with_too_few_dims_are_broadcast():
    """Tensors without dim `dim` go whole to every lane."""
    scale, bias = torch.tensor(2.0), torch.zeros(7)
    first, second = cut(Cutter(dim=1), torch.zeros(3, 4), scale, bias)
    assert first.args[0].shape == (3, 2)
    assert second.args[1] is scale
    assert second.args[2] is bias


@pytest.mark.parametrize("args", [(), (1, "a"), ({"k": [None]},), (torch.tensor(1.0),)])
def test_a_call_without_rows_is_one_shard(args):
    """A call without tensors, or with only 0-d tensors, runs once."""
    (shard,) = cut(cutter(), *args, lanes=4)
    assert shard.args == args
    assert shard.rows == 0


def test_in_dims_none_broadcasts_a_tensor():
    """With None in `in_dims`, a tensor of any size goes whole to every lane."""
    mask = torch.zeros(7, 3)
    for shard in cut(cutter(in_dims={"mask": None}), torch.zeros(4), mask=mask):
        assert shard.kwargs["mask"] is mask


def test_in_dims_can_name_another_dim():
    """The rows of an argument can lie on another dim, which may be negative."""
    for dim in (1, -1):
        first, second = cut(cutter(in_dims={"y": dim}), torch.zeros(5, 2), torch.zeros(2, 5))
        assert (first.args[1].shape, second.args[1].shape) == ((2, 3), (2, 2))


def test_in_dims_apply_to_positional_and_keyword_arguments():
    """`in_dims` uses the parameter name for positional and keyword arguments."""
    whole = torch.zeros(7)
    assert cut(cutter(in_dims={"y": None}), torch.zeros(4), whole)[1].args[1] is whole
    assert cut(cutter(in_dims={"y": None}), torch.zeros(4), y=whole)[1].kwargs["y"] is whole
    assert cut(cutter(in_dims={"rest": None}), torch.zeros(4), None, None, whole)[1].args[3] is whole


def test_in_dims_apply_inside_containers():
    """A dim for a container applies to the tensors in it."""
    first, _ = cut(cutter(in_dims={"y": 1}), torch.zeros(4), {"a": [torch.zeros(2, 4)]})
    assert first.args[1]["a"][0].shape == (2, 2)


@pytest.mark.parametrize("texts", [["a", "b", "c"], ("a", "b", "c"), [1, 2, 3], [["a"], ["b"], ["c"]]])
def test_a_sequence_that_in_dims_cuts_is_cut_as_a_sequence(texts):
    """Each lane gets a slice of the same type."""
    first, second = cut(cutter(in_dims={"texts": 0}), torch.zeros(3), texts=texts)
    assert first.kwargs["texts"] == texts[:2]
    assert second.kwargs["texts"] == texts[2:]
    assert type(first.kwargs["texts"]) is type(texts)


def test_a_sequence_can_be_the_batch():
    """If `in_dims` names a sequence, a call without tensors is cut."""
    first, second = cut(cutter(in_dims={"texts": 0}), 1, texts=["a", "b", "c"])
    assert (first.kwargs["texts"], second.kwargs["texts"]) == (["a", "b"], ["c"])
    assert (first.rows, second.rows) == (2, 1)


def test_a_sequence_of_another_length_than_the_batch_is_refused():
    """A list that is cut must have one item per row."""
    with pytest.raises(ShardError, match=r'kwargs\["texts"\] has 2.*args\[0\] has 3'):
        cut(cutter(in_dims={"texts": 0}), torch.zeros(3), texts=["a", "b"])


def test_a_dim_for_a_list_of_tensors_cuts_each_tensor():
    """With a dim in `in_dims`, each tensor of a list is cut on that dim."""
    first, _ = cut(cutter(in_dims={"texts": 1}), torch.zeros(4), texts=[torch.zeros(2, 4), torch.zeros(3, 4)])
    assert [part.shape for part in first.kwargs["texts"]] == [(2, 2), (3, 2)]


def test_a_list_inside_an_argument_with_in_dims_is_not_broadcast():
    """With in_dims={"batch": 0}, a list of texts inside the batch is cut or refused, but not broadcast."""
    batch = {"x": torch.zeros(4), "texts": ["a", "b", "c", "d"]}
    named = Cutter(in_dims={"batch": 0}, parameters=Parameters(lambda batch: batch))
    try:
        first, _ = cut(named, batch=batch)
    except ShardError:
        return
    assert first.kwargs["batch"]["texts"] == ["a", "b"]


@pytest.mark.parametrize("texts", [["a", "b", "c"], [1, 2, 3], [{"k": 1}] * 3, ("a", "b", "c"), [[1, 2]] * 3])
def test_a_list_as_long_as_the_batch_is_ambiguous(texts):
    """The list may have one item per row or be one value, so the error shows both values of `in_dims`."""
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(3, 2), texts=texts)
    message = str(caught.value)
    for part in ('kwargs["texts"]', 'in_dims={"texts": "items"}', 'in_dims={"texts": None}', "3"):
        assert part in message


def test_a_nested_ambiguous_list_is_refused():
    """The error names the address of a nested list and the parameter."""
    with pytest.raises(ShardError, match=r'args\[1\]\["k"\]\[0\].*in_dims=\{"y": None\}'):
        cut(cutter(), torch.zeros(3, 2), {"k": [["a", "b", "c"]]})


class Mode(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Settings:
    scale: float
    names: tuple


FIXED = {
    "int": 3,
    "float": 0.5,
    "bool": True,
    "complex": 1j,
    "decimal": decimal.Decimal("0.5"),
    "fraction": fractions.Fraction(1, 2),
    "string": "abc",
    "bytes": b"abc",
    "none": None,
    "ellipsis": ...,
    "enum": Mode.FAST,
    "dtype": torch.float32,
    "device": CPU,
    "layout": torch.strided,
    "memory-format": torch.channels_last,
    "path": pathlib.Path("a"),
    "slice": slice(0, 3),
    "function": cutter,
    "lambda": lambda: None,
    "builtin": len,
    "class": Mode,
    "module": torch,
    "size": torch.Size([3, 2, 2]),
    "date": dt.date(2026, 1, 1),
    "datetime": dt.datetime(2026, 1, 1),
    "timedelta": dt.timedelta(1),
    "0d-tensor": torch.tensor(1.0),
}
"""Values that cannot follow the rows and have no state."""


@pytest.mark.parametrize("value", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: value,
        lambda value: [value, value],
        lambda value: (value,),
        lambda value: {"a": value, "b": {"c": value}, "d": value},
        lambda value: Settings(value, (value, value)),
        lambda value: {"a": [(value, [value])]},
    ],
    ids=["alone", "list", "tuple", "dict", "dataclass", "nested"],
)
def test_values_without_state_go_whole_to_every_lane(value, wrap):
    """Numbers, strings, and other values without state are broadcast, also in containers shorter than the batch."""
    wrapped = wrap(value)
    for shard in cut(cutter(), torch.zeros(3, 2), texts=wrapped):
        assert shard.kwargs["texts"] == wrapped
        assert type(shard.kwargs["texts"]) is type(wrapped)


@pytest.mark.parametrize("texts", [["a", "b"], [], (), {}, ["a"] * 4, (1, 2, 3, 4), (224, 224), {"a": 1, "b": 2, "c": 3}])
def test_containers_of_another_length_go_whole_to_every_lane(texts):
    """A list or tuple of another length than the batch, and a dict of settings of any length, are broadcast."""
    for shard in cut(cutter(), torch.zeros(3, 2), texts=texts):
        assert shard.kwargs["texts"] == texts


@pytest.mark.parametrize("shape", [(224, 224, 3), (None, 1, 2.0), (True, False, True), (torch.float32, CPU, 1j)])
def test_a_tuple_of_numbers_as_long_as_the_batch_is_ambiguous(shape):
    """It may be a size or one label per row. Both values of `in_dims` settle it; torch.Size is always a size."""
    with pytest.raises(ShardError, match=r'in_dims=\{"texts": "items"\} cuts it, in_dims=\{"texts": None\} gives'):
        cut(cutter(), torch.zeros(3, 2), texts=shape)
    for shard in cut(cutter(in_dims={"texts": None}), torch.zeros(3, 2), texts=shape):
        assert shard.kwargs["texts"] == shape
    first, second = cut(cutter(in_dims={"texts": "items"}), torch.zeros(3, 2), texts=shape)
    assert (first.kwargs["texts"], second.kwargs["texts"]) == (shape[:2], shape[2:])


class Settable:
    """An object of the user, with state."""


OBJECTS = {
    "iterator": lambda: iter("abc"),
    "generator": lambda: (each for each in "abc"),
    "set": lambda: {"a"},
    "frozenset": lambda: frozenset({"a"}),
    "random": lambda: random.Random(0),
    "lock": threading.Lock,
    "object": Settable,
    "counter": lambda: itertools.count(),
}
SEQUENCES = {
    "range": lambda: range(3),
    "deque": lambda: deque("abc"),
    "array.array": lambda: array.array("i", [1, 2, 3]),
    "userlist": lambda: UserList("abc"),
    "numpy": lambda: numpy.arange(3),
}
"""Sequences that may have one item per row, whatever their length."""


@pytest.mark.parametrize("make", [*OBJECTS.values(), *SEQUENCES.values()], ids=[*OBJECTS, *SEQUENCES])
@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("place", ["argument", "dict", "list"])
def test_an_object_with_state_is_refused_until_in_dims_names_it(make, rows, place):
    """The error names the argument and `in_dims`. With None, all lanes get the same object, or each its own deque."""
    value = make()
    wrapped = {"argument": value, "dict": {"k": value}, "list": [value]}[place]
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(rows, 2), texts=wrapped)
    assert 'kwargs["texts"]' + {"argument": "", "dict": '["k"]', "list": "[0]"}[place] in str(caught.value)
    entry = {"k": None} if place == "dict" else None
    assert f'in_dims={{"texts": {entry}}}'.replace("'", '"') in str(caught.value).replace("'", '"')
    for shard in cut(cutter(in_dims={"texts": entry}), torch.zeros(rows, 2), texts=wrapped):
        (got,) = {"argument": lambda x: [x], "dict": dict.values, "list": list}[place](shard.kwargs["texts"])
        assert got == value if type(value) is deque else got is value


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_any_sequence_can_be_cut_by_item(make):
    """The error names "items", and with it each lane gets the items of its rows in a sequence of the same type."""
    value = make()
    with pytest.raises(ShardError, match=r'in_dims=\{"texts": "items"\}'):
        cut(cutter(), torch.zeros(3, 2), texts=value)
    first, second = cut(cutter(in_dims={"texts": "items"}), torch.zeros(3, 2), texts=value)
    assert [*first.kwargs["texts"], *second.kwargs["texts"]] == list(value)
    assert type(first.kwargs["texts"]) is type(value)


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_an_object_in_a_call_that_is_not_cut_is_passed_on(make):
    """With one lane and with one row, every object is passed as it is; with the rules of torch, all but iterators."""
    value = make()
    with_torch = [] if isinstance(value, Iterator) else [({"lists_are_shared": True}, 3, 2)]
    for options, rows, lanes in (({}, 3, 1), ({}, 1, 2), *with_torch):
        for shard in cut(cutter(**options), torch.zeros(rows), texts=value, lanes=lanes):
            assert shard.kwargs["texts"] is value


def test_a_list_is_not_ambiguous_if_nothing_is_cut():
    """With one lane or one row, a list as long as the batch is passed unchanged."""
    assert cut(cutter(), torch.zeros(3), texts=["a"] * 3, lanes=1)[0].kwargs["texts"] == ["a"] * 3
    assert cut(cutter(), torch.zeros(1), texts=["a"], lanes=4)[0].kwargs["texts"] == ["a"]


def test_in_dims_none_broadcasts_a_list_as_long_as_the_batch():
    """With None in `in_dims`, every lane gets the whole value."""
    texts = ["a", "b", "c"]
    for shard in cut(cutter(in_dims={"texts": None}), torch.zeros(3), texts=texts):
        assert shard.kwargs["texts"] == texts


def test_lists_are_shared_option():
    """With `lists_are_shared=True`, a list without tensors is broadcast, as in torch.nn.DataParallel."""
    for shard in cut(cutter(lists_are_shared=True), torch.zeros(3), texts=["a", "b", "c"]):
        assert shard.kwargs["texts"] == ["a", "b", "c"]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_no_tensor_has_is_out_of_range(dim):
    """If no tensor has the dim, the error names the dim, the address, and the shape."""
    with pytest.raises(ShardError, match=rf"dim {dim}.*args\[0\].*\(4, 3\)"):
        cut(Cutter(dim=dim), torch.zeros(4, 3))


def test_a_dim_from_in_dims_must_exist():
    """A tensor without its dim in `in_dims` is refused, not broadcast."""
    with pytest.raises(ShardError, match=r"dim 1.*args\[1\].*\(4,\)"):
        cut(cutter(in_dims={"y": 1}), torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize("harmless", [3.0, torch.tensor(3.0)])
def test_a_dim_out_of_range_is_refused_also_after_a_call_without_it(harmless):
    """A cached plan for a number or a 0-d tensor is not used for a tensor without the dim."""
    used = cutter(in_dims={"y": 1})
    cut(used, torch.zeros(4), harmless)
    with pytest.raises(ShardError, match="dim 1"):
        cut(used, torch.zeros(4), torch.zeros(4))


def test_a_number_is_accepted_after_a_dim_out_of_range():
    """After the error, a call with a number at the same place is cut."""
    used = cutter(in_dims={"y": 1})
    with pytest.raises(ShardError):
        cut(used, torch.zeros(4), torch.zeros(4))
    assert len(cut(used, torch.zeros(4), 3.0)) == 2


def test_a_packed_sequence_is_cut_by_its_sequences():
    """Each lane gets whole sequences, in the caller's order."""
    sequences = [torch.arange(3.0), torch.arange(1.0), torch.arange(2.0) + 5, torch.arange(4.0)]
    packed = rnn.pack_sequence(sequences, enforce_sorted=False)
    shards = cut(Cutter(), packed, torch.zeros(4), lanes=3)
    assert [shard.rows for shard in shards] == [2, 1, 1]
    found = [s for shard in shards for s in rnn.unpack_sequence(shard.args[0])]
    assert all(map(torch.equal, found, sequences))


def test_a_packed_sequence_must_agree_with_the_batch():
    """A packed sequence has one row per sequence, which must agree with the batch."""
    packed = rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ShardError, match=r"args\[1\].*2.*args\[0\].*5"):
        cut(Cutter(), torch.zeros(5), packed)


def test_a_packed_sequence_with_in_dims_none_goes_whole_to_every_lane():
    """`in_dims` applies to packed sequences too."""
    packed = rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    for shard in cut(cutter(in_dims={"y": None}), torch.zeros(5), packed):
        assert torch.equal(shard.args[1].data, packed.data)


def test_a_plan_is_cached_by_structure_rows_and_lanes():
    """Calls with the same structure, row count, and number of lanes share a plan; other calls do not."""
    used = cutter()

    def plan(*args, lanes=2, **kwargs):
        return planned(used, *args, lanes=lanes, **kwargs)[0]

    first = plan(torch.zeros(4, 3), 5)
    assert plan(torch.ones(4, 3), 6) is first
    assert plan(torch.ones(4, 9), 6) is first
    assert plan(torch.ones(5, 3), 6) is not first
    assert plan(torch.ones(4, 3), 6, lanes=3) is not first
    assert plan(torch.ones(4, 3), y=6) is not first


def test_a_plan_never_depends_on_values():
    """Calls with meta tensors, which have no values, can be planned."""
    meta = torch.empty(4, 3, device="meta")
    plan, _ = planned(cutter(), meta, torch.empty((), device="meta"), mask=torch.empty(1, device="meta"))
    assert plan.sizes == (2, 2)


def test_a_whole_call_may_have_unequal_row_counts():
    """If a call is not cut, row counts may differ, and the first tensor with rows counts."""
    plan, leaves = cutter().whole((torch.zeros(4), torch.zeros(3)), {})
    (shard,) = plan.scatter(leaves, [CPU])
    assert (shard.rows, len(shard.args)) == (4, 2)


def test_each_lane_has_its_own_containers():
    """A write to a dict in one lane does not change the dict of another lane."""
    first, second = cut(cutter(), torch.zeros(4), {"k": 1})
    first.args[1]["k"] = 2
    assert second.args[1] == {"k": 1}


def test_threads_can_share_a_cutter():
    """Concurrent calls each get their own plan."""
    used, gate = cutter(), threading.Barrier(8)
    found = {}

    def plan(rows):
        gate.wait()
        found[rows] = [planned(used, torch.zeros(rows + step), lanes=3)[0].rows for step in range(50)]

    threads = [threading.Thread(target=plan, args=(rows,)) for rows in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rows: list(range(rows, rows + 50)) for rows in range(8)}


def test_a_cutter_works_after_its_cache_is_full():
    """Calls are still planned after the cache of plans has reached its limit."""
    used = cutter()
    assert [planned(used, torch.empty(rows))[0].rows for rows in range(1100)] == list(range(1100))


def test_names_of_parameters():
    """`Parameters` names positional arguments by position, and the rest by the name of `*rest`."""
    names = Parameters(forward)
    assert [names.at(place) for place in range(4)] == ["x", "y", "rest", "rest"]
    assert names.takes("mask")
    assert not names.takes("other")
    assert str(names) == "x, y, *rest"


def test_parameters_of_a_target_with_kwargs_take_any_name():
    """For a target with `**kwargs`, `takes` is True for every name."""
    assert Parameters(lambda x, **options: x).takes("anything")
    assert Parameters(lambda: None).at(0) is None


def test_parameters_of_a_scripted_module():
    """The parameter names of a scripted method are read from its schema."""

    class Scale(torch.nn.Module):
        def forward(self, x, factor: float = 2.0):
            return x * factor

    names = Parameters(torch.jit.script(Scale()).forward)
    assert (names.at(0), names.at(1), names.at(2)) == ("x", "factor", None)
    assert names.takes("factor")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "jagged"])
def test_a_sparse_or_nested_tensor_is_cut_or_refused(kind):
    """A sparse or nested tensor is cut, or raises an error that names the argument and `in_dims`."""
    if kind == "sparse":
        tensor = torch.eye(4).to_sparse()
    else:
        tensor = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)] * 2, layout=torch.jagged)
    try:
        shards = cut(cutter(), torch.zeros(4), tensor)
    except ShardError as error:
        assert "args[1]" in str(error)  # noqa: PT017
        assert "in_dims" in str(error)  # noqa: PT017
        return
    assert [shard.args[1].shape[0] for shard in shards] == [2, 2]


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_numpy_array_is_refused_whatever_its_length(rows):
    """All lanes would share it, or it has one item per row. The error names `in_dims` and `from_numpy`."""
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(6, 2), numpy.arange(float(rows)))
    for part in (f"args[1] is an array with {rows} rows", 'in_dims={"y": "items"}', 'in_dims={"y": None}', "from_numpy"):
        assert part in str(caught.value)


@pytest.mark.parametrize("texts", [["a", "b", "c"], ("a", "b", "c"), (1, 2, 3), [torch.zeros(n) for n in (1, 2, 3)]])
def test_items_cuts_a_sequence_with_one_item_per_row(texts):
    """With "items", each lane gets the items of its rows: strings, numbers, or tensors of different sizes."""
    first, second = cut(cutter(in_dims={"texts": "items"}), torch.zeros(3), texts=texts)
    assert list(map(id, first.kwargs["texts"])) == list(map(id, texts[:2]))
    assert list(map(id, second.kwargs["texts"])) == list(map(id, texts[2:]))
    assert type(first.kwargs["texts"]) is type(texts)


def test_items_cuts_a_list_of_tensors_with_equal_sizes():
    """With "items", a list of tensors is cut as a list, even if the tensors are as long as the batch."""
    images = [torch.full((3, 2), float(n)) for n in range(3)]
    first, second = cut(cutter(in_dims={"y": "items"}), torch.zeros(3), images)
    assert (first.args[1], second.args[1]) == (images[:2], images[2:])


def test_items_cuts_an_array():
    """With "items", a NumPy array is cut on its first dim."""
    first, second = cut(cutter(in_dims={"y": "items"}), torch.zeros(3), numpy.arange(6).reshape(3, 2))
    assert (first.args[1].tolist(), second.args[1].tolist()) == ([[0, 1], [2, 3]], [[4, 5]])


def test_items_applies_to_sequences_inside_an_argument():
    """With "items" for a dict, each list in the dict is cut."""
    batch = {"x": torch.zeros(3), "texts": ["a", "b", "c"], "sizes": (4, 5, 6)}
    first, second = cut(cutter(in_dims={"y": "items"}), torch.zeros(3), batch)
    assert (first.args[1]["texts"], first.args[1]["sizes"]) == (["a", "b"], (4, 5))
    assert (second.args[1]["texts"], second.args[1]["x"].shape) == (["c"], (1,))


def test_items_of_another_length_than_the_batch_are_refused():
    """A sequence declared as "items" must have one item per row."""
    with pytest.raises(ShardError, match=r"args\[1\] has 2.*args\[0\] has 3"):
        cut(cutter(in_dims={"y": "items"}), torch.zeros(3), [torch.zeros(1), torch.zeros(2)])


def test_the_error_for_a_list_with_one_tensor_per_row_names_items():
    """A list of tensors of other sizes than the batch raises an error that names "items"."""
    with pytest.raises(ShardError, match=r'args\[1\]\[0\].*if it is a list with one tensor per row, give "items"'):
        cut(cutter(), torch.zeros(3), [torch.zeros(4), torch.zeros(5), torch.zeros(6)])


def test_a_list_of_0d_tensors_as_long_as_the_batch_is_ambiguous():
    """A list of 0-d tensors as long as the batch may have one item per row, so it is refused."""
    with pytest.raises(ShardError, match=r'in_dims=\{"y": "items"\}'):
        cut(cutter(), torch.zeros(3), [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)])


# Objects of unknown classes


class Holder:
    """An object of an unknown class that holds a value."""

    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "unknown",
    [
        Holder(torch.zeros(3)),
        Holder({"layers": [Holder((torch.zeros(1),))]}),
        Slots(torch.zeros(3)),
        Holder(torch.nn.Linear(2, 2)),
        torch.nn.Linear(2, 2),
        frozenset({torch.zeros(3)}),
        Holder(torch.zeros(3)).__init__,
    ],
    ids=["attribute", "nested", "slot", "module-inside", "module", "set", "bound-method"],
)
def test_an_unknown_object_that_holds_tensors_is_refused(unknown, rows):
    """The error for tensors in attributes, slots, or containers names `register_split` and `in_dims`."""
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(rows), {"cache": unknown})
    kind = type(unknown).__name__
    for part in (
        'args[1]["cache"]',
        f"a {kind}, which holds tensors",
        f"register_split({kind}, split=..., join=...",
        'in_dims={"y": {"cache": None}}',
    ):
        assert part in str(caught.value)


def test_a_cycle_in_an_unknown_object_is_searched_once():
    """The search for tensors ends even if objects refer to each other."""
    one, other = Holder(None), Holder(None)
    one.value, other.value = other, one
    with pytest.raises(ShardError, match="a state that each lane would change"):
        cut(cutter(), torch.zeros(3), one)
    other.tensor = torch.zeros(1)
    with pytest.raises(ShardError, match="register_split"):
        cut(cutter(), torch.zeros(3), one)


def test_in_dims_none_broadcasts_an_unknown_object():
    """With None in `in_dims`, every lane gets the whole value."""
    unknown = Holder(torch.zeros(3))
    assert all(shard.args[1] is unknown for shard in cut(cutter(in_dims={"y": None}), torch.zeros(3), unknown))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("alone", [True, False])
def test_a_strided_nested_tensor_is_refused(dim, alone):
    """Torch cannot split a nested tensor with strided layout. The error names the argument and `in_dims`."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    args = (nested,) if alone else (torch.zeros(2, 2), nested)
    with pytest.raises(ShardError, match=rf"args\[{len(args) - 1}\].*nested.*in_dims") as caught:
        cut(cutter(dim=dim), *args)
    assert "None" in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_in_dims_none_broadcasts_a_strided_nested_tensor():
    """With None in `in_dims`, every lane gets the same nested tensor."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for shard in cut(cutter(in_dims={"y": None}), torch.zeros(2), nested):
        assert shard.args[1] is nested


# Plans


def test_scatter_needs_one_device_per_shard():
    """A plan with more shards than devices is an error."""
    plan, flat = planned(cutter(), torch.arange(16.0), None, lanes=3)
    shards = plan.scatter(flat, [CPU] * 3)
    assert [(len(shard.args[0]), shard.rows) for shard in shards] == [(6, 6), (5, 5), (5, 5)]
    with pytest.raises(ValueError):
        plan.scatter(flat, [CPU, CPU])


def test_shards_map_parts_to_the_callers_values():
    """`origins` maps a part of a packed sequence to the caller's packed sequence."""
    packed = rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    for shard in cut(cutter(), torch.zeros(2), packed):
        assert shard.origins[id(shard.args[1])] is packed
        assert id(shard.args[0]) not in shard.origins


def test_lanes_can_write_to_their_rows():
    """Shards without a graph are separate views, so each lane can add a parameter in place."""
    bias = torch.nn.Parameter(torch.ones(()))
    for shard in cut(cutter(), torch.zeros(4)):
        shard.args[0].add_(bias)


def test_attributes_of_containers_are_those_of_the_call():
    """Calls that share a plan keep their own attributes of a list subclass."""

    class Tagged(list):
        scale = 1.0

    cutter = Cutter()
    found = []
    for scale in (2.0, 3.0):
        value = Tagged([torch.zeros(4)])
        value.scale = scale
        found.append([shard.args[0].scale for shard in cut(cutter, value)])
    assert found == [[2.0, 2.0], [3.0, 3.0]]


class Tagged(list):
    """A container with attributes."""


def tagged(**attributes):
    value = Tagged([torch.zeros(4)])
    vars(value).update(attributes)
    return value


def test_a_tensor_in_an_attribute_of_a_container_is_cut():
    """Attributes are parts of a container, so each lane gets the rows of its shard."""
    mask = torch.arange(4)
    first, second = cut(cutter(), tagged(mask=mask, name="a"))
    assert (first.args[0].mask.tolist(), second.args[0].mask.tolist()) == ([0, 1], [2, 3])
    assert (type(first.args[0]), first.args[0].name, second.args[0].name) == (Tagged, "a", "a")


@pytest.mark.parametrize("make", [*OBJECTS.values(), lambda: ["a"] * 4], ids=[*OBJECTS, "list"])
def test_an_attribute_is_refused_like_an_argument(make):
    """An object with state in an attribute, or a list as long as the batch, is an error that names the attribute."""
    with pytest.raises(ShardError, match=r'args\[1\]\.state.*in_dims=\{"y": \{"state": None\}\}'):
        cut(cutter(), torch.zeros(4), tagged(state=make()))
    state = make()
    for shard in cut(cutter(in_dims={"y": {"state": None}}), torch.zeros(4), tagged(state=state)):
        assert shard.args[1].state is state or shard.args[1].state == state


def test_names_in_in_dims_that_no_call_passed_are_known():
    """A target with `**kwargs` takes any name, so `unused` has the names that no call passed yet."""
    used = Cutter(in_dims={"x": 0, "mask": None, "maks": None}, parameters=Parameters(lambda x, **options: x))
    assert used.unused == {"mask", "maks"}
    used.flatten((torch.zeros(4),), {"mask": torch.zeros(3)})
    assert used.unused == {"maks"}
