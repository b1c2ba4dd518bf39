"""Promise 4 at random: a rank is killed at any moment, and the launch ends as it should."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import RankDiedError, current_rank, wrapper
from tests.launch.processes import PATIENCE_S, SOON_S, ranks

ROUNDS = int(os.environ.get("PARAWRAP_CHAOS", "10"))
SEED = 20240229


def working():
    """A function of some collectives, and a mark that it is about to return; local, so that ranks need not import this."""

    def works(folder):
        total = torch.ones(1)
        for _ in range(30):
            dist.all_reduce(total)
            total /= 2
            time.sleep(0.002)
        Path(folder, f"{os.getpid()}.returns").touch()
        return current_rank().global_rank, total.item()

    return works


def children_of(pid):
    """The ranks that a warm process has now."""
    return [each.pid for each in psutil.Process(pid).children()]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_rank_killed_at_any_moment_is_named(number, tmp_path):
    """RankDiedError names it and SIGKILL, unless it was about to return: then the results may be there, and are right."""
    dice = random.Random(f"{SEED} {number}")
    launchable = wrapper(ranks(3, grace_s=1))(working())
    (warm, *_) = wrapper(ranks(1))(os.getppid)()
    delay = dice.uniform(0, 0.15)
    launch = launchable.submit(str(tmp_path))
    time.sleep(delay)  # the one sleep of these tests: any moment will do
    victim = dice.choice([*children_of(warm), None])
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    try:
        ended = launch.results(timeout=PATIENCE_S)
    except RankDiedError as error:
        ended = error
    seconds = time.monotonic() - began
    told = f"seed {SEED}, round {number}: process {victim} killed after {delay:.3f} s: {ended!r}, after {seconds:.1f} s"
    if isinstance(ended, RankDiedError):
        assert ended.signal is signal.SIGKILL, told
        assert f"rank {ended.rank} of 3" in str(ended), told
        assert f"process {victim}" in str(ended), told
    else:
        assert victim is None or (tmp_path / f"{victim}.returns").exists(), told
        assert [rank for rank, _ in ended] == [0, 1, 2], told
        assert len({value for _, value in ended}) == 1, told
    assert seconds < SOON_S, told
    assert children_of(warm) == [], told
