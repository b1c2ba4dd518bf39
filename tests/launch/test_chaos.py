"""Promise 4 at random moments: after a rank is killed, the launch ends with the right results or error."""

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
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S

ROUNDS = int(os.environ.get("PARAWRAP_CHAOS", "10"))
SEED = 20240229


def collectives_function():
    """Return a local function that runs collectives and creates a file before it returns. Ranks get it by value."""

    def run_collectives(folder):
        total = torch.ones(1)
        for _ in range(30):
            dist.all_reduce(total)
            total /= 2
            time.sleep(0.002)
        Path(folder, f"{os.getpid()}.returns").touch()
        return current_rank().global_rank, total.item()

    return run_collectives


def children_of(pid):
    """Return the process ids of a warm process's ranks."""
    return [each.pid for each in psutil.Process(pid).children()]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_rank_killed_at_any_moment_is_named(number, tmp_path):
    """RankDiedError names the rank and SIGKILL. If the rank was about to return, correct results are also accepted."""
    dice = random.Random(f"{SEED} {number}")
    launchable = wrapper(ranks(3, grace_s=1))(collectives_function())
    (warm, *_) = wrapper(ranks(1))(os.getppid)()
    delay = dice.uniform(0, 0.15)
    launch = launchable.submit(str(tmp_path))
    time.sleep(delay)  # this sleep only picks a random moment
    victim = dice.choice([*children_of(warm), None])
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    try:
        ended = launch.results(timeout=PATIENCE_S)
    except RankDiedError as error:
        ended = error
    seconds = time.monotonic() - began
    details = f"seed {SEED}, round {number}: process {victim} killed after {delay:.3f} s: {ended!r}, after {seconds:.1f} s"
    if isinstance(ended, RankDiedError):
        assert ended.signal is signal.SIGKILL, details
        assert f"rank {ended.rank} of 3" in str(ended), details
        assert f"process {victim}" in str(ended), details
    else:
        assert victim is None or (tmp_path / f"{victim}.returns").exists(), details
        assert [rank for rank, _ in ended] == [0, 1, 2], details
        assert len({value for _, value in ended}) == 1, details
    assert seconds < PATIENCE_S, details
    assert children_of(warm) == [], details
