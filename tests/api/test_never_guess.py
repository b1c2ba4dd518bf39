"""Right or refused, from the first call.

Each call has the plain output, or raises an error that names the option to set. The same call does the same every time.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from parawrap import GatherError, ReplicaError, ShardError, parallel

LANES = pytest.mark.parametrize("lanes", [2, 3, 4])
ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12)
SOME_ROWS = (2, 4, 5, 8, 9)
CALLS = 6

# These tests sweep row counts, also small ones. test_parallel_warnings.py tests the warning.
pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")


def lanes_on_cpu(count):
    return ["cpu"] * count


def assert_equal(one, other):
    """Compare type, structure, and values."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(one, np.ndarray) and one.dtype.kind in "fc":
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    elif isinstance(one, torch.Tensor):
        assert_close(one, other)
    elif isinstance(one, (float, np.floating)):
        assert one == pytest.approx(other, rel=1e-5)
    else:
        assert one == other


def is_cut(rows, lanes):
    """True if a call without `out_dims` is cut: not with two rows, or with four on two lanes."""
    return rows > 2 and (rows, lanes) != (4, 2)


def assert_equals_plain(target, lanes, make, rows=SOME_ROWS, **options):
    """Assert that six calls have the plain output, for several row counts."""
    for count in rows:
        args = make(count)
        plain = target(*args)
        with parallel(target, lanes_on_cpu(lanes), **options) as p:
            for _ in range(CALLS):
                assert_equal(p(*args), plain)


def assert_refused(target, lanes, make, rows=ROWS, option="out_dims", **options):
    """Assert that six calls raise an error that names `option`, for several row counts.

    A call that is not cut has the plain output instead, six times.
    """
    for count in rows:
        args = make(count)
        plain = target(*args)
        with parallel(target, lanes_on_cpu(lanes), **options) as p:
            outcomes = [equal_or_refused(p, args, plain, option) for _ in range(CALLS)]
        assert outcomes == ["refused" if is_cut(count, lanes) else "equal"] * CALLS, f"{count} rows"


def equal_or_refused(p, args, plain, option="out_dims"):
    """Make a call. Return "refused" if its error names the option, or "equal" if its output is the plain one."""
    try:
        output = p(*args)
    except GatherError as error:
        return (
            "refused" if option in str(error) or "register_split(" in str(error) else f"refused without {option}: {error}"
        )
    assert_equal(output, plain)
    return "equal"


def columns(rows):
    return (torch.arange(rows * 3.0).reshape(rows, 3) % 7,)


# -- plain output: numbers with reduce="sum" -----------------------------------------------------------------------------


def count_correct(logits, labels):
    return (logits.argmax(1) == labels).sum(), len(labels)


class Counts(nn.Module):
    """Returns counts of a batch in the structure that `kind` names."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, logits, labels):
        correct, total = count_correct(logits, labels)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {
            "tuple": (correct, total),
            "dict": {"loss": loss, "correct": correct, "total": total},
            "python": {"loss": loss.item(), "nested": [correct.item(), {"total": total}]},
            "numpy": (correct.numpy()[()], np.float64(total)),
        }[self.kind]


def scored(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 5, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


@LANES
@pytest.mark.parametrize("kind", ["tuple", "dict", "python", "numpy"])
def test_counts_add_up(kind, lanes):
    """With reduce="sum", counts and summed losses equal those of the plain call, also for 0 and 1 rows."""
    assert_equals_plain(Counts(kind), lanes, scored, (0, 1, *SOME_ROWS), reduce="sum")


@LANES
def test_counts_of_a_function_add_up(lanes):
    """With reduce="sum", a function that returns (n_correct, len(y)) has the plain counts."""
    assert_equals_plain(count_correct, lanes, scored, (0, 1, *SOME_ROWS), reduce="sum")


# -- plain output: arrays and lists --------------------------------------------------------------------------------------


@LANES
@pytest.mark.parametrize(
    "target",
    [
        lambda x: x.numpy() * 2,
        lambda x: np.zeros(len(x)),
        lambda x: np.ones((len(x), 2), dtype=np.int32),
        lambda x: {"a": [x.numpy(), x.sum(1).numpy()]},
        lambda x: np.array([f"row {int(row[0])}" for row in x]),
    ],
    ids=["values", "equal", "equal ints", "nested", "strings"],
)
def test_arrays_with_the_rows_are_concatenated(target, lanes):
    """NumPy arrays with one entry per row are concatenated, also if every lane returns equal values."""
    assert_equals_plain(target, lanes, columns)


@LANES
def test_an_array_that_does_not_depend_on_the_rows_is_never_repeated(lanes):
    """An array of three values is refused, even if each lane has three rows. With out_dims=None, it is returned once."""
    assert_refused(lambda x: (x, np.arange(3)), lanes, columns)
    assert_equals_plain(lambda x: (x, np.arange(3)), lanes, columns, ROWS, out_dims=(0, None))


@LANES
def test_an_array_computed_over_all_rows_is_refused(lanes):
    """A histogram of the batch is refused."""
    assert_refused(lambda x: np.histogram(x.numpy(), 3)[0] + len(x), lanes, columns)


@LANES
@pytest.mark.parametrize(
    "target",
    [
        lambda x: [f"row {int(row[0])}" for row in x],
        lambda x: ["same"] * len(x),
        lambda x: [0] * len(x),
        lambda x: [row[: 1 + int(row[0]) % 3] for row in x],
        lambda x: [{"label": str(int(row[0])), "box": row} for row in x],
        lambda x: {"texts": ["a"] * len(x), "logits": x},
        lambda x: tuple(int(row[0]) for row in x),
    ],
    ids=["strings", "equal strings", "equal ints", "ragged tensors", "dicts", "in a dict", "tuple"],
)
def test_lists_with_one_item_per_row_are_concatenated(target, lanes):
    """A list with one item per row is concatenated, also if the items are equal or differ in shape."""
    assert_equals_plain(target, lanes, columns)


@LANES
def test_a_list_as_long_as_a_shard_is_not_concatenated(lanes):
    """A list of two outputs stays a list of two outputs, even if every lane has two rows."""
    assert_equals_plain(lambda x: [x, (x + 1, x.sum(1))], lanes, columns, rows=(2, 2 * lanes, 3 * lanes))


# -- plain output: packed sequences --------------------------------------------------------------------------------------


class Packs(nn.Module):
    """Takes padded rows and their lengths, and returns a packed sequence."""

    def __init__(self, *, in_order):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.in_order = in_order

    def forward(self, padded, lengths):
        packed = rnn.pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=self.in_order)
        return self.lstm(packed)[0]


class OnPacked(nn.Module):
    """Takes and returns a packed sequence."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, packed):
        return self.lstm(packed)[0]


def lengths_of(rows, *, in_order):
    lengths = 1 + torch.arange(rows) * 3 % 5
    return lengths.sort(descending=True).values if in_order else lengths


def assert_same_packed(one, other):
    assert type(one) is rnn.PackedSequence
    assert_close(one.data, other.data)
    assert torch.equal(one.batch_sizes, other.batch_sizes)
    for mine, theirs in ((one.sorted_indices, other.sorted_indices), (one.unsorted_indices, other.unsorted_indices)):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@LANES
@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
def test_a_packed_output_keeps_the_order_of_the_rows(in_order, lanes):
    """A PackedSequence that the model makes equals the plain one. If rows are sorted, `sorted_indices` is None."""
    model = Packs(in_order=in_order)
    for rows in SOME_ROWS:
        padded, lengths = torch.randn(rows, 5, 3), lengths_of(rows, in_order=in_order)
        plain = model(padded, lengths)
        with parallel(model, lanes_on_cpu(lanes)):
            for _ in range(3):
                assert_same_packed(model(padded, lengths), plain)


@LANES
@pytest.mark.parametrize("in_order", [True, False], ids=["sorted", "unsorted"])
def test_a_packed_argument_is_cut_by_rows(in_order, lanes):
    """A model that takes and returns packed sequences has the plain output and gradients."""
    model = OnPacked()
    for rows in SOME_ROWS:
        lengths = lengths_of(rows, in_order=in_order)
        packed = rnn.pack_padded_sequence(torch.randn(5, rows, 3), lengths, enforce_sorted=in_order)
        model.zero_grad()
        plain = model(packed)
        plain.data.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        with parallel(model, lanes_on_cpu(lanes)):
            for _ in range(3):
                model.zero_grad()
                output = model(packed)
                assert_same_packed(output, plain)
                output.data.square().sum().backward()
                assert_close([parameter.grad for parameter in model.parameters()], gradients)


@LANES
def test_map_passes_a_packed_batch_as_one_argument(lanes):
    """A PackedSequence is not spread, although it is a tuple."""
    model = OnPacked()
    batches = [rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)]) for _ in range(5)]
    plain = [model(batch) for batch in batches]
    with parallel(model, lanes_on_cpu(lanes)) as p:
        for output, expected in zip(p.map(batches), plain, strict=True):
            assert_same_packed(output, expected)


# -- plain output: dropout and checkpoints -------------------------------------------------------------------------------


class Drops(nn.Module):
    """Dropout of x * weight. If both are ones, the output and the gradient of x equal the mask."""

    def __init__(self, inside=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.dropout = nn.Dropout(0.5)
        self.inside = inside

    def forward(self, x):
        if self.inside is None:
            return self.dropped(x)
        return checkpoint(self.dropped, x, use_reentrant=self.inside == "reentrant")

    def dropped(self, x):
        return self.dropout(x * self.weight)


@LANES
@pytest.mark.parametrize("form", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["inside", "around", "both"])
def test_a_checkpoint_recomputes_the_same_dropout(where, form, lanes):
    """Backward recomputes the masks of forward, with a checkpoint inside or around the parallel call."""
    model = Drops(form if where != "around" else None)
    for rows in (2, 4, 5, 8, 12):
        with parallel(model, lanes_on_cpu(lanes)):
            for _ in range(4):
                model.zero_grad()
                x = torch.ones(rows, 6, requires_grad=True)
                y = model(x) if where == "inside" else checkpoint(model, x, use_reentrant=form == "reentrant")
                torch.rand(3)  # changes the generator's state between the two passes
                y.sum().backward()
                assert torch.equal(x.grad, y.detach())
                assert torch.equal(model.weight.grad, y.detach().sum(0))


def outcomes_of_one_seed(model, rows, lanes, **options):
    """Return the outputs of six calls after the same seed, each with the number that torch draws next."""
    x = torch.randn(rows, 6)
    outcomes = []
    with parallel(model, lanes_on_cpu(lanes), **options):
        for _ in range(CALLS):
            torch.manual_seed(3)
            outcomes.append((model(x), torch.rand(())))
    return outcomes


@LANES
def test_a_seed_gives_the_same_numbers_every_time(lanes):
    """With gradients, every call after the same seed has the same dropout and the same later random numbers."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.2))
    for rows in ROWS:
        (first, drawn), *others = outcomes_of_one_seed(model, rows, lanes)
        assert all(torch.equal(y, first) and number == drawn for y, number in others)


@LANES
@pytest.mark.usefixtures("_deterministic")
def test_a_seed_gives_the_same_numbers_without_gradients_under_deterministic_algorithms(lanes):
    """Under torch.use_deterministic_algorithms(True), this holds without gradients too."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.2))
    with torch.no_grad():
        for rows in ROWS:
            (first, drawn), *others = outcomes_of_one_seed(model, rows, lanes)
            assert all(torch.equal(y, first) and number == drawn for y, number in others)


class Draws(nn.Module):
    """Draws from torch's default generator, or from a generator in an argument or attribute."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator
        type(self).threads = []  # on the class, because a replica has its own attributes

    def forward(self, x, generator=None):
        self.threads.append(threading.get_ident())
        return x + torch.rand(x.shape, generator=self.generator if generator is None else generator)


@LANES
@pytest.mark.parametrize("source", ["argument", "attribute"])
def test_lanes_that_share_a_generator_draw_in_turns(source, lanes):
    """If an argument or attribute is a generator, all lanes run in the caller's thread, in order, at every call."""
    model = Draws(generator=torch.Generator() if source == "attribute" else None)
    generator = model.generator or torch.Generator()
    arguments = (generator,) if source == "argument" else ()
    for rows in ROWS:
        model.threads.clear()
        x = torch.zeros(rows, 2)
        with torch.no_grad(), parallel(model, lanes_on_cpu(lanes)):
            generator.manual_seed(5)
            outputs = [model(x, *arguments) for _ in range(CALLS)]
        generator.manual_seed(5)
        assert_close(outputs, [torch.rand(x.shape, generator=generator) for _ in range(CALLS)])
        assert set(model.threads) == {threading.get_ident()}


# -- plain output: declared outputs --------------------------------------------------------------------------------------


@LANES
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_hidden_states_are_joined_with_out_dims(kind, layers, lanes):
    """With out_dims=(0, (1, 1)) for an LSTM and (0, 1) for a GRU, outputs and hidden states equal the plain ones."""
    out_dims = (0, (1, 1)) if kind is nn.LSTM else (0, 1)
    model = kind(3, 4, layers, batch_first=True)
    assert_equals_plain(model, lanes, lambda rows: (torch.randn(rows, 5, 3),), out_dims=out_dims)


@LANES
def test_hidden_states_of_time_first_batches_are_joined_with_out_dims(lanes):
    """If rows lie on dim 1, out_dims=1 joins the outputs and hidden states of an LSTM."""
    assert_equals_plain(nn.LSTM(3, 4, 2), lanes, lambda rows: (torch.randn(5, rows, 3),), dim=1, out_dims=1)


@LANES
@pytest.mark.parametrize("batch_first", [True, False], ids=["rows on dim 0", "rows on dim 1"])
def test_attention_weights_are_joined_with_out_dims(batch_first, lanes):
    """The output of attention has its rows on `dim`; the weights have their rows on dim 0."""
    model = nn.MultiheadAttention(4, 2, batch_first=batch_first).eval()
    dim = 0 if batch_first else 1

    def make(rows):
        x = torch.randn(rows, 3, 4) if batch_first else torch.randn(3, rows, 4)
        return x, x, x

    with torch.no_grad():
        assert_equals_plain(model, lanes, make, dim=dim, out_dims=(dim, 0))


# -- plain output: compiled callers, copies, recursion -------------------------------------------------------------------


@pytest.fixture
def _compiler_reset():
    """Reset the compiler, and ignore a warning: after a graph break, the compiler reads `.grad` of a non-leaf tensor."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor", category=UserWarning)
        yield
    torch._dynamo.reset()


@LANES
@pytest.mark.usefixtures("_compiler_reset")
def test_a_compiled_function_around_the_model_has_the_plain_output(lanes):
    """A compiled function that calls the model has the plain output before, inside, and after the block."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(9, 4)
    plain = torch.tanh(model(x)) * 2

    def step(x):
        return torch.tanh(model(x)) * 2

    compiled = torch.compile(step, backend="eager")
    assert_close(compiled(x), plain)
    with parallel(model, lanes_on_cpu(lanes)) as p:
        for calls in (1, 2, 3):
            assert_close(compiled(x), plain)
            assert (p.stats().calls, p.stats().plain) == (calls, 0)
        model.zero_grad()
        compiled(x).sum().backward()
        assert p.stats().calls == 4
    inside = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled(x).sum().backward()
    assert_close(inside, [parameter.grad for parameter in model.parameters()])
    assert_close(compiled(x), plain)


@pytest.mark.usefixtures("_compiler_reset")
def test_a_function_compiled_inside_the_block_works_after_it():
    """A function that is first called, and so compiled, inside the block has the plain output there and after it."""
    model = nn.Linear(4, 3)
    x = torch.randn(9, 4)
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager")
    with parallel(model, lanes_on_cpu(2)) as p:
        for _ in range(2):
            assert_close(compiled(x), nn.functional.linear(x, model.weight, model.bias) + 1)
        assert (p.stats().calls, p.stats().plain) == (2, 0)
    assert_close(compiled(x), model(x) + 1)


@pytest.mark.usefixtures("_compiler_reset")
def test_a_fullgraph_function_around_the_model_raises_inside_the_block():
    """With fullgraph=True, the function raises inside the block, because the call breaks the graph. It works after it."""
    model = nn.Linear(4, 3)
    x = torch.randn(9, 4)
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    with parallel(model, lanes_on_cpu(2)), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x)
    assert_close(compiled(x), model(x) + 1)


def reduced(module):
    return pickle.loads(pickle.dumps(module))


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@LANES
@pytest.mark.parametrize("duplicate", [reduced, saved], ids=["pickle", "torch.save"])
@pytest.mark.filterwarnings("ignore:.*torch.package:UserWarning")
def test_a_copy_of_an_fx_module_made_in_the_block_is_a_plain_module(duplicate, lanes):
    """Inside the block, pickle and torch.save give a plain fx module with the same output."""
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
    x = torch.randn(9, 4)
    plain = model(x)
    with parallel(model, lanes_on_cpu(lanes)) as p:
        for _ in range(2):
            assert_close(model(x), plain)
        clone = duplicate(model)
        calls = p.stats().calls
        assert_close(clone(x), plain)
        assert p.stats().calls == calls
        assert_close(model(x), plain)
    assert set(vars(clone)) == set(vars(duplicate(model)))
    assert_close(clone(x), plain)
    with torch.no_grad():
        clone.get_submodule("0").weight.zero_()
    assert_close(model(x), plain)


class Deep(nn.Module):
    """Calls itself `depth` times, through `self` or through a global reference."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x, depth):
        if depth == 0:
            return x + 1
        return self(x, depth - 1) if self.by == "self" else deep[self.by](x, depth - 1)


deep: dict[str, nn.Module] = {}


def deepest(call):
    """Return the greatest depth that the recursion limit allows."""
    reached, beyond = 1, sys.getrecursionlimit()
    while beyond - reached > 1:
        depth = (reached + beyond) // 2
        try:
            call(depth)
        except RecursionError:
            beyond = depth
        else:
            reached = depth
    return reached


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("by", ["self", "reference"])
def test_a_model_can_recurse_about_as_deep_as_a_plain_one(by, rows):
    """A block adds a fixed number of stack frames, and at most one frame per recursion level.

    A level of plain recursion has three frames: two of torch, and forward. Replicas recurse without the parallel
    `forward`. A plain call, or a call through a reference to the model, enters the parallel `forward` at each level.
    """
    deep[by] = model = Deep(by)
    x = torch.zeros(rows)
    try:
        plain = deepest(lambda depth: model(x, depth))
        with parallel(model, lanes_on_cpu(3)):
            inside = deepest(lambda depth: model(x, depth))
    finally:
        del deep[by]
    of_the_engine, per_level = 60, 3 if by == "self" and rows > 1 else 4
    assert per_level * inside >= 3 * plain - of_the_engine


@LANES
def test_a_stop_iteration_of_the_model_does_not_end_a_stream(lanes):
    """In map, StopIteration from the model becomes a RuntimeError at its batch's position."""

    def target(x):
        if x[0].item() == 3:
            return next(iter(()))
        return x

    outputs = []
    with parallel(target, lanes_on_cpu(lanes)) as p, pytest.raises(RuntimeError, match="StopIteration") as caught:
        outputs.extend(output.item() for output in p.map([torch.full((1,), float(index)) for index in range(6)]))
    assert outputs == [0, 1, 2]
    assert isinstance(caught.value.__cause__, StopIteration)


# -- refused: outputs ----------------------------------------------------------------------------------------------------


@LANES
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_hidden_states_are_refused_without_out_dims(kind, layers, lanes):
    """Hidden states of LSTM and GRU have their rows on dim 1, and are refused for every row and layer count."""
    with torch.no_grad():
        assert_refused(kind(3, 2, layers, batch_first=True), lanes, lambda rows: (torch.randn(rows, 5, 3),))


@LANES
@pytest.mark.parametrize("length", [2, 3, 4])
def test_attention_weights_of_time_first_batches_are_refused_without_out_dims(length, lanes):
    """With dim=1, attention weights have their rows on dim 0, and are refused for every row and step count."""
    model = nn.MultiheadAttention(4, 2).eval()

    def make(rows):
        x = torch.randn(length, rows, 4)
        return x, x, x

    with torch.no_grad():
        assert_refused(model, lanes, make, dim=1)


@LANES
def test_a_tensor_as_long_as_a_shard_is_never_repeated(lanes):
    """The output torch.arange(3) is refused, even if shards have three rows. With out_dims=None, it is returned once."""
    assert_refused(lambda x: (x, torch.arange(3)), lanes, columns)
    assert_equals_plain(lambda x: (x, torch.arange(3)), lanes, columns, ROWS, out_dims=(0, None))


@LANES
@pytest.mark.parametrize(
    "target",
    [
        lambda x: torch.full((3,), float(len(x))),
        lambda x: x.sum(0),
        lambda x: (x, {"total": x.sum(0, keepdim=True)}),
        lambda x: torch.cat([x, x]),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: x[x[:, 0] > 2],
    ],
    ids=["constant", "sum", "nested sum", "cat", "repeat", "filter"],
)
def test_a_tensor_without_one_entry_per_row_is_refused(target, lanes):
    """A tensor that depends on the batch, but does not have one entry per row, is refused."""
    assert_refused(target, lanes, columns)


@LANES
def test_a_square_distance_matrix_is_refused(lanes):
    """If x and y have equal row counts, torch.cdist(x, y) is refused. With in_dims={"y": None}, it has the plain output."""

    def target(x, y):
        return torch.cdist(x, y)

    def make(rows):
        return torch.randn(rows, 3), torch.randn(rows, 3)

    assert_refused(target, lanes, make)
    assert_equals_plain(target, lanes, make, in_dims={"y": None})


@LANES
@pytest.mark.parametrize(
    "target",
    [
        len,
        lambda x: float(len(x)),
        lambda x: len(x) > 3,
        lambda x: (x > 2).sum(),
        lambda x: (x > 2).all(),
        lambda x: x.mean(),
        lambda x: {"logits": x, "loss": x.square().mean()},
        lambda x: np.float32(x.sum()),
    ],
    ids=["int", "float", "bool", "count", "all", "loss", "loss in a dict", "numpy"],
)
def test_numbers_are_refused_without_reduce(target, lanes):
    """Numbers, bools, and 0-d tensors are refused in every call that is cut. The error names `reduce`."""
    assert_refused(target, lanes, columns, option="reduce")


@LANES
def test_numbers_in_lists_are_refused_without_reduce(lanes):
    """A number in a list of outputs is refused, even if the list is as long as the batch or a shard."""
    assert_refused(lambda x: (x, [x.sum()]), lanes, columns, option="reduce")
    assert_refused(lambda x: [x.mean(), x.sum()], lanes, columns, option="reduce")


@LANES
@pytest.mark.parametrize(
    "target", [lambda x: f"{len(x)} rows", lambda x: (x, {"size": str(len(x))})], ids=["string", "in a dict"]
)
def test_strings_that_depend_on_the_rows_are_refused(target, lanes):
    """A string that depends on the shard's size is refused."""
    assert_refused(target, lanes, columns)


@LANES
def test_strings_that_differ_between_lanes_are_refused(lanes):
    """Different strings from two lanes of the same call are refused."""
    assert_refused(lambda x: (x, "many" if len(x) > 1 else "one"), lanes, columns, rows=(3,))


@LANES
def test_objects_that_depend_on_the_rows_are_refused(lanes):
    """Objects without tensors that differ between lanes are refused."""
    assert_refused(lambda x: (x, torch.Size((len(x),)), range(len(x))), lanes, columns)


@LANES
def test_values_that_are_equal_in_all_lanes_are_returned_once(lanes):
    """None, strings, and objects that do not depend on the rows equal those of the plain call."""
    assert_equals_plain(lambda x: {"x": x, "none": None, "name": "a", "range": range(3), "dtype": x.dtype}, lanes, columns)


class Hidden(nn.Module):
    """Returns the output of an LSTM, or its hidden states if `hidden` is True."""

    def __init__(self, layers):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, layers, batch_first=True)
        self.hidden = False

    def forward(self, x):
        output, (states, _) = self.lstm(x)
        return states if self.hidden else output


@LANES
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_output_is_joined_without_regard_to_earlier_outputs(layers, lanes):
    """Hidden states are refused after calls whose output followed the rows, whatever their number of layers."""
    model = Hidden(layers)
    x = torch.randn(layers * lanes, 5, 3)
    with torch.no_grad():
        expected = model.lstm(x)[1][0]
        with parallel(model, lanes_on_cpu(lanes)) as p:
            for _ in range(2):
                model(torch.randn(7, 5, 3))
            model.hidden = True
            outcome = "refused" if is_cut(len(x), lanes) else "equal"
            assert [equal_or_refused(p, (x,), expected) for _ in range(CALLS)] == [outcome] * CALLS


# -- refused: arguments --------------------------------------------------------------------------------------------------


class Cache:
    """An object of a class that parawrap does not know."""

    def __init__(self, keys):
        self.keys = keys


class Slotted:
    """An object of an unknown class with slots."""

    __slots__ = ("keys",)

    def __init__(self, keys):
        self.keys = keys


@LANES
@pytest.mark.parametrize(
    "hold",
    [
        Cache,
        Slotted,
        lambda keys: Cache([{"layer": (keys,)}]),
        lambda keys: Cache(Cache(keys)),
        lambda keys: [Cache(keys)],
        lambda keys: {"a": Slotted([keys])},
    ],
    ids=["object", "slots", "containers", "nested", "list", "dict"],
)
def test_an_unknown_object_that_holds_tensors_is_refused(hold, lanes):
    """An object of an unknown class that holds tensors raises ShardError, which names `register_split` and `in_dims`."""

    def target(x, cache):
        return x

    for rows in ROWS:
        cache = hold(torch.zeros(rows, 2))
        with parallel(target, lanes_on_cpu(lanes)) as p:
            for _ in range(2):
                with pytest.raises(ShardError, match=r'register_split.*in_dims=\{"cache": (None|\{"a": None\})\}'):
                    p(torch.zeros(rows, 2), cache)
                with pytest.raises(ShardError, match=r"register_split"):
                    p(torch.zeros(rows, 2), cache=cache)


@LANES
def test_in_dims_none_passes_an_unknown_object_to_every_lane(lanes):
    """With None in `in_dims`, every lane gets the same object."""
    seen = []

    def target(x, cache):
        seen.append(cache)
        return x + cache.keys

    cache = Cache(torch.ones(2))
    with parallel(target, lanes_on_cpu(lanes), in_dims={"cache": None}) as p:
        for _ in range(2):
            assert_close(p(torch.zeros(9, 2), cache), torch.ones(9, 2))
    assert all(each is cache for each in seen)


@LANES
def test_a_strided_nested_tensor_is_refused(lanes):
    """A nested tensor with strided layout cannot be cut. The error names `in_dims`."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns once that they are a prototype
        nested = torch.nested.nested_tensor([torch.randn(size, 3) for size in (2, 4, 1, 3, 2, 5, 3)])

    def target(x):
        return x

    with parallel(target, lanes_on_cpu(lanes)) as p:
        for _ in range(2):
            with pytest.raises(ShardError, match=r"nested.*in_dims"):
                p(nested)


# -- refused: models -----------------------------------------------------------------------------------------------------


class Grows(nn.Module):
    """Creates a layer or a parameter in its first forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = nn.Module()
        self.layer = None

    def forward(self, x):
        owner = self.inner if self.kind == "nested" else self
        if getattr(owner, "layer", None) is None:
            owner.layer = nn.Parameter(torch.eye(3)) if self.kind == "parameter" else nn.Linear(3, 3)
        return x @ owner.layer if self.kind == "parameter" else owner.layer(x)


@LANES
@pytest.mark.parametrize("kind", ["layer", "parameter", "nested"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_a_layer_created_in_the_first_forward_is_refused(grad, kind, lanes):
    """Each lane would create its own layer, so the call raises ReplicaError, which suggests a call before the block."""
    for rows in (3, 5, 8, 12):
        model = Grows(kind)
        with torch.set_grad_enabled(grad), parallel(model, lanes_on_cpu(lanes)):
            for _ in range(2):
                with pytest.raises(ReplicaError, match=r"layer.*before the block"):
                    model(torch.randn(rows, 3))
        x = torch.randn(rows, 3)
        plain = model(x)
        with parallel(model, lanes_on_cpu(lanes)):
            for _ in range(2):
                assert_close(model(x), plain)


# -- every call does the same --------------------------------------------------------------------------------------------


@LANES
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_hooks_see_the_same_calls_in_every_call(grad, lanes):
    """Hooks on submodules run equally often in every call, with the same row counts."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(("forward", len(output))))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(("before", len(args[0]))))
    model[2].register_full_backward_hook(lambda module, gi, go: seen.append(("backward", len(go[0]))))
    for rows in ROWS:
        with torch.set_grad_enabled(grad), parallel(model, lanes_on_cpu(lanes)) as p:
            counts = []
            for _ in range(CALLS):
                seen.clear()
                output = model(torch.randn(rows, 3, requires_grad=grad))
                if grad:
                    output.sum().backward()
                counts.append(sorted(seen))
        sizes = p.stats().shards if is_cut(rows, lanes) else (rows,)
        assert sum(sizes) == rows
        assert [count for name, count in counts[0] if name == "forward"] == sorted(sizes)
        assert counts == [counts[0]] * CALLS


@LANES
def test_alternating_calls_do_not_affect_each_other(lanes):
    """Calls with other row counts, training flags, and grad modes in between do not change how a call is cut."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))

    def sizes(rows, *, training, grad):
        model.train(training)
        seen.clear()
        with torch.inference_mode(not grad):
            model(torch.randn(rows, 3))
        return sorted(seen)

    cases = [
        {"rows": rows, "training": training, "grad": grad}
        for rows in (4, 9, 12)
        for training, grad in ((True, True), (False, False))
    ]
    alone = []
    for case in cases:
        with parallel(model, lanes_on_cpu(lanes)):
            alone.append(sizes(**case))
    with parallel(model, lanes_on_cpu(lanes)):
        for _ in range(3):
            assert [sizes(**case) for case in cases] == alone


# -- defects that were fixed ---------------------------------------------------------------------------------------------


@LANES
def test_one_tensor_in_two_arguments_is_one_object_in_each_lane(lanes):
    """A model that compares its arguments by identity has the plain output."""
    x = torch.ones(9, 2)
    with parallel(lambda x, memory: x * 2 if memory is x else x * 3, lanes_on_cpu(lanes)) as p:
        for _ in range(3):
            assert_close(p(x, x), x * 2)
            assert_close(p(x, x.clone()), x * 3)


@pytest.mark.parametrize("out_dims", [{}, {"out_dims": {"loss": 0, "z": 0}}, {"out_dims": 0}])
def test_a_row_without_its_dim_is_not_reduced(out_dims):
    """If squeeze() makes one-row shards 0-d, they are refused instead of averaged like a loss."""

    def target(x):
        z = x.sum(1).squeeze()
        return {"loss": z.mean(), "z": z}

    with parallel(target, lanes_on_cpu(3), reduce="mean", **out_dims) as p:
        for _ in range(CALLS):
            x = torch.randn(10, 4)
            assert_close(p(x), target(x))
            with pytest.raises(GatherError, match=r"cannot be joined: (the lanes had 2, 1 rows|each lane had one row)"):
                p(torch.randn(3, 4))


@LANES
def test_a_loss_of_shards_with_one_row_is_reduced(lanes):
    """A mean is reduced for every row count, also if most shards have one row."""
    with parallel(torch.mean, lanes_on_cpu(lanes), reduce="mean") as p:
        for rows in (9, lanes, lanes):
            x = torch.randn(rows, 4)
            assert_close(p(x), x.mean())


@LANES
@pytest.mark.parametrize("step", [torch.tensor(0.0), torch.zeros(1, 2)])
def test_an_in_place_write_to_a_broadcast_tensor_is_refused(lanes, step):
    """Each lane would repeat the write, so the call raises ShardError."""

    def target(x, step):
        step += 1
        return x * step

    with parallel(target, lanes_on_cpu(lanes)) as p, pytest.raises(ShardError, match="in place"):
        p(torch.ones(9, 2), step.clone())


def test_a_model_can_write_to_its_rows_under_enable_grad_inside_no_grad():
    """Torch does not refuse the in-place write to a lane's rows."""
    weight = nn.Parameter(torch.ones(4))

    def target(x):
        with torch.enable_grad():
            x *= weight
            return x.detach()

    with torch.no_grad(), parallel(target, lanes_on_cpu(2)) as p:
        for _ in range(2):
            assert_close(p(torch.ones(9, 4)), torch.ones(9, 4))


def test_a_nested_tensor_output_is_refused():
    """The error names join="list"."""
    nest = parallel(lambda x: torch.nested.nested_tensor(list(x)), lanes_on_cpu(2))
    with nest as p, pytest.raises(GatherError, match='join="list"'):
        p(torch.randn(9, 3))
