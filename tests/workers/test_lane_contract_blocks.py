"""The contract of lanes, over each kind of lanes: the block, its modes and its model, random numbers, and errors."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
import os
import pickle
import threading
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch.profiler import profile
from torch.testing import assert_close

from parawrap import ReplicaError, SessionError, ShardError, UnsendableError
from tests.workers.lanes_of_every_kind import (  # noqa: F401
    assert_calls_are_plain,
    assert_same,
    every_kind,
    in_threads_alone,
)

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


class Several(nn.Module):
    """A model with three methods."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)

    def embed(self, x, *, scale=1.0):
        return self.linear(x).tanh() * scale

    def total(self, x):
        return self.linear(x).sum()


class Seeing(nn.Module):
    """Returns its input, and the modes of its thread."""

    def forward(self, x):
        return x, (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            str(torch.get_autocast_dtype("cpu")),
            torch.is_autocast_cache_enabled(),
            str(torch.get_default_dtype()),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            str(torch.zeros(1).device),
        )


class Reading(nn.Module):
    """Returns the value of a context variable."""

    def forward(self, x):
        return x, VARIABLE.get()


class Configured(nn.Module):
    """Reads attributes deep inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(1.0)
        self.config = {"scales": [1.0, {"last": 2.0}], "table": torch.ones(4)}

    def forward(self, x):
        first, deep = self.config["scales"]
        return self.dropout(self.linear(x)) * first * deep["last"] + self.config["table"]


class Noting(nn.Module):
    """Counts its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state = {"calls": 0}

    def forward(self, x):
        self.state["calls"] += 1
        return self.linear(x), self.state["calls"]


class Tied(nn.Module):
    """Has one weight under two names, and one layer in two places."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight
        self.again = self.encode
        self.views = {"row": self.encode.weight.detach()[0]}

    def forward(self, x):
        is_tied = self.decode.weight is self.encode.weight and self.again is self.encode
        return self.again(self.decode(self.encode(x))) + self.views["row"], is_tied


class Shared(nn.Module):
    """Writes through one of two tensors that share memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4, 4))
        self.register_buffer("row", self.table[1])

    def forward(self, x):
        self.row.fill_(3)
        return x + self.table[1]


class Failing(nn.Module):
    """Raises for negative rows."""

    def forward(self, x):
        if bool((x < 0).any()):
            raise ValueError(f"negative row {float(x.min()):.0f}")
        return x


class CustomError(Exception):
    """An error with attributes, and arguments that differ from its message."""

    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint

    def __reduce__(self):
        return _custom_error, (self.code, self.hint)


def _custom_error(code, hint):
    return CustomError(code, hint=hint)


class Growing(nn.Module):
    """Makes its layer in its first call."""

    def forward(self, x):
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 4)
        return self.head(x)


class Drawing(nn.Module):
    """Draws from its own generator."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, depth=3):
        return self.linear(x) if depth == 0 else self(self.linear(x), depth - 1)


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 2


def parametrized():
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Twice())
    return nn.Sequential(model, nn.ReLU())


class Writing(nn.Module):
    """Adds 1 to its parameter in each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        self.weight += 1
        return x


class Where(nn.Module):
    """Returns the process ids of a submodule's hook and of forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        x, hook = self.inner(x)
        return x, (hook, os.getpid())


def noisy(x):
    return x + torch.rand(x.shape)


def double(x):
    return x * 2


def add(x, y):
    return x + y


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(*, warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def matmul_precision(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def outputs_of(p, model, x):
    """The output of a cut call, and of two whole calls."""
    return [model(x), *p.map([x, x])]


# -- targets, methods, and blocks ------------------------------------------------------------------------------------------


def test_block_is_the_same_object(lanes):
    """Inside the block the model is the same object with the same keys; after it, the model is what it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x, before, keys = torch.randn(9, 4), dict(vars(model)), list(model.state_dict())
    kind, alias, expected = type(model), model, model(x)
    with lanes(model) as p:
        assert type(model) is kind
        assert list(model.state_dict()) == keys
        assert_close(alias(x), expected)
        assert p.stats().shards
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert vars(clone).keys() == before.keys()
            assert_close(clone(x), expected)
    assert vars(model) == before
    assert type(model) is kind
    assert_close(model(x), expected)


def test_exception_restores_the_model(lanes):
    """An exception that leaves the block restores the model as well."""
    model = Several()
    before = dict(vars(model))
    with pytest.raises(KeyError), lanes(model, methods=("forward", "embed")):  # noqa: PT012
        model(torch.randn(9, 4))
        raise KeyError
    assert vars(model) == before


def test_several_methods_are_parallel(lanes):
    """Each named method is cut; the others run plainly."""
    model, x = Several(), torch.randn(9, 4)
    expected = model(x), model.embed(x, scale=2.0), model.total(x)
    with lanes(model, methods=("forward", "embed")) as p:
        for _ in range(2):
            assert_same((model(x), model.embed(x, scale=2.0), model.total(x)), expected)
            assert_close(p.method("embed")(x, scale=2.0), expected[1])
        assert_close(p.method("embed").submit(x, scale=2.0).result(), expected[1])
        assert_close(list(p.method("forward").map([x, x])), [expected[0]] * 2)
        assert p.stats().plain == 0
        with pytest.raises(ShardError, match="methods"):
            p.map([x])
        with pytest.raises(ShardError, match="total"):
            p.method("total")


def test_bound_method_is_a_target(lanes):
    """A bound method runs with the weights of its model."""
    model = Several()
    assert_calls_are_plain(lanes, model.embed, [((torch.randn(rows, 4),), {"scale": 3.0}) for rows in (9, 3, 7)])


@pytest.mark.parametrize("target", [double, lambda x: x * 2, torch.tanh], ids=["function", "lambda", "builtin"])
def test_function_is_a_target(lanes, target):
    """Any callable is a target."""
    assert_calls_are_plain(lanes, target, [((torch.randn(rows, 4),), {}) for rows in (9, 3, 7)])


def test_function_with_a_model_in_its_closure_is_a_target(lanes):
    """A function that calls a model has the model's current weights in each call."""
    model = nn.Linear(4, 4)

    def normalized(x):
        return model(x).softmax(1)

    x = torch.randn(9, 4)
    with lanes(normalized) as p:
        for _ in range(3):
            assert_close(p(x), normalized(x))
            model.weight.mul_(2)


def test_closure_of_a_function_is_current(lanes):
    """A later call has what the caller changed in a container that a function reads."""
    table, x = {"offset": 1.0}, torch.randn(8, 4)
    with lanes(lambda x: x + table["offset"], out_dims=0) as p:
        for offset in (1.0, 5.0):
            table["offset"] = offset
            assert_same([p(x), p.submit(x).result()], [x + offset] * 2)


def test_function_that_calls_the_model_of_another_block(lanes):
    """Inside a lane, the model of another open block runs plainly."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    expected = model(x).relu()
    with lanes(model), lanes(lambda x: model(x).relu()) as p:
        for _ in range(2):
            assert_same([p(x), p.submit(x).result()], [expected] * 2)


def test_forked_child_runs_plainly(lanes):
    """A fork of the process calls the model plainly. Its end leaves the lanes of the parent alone."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    expected = model(x)
    with lanes(model) as p:
        model(x)
        child = os.fork()
        if child == 0:  # os._exit: a child must not run pytest's end
            try:
                os._exit(0 if torch.allclose(model(x), expected, atol=1e-6) and p.stats().plain == 1 else 3)
            finally:
                os._exit(4)
        assert os.waitpid(child, 0)[1] == 0
        assert_same(outputs_of(p, model, x), [expected] * 3)


@pytest.mark.parametrize("form", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 4))])
def test_scripted_model_is_a_target(lanes, form):
    """Scripted and traced models are cut, or refused with the way out."""
    model = form(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    try:
        assert_calls_are_plain(lanes, model, [((torch.randn(rows, 4),), {}) for rows in (9, 3)])
    except UnsendableError as error:
        assert "build" in str(error)  # noqa: PT017
        assert "model[0]" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("form", [parametrized, lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))])
def test_parametrized_model_is_a_target(lanes, form):
    """Models with parametrizations are cut, or refused with the way out."""
    try:
        assert_calls_are_plain(lanes, form(), [((torch.randn(rows, 4),), {}) for rows in (9, 3)])
    except UnsendableError as error:
        assert "build" in str(error)  # noqa: PT017
        assert "model[0][0]" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "form",
    [Recursive, lambda: nn.LazyLinear(3), lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()))],
    ids=["recursive", "lazy", "graph"],
)
def test_unusual_models_are_targets(lanes, form):
    """A model that calls itself, a lazy one, and a graph are cut like any other model."""
    model, x = form(), torch.randn(8, 4)
    with lanes(model, out_dims=0) as p:
        outputs = [*outputs_of(p, model, x), model(x)]
    assert_same(outputs, [model(x)] * 4)


def test_model_that_makes_layers_in_forward_is_refused(lanes):
    """Each lane would make its own layer, so the call raises ReplicaError."""
    with lanes(Growing(), out_dims=0) as p, pytest.raises(ReplicaError, match="head"):
        p(torch.randn(8, 4))


def test_part_that_cannot_be_sent_is_named_by_its_path(lanes):
    """A model that cannot be sent is refused with the path from the model to the part, as the user would write it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].lock = threading.Lock()
    x = torch.randn(9, 4)
    with lanes(model):
        try:
            assert_close(model(x), copy.deepcopy(nn.Sequential(model[0], nn.ReLU()))(x))
        except UnsendableError as error:
            assert "model[1].lock" in str(error)  # noqa: PT017


def test_decorator_opens_a_block_for_each_call(lanes):
    """A decorated function runs inside the block, also a second time."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    p = lanes(model)

    @p
    def evaluate(batch):
        return model(batch), p.stats().shards

    for _ in range(2):
        assert_same(evaluate(x)[0], model(x))
    assert sum(evaluate(x)[1]) == 9


def test_block_is_reusable(lanes):
    """A block opens again after its end, with the weights of that moment."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    p = lanes(model)
    for _ in range(2):
        with p:
            assert_close(model(x), x @ model.weight.T + model.bias)
        model.weight.mul_(2)


def test_several_blocks_at_once(lanes):
    """Blocks of different models, of a model and its part, and two blocks of one model give the plain outputs."""
    model, other, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), torch.randn(9, 4)
    expected = model(x), other(x), model[0](x)
    with lanes(model), lanes(other), lanes(model[0]):
        for _ in range(2):
            assert_same((model(x), other(x), model[0](x)), expected)
    with lanes(model), lanes(model):
        assert_same(model(x), expected[0])


def test_calls_from_several_threads(lanes):
    """Calls from several threads at once each have their own output."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    batches = [torch.randn(2 + number % 7, 4) for number in range(24)]
    expected = [model(batch) for batch in batches]

    def run(number):
        with torch.no_grad():
            return p.submit(batches[number]).result() if number % 3 == 0 else model(batches[number])

    with lanes(model, out_dims=0) as p, ThreadPoolExecutor(4) as threads:
        assert_same(list(threads.map(run, range(24))), expected)


def test_use_after_close_raises(lanes):
    """A closed block refuses calls, `map`, and `submit`; the model runs plainly."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    with lanes(model) as p:
        expected = model(x)
    for use in (lambda: p(x), lambda: p.submit(x), lambda: list(p.map([x]))):
        with pytest.raises(SessionError, match="closed"):
            use()
    assert_close(model(x), expected)
    assert p.stats().calls == 1


def test_close_without_a_block(lanes):
    """Without a `with` statement, `close` ends the lanes, and may be called again."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    p = lanes(model)
    assert_close(p(x), model(x))
    p.close()
    p.close()
    with pytest.raises(SessionError, match="closed"):
        p(x)


# -- modes -----------------------------------------------------------------------------------------------------------------


MODES = {
    "none": nullcontext,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "dtype": lambda: default_dtype(torch.float64),
    "deterministic": lambda: deterministic(warn_only=False),
    "deterministic with warnings": lambda: deterministic(warn_only=True),
    "precision": lambda: matmul_precision("medium"),
    "grad": torch.enable_grad,
    "device": lambda: torch.device("meta"),
}


def test_modes_of_the_caller_hold_in_the_lanes(lanes):
    """Cut and whole calls run under the modes of the caller. Later calls run without them."""
    model, plain, x = Seeing(), Seeing(), torch.zeros(8, 2)
    with lanes(model, out_dims=(0, None)) as p:
        for name, mode in MODES.items():
            for around in (mode, nullcontext, mode):
                with around():
                    (_, expected), seen = plain(x), outputs_of(p, model, x)
                assert [modes for _, modes in seen] == [expected] * 3, name
                assert_same([output[0] for output in seen], [x] * 3)


def test_autocast_computes_as_the_plain_call(lanes):
    """Under bfloat16 autocast, outputs have the plain dtype and values, also after the weights change."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(9, 4)
    with lanes(model) as p:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                expected = copy.deepcopy(model)(x)
                assert expected.dtype is torch.bfloat16
                assert_same(outputs_of(p, model, x), [expected] * 3)
            model[0].weight.mul_(2)


def test_outputs_of_inference_mode_are_inference_tensors(lanes):
    """As with the plain call."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    with lanes(model) as p:
        with torch.inference_mode():
            assert all(output.is_inference() for output in outputs_of(p, model, x))
        assert not any(output.is_inference() for output in outputs_of(p, model, x))


@in_threads_alone("context variables cannot be pickled")
def test_context_variables_reach_the_lanes(lanes):
    """Every lane reads the caller's value of a context variable."""
    model, x = Reading(), torch.zeros(9, 2)
    token = VARIABLE.set("set by the caller")
    try:
        with lanes(model) as p:
            assert {text for _, text in outputs_of(p, model, x)} == {"set by the caller"}
    finally:
        VARIABLE.reset(token)


@in_threads_alone("a profiler records its own process")
def test_profiler_counts_the_operators_of_the_lanes(lanes):
    """A profiler of the caller counts the operators of all lanes."""
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    with lanes(model, out_dims=0), profile() as profiler:
        model(x)
    assert [event.count for event in profiler.key_averages() if event.key == "aten::linear"] == [2]


# -- a model that changes --------------------------------------------------------------------------------------------------


def replace_parameter(model):
    model.linear.weight = nn.Parameter(torch.randn(4, 4))


def load(model):
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


def write_in_inference_mode(model):
    with torch.inference_mode():
        model.linear.weight.mul_(2)


def add_hook(model):
    model.linear.register_forward_hook(lambda module, args, output: output + 5)


CHANGES = {
    "in place": lambda model: model.linear.weight.mul_(2),
    "in inference mode": write_in_inference_mode,
    "plain tensor": lambda model: model.config["table"].add_(1),
    "load_state_dict": load,
    "new parameter": replace_parameter,
    "data": lambda model: setattr(model.linear.weight, "data", torch.randn(4, 4)),
    "train": lambda model: model.train(),
    "eval deep inside": lambda model: model.dropout.eval(),
    "attribute deep inside": lambda model: model.config["scales"][1].update(last=7.0),
    "item of a list": lambda model: model.config["scales"].__setitem__(0, -1.0),
    "attribute of a layer": lambda model: setattr(model.dropout, "p", 0.0),
    "new layer": lambda model: setattr(model, "linear", nn.Linear(4, 4)),
    "hook": add_hook,
    "dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_change_of_the_model_is_in_the_next_call(lanes, whole):
    """Whatever changes in the model between two calls is in the next one, in both directions."""
    torch.manual_seed(0)
    model = Configured().eval()
    with lanes(model) as p:
        for name, change in CHANGES.items():
            change(model)
            x = torch.randn(9, 4, dtype=model.linear.weight.dtype)
            for _ in range(2):
                output = p.submit(x).result() if whole else model(x)
                assert_close(output, copy.deepcopy(model)(x), msg=lambda text, name=name: f"after {name}: {text}")


class Normed(nn.Module):
    """A model that keeps statistics, and with a method for predictions that the block covers."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), norm(4))

    def forward(self, x):
        return self.layers(x)

    def predict(self, x):
        return self.layers(x)


def fused_step(optimizer):
    def change(model, x):
        model.train().layers(x).square().sum().backward()
        optimizer(model.parameters(), lr=0.1, fused=True).step()

    return change


def reestimate(model, x):
    model.train()
    with torch.no_grad():
        model.layers(x * 3 + 1)


@pytest.mark.parametrize(
    "change",
    [*map(fused_step, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)), reestimate],
    ids=["SGD", "Adam", "AdamW", "Adagrad", "statistics"],
)
def test_writes_without_a_version_are_in_the_next_call(lanes, change):
    """Fused optimizers and batch norm write tensors in C++ and leave the versions of these tensors alone."""
    model, x = Normed().eval(), torch.randn(9, 4)
    with lanes(model, methods=("predict",)) as p:
        for _ in range(2):
            for output in (p(x), p.submit(x).result(), *p.map([x])):
                assert_close(output, copy.deepcopy(model).layers(x))
            with torch.enable_grad():
                change(model, x)
            model.eval()


class Uncounted(nn.Module):
    """A batch norm without a count of batches, whose version would advance."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


def test_plain_calls_in_training_mode_are_in_the_next_call(lanes):
    """A call of one row runs plainly, and writes statistics without a version that advances."""
    model, x = Normed(Uncounted).eval(), torch.randn(9, 4, 4)
    with lanes(model) as p:
        for _ in range(2):
            for output in (model(x), p.submit(x).result()):
                assert_close(output, copy.deepcopy(model)(x))
            model.train()(torch.randn(1, 4, 4) * 3 + 1)
            model.eval()


def test_write_through_data_needs_refresh(lanes):
    """After `refresh`, the next call has what was written through ``.data``."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    with lanes(model) as p:
        model(x)
        model.weight.data.zero_()
        p.refresh()
        assert_same(outputs_of(p, model, x), [model.bias.expand(9, 4).clone()] * 3)


def test_unchanged_model_is_not_copied_again(lanes):
    """Inference calls that change nothing copy nothing."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    with lanes(model) as p:
        for _ in range(5):
            model(x)
        assert p.stats().copied_bytes == 0


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_attributes_that_a_call_sets_do_not_leak(lanes):
    """Each call starts from the attributes of the model, and the model keeps its own."""
    model, x = Noting(), torch.randn(8, 4)
    expected = model.linear(x), 1
    with lanes(model, out_dims=(0, None)) as p:
        for _ in range(3):
            assert_same(outputs_of(p, model, x), [expected] * 3)
    assert model.state == {"calls": 0}


def test_attributes_that_a_call_sets_are_warned_about(lanes):
    """A write that does not return to the model gives a warning with its path."""
    model, x = Noting(), torch.randn(8, 4)
    with lanes(model, out_dims=(0, None)), pytest.warns(UserWarning, match="the model wrote .*calls"):
        model(x)


def test_tied_weights_stay_tied(lanes):
    """Parameters and layers under two names are one object in the lanes, also after a change."""
    model, x = Tied(), torch.randn(8, 4)
    with lanes(model, out_dims=(0, None)) as p:
        for _ in range(3):
            assert_same(outputs_of(p, model, x), [copy.deepcopy(model)(x)] * 3)
            model.encode.weight.mul_(1.5)


def test_views_of_a_buffer_share_memory_in_the_lanes(lanes):
    """A write through a view of a buffer is seen through the buffer."""
    model, x = Shared(), torch.randn(9, 4)
    with lanes(model) as p:
        for _ in range(2):
            assert_same(outputs_of(p, model, x), [x + 3] * 3)


def test_buffers_of_lane_0_return_to_the_model(lanes):
    """After a cut call in train mode, batch norm has the statistics of lane 0's rows."""
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    with lanes(model, out_dims=0):
        for step in range(3):
            rows = x * (step + 1)
            output = model(rows)
            assert_close(output[:4], plain(rows[:4]))
            assert_close(model.state_dict(), plain.state_dict())


@in_threads_alone("a worker sends buffers with an output")
def test_buffers_of_lane_0_return_after_an_error(lanes):
    """A cut call that fails leaves the buffers that lane 0 wrote before."""
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(3, 3)), torch.randn(8, 4)
    plain = copy.deepcopy(model[0])
    plain(x[:4])
    with lanes(model, out_dims=0):
        with pytest.raises(RuntimeError, match="shapes"):
            model(x)
        assert_close(model[0].state_dict(), plain.state_dict())


@in_threads_alone("buffers of whole calls stay in the worker")
def test_buffers_of_whole_calls_in_lane_0_return_to_the_model(lanes):
    """Whole calls one after another leave the statistics of those that lane 0 ran, which need not be all."""
    model = nn.BatchNorm1d(4)
    plain = copy.deepcopy(model)
    returned = 0
    with lanes(model) as p:
        while returned < 3:
            x = torch.randn(9, 4)
            future = p.submit(x)
            output, in_lane_0 = future.result(), future.lane == 0
            expected = plain if in_lane_0 else copy.deepcopy(plain)
            assert_close(output, expected(x))
            assert_close(model.state_dict(), plain.state_dict())
            returned += in_lane_0


def test_parameter_that_forward_writes_is_refused(lanes):
    """A call that writes a parameter raises with its name, also if torch raises first: a lane's parameter is a view."""
    model = Writing()
    with lanes(model, out_dims=0), pytest.raises(ReplicaError, match="'weight' was written during a call"):
        model(torch.randn(8, 4))


# -- random numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [noisy, nn.Dropout(0.5), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3))])
@pytest.mark.parametrize(("rows", "options"), [(6, {"out_dims": 0}), (7, {})])
def test_seed_gives_the_same_numbers_under_deterministic_algorithms(lanes, target, rows, options):
    """Lanes of a cut call draw one after another from the caller's generator, at every call."""
    x, first = torch.ones(rows, 3), (rows + 1) // 2
    torch.manual_seed(5)
    expected = torch.cat([target(x[:first]), target(x[first:])]), torch.rand(3)
    with lanes(target, **options) as p, deterministic(warn_only=False):
        for _ in range(3):
            torch.manual_seed(5)
            assert_same((p(x), torch.rand(3)), expected)


def test_lanes_that_draw_at_the_same_time_draw_different_numbers(lanes):
    """Threads share the caller's generator, with a warning. Each worker has its own, and the caller's stays as it is."""
    x, outputs, before = torch.ones(9, 3), [], torch.get_rng_state()
    with lanes(noisy) as p:
        is_shared = lanes.name == "thread"
        with pytest.warns(UserWarning, match="use_deterministic_algorithms") if is_shared else nullcontext():
            outputs.append(p(x))
        outputs.append(p(x))
    assert len(torch.cat(outputs).flatten().unique()) == 2 * x.numel()
    assert torch.equal(torch.get_rng_state(), before) == (not is_shared)


def test_whole_calls_draw_different_numbers(lanes):
    """No two whole calls draw the same numbers."""
    with lanes(noisy) as p:
        drawn = {tuple(output.flatten().tolist()) for output in p.map([torch.zeros(2, 2)] * 12)}
    assert len(drawn) == 12


def test_generator_of_the_model_is_drawn_in_turns(lanes):
    """Lanes draw one after another from a generator that the model holds. Workers refuse it: its state would stay there."""
    model, plain, x = Drawing(), Drawing(), torch.zeros(8, 2)
    with lanes(model, out_dims=0):
        if lanes.name != "thread":
            with pytest.raises(SessionError, match=r"the model holds a torch\.Generator"):
                model(x)
            return
        for _ in range(3):
            assert_close(model(x), torch.cat([plain(x[:4]), plain(x[4:])]))
    assert_close(model.generator.get_state(), plain.generator.get_state())


def test_generator_argument_is_drawn_in_turns(lanes):
    """Lanes draw one after another from a generator that the caller passes. Workers refuse it."""

    def draw(x, generator):
        return x + torch.rand(x.shape, generator=generator)

    ours, plain, x = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3), torch.zeros(8, 2)
    with lanes(draw, out_dims=0) as p:
        if lanes.name != "thread":
            with pytest.raises(SessionError, match=r"an argument is a torch\.Generator"):
                p(x, ours)
            return
        for _ in range(3):
            assert_close(p(x, ours), torch.cat([draw(x[:4], plain), draw(x[4:], plain)]))


# -- errors ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "lane"), [(0, 0), (7, 1)])
def test_error_names_lane_and_shard(lanes, bad, lane):
    """An error in a cut call keeps type, message, and traceback, and names lane, device, and shard once."""
    model, x = Failing(), torch.ones(9, 2)
    with lanes(model) as p:
        model(x)
        x[bad] = -3
        with pytest.raises(ValueError, match="negative row -3") as caught:
            model(x)
        shown = "".join(caught.value.__notes__) + str(caught.getrepr(style="native"))
        assert f"shard {lane} of 2" in shown
        assert f"lane {lane} on cpu" in shown
        assert 'raise ValueError(f"negative row' in shown
        assert_close(p(torch.ones(9, 2)), torch.ones(9, 2))


def test_lane_is_named_once(lanes):
    """One note of an error names the lane."""
    x = torch.ones(9, 2)
    x[0] = -1
    with lanes(Failing()) as p, pytest.raises(ValueError) as caught:
        p(x)
    assert len([note for note in caught.value.__notes__ if note.startswith("in lane")]) == 1


def test_errors_of_several_lanes_are_named(lanes):
    """The error of the first lane is raised, with a note on the other one."""
    x = torch.ones(8, 2)
    with lanes(Failing(), out_dims=0) as p:
        p(x)
        with pytest.raises(ValueError, match="negative row -1") as caught:
            p(-x * torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 2])[:, None])
    assert any("also in lane 1" in note and "negative row -2" in note for note in caught.value.__notes__)


def test_error_keeps_its_attributes_and_notes(lanes):
    """An error of the user's own class has its attributes and its notes."""

    def fail(x):
        error = CustomError(7, hint={"try": "again"})
        error.add_note("a note of the model")
        raise error

    with lanes(fail) as p:
        for run in (lambda: p(torch.ones(9, 2)), lambda: p.submit(torch.ones(9, 2)).result()):
            with pytest.raises(CustomError, match="code 7") as caught:
                run()
            assert (caught.value.code, caught.value.hint) == (7, {"try": "again"})
            assert "a note of the model" in caught.value.__notes__


def test_error_keeps_its_cause(lanes):
    """``raise ... from ...`` in the model holds for the caller."""

    def fail(x):
        raise ValueError("outer") from KeyError("inner")

    with lanes(fail) as p, pytest.raises(ValueError, match="outer") as caught:
        p(torch.ones(9, 2))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, StopIteration, GeneratorExit])
def test_exception_of_any_class_reaches_the_caller(lanes, kind):
    """Also an exception that would end a thread or a process. The block stays usable."""
    _check_that_the_caller_gets(kind, lanes)


def test_exit_of_the_model_reaches_the_caller(lanes):
    """SystemExit is the model's own exception. It does not end a worker, and the call never runs again."""
    _check_that_the_caller_gets(SystemExit, lanes)


def _check_that_the_caller_gets(kind, lanes):
    def stop(x):
        if (x < 0).any():
            raise kind("stopped by the model")
        return x

    x = torch.ones(9, 2)
    with lanes(stop) as p:
        for run in (lambda: p(-x), lambda: p.submit(-x).result(20)):
            with pytest.raises(kind, match="stopped by the model"):
                run()
        assert_close(p(x), x)


def scaled_by(namespace):
    """A module of a class that is pickled by value. It reads a global of that namespace."""
    source = "class Scaled(Module):\n    def forward(self, x):\n        return x * SCALE\n"
    exec(source, namespace)
    return namespace["Scaled"]()


def test_values_that_functions_captured_are_those_of_the_call(lanes):
    """A variable of a hook's closure and a global of a class of the script may get another value between calls."""
    offset = 1.0

    def hook(module, args, output):
        return output + offset

    script = {"__name__": "__main__", "Module": nn.Module, "SCALE": 1.0}
    model = nn.Sequential(scaled_by(script), nn.Identity())
    model[1].register_forward_hook(hook)
    x = torch.ones(9, 2)
    with lanes(model) as p:
        for number in range(1, 4):
            offset, script["SCALE"] = 10.0 * number, float(number)
            assert_same(outputs_of(p, model, x), [x * number + 10 * number] * 3)


REARRANGING = {
    "swap": lambda a: a.reverse(),
    "pop": lambda a: a.pop(0),
    "replace": lambda a: a.__setitem__(0, [9]),
    "move": lambda a: a.append(a[0]),
    "nested": lambda a: a.append({"first": a[0], "new": ([4], a)}),
}


@pytest.mark.parametrize("name", REARRANGING)
def test_whole_call_rearranges_the_callers_own_lists(lanes, name):
    """Lists that a call moves, drops, or puts elsewhere keep what they hold."""

    def run(a):
        REARRANGING[name](a)
        return 0

    first, second = [3], [2]
    given = [first, second]
    expected = [[3], [2]]
    REARRANGING[name](expected)
    with lanes(run) as p:
        p.submit(given).result()
    assert (first, second) == ([3], [2])
    assert str(given) == str(expected)
    if name in ("swap", "move"):
        assert given[-1] is first


@pytest.mark.parametrize(
    "make",
    [lambda: Counter("aab"), lambda: OrderedDict(a=1, b=2), lambda: defaultdict(int, a=1, b=2), lambda: UserDict(a=1)],
)
def test_whole_call_changes_the_order_of_a_dict(lanes, make):
    """Dicts of every class get the items of the call, in its order."""

    def run(table):
        table["z"] = 1
        table["a"] = table.pop("a")
        return 0

    given, expected = make(), make()
    run(expected)
    with lanes(run) as p:
        p.submit(given).result()
    assert type(given) is type(expected)
    assert [*given.items()] == [*expected.items()]


@dataclass
class Trimmed:
    """Leaves a list out when it is pickled."""

    cache: list
    items: list

    def __getstate__(self):
        return {"cache": None, "items": self.items}


def test_whole_call_gives_back_next_to_objects_that_pickle_changes(lanes):
    """A list keeps its own items if another argument has fewer objects in the worker."""
    key, other = torch.zeros(2), [3]

    def run(first, table, log, last):
        log.append(len(table))
        return 0

    first, last, log = Trimmed([[1], [2]], [4]), Trimmed([[5]], [6]), []
    with lanes(run) as p:
        p.submit(first, {key: other}, log, last).result()
    assert (first.cache, first.items, last.cache, last.items, other, log) == ([[1], [2]], [4], [[5]], [6], [3], [1])


def test_prepared_call_writes_into_its_batch(lanes):
    """What the model writes into the batch of a stream with `prepare` comes back too."""

    def run(x, log):
        log.append(x.add_(1).item())
        return 0

    x, log = torch.zeros(()), []
    with lanes(run) as p:
        list(p.map([[x, log]], prepare=tuple))
    assert (x.item(), log) == (1, [1])


class Arrays(nn.Module):
    """Scales its input by a numpy array and a bytearray."""

    def __init__(self):
        super().__init__()
        self.factors = np.ones(1, dtype=np.float32)
        self.raw = bytearray([1])

    def forward(self, x):
        return x * float(self.factors[0]) * self.raw[0]


def test_refresh_sends_what_was_written_into_arrays(lanes):
    """Writes into a numpy array or a bytearray of the model reach the lanes at the latest after `refresh`."""
    model, x = Arrays(), torch.ones(9, 2)
    with lanes(model) as p:
        assert_same(outputs_of(p, model, x), [x] * 3)
        model.factors[0], model.raw[0] = 2, 3
        p.refresh()
        assert_same(outputs_of(p, model, x), [x * 6] * 3)


def test_function_that_captures_modules_of_torch_is_a_target(lanes):
    """Some modules of torch have classes of their own."""
    mkldnn, backends = torch.backends.mkldnn, torch.backends

    def count(x):
        return x + int(mkldnn.is_available()) + int(backends.mkldnn.is_available())

    x = torch.zeros(9, 2)
    with lanes(count) as p:
        assert_same(outputs_of(p, p, x), [count(x)] * 3)


def test_whole_call_writes_into_every_kind_of_argument(lanes):
    """What a model changes in arrays, sets, and containers of a whole call, the caller's have too, in the same objects."""

    def change(x, log, table, nested, array, names, raw):
        log.append(len(x))
        table["new"] = x + 1
        del table["old"]
        nested["inner"][0].append("changed")
        array[1] = 5
        names.add("added")
        raw[0] = 9
        return x.add_(1)

    def arguments():
        inner = ["first"]
        return {
            "x": torch.zeros(3, 1),
            "log": [0],
            "table": {"old": 1, "kept": torch.ones(2)},
            "nested": {"inner": (inner, 3)},
            "array": np.zeros(3),
            "names": {"given"},
            "raw": bytearray(b"abc"),
        }

    expected, given = arguments(), arguments()
    inner, kept, x = given["nested"]["inner"][0], given["table"]["kept"], given["x"]
    change(**expected)
    with lanes(change) as p:
        assert_close(p.submit(**given).result(), torch.ones(3, 1))
    assert given["log"] == expected["log"] == [0, 3]
    assert list(given["table"]) == list(expected["table"]) == ["kept", "new"]
    assert given["table"]["kept"] is kept
    assert_close(given["table"]["new"], torch.ones(3, 1))
    assert given["nested"]["inner"][0] is inner
    assert inner == ["first", "changed"]
    assert (given["array"] == expected["array"]).all()
    assert given["names"] == expected["names"]
    assert given["raw"] == expected["raw"]
    assert_close(x, torch.ones(3, 1))


def test_warning_of_the_model_appears_once(lanes):
    """Under Python's default filter, a line warns once, in whichever lanes it runs."""

    def warn(x):
        warnings.warn("of the model", stacklevel=1)
        return x

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        with lanes(warn, out_dims=0) as p:
            for _ in range(3):
                p(torch.ones(8, 2))
                list(p.map([torch.ones(2)] * 4))
    assert [str(each.message) for each in seen] == ["of the model"]


def test_warning_of_the_model_reaches_the_caller(lanes):
    """A warning in a lane is a warning of the call."""

    def warn(x):
        torch.nn.functional.softmax(x)  # warns that dim is missing
        return x

    with lanes(warn) as p, pytest.warns(UserWarning, match="Implicit dimension choice"):
        p(torch.ones(9, 2))


# -- statistics, timeline --------------------------------------------------------------------------------------------------


def test_stats_count_rows_and_tasks(lanes):
    """`stats` counts calls, rows, and tasks of each lane, also after the block."""
    with lanes(double, out_dims=0) as p:
        for _ in range(3):
            p(torch.randn(7, 4))
        p(torch.randn(1, 4))
        for _ in p.map([torch.randn(5, 4)] * 4):
            pass
        inside = p.stats()
    after = p.stats()
    assert (inside.calls, inside.plain, inside.shards) == (8, 1, (4, 3))
    assert sum(lane.rows for lane in inside.lanes) == 3 * 7 + 4 * 5
    assert sum(lane.tasks for lane in inside.lanes) == 3 * 2 + 4
    assert all(lane.busy_s > 0 for lane in inside.lanes)
    assert after == inside


@torch.no_grad()
def test_stats_leave_out_calls_that_raise(lanes):
    """Cut calls, plain calls, whole calls, and calls with `prepare` count when they return. Tasks that raised are tasks."""

    def refuse(x):
        if bool((x < 0).any()):
            raise ZeroDivisionError
        return x

    good, bad = torch.ones(4, 2), -torch.ones(4, 2)
    with lanes(refuse, out_dims=0) as p:
        for call in (p, lambda x: p(x[:1]), lambda x: p.submit(x).result(), lambda x: list(p.map([x], prepare=torch.neg))):
            before = p.stats().calls
            outcomes = []
            for x in (good, bad):
                with contextlib.suppress(ZeroDivisionError):
                    call(x)
                    outcomes.append(x)
            assert len(outcomes) == 1
            assert p.stats().calls == before + 1
        with pytest.raises(ZeroDivisionError):
            list(p.map([good], prepare=lambda batch: 1 // 0))
        with pytest.raises(ShardError):
            p(torch.ones(3), torch.ones(4))
        stats = p.stats()
    assert (stats.calls, stats.plain, stats.shards) == (4, 1, (2, 2))
    assert sum(lane.tasks for lane in stats.lanes) >= 4 + 3


@in_threads_alone("this process does not see prepared rows")
def test_stats_count_prepared_rows(lanes):
    """Rows are those that the model gets."""
    with lanes(double) as p:
        for _ in p.map([torch.randn(5, 4)] * 3, prepare=lambda batch: batch[:2]):
            pass
        assert sum(lane.rows for lane in p.stats().lanes) == 3 * 2


@torch.no_grad()
def test_trace_has_the_spans_of_each_lane(lanes, tmp_path):
    """The timeline has one span per lane and call, with the batch, the rows, and the type of an exception."""
    model = nn.Linear(4, 4)
    with lanes(model, out_dims=0) as p:
        model(torch.randn(8, 4))
        with p.trace(tmp_path / "lanes.json") as trace:
            for _ in range(2):
                model(torch.randn(7, 4))
            list(p.map([torch.randn(3, 4)]))
            with pytest.raises(RuntimeError):
                p.submit(torch.randn(2, 5)).result()
    *cut, of_map, failed = trace.spans
    assert sorted((span.lane, *span.work) for span in cut) == [
        *[(0, "forward", None, 4)] * 2,
        *[(1, "forward", None, 3)] * 2,
    ]
    assert of_map.work == ("forward", 0, 3)
    assert failed.work == ("forward", None, 2)
    assert [span.error for span in trace.spans] == [None] * 5 + ["RuntimeError"]
    assert all(0 < span.start <= span.end for span in trace.spans)
    events = json.loads((tmp_path / "lanes.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert len([event for event in events if event["ph"] == "M"]) == 2


# -- hooks -----------------------------------------------------------------------------------------------------------------


def test_hooks_of_the_model_change_its_output(lanes):
    """Forward hooks and pre-hooks change outputs as in the plain call, also those of submodules."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_forward_hook(lambda module, args, output: output * 3)
    model.register_forward_hook(lambda module, args, output: {"output": output})
    assert_calls_are_plain(lanes, model, [((torch.randn(rows, 4),), {}) for rows in (9, 3, 7)])


@in_threads_alone("hooks for all modules belong to a process")
def test_hooks_for_all_modules_run(lanes):
    """A hook that the caller registers for all modules changes outputs as in the plain call."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)
    hook = register_module_forward_hook(lambda module, args, output: output + 1)
    try:
        expected = model(x)
        with lanes(model, out_dims=0) as p:
            assert_same(outputs_of(p, model, x), [expected] * 3)
    finally:
        hook.remove()


def test_hooks_of_the_model_itself_see_the_whole_batch(lanes):
    """In a cut call, hooks of the model run once, in the caller. In a whole call they run in the lane."""
    model, x = nn.Identity(), torch.randn(8, 4)
    model.register_forward_hook(lambda module, args, output: (output, len(args[0]), os.getpid()))
    with lanes(model, out_dims=0) as p:
        cut = [model(x) for _ in range(3)]
        whole = p.submit(x).result()
    assert_same(cut, [(x, 8, os.getpid())] * 3)
    assert_same(whole[:2], (x, 8))
    assert (whole[2] == os.getpid()) == (lanes.name == "thread")


def test_hooks_of_submodules_run_in_the_process_of_their_lane(lanes):
    """A hook runs next to the forward that it belongs to: in this process with threads, in the worker otherwise."""
    model, x = Where(), torch.randn(8, 4)
    model.inner.register_forward_hook(lambda module, args, output: (output, os.getpid()))
    with lanes(model, out_dims=(0, None), join="list") as p:
        parts = [*model(x), *(part for parts in p.map([x]) for part in parts)]
    assert all(hook == forward for _, (hook, forward) in parts)
    assert all((forward == os.getpid()) == (lanes.name == "thread") for _, (_, forward) in parts)
