"""Helpers for launch tests: platforms, bounded waits, process ids, and parents
that run as scripts.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from parawrap import Platform, wrapper
from tests.helpers.launches import results_of
from tests.helpers.waiting import PATIENCE_S, eventually

SILENT_S = 2.0
"""A time limit that ranks do not reach while they start, on a shared machine."""


def ranks(count=2, **fields):
    """Return a platform of `count` CPU ranks that shows no output."""
    return Platform(device="cpu", n_cpus=count, **{"verbose": False} | fields)


def is_gone(pid):
    """Return True if a process has ended. A zombie counts as ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def assert_gone(pids):
    """Wait until all of these processes have ended."""
    assert pids
    eventually(lambda: all(map(is_gone, pids)), f"the end of {pids}")


def assert_nothing_left(pids, work, much_work):
    """Assert that descriptors, threads, child processes, and memory are as many after much work."""

    def held():
        gc.collect()
        found = [psutil.Process(pid) for pid in pids]
        of_each = [
            (each.num_fds(), each.num_threads(), len(each.children(recursive=True)))
            for each in found
        ]
        return [count for counts in of_each for count in counts], [
            each.memory_info().rss for each in found
        ]

    measured = []
    for _ in range(3):
        work()
        measured.append(held())
    before = [max(each) for each in zip(*(counts for counts, _ in measured), strict=True)]
    much_work()
    eventually(lambda: all(map(int.__le__, held()[0], before)), f"no more than {before}")
    grown = [after - earlier for earlier, after in zip(measured[-1][1], held()[1], strict=True)]
    assert max(grown) < 10 << 20, grown


def kill_with_stacks(pid):
    """Kill a process and its children.

    Those with PYTHONFAULTHANDLER=1 print their stacks before.
    """
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
        for number in signal.SIGABRT, signal.SIGKILL:
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            psutil.wait_procs(family, timeout=2)


def warm_processes():
    """Return the warm process that forks this process's ranks, as a list; empty before the first
    launch.
    """

    def is_warm(process):
        try:
            return any("from parawrap" in argument for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.Process().children() if is_warm(process)]


def descendant_pids():
    return {each.pid for each in psutil.Process().children(recursive=True)}


def processes_in(folder):
    processes = psutil.process_iter(["cmdline"])
    return [
        each
        for each in processes
        if any(str(folder) in argument for argument in each.info["cmdline"] or ())
    ]


def failure_of(function, *args, platform=None):
    """Return the exception of a launch; a launch that hangs fails the test with its stacks."""
    launch = wrapper(platform or ranks())(function).submit(*args)
    with pytest.raises(BaseException) as caught:
        results_of(launch)
    return caught.value


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", []))


def pids_in(folder, count):
    """Wait for `count` files of a folder whose names are process ids, such as ``4711.pid``, and
    return these.
    """

    def found():
        paths = [*Path(folder).glob("*.pid")]
        return len(paths) == count and paths

    return [int(path.stem) for path in eventually(found, f"{count} files in {folder}")]


def write_script(folder, text):
    path = Path(folder, "parent.py")
    path.write_text(textwrap.dedent(text))
    return path


def start_python(*args, **options):
    command = [sys.executable, *map(str, args)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **options
    )


def run_script(folder, text, *args, patience_s=PATIENCE_S):
    """Run a script in its own process and return its standard output; fail if its exit code is not
    0.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(write_script(folder, text), *args, cwd=folder, **pipes) as script:
        try:
            out, err = script.communicate(timeout=patience_s)
        finally:
            script.kill()
    assert script.returncode == 0, f"exit code {script.returncode}:\n{out}\n{err}"
    return out


@contextmanager
def running_script(folder, text, *args):
    """Run a script in its own process and session, and kill it at the end of the block."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with start_python(write_script(folder, text), *args, cwd=folder, **pipes) as script:
        try:
            yield script
        finally:
            script.kill()
