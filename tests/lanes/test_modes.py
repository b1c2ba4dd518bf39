"""What is in force in the caller is in force in every lane, and nothing of it stays there."""

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
    """What `look` returns in each lane, each of which is made to run in a thread of its own."""
    gate = threading.Barrier(LANES)

    def task():
        gate.wait()
        return threading.get_ident(), look()

    outcomes = pool.run([task] * LANES)
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
    """The lanes' own threads, outside any call, are as new threads are."""
    for lane in pool.lanes[1:]:
        assert lane.thread is not None
        found: list[dict[str, Any]] = []
        seen = threading.Event()

        def look(found=found, seen=seen):
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
def test_a_mode_follows_the_caller_and_stays_behind_with_the_caller(pool, mode, key, value):
    """Each of torch's thread-local modes is in force in every lane during the call, and in none after it."""
    with mode():
        assert [found[key] for found in in_lanes(pool, state)] == [value] * LANES
    assert_clean(pool)
    assert state()["grad"]
    assert [found[key] for found in in_lanes(pool, state)] == [state()[key]] * LANES


def test_modes_nest_as_they_do_in_the_caller(pool):
    """Gradients on inside inference mode off, autocast off inside on: the innermost is what counts."""
    with torch.no_grad(), torch.autocast("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for found in in_lanes(pool, state):
            assert (found["grad"], found["autocast"]) == (True, False)
    with torch.inference_mode(), torch.inference_mode(mode=False), torch.no_grad():
        for found in in_lanes(pool, state):
            assert (found["inference"], found["grad"]) == (False, False)
    assert_clean(pool)


def test_tensors_made_in_a_lane_in_inference_mode_are_inference_tensors(pool):
    """The mode is the real one, not the flag of gradients."""
    with torch.inference_mode():
        assert in_lanes(pool, lambda: torch.ones(1).is_inference()) == [True] * LANES
    assert in_lanes(pool, lambda: torch.ones(1).is_inference()) == [False] * LANES


def test_an_operator_in_a_lane_is_cast_as_in_the_caller(pool):
    """Autocast acts on what a lane computes."""
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_lanes(pool, lambda: (x @ x).dtype) == [torch.bfloat16] * LANES
    assert in_lanes(pool, lambda: (x @ x).dtype) == [torch.float32] * LANES


def test_a_default_device_follows_the_caller(pool):
    """torch.set_default_device holds in lanes, and no longer than in the caller."""
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
    """A pool of no module's adds no mode of its own to what its lanes run."""
    pool = LanePool([CPU] * LANES)
    try:
        assert in_lanes(pool, torch._C._len_torch_function_stack) == [0] * LANES
    finally:
        pool.close()


def test_without_a_default_device_new_tensors_are_on_the_cpu_in_every_lane():
    """A function that makes a tensor makes it in each lane where the plain call makes it; a model, beside its replica."""
    modes = Modes.capture("cpu")
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), None) == "cpu"
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), CPU) == "meta"


def test_a_default_device_that_is_the_models_home_is_each_lanes_own():
    """Where the caller makes tensors beside the model, a lane makes them beside its replica; another device stays."""
    with CPU:
        modes = Modes.capture("cpu")
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), CPU) == "meta"
    assert modes.run(lambda: torch.empty(1).device.type, torch.device("meta"), torch.device("cuda", 0)) == "cpu"


def test_a_kind_of_device_that_has_no_autocast_may_have_lanes():
    """A backend may be registered for a kind that torch's autocast does not know."""
    assert Modes.capture("meta").autocast == ()


def test_context_variables_follow_the_caller_and_what_a_lane_sets_stays_there(pool):
    """Lanes read the caller's context; a copy of it, so that they do not write into each other's."""
    token = setting.set("by the caller")
    try:
        assert in_lanes(pool, setting.get) == ["by the caller"] * LANES
        task = lambda: setting.set("by a lane") and None  # noqa: E731
        pool.submit(pool.lanes[1], task).result()
        assert setting.get() == "by the caller"
    finally:
        setting.reset(token)
    assert_clean(pool)


def test_a_mode_that_work_leaves_switched_on_does_not_outlive_the_call(pool):
    """An exception out of a mode, in a lane, leaves the lane clean."""

    def task():
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
            raise ValueError

    with torch.inference_mode(), torch.autocast("cpu"):
        for outcome in pool.run([task] * LANES):
            assert isinstance(outcome.error, ValueError)
        pool.submit(pool.lanes[1], task).exception()
    in_lanes(pool, lambda: None)
    assert_clean(pool)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails", [True, False], ids=["raises", "returns"])
@pytest.mark.parametrize("left", [True, False], ids=["on", "off"])
def test_gradients_that_work_switches_stay_as_they_were_in_the_lane(pool, mode, fails, left):
    """Work that calls torch.set_grad_enabled and never takes it back, even if it raises, has it for itself."""

    def task():
        torch.set_grad_enabled(left)
        if fails:
            raise ValueError
        return torch.is_grad_enabled()

    with mode():
        for lane in pool.lanes[1:]:
            future = pool.submit(lane, task)
            if fails:
                assert isinstance(future.exception(), ValueError)
            else:
                assert future.result() is left
        found = in_lanes(pool, torch.is_grad_enabled)
        assert found == [torch.is_grad_enabled()] * LANES
    assert_clean(pool)


def test_submitted_work_sees_the_modes_of_when_it_was_submitted(pool):
    """`submit` captures: what the caller switches on later does not count."""
    release = threading.Event()
    with torch.no_grad():
        holding = pool.submit(pool.lanes[1], release.wait)
        future = pool.submit(pool.lanes[1], state)
    with torch.autocast("cpu"):
        release.set()
        assert future.result()["grad"] is False
        assert future.result()["autocast"] is False
    assert holding.result()


def test_work_in_lanes_is_seen_by_the_callers_profiler(pool):
    """record_function inside a lane, and its operators, are in the profile."""

    def task():
        with torch.profiler.record_function("seen-in-a-lane"):
            return torch.ones(2, 2) @ torch.ones(2, 2)

    with torch.profiler.profile() as profile:
        pool.run([task] * LANES)
        pool.submit(pool.lanes[0], task).result()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["seen-in-a-lane"] == LANES + 1
    assert counts["aten::mm"] == LANES + 1


def test_modes_follow_into_lanes_under_a_profiler_too(pool):
    """The way that work takes under a profiler carries the same modes."""
    with torch.profiler.profile(), torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        outcomes = pool.run([state] * LANES)
    for outcome in outcomes:
        found = outcome.value
        assert (found["grad"], found["autocast"], found["device"].type) == (False, True, "meta")


def test_a_callers_plain_modes_let_lanes_work():
    """Modes that lanes carry are no reason to stay in one thread."""
    assert not sees_only_its_own_thread()
    with torch.no_grad(), torch.autocast("cpu"), torch.device("cpu"):
        assert not sees_only_its_own_thread()


def test_what_watches_one_thread_is_recognised():
    """A tracer, a dispatch mode, a function mode, a transform and hooks on saved tensors cannot follow into a lane."""
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
