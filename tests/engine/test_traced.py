"""Traces of a module: made where they do the same, counted, and forgotten when the module is another."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import Plan, parallel
from parawrap.engine import Entry
from parawrap.engine._traced import _MOST_TRACES, Traces
from parawrap.engine.plan import _race
from parawrap.tree import flatten

DEVICES = ["cpu", "cpu"]


class Sums(nn.Module):
    """A few operators; counts how often the interpreter runs it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x, scale=1.0):
        self.runs += 1
        return self.inner(x).tanh() * scale


class Branches(Sums):
    """What it does depends on values."""

    def forward(self, x, scale=1.0):
        self.runs += 1
        return self.inner(x) if x.sum() > 0 else -x


class Breaks(Sums):
    """Raises when it is traced."""

    error: type[Exception] = KeyError

    def forward(self, x, scale=1.0):
        self.runs += 1
        if torch.jit.is_tracing():
            raise self.error
        return self.inner(x)


class Draws(Sums):
    """Draws at random in eval mode too."""

    def forward(self, x, scale=1.0):
        self.runs += 1
        return self.inner(x) + torch.rand_like(x)


class Pair(NamedTuple):
    """An output with names."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Record:
    """An output with fields."""

    first: torch.Tensor
    second: torch.Tensor


class Returns(nn.Module):
    """Its output is of the given form."""

    def __init__(self, form):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.form = form

    def forward(self, x):
        return self.form(self.inner(x), x.sum(1, keepdim=True))


FORMS = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"first": a, "second": b},
    "named tuple": Pair,
    "dataclass": Record,
    "nested": lambda a, b: {"both": (a, [b])},
    "with a number": lambda a, b: (a, 3),
    "with none": lambda a, b: (a, None),
}


def made(model, *args, **kwargs):
    """The traces of one call, how often the model was run for it, and its trace."""
    traces = Traces()
    entry = Entry(model)
    with torch.no_grad():
        runs = traces.make(entry, model, args, kwargs)
    return traces, runs, traces.of(entry, args, kwargs)


@pytest.fixture
def however_short(monkeypatch):
    """Have all ways compared though these calls are so short that others than the plain one would not be tried."""
    monkeypatch.setattr(_race, "_TOO_SHORT_NS", 0)


@pytest.fixture
def filed(tmp_path):
    """A function that gives the path of a plan by which every call like these is cut over all lanes and traced."""

    def path_for(model, devices, *args, **kwargs):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        with torch.no_grad(), parallel(model, devices, plan=Plan("auto", keep_memory=False)) as p:
            for _ in range(200):
                model(*args, **kwargs)
            p.plan.save(path)
        document = json.loads(path.read_text())
        for case in document["plans"][0]["cases"]:
            case["choice"].update(lanes=len(devices), threads=1, traced=True, own_backward=False)
        path.write_text(json.dumps(document))
        return path

    return path_for


@pytest.fixture
def traced(filed):
    """A function that gives a plan by which every call like these is cut over two lanes and traced."""

    def plan_for(model, *args, **kwargs):
        return Plan.load(filed(model, DEVICES, *args, **kwargs), keep_memory=False, traced=True)

    return plan_for


def test_a_trace_gives_what_the_module_gives():
    """It is found for calls of the same shapes, and for no others."""
    model = Sums().eval()
    traces, _, trace = made(model, torch.randn(3, 4))
    x = torch.randn(3, 4)
    assert_close(trace(x), model(x))
    assert traces.of(Entry(model), (torch.randn(4, 4),), {}) is None
    assert traces.of(Entry(model), (x.double(),), {}) is None
    assert traces.of(Entry(model), (x, 2.0), {}) is None
    assert not traces.has(Entry(model), (torch.randn(4, 4),), {})


def test_keyword_arguments_can_be_traced():
    """A tensor that comes by name is an input of the trace too."""
    model = Sums().eval()
    x, scale = torch.randn(3, 4), torch.randn(3, 1)
    _, _, trace = made(model, x=x, scale=scale)
    assert_close(trace(x=x + 1, scale=scale * 2), model(x + 1, scale * 2))


def test_runs_are_counted_as_they_are():
    """The module itself is run twice, plainly and to be recorded, and the trace as often as is said beyond that."""
    model = Sums().eval()
    counted = []
    handle = torch.library.Library("parawrap_tests", "DEF")  # an operator is run by a trace as by the module
    try:
        handle.define("seen(Tensor x) -> Tensor")
        handle.impl("seen", lambda x: (counted.append(1), x.clone())[1], "CPU")

        class Seen(Sums):
            def forward(self, x, scale=1.0):
                return super().forward(torch.ops.parawrap_tests.seen(x), scale)

        model = Seen().eval()
        _, runs, trace = made(model, torch.randn(3, 4))
    finally:
        handle._destroy()
    assert trace is not None
    assert model.runs == 2
    assert runs == len(counted)


def test_what_fails_on_the_way_counts_only_what_was_run():
    """A module that cannot be traced was run twice, and that is what is reported."""
    model = Breaks().eval()
    _, runs, trace = made(model, torch.randn(3, 4))
    assert trace is None
    assert runs == model.runs == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_control_flow_that_looks_at_values_is_not_traced(sign):
    """Whichever branch is taken, there is no trace, and no more runs than are reported."""
    model = Branches().eval()
    _, runs, trace = made(model, sign * torch.ones(3, 4))
    assert trace is None
    assert runs >= model.runs == 2


@pytest.mark.parametrize("error", [KeyError, AttributeError, AssertionError, RuntimeError, NotImplementedError])
def test_an_error_of_the_trace_is_nobodys(error):
    """Whatever a module raises only when it is traced, there is no trace, and no error."""
    model = Breaks().eval()
    model.error = error
    assert made(model, torch.randn(3, 4))[2] is None


def test_a_module_that_draws_at_random_is_not_traced():
    """A trace of it would be no more wrong than the module, but nothing tells that from control flow."""
    assert made(Draws().eval(), torch.randn(3, 4))[2] is None
    assert made(nn.Dropout(0.5).train(), torch.randn(3, 4))[2] is None


@pytest.mark.parametrize("cls", [Sums, Branches, Draws])
def test_the_users_random_numbers_are_what_they_would_have_been(cls):
    """Tracing leaves the generator where it was."""
    model, x = cls().eval(), torch.randn(3, 4)
    state = torch.random.get_rng_state()
    made(model, x)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_module_with_hooks_is_not_traced(register):
    """Whatever a hook of any of its parts does, a trace would not do it: the module is not even run."""
    model = Sums().eval()
    getattr(model.inner, register)(lambda *_: None)
    _, runs, trace = made(model, torch.randn(3, 4))
    assert trace is None
    assert runs == model.runs == 0


def test_another_method_is_not_traced():
    """A trace is of forward."""
    model = Sums().eval()
    assert Traces().make(Entry(model.inner, "inner"), model, (torch.randn(3, 4),), {}) == 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_outputs_keep_their_type(form):
    """What is traced returns the types that the module returns; else it is not traced."""
    model, x = Returns(form).eval(), torch.randn(3, 4)
    _, _, trace = made(model, x)
    if trace is not None:
        expected, output = flatten(model(x)), flatten(trace(x))
        assert output[1] == expected[1]
        assert_close(output[0], expected[0])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_calls_keep_the_type_of_their_output(traced, form):
    """With a plan that traces, a call returns what the plain call returns, whether it can be traced or not."""
    model, x = Returns(form).eval(), torch.randn(8, 4)
    plan = traced(model, x)
    with torch.no_grad():
        expected = model(x)
        with parallel(model, DEVICES, plan=plan):
            model(x)  # the first call tells whether there is a choice
            output = model(x)
    assert type(output) is type(expected)
    assert flatten(output)[1] == flatten(expected)[1]
    assert_close(flatten(output)[0], flatten(expected)[0])


def test_a_trace_under_autocast_is_not_used_without_it():
    """The casts are part of a trace."""
    model, x = Sums().eval(), torch.randn(3, 4)
    traces = Traces()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        traces.make(Entry(model), model, (x,), {})
        assert traces.has(Entry(model), (x,), {})
    assert not traces.has(Entry(model), (x,), {})


def test_there_is_a_bound_to_traces():
    """Calls with a number that is always another one are not traced for ever."""
    model, x = Sums().eval(), torch.randn(3, 4)
    traces, runs = Traces(), 0
    with torch.no_grad():
        for step in range(_MOST_TRACES + 10):
            if not traces.has(Entry(model), (x, float(step)), {}):
                runs += traces.make(Entry(model), model, (x, float(step)), {})
    assert runs <= 5 * _MOST_TRACES
    assert traces.of(Entry(model), (x, float(_MOST_TRACES + 5)), {}) is None


def test_what_is_forgotten_can_be_traced_again():
    """Another generation of the module has no traces yet; the same one has what it had."""
    model, x = Sums().eval(), torch.randn(3, 4)
    traces, _, trace = made(model, x)
    traces.of_generation(0)
    assert traces.of(Entry(model), (x,), {}) is trace
    traces.of_generation(1)
    assert not traces.has(Entry(model), (x,), {})


def test_control_flow_is_right_though_tracing_was_asked_for(traced):
    """A module that looks at values answers as it does plainly, for either value."""
    model = Branches().eval()
    plan = traced(model, torch.ones(8, 4))
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        for x in (torch.ones(8, 4), -torch.ones(8, 4), torch.ones(8, 4)):
            assert_close(model(x), model.inner(x) if x.sum() > 0 else -x)


def replaced(model):
    model.inner.weight = nn.Parameter(torch.randn(4, 4))


def written(model):
    model.inner.weight.mul_(2)


def loaded(model):
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})


def assigned(model):
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swapped(model):
    model.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def grown(model):
    model.inner = nn.Sequential(model.inner, nn.Tanh()).eval()


def rewired(model):
    model.inner.bias = None


def hooked(model):
    model.inner.register_forward_hook(lambda module, args, output: output + 1)


CHANGES = (replaced, written, loaded, assigned, swapped, grown, rewired, hooked)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_module_that_changes_answers_as_it_is_then(traced, change):
    """Whatever becomes of the module after it was traced, the next call is of what it is now."""
    model, x = Sums().eval(), torch.randn(8, 4)
    plan = traced(model, x)
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        model(x)  # the first call tells whether there is a choice
        before = model(x)
        assert plan.extra_calls > 0
        assert_close(before, model.inner(x).tanh())
        change(model)
        assert_close(model(x), model.inner(x).tanh())
        assert not torch.equal(model(x), before)


def doubled(model):
    model.factor = 2.0


class Scaled(Sums):
    """What it does depends on an attribute."""

    factor = 1.0

    def forward(self, x, scale=1.0):
        return super().forward(x, scale) * self.factor


@pytest.mark.parametrize("known", ["measured", "from a file"])
@pytest.mark.parametrize("change", [*CHANGES, doubled], ids=lambda change: change.__name__)
@pytest.mark.usefixtures("however_short")
def test_a_module_on_one_lane_answers_as_it_is_then(filed, change, known):
    """With one lane nobody watches the module: it is not traced, whatever a plan may do or a file says."""
    model, x = Scaled().eval(), torch.randn(8, 4)
    if known == "measured":
        plan = Plan("auto", keep_memory=False, traced=True)
    else:
        plan = Plan.load(filed(model, ["cpu"], x=x), keep_memory=False, traced=True)
    with torch.no_grad(), parallel(model, ["cpu"], plan=plan):
        for _ in range(200):
            before = model(x=x)  # by name: what one lane is given as it is, is not measured at all
        assert_close(before, model.inner(x).tanh())
        change(model)
        for _ in range(3):
            assert_close(model(x=x), model.inner(x).tanh() * model.factor)
        assert not torch.equal(model(x=x), before)
    assert "being measured" not in str(plan)
    assert plan.extra_calls == 0


@pytest.mark.usefixtures("however_short")
def test_traces_are_tried_once_a_way_is_chosen():
    """With leave to trace, the plan has traced ways among what it compared, and tells the runs that this took."""
    model, x = Sums().eval(), torch.randn(8, 4)
    plan = Plan("auto", keep_memory=False, traced=True)
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        for _ in range(400):
            assert_close(model(x), model.inner(x).tanh())
    assert "traced" in str(plan)
    assert plan.extra_calls > 0


def test_calls_that_are_too_short_are_not_traced(monkeypatch):
    """Where no other way than the plain one is tried, no trace is made either."""
    monkeypatch.setattr(_race, "_TOO_SHORT_NS", 10**15)
    model, x = Sums().eval(), torch.randn(8, 4)
    plan = Plan("auto", keep_memory=False, traced=True)
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        for _ in range(50):
            model(x)
    assert plan.extra_calls == 0
    assert "traced" not in str(plan)


def test_a_plan_that_may_not_trace_does_not(filed):
    """Loaded without leave to trace, calls are measured anew where a trace was chosen, and no trace is made."""
    model, x = Sums().eval(), torch.randn(8, 4)
    path = filed(model, DEVICES, x)
    plan = Plan.load(path, keep_memory=False)
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        for _ in range(2):
            model(x)
        assert "being measured" in str(plan)
        for _ in range(200):
            assert_close(model(x), model.inner(x).tanh())
    assert plan.extra_calls == 0
    assert "traced" not in str(plan)


class Nests(Sums):
    """Has a part of it traced in the run that comes before it is traced, as by a call of the model through its stand-in."""

    def __init__(self, traces):
        super().__init__()
        self.traces = traces

    def forward(self, x, scale=1.0):
        if not torch.jit.is_tracing():
            self.traces.make(Entry(self.inner), self.inner, (x[:1],), {})
        return super().forward(x, scale)


def test_a_trace_can_be_made_within_another():
    """A call from within a module that is about to be traced does not wait for that to end; both have a trace then."""
    traces = Traces()
    model, x = Nests(traces).eval(), torch.randn(3, 4)
    with torch.no_grad():
        traces.make(Entry(model), model, (x,), {})
        assert_close(traces.of(Entry(model), (x,), {})(x), model.inner(x).tanh())
        assert_close(traces.of(Entry(model), (x[:1],), {})(x[:1]), model.inner(x[:1]))


@pytest.mark.parametrize(
    "register",
    [torch.nn.modules.module.register_module_forward_hook, torch.nn.modules.module.register_module_forward_pre_hook],
)
def test_a_hook_of_all_modules_runs_though_there_is_a_trace(traced, register):
    """What torch has run at each module's call is run, if it was registered before the trace or after it."""
    model, x = Sums().eval(), torch.randn(8, 4)
    plan = traced(model, x)
    seen = []
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        for _ in range(3):
            model(x)
        assert plan.extra_calls > 0
        with register(lambda module, *_: seen.append(module)):
            model(x)
        assert len([module for module in seen if isinstance(module, nn.Linear)]) == 2  # in each lane
    assert made(model, x)[2] is not None
    with register(lambda *_: None):
        assert made(model, x)[2] is None


def test_train_mode_is_not_that_of_the_trace(traced):
    """A part that drops out in train mode drops out after model.train(), and after part.train() too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).eval()
    x = torch.randn(8, 4)
    plan = traced(model, x)
    with torch.no_grad(), parallel(model, DEVICES, plan=plan):
        model(x)  # the first call tells whether there is a choice
        whole = model(x)
        assert plan.extra_calls > 0
        model.train()
        assert (model(x) == 0).any()
        model.eval()
        assert_close(model(x), whole)
        model[1].train()
        assert (model(x) == 0).any()


def test_extra_calls_are_what_the_model_was_run_beyond_the_users_calls(traced):
    """The model is run no more often than it was called and the plan reports, and the report is of this plan alone."""
    model, x = Sums().eval(), torch.randn(8, 4)
    plan = traced(model, x)
    calls, before = 20, model.runs
    with torch.no_grad(), parallel(model, DEVICES, plan=plan) as p:
        for _ in range(calls):
            model(x)
        assert p.plan.extra_calls == 5  # both lanes have four rows, and so one trace
    assert model.runs - before <= calls + plan.extra_calls


def test_threads_have_right_answers_while_traces_are_made(traced):
    """Two threads whose first calls come at once, of several shapes, each get what the plain call gives."""
    model = Sums().eval()
    plan = traced(model, torch.randn(8, 4))

    def calls(seed):
        inputs = [torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)) for rows in (8, 7, 6, 5) * 4]
        with torch.no_grad():
            return [(x, model(x)) for x in inputs]

    with parallel(model, DEVICES, plan=plan), ThreadPoolExecutor(2) as pool:
        answers = [pair for found in pool.map(calls, range(2)) for pair in found]
    for x, output in answers:
        assert_close(output, model.inner(x).tanh())
