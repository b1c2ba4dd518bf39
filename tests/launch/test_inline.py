"""`inline` runs a decorated function in this process as rank 0 of 1, and restores the process
afterwards.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import traceback
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, Platform, RankResults, current_rank, wrapper
from parawrap.launch import inside_a_rank


def alone(**fields):
    return Platform(**{"device": "cpu", "n_cpus": 4} | fields)


def inline(function, *args, **fields):
    (value,) = wrapper(alone(**fields))(function).inline(*args)
    return value


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_function_is_rank_0_of_1():
    """An inline function runs in the calling thread with the caller's objects; its result comes
    back in RankResults of length one. The platform of the rank has the counts of this world.
    """
    platform, lock = alone(name="mine"), threading.Lock()

    @wrapper(platform)
    def train(a, b=1):
        return current_rank(), threading.get_ident(), a, b

    results = train.inline(lock, b=2)
    assert isinstance(results, RankResults)
    ((rank, thread, a, b),) = results
    assert (rank.global_rank, rank.local_rank, rank.node, rank.world_size, rank.restart) == (
        0,
        0,
        0,
        1,
        0,
    )
    assert (rank.device, rank.platform) == (torch.device("cpu"), replace(platform, n_cpus=1))
    assert platform.world_size == 4
    assert (thread, a, b) == (threading.get_ident(), lock, 2)


def test_the_process_is_restored(monkeypatch):
    """After a call and after an exception, there is no rank and no process group, and the
    excepthook and the numbers of all generators are those of before.
    """

    def hook(*_):
        raise AssertionError

    def train(fails):
        draws()
        value = torch.ones(2)
        dist.all_reduce(value)
        dist.barrier(group=current_rank().group)
        found.append(
            (
                value.tolist(),
                dist.get_world_size(),
                current_rank().group is dist.group.WORLD,
                inside_a_rank(),
            )
        )
        if fails:
            raise KeyError

    found = []
    monkeypatch.setattr(sys, "excepthook", hook)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    for fails in False, True:
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            inline(train, fails)
        assert found.pop() == ([1, 1], 1, True, True)
        assert not inside_a_rank()
        assert not dist.is_initialized()
        assert sys.excepthook is hook
    assert draws() == expected
    with pytest.raises(LaunchError, match="not a rank") as caught:
        current_rank()
    for cure in (
        "function decorated with @wrapper(Platform(...))",
        ".inline(...) to run it here as rank 0 of 1",
    ):
        assert cure in str(caught.value)


def test_an_existing_group_is_kept():
    assert inline(lambda: (dist.is_initialized(), current_rank().group), ipc_groups=None) == (
        False,
        None,
    )
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert inline(lambda: current_rank().group) is group is dist.group.WORLD
        assert inline(lambda: current_rank().group, ipc_groups=None) is None
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.parametrize("error", [ValueError("v"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_exception_is_unchanged(error):
    """The caller gets the same exception object, without notes, with a traceback like that of a
    plain call.
    """

    def failing():
        raise error

    with pytest.raises(type(error)) as caught:
        inline(failing)
    assert caught.value is error
    assert (getattr(error, "__notes__", None), error.__cause__, error.__context__) == (
        None,
        None,
        None,
    )
    assert traceback.extract_tb(error.__traceback__)[-1].name == "failing"
