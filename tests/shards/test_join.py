"""`join`: rows are concatenated in order, equal values are returned once, numbers are reduced, and the rest raises."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import GatherError
from parawrap.shards import JoinRules, join, register_split

numpy = pytest.importorskip("numpy")

CPU = torch.device("cpu")
META = torch.device("meta")
OPTIONS = ("out_dims=0", "None for one value", '"items"', '"ragged"', 'join="list"')


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None


Pair = namedtuple("Pair", "first second")


class Fields(UserDict):
    """A Mapping that is not a dict."""


class Color(enum.Enum):
    RED = 1


def joined(*outputs, sizes=(3, 1), device=None, originals=None, **rules):
    return join(list(outputs), sizes, JoinRules(**rules), device, originals)


def refusal(*outputs, **options):
    with pytest.raises(GatherError) as caught:
        joined(*outputs, **options)
    return str(caught.value)


def rows(*sizes, width=2):
    """Return one tensor per size, with different numbers in each row."""
    whole = torch.arange(float(sum(sizes) * width)).view(-1, width)
    return whole.split(sizes)


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


# Tensors


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_are_concatenated_on_the_dim_in_lane_order(dim):
    """The joined rows are in lane order."""
    whole = torch.arange(16.0).view(4, 4)
    assert torch.equal(joined(*whole.split([3, 1], dim), dim=dim), whole)


def test_a_joined_tensor_has_gradients():
    """Concatenating is differentiable."""
    x = torch.arange(4.0, requires_grad=True)
    joined(x[:3] ** 2, x[3:] ** 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_ragged_shapes_are_refused_with_both_shapes_and_join_pad():
    """Outputs with different sizes on other dims cannot be concatenated. The error names join="pad"."""
    message = refusal({"h": [torch.zeros(3, 5)]}, {"h": [torch.zeros(1, 7)]})
    for part in ('output["h"][0]', "(3, 5), (1, 7)", "differ beyond dim 0", 'join="pad"', *OPTIONS):
        assert part in message


@pytest.mark.parametrize(
    "shapes", [((3, 5), (1,)), ((3,), ()), ((), (1,)), ((2, 3), (2, 2)), ((3, 2), (0, 2)), ((6, 2), (2, 2)), ((2,), (1,))]
)
def test_outputs_without_the_rows_are_refused(shapes):
    """If sizes on the dim differ from the shards' row counts, the error names the shapes and the options."""
    message = refusal({"y": torch.zeros(shapes[0])}, {"y": torch.zeros(shapes[1])})
    for part in ('output["y"]', *map(str, shapes)):
        assert part in message
    for part in OPTIONS:
        assert part in message


def test_an_output_without_the_dim_is_refused():
    """A vector has only dim 0, so it cannot have rows on dim 1."""
    assert "dim 1" in refusal(torch.zeros(3), torch.ones(3), dim=1)
    assert "dim 1" in refusal(torch.zeros(3), torch.zeros(1), out_dims=1)


TABLE = torch.tensor([1.0, 2.0])
OTHER_TABLES = [torch.tensor([1.0, 3.0]), TABLE.double(), TABLE[None]]


def test_a_declared_tensor_is_returned_once():
    """With ``out_dims=None``, a tensor without the rows, such as a weight table, is returned once if all lanes agree."""
    table = torch.tensor([1.0, math.nan])
    outputs = [{"y": torch.zeros(rows), "t": table.clone()} for rows in (3, 1)]
    found = joined(*outputs, out_dims={"t": None})
    assert found["y"].shape == (4,)
    torch.testing.assert_close(found["t"], table, equal_nan=True)


@pytest.mark.parametrize("other", OTHER_TABLES)
def test_a_declared_tensor_must_be_equal_in_all_lanes(other):
    """Values, dtypes, and shapes must be equal."""
    message = refusal(TABLE, other, out_dims=None)
    assert "the lanes had 3, 1 rows and returned different values" in message


@pytest.mark.parametrize("other", [TABLE.clone(), *OTHER_TABLES])
def test_an_undeclared_tensor_without_the_rows_is_refused(other):
    """Equal values do not make it one value: they may be counts."""
    message = refusal(TABLE, other)
    assert "the lanes had 3, 1 rows and returned shapes (2,)" in message
    assert "Equal values do not make it one value" in message
    assert all(part in message for part in OPTIONS)


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(0, 4)])
def test_tensors_without_rows_in_any_lane_are_joined(empty):
    """An output that has no rows in any lane, such as the boxes of images without objects, has none in all."""
    assert joined(empty.clone(), empty).shape == empty.shape


def test_the_same_tensor_from_every_lane_is_returned_unchanged():
    """If every lane returns the same parameter or uncut argument, the output is that object."""
    shared = torch.zeros(7)
    assert joined({"w": shared}, {"w": shared})["w"] is shared
    assert joined(shared, shared) is shared


def test_copies_of_a_parameter_are_returned_as_the_original():
    """If lanes return their own copies of a parameter, the output is the parameter, even if the values differ."""
    original, one, other = torch.zeros(7), torch.zeros(7), torch.ones(7)
    finds = [{id(each): original}.get for each in (one, other)]
    originals = [lambda value, find=find: find(id(value)) for find in finds]
    assert joined(one, other, originals=lambda: originals) is original


def test_a_copy_in_only_one_lane_is_refused():
    """If only one lane returns a copy of a parameter, the output is not that parameter."""
    original, one, other = torch.zeros(7), torch.zeros(7), torch.zeros(7)
    originals = [lambda value: original if value is one else None] * 2
    assert "without the rows on dim 0" in refusal(one, other, originals=lambda: originals)


# Proof by sizes


@pytest.mark.parametrize("sizes", [(5, 3), (9, 7), (3, 3, 2), (2, 1, 1)])
@pytest.mark.parametrize("fixed", [1, 2, 3, 5, 7])
def test_an_output_of_a_fixed_size_never_passes_for_rows(sizes, fixed):
    """No fixed size is the row count of every shard, so tensors, lists, and arrays of that size are refused."""
    for make in (torch.zeros, lambda size: [scalar(0.0)] * size, numpy.zeros):
        with pytest.raises(GatherError):
            joined(*(make(fixed) for _ in sizes), sizes=sizes)


@pytest.mark.parametrize("sizes", [(5, 3), (3, 3, 2)])
def test_an_output_that_follows_the_rows_in_some_lanes_alone_is_refused(sizes):
    """The row count must match in every lane."""
    wrong = [torch.zeros(size) for size in sizes[:-1]] + [torch.zeros(sizes[-1] + 1)]
    message = refusal(*wrong, sizes=sizes)
    assert "without the rows on dim 0" in message
    assert all(part in message for part in OPTIONS)


@pytest.mark.parametrize("output", [torch.zeros(2), torch.zeros(2, 3), ["a", "b"], [scalar(1.0)] * 2, numpy.zeros(2)])
def test_shards_of_equal_sizes_prove_nothing(output):
    """An undeclared output of equal shards is refused, also if its size is their row count; a declared one is joined."""
    message = refusal(output, copy.copy(output), sizes=(2, 2))
    assert "all lanes had 2 rows, which does not show whether this output follows the rows" in message
    assert all(part in message for part in OPTIONS)
    assert len(joined(output, copy.copy(output), sizes=(2, 2), out_dims="items" if type(output) is list else 0)) == 4


def test_counts_that_are_equal_by_luck_are_refused():
    """Two lanes that both count 2 of each class have counted 4. With reduce, numbers are added; vectors need `out_dims`."""
    message = refusal(torch.tensor([2, 2]), torch.tensor([2, 2]))
    assert "Equal values do not make it one value: two lanes that count 3 are 6" in message
    assert "each lane returned one int (2, 2)" in refusal(2, 2)


# join="pad"


@pytest.mark.parametrize("value", [0, -1, 7.5])
def test_pad_fills_the_other_dims_to_the_longest_lane(value):
    """Every dim except the dim of the rows is padded at its end."""
    found = joined(torch.ones(3, 5, 1), torch.ones(1, 4, 2), join="pad", pad_value=value)
    assert found.shape == (4, 5, 2)
    assert found[:3, :, :1].eq(1).all()
    assert found[3:, :4, :].eq(1).all()
    assert (found == value).sum() == 3 * 5 + 2
    assert found.sum() == 15 + 8 + value * 17


def test_pad_keeps_the_dim_of_the_rows():
    """With rows on dim 1, dim 0 is padded."""
    found = joined(torch.ones(2, 3), torch.ones(4, 1), join="pad", dim=1)
    assert found.shape == (4, 4)
    assert found.sum() == 10


def test_pad_is_differentiable():
    """Gradients flow to the unpadded outputs."""
    one, other = torch.ones(3, 2, requires_grad=True), torch.ones(1, 4, requires_grad=True)
    joined(one, other, join="pad").sum().backward()
    assert (one.grad.sum(), other.grad.sum()) == (6, 4)


def test_pad_refuses_another_number_of_dims():
    """Outputs with different numbers of dims cannot be padded to each other."""
    assert "have no dim 0 in common" in refusal(torch.zeros(3, 1), torch.zeros(1), join="pad")


def test_pad_still_checks_the_rows():
    """With join="pad", missing rows are still refused."""
    assert "without the rows" in refusal(torch.zeros(2, 1), torch.zeros(1, 3), join="pad", out_dims=0)


# Numbers


def test_a_mean_is_weighted_by_rows():
    """Means of shards with 3 rows and 1 row give the mean over 4 rows, and gradients flow through it."""
    values = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    loss = joined(values[:3].mean(), values[3:].mean(), reduce="mean")
    assert loss.ndim == 0
    assert loss.item() == pytest.approx(values.mean().item())
    loss.backward()
    assert torch.allclose(values.grad, torch.full((4,), 0.25))
    assert joined(2.0, 10.0, reduce="mean") == pytest.approx(4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_mean_keeps_its_dtype(dtype):
    """Weighting by rows does not change the dtype."""
    assert joined(scalar(1, dtype), scalar(2, dtype), scalar(3, dtype), sizes=(2, 2, 1), reduce="mean").dtype == dtype


@pytest.mark.parametrize("make", [scalar, float])
def test_sum_stack_and_a_function(make):
    """`reduce` can be "sum", "stack" (one value per lane), or a function of that vector."""
    values = [make(1.0), make(4.0)]
    assert joined(*values, reduce="sum") == 5
    assert joined(*values, reduce="stack").tolist() == [1, 4]
    assert joined(*values, reduce=torch.max).item() == 4


@pytest.mark.parametrize(
    "values", [(scalar(1.0), scalar(2.0)), (1.0, 2.0), (1, 1), (True, True), (scalar(1.0), scalar(1.0))]
)
def test_numbers_without_a_reduction_are_refused(values):
    """Even equal numbers are refused without `reduce`. The error names every option."""
    message = refusal({"loss": values[0]}, {"loss": values[1]})
    for part in ('output["loss"]', 'reduce="mean"', '"sum"', '"stack"', "a function", "out_dims=None"):
        assert part in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a_0d_integer_has_no_mean(dtype):
    """A count or a flag has no mean. The error names the other reductions."""
    message = refusal(scalar(1, dtype), scalar(0, dtype), reduce="mean")
    for part in (str(dtype), 'reduce="sum"', 'reduce="stack"', "a function"):
        assert part in message
    assert joined(scalar(1, dtype), scalar(0, dtype), reduce="stack").dtype == dtype


@pytest.mark.parametrize("values", [(1, 0), (True, False)])
def test_a_python_integer_has_no_mean(values):
    """Python integers and bools are refused with reduce="mean"."""
    assert "has no mean" in refusal(*values, reduce="mean")


@pytest.mark.parametrize("make", [bool, lambda value: scalar(value, torch.bool)])
def test_a_flag_has_no_sum(make):
    """A bool with reduce="sum" is refused, and the error suggests a function such as torch.any."""
    assert "torch.any" in refusal(make(1), make(0), reduce="sum")
    assert joined(make(1), make(0), reduce=torch.any).item() is True


def test_scalars_of_numpy_are_numbers():
    """NumPy scalars follow the rules of Python numbers."""
    assert "float64" in refusal(numpy.float64(1), numpy.float64(2))
    assert joined(numpy.float64(2), numpy.float64(10), reduce="mean") == pytest.approx(4)
    assert joined(numpy.int64(2), numpy.int64(10), reduce="sum") == 12
    assert "has no mean" in refusal(numpy.int64(2), numpy.int64(10), reduce="mean")
    assert "has no sum" in refusal(numpy.bool_(1), numpy.bool_(1), reduce="sum")


@pytest.mark.parametrize("make", [scalar, float])
def test_reduce_applies_to_a_call_that_was_not_cut(make):
    """With one shard, "stack" returns a vector with one value, and a function gets that vector."""
    assert joined(make(1.5), sizes=(1,), reduce="stack").tolist() == [1.5]
    assert joined(make(1.5), sizes=(1,), reduce=torch.sum).item() == 1.5
    assert joined((torch.zeros(1), make(1.5)), sizes=(1,), reduce="stack")[1].tolist() == [1.5]


def test_a_tree_of_reductions_reduces_each_number():
    """A dict in `reduce` names keys and fields; a tuple names the items of a tuple. Rows are joined by their sizes."""
    parts = rows(3, 1)
    outputs = [{"y": part, "loss": scalar(float(n)), "count": n} for part, n in zip(parts, (3, 1), strict=True)]
    found = joined(*outputs, reduce={"loss": "mean", "count": "sum"})
    assert (found["y"].shape, found["loss"].item(), found["count"]) == ((4, 2), 2.5, 4)
    found = joined(*map(Output, parts, (1.0, 5.0)), reduce={"loss": "mean"})
    assert (found.logits.shape, found.loss) == ((4, 2), 2.0)
    assert joined(*(({"loss": float(n)}, n) for n in (3, 1)), reduce=({"loss": max_of}, "sum")) == ({"loss": 3.0}, 4)
    assert joined([1.0, 2], [3.0, 4], reduce=["stack", "sum"])[1] == 6


def max_of(vector):
    return vector.max().item()


def test_a_number_that_a_tree_of_reductions_leaves_out_is_refused():
    """A dict in `reduce` reduces only what it names. The error names the place of the other number."""
    outputs = [{"loss": scalar(1.0), "count": 1} for _ in range(2)]
    message = refusal(*outputs, reduce={"loss": "mean"})
    assert 'output["count"] cannot be joined' in message
    assert 'reduce="mean"' in message


@pytest.mark.parametrize("declared", [("sum",), ("sum", "sum", "sum")])
def test_a_tuple_of_reductions_must_be_as_long_as_the_output(declared):
    """A tuple with another number of entries than the output is refused."""
    assert f"reduce declares {len(declared)} items, and the output has 2 here" in refusal((1, 2), (3, 4), reduce=declared)


@pytest.mark.parametrize("reduce", [{"loss": "mean", "count": "median"}, ("sum", 3), {"loss": {"ce": "max"}}])
def test_an_unknown_reduction_in_a_tree_is_refused(reduce):
    """JoinRules checks every entry of `reduce` when it is created."""
    with pytest.raises(GatherError, match=r"is not supported\. Use 'mean', 'sum', 'stack', a function"):
        JoinRules(reduce=reduce)


@pytest.mark.parametrize("declared", [("sum", "sum"), {"a": "sum"}, {0: "sum"}])
def test_a_tree_of_reductions_must_have_the_structure_of_the_output(declared):
    """A tuple or dict for an output that is one number is refused."""
    assert "reduce" in refusal(scalar(1.0), scalar(2.0), reduce=declared)
    assert "reduce" in refusal([1.0], [2.0], reduce=declared)


@pytest.mark.parametrize("reduce", ["median", 3, 1.5])
def test_an_unknown_reduce_is_refused(reduce):
    """JoinRules checks `reduce` when it is created."""
    with pytest.raises(GatherError, match="'mean', 'sum', 'stack', a function"):
        JoinRules(reduce=reduce)


def test_an_unknown_join_is_refused():
    """The error names the three values of `join`."""
    with pytest.raises(GatherError, match="'cat', 'pad', or 'list'"):
        JoinRules(join="stack")


# Other values


@pytest.mark.parametrize("value", [None, "text", b"bytes", torch.float32, Color.RED, CPU, {}, (), ("a", "b"), Output("a")])
def test_equal_values_are_returned_once(value):
    """None stays None; strings, dtypes, and other objects must be equal in all lanes."""
    found = joined({"y": torch.zeros(3), "v": value}, {"y": torch.zeros(1), "v": value})["v"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("values", [("a", "b"), (None, "a"), ("a", 1.0), (None, torch.zeros(1)), (Color.RED, CPU)])
def test_unequal_values_are_refused(values):
    """The error names the place and the options."""
    message = refusal({"n": values[0]}, {"n": values[1]})
    assert 'output["n"]' in message
    assert all(part in message for part in OPTIONS)


def test_values_that_cannot_be_compared_are_refused():
    """An object with an `==` that raises is refused unless all lanes return the same object."""

    class Moody:
        __hash__ = None

        def __eq__(self, other):
            raise TypeError

        def __repr__(self):
            return "Moody()"

    assert "Moody()" in refusal(Moody(), Moody())
    same = Moody()
    assert joined(same, same) is same


# Lists


@pytest.mark.parametrize(
    "items",
    [
        ["a", "b", "c", "d"],
        [1, 2, 3, 4],
        [None] * 4,
        [[1], [2], [], [3]],
        [torch.zeros(n) for n in range(4)],
        [{"k": 1}] * 4,
    ],
    ids=["texts", "numbers", "nones", "lists", "tensors", "dicts"],
)
def test_a_list_with_one_item_per_row_is_concatenated(items):
    """Items of any type are concatenated in row order."""
    found = joined({"labels": items[:3]}, {"labels": items[3:]})["labels"]
    assert list(map(id, found)) == list(map(id, items))


def test_a_tuple_with_one_item_per_row_stays_a_tuple():
    """A tuple with one item per row is concatenated to a tuple."""
    assert joined(("a", "b", "c"), ("d",)) == ("a", "b", "c", "d")


def test_a_list_of_outputs_is_joined_item_by_item():
    """A list with the same length in every lane is a list of outputs, which are joined one by one."""
    first, second = rows(3, 1)
    found = joined([first, "name", [first]], [second, "name", [second]])
    assert found[0].shape == (4, 2)
    assert found[1] == "name"
    assert torch.equal(found[2][0], found[0])


def test_lists_of_other_lengths_are_refused():
    """A list without one item per row, and with different lengths in the lanes, is refused. The error names the lengths."""
    message = refusal({"boxes": ["a", "b"]}, {"boxes": ["c"]})
    assert "the lanes had 3, 1 rows and returned 2, 1 items" in message
    assert all(part in message for part in OPTIONS)


def test_numbers_in_a_list_of_outputs_are_reduced():
    """Numbers in a list with the same length in all lanes need `reduce`."""
    assert joined([1, 2], [3, 4], reduce="sum") == [4, 6]
    assert "output[0]" in refusal([1, 2], [3, 4])


# Arrays


def test_arrays_with_the_rows_are_concatenated():
    """NumPy arrays follow the rules of tensors."""
    found = joined(*numpy.split(numpy.arange(8).reshape(4, 2), [3]))
    assert found.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert joined(numpy.zeros((2, 3)), numpy.zeros((2, 1)), dim=1).shape == (2, 4)


def test_arrays_without_the_rows_follow_the_rules_of_tensors():
    """They are refused unless they are declared, and equal in values and dtypes, or one object."""
    table = numpy.array([1.0, numpy.nan])
    assert "Equal values do not make it one value" in refusal(table.copy(), table.copy())
    assert joined(table, table) is table
    found = joined(table.copy(), table.copy(), out_dims=None)
    assert numpy.array_equal(found, table, equal_nan=True)
    assert joined(numpy.array(["a", "b"]), numpy.array(["a", "b"]), out_dims=None).tolist() == ["a", "b"]
    assert "different values" in refusal(table, numpy.array([1.0, 2.0]), out_dims=None)
    assert "different values" in refusal(numpy.zeros(2), numpy.zeros(2, dtype=int), out_dims=None)


def test_arrays_that_cannot_be_concatenated_are_refused():
    """Arrays with different other dims, or without the rows, are refused. The error names their shapes."""
    assert "(3, 2), (1, 4)" in refusal(numpy.zeros((3, 2)), numpy.zeros((1, 4)))
    assert "(2,), (1,)" in refusal(numpy.zeros(2), numpy.zeros(1))
    assert "(2,), (1,)" in refusal(numpy.zeros(2), numpy.zeros(1), out_dims=0)


def test_a_declared_array_without_the_dim_is_refused():
    """An array without its declared dim raises GatherError instead of NumPy's error."""
    for declared in (1, "ragged"):
        assert "(3,), (1,)" in refusal(numpy.zeros(3), numpy.zeros(1), dim=1, out_dims=declared)


# Containers


@pytest.mark.parametrize("make", [dict, OrderedDict, Fields, lambda **items: defaultdict(int, **items)])
def test_mappings_keep_their_types(make):
    """Mappings are joined by key and keep their type."""
    first, second = rows(3, 1)
    found = joined(make(a=first, b="x"), make(a=second, b="x"))
    assert type(found) is type(make())
    assert (found["a"].shape, found["b"]) == ((4, 2), "x")


def test_namedtuples_and_dataclasses_keep_their_types():
    """Named tuples and dataclasses are joined field by field."""
    found = joined(*(Pair(Output(part, scalar(1.0)), {"k": [part]}) for part in rows(3, 1)), reduce="mean")
    assert type(found) is Pair
    assert type(found.first) is Output
    assert found.first.logits.shape == (4, 2)
    assert found.first.loss.item() == 1
    assert found.second["k"][0].shape == (4, 2)


def test_none_stays_none():
    """An output that is None in every lane is None."""
    assert joined(*(Output(part) for part in rows(3, 1))).loss is None


def test_keys_must_agree():
    """The error names the lane with other keys, and the keys of both lanes."""
    message = refusal({"a": torch.zeros(3)}, {"b": torch.zeros(1)})
    for part in ("output cannot be joined", "'a'", "lane 1", "'b'", 'join="list"'):
        assert part in message


def test_the_order_of_keys_does_not_matter():
    """Dicts are joined by key, whatever their order."""
    found = joined({"a": torch.zeros(3), "b": torch.ones(3)}, {"b": torch.ones(1), "a": torch.zeros(1)})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0] * 4, [1] * 4)


@pytest.mark.parametrize(
    "outputs",
    [
        (OrderedDict(a=torch.zeros(3), b=torch.ones(3)), OrderedDict(b=torch.ones(1), a=torch.zeros(1))),
        ({1: torch.zeros(3)}, {"1": torch.zeros(1)}),
        (deque([torch.zeros(3)], maxlen=2), deque([torch.zeros(1)], maxlen=3)),
        (defaultdict(lambda: 0, a=torch.zeros(3)), defaultdict(lambda: 0, a=torch.zeros(1))),
        (namedtuple("Twin", "a")(torch.zeros(3)), namedtuple("Twin", "b")(torch.zeros(1))),
        ([torch.zeros(3)], (torch.zeros(1),)),
        ({"a": torch.zeros(3)}, {"a": {"b": torch.zeros(1)}}),
        (torch.zeros(3), {"a": torch.zeros(1)}),
    ],
    ids=["order", "key-types", "deque", "factories", "twins", "list-and-tuple", "leaf-and-dict", "tensor-and-dict"],
)
def test_structures_that_differ_are_joined_or_refused(outputs):
    """Structures that differ between lanes are joined or raise GatherError."""
    try:
        found = joined(*outputs)
    except GatherError:
        return
    assert type(found) is type(outputs[0])


# join="list", one lane, devices


def test_join_list_returns_the_outputs_of_the_lanes():
    """With join="list", the outputs are unchanged, also with one lane."""
    ragged = [torch.zeros(2, 5), torch.zeros(2, 7)]
    found = joined(*ragged, join="list")
    assert all(one is other for one, other in zip(found, ragged, strict=True))
    assert joined("only", sizes=(4,), join="list") == ["only"]
    assert joined(1, "a", join="list") == [1, "a"]


@pytest.mark.parametrize("output", [scalar(3, torch.int64), 3, "text", [1, 2], {"loss": 1.5}, Output(torch.zeros(7))])
@pytest.mark.parametrize("reduce", [None, "mean", "sum"])
def test_the_output_of_one_lane_is_returned_unchanged(output, reduce):
    """With one shard, the output is the same object, and nothing is refused."""
    assert joined(output, sizes=(4,), reduce=reduce) is output


def test_outputs_are_moved_to_the_output_device():
    """Tensors lie on the output device, however they are joined."""
    outputs = [{"y": part, "v": "x", "loss": scalar(1.0)} for part in rows(3, 1)]
    found = joined(*outputs, device=META, reduce="mean")
    assert (found["y"].device, found["loss"].device, found["v"]) == (META, META, "x")
    assert [one["y"].device for one in joined(*outputs, device=META, join="list")] == [META, META]
    assert joined(outputs[0], sizes=(3,), device=META)["y"].device == META
    assert joined([torch.zeros(2)] * 3, [torch.zeros(2)], device=META)[3].device == META
    shared = torch.zeros(3)
    assert joined(shared, shared, device=META).device == META


# PackedSequence and classes with their own rules


def sequences(*lengths):
    return [torch.arange(float(length)) + 10 * index for index, length in enumerate(lengths)]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_packed_sequence_is_moved_to_the_output_device(lanes):
    """A packed sequence is moved, from one lane and from several."""
    outputs = [rnn.pack_sequence(sequences(3, 2)) for _ in range(lanes)]
    assert joined(*outputs, sizes=(2,) * lanes, device=META).data.device.type == "meta"


def test_packed_sequences_are_joined_in_the_callers_order():
    """Sequences keep the caller's order, also if they are not sorted by length."""
    whole = sequences(3, 1, 4, 2)
    found = joined(*(rnn.pack_sequence(part, enforce_sorted=False) for part in (whole[:3], whole[3:])))
    assert all(map(torch.equal, rnn.unpack_sequence(found), whole))
    expected = rnn.pack_sequence(whole, enforce_sorted=False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_packed_sequences_that_the_caller_sorted_have_no_sorted_indices():
    """If the lengths over all lanes are sorted, `sorted_indices` stays None."""
    whole = sequences(4, 3, 3, 1)
    found = joined(rnn.pack_sequence(whole[:3]), rnn.pack_sequence(whole[3:]))
    assert (found.sorted_indices, found.unsorted_indices) == (None, None)
    assert all(map(torch.equal, rnn.unpack_sequence(found), whole))


def test_the_same_packed_sequence_from_every_lane_is_returned_once():
    """If every lane returns the same packed sequence, the output is that object."""
    packed = rnn.pack_sequence(sequences(3, 2))
    assert joined({"p": packed}, {"p": packed})["p"] is packed


def test_a_packed_sequence_without_the_rows_is_refused():
    """A packed sequence with another number of sequences than its shard has rows is refused."""
    message = refusal(rnn.pack_sequence(sequences(3, 2)), rnn.pack_sequence(sequences(2, 2)))
    assert "rows" in message
    assert "out_dims" in message


def test_a_packed_sequence_declared_as_equal_is_returned_once():
    """With out_dims=None, equal packed sequences are returned once."""
    outputs = [rnn.pack_sequence(sequences(3, 2)) for _ in range(2)]
    assert len(rnn.unpack_sequence(joined(*outputs, out_dims=None))) == 2


def test_a_registered_class_is_joined_inside_containers():
    """The `join` of a registered class gets the lanes' parts in order."""

    class Words:
        def __init__(self, items):
            self.items = items

        def __len__(self):
            return len(self.items)

    register_split(Words, split=lambda words, sizes: [], join=lambda parts: Words([w for p in parts for w in p.items]))
    found = joined({"w": [Words(["a", "b", "c"])]}, {"w": [Words(["d"])]}, out_dims={"w": [0]})
    assert found["w"][0].items == ["a", "b", "c", "d"]


# out_dims


def test_one_declaration_applies_to_every_output():
    """A single dim as `out_dims` applies to all leaves, also with equal shards, which prove nothing."""
    parts = rows(2, 2)
    found = joined(*({"a": part, "b": [part, (part,)]} for part in parts), sizes=(2, 2), out_dims=0)
    assert found["a"].shape == found["b"][0].shape == found["b"][1][0].shape == (4, 2)


def test_a_tree_of_out_dims_declares_each_output():
    """For an LSTM, the output has its rows on dim 0 and the states have their rows on dim 1."""
    outputs = [(torch.zeros(n, 7, 3), (torch.zeros(2, n, 3), torch.ones(2, n, 3))) for n in (2, 2)]
    found = joined(*outputs, sizes=(2, 2), out_dims=(0, (1, 1)))
    assert [tuple(part.shape) for part in (found[0], *found[1])] == [(4, 7, 3), (2, 4, 3), (2, 4, 3)]
    assert type(found[1]) is tuple


@pytest.mark.parametrize("make", [dict, Fields, Output])
def test_a_tree_of_out_dims_may_name_keys_and_fields(make):
    """A dict in `out_dims` declares keys of mappings and fields of dataclasses."""
    outputs = [make(logits=torch.zeros(3, n), loss=scalar(2.0)) for n in (2, 2)]
    found = joined(*outputs, sizes=(2, 2), out_dims={"logits": 1, "loss": None})
    logits, loss = (found.logits, found.loss) if make is Output else (found["logits"], found["loss"])
    assert (tuple(logits.shape), loss.item()) == ((3, 4), 2)


def test_a_tree_of_out_dims_may_declare_a_namedtuple():
    """A tuple in `out_dims` declares the fields of a namedtuple in order."""
    outputs = [Pair(torch.zeros(3, n), torch.ones(n)) for n in (2, 2)]
    found = joined(*outputs, sizes=(2, 2), out_dims=(1, 0))
    assert (type(found), found.first.shape, found.second.shape) == (Pair, (3, 4), (4,))


def test_a_key_that_out_dims_does_not_name_is_joined_by_its_sizes():
    """A dict in `out_dims` may omit keys. Their outputs must show that they follow the rows."""
    outputs = [{"a": torch.zeros(2, n), "b": torch.ones(n)} for n in (3, 1)]
    found = joined(*outputs, out_dims={"a": 1})
    assert (found["a"].shape, found["b"].shape) == ((2, 4), (4,))
    outputs = [{"a": torch.zeros(2, n), "b": torch.ones(2)} for n in (3, 1)]
    assert 'output["b"] cannot be joined' in refusal(*outputs, out_dims={"a": 1})


@pytest.mark.parametrize("make", [dict, Fields, Output])
@pytest.mark.parametrize("option", ["out_dims", "reduce"])
def test_a_misspelled_key_is_refused(make, option):
    """A key that the output does not have is an error. It names the key, and the keys that the output has."""
    outputs = [make(logits=torch.zeros(n), loss=scalar(1.0)) for n in (3, 1)]
    message = refusal(*outputs, **{"out_dims": {"loss": None}, option: {"los": None}})
    assert f"{option} declares the key 'los', and the output has ['logits', 'loss'] here" in message


def test_a_misspelled_key_of_a_nested_output_is_refused():
    """A key of a dict inside the output must exist too."""
    outputs = [{"loss": {"ce": scalar(1.0), "kl": scalar(2.0)}} for _ in range(2)]
    message = refusal(*outputs, reduce={"loss": {"ce": "mean", "lk": "mean"}})
    assert "reduce declares the key 'lk', and the output has ['ce', 'kl'] here" in message


def test_a_declared_dim_is_checked():
    """If an output does not have the rows on its declared dim, the error names the rows, the shapes, and the dim."""
    message = refusal(torch.zeros(2, 3), torch.zeros(2, 3), sizes=(2, 2), out_dims=1)
    assert "the lanes had 2, 2 rows and returned shapes (2, 3), (2, 3), without the rows on dim 1" in message


def test_a_negative_dim_counts_from_the_end():
    """With `out_dims=-1`, the rows lie on the last dim."""
    assert joined(torch.zeros(5, 2), torch.zeros(5, 2), sizes=(2, 2), out_dims=-1).shape == (5, 4)


def test_none_declares_one_value_for_all_lanes():
    """With `out_dims=None`, values are compared between lanes and returned once."""
    for value in (torch.zeros(2), scalar(3.0), 3, 1.5, True, "text", [1, 2], numpy.zeros(2)):
        found = joined(value, value, sizes=(2, 2), out_dims=None)
        assert type(found) is type(value)
    for one, other in ((torch.zeros(2), torch.ones(2)), (3, 4), ("a", "b"), (1, 1.0), ([1], [2]), ([1], [1, 2])):
        assert "out_dims" in refusal(one, other, sizes=(2, 2), out_dims=None)


def test_none_returns_a_tensor_as_long_as_a_shard_once():
    """With `out_dims=None`, a tensor as long as the shards is not concatenated."""
    assert joined(torch.ones(2), torch.ones(2), sizes=(2, 2), out_dims=None).shape == (2,)


@pytest.mark.parametrize("items", [["a", "b", "c", "d"], [torch.zeros(n) for n in range(4)], [1, 2, 3, 4]])
def test_items_declares_a_list_with_one_item_per_row(items):
    """With "items", a list of equal shards is concatenated too, and its length is checked."""
    assert joined(items[:2], items[2:], sizes=(2, 2), out_dims="items") == items
    assert joined({"l": items[:2]}, {"l": items[2:]}, sizes=(2, 2), out_dims={"l": "items"})["l"] == items
    message = refusal(items[:3], items[3:], sizes=(2, 2), out_dims="items")
    assert "the lanes had 2, 2 rows and returned 3, 1 items" in message


def test_a_dim_for_a_list_without_tensors_means_items():
    """For a list without tensors, `out_dims=0` means one item per row."""
    assert joined(["a", "b"], ["c", "d"], sizes=(2, 2), out_dims=0) == ["a", "b", "c", "d"]


def test_ragged_joins_any_number_of_rows():
    """With "ragged", rows are concatenated in order, whatever their number per lane."""
    assert joined(torch.zeros(6, 2), torch.ones(1, 2), sizes=(2, 2), out_dims="ragged").shape == (7, 2)
    assert joined(torch.zeros(0, 2), torch.ones(1, 2), sizes=(2, 2), out_dims="ragged").shape == (1, 2)
    assert joined(["a", "b", "c"], [], sizes=(2, 2), out_dims="ragged") == ["a", "b", "c"]
    assert joined(numpy.zeros(3), numpy.zeros(2), sizes=(2, 2), out_dims="ragged").shape == (5,)
    assert joined(torch.zeros(2, 6), torch.ones(2, 1), sizes=(2, 2), dim=1, out_dims="ragged").shape == (2, 7)


def test_ragged_needs_the_same_other_dims():
    """With "ragged", only the number of rows may differ, unless join="pad" pads the other dims."""
    assert "differ beyond dim 0" in refusal(torch.zeros(3, 2), torch.zeros(1, 4), out_dims="ragged")
    assert joined(torch.zeros(3, 2), torch.zeros(4, 4), out_dims="ragged", join="pad").shape == (7, 4)


@pytest.mark.parametrize("declared", [True, 1.5, "rows", {"a": "cat"}, (0, [None, object()])])
def test_an_unknown_declaration_is_refused(declared):
    """JoinRules checks `out_dims` when it is created, and the error names every valid entry."""
    with pytest.raises(
        GatherError, match='Use a dim, None, "items", "ragged", or a tuple, dict, or dataclass of these'
    ) as caught:
        JoinRules(out_dims=declared)
    assert "out_dims has" in str(caught.value)


@pytest.mark.parametrize("declared", [(0,), (0, 0, 0)])
def test_a_tuple_of_out_dims_must_be_as_long_as_the_output(declared):
    """A tuple with another number of entries than the output is refused."""
    outputs = [(torch.zeros(n), torch.ones(n)) for n in (3, 1)]
    assert f"out_dims declares {len(declared)} items" in refusal(*outputs, out_dims=declared)
    assert "out_dims declares" in refusal(*map(Pair._make, outputs), out_dims=declared)


@pytest.mark.parametrize("declared", [(0, 0), {"a": 0}, {0: 0}])
def test_a_tree_of_out_dims_must_have_the_structure_of_the_output(declared):
    """A tuple or dict for an output of another structure is refused."""
    for outputs in (rows(3, 1), [[part] for part in rows(3, 1)]):
        assert "out_dims" in refusal(*outputs, out_dims=declared)


# torch.nn.DataParallel's rules


def test_the_rules_of_torch_do_not_check_sizes():
    """With `as_torch=True`, tensors are concatenated without a check of their rows, and "stack" returns a vector."""
    assert joined(torch.zeros(6), torch.zeros(1), as_torch=True).shape == (7,)
    assert joined(scalar(1.0), scalar(2.0), as_torch=True, reduce="stack").tolist() == [1, 2]
    assert joined("a", "a", as_torch=True) == "a"


def test_shards_need_different_sizes_only_for_undeclared_outputs():
    """`needs_proof` is False if all outputs are declared, with join="list", and with the rules of torch."""
    assert JoinRules().needs_proof
    assert JoinRules(out_dims={"a": 0}).needs_proof
    assert JoinRules(join="pad").needs_proof
    assert JoinRules(reduce={"loss": "mean"}).needs_proof
    assert not JoinRules(out_dims=0).needs_proof
    assert not JoinRules(out_dims=None).needs_proof
    assert not JoinRules(out_dims=(0, (1, None), ["items", "ragged"])).needs_proof
    assert not JoinRules(join="list").needs_proof
    assert not JoinRules(as_torch=True).needs_proof


def test_dtypes_that_differ_between_lanes_are_refused():
    """With torch.cat, the joined dtype would differ from that of the plain call."""
    assert "torch.float32 and torch.float64" in refusal(torch.zeros(3), torch.zeros(1, dtype=torch.float64))
