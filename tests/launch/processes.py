"""What the tests of launches share: platforms, waiting with an end, process ids, and parents that are run as scripts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil

from parawrap import Platform, wrapper
from tests.launch.script_server import Scripts

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
            return any("from parawrap" in argument for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    return [process for process in psutil.Process().children() if is_one(process)]


def below():
    """The process ids of all processes below this one, but for those of scripts, which come and go by themselves."""
    others = {
        each.pid for child in psutil.Process().children() if child.pid == scripts.pid for each in child.children(True)
    }
    return {each.pid for each in psutil.Process().children(recursive=True)} - others


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


scripts = Scripts()
"""Starts scripts without loading torch for each."""


def run_script(folder, text, *args, fresh=False, prefix=(), env=None, patience_s=2 * PATIENCE_S):
    """Run a script to its end in a process of its own; it must succeed. Gives what it printed.

    With `fresh`, and with the `env` or the command `prefix` that it is started with, it is a new interpreter; otherwise a
    fork of one that has torch loaded.
    """
    path = write_script(folder, text)
    if fresh or prefix or env is not None:
        command = [*prefix, sys.executable, path, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False, cwd=folder, env=env)
        out, err, code = done.stdout, done.stderr, done.returncode
    else:
        with closing(scripts.start(path, args, folder, streams=2)) as script:
            try:
                out, err = script.communicate(patience_s)
            finally:
                script.kill()
        code = script.returncode
    assert code == 0, f"exit code {code}:\n{out}\n{err}"
    return out


@contextmanager
def running_script(folder, text, *args):
    """A script that runs in a process and a session of its own; killed at the end, if it still lives."""
    with closing(scripts.start(write_script(folder, text), args, folder, streams=1)) as script:
        try:
            yield script
        finally:
            script.kill()


@contextmanager
def running_scripts(root, cases):
    """Several scripts as from `running_script`, started at the same time; by key, each with a folder of its own.

    Args:
        root: where the folders are made.
        cases: by key, a function that is given the folder, and gives the script's text and arguments.
    """
    with ExitStack() as stack:
        started = {}
        for number, (key, case) in enumerate(cases.items()):
            folder = Path(root) / str(number)
            folder.mkdir()
            text, *args = case(folder)
            started[key] = stack.enter_context(running_script(folder, text, *args)), folder
        yield started
