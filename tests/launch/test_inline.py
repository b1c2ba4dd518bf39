"""inline: a decorated function runs here and now, as rank 0 of 1, and leaves this process as it was."""

from __future__ import annotations

import random
import sys
import threading
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, Platform, RankResults, current_rank, wrapper
from parawrap.launch import inside_a_rank


def alone(**fields) -> Platform:
    return Platform(**{"device": "cpu", "n_cpus": 4, **fields})


def inline(function, *args, **fields):
    """What the function returns as the only rank."""
    (value,) = wrapper(alone(**fields))(function).inline(*args)
    return value


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.fixture
def lone_group():
    """A process group that the user made himself."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def test_one_result_comes_back():
    """As RankResults of length one, whatever the platform's world; arguments arrive as they were given."""

    @wrapper(alone())
    def train(a, b=1):
        return a, b

    assert train.inline(1, b=2) == ((1, 2),)
    assert isinstance(train.inline(1), RankResults)


def test_the_function_is_rank_0_of_1():
    """On the platform that it was decorated with."""
    platform = alone(name="mine")
    rank = wrapper(platform)(current_rank).inline()[0]
    assert (rank.global_rank, rank.local_rank, rank.node, rank.world_size, rank.restart) == (0, 0, 0, 1, 0)
    assert rank.device == torch.device("cpu")
    assert rank.platform is platform


def test_it_runs_in_this_thread():
    """Where a debugger can follow it."""
    assert inline(threading.get_ident) == threading.get_ident()


def test_nothing_is_pickled():
    """What no process could send to another goes in and comes out, as the same object."""
    lock = threading.Lock()
    assert inline(lambda each: each, lock) is lock


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_this_process_is_no_rank(fails):
    """Also when the function raised."""

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
    """A process group is there, and is the rank's own."""

    def train():
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.barrier(group=current_rank().group)
        return value.tolist(), dist.get_world_size(), current_rank().group is dist.group.WORLD

    assert inline(train) == ([1, 1], 1, True)


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_is_gone_afterwards(fails):
    """And a later call makes another one."""

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
    """ipc_groups=None."""
    assert inline(lambda: (dist.is_initialized(), current_rank().group), ipc_groups=None) == (False, None)


def test_a_process_group_that_is_there_is_used_and_left(lone_group):
    """The user's own group is not replaced, and not ended."""
    assert inline(lambda: current_rank().group) is lone_group
    assert dist.group.WORLD is lone_group
    assert inline(lambda: current_rank().group, ipc_groups=None) is None


@pytest.mark.parametrize("fails", [False, True])
def test_the_excepthook_is_put_back(monkeypatch, fails):
    """torch.distributed replaces it and leaves it so."""

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
def test_generators_are_put_back(fails):
    """What python, numpy and torch draw afterwards is what they would have drawn without the call."""

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
    """Python, numpy and torch alike, and other ones for other seeds."""
    assert inline(draws, seed=3) == inline(draws, seed=3)
    assert all(a != b for a, b in zip(inline(draws, seed=3), inline(draws, seed=4), strict=True))


def test_the_largest_seed_is_taken():
    """By numpy too, which takes none above it."""
    assert inline(draws, seed=2**32 - 1) == inline(draws, seed=2**32 - 1)


def test_without_a_seed_every_call_draws_other_numbers():
    """seed=None is another seed each time, as in ranks."""
    assert all(a != b for a, b in zip(inline(draws, seed=None), inline(draws, seed=None), strict=True))


@pytest.mark.parametrize(
    "error", [ValueError("v"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), LaunchError("own")]
)
def test_an_exception_passes_as_it_is(error):
    """The same object, without notes, with the traceback of a plain call."""

    def failing():
        raise error

    with pytest.raises(type(error)) as caught:
        inline(failing)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert error.__cause__ is None
    assert error.__context__ is None
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[0].name == "test_an_exception_passes_as_it_is"
    assert frames[-1].name == "failing"


def test_upon_finish_is_called_after_the_function():
    """Once, with nothing, when this process is no rank any more."""
    calls = []
    inline(lambda: calls.append("function"), upon_finish=lambda: calls.append(("finish", inside_a_rank())))
    assert calls == ["function", ("finish", False)]


def test_upon_finish_is_not_called_after_a_failure():
    """It tells that the ranks have finished without an error."""
    calls = []
    with pytest.raises(ZeroDivisionError):
        inline(lambda: 1 / 0, upon_finish=lambda: calls.append(1))
    assert calls == []


def test_what_upon_finish_raises_is_told_and_costs_nobody_the_results(caplog):
    """It is logged, as it is by every launcher."""
    assert inline(lambda: 1, upon_finish=lambda: 1 / 0) == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("how", ["inline", "submit", "__call__"])
def test_a_rank_starts_no_ranks(how):
    """Not even when it is played here: the message names the function to call instead."""

    @wrapper(alone())
    def inner():
        return 1

    with pytest.raises(LaunchError, match=r"inner\.__wrapped__"):
        inline(lambda: getattr(inner, how)())
    assert inline(lambda: inner.__wrapped__()) == 1


def test_a_method_runs_inline_on_its_own_object():
    """Not on a copy: what it changes is changed."""

    class Trainer:
        steps = 0

        @wrapper(alone())
        def train(self, by):
            self.steps += by
            return self

    trainer = Trainer()
    assert trainer.train.inline(3)[0] is trainer
    assert trainer.steps == 3


def test_modes_of_the_caller_are_in_force():
    """As in any plain call."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert inline(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))) == (False, True)
