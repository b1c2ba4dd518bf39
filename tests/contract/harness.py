"""One way to play a scenario, whatever starts the ranks, and what was seen of it.

What a launcher cannot do by its nature stands in `UNABLE`, with the reason; a test that meets one of these checks what
happens instead.
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
from tests.contract.torchrun_world import ROOT, TorchrunWorld
from tests.launch.processes import eventually

PATIENCE_S = 80.0
_START_S, _STARTS = 30.0, 2
"""For the end of a launch that is bound to end, on a machine that is shared: no measure of speed."""

LAUNCHERS = ("local", "torchrun", "slurm", "ray", "inline")

_ALONE = "the function runs in the process that calls it, and nothing watches that"
_TORCHRUN = "torchrun started the processes, and it alone watches them"

UNABLE = {
    "inline": {
        "several ranks": "there is one rank",
        "survive a death": _ALONE,
        "limit time": _ALONE,
        "cancel": "the call returns when the function does, and gives no handle",
        "tell of running ranks": "the call returns when the function does, and gives no handle",
        "send": "nothing is sent: arguments and results are the objects themselves",
        "keep output": "what is written goes where this process writes",
        "restart": _ALONE,
    },
    "torchrun": {
        "survive a death": _TORCHRUN,
        "limit time": "a limit ends the wait for the results of others, and no function that runs",
        "watch for silence": _TORCHRUN,
        "cancel": "the call returns when all ranks have, and the launch that it gives is over",
        "tell of running ranks": "the call returns when all ranks have, and the launch that it gives is over",
        "send arguments": "every process makes the call with arguments of its own",
        "keep output": "what is written goes where torchrun sends it",
        "restart": _TORCHRUN,
        "launch twice at once": "every process makes the same calls in the same order",
    },
}
"""By launcher, what it cannot do, and why."""


@dataclass(frozen=True)
class Told:
    """An exception, as far as it can be told from process to process."""

    kind: type[BaseException]
    message: str
    args: tuple
    notes: str
    attributes: dict = field(default_factory=dict)

    @classmethod
    def of(cls, error):
        """What is to be told of this one."""
        kept = {name: value for name, value in vars(error).items() if name != "__notes__"}
        notes = "\n".join(getattr(error, "__notes__", ()))
        return cls(type(error), str(error), error.args, notes, kept)

    def __str__(self):
        return f"{self.kind.__name__}: {self.message}\n{self.notes}"


@dataclass(frozen=True)
class Seen:
    """What whoever launched saw.

    Attributes:
        results: what the call gave.
        error: what it raised.
        state: of the handle at the end; empty without one.
        logs: what each rank wrote, by the handle.
        shown: what was written here meanwhile.
        ended: the exit code of whoever launched, where the launch ended that too.
    """

    results: tuple | None = None
    error: Told | None = None
    state: str = ""
    logs: tuple[str, ...] = ()
    shown: str = ""
    ended: int | None = None

    def given(self):
        """The results; an error fails the test."""
        assert self.error is None, self.error
        assert self.ended is None, self.shown
        return self.results

    def raised(self):
        """The error; results fail the test."""
        assert self.error is not None, (self.results, self.ended, self.shown[-2000:])
        return self.error


class Handled:
    """A launcher that gives a handle: it starts the ranks elsewhere, and this process waits for them."""

    def __init__(self, name, n_nodes, **fields):
        self.name = name
        self.n_nodes = n_nodes
        self.world_size = 4
        self.tells_hosts = True
        self._fields = {"n_nodes": n_nodes, "n_cpus": 4 // n_nodes, **fields}

    def __repr__(self):
        return self.name

    def unable(self, what):
        """Why this launcher cannot do that; None where it can."""
        return UNABLE.get(self.name, {}).get(what)

    def platform(self, **fields):
        """Of four ranks here."""
        return Platform(**self._fields | {"verbose": False} | fields)

    def play(self, function, *args, do=None, kwargs=None, **fields):
        """Launch this call, do something to the launch while it runs, and wait for its end."""
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            results, error, state, logs = self._played(function, args, kwargs or {}, do, fields)
        return Seen(results, error, state, logs, shown.getvalue())

    def _played(self, function, args, kwargs, do, fields):
        try:
            launch = wrapper(self.platform(**fields))(function).submit(*args, **kwargs)
        except Exception as error:
            return None, Told.of(error), "", ()
        results = told = None
        try:
            if do is not None:
                do(launch)
            results = self._results(launch)
        except AssertionError:
            raise
        except Exception as error:
            told = Told.of(error)
        finally:
            launch.cancel()
        return results, told, launch.state, tuple(launch.logs(rank) for rank in range(self.world_size))

    def _results(self, launch):
        def ended():
            self._meanwhile()
            with contextlib.suppress(TimeoutError):
                launch.results(timeout=0.3)
                return True
            return launch.done()

        try:
            eventually(ended, "the end of the launch", PATIENCE_S)
        except AssertionError:
            traceback.print_exc()
            msg = f"the launch hangs: {launch.stacks()}"
            raise AssertionError(msg) from None
        return launch.results()

    def _meanwhile(self):
        """What is to be done again and again while a launch runs."""

    def stop(self):
        """Let go of what was started for launches."""


class OnSlurm(Handled):
    """Two nodes of a cluster."""

    def __init__(self, cluster):
        super().__init__("slurm", 2, device="slurm")
        self.cluster = cluster

    def _meanwhile(self):
        self.cluster.hasten()

    def stop(self):
        self.cluster.settle()


class Torchrun:
    """Four processes that torchrun started; they make one call after another. A dead world is followed by another one."""

    name, n_nodes, world_size = "torchrun", 1, 4
    unable = Handled.unable
    __repr__ = Handled.__repr__

    def __init__(self, folder):
        self._folder = folder
        self._world = None

    def play(self, function, *args, do=None, kwargs=None, **fields):
        """Make this call in every process; the ranks must agree on what it came to."""
        world = self._world = self._world or self._started()
        written = len(world.log())
        platform_fields = {"device": "cpu", "n_cpus": 4, "verbose": False, **fields}
        world.begin(lambda: called(function, args, kwargs or {}, platform_fields))
        if do is not None:
            do(world)
        try:
            eventually(lambda: world.endings() is not None or world.exit_code is not None, "the end of a call", PATIENCE_S)
        except AssertionError as error:
            error.add_note(f"the world wrote:\n{world.log()[written:]}")
            self.stop()
            raise
        if world.endings() is None:
            self.stop()
            return Seen(ended=world.exit_code, shown=world.log()[written:])
        first, *others = world.endings()
        assert all((each.error is None) == (first.error is None) for each in others), [first, *others]
        assert all((each.error and each.error.kind) == (first.error and first.error.kind) for each in others), others
        return Seen(first.results, first.error, first.state, first.logs, world.log()[written:])

    def _started(self):
        """A new world. That torchrun itself is slow to start, once, is nothing that parawrap promises."""
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
        """End the world."""
        if self._world is not None:
            self._world.stop()
        self._world = None


class Inline:
    """The function runs here."""

    name, n_nodes, world_size = "inline", 1, 1
    unable = Handled.unable
    __repr__ = Handled.__repr__

    def play(self, function, *args, do=None, kwargs=None, dies=False, **fields):
        """Call it; another thread does something meanwhile. What ends its process runs in one of its own."""
        platform_fields = {"device": "cpu", "n_cpus": 4, "verbose": False, **fields}
        if dies:
            return self._played_apart(lambda: inline(function, args, kwargs or {}, platform_fields))
        doing = None if do is None else threading.Thread(target=do, args=(self,))
        shown = io.StringIO()
        if doing is not None:
            doing.start()
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                seen = inline(function, args, kwargs or {}, platform_fields)
        finally:
            if doing is not None:
                doing.join()
        return Seen(seen.results, seen.error, shown=shown.getvalue())

    def _played_apart(self, call):
        program = f"import sys, pickle; sys.path.insert(0, {str(ROOT)!r}); pickle.load(sys.stdin.buffer)()"
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=cloudpickle.dumps(call),
            capture_output=True,
            check=False,
            timeout=PATIENCE_S,
        )
        return Seen(ended=done.returncode, shown=(done.stdout + done.stderr).decode())

    def preempt(self):
        """As whoever runs the process would."""
        os.kill(os.getpid(), signal.SIGUSR2)

    def stop(self):
        """Nothing was started."""


def called(function, args, kwargs, fields):
    """In a process of a world: launch there, and tell what was seen."""
    try:
        launch = wrapper(Platform(**fields))(function).submit(*args, **kwargs)
    except BaseException as error:  # whatever it is, the test is to see it
        return Seen(error=Told.of(error))
    logs = tuple(launch.logs(rank) for rank in range(4))
    try:
        results = launch.results()
        pickle.dumps(results)
    except BaseException as error:
        return Seen(error=Told.of(error), state=launch.state, logs=logs)
    return Seen(results, state=launch.state, logs=logs)


def inline(function, args, kwargs, fields):
    """Call the function here, as rank 0 of 1."""
    try:
        return Seen(wrapper(Platform(**fields))(function).inline(*args, **kwargs))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Seen(error=Told.of(error))


def all_said(folder, what, count):
    """Wait until so many ranks have said this; what they wrote, in rank order."""
    paths = [Path(folder, f"{what}-{rank}") for rank in range(count)]
    eventually(lambda: all(path.exists() for path in paths), f"{what} of {count} ranks", PATIENCE_S)
    return [path.read_text() for path in paths]


def none_alive(folder, count):
    """Wait until no process of `scenarios.hold` is left."""

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
