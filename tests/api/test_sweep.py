"""`map` of a decorated function: one launch per item, with results and exceptions in the order of
the items.
"""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
import weakref

import psutil
import pytest
import torch

from parawrap import RankResults, current_rank, wrapper
from parawrap.errors import LaunchError, PlatformError, UnsendableError
from parawrap.launch import running
from parawrap.processes.torch_groups import free_port
from tests.helpers.processes import ranks
from tests.helpers.waiting import eventually


def train(count=1, **fields):
    return wrapper(ranks(count, **fields))


def test_errors_come_in_their_places():
    """An item that fails yields its exception and does not end the others.

    No items give no launches.
    """

    @train(2)
    def inverse(x):
        return 1 / x if isinstance(x, int) else None, current_rank().global_rank

    failed, unsendable, last = inverse.map(iter([0, threading.Lock(), 2]))
    assert type(failed) is ZeroDivisionError
    assert type(unsendable) is UnsendableError
    assert str(unsendable).startswith("args[0] cannot be sent")
    assert last == RankResults([(0.5, 0), (0.5, 1)])
    assert list(inverse.map([])) == []


@pytest.mark.parametrize("max_parallel", [1, 2])
def test_interrupts_of_ranks_end_one_launch(max_parallel):
    """A KeyboardInterrupt that a rank raised is a failure of its launch, not Ctrl-C here."""

    @train()
    def interrupted(x):
        if x == 1:
            raise KeyboardInterrupt
        return x

    first, failed, last = interrupted.map(range(3), max_parallel=max_parallel)
    assert (first, last) == ((0,), (2,))
    assert type(failed) is LaunchError
    assert str(failed).startswith("a rank raised KeyboardInterrupt, so this launch has no")
    assert type(failed.__cause__) is KeyboardInterrupt
    assert failed.__notes__[0].startswith("raised in rank 0 of 1")


@pytest.mark.parametrize("max_parallel", [None, 2])
def test_ctrl_c_in_a_sweep_under_torchrun(max_parallel, monkeypatch):
    """There, the rank is the main thread of this process: its Ctrl-C ends the sweep."""
    ranks_of_one = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in (ranks_of_one | address | {"TORCHELASTIC_RUN_ID": "one"}).items():
        monkeypatch.setenv(name, str(value))
    begun = []

    @train(launcher="env")
    def interrupted(x):
        begun.append((x, threading.current_thread()))
        raise KeyboardInterrupt

    sweep = interrupted.map([1, 2], max_parallel=max_parallel)
    assert sweep.dry_run().startswith("2 launches of ")
    assert "one after another" in sweep.dry_run()
    with pytest.raises(KeyboardInterrupt):
        next(sweep)
    assert begun == [(1, threading.main_thread())]


def test_tracebacks_show_user_lines():
    """The notes of an exception have its traceback in the rank."""

    @train()
    def fails(x):
        raise ValueError(x)

    for error in fails.map([1, 2], max_parallel=2):
        text = "".join(traceback.format_exception(error))
        assert "parawrap" not in text
        assert "raise ValueError(x)" in text
        with pytest.raises(ValueError, match=str(error)) as caught:
            raise error
        assert [frame.path for frame in caught.traceback] == [pathlib.Path(__file__)]


@pytest.mark.parametrize("max_parallel", [1, 3])
def test_max_parallel_is_a_limit(max_parallel, tmp_path):
    """Launches overlap up to the limit, and results have the order of the items."""

    def overlapping(number):
        here = tmp_path / str(number)
        here.touch()
        if number == 0 and max_parallel > 1:
            eventually((tmp_path / "done-1").exists, "the second item")
        running = [each for each in tmp_path.iterdir() if not each.name.startswith("done")]
        here.rename(tmp_path / f"done-{number}")
        return number, len(running)

    outcomes = [
        outcome[0] for outcome in train()(overlapping).map(range(5), max_parallel=max_parallel)
    ]
    assert [number for number, _ in outcomes] == list(range(5))
    assert max(running for _, running in outcomes) <= max_parallel


def test_closing_the_iterator_cancels(tmp_path):
    """After `close`, no rank runs, and later items are never launched."""

    def waits(number):
        (tmp_path / f"{number}-{os.getpid()}").touch()
        time.sleep(0 if number == 0 else 600)
        return number

    outcomes = train()(waits).map(range(10), max_parallel=3)
    assert next(outcomes) == (0,)
    eventually(lambda: len(list(tmp_path.iterdir())) >= 3, "overlapping launches")
    outcomes.close()
    begun = {path.name for path in tmp_path.iterdir()}
    assert len(begun) <= 4
    assert not any(psutil.pid_exists(int(name.partition("-")[2])) for name in begun)


def test_a_sweep_that_cannot_start_ends(monkeypatch, tmp_path):
    """If the system refuses the second thread, the launch of the first one ends, and no other
    begins.
    """
    start = threading.Thread.start
    threads = []

    def start_one(thread):
        if thread.name == "parawrap-launch-map":
            if threads:
                raise RuntimeError("can't start new thread")
            threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    sweep = train()(lambda number: (tmp_path / str(number)).touch()).map(range(5), max_parallel=2)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(sweep)
    assert not running()
    threads[0].join()
    assert len(list(tmp_path.iterdir())) <= 1


def test_wrong_calls_launch_nothing(tmp_path):
    with pytest.raises(TypeError, match="missing a required argument"):
        train()(lambda a, b: (tmp_path / "ran").touch()).map([1])
    assert not (tmp_path / "ran").exists()


def test_output_has_its_launchs_number(capfd):
    list(train(2, verbose=True, ipc_groups=None)(print).map(["a", "b"], max_parallel=2))
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [
        f"[{number}/rank {rank}] {item}" for number, item in enumerate("ab") for rank in range(2)
    ]


def test_interrupted_sweeps_show_ranks(tmp_path, caplog):
    """After Ctrl-C, the log has the place of each rank that runs."""

    def wait(name):
        (tmp_path / name).touch()
        time.sleep(600)

    def is_waiting():
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_back.f_code.co_name == "result"  # of a future

    def interrupt():
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, "two launches")
        eventually(is_waiting, "the wait for the first one")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with caplog.at_level(logging.WARNING, "parawrap"), pytest.raises(KeyboardInterrupt):
        list(train()(wait).map(["0", "1"], max_parallel=2))
    thread.join()
    assert caplog.text.count("wait was interrupted: rank 0 at ") == 2


def test_yielded_results_are_the_callers():
    """A sweep keeps no result that the loop has taken."""
    sweep = train()(lambda number: torch.full((2,), number)).map(range(3), max_parallel=2)
    first = weakref.ref(next(sweep)[0])
    next(sweep)

    def is_free():
        gc.collect()
        return first() is None

    # The thread that made the launch lets go of it when it takes the next one, or ends
    eventually(is_free, "the end of the first result")
    sweep.close()


def test_one_port_serves_one_launch():
    """Launches at the same time cannot share a port, and one after another they can."""
    launchable = train(master_port=free_port())(lambda number: number)
    with pytest.raises(PlatformError, match=r"needs a port of its own. .* max_parallel=1"):
        launchable.map([1, 2], max_parallel=2)
    assert [list(each) for each in launchable.map([1, 2], max_parallel=1)] == [[1], [2]]
