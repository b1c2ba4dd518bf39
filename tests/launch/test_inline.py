"""`inline` runs a decorated function in this process as rank 0 of 1, and restores the process afterwards."""

from __future__ import annotations

import random
import sys
import threading
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, Platform, PlatformError, RankResults, current_rank, wrapper
from parawrap.launch import inside_a_rank


def alone(**fields) -> Platform:
    return Platform(**{"device": "cpu", "n_cpus": 4, **fields})


def inline(function, *args, **fields):
    """Run the function as the only rank and return its result."""
    (value,) = wrapper(alone(**fields))(function).inline(*args)
    return value


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.fixture
def lone_group():
    """A process group that the user created."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def test_one_result_comes_back():
    """`inline` returns RankResults of length one, whatever the platform's world size, and passes the arguments."""

    @wrapper(alone())
    def train(a, b=1):
        return a, b

    assert train.inline(1, b=2) == ((1, 2),)
    assert isinstance(train.inline(1), RankResults)


def test_the_function_is_rank_0_of_1():
    """`current_rank()` is rank 0 of 1 on the decorated function's platform."""
    platform = alone(name="mine")
    rank = wrapper(platform)(current_rank).inline()[0]
    assert (rank.global_rank, rank.local_rank, rank.node, rank.world_size, rank.restart) == (0, 0, 0, 1, 0)
    assert rank.device == torch.device("cpu")
    assert rank.platform is platform


def test_it_runs_in_this_thread():
    """The function runs in the calling thread, where a debugger can follow it."""
    assert inline(threading.get_ident) == threading.get_ident()


def test_nothing_is_pickled():
    """An object that cannot be pickled passes through as the same object."""
    lock = threading.Lock()
    assert inline(lambda each: each, lock) is lock


@pytest.mark.parametrize("fails", [False, True])
def test_this_process_is_not_a_rank_after_the_call(fails):
    """`current_rank()` raises after the call, also if the function raised."""

    def train():
        assert inside_a_rank()
        if fails:
            raise KeyError

    if fails:
        with pytest.raises(KeyError):
            inline(train)
    else:
        inline(train)
    assert not inside_a_rank()
    with pytest.raises(LaunchError, match="not a rank"):
        current_rank()


def test_collectives_work_in_a_world_of_one():
    """The rank has a process group of size 1."""

    def train():
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.barrier(group=current_rank().group)
        return value.tolist(), dist.get_world_size(), current_rank().group is dist.group.WORLD

    assert inline(train) == ([1, 1], 1, True)


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_ends_with_the_call(fails):
    """The process group is destroyed after the call, and a later call creates another group."""

    def train():
        assert dist.is_initialized()
        if fails:
            raise KeyError

    for _ in range(2):
        if fails:
            with pytest.raises(KeyError):
                inline(train)
        else:
            inline(train)
        assert not dist.is_initialized()


def test_without_ipc_there_is_no_process_group():
    """With ipc_groups=None, torch.distributed is not initialised."""
    assert inline(lambda: (dist.is_initialized(), current_rank().group), ipc_groups=None) == (False, None)


def test_an_existing_process_group_is_used_and_kept(lone_group):
    """The user's process group is neither replaced nor destroyed."""
    assert inline(lambda: current_rank().group) is lone_group
    assert dist.group.WORLD is lone_group
    assert inline(lambda: current_rank().group, ipc_groups=None) is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_excepthook_is_restored(monkeypatch, fails):
    """`sys.excepthook` is restored, although torch.distributed replaces it."""

    def hook(*_):
        raise AssertionError

    monkeypatch.setattr(sys, "excepthook", hook)
    if fails:
        with pytest.raises(ZeroDivisionError):
            inline(lambda: 1 / 0)
    else:
        inline(lambda: None)
    assert sys.excepthook is hook


@pytest.mark.parametrize("fails", [False, True])
def test_random_generators_are_restored(fails):
    """After the call, Python, numpy, and torch draw the same numbers as without the call."""

    def train():
        draws()
        if fails:
            raise KeyError

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if fails:
        with pytest.raises(KeyError):
            inline(train)
    else:
        inline(train)
    assert draws() == expected


def test_equal_seeds_draw_equal_numbers():
    """Python, numpy, and torch draw equal numbers for equal seeds and other numbers for other seeds."""
    assert inline(draws, seed=3) == inline(draws, seed=3)
    assert all(a != b for a, b in zip(inline(draws, seed=3), inline(draws, seed=4), strict=True))


def test_the_largest_seed_works():
    """The largest seed of numpy, 2**32 - 1, works."""
    assert inline(draws, seed=2**32 - 1) == inline(draws, seed=2**32 - 1)


def test_without_a_seed_every_call_draws_other_numbers():
    """With seed=None, every call uses a new seed."""
    assert all(a != b for a, b in zip(inline(draws, seed=None), inline(draws, seed=None), strict=True))


@pytest.mark.parametrize(
    "error", [ValueError("v"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), LaunchError("own")]
)
def test_an_exception_passes_unchanged(error):
    """The caller gets the same exception object, without notes, with a traceback like that of a plain call."""

    def failing():
        raise error

    with pytest.raises(type(error)) as caught:
        inline(failing)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert error.__cause__ is None
    assert error.__context__ is None
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[0].name == "test_an_exception_passes_unchanged"
    assert frames[-1].name == "failing"


def test_upon_finish_is_called_after_the_function():
    """`upon_finish` is called once, without arguments, after this process stopped being a rank."""
    calls = []
    inline(lambda: calls.append("function"), upon_finish=lambda: calls.append(("finish", inside_a_rank())))
    assert calls == ["function", ("finish", False)]


def test_upon_finish_is_not_called_after_a_failure():
    """If the function raises, `upon_finish` is not called."""
    calls = []
    with pytest.raises(ZeroDivisionError):
        inline(lambda: 1 / 0, upon_finish=lambda: calls.append(1))
    assert calls == []


def test_an_error_in_upon_finish_is_logged(caplog):
    """The results are returned, and the error of `upon_finish` is logged."""
    assert inline(lambda: 1, upon_finish=lambda: 1 / 0) == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("how", ["inline", "submit", "__call__"])
def test_a_launch_within_an_inline_rank_raises(how):
    """LaunchError names the function to call instead."""

    @wrapper(alone())
    def inner():
        return 1

    with pytest.raises(LaunchError, match=r"inner\.__wrapped__"):
        inline(lambda: getattr(inner, how)())
    assert inline(lambda: inner.__wrapped__()) == 1


def test_a_method_runs_inline_on_its_own_object():
    """A method changes the caller's object, not a copy."""

    class Trainer:
        steps = 0

        @wrapper(alone())
        def train(self, by):
            self.steps += by
            return self

    trainer = Trainer()
    assert trainer.train.inline(3)[0] is trainer
    assert trainer.steps == 3


def test_torch_modes_of_the_caller_apply():
    """`no_grad` and autocast around the call apply in the function."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert inline(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))) == (False, True)


@pytest.mark.parametrize("device", ["slurm", "ray"])
def test_a_platform_of_gpus_without_a_gpu_raises(device, monkeypatch):
    """PlatformError names the launcher and says to use the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlatformError, match=rf"launcher='{device}'.*this machine has none: give Platform\(device='cpu'\)"):
        wrapper(Platform(device=device, n_gpus=2))(len).inline([])
