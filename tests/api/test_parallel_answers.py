"""Calls in a block have the plain output, up to rounding and in row order, for any row count and number of lanes."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

from parawrap import GatherError, ShardError, parallel

# These tests sweep row counts, also small ones. test_parallel_warnings.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    name: str


class MyDict(OrderedDict):
    """A user-defined subclass of OrderedDict."""


class First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.again = self.encode

    def forward(self, x):
        return self.again(self.decode(self.encode(x)))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})
        self.layers = nn.ModuleDict({"one": nn.Linear(4, 4)})

    def forward(self, x):
        for weight in self.weights:
            x = x * weight
        return self.layers["one"](x) + self.table["a"] * self.table["b"]


class Locked(nn.Module):
    """A model that holds a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        with self.lock:
            return self.linear(x)


class PlainTensors(nn.Module):
    """Holds tensors that are neither parameters nor buffers, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(4)
        self.several = {"a": [torch.randn(4), 3], "b": (torch.randn(4),)}
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x):
        return x * self.table + self.several["a"][0] * self.several["a"][1] - self.several["b"][0] * self.hidden


class Keywords(nn.Module):
    def forward(self, x, *, mask=None, scale=1.0, flag=False):
        x = x * scale if flag else x
        return x if mask is None else x.masked_fill(mask[:, None], 0.0)


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x)
        return {
            "dict": lambda: {"y": y, "nested": {"x": [x, (y, None)]}, "name": "a"},
            "namedtuple": lambda: Pair(y, (x, "text")),
            "dataclass": lambda: Output(y, [x, y], "a"),
            "mydict": lambda: MyDict(y=y, x=x),
            "list": lambda: [y, x],
            "none": lambda: None,
            "text": lambda: "always the same",
        }[self.kind]()


def graph_module():
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))


def conv():
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model.eval()


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


def parametrized():
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Double())
    return model


def old_spectral_norm():
    """A layer after power iterations: random vectors may give a norm near 0, and weights too large to compare."""
    layer = nn.utils.spectral_norm(nn.Linear(4, 4), n_power_iterations=15)
    layer(torch.zeros(1, 4))
    return layer.eval()


def old_weight_norm():
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.ReLU())


FLAT = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU()),
    "old weight_norm": old_weight_norm,
    "old spectral_norm": old_spectral_norm,
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "parametrized": parametrized,
    "tied": Tied,
    "lists": Lists,
    "graph": graph_module,
    "locked": Locked,
    "plain tensors": PlainTensors,
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    **{
        kind: lambda kind=kind: Structured(kind)
        for kind in ("dict", "namedtuple", "dataclass", "mydict", "list", "none", "text")
    },
}
SEQUENCES = {
    "conv": lambda: nn.Sequential(nn.Flatten(0, 0), conv()),
    "lstm": lambda: First(nn.LSTM(4, 3, batch_first=True)),
    "bilstm": lambda: First(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)),
    "gru": lambda: First(nn.GRU(4, 3, batch_first=True)),
    "attention": lambda: SelfAttention().eval(),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
    "encoder in training": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}
MODELS = {name: make() for name, make in {**FLAT, **SEQUENCES}.items() if name != "old weight_norm"}

rows_and_lanes = given(rows=st.integers(0, 17), lanes=st.integers(1, 5), grad=st.booleans())
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def assert_same(one, other):
    """Assert equal types, structure, and values."""
    assert type(one) is type(other)
    if isinstance(one, Output):
        assert_close((one.logits, one.hidden), (other.logits, other.hidden))
        assert one.name == other.name
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert_close(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("name", MODELS)
@rows_and_lanes
@few
@pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients:UserWarning")
def test_outputs_equal_the_plain_ones(name, rows, lanes, grad):
    """Models of every kind have the plain output for every number of rows and lanes, with and without gradients.

    The shards have every row once, in different sizes, unless the call is plain.
    """
    model = MODELS[name]
    shape = (rows, 4, 5) if name == "conv" else (rows, 5, 4) if name in SEQUENCES else (rows, 4)
    x = torch.randn(shape)
    if rows == 0 and name in ("lstm", "bilstm", "gru", "encoder", "encoder in training", "attention"):
        return
    with torch.set_grad_enabled(grad):
        plain = model(x.clone())
        with parallel(model, ["cpu"] * lanes) as p:
            for _ in range(2):
                assert_same(model(x.clone()), plain)
            shards = p.stats().shards
    if lanes == 1 or rows <= 2 or (rows, lanes) == (4, 2):
        assert shards == ()
    else:
        assert sum(shards) == rows
        assert len(shards) in (min(rows, lanes), min(rows, lanes) - 1)
        assert len(set(shards)) > 1


def test_old_weight_norm_has_the_plain_output():
    """Every lane computes the weight in its forward pre-hook."""
    model = old_weight_norm()
    x = torch.randn(7, 4)
    with parallel(model, ["cpu"] * 3):
        for _ in range(3):
            assert_close(model(x), model[1](model[0](x)))
    model(x).sum().backward()


@rows_and_lanes
@few
def test_embedding_bags_are_cut_by_rows(rows, lanes, grad):
    """An EmbeddingBag with 2-d indices has the plain output."""
    model = nn.EmbeddingBag(10, 4)
    ids = torch.randint(0, 10, (rows, 6))
    plain = model(ids)
    with parallel(model, ["cpu"] * lanes):
        for _ in range(2):
            assert_close(model(ids), plain)


@given(
    rows=st.integers(0, 9),
    lanes=st.integers(1, 4),
    masked=st.booleans(),
    scale=st.sampled_from([1.0, 2.0]),
    flag=st.booleans(),
)
@few
def test_keyword_arguments_are_cut_like_positional_ones(rows, lanes, masked, scale, flag):
    """Tensors in keyword arguments are cut; numbers, flags, and None go to every lane."""
    model = Keywords()
    x = torch.randn(rows, 3)
    kwargs = {"mask": torch.arange(rows) % 2 == 0 if masked else None, "scale": scale, "flag": flag}
    plain = model(x, **kwargs)
    with parallel(model, ["cpu"] * lanes):
        for _ in range(2):
            assert_close(model(x, **kwargs), plain)
            assert_close(model(x=x, **kwargs), plain)


@given(rows=st.integers(1, 9), lanes=st.integers(2, 4), dim=st.sampled_from([0, 1, 2, -1, -2]))
@few
def test_rows_may_lie_on_any_dim(rows, lanes, dim):
    """`dim` is the dim of the rows in inputs and outputs, and may be negative."""
    shape = [2, 3, 4]
    shape[dim] = rows
    x = torch.randn(shape)
    with parallel(torch.tanh, ["cpu"] * lanes, dim=dim) as p:
        for _ in range(2):
            assert_close(p(x), torch.tanh(x))


def test_zero_rows_run_once_plainly():
    """A batch of zero rows is one plain call."""
    calls = []

    def target(x):
        calls.append(tuple(x.shape))
        return x

    with parallel(target, ["cpu"] * 3) as p:
        assert p(torch.zeros(0, 4)).shape == (0, 4)
        assert p.stats().plain == 1
    assert calls == [(0, 4)]


def test_a_call_without_tensors_runs_once_plainly():
    """A call without tensors is one plain call in the caller's thread."""
    calls = []

    def target(*args, **kwargs):
        calls.append(threading.get_ident())
        return args, kwargs

    with parallel(target, ["cpu"] * 3) as p:
        assert p(1, "a", None, k=[2.0]) == ((1, "a", None), {"k": [2.0]})
        assert p() == ((), {})
        assert p.stats().plain == 2
    assert calls == [threading.get_ident()] * 2


def test_fewer_rows_than_lanes_leave_lanes_idle():
    """Two rows on four lanes are two shards of one row."""
    with parallel(torch.tanh, ["cpu"] * 4, out_dims=0) as p:
        p(torch.zeros(2, 3))
        assert p.stats().shards == (1, 1)
        assert [lane.rows for lane in p.stats().lanes] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("rows", "lanes", "sizes"),
    [
        (9, 2, (5, 4)),
        (8, 2, (5, 3)),
        (16, 2, (9, 7)),
        (6, 2, (4, 2)),
        (3, 2, (2, 1)),
        (9, 3, (4, 3, 2)),
        (6, 3, (4, 2)),
        (3, 3, (2, 1)),
        (8, 4, (3, 3, 2)),
        (16, 4, (5, 4, 4, 3)),
        (4, 4, (2, 1, 1)),
    ],
)
def test_the_sizes_of_shards_differ(rows, lanes, sizes):
    """Without `out_dims`, every call has shards of different sizes, in row order."""
    x = torch.randn(rows, 2)
    with parallel(lambda x: x + 1, ["cpu"] * lanes) as p:
        for _ in range(3):
            assert torch.equal(p(x), x + 1)
            assert p.stats().shards == sizes
        assert p.stats().plain == 0


@pytest.mark.parametrize(("rows", "lanes"), [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4)])
def test_a_call_with_too_few_rows_runs_plainly(rows, lanes):
    """If the rows cannot be cut into shards of different sizes, each call is plain, also a call with another output."""
    seen = []

    def target(x):
        seen.append((len(x), threading.get_ident()))
        return x + 1, len(x)

    x = torch.randn(rows, 2)
    with parallel(target, ["cpu"] * lanes) as p:
        for _ in range(3):
            y, count = p(x)
            assert torch.equal(y, x + 1)
            assert count == rows
        assert (p.stats().calls, p.stats().plain, p.stats().shards) == (3, 3, ())
    assert seen == [(rows, threading.get_ident())] * 3


@pytest.mark.parametrize("out_dims", [0, (0, 0)])
def test_shards_of_a_declared_output_are_balanced(out_dims):
    """With `out_dims` for every output, shards are balanced."""
    seen = []

    def target(x):
        seen.append(len(x))
        return x + 1, x.sum(1)

    x = torch.randn(4, 3)
    with parallel(target, ["cpu"] * 2, out_dims=out_dims) as p:
        assert_close(p(x), (x + 1, x.sum(1)))
        assert (p.stats().shards, p.stats().plain) == ((2, 2), 0)
    assert seen == [2, 2]


def test_a_lazy_module_gets_its_shapes_from_the_first_call():
    """The first call of a lazy module is plain and sets its shapes. Later calls are parallel."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU()).eval()
    x = torch.randn(7, 5)
    with torch.no_grad(), parallel(model, ["cpu"] * 3) as p:
        first = model(x)
        assert p.stats().plain == 1
        assert_close(model(x), first)
        assert p.stats().shards == (3, 2, 2)
    assert type(model[0]) is nn.Linear
    assert_close(model(x), first)


def test_spectral_norm_in_training_has_the_plain_output():
    """Each lane starts its power iteration from the same vectors, so outputs equal the plain ones over several steps."""
    torch.manual_seed(0)
    model, plain = parametrizations.spectral_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    with parallel(model, ["cpu"] * 3):
        for _ in range(4):
            x = torch.randn(7, 4)
            assert_close(model(x), plain(x))
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_model_can_write_to_its_input():
    """An in-place operation on the input has the plain output and changes the caller's tensor, as in a plain call."""

    def target(x):
        return x.mul_(2) + 1

    x = torch.ones(7, 2)
    with parallel(target, ["cpu"] * 3) as p:
        assert p(x).tolist() == [[3.0, 3.0]] * 7
    assert x.tolist() == [[2.0, 2.0]] * 7


class AddsInPlace(nn.Module):
    """Adds a parameter to its input in place, as is common for position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        x += self.bias
        return x * 2


def test_a_model_can_add_a_parameter_to_its_input_in_place():
    """With gradients enabled, `x += self.bias` on an input that requires no gradient has the plain output and gradients."""
    model = AddsInPlace()
    x = torch.randn(7, 4)
    plain = model(x.clone())
    with parallel(model, ["cpu"] * 3):
        for calls in (1, 2):
            y = model(x.clone())
            assert_close(y, plain)
            y.sum().backward()
            assert_close(model.bias.grad, torch.full((4,), 14.0 * calls))


def test_writing_to_an_input_with_a_graph_raises_torchs_error():
    """Lanes that write in place to a non-leaf tensor would race in its graph. Torch's error has a note with the lane."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(7, 4, requires_grad=True)
    with parallel(model, ["cpu"] * 3), pytest.raises(RuntimeError, match="modified inplace") as caught:
        model(x * 1.0)
    assert any("in lane 0" in note for note in caught.value.__notes__)


# -- cutting and joining -------------------------------------------------------------------------------------------------


def test_unequal_row_counts_are_refused():
    """The error names both arguments, their row counts, and `in_dims`."""
    with (
        parallel(Keywords(), ["cpu"] * 2) as p,
        pytest.raises(ShardError, match=r'kwargs\["mask"\] has 2 .*args\[0\] has 6.*in_dims=\{"mask": None\}'),
    ):
        p(torch.zeros(6, 3), mask=torch.zeros(2, dtype=torch.bool))


def test_an_ambiguous_list_is_refused():
    """A list as long as the batch may be cut or not, so the error shows both values of `in_dims`."""

    def target(x, texts):
        return x

    with (
        parallel(target, ["cpu"] * 2) as p,
        pytest.raises(ShardError, match=r'in_dims=\{"texts": "items"\}.*in_dims=\{"texts": None\}'),
    ):
        p(torch.zeros(3, 1), ["a", "b", "c"])


@pytest.mark.parametrize("by_item", ["items", 0])
def test_in_dims_of_a_list(by_item):
    """With "items" or 0, a list is cut with the rows. With None, every lane gets the whole list."""
    with parallel(lambda x, texts: x + len(texts), ["cpu"] * 2, in_dims={"texts": by_item}) as p:
        assert p(torch.zeros(3, 1), ["a", "b", "c"])[:, 0].tolist() == [2.0, 2.0, 1.0]
    with parallel(lambda x, texts: x + len(texts), ["cpu"] * 2, in_dims={"texts": None}) as p:
        assert p(torch.zeros(3, 1), texts=("a", "b", "c"))[:, 0].tolist() == [3.0, 3.0, 3.0]


def test_in_dims_apply_to_positional_and_keyword_arguments():
    """With None in `in_dims`, a table goes whole to every lane, as a positional or keyword argument."""

    def target(ids, table):
        return table[ids]

    table = torch.randn(5, 2)
    ids = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    with parallel(target, ["cpu"] * 3, in_dims={"table": None}) as p:
        assert_close(p(ids, table), table[ids])
        assert_close(p(ids, table=table), table[ids])
        assert_close(p(ids=ids, table=table), table[ids])


def test_in_dims_of_a_module_name_the_parameters_of_forward():
    """For a module, the names in `in_dims` are parameters of forward."""

    class Model(nn.Module):
        def forward(self, x, columns):
            return x + columns.T

    x, columns = torch.randn(7, 3), torch.randn(3, 7)
    with parallel(Model(), ["cpu"] * 3, in_dims={"columns": 1}) as p:
        assert_close(p(x, columns), x + columns.T)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_out_of_range_is_refused(dim):
    """A batch without dim `dim` raises ShardError, which names its shape."""
    with parallel(torch.tanh, ["cpu"] * 2, dim=dim) as p, pytest.raises(ShardError, match=r"out of range.*\(4, 3\)"):
        p(torch.zeros(4, 3))


def test_a_tensor_of_one_row_next_to_larger_ones_goes_to_every_lane():
    """A tensor of size 1 on `dim` is broadcast, as in torch."""
    x, one = torch.randn(7, 3), torch.randn(1, 3)
    with parallel(torch.add, ["cpu"] * 3) as p:
        assert_close(p(x, one), x + one)


def test_a_mean_loss_stays_a_scalar():
    """With reduce="mean", 0-d floats are weighted by the rows of their shards, so a mean over rows is exact."""
    x = torch.randn(7, 3)
    with parallel(lambda x: x.mean(), ["cpu"] * 3, reduce="mean") as p:
        for _ in range(2):
            assert_close(p(x), x.mean())


@pytest.mark.parametrize(
    ("reduce", "want"),
    [("sum", 7.0), ("stack", [3.0, 2.0, 2.0]), (lambda v: v.max(), 3.0)],
    ids=["sum", "stack", "callable"],
)
def test_reduce_of_scalars(reduce, want):
    """`reduce` can be "sum", "stack", or a function of the vector of scalars."""
    with parallel(lambda x: x.sum(), ["cpu"] * 3, reduce=reduce) as p:
        assert p(torch.ones(7)).tolist() == want


@pytest.mark.parametrize("scalar", [lambda x: (x > 0).sum(), lambda x: (x > 0).all()], ids=["int", "bool"])
def test_a_scalar_count_has_no_mean(scalar):
    """With reduce="mean", 0-d ints and bools raise GatherError, which names another reduction."""
    with parallel(scalar, ["cpu"] * 3, reduce="mean") as p, pytest.raises(GatherError, match='reduce="sum"'):
        p(torch.ones(7))


def test_ragged_outputs_are_refused():
    """The error names the place, both shapes, and join="list"."""

    def target(x):
        return {"a": [x, torch.zeros(len(x), len(x))]}

    with (
        parallel(target, ["cpu"] * 2) as p,
        pytest.raises(GatherError, match=r'\["a"\]\[1\].*\(4, 4\).*\(3, 3\).*join="list"'),
    ):
        p(torch.zeros(7, 2))


def test_join_list_gives_the_outputs_of_the_lanes():
    """With join="list", ragged outputs are returned unchanged in lane order."""
    with parallel(lambda x: torch.zeros(len(x), len(x)), ["cpu"] * 3, join="list") as p:
        assert [tuple(output.shape) for output in p(torch.zeros(7, 2))] == [(3, 3), (2, 2), (2, 2)]


def test_join_list_gives_a_list_for_every_batch():
    """With join="list", a batch of zero rows or one row also returns a list."""
    with parallel(lambda x: x + 1, ["cpu"] * 3, join="list") as p:
        for rows in (7, 1, 0):
            outputs = p(torch.zeros(rows, 2))
            assert isinstance(outputs, list), rows
            assert sum(map(len, outputs)) == rows


def test_reduce_stack_gives_a_vector_for_every_batch():
    """With reduce="stack", a batch of one row returns a vector of one value."""
    with parallel(lambda x: x.sum(), ["cpu"] * 3, reduce="stack") as p:
        assert p(torch.ones(1, 2)).tolist() == [2.0]
        assert p(torch.ones(3, 2)).tolist() == [4.0, 2.0]
        assert p(torch.ones(1, 2)).tolist() == [2.0]


def test_outputs_with_unequal_keys_are_refused():
    """Lanes must return equal keys. The error names the lanes and a key."""

    def target(x):
        return {"a": x, "b": x} if len(x) == 3 else {"a": x}

    with parallel(target, ["cpu"] * 2) as p, pytest.raises(GatherError, match=r"lane 0.*'b'.*lane 1"):
        p(torch.zeros(5, 2))


def test_numbers_that_differ_between_lanes_are_refused():
    """Python numbers that differ between lanes are refused without `reduce`. The error names their place."""
    with parallel(lambda x: (x, len(x)), ["cpu"] * 2) as p, pytest.raises(GatherError, match=r"output\[1\]"):
        p(torch.zeros(5, 2))


def test_none_in_one_lane_and_a_tensor_in_another_is_refused():
    """None and a tensor cannot be joined."""
    with parallel(lambda x: x if len(x) == 3 else None, ["cpu"] * 2) as p, pytest.raises(GatherError):
        p(torch.zeros(5, 2))


def test_a_returned_parameter_is_not_joined():
    """If forward returns a parameter, the call returns the model's own parameter once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return x, self.table

    model = Model()
    with parallel(model, ["cpu"] * 3):
        for _ in range(2):
            assert model(torch.zeros(7, 2))[1] is model.table


def test_a_returned_buffer_is_not_joined():
    """If forward returns a buffer, the call returns it once, with its shape."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(3, 2))

        def forward(self, x):
            return x, self.table

    model = Model()
    with parallel(model, ["cpu"] * 3):
        for _ in range(2):
            assert_close(model(torch.zeros(7, 2))[1], model.table)


def test_output_device():
    """Outputs lie on `output_device`."""
    with parallel(torch.tanh, ["cpu"] * 2, output_device="cpu") as p:
        assert p(torch.zeros(5)).device == torch.device("cpu")


def test_unusual_dtypes_and_layouts_are_cut():
    """Int, bool, complex, half, and non-contiguous tensors keep their dtype and values."""
    for x in (
        torch.arange(7),
        torch.arange(7) > 3,
        torch.randn(7, 2, dtype=torch.complex64),
        torch.randn(7, 2).half(),
        torch.randn(3, 7).t(),
        torch.randn(1, 3).expand(7, 3),
    ):
        with parallel(lambda x: x.clone(), ["cpu"] * 3) as p:
            outputs = p(x), p(x)
        assert {y.dtype for y in outputs} == {x.dtype}
        assert all(torch.equal(y, x) for y in outputs)
