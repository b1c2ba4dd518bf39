"""Launches on this machine: functions, results, spawn methods, and the environment of ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import PlatformError, RankDiedError, UnsendableError, functional, wrapper
from tests.helpers.processes import notes_of, ranks, run_script, running_scripts
from tests.helpers.waiting import PATIENCE_S, eventually

METHODS = ["forkserver", "spawn", "fork"]


def test_dry_run_shows_the_launch():
    launchable = wrapper(ranks(4, ipc_groups=[[0, 1], [2, 3]]))(lambda data: data)
    preview = launchable.dry_run(torch.zeros(1 << 18))
    assert (preview.launcher, len(preview.ranks)) == ("local", 4)
    assert preview.payload > 1 << 20
    assert "[0, 1], [2, 3]" in str(preview)
    assert "in a new private folder" in str(preview)
    with pytest.raises(UnsendableError, match=r"args\[0\] cannot be sent"):
        launchable.dry_run(threading.Lock())


def test_ddp_model_is_no_result():
    with pytest.raises(UnsendableError, match=r"the result cannot be sent.*send functional\.unwrap"):
        wrapper(ranks())(lambda: functional.to(torch.nn.Linear(1, 1)))()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The launches of three functions, by spawn method: one that returns, one that raises, and one that is killed."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "user_module.py").write_text("VALUE = 'imported'")

    def looks():
        import user_module

        total = torch.ones(1 << 22)
        dist.all_reduce(total)  # its sum hangs after a fork with several threads
        return total.sum(), torch.get_num_threads(), user_module.VALUE, os.environ["MINE"], Path.cwd(), sys.argv

    functions = {"looks": looks, "raises": lambda: 1 / 0, "killed": lambda: os.kill(os.getpid(), signal.SIGKILL)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MINE", "zweit\u00e9\udc80")
        patch.syspath_prepend(folder)
        patch.setattr(sys, "argv", ["script.py", "--lr", "0.1"])
        patch.delenv("OMP_NUM_THREADS", raising=False)
        torch.rand(1 << 22).sum()  # starts this process's own threads
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as in some servers
        launches = {
            (method, name): wrapper(ranks(2 if name == "looks" else 1, spawn_method=method))(function).submit()
            for method in METHODS
            for name, function in functions.items()
        }
        for launch in launches.values():
            eventually(launch.done, "the end of the launch")
        signal.signal(signal.SIGCHLD, before)
    return launches, folder


@pytest.mark.parametrize("method", METHODS)
def test_ranks_know_surroundings(method, ended):
    """Environment, working directory, import path, and `sys.argv` are those of the parent at the call."""
    launches, folder = ended
    threads = 1 if method == "fork" else max(1, len(os.sched_getaffinity(0)) // 2)
    expected = float(2 << 22), threads, "imported", "zweit\u00e9\udc80", folder, ["script.py", "--lr", "0.1"]
    assert launches[method, "looks"].results() == (expected,) * 2


@pytest.mark.parametrize("method", METHODS)
def test_failure_is_named(method, ended):
    """The exception, and the signal that killed a rank, arrive also if the parent ignores SIGCHLD."""
    launches, _ = ended
    with pytest.raises(ZeroDivisionError) as raised:
        launches[method, "raises"].results()
    assert "rank 0 of 1" in notes_of(raised.value)
    with pytest.raises(RankDiedError) as killed:
        launches[method, "killed"].results()
    assert killed.value.signal is signal.SIGKILL


def test_fork_after_cuda_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlatformError, match=r"'fork': CUDA is initialized in this process already.*give 'forkserver'"):
        wrapper(ranks(spawn_method="fork"))(lambda: None)()


def test_fork_in_start_is_harmless(monkeypatch):
    """A process forked while ranks start does not keep the pipe open that reports a rank's end."""
    children, send = [], socket.send_fds

    def fork_and_send(*arguments):
        if not children:
            children.append(os.fork())
            if children[0] == 0:
                time.sleep(600)
                os._exit(0)
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", fork_and_send)
    try:
        assert wrapper(ranks())(lambda: 1).submit().results(timeout=PATIENCE_S) == (1, 1)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_warm_processes_are_reaped(monkeypatch):
    """A changed environment needs a new warm process; old ones do not accumulate, not even as zombies."""
    launchable = wrapper(ranks(1))(torch.get_num_threads)
    launchable()
    before = len(psutil.Process().children())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launchable() == (3,)
    # a launch may reap old processes
    eventually(lambda: launchable() and len(psutil.Process().children()) == before, "only one warm process")


def test_edited_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def looks():
        import changing

        return changing.VALUE

    for value in (1, 22):
        (tmp_path / "changing.py").write_text(f"VALUE = {value}")
        assert wrapper(ranks(1))(looks)() == (value,)


LOADER = """
import sys
from torch.utils.data import DataLoader
from parawrap import Platform, wrapper

print("script", __name__, file=sys.stderr)

class Own(list):
    pass

@wrapper(Platform(device="cpu", n_cpus=1))
def loads(method):
    import rows

    dataset = Own([1.0, 5.0])
    dataset.source = rows.ROWS  # of a class of a module
    (batch,) = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=method)
    return batch.sum().item()
"""


def test_rank_has_loader_workers(tmp_path):
    """They find datasets of the script and modules of its folder. A script without a guard gets an error that names it."""
    rows = "class Rows(list): pass\nROWS = Rows([1.0, 2.0])"
    ends = {"guarded": "if __name__ == '__main__':\n    print(*loads('forkserver'))", "unguarded": "loads('spawn')"}

    def script(folder, end):
        (folder / "rows.py").write_text(rows)
        return (f"{LOADER}\n{end}\n",)

    cases = {name: lambda folder, end=end: script(folder, end) for name, end in ends.items()}
    with running_scripts(tmp_path, cases) as started:
        written = {name: running.communicate(2 * PATIENCE_S)[0] for name, (running, _) in started.items()}
    assert written["guarded"].count("script __main__") == 1  # workers do not run the guarded part
    assert "6.0\n" in written["guarded"]
    assert 'put the script\'s actions under `if __name__ == "__main__":`' in written["unguarded"]


def test_child_of_rank_is_no_rank():

    def launch_in_process():
        code = "from parawrap import *; wrapper(Platform(device='cpu'))(len)([])"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr

    (error,) = wrapper(ranks(1))(launch_in_process)()
    assert "LaunchError: len was launched in a process that a rank started" in error


CLOSING = """
    import json, os, sys
    method, *closed = sys.argv[1:]
    for number in map(int, closed):
        os.close(number)
    from parawrap import Platform, wrapper

    class Result(str):
        pass

    @wrapper(Platform(device="cpu", n_cpus=2, spawn_method=method))
    def works():
        print("out")
        os.write(2, b"err")
        return Result(f"stdin: {sys.stdin.read()}")

    launch = works.submit()
    results = launch.results()
    with open("found", "w") as file:
        json.dump([results, sorted(launch.logs(1)), type(results[0]) is Result], file)
    os._exit(0)  # the interpreter could not flush its output
"""


def test_parent_may_close_streams(tmp_path):
    """With any standard streams closed, functions and classes of a script work, and output is kept."""
    cases = {"forkserver": lambda _: (CLOSING, "forkserver", 0, 1, 2), "fork": lambda _: (CLOSING, "fork", 1, 2)}
    with running_scripts(tmp_path, cases) as started:
        for script, folder in started.values():
            output = script.communicate(PATIENCE_S)
            assert script.returncode == 0, output
            assert json.loads((folder / "found").read_text()) == [["stdin: "] * 2, sorted("out\nerr"), True]


LAUNCHES = """
import contextlib, gc, json, os, sys, tempfile, threading, time
from pathlib import Path
import psutil, torch, torch.distributed as dist
from parawrap import LaunchError, Platform, current_rank, wrapper

ENDS = "returns", "raises", "dies", "cancelled"

def resources():
    gc.collect()
    return {
        "processes": sorted(each.pid for each in psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(each.name for each in threading.enumerate()),
        "temporary": sorted(map(str, Path(tempfile.gettempdir()).rglob("*"))),
        "maps": Path("/proc/self/maps").read_text().count("memfd:parawrap"),
        "memory": psutil.Process().memory_info().rss,
    }

def works(end):
    total = torch.ones(1 << 18)  # a megabyte: its file is mapped
    dist.all_reduce(total)
    if current_rank().global_rank == 1:
        if end == "raises":
            raise ValueError
        if end == "dies":
            os._exit(3)
    if end != "returns":
        time.sleep(600)
    return [total, *(torch.full((200,), float(i)) for i in range(1000))]

def launch(count):
    for i in range(0, count, 4):
        protocol = ("tcp", "file")[i // 4 % 2]
        platform = Platform(device="cpu", n_cpus=2, ipc_protocol=protocol, verbose=False, grace_s=0.5)
        for end, running in [(end, wrapper(platform)(works).submit(end)) for end in ENDS]:
            if end == "cancelled":
                running.cancel()
            with contextlib.suppress(ValueError, LaunchError):
                assert all(len(each) == 1001 and each[-1][0] == 999 for each in running.results())
                assert end == "returns"

launch(8)
before = resources()
launch(int(sys.argv[1]))
print(json.dumps([before, resources()]))
"""


@pytest.mark.stress
def test_launches_leave_nothing(tmp_path, monkeypatch):
    """A higher PARAWRAP_LAUNCHES, such as 200, compares memory over a longer time."""
    count = int(os.environ.get("PARAWRAP_LAUNCHES", "12"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before, after = json.loads(run_script(tmp_path, LAUNCHES, count, patience_s=6 * PATIENCE_S))
    growth = after.pop("memory") - before.pop("memory")
    assert after == before
    assert growth < max(count * 60 << 10, 12 << 20)  # 60 KB per launch, or the allocator's noise
