"""Calls that end ranks which stay: deaths, limits, deadlocks, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from parawrap import LaunchError, LaunchTimeoutError, RankDiedError
from tests.helpers.processes import SILENT_S, assert_gone, notes_of, pids_in, ranks
from tests.helpers.ranks import all_sum, my_rank
from tests.helpers.waiting import PATIENCE_S, eventually


def test_waiting_for_a_returned_rank(monkeypatch):
    """LaunchError has the stack of the rank that waits, and the ranks answer the next call."""
    monkeypatch.setattr("parawrap.processes.pool.STUCK_S", 0.5)
    monkeypatch.setattr("parawrap.processes.pool._POLL_S", 0.1)

    def return_early():
        if my_rank() == 1:
            all_sum()

    with ranks().open() as opened:
        with pytest.raises(LaunchError) as caught:
            opened.submit(return_early).results()
        assert type(caught.value) is LaunchError
        for text in "return_early is deadlocked: rank(s) 0 have returned", "rank 1:", "in all_sum":
            assert text in str(caught.value)
        assert opened(all_sum) == (2.0, 2.0)
        with pytest.raises(
            LaunchError, match="all_sum is deadlocked: the ranks that were called wait"
        ):
            opened[0](all_sum)
        assert opened(all_sum) == (2.0, 2.0)


class SlowInRankOne:
    """An argument that rank 1 takes these seconds to unpickle."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return _make_slowly, (self.seconds,)


def _make_slowly(seconds):
    until = time.monotonic() + seconds if my_rank() == 1 else 0.0
    while time.monotonic() < until:
        sum(range(1000))


def test_a_rank_may_load_slowly(monkeypatch):
    """A call of one rank does not hang while another rank loads what it brings."""
    monkeypatch.setattr("parawrap.processes.pool.STUCK_S", 0.5)
    with ranks(hang_timeout_s=2).open() as opened:
        assert opened[0](lambda _: my_rank(), SlowInRankOne(3)) == 0
        assert opened(all_sum) == (2.0, 2.0)


def test_ctrl_c_stops_ranks_that_load():
    """Ctrl-C interrupts a rank that only loads what a call brings, and the ranks stay."""
    with ranks(grace_s=1).open() as opened:
        before = opened(os.getpid)
        timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            opened[0](lambda _: my_rank(), SlowInRankOne(PATIENCE_S))
        timer.join()
        assert (opened(os.getpid), opened(all_sum)) == (before, (2.0, 2.0))


# -- deaths


def die(how):
    if my_rank() == 1:
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(-9 if how == "exit below zero" else 3)
    all_sum()


@pytest.mark.parametrize(
    ("how", "number", "code", "text"),
    [
        ("sigkill", signal.SIGKILL, None, "was killed by SIGKILL"),
        ("exit", None, 3, "called sys.exit(3)"),
        ("exit below zero", None, -9, "called sys.exit(-9)"),
    ],
)
def test_a_death_ends_all_ranks(how, number, code, text):
    """The call and all that wait raise RankDiedError, no rank survives, and later calls name the
    first death.
    """
    opened = ranks(grace_s=1).open()
    pids = opened(os.getpid)
    launches = opened.submit(die, how), opened.submit(all_sum)
    for launch in launches:
        with pytest.raises(RankDiedError) as caught:
            launch.results(PATIENCE_S)
        assert (caught.value.rank, caught.value.signal, caught.value.exit_code) == (1, number, code)
        assert text in str(caught.value)
    assert_gone(pids)
    assert opened.state == "ended"
    for call in (opened, opened[0], opened.submit):
        with pytest.raises(RankDiedError) as later:
            call(all_sum)
        for part in "these ranks have ended, and cannot call all_sum", "rank 1", text:
            assert part in str(later.value)
        assert (later.value.rank, later.value.signal, later.value.exit_code) == (1, number, code)
    opened.close()
    with pytest.raises(LaunchError, match="closed"):
        opened(all_sum)


def test_a_death_between_two_calls():
    """A rank that is killed while idle ends all ranks; the next call names it."""
    with ranks(grace_s=1).open() as opened:
        pids = opened(os.getpid)
        os.kill(pids[0], signal.SIGKILL)
        assert_gone(pids)
        eventually(lambda: opened.state == "ended", "the end of the ranks")
        with pytest.raises(
            RankDiedError, match=r"cannot call all_sum.* rank 0 .*was killed by SIGKILL"
        ) as caught:
            opened(all_sum)
        assert (caught.value.rank, caught.value.signal) == (0, signal.SIGKILL)


# -- time limits


@pytest.mark.parametrize(
    ("field", "limit"), [("timeout_min", SILENT_S / 60), ("hang_timeout_s", SILENT_S)]
)
def test_a_time_limit_counts_per_call(field, limit):
    """Neither earlier calls nor the time between calls count.

    A call that exceeds the limit ends the ranks.
    """
    with ranks(grace_s=0.5, **{field: limit}).open() as opened:
        pids = opened(os.getpid)
        begun = time.monotonic()
        while time.monotonic() - begun < 1.2 * SILENT_S:  # longer than the limit
            opened(time.sleep, 0.05) if field == "timeout_min" else time.sleep(0.05)
        with pytest.raises(LaunchTimeoutError, match=field) as caught:
            opened(lambda: threading.Event().wait())
        assert ["in <lambda>" in caught.value.stacks[rank] for rank in (0, 1)] == [True, True]
        assert_gone(pids)
        with pytest.raises(LaunchError, match=f"(?s)cannot call all_sum.*{field}"):
            opened(all_sum)


# -- Ctrl-C


def interrupt(opened, folder, *, answers, times=1):
    """Send Ctrl-C to a call whose ranks raise KeyboardInterrupt, or ignore it; return the notes."""

    def wait():
        (folder / f"{os.getpid()}.pid").touch()
        while True:
            try:
                time.sleep(PATIENCE_S)
            except KeyboardInterrupt:
                (folder / f"{os.getpid()}.interrupted").touch()
                if answers:
                    raise

    def press():
        pids_in(folder, 2)
        os.kill(os.getpid(), signal.SIGINT)
        if times == 2:
            eventually(
                lambda: len([*folder.glob("*.interrupted")]) == 2,
                "KeyboardInterrupt in both ranks",
            )
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        opened(wait)
    thread.join()
    assert len([*folder.glob("*.interrupted")]) == 2
    return notes_of(caught.value)


def test_ranks_that_answer_ctrl_c(tmp_path):
    """Each rank's function raises KeyboardInterrupt, and the same processes answer the next call.

    The interrupt has a note that the ranks may be one step apart. Ranks have groups of their own:
    a terminal sends Ctrl-C to the group of the script.
    """
    with ranks(grace_s=60).open() as opened:
        before = opened(os.getpid)
        assert os.getpgrp() not in opened(os.getpgrp)
        assert interrupt(opened, tmp_path, answers=True).startswith(
            "The ranks may be one step apart now. Call functional.sync(model, optimizer) in all "
            "ranks"
        )
        assert (opened(all_sum), opened(os.getpid)) == ((2.0, 2.0), before)


@pytest.mark.parametrize(
    ("times", "grace_s", "says"), [(2, 600, ""), (1, 0.5, r"did not stop within grace_s=0\.5")]
)
def test_ranks_that_ignore_ctrl_c(times, grace_s, says, tmp_path):
    """A second Ctrl-C ends them, and so does the end of ``grace_s`` after the first.

    The next call says so.
    """
    with ranks(grace_s=grace_s).open() as opened:
        pids = opened(os.getpid)
        interrupt(opened, tmp_path, answers=False, times=times)
        assert_gone(pids)
        with pytest.raises(
            LaunchError, match=f"(?s)^these ranks have ended, and cannot call all_sum.*{says}"
        ):
            opened(all_sum)
