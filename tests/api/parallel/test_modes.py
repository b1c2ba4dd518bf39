"""The caller's modes apply in the lanes, and a call does not change them in the caller."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

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


@contextlib.contextmanager
def variable_set():
    token = variable.set("set")
    try:
        yield
    finally:
        variable.reset(token)


def autocast():
    return torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)


def look():
    """Return the modes of this thread."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype, torch.is_autocast_cache_enabled(),
        torch.empty(1).device.type, variable.get(),
    )  # fmt: skip


MODES = {
    "inference": (torch.inference_mode, (False, True, None, True, "cpu", "unset")),
    "autocast": (autocast, (True, False, torch.float16, False, "cpu", "unset")),
    "device": (lambda: torch.device("meta"), (True, False, None, True, "meta", "unset")),
    "variable": (variable_set, (True, False, None, True, "cpu", "set")),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_applies_in_every_lane(name):
    """In calls, `submit`, and `map`. It ends in the lanes when it ends in the caller."""
    mode, expected = MODES[name]
    before, seen, barrier, x = look(), [], threading.Barrier(3), torch.ones(3, 2)

    def target(x):
        if len(x) == 1:
            barrier.wait(PATIENCE_S)
        seen.append((threading.get_ident(), look()))
        return x

    with parallel(target, THREE, out_dims=0) as p:
        for entered, value in ((mode, expected), (contextlib.nullcontext, before)):
            seen.clear()
            with entered():
                p(x)
                assert look() == value
                futures = [p.submit(x) for _ in range(3)]
                list(p.map([x] * 3))
            for future in futures:
                future.result(PATIENCE_S)
            assert len({thread for thread, _ in seen[:3]}) == 3
            assert [found for _, found in seen] == [value] * 9
    assert look() == before


def test_callers_with_different_modes():
    """Of two threads that call at the same time, one under no_grad, each gets its own mode."""
    model, x, barrier = nn.Linear(4, 2), torch.randn(7, 4), threading.Barrier(2)

    def work(enabled):
        barrier.wait(PATIENCE_S)
        with torch.set_grad_enabled(enabled):
            return [model(x).requires_grad for _ in range(50)]

    with parallel(model, THREE), ThreadPoolExecutor(2) as executor:
        assert list(executor.map(work, (True, False), timeout=PATIENCE_S)) == [[True] * 50, [False] * 50]


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
    model, x = nn.Linear(4, 4), torch.randn(10, 4)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with parallel(model, THREE):
        model(x)
        with profiler as profile:
            for _ in range(5):
                model(x)
    events = {event.key: event.count for event in profile.key_averages()}
    assert events["aten::linear"] == 15


# -- modes that lanes do not see


def test_dispatch_modes_see_whole_calls():
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


def test_tracing_and_export_are_plain():
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.randn(10, 4)
    with parallel(model, THREE), parallel(model[0], THREE):
        traced = torch.jit.trace(model, x)
        programs = [traced, torch.fx.symbolic_trace(model), torch.export.export(model, (x,)).module()]
    assert "split" not in str(traced.graph)
    for program in programs:
        assert_close(program(x), model(x))


def test_saved_tensor_hooks_of_callers():
    """They get the tensors of the whole batch, as in the plain call."""
    model, packed = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor)
    with parallel(model, THREE):
        with hooks:
            y = model(torch.randn(9, 4, requires_grad=True))
        y.sum().backward()
    assert any(len(tensor) == 9 for tensor in packed)
