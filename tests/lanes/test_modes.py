"""Torch's thread-local modes follow the caller into every lane, and no lane keeps them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parawrap.lanes import LanePool, Modes, sees_only_its_own_thread

CPU = torch.device("cpu")
LANES = 3
setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")


@pytest.fixture
def pool() -> Iterator[LanePool]:
    pool = LanePool([CPU] * LANES, CPU)
    yield pool
    pool.close()


def in_lanes(pool: LanePool, look) -> list[Any]:
    """Return the value of `look` in each lane; each lane runs in its own thread."""
    gate = threading.Barrier(LANES)

    def task():
        gate.wait()
        return threading.get_ident(), look()

    outcomes = pool.run([task] * LANES, Modes.capture("cpu"))
    assert [outcome.error for outcome in outcomes] == [None] * LANES
    assert len({outcome.value[0] for outcome in outcomes}) == LANES
    return [outcome.value[1] for outcome in outcomes]


def state() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(0).device,
        "function modes": torch._C._len_torch_function_stack(),
        "setting": setting.get(),
        "threads": torch.get_num_threads(),
    }


def assert_clean(pool: LanePool) -> None:
    """Check that the threads of lanes have the modes of new threads outside any call."""
    for lane in pool.lanes[1:]:
        assert lane.thread is not None
        found: list[dict[str, Any]] = []
        seen = threading.Event()

        def look(_, found=found, seen=seen):
            found.append(state())
            seen.set()

        lane.inbox.put(look)
        seen.wait()
        threads = found[0].pop("threads")
        assert threads == (pool.threads or threads)
        assert found[0] == {
            "grad": True,
            "inference": False,
            "autocast": False,
            "dtype": torch.bfloat16,
            "cache": True,
            "device": CPU,
            "function modes": 0,
            "setting": "unset",
        }


def _no_cache():
    return torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)


@pytest.mark.parametrize(
    ("mode", "key", "value"),
    [
        (torch.no_grad, "grad", False),
        (torch.enable_grad, "grad", True),
        (torch.inference_mode, "inference", True),
        (torch.inference_mode, "grad", False),
        (lambda: torch.autocast("cpu"), "autocast", True),
        (lambda: torch.autocast("cpu", dtype=torch.float16), "dtype", torch.float16),
        (_no_cache, "cache", False),
        (lambda: torch.autocast("cpu", enabled=False), "autocast", False),
        (lambda: torch.device("meta"), "device", torch.device("meta")),
    ],
)
def test_a_mode_follows_the_caller_for_the_call_alone(pool, mode, key, value):
    """Each of torch's thread-local modes is in force in every lane during the call, and in no lane after it."""
    with mode():
        assert [found[key] for found in in_lanes(pool, state)] == [value] * LANES
    assert_clean(pool)
    assert state()["grad"]
    assert [found[key] for found in in_lanes(pool, state)] == [state()[key]] * LANES


def test_modes_nest_as_they_do_in_the_caller(pool):
    """The innermost mode counts: gradients on inside off, autocast off inside on."""
    with torch.no_grad(), torch.autocast("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for found in in_lanes(pool, state):
            assert (found["grad"], found["autocast"]) == (True, False)
    with torch.inference_mode(), torch.inference_mode(mode=False), torch.no_grad():
        for found in in_lanes(pool, state):
            assert (found["inference"], found["grad"]) == (False, False)
    assert_clean(pool)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_tasks_in_turns_have_the_callers_modes(pool, mode):
    """Tasks that the caller runs in turns see the same modes as tasks in threads."""
    with mode():
        expected = state()
        for outcome in pool.run([state] * LANES, Modes.capture("cpu"), turns="all"):
            assert outcome.value == expected


@pytest.mark.parametrize("here", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("captured", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("fails", [True, False], ids=["raises", "returns"])
def test_running_under_modes_restores_the_threads_own_gradient_mode(here, captured, fails):
    """Without autocast, inference mode, and a default device only the gradient mode is switched, and then restored."""

    def look():
        if fails:
            raise ValueError
        return torch.is_grad_enabled()

    with captured():
        modes, expected = Modes.capture("cpu"), torch.is_grad_enabled()
    assert (modes.autocast, modes.default_device, modes.inference) == ((), None, False)
    with here():
        before = state()
        if fails:
            with pytest.raises(ValueError):
                modes.run(look, CPU, CPU)
        else:
            assert modes.run(look, CPU, CPU) is expected
        assert state() == before


def test_one_capture_serves_many_threads_at_once():
    """Modes are immutable, and each run has its own copy of the captured context."""
    token = setting.set("captured")
    modes = Modes.capture("cpu")
    setting.reset(token)
    gate, found = threading.Barrier(4), []

    def look(number):
        gate.wait()
        before = setting.get()
        setting.set(str(number))
        gate.wait()
        return before, setting.get()

    threads = [
        threading.Thread(target=lambda n=number: found.append(modes.run(lambda: look(n), CPU, CPU))) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [("captured", str(number)) for number in range(4)]
    assert modes.run(setting.get, CPU, CPU) == "captured"


def test_an_autocast_dtype_follows_the_caller_while_autocast_is_off(pool):
    """A model that enters autocast itself uses the caller's dtype for it in every lane, as in the plain call."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    x = torch.ones(2, 2)

    def product():
        with torch.autocast("cpu"):
            return (x @ x).dtype

    try:
        assert in_lanes(pool, product) == [product()] * LANES
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_casts_that_a_lane_cached_do_not_outlive_the_call(pool):
    """A parameter that changed in place between two calls under autocast is cast again in every lane."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    with torch.autocast("cpu"):
        first = in_lanes(pool, lambda: (x @ weight).sum().item())
        with torch.no_grad():
            weight.add_(1)
        torch.clear_autocast_cache()  # the caller's own, which torch keeps until the block ends
        assert in_lanes(pool, lambda: (x @ weight).sum().item()) == [2 * value for value in first]


def test_tensors_made_in_a_lane_in_inference_mode_are_inference_tensors(pool):
    """Inference mode itself is in force, not only its gradient flag."""
    with torch.inference_mode():
        assert in_lanes(pool, lambda: torch.ones(1).is_inference()) == [True] * LANES
    assert in_lanes(pool, lambda: torch.ones(1).is_inference()) == [False] * LANES


def test_an_operator_in_a_lane_is_cast_as_in_the_caller(pool):
    """Autocast casts the operators of a lane."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_lanes(pool, lambda: (x @ x).dtype) == [torch.bfloat16] * LANES
    assert in_lanes(pool, lambda: (x @ x).dtype) == [torch.float32] * LANES


def test_a_default_device_follows_the_caller(pool):
    """torch.set_default_device is in force in lanes for as long as in the caller."""
    torch.set_default_device("meta")
    try:
        assert in_lanes(pool, lambda: torch.empty(1).device.type) == ["meta"] * LANES
    finally:
        torch.set_default_device(None)
    assert in_lanes(pool, lambda: torch.empty(1).device.type) == ["cpu"] * LANES
    assert_clean(pool)


def test_the_innermost_default_device_counts(pool):
    """``with torch.device(...)`` inside another, or inside set_default_device, wins."""
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            assert in_lanes(pool, lambda: torch.empty(1).device.type) == ["cpu"] * LANES
    finally:
        torch.set_default_device(None)


def test_a_caller_without_default_device_gives_the_lanes_none():
    """A pool without a module adds no mode to its tasks."""
    pool = LanePool([CPU] * LANES)
    try:
        assert in_lanes(pool, torch._C._len_torch_function_stack) == [0] * LANES
    finally:
        pool.close()


def test_without_a_default_device_a_lane_makes_tensors_where_the_plain_call_does():
    """A function makes tensors where the plain call makes them; a model makes them next to its replica."""
    modes = Modes.capture("cpu")
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), None) == "cpu"
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), CPU) == "meta"


def test_a_default_device_that_is_the_models_home_is_each_lanes_own():
    """If the caller makes tensors next to the model, a lane makes them next to its replica. Other devices stay."""
    with CPU:
        modes = Modes.capture("cpu")
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), CPU) == "meta"
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), torch.device("cuda", 0)) == "cpu"


def test_a_kind_of_device_without_autocast_may_have_lanes():
    """Torch does not offer autocast for every kind of device."""
    assert Modes.capture("meta").autocast == ()


def test_context_variables_follow_the_caller_and_what_a_lane_sets_stays_there(pool):
    """Each lane has its own copy of the caller's context."""
    token = setting.set("by the caller")
    try:
        assert in_lanes(pool, setting.get) == ["by the caller"] * LANES
        task = lambda: setting.set("by a lane") and None  # noqa: E731
        pool.submit(pool.lanes[1], task, Modes.capture("cpu")).result()
        assert setting.get() == "by the caller"
    finally:
        setting.reset(token)
    assert_clean(pool)


def test_an_error_inside_a_mode_leaves_the_lane_clean(pool):
    """An exception inside a mode ends the mode in the lane too."""

    def task():
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
            raise ValueError

    with torch.inference_mode(), torch.autocast("cpu"):
        for outcome in pool.run([task] * LANES, Modes.capture("cpu")):
            assert isinstance(outcome.error, ValueError)
        pool.submit(pool.lanes[1], task, Modes.capture("cpu")).exception()
    in_lanes(pool, lambda: None)
    assert_clean(pool)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails", [True, False], ids=["raises", "returns"])
@pytest.mark.parametrize("left", [True, False], ids=["on", "off"])
def test_a_task_that_switches_gradients_does_not_change_its_lane(pool, mode, fails, left):
    """A task that calls torch.set_grad_enabled and never undoes it, even if it raises, changes no later task."""

    def task():
        torch.set_grad_enabled(left)
        if fails:
            raise ValueError
        return torch.is_grad_enabled()

    with mode():
        for lane in pool.lanes[1:]:
            future = pool.submit(lane, task, Modes.capture("cpu"))
            if fails:
                assert isinstance(future.exception(), ValueError)
            else:
                assert future.result() is left
        found = in_lanes(pool, torch.is_grad_enabled)
        assert found == [torch.is_grad_enabled()] * LANES
    assert_clean(pool)


def test_a_submitted_call_has_the_modes_of_the_moment_it_was_submitted(pool):
    """A mode that the caller enters or leaves after `submit` does not count."""
    release = threading.Event()
    with torch.no_grad():
        holding = pool.submit(pool.lanes[1], release.wait, Modes.capture("cpu"))
        future = pool.submit(pool.lanes[1], state, Modes.capture("cpu"))
    with torch.autocast("cpu"):
        release.set()
        assert future.result()["grad"] is False
        assert future.result()["autocast"] is False
    assert holding.result()


def test_the_callers_profiler_records_the_lanes(pool):
    """The operators of every lane, and record_function inside a lane, are in the profile."""

    def task():
        with torch.profiler.record_function("seen-in-a-lane"):
            return torch.ones(2, 2) @ torch.ones(2, 2)

    with torch.profiler.profile() as profile:
        pool.run([task] * LANES, Modes.capture("cpu"))
        pool.submit(pool.lanes[0], task, Modes.capture("cpu")).result()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["seen-in-a-lane"] == LANES + 1
    assert counts["aten::mm"] == LANES + 1


def test_modes_follow_into_lanes_under_a_profiler_too(pool):
    """Tasks that run in turns under a profiler have the same modes."""
    with torch.profiler.profile(), torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        outcomes = pool.run([state] * LANES, Modes.capture("cpu"))
    for outcome in outcomes:
        found = outcome.value
        assert (found["grad"], found["autocast"], found["device"].type) == (False, True, "meta")


def test_modes_that_follow_into_lanes_are_no_reason_to_run_plainly():
    """Gradient modes, autocast, and a default device follow into lanes, so calls under them are cut."""
    assert not sees_only_its_own_thread()
    with torch.no_grad(), torch.autocast("cpu"), torch.device("cpu"):
        assert not sees_only_its_own_thread()


def test_tracers_and_modes_of_one_thread_are_recognised():
    """A tracer, a dispatch mode, a function mode, a transform, and hooks on saved tensors cannot follow into a lane."""
    seen: list[bool] = []

    def look(x):
        seen.append(sees_only_its_own_thread())
        return x

    torch.func.vmap(look)(torch.zeros(2))
    torch.func.grad(lambda x: look(x).sum())(torch.zeros(2))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    with torch.autograd.graph.save_on_cpu():
        look(None)
    with FlopCounterMode(display=False):
        look(None)
    with torch.overrides.TorchFunctionMode():
        look(None)
    assert seen == [True] * 6
