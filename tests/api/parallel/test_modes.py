"""The caller's modes apply in the lanes, and a call does not change them in the caller."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from parawrap import parallel
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
variable = contextvars.ContextVar("variable", default="unset")


class WaitsForLanes(nn.Module):
    """Records the value of `look` in each of three lanes, which wait for each other."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        type(self).seen = []  # on the class, because a replica has its own attributes
        self.barrier = threading.Barrier(3)

    def forward(self, x):
        self.barrier.wait(PATIENCE_S)
        self.seen.append((threading.get_ident(), self.look()))
        return x + 1


@contextlib.contextmanager
def variable_set():
    token = variable.set("set")
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def default_device_set():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def autocast_disabled():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        yield


def autocast_state():
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def type_of_new_tensors():
    return torch.empty(1).device.type


MODES = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled, False),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled, True),
    "bfloat16": (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), autocast_state, (True, torch.bfloat16, False)
    ),
    "float16": (lambda: torch.autocast("cpu", dtype=torch.float16), autocast_state, (True, torch.float16, True)),
    "no autocast": (autocast_disabled, lambda: torch.is_autocast_enabled("cpu"), False),
    "device": (lambda: torch.device("meta"), type_of_new_tensors, "meta"),
    "default device": (default_device_set, type_of_new_tensors, "meta"),
    "variable": (variable_set, variable.get, "set"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_a_mode_applies_in_every_lane(name):
    """It ends in the lanes when it ends in the caller."""
    mode, look, expected = MODES[name]
    before = look()
    model, x = WaitsForLanes(look), torch.ones(3, 2)
    with parallel(model, THREE, out_dims=0):
        for manager, value in ((mode(), expected), (contextlib.nullcontext(), before)):
            model.seen.clear()
            with manager:
                model(x)
                assert look() == value
            threads, values = zip(*model.seen, strict=True)
            assert len(set(threads)) == 3
            assert values == (value,) * 3
    assert look() == before


def test_modes_apply_in_submit_and_map():
    """Those of the submitting thread."""

    def look(x):
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), variable.get()

    with parallel(look, THREE) as p:
        with variable_set(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            future = p.submit(torch.ones(2))
            mapped = list(p.map(torch.ones(4).split(1)))
        assert future.result(PATIENCE_S) == (False, True, "set")
        assert mapped == [(False, True, "set")] * 4


def test_callers_with_different_modes():
    """Of two threads that call at the same time, one under no_grad, each gets its own mode."""
    model, x, barrier, wrong = nn.Linear(4, 2), torch.randn(7, 4), threading.Barrier(2), []

    def work(enabled):
        barrier.wait(PATIENCE_S)
        with torch.set_grad_enabled(enabled):
            wrong.extend(enabled for _ in range(50) if model(x).requires_grad is not enabled)

    with parallel(model, THREE):
        threads = [threading.Thread(target=work, args=(enabled,)) for enabled in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not wrong


def test_training_after_inference_mode():
    """Replicas and outputs of a call in inference mode do not break a later backward pass."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with parallel(model, THREE):
        for _ in range(2):
            model.eval()
            with torch.inference_mode():
                assert model(torch.randn(10, 4)).is_inference()
            model.train()
            model(torch.randn(10, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_training_under_autocast():
    """The dtype, the values, and the gradients are the plain ones. Lanes cast weights again after they changed."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(7, 8)

    def step():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return y, [parameter.grad.clone() for parameter in model.parameters()]

    plain = step()
    assert plain[0].dtype == torch.bfloat16
    with parallel(model, THREE):
        assert_close(step(), plain, atol=0.05, rtol=0.05)
        for value in (0.0, 1.0):
            with torch.no_grad():
                model[2].weight.zero_()
                model[2].bias.fill_(value)
            assert step()[0].unique().tolist() == [value]


def test_the_profiler_records_the_lanes():
    """Also if earlier calls of the block had no profiler."""
    numbers = itertools.count()

    class Profiled(nn.Linear):
        def forward(self, x):
            next(numbers)
            with torch.profiler.record_function("mine"):
                return super().forward(x)

    model, x = Profiled(4, 4), torch.randn(10, 4)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with parallel(model, THREE):
        model(x)
        with profiler as profile:
            for _ in range(5):
                model(x)
    events = {event.key: event.count for event in profile.key_averages()}
    assert (events["mine"], events["aten::linear"], next(numbers)) == (15, 15, 18)


# -- modes that lanes do not see


def test_a_dispatch_mode_sees_the_whole_call():
    """A FLOP counter counts as in the plain call. `submit` and `map` join outputs as a call does, and count once."""

    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    model, x = Mean(4, 4), torch.randn(10, 4)
    with FlopCounterMode(display=False) as plain:
        model(x)
    with torch.no_grad(), parallel(model, THREE, reduce=lambda values: values.mean() + 1) as p:
        with FlopCounterMode(display=False) as counted:
            outputs = [model(x), p.submit(x).result(), next(p.map([x]))]
        assert p.stats().plain == 3
    assert counted.get_total_flops() == 3 * plain.get_total_flops() > 0
    assert_close(outputs, [model(x) + 1] * 3)


def test_tracing_and_export_give_the_plain_program():
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.randn(10, 4)
    with parallel(model, THREE), parallel(model[0], THREE):
        traced = torch.jit.trace(model, x)
        programs = [traced, torch.fx.symbolic_trace(model), torch.export.export(model, (x,)).module()]
    assert "split" not in str(traced.graph)
    for program in programs:
        assert_close(program(x), model(x))


def test_saved_tensor_hooks_of_the_caller():
    """They get the tensors of the whole batch, as in the plain call."""
    model, packed = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    with parallel(model, THREE):
        with hooks:
            y = model(torch.randn(9, 4, requires_grad=True))
        y.sum().backward()
    assert any(len(tensor) == 9 for tensor in packed)


# -- the caller's state


def test_the_thread_count_does_not_change():
    """Neither in the caller nor in new threads, inside and after the block."""

    def thread_counts():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join(PATIENCE_S)
        return torch.get_num_threads(), found[0]

    before, model = thread_counts(), nn.Linear(64, 64)
    with parallel(model, THREE) as p:
        for _ in range(3):
            model(torch.randn(64, 64)).sum().backward()
        p.submit(torch.randn(4, 64)).result(PATIENCE_S)
        inside = thread_counts()
    assert inside == thread_counts() == before
