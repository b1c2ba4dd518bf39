"""Torch's thread-local modes follow the caller into every lane for the call, and no lane keeps them."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parawrap.engine import Entry, Session
from parawrap.lanes import LanePool, Modes, intra_op_threads, sees_only_its_own_thread
from parawrap.shards import Cutter, JoinRules

CPU, META, CUDA = map(torch.device, ("cpu", "meta", "cuda"))
LANES = 3
setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")


@pytest.fixture
def pool():
    pool = LanePool([CPU] * LANES, CPU)
    yield pool
    pool.close()


def run(pool, task, **options):
    outcomes = pool.run([task] * len(pool.lanes), Modes.capture("cpu"), **options)
    assert [outcome.error for outcome in outcomes] == [None] * len(pool.lanes)
    return [outcome.value for outcome in outcomes]


def in_lanes(pool, look):
    """Return the value of `look` in each lane; each lane runs in its own thread."""
    gate = threading.Barrier(LANES)
    found = run(pool, lambda: (gate.wait(), threading.get_ident(), look()))
    assert len({thread for _, thread, _ in found}) == LANES
    return [value for *_, value in found]


def state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(0).device,
        "function modes": torch._C._len_torch_function_stack(),
        "setting": setting.get(),
        "made": torch.ones(1).is_inference(),
        "product": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
    }


def assert_clean(pool):
    """Check that the threads of lanes have the modes of new threads outside any call."""
    expected = {"grad": True, "inference": False, "autocast": False, "dtype": torch.bfloat16, "cache": True, "device": CPU}
    expected |= {"function modes": 0, "setting": "unset", "made": False, "product": torch.float32}
    for lane in pool.lanes[1:]:
        found, seen = [], threading.Event()
        lane.inbox.put(lambda _, found=found, seen=seen: (found.append(state()), seen.set()))
        seen.wait()
        assert found == [expected]


MODES = {
    "no_grad": (torch.no_grad, {"grad": False}),
    "enable_grad": (torch.enable_grad, {"grad": True}),
    "inference": (torch.inference_mode, {"inference": True, "grad": False, "made": True}),
    "autocast": (lambda: torch.autocast("cpu"), {"autocast": True, "product": torch.bfloat16}),
    "float16": (lambda: torch.autocast("cpu", dtype=torch.float16), {"dtype": torch.float16, "product": torch.float16}),
    "no cache": (lambda: torch.autocast("cpu", cache_enabled=False), {"cache": False, "autocast": True}),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), {"autocast": False}),
    "device": (lambda: META, {"device": META}),
}


@pytest.mark.parametrize(("mode", "expected"), MODES.values(), ids=MODES)
def test_a_mode_follows_the_caller(pool, mode, expected):
    """During the call, also in turns, and under a profiler; in no lane after it."""
    with mode():
        found = in_lanes(pool, state) + run(pool, state, turns="all")
        with torch.profiler.profile():
            found += run(pool, state)
    for each in found:
        assert {key: each[key] for key in expected} == expected
    assert_clean(pool)
    assert in_lanes(pool, state)[1:] == [state()] * (LANES - 1)


def test_modes_nest_as_in_the_caller(pool):
    """The innermost mode counts."""
    with torch.no_grad(), torch.autocast("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        assert [(found["grad"], found["autocast"]) for found in in_lanes(pool, state)] == [(True, False)] * LANES
    with torch.inference_mode(), torch.inference_mode(mode=False), torch.no_grad():
        assert [(found["inference"], found["grad"]) for found in in_lanes(pool, state)] == [(False, False)] * LANES
    assert_clean(pool)


@pytest.mark.parametrize("inside", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("captured", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fails", [True, False], ids=["raises", "returns"])
def test_a_run_restores_the_threads_modes(inside, captured, fails):
    def look():
        before = state()
        torch.set_grad_enabled(not torch.is_grad_enabled())  # and never undone
        if fails:
            raise ValueError(before)
        return before

    with captured():
        modes, expected = Modes.capture("cpu"), state()
    with inside():
        before = state()
        if fails:
            with pytest.raises(ValueError):
                modes.run(look, CPU, CPU)
        else:
            assert modes.run(look, CPU, CPU) == expected
        assert state() == before


def test_an_error_leaves_the_lane_clean(pool):
    def task():
        with torch.no_grad(), torch.autocast("cpu"), META:
            raise ValueError

    with torch.inference_mode(), torch.autocast("cpu"):
        outcomes = pool.run([task] * LANES, Modes.capture("cpu"))
        assert {type(outcome.error) for outcome in outcomes} == {ValueError}
        pool.submit(pool.lanes[1], task, Modes.capture("cpu")).exception()
    assert_clean(pool)


def test_autocast_in_the_model_has_the_callers_dtype(pool):
    """Also while autocast is off in the caller."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)

    def product():
        with torch.autocast("cpu"):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    try:
        assert in_lanes(pool, product) == [torch.float16] * LANES
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert_clean(pool)


def test_cached_casts_end_with_the_call(pool):
    """A parameter that changed between two calls under autocast is cast again in every lane."""
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with torch.autocast("cpu"):
        first = in_lanes(pool, lambda: (x @ weight).sum().item())
        with torch.no_grad():
            weight.add_(1)
        torch.clear_autocast_cache()  # the caller's own, which torch keeps until the block ends
        assert in_lanes(pool, lambda: (x @ weight).sum().item()) == [2 * value for value in first]
        modes = Modes.capture("cpu")
        with modes.without_autocast():
            assert state()["autocast"] is False
        assert state()["autocast"] is True


def test_default_devices_follow_the_caller(pool):
    """The innermost one counts, and a caller without one gives the lanes none."""
    torch.set_default_device("meta")
    try:
        assert {found["device"] for found in in_lanes(pool, state)} == {META}
        with CPU:
            assert {found["device"] for found in in_lanes(pool, state)} == {CPU}
    finally:
        torch.set_default_device(None)
    assert [found["function modes"] for found in in_lanes(pool, state)] == [0] * LANES


@pytest.mark.parametrize(
    ("default", "home", "expected"),
    [(None, None, CPU), (None, CPU, META), (CPU, CPU, META), (CPU, CUDA, CPU)],
)
def test_the_models_home_means_the_lane(default, home, expected):
    """If the caller makes tensors where the model is, a lane makes them next to its replica."""
    with default or torch.enable_grad():
        modes = Modes.capture("cpu")
    assert modes.run(lambda: torch.empty(1).device, META, home) == expected
    assert Modes.capture("meta").autocast == ()  # torch does not offer autocast for every kind


def test_context_variables_stay_in_their_lane(pool):
    token = setting.set("by the caller")
    try:
        assert in_lanes(pool, setting.get) == ["by the caller"] * LANES
        pool.submit(pool.lanes[1], lambda: setting.set("by a lane"), Modes.capture("cpu")).result()
        assert setting.get() == "by the caller"
    finally:
        setting.reset(token)
    assert_clean(pool)


def test_submitted_calls_keep_their_modes(pool):
    """A mode that the caller enters or leaves after `submit` does not count."""
    release = threading.Event()
    with torch.no_grad():
        pool.submit(pool.lanes[1], release.wait, Modes.capture("cpu"))
        future = pool.submit(pool.lanes[1], state, Modes.capture("cpu"))
    with torch.autocast("cpu"):
        release.set()
        assert (future.result()["grad"], future.result()["autocast"]) == (False, False)


def test_tracers_of_one_thread_are_recognized():
    """They cannot follow into a lane. Gradient modes, autocast, and a default device can."""
    seen = []

    def look(x):
        seen.append(sees_only_its_own_thread())
        return x

    torch.func.vmap(look)(torch.zeros(2))
    torch.func.grad(lambda x: look(x).sum())(torch.zeros(2))
    torch.func.jvp(look, (torch.zeros(2),), (torch.zeros(2),))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    for mode in (torch.autograd.graph.save_on_cpu(), FlopCounterMode(display=False), torch.overrides.TorchFunctionMode()):
        with mode:
            look(None)
    with torch.autograd.forward_ad.dual_level():
        look(None)
    assert seen == [True] * 8
    with torch.no_grad(), torch.autocast("cpu"), CPU:
        assert not sees_only_its_own_thread()


# The number of threads that one operator may use


@pytest.fixture
def count():
    """The caller's count is 2 during the test, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def threads_of_an_operator(x=None):
    torch.ones(200, 200) @ torch.ones(200, 200)
    return torch.get_num_threads()


def in_new_thread(look):
    found = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def test_lanes_share_the_callers_threads(count):
    """In turns they have all of them. The caller, and new threads, keep their count; so does each lane."""
    pool = LanePool([CPU] * 2)
    for _ in range(2):
        assert run(pool, threads_of_an_operator) == [1, 1]
        assert run(pool, threads_of_an_operator, turns="all") == [count] * 2
        assert pool.submit(pool.lanes[1], threads_of_an_operator, Modes.capture("cpu")).result() == 1
        assert torch.get_num_threads() == in_new_thread(threads_of_an_operator) == count
        torch.set_num_threads(2)
    pool.close()
    assert torch.get_num_threads() == in_new_thread(threads_of_an_operator) == count


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_calls_restore_the_callers_count(count, grad, fails):
    seen = []

    def look(x):
        seen.append(threads_of_an_operator())
        if fails:
            raise KeyError
        return x

    session = Session(look, [CPU] * 2, cutters={None: Cutter()}, rules=JoinRules(out_dims=0))
    try:
        session.call(Entry(look), (torch.zeros(5, requires_grad=grad),), {})
    except KeyError:
        assert fails
    finally:
        session.close()
    assert seen == ([count] if grad else [1, 1])[: len(seen)] * (2 if grad and not fails else 1)
    assert torch.get_num_threads() == count


def test_blocks_of_threads_nest(count):
    """Each block restores the count from before it, also after an error; None changes nothing."""
    with intra_op_threads(1):
        for inner in (None, 2):
            with intra_op_threads(inner):
                assert torch.get_num_threads() == (inner or 1)
            assert torch.get_num_threads() == 1
    with pytest.raises(ZeroDivisionError), intra_op_threads(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == count


def test_a_thread_that_starts_inside_a_block(count):
    """A thread that first reads its count inside another thread's block does not keep the lowered count."""
    inside, leave = threading.Event(), threading.Event()

    def first():
        with intra_op_threads(1):
            inside.set()
            leave.wait()

    def second():
        with intra_op_threads(1):
            leave.set()
        return torch.get_num_threads()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    assert in_new_thread(second) == count
    thread.join()
    assert torch.get_num_threads() == in_new_thread(torch.get_num_threads) == count
