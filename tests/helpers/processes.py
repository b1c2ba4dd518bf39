"""Helpers for launch tests: platforms, bounded waits, process ids, and parents that run as scripts."""

from __future__ import annotations

import os
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


def kill_with_stacks(pid):
    """Kill a process and its children. Those with PYTHONFAULTHANDLER=1 print their stacks before."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
        for number in signal.SIGABRT, signal.SIGKILL:
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)
            psutil.wait_procs(family, timeout=2)


def warm_processes():
    """Return the warm process that forks this process's ranks, as a list; empty before the first launch."""

    def is_warm(process):
        try:
            return any("from parawrap" in argument for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.Process().children() if is_warm(process)]


def descendant_pids():
    """Return the process ids of all descendants of this process."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


def processes_in(folder):
    """Return the processes with this folder in their command line."""
    processes = psutil.process_iter(["cmdline"])
    return [each for each in processes if any(str(folder) in argument for argument in each.info["cmdline"] or ())]


def failure_of(function, *args, platform=None):
    """Return the exception of a launch; a launch that hangs fails the test with its stacks."""
    launch = wrapper(platform or ranks())(function).submit(*args)
    with pytest.raises(BaseException) as caught:
        results_of(launch)
    return caught.value


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", []))


def pids_in(folder, count):
    """Wait for `count` process ids that ``report_pid(folder)`` wrote into a folder, and return them."""

    def written():
        found = [path.read_text() for path in sorted(Path(folder).glob("*.pid"))]
        return len(found) == count and found

    return [int(text) for text in eventually(written, f"{count} files in {folder}")]


REPORT_PID = '''
import os, pathlib

def report_pid(folder, pid=None):
    """Report a process id to the test, in a file that appears only once it is complete."""
    pid = os.getpid() if pid is None else pid
    begun = pathlib.Path(folder, f"{pid}.begun")
    begun.write_text(str(pid))
    begun.rename(begun.with_suffix(".pid"))
'''
"""Source of ``report_pid``, as a string, so that ranks do not need to import this module."""


def report_pid_function():
    """Return `report_pid` as a function that is pickled by value."""
    namespace = {}
    exec(REPORT_PID, namespace)
    return namespace["report_pid"]


ESCAPES = 5
"""The number of processes that ``escape`` reports."""

ESCAPING = f'''
{REPORT_PID}
import signal, subprocess, sys, time

def escape(folder):
    """Start processes in and outside this process group, and wait until this and each of them has reported its id."""
    report_pid(folder)
    report_pid(folder, subprocess.Popen(["sleep", "600"]).pid)
    report_pid(folder, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if os.fork() == 0:  # a daemon that runs this program, and whose parent exits
        os.setsid()
        if os.fork() == 0:
            report_pid(folder)
            while True:
                time.sleep(600)
        os._exit(0)
    os.wait()
    child = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    report_pid(folder, int(child.stdout.readline()))
    child.kill()
    child.wait()
    while len(list(pathlib.Path(folder).glob("*.pid"))) < {ESCAPES}:
        time.sleep(0.01)

def run_and_end(folder, end):
    """Call `escape`, then end in the given way."""
    escape(folder)
    if end == "raises":
        raise ValueError
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "cancelled":
        time.sleep(600)
'''
"""Source of ``run_and_end(folder, end)``, as a string, so that ranks do not need to import this module."""


def run_and_end_function():
    """Return ``run_and_end`` as a function that is pickled by value."""
    namespace = {}
    exec(ESCAPING, namespace)
    return namespace["run_and_end"]


@contextmanager
def killing_survivors(folder):
    """At the end of the block, kill the processes that reported their ids in this folder or its subfolders."""
    try:
        yield
    finally:
        for path in folder.rglob("*.pid"):
            if not is_gone(int(path.stem)):
                os.kill(int(path.stem), signal.SIGKILL)


def write_script(folder, text, name="parent.py"):
    """Write a Python file that defines ``report_pid`` and return its path."""
    path = Path(folder) / name
    path.write_text(REPORT_PID + textwrap.dedent(text))
    return path


def start_python(*args, **options):
    """Start an interpreter in its own session."""
    command = [sys.executable, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **options)


def run_script(folder, text, *args, patience_s=PATIENCE_S):
    """Run a script in its own process and return its standard output; fail if its exit code is not 0."""
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
