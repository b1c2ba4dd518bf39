"""Launches on this machine: functions, results, spawn methods, and the environment of ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, RankDiedError, UnsendableError, current_rank, wrapper
from tests.helpers.processes import assert_nothing_left, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S, eventually


def test_dry_run_shows_the_launch():
    launchable = wrapper(ranks(4, ipc_groups=[[0, 1], [2, 3]]))(lambda data: data)
    text = launchable.dry_run(torch.zeros(1 << 18))
    assert "on launcher 'local': 4 processes on this machine" in text
    assert "meeting at file (in a new private folder); process groups [0, 1], [2, 3]" in text
    assert re.search(r"1,\d{3},\d{3} bytes of function and arguments for each of 4 ranks", text)
    assert text.endswith("rank 3: node 0, local rank 3, cpu")
    with pytest.raises(UnsendableError, match=r"args\[0\] cannot be sent"):
        launchable.dry_run(threading.Lock())


def test_one_rank_is_singular():
    """So are the reprs of its handles."""
    launchable = wrapper(ranks(1))(len)
    text = launchable.dry_run("")
    assert "on launcher 'local': 1 process on this machine" in text
    assert "bytes of function and arguments for the rank\n" in text
    assert repr(launchable) == "<len on 1 rank of cpu>"
    launch = launchable.submit("")
    assert launch.results() == (0,)
    assert repr(launch) == "<launch of len on 1 rank: finished>"
    with ranks(1).open() as opened:
        assert repr(opened) == "<1 rank of cpu: idle>"


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """Leaves out what torch's class does: it imports the compiler, which takes seconds."""

    def __init__(self):
        torch.nn.Module.__init__(self)


def test_ddp_model_is_no_result():
    with pytest.raises(
        UnsendableError, match=r"the result cannot be sent.*send functional\.unwrap"
    ):
        wrapper(ranks(1))(Wrapped)()


def test_ranks_know_surroundings(tmp_path, monkeypatch):
    """Environment, working directory, import path, and `sys.argv` are those of the parent at the
    call.

    The exception, and the signal that killed a rank, arrive also if the parent ignores SIGCHLD, as
    some servers do.
    """
    (tmp_path / "user_module.py").write_text("VALUE = 'imported'")

    def looks():
        import user_module

        total = torch.ones(1 << 22)
        dist.all_reduce(total)  # its sum hangs after a fork with several threads
        return (
            total.sum(),
            torch.get_num_threads(),
            user_module.VALUE,
            os.environ["MINE"],
            Path.cwd(),
            sys.argv,
        )

    functions = {
        "looks": looks,
        "raises": lambda: 1 / 0,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "zweit\u00e9\udc80")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "--lr", "0.1"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.rand(1 << 22).sum()  # starts this process's own threads
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    launches = {
        name: wrapper(ranks(2 if name == "looks" else 1))(function).submit()
        for name, function in functions.items()
    }
    for launch in launches.values():
        eventually(launch.done, "the end of the launch")
    signal.signal(signal.SIGCHLD, before)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = (
        float(2 << 22),
        threads,
        "imported",
        "zweit\u00e9\udc80",
        tmp_path,
        ["script.py", "--lr", "0.1"],
    )
    assert launches["looks"].results() == (expected,) * 2
    with pytest.raises(ZeroDivisionError) as raised:
        launches["raises"].results()
    assert "rank 0 of 1" in notes_of(raised.value)
    with pytest.raises(RankDiedError) as killed:
        launches["killed"].results()
    assert killed.value.signal is signal.SIGKILL


def test_edited_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def looks():
        import changing

        return changing.VALUE

    for value in (1, 22):
        (tmp_path / "changing.py").write_text(f"VALUE = {value}")
        assert wrapper(ranks(1))(looks)() == (value,)


@pytest.mark.stress
@pytest.mark.parametrize("protocol", ["tcp", "file"])
def test_launches_leave_nothing(protocol):
    """Launches that return, raise, die, or are cancelled leave no process, thread, or memory."""

    def works(end):
        total = torch.ones(1 << 20)  # 4 MiB: its file is mapped
        dist.all_reduce(total)
        if current_rank().global_rank == 1:
            if end == "raises":
                raise ValueError
            if end == "dies":
                os._exit(3)
        if end != "returns":
            time.sleep(600)
        return [total, *(torch.full((200,), float(i)) for i in range(1000))]

    launchable = wrapper(ranks(ipc_protocol=protocol, grace_s=0.5))(works)

    def launch():
        launches = {
            end: launchable.submit(end) for end in ("returns", "raises", "dies", "cancelled")
        }
        launches["cancelled"].cancel()
        for end, each in launches.items():
            with contextlib.suppress(ValueError, LaunchError):
                assert all(
                    len(result) == 1001 and result[-1][0] == 999
                    for result in each.results(PATIENCE_S)
                )
                assert end == "returns"

    assert_nothing_left([os.getpid()], launch, lambda: [launch() for _ in range(2)])
