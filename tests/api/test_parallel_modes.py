"""The caller's modes apply in the lanes, and a call does not change them in the caller."""

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


class WaitsForLanes(nn.Module):
    """Records the value of `look` in each of three lanes, which wait for each other."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look = look
        type(self).seen = []  # on the class, because a replica has its own attributes
        self.barrier = threading.Barrier(3)

    def forward(self, x):
        self.barrier.wait(20)
        self.seen.append((threading.get_ident(), self.look()))
        return x + 1


def meet(model, x):
    """Call the model under the caller's modes. The lanes run in three threads."""
    model.seen.clear()
    model(x)
    assert len({thread for thread, _ in model.seen}) == 3


def seen_in_lanes(look):
    """Return the values of `look` in three lanes under the caller's modes."""
    model = WaitsForLanes(look)
    with parallel(model, THREE, out_dims=0):
        meet(model, torch.ones(3, 2))
    return [value for _, value in model.seen]


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_applies_in_lanes(enabled):
    """no_grad and enable_grad apply in every lane."""
    with torch.set_grad_enabled(enabled):
        assert seen_in_lanes(torch.is_grad_enabled) == [enabled] * 3
        assert torch.is_grad_enabled() is enabled


def test_inference_mode_applies_in_lanes():
    """Inference mode applies in every lane, and outputs are inference tensors."""
    with torch.inference_mode():
        assert seen_in_lanes(torch.is_inference_mode_enabled) == [True] * 3
        with parallel(torch.tanh, THREE) as p:
            for _ in range(2):
                assert p(torch.ones(7)).is_inference()


def test_training_after_a_call_in_inference_mode():
    """Replicas from a call in inference mode do not break a later backward pass."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with parallel(model, THREE):
        model.eval()
        with torch.inference_mode():
            model(torch.randn(10, 4))
        model.train()
        model(torch.randn(10, 4)).sum().backward()
        with torch.inference_mode():
            model(torch.randn(10, 4))
        model(torch.randn(10, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_inference_mode_after_training_in_the_block():
    """Lanes in inference mode use the statistics that lane 0 wrote during training."""
    model = nn.BatchNorm1d(4)
    x = torch.randn(10, 4)
    with parallel(model, THREE):
        model(x * 3 + 1)
        model.eval()
        with torch.inference_mode():
            inside = model(x)
    assert_close(inside.clone(), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_applies_in_lanes(dtype):
    """Lanes have the caller's autocast state, dtype, and cache setting."""

    def look():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        assert seen_in_lanes(look) == [(True, dtype, False)] * 3
    assert torch.is_autocast_enabled("cpu") is False


def test_disabled_autocast_inside_autocast_applies_in_lanes():
    """A nested autocast(enabled=False) applies in every lane."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert seen_in_lanes(lambda: torch.is_autocast_enabled("cpu")) == [False] * 3


def test_lanes_do_not_keep_the_modes_of_earlier_calls():
    """After no_grad and autocast end, later calls in the same lanes run without them."""
    model = WaitsForLanes(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), variable.get()))
    with parallel(model, THREE, out_dims=0):
        token = variable.set("set")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            meet(model, torch.ones(3, 2))
        assert [value for _, value in model.seen] == [(False, True, "set")] * 3
        variable.reset(token)
        meet(model, torch.ones(3, 2))
    assert [value for _, value in model.seen] == [(True, False, "unset")] * 3


def test_autocast_has_the_plain_output_and_gradient():
    """A training step under bfloat16 autocast has the plain dtype, values, and gradients."""
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


def test_autocasts_weight_cache_ends_with_the_call():
    """If weights change between two calls under autocast, every lane casts them again."""
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(7, 4)
    with parallel(model, THREE):
        for value in (1.0, 2.0):
            with torch.no_grad():
                model.weight.fill_(value)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model(x).float().unique().tolist() == [4 * value]


@pytest.mark.parametrize("how", ["with", "set"])
def test_the_default_device_applies_in_lanes(how):
    """A torch.device context and set_default_device apply in every lane."""

    def look():
        return torch.empty(1).device.type

    if how == "with":
        with torch.device("meta"):
            model = WaitsForLanes(look)
            x = torch.ones(3, 2, device="cpu")
            with parallel(model, THREE, out_dims=0):
                meet(model, x)
        assert [value for _, value in model.seen] == ["meta"] * 3
        return
    torch.set_default_device("meta")
    try:
        model = WaitsForLanes(look)
        x = torch.ones(3, 2, device="cpu")
        with parallel(model, THREE, out_dims=0):
            meet(model, x)
    finally:
        torch.set_default_device(None)
    assert [value for _, value in model.seen] == ["meta"] * 3


def test_context_variables_apply_in_lanes():
    """Every lane reads the caller's value of a ContextVar."""
    token = variable.set("mine")
    try:
        assert seen_in_lanes(variable.get) == ["mine"] * 3
    finally:
        variable.reset(token)
    assert seen_in_lanes(variable.get) == ["unset"] * 3


def test_modes_apply_in_submit_and_map():
    """Calls from submit and map run under the modes of the submitting thread."""

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
    """Of two threads that call at the same time, one under no_grad, each gets its own mode."""
    model = nn.Linear(4, 2)
    x = torch.randn(7, 4)
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


def test_the_profiler_records_the_lanes():
    """A profiler counts operators and record_function ranges of all lanes, also if earlier calls had no profiler."""
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
    x = torch.randn(10, 4)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with parallel(model, THREE) as p:
        for _ in range(2):
            model(x)
        before = next(numbers)
        with profiler as profile:
            for _ in range(5):
                assert_close(model(x), model.linear(x))
        assert p.stats().shards == (4, 3, 3)
    events = {event.key: event.count for event in profile.key_averages()}
    assert events["mine"] == 15
    assert events["aten::linear"] == 20
    assert next(numbers) == before + 16


def test_a_dispatch_mode_of_the_caller_applies_to_the_whole_call():
    """A FLOP counter counts the same number for a parallel call and for the plain call."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(4, 4)
    x = torch.randn(10, 4)
    with FlopCounterMode(display=False) as plain:
        model(x)
    with parallel(model, THREE), FlopCounterMode(display=False) as counted:
        model(x)
    assert counted.get_total_flops() == plain.get_total_flops() > 0


def test_tracing_a_parallel_model_gives_the_plain_graph():
    """Inside the block, torch.jit.trace traces one plain call."""
    model = nn.Linear(4, 2)
    x = torch.randn(10, 4)
    with parallel(model, THREE):
        traced = torch.jit.trace(model, x)
    assert "split" not in str(traced.graph)
    y = torch.randn(5, 4)
    assert_close(traced(y), model(y))


def test_symbolic_tracing_and_export_use_the_plain_model():
    """Inside the block, fx and torch.export give programs with the plain output."""
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    x = torch.randn(10, 4)
    with parallel(model, THREE), parallel(model[0], THREE):
        graph = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (x,))
    assert_close(graph(x), model(x))
    assert_close(exported.module()(x), model(x))


def test_saved_tensor_hooks_of_the_caller_are_called():
    """The caller's saved_tensors_hooks get the tensors that the lanes save."""
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


def test_the_callers_thread_count_does_not_change():
    """torch.get_num_threads returns the same in the caller and in new threads, inside and after the block."""

    def thread_counts():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join(20)
        return torch.get_num_threads(), found[0]

    before = thread_counts()
    model = nn.Linear(64, 64)
    with parallel(model, THREE) as p:
        for _ in range(5):
            model(torch.randn(64, 64)).sum().backward()
        p.submit(torch.randn(4, 64)).result(20)
        inside = thread_counts()
    assert inside == before
    assert thread_counts() == before


def test_a_call_that_draws_nothing_does_not_change_the_generator():
    """Dropout with p=0 draws no random numbers, and neither does parawrap."""
    model = nn.Dropout(0.0)
    x = torch.randn(10, 4)
    state = torch.get_rng_state()
    with parallel(model, THREE):
        for _ in range(3):
            assert torch.equal(model(x), x)
    assert torch.equal(state, torch.get_rng_state())


def test_outputs_are_joined_outside_autocast():
    """A function that reduces the values of lanes sees no autocast, which would round them."""
    seen = []

    def reduced(vector):
        seen.append(torch.is_autocast_enabled("cpu"))
        return vector.sum()

    with parallel(torch.sum, ["cpu", "cpu"], reduce=reduced) as p, torch.autocast("cpu", dtype=torch.bfloat16):
        p(torch.ones(9))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]
