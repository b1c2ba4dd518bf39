"""What the tests of launches share: platforms, waiting with an end, process ids, and parents that are run as scripts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from parawrap import Platform, wrapper

PATIENCE_S = 40.0
"""For what is bound to happen: the end of a wait that would otherwise have none, and no measure of speed."""

SOON_S = 10.0
"""What must be over "in a moment" is over by then, on a machine that is shared."""


def ranks(count=2, **fields):
    """A quiet platform of this many CPU ranks."""
    return Platform(device="cpu", n_cpus=count, **{"verbose": False} | fields)


def eventually(condition, what, patience_s=PATIENCE_S):
    """Wait for a condition to hold, and give what it gave."""
    deadline = time.monotonic() + patience_s
    while not (held := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s} seconds: {what}"
        time.sleep(0.01)
    return held


def is_gone(pid):
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def assert_gone(pids, patience_s=SOON_S):
    """These processes end, all of them."""
    assert pids
    eventually(lambda: all(map(is_gone, pids)), f"the end of {pids}", patience_s)


def warm_processes():
    """The processes of this one that ranks are forked from: one, or none before the first launch."""

    def is_one(process):
        try:
            return any("parawrap" in argument for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.Process().children() if is_one(process)]


def processes_in(folder):
    """The processes that have this folder among their arguments."""

    def has(process):
        try:
            return any(str(folder) in argument for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.process_iter() if has(process)]


def failure_of(function, *args, platform=None, patience_s=PATIENCE_S):
    """What a launch of this function raises, and after how many seconds; one that hangs fails the test with its stacks."""
    launch = wrapper(platform or ranks())(function).submit(*args)
    began = time.monotonic()
    try:
        results = launch.results(timeout=patience_s)
    except TimeoutError:
        stacks = launch.stacks()
        msg = f"the launch hangs: {stacks}"
        raise AssertionError(msg) from None
    except BaseException as error:
        return error, time.monotonic() - began
    finally:
        launch.cancel()
    msg = f"the launch did not fail, and gave {results}"
    raise AssertionError(msg)


def notes_of(error):
    """All that was noted on an exception."""
    return "\n".join(getattr(error, "__notes__", []))


def said_in(folder, count, patience_s=PATIENCE_S):
    """The whole numbers that `count` processes wrote into this folder, a file each; written by ``say(folder)``."""

    def written():
        found = [path.read_text() for path in sorted(Path(folder).glob("*.pid"))]
        return len(found) == count and found

    return [int(text) for text in eventually(written, f"{count} files in {folder}", patience_s)]


SAY = '''
import os, pathlib

def say(folder, pid=None):
    """Tell the test a process id, in a file that is there only once it is complete."""
    pid = os.getpid() if pid is None else pid
    begun = pathlib.Path(folder, f"{pid}.begun")
    begun.write_text(str(pid))
    begun.rename(begun.with_suffix(".pid"))
'''
"""Source of ``say``: in a string, so that ranks need not import this module."""


def say_function():
    """`say`, as a function that travels by value."""
    place = {}
    exec(SAY, place)
    return place["say"]


def write_script(folder, text, name="parent.py"):
    """A Python file in this folder."""
    path = Path(folder) / name
    path.write_text(SAY + textwrap.dedent(text))
    return path


def run_script(folder, text, *args, prefix=(), env=None, patience_s=2 * PATIENCE_S, **options):
    """Run a script to its end in an interpreter of its own; it must succeed. Gives what it printed.

    `prefix` is a command that starts the interpreter.
    """
    path = write_script(folder, text)
    done = subprocess.run(
        [*prefix, sys.executable, path, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
        cwd=folder,
        env=env,
        **options,
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def running_script(folder, text, *args, **options):
    """A script that runs in an interpreter and a process group of its own; killed at the end, if it still lives."""
    path = write_script(folder, text)
    with subprocess.Popen(
        [sys.executable, path, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
