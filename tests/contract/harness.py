"""Run a scenario under any launcher and record what the user sees.

`UNABLE` lists what a launcher cannot do, with the reason. A test that needs such an ability checks what happens instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle

from parawrap import Platform, wrapper
from tests.helpers.torchrun_world import ROOT, TorchrunWorld
from tests.helpers.waiting import eventually

PATIENCE_S = 80.0
"""Upper limit for a launch that must end, on a shared machine. It does not measure speed."""

_START_S, _STARTS = 30.0, 2

LAUNCHERS = ("local", "torchrun", "slurm", "ray", "inline")

_UNWATCHED = "the function runs in the calling process, and nothing watches that process"
_TORCHRUN = "torchrun started the processes, and only torchrun watches them"

UNABLE = {
    "inline": {
        "several ranks": "there is only one rank",
        "survive a death": _UNWATCHED,
        "limit time": _UNWATCHED,
        "cancel": "the call blocks until the function returns, and gives no handle",
        "inspect running ranks": "the call blocks until the function returns, and gives no handle",
        "send": "nothing is sent: arguments and results are the objects themselves",
        "keep output": "output goes to the streams of the calling process",
        "restart": _UNWATCHED,
    },
    "torchrun": {
        "survive a death": _TORCHRUN,
        "limit time": "a limit ends the wait for the results of other ranks, but not a running function",
        "watch for silence": _TORCHRUN,
        "cancel": "the call blocks until all ranks have returned",
        "inspect running ranks": "the call blocks until all ranks have returned",
        "send arguments": "every process calls the function with its own arguments",
        "keep output": "output goes where torchrun sends it",
        "restart": _TORCHRUN,
        "launch twice at once": "every process makes the same calls in the same order",
    },
}
"""Maps each launcher to the abilities that it lacks, with the reasons."""


@dataclass(frozen=True)
class ErrorRecord:
    """The parts of an exception that can be sent to another process."""

    kind: type[BaseException]
    message: str
    args: tuple
    notes: str
    attributes: dict = field(default_factory=dict)

    @classmethod
    def of(cls, error):
        """Record an exception."""
        kept = {name: value for name, value in vars(error).items() if name != "__notes__"}
        notes = "\n".join(getattr(error, "__notes__", ()))
        return cls(type(error), str(error), error.args, notes, kept)

    def __str__(self):
        return f"{self.kind.__name__}: {self.message}\n{self.notes}"


@dataclass(frozen=True)
class Observation:
    """The results, error, and output that the caller of a launch sees.

    Attributes:
        results: The results of the launch.
        error: The exception that the launch raised.
        state: The final state of the handle; empty without a handle.
        logs: The output of each rank, read from the handle.
        output: The text that the calling process printed during the launch.
        exit_code: The exit code of the launching process, if the launch ended that process.
    """

    results: tuple | None = None
    error: ErrorRecord | None = None
    state: str = ""
    logs: tuple[str, ...] = ()
    output: str = ""
    exit_code: int | None = None

    def expect_results(self):
        """Return the results; an error fails the test."""
        assert self.error is None, self.error
        assert self.exit_code is None, self.output
        return self.results

    def expect_error(self):
        """Return the error; results fail the test."""
        assert self.error is not None, (self.results, self.exit_code, self.output[-2000:])
        return self.error


class SubmitLauncher:
    """A launcher with a handle: its ranks run in other processes."""

    def __init__(self, name, n_nodes, **fields):
        self.name = name
        self.n_nodes = n_nodes
        self.world_size = 4
        self.tells_hosts = True
        self._fields = {"n_nodes": n_nodes, "n_cpus": 4 // n_nodes, **fields}

    def __repr__(self):
        return self.name

    def unable(self, ability):
        """Return why this launcher lacks an ability, or None if it has it."""
        return UNABLE.get(self.name, {}).get(ability)

    def platform(self, **fields):
        """Return a platform of four ranks for this launcher."""
        return Platform(**self._fields | {"verbose": False} | fields)

    def play(self, function, *args, do=None, kwargs=None, **fields):
        """Launch the function, call `do(launch)` while it runs, and wait for the end of the launch."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            results, error, state, logs = self._submit_and_wait(function, args, kwargs or {}, do, fields)
        return Observation(results, error, state, logs, output.getvalue())

    def _submit_and_wait(self, function, args, kwargs, do, fields):
        try:
            launch = wrapper(self.platform(**fields))(function).submit(*args, **kwargs)
        except Exception as error:
            return None, ErrorRecord.of(error), "", ()
        results = record = None
        try:
            if do is not None:
                do(launch)
            results = self._wait_for_results(launch)
        except AssertionError:
            raise
        except Exception as error:
            record = ErrorRecord.of(error)
        finally:
            launch.cancel()
        return results, record, launch.state, tuple(launch.logs(rank) for rank in range(self.world_size))

    def _wait_for_results(self, launch):
        def ended():
            self._while_waiting()
            with contextlib.suppress(TimeoutError):
                launch.results(timeout=0.3)
                return True
            return launch.done()

        try:
            eventually(ended, "the end of the launch", PATIENCE_S)
        except AssertionError:
            traceback.print_exc()
            msg = f"the launch did not end within {PATIENCE_S} seconds: {launch.stacks()}"
            raise AssertionError(msg) from None
        return launch.results()

    def _while_waiting(self):
        """Called repeatedly while a launch runs."""

    def stop(self):
        """Release the resources of this launcher."""


class SlurmLauncher(SubmitLauncher):
    """Launches on two nodes of the Slurm cluster of the tests."""

    def __init__(self, cluster):
        super().__init__("slurm", 2, device="slurm")
        self.cluster = cluster

    def _while_waiting(self):
        self.cluster.hasten()

    def stop(self):
        self.cluster.settle()


class TorchrunLauncher:
    """Four processes started by torchrun that run one call after another; a new world replaces a dead one."""

    name, n_nodes, world_size = "torchrun", 1, 4
    unable = SubmitLauncher.unable
    __repr__ = SubmitLauncher.__repr__

    def __init__(self, folder):
        self._folder = folder
        self._world = None

    def play(self, function, *args, do=None, kwargs=None, **fields):
        """Make the call in every process; all ranks must return or raise the same type of exception."""
        world = self._world = self._world or self._start_world()
        written = len(world.log())
        platform_fields = {"device": "cpu", "n_cpus": 4, "verbose": False, **fields}
        world.begin(lambda: call_from_world(function, args, kwargs or {}, platform_fields))
        try:
            if do is not None:
                do(world)
            eventually(lambda: world.endings() is not None or world.exit_code is not None, "the end of a call", PATIENCE_S)
        except AssertionError as error:
            self.stop()
            error.add_note(f"torchrun and its ranks wrote:\n{world.log()[written:]}")
            raise
        if world.endings() is None:
            self.stop()
            return Observation(exit_code=world.exit_code, output=world.log()[written:])
        first, *others = world.endings()
        assert all((each.error is None) == (first.error is None) for each in others), [first, *others]
        assert all((each.error and each.error.kind) == (first.error and first.error.kind) for each in others), others
        return Observation(first.results, first.error, first.state, first.logs, world.log()[written:])

    def _start_world(self):
        """Start a world; try again once, because torchrun's own start-up time is not under test."""
        for _ in range(_STARTS):
            world = TorchrunWorld(tempfile.mkdtemp(dir=self._folder), self.world_size)
            try:
                eventually(lambda world=world: world.is_up() or world.exit_code is not None, "torchrun's ranks", _START_S)
            except AssertionError as error:
                error.add_note(f"torchrun wrote:\n{world.log()}")
                world.stop()
                failed = error
            else:
                return world
        raise failed

    def stop(self):
        """Stop the world."""
        if self._world is not None:
            self._world.stop()
        self._world = None


class InlineLauncher:
    """Runs the function in this process."""

    name, n_nodes, world_size = "inline", 1, 1
    unable = SubmitLauncher.unable
    __repr__ = SubmitLauncher.__repr__

    def play(self, function, *args, do=None, kwargs=None, dies=False, **fields):
        """Call the function while another thread runs `do`; with `dies`, call it in a subprocess."""
        platform_fields = {"device": "cpu", "n_cpus": 4, "verbose": False, **fields}
        if dies:
            return self._run_in_subprocess(lambda: call_inline(function, args, kwargs or {}, platform_fields))
        thread = None if do is None else threading.Thread(target=do, args=(self,))
        output = io.StringIO()
        if thread is not None:
            thread.start()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                observation = call_inline(function, args, kwargs or {}, platform_fields)
        finally:
            if thread is not None:
                thread.join()
        return Observation(observation.results, observation.error, output=output.getvalue())

    def _run_in_subprocess(self, call):
        program = f"import sys, pickle; sys.path.insert(0, {str(ROOT)!r}); pickle.load(sys.stdin.buffer)()"
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=cloudpickle.dumps(call),
            capture_output=True,
            check=False,
            timeout=PATIENCE_S,
        )
        return Observation(exit_code=done.returncode, output=(done.stdout + done.stderr).decode())

    def preempt(self):
        """Send this process SIGUSR2, as its user or cluster would."""
        os.kill(os.getpid(), signal.SIGUSR2)

    def stop(self):
        """Do nothing: no process was started."""


def call_from_world(function, args, kwargs, fields):
    """Launch from a process of a world and return what that process sees."""
    try:
        launch = wrapper(Platform(**fields))(function).submit(*args, **kwargs)
    except BaseException as error:  # the test checks the type
        return Observation(error=ErrorRecord.of(error))
    logs = tuple(launch.logs(rank) for rank in range(4))
    try:
        results = launch.results()
        pickle.dumps(results)
    except BaseException as error:
        return Observation(error=ErrorRecord.of(error), state=launch.state, logs=logs)
    return Observation(results, state=launch.state, logs=logs)


def call_inline(function, args, kwargs, fields):
    """Call the function in this process, as rank 0 of 1."""
    try:
        return Observation(wrapper(Platform(**fields))(function).inline(*args, **kwargs))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Observation(error=ErrorRecord.of(error))


def wait_for_reports(folder, topic, count):
    """Wait until `count` ranks have reported on a topic; return the reports in rank order."""
    paths = [Path(folder, f"{topic}-{rank}") for rank in range(count)]
    eventually(lambda: all(path.exists() for path in paths), f"{count} reports on {topic}", PATIENCE_S)
    return [path.read_text() for path in paths]


def assert_no_survivors(folder, count):
    """Wait until every process that called `scenarios.hold_lock` has ended."""

    def is_free(path):
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    paths = [Path(folder, f"life-{rank}") for rank in range(count)]
    assert all(path.exists() for path in paths)
    eventually(lambda: all(map(is_free, paths)), "the end of every rank")
