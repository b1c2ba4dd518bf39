"""Promise 4: the caller's modes follow into the lanes, and stay as they were in the caller."""

from __future__ import annotations

import contextvars
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel

THREE = ["cpu"] * 3
variable = contextvars.ContextVar("variable", default="unset")


class Meets(nn.Module):
    """Notes the value of `look` in each of three lanes. Once armed, the lanes meet, so each runs in its own thread.

    The first call of a kind runs its lanes one after another, so it must not wait for other lanes.
    """

    def __init__(self, look) -> None:
        super().__init__()
        self.look = look
        type(self).seen = []  # on the class: a replica has its own attributes
        self.armed = threading.Event()
        self.barrier = threading.Barrier(3)

    def forward(self, x):
        if self.armed.is_set():
            self.barrier.wait(20)
        self.seen.append((threading.get_ident(), self.look()))
        return x + 1


def meet(model, x):
    """Call the model under the caller's modes twice: the first call of its kind, and one whose lanes meet."""
    model.armed.clear()
    model.seen.clear()
    model(x)
    model.armed.set()
    first, model.seen[:] = model.seen[:], []
    model(x)
    assert len({thread for thread, _ in model.seen}) == 3
    assert {value for _, value in first} == {value for _, value in model.seen}


def seen_in_lanes(look):
    """Return the values of `look` in three lanes, under the modes of the caller."""
    model = Meets(look)
    with parallel(model, THREE):
        meet(model, torch.ones(3, 2))
    return [value for _, value in model.seen]


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_follows(enabled):
    """no_grad and enable_grad are in force in every lane."""
    with torch.set_grad_enabled(enabled):
        assert seen_in_lanes(torch.is_grad_enabled) == [enabled] * 3
        assert torch.is_grad_enabled() is enabled


def test_inference_mode_follows():
    """Inference mode is in force in every lane, and outputs are inference tensors."""
    with torch.inference_mode():
        assert seen_in_lanes(torch.is_inference_mode_enabled) == [True] * 3
        with parallel(torch.tanh, THREE) as p:
            for _ in range(2):
                assert p(torch.ones(7)).is_inference()


def test_a_call_in_inference_mode_leaves_the_lanes_fit_for_training():
    """What the lanes made in inference mode does not get in the way of a backward pass."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with parallel(model, THREE):
        model.eval()
        with torch.inference_mode():
            model(torch.randn(9, 4))
        model.train()
        model(torch.randn(9, 4)).sum().backward()
        with torch.inference_mode():
            model(torch.randn(9, 4))
        model(torch.randn(9, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_model_trained_in_the_block_is_evaluated_in_inference_mode():
    """Statistics that lane 0 wrote in training reach the lanes in inference mode."""
    model = nn.BatchNorm1d(4)
    x = torch.randn(9, 4)
    with parallel(model, THREE):
        model(x * 3 + 1)
        model.eval()
        with torch.inference_mode():
            inside = model(x)
    assert_close(inside.clone(), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows(dtype):
    """Enabled, dtype and cache of autocast on the CPU are those of the caller."""

    def look():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        assert seen_in_lanes(look) == [(True, dtype, False)] * 3
    assert torch.is_autocast_enabled("cpu") is False


def test_autocast_off_inside_autocast_follows():
    """A nested autocast(enabled=False) is respected."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert seen_in_lanes(lambda: torch.is_autocast_enabled("cpu")) == [False] * 3


def test_lanes_forget_the_modes_of_the_last_call():
    """A call after the autocast and no_grad blocks runs without them, in the same lanes."""
    model = Meets(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), variable.get()))
    with parallel(model, THREE):
        token = variable.set("set")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            meet(model, torch.ones(3, 2))
        assert [value for _, value in model.seen] == [(False, True, "set")] * 3
        variable.reset(token)
        meet(model, torch.ones(3, 2))
    assert [value for _, value in model.seen] == [(True, False, "unset")] * 3


def test_autocast_gives_the_plain_answer_and_gradient():
    """A training step under bf16 autocast equals the plain one: dtype, values and gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(7, 8)

    def step():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return y, [p.grad.clone() for p in model.parameters()]

    plain = step()
    assert plain[0].dtype == torch.bfloat16
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(step(), plain, atol=0.05, rtol=0.05)


def test_autocasts_weight_cache_does_not_outlive_a_call():
    """Weights that change between two calls under autocast are cast anew in every lane."""
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(6, 4)
    with parallel(model, THREE):
        for value in (1.0, 2.0):
            with torch.no_grad():
                model.weight.fill_(value)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model(x).float().unique().tolist() == [4 * value]


@pytest.mark.parametrize("how", ["with", "set"])
def test_the_default_device_follows(how):
    """torch.device as a context and set_default_device are in force in every lane."""

    def look():
        return torch.empty(1).device.type

    if how == "with":
        with torch.device("meta"):
            model = Meets(look)
            x = torch.ones(3, 2, device="cpu")
            with parallel(model, THREE):
                meet(model, x)
        assert [value for _, value in model.seen] == ["meta"] * 3
        return
    torch.set_default_device("meta")
    try:
        model = Meets(look)
        x = torch.ones(3, 2, device="cpu")
        with parallel(model, THREE):
            meet(model, x)
    finally:
        torch.set_default_device(None)
    assert [value for _, value in model.seen] == ["meta"] * 3


def test_context_variables_follow():
    """A ContextVar that the caller set is read in every lane; what a lane sets stays there."""
    token = variable.set("mine")
    try:
        assert seen_in_lanes(variable.get) == ["mine"] * 3
    finally:
        variable.reset(token)
    assert seen_in_lanes(variable.get) == ["unset"] * 3


def test_modes_follow_into_submit_and_map():
    """Whole calls on lanes run under the modes of whoever sent them."""

    def look(x):
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), variable.get()

    with parallel(look, THREE) as p:
        token = variable.set("sent")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            future = p.submit(torch.ones(2))
            mapped = list(p.map(torch.ones(4).split(1)))
        variable.reset(token)
        assert future.result(20) == (False, True, "sent")
        assert mapped == [(False, True, "sent")] * 4


def test_two_callers_with_different_modes_do_not_mix():
    """Threads that call at once, one under no_grad and one not, each get their own mode."""
    model = nn.Linear(4, 2)
    x = torch.randn(6, 4)
    barrier = threading.Barrier(2)
    wrong = []

    def work(enabled):
        barrier.wait(20)
        with torch.set_grad_enabled(enabled):
            wrong.extend(enabled for _ in range(100) if model(x).requires_grad is not enabled)

    with parallel(model, THREE):
        threads = [threading.Thread(target=work, args=(enabled,)) for enabled in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


def test_the_profiler_sees_what_the_lanes_do():
    """A profiler counts the operators and record_function ranges of every lane, also after calls without a profiler."""
    numbers = itertools.count()

    class Profiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            next(numbers)
            with torch.profiler.record_function("mine"):
                return self.linear(x)

    model = Profiled()
    x = torch.randn(9, 4)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with parallel(model, THREE) as p:
        for _ in range(2):
            model(x)
        before = next(numbers)
        with profiler as profile:
            for _ in range(5):
                assert_close(model(x), model.linear(x))
        assert p.stats().shards == (3, 3, 3)
    events = {event.key: event.count for event in profile.key_averages()}
    assert events["mine"] == 15
    assert events["aten::linear"] == 20
    assert next(numbers) == before + 16


def test_a_dispatch_mode_of_the_caller_sees_the_whole_call():
    """A FLOP counter around a parallel call counts what it counts around the plain one."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(4, 4)
    x = torch.randn(9, 4)
    with FlopCounterMode(display=False) as plain:
        model(x)
    with parallel(model, THREE), FlopCounterMode(display=False) as counted:
        model(x)
    assert counted.get_total_flops() == plain.get_total_flops() > 0


def test_tracing_a_parallel_model_gives_the_plain_graph():
    """torch.jit.trace inside the block sees one batch, not three shards."""
    model = nn.Linear(4, 2)
    x = torch.randn(9, 4)
    with parallel(model, THREE):
        traced = torch.jit.trace(model, x)
    assert "split" not in str(traced.graph)
    y = torch.randn(5, 4)
    assert_close(traced(y), model(y))


def test_symbolic_tracing_and_export_see_the_plain_model():
    """Fx and torch.export inside the block give what they give outside."""
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    x = torch.randn(9, 4)
    with parallel(model, THREE), parallel(model[0], THREE):
        graph = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (x,))
    assert_close(graph(x), model(x))
    assert_close(exported.module()(x), model(x))


def test_saved_tensor_hooks_of_the_caller_are_called():
    """torch.autograd.graph.saved_tensors_hooks see what the model saves."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    with parallel(model, THREE):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = model(torch.randn(9, 4, requires_grad=True))
        y.sum().backward()
    assert packed


def test_the_callers_figure_of_threads_is_what_it_was():
    """torch.get_num_threads is the same after the block, here and in new threads."""

    def figures():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join(20)
        return torch.get_num_threads(), found[0]

    before = figures()
    model = nn.Linear(64, 64)
    with parallel(model, THREE) as p:
        for _ in range(5):
            model(torch.randn(64, 64)).sum().backward()
        p.submit(torch.randn(4, 64)).result(20)
        inside = figures()
    assert inside == before
    assert figures() == before


def test_a_call_that_draws_nothing_leaves_the_callers_generator_alone():
    """Dropout with p=0 draws no random numbers, and parawrap draws none either."""
    model = nn.Dropout(0.0)
    x = torch.randn(9, 4)
    state = torch.get_rng_state()
    with parallel(model, THREE):
        for _ in range(3):
            assert torch.equal(model(x), x)
    assert torch.equal(state, torch.get_rng_state())
