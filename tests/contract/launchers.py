"""Run a scenario under any launcher and record what the user sees."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass

import cloudpickle

from parawrap import Platform, wrapper
from tests.contract.table import behavior_of
from tests.helpers.launches import results_of
from tests.helpers.torchrun_world import ROOT, TorchrunWorld
from tests.helpers.waiting import PATIENCE_S, eventually


@dataclass(frozen=True)
class Observation:
    """The results, errors, and output that the caller of a launch sees.

    Attributes:
        kind: The class of the exception that the launch raised.
        state: The final state of the handle; empty without a handle.
        output: What the processes of torchrun, or of an inline call that ended its process, wrote.
        exit_code: The exit code of the launching process, if the launch ended that process.
    """

    results: tuple | None = None
    kind: type[BaseException] | None = None
    message: str = ""
    notes: str = ""
    attributes: dict | None = None
    state: str = ""
    logs: tuple[str, ...] = ()
    output: str = ""
    exit_code: int | None = None

    def expect_results(self):
        assert self.kind is None, (self.kind, self.message, self.notes)
        assert self.exit_code is None, self.output
        return list(self.results)

    @property
    def behavior(self):
        """The exception, as a text for a cell of the page."""
        assert self.kind is not None, self
        return behavior_of(self.kind, self.message)


def observe(call):
    """Make a call, which returns results, the handle's state, and its logs; and record them or the
    exception.
    """
    try:
        results, state, logs = call()
        return Observation(results, state=state, logs=logs)
    except AssertionError:
        raise
    except BaseException as error:
        attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
        notes = "\n".join(getattr(error, "__notes__", ()))
        return Observation(None, type(error), str(error), notes, attributes)


class SubmitLauncher:
    """A launcher with a handle: its ranks run in other processes."""

    def __init__(self, name, n_nodes, while_waiting=lambda: None, **fields):
        self.name, self.n_nodes, self._while_waiting = name, n_nodes, while_waiting
        self._fields = {"n_nodes": n_nodes, "n_cpus": 2 // n_nodes, **fields}

    def play(self, function, *args, do=None, kwargs=None, **fields):
        """Launch two ranks, call `do(launch)` while they run, and wait for the
        end of the launch.
        """
        states = []

        def call():
            platform = Platform(**self._fields | {"verbose": False} | fields)
            launch = wrapper(platform)(function).submit(*args, **(kwargs or {}))
            try:
                if do is not None:
                    do(launch)
                results = results_of(launch, while_waiting=self._while_waiting)
            finally:
                launch.cancel()
                states.append(launch.state)
            return results, launch.state, tuple(launch.logs(rank) for rank in range(len(results)))

        observation = observe(call)
        return Observation(**vars(observation) | {"state": states[0] if states else ""})


class TorchrunLauncher:
    """Two processes started by torchrun for each call."""

    name, n_nodes = "torchrun", 1

    def __init__(self, folder):
        self._folder = folder

    def play(self, function, *args, do=None, kwargs=None, **fields):
        """Make the call in every process, and return what the last rank returns or raises."""
        platform_fields = {"device": "cpu", "n_cpus": 2, "verbose": False, **fields}
        world = TorchrunWorld(
            tempfile.mkdtemp(dir=self._folder),
            lambda: call_from_world(function, args, kwargs or {}, platform_fields),
        )
        try:
            if do is not None:
                do(world)
            eventually(lambda: world.exit_code is not None, f"the end of a call; {world.log()}")
            if world.endings() is None:
                return Observation(exit_code=world.exit_code, output=world.log())
            first, last = world.endings()
            assert (first.kind is None) == (last.kind is None), (first, last)
            return Observation(**vars(last) | {"output": world.log()})
        finally:
            world.stop()


class InlineLauncher:
    name, n_nodes = "inline", 1

    def play(self, function, *args, do=None, kwargs=None, dies=False, **fields):
        """Call the function while another thread runs `do`; with `dies`, call
        it in a subprocess.
        """
        platform_fields = {"device": "cpu", "n_cpus": 4, "verbose": False, **fields}
        if dies:
            program = (
                f"import sys, pickle; sys.path.insert(0, {str(ROOT)!r}); "
                "pickle.load(sys.stdin.buffer)()"
            )
            call = cloudpickle.dumps(
                lambda: wrapper(Platform(**platform_fields))(function).inline(*args)
            )
            command = [sys.executable, "-c", program]
            done = subprocess.run(
                command, input=call, capture_output=True, check=False, timeout=PATIENCE_S
            )
            return Observation(exit_code=done.returncode, output=done.stderr.decode())
        thread = threading.Thread(target=lambda: do is None or do(self))
        thread.start()
        try:
            return observe(
                lambda: (
                    wrapper(Platform(**platform_fields))(function).inline(*args, **(kwargs or {})),
                    "",
                    (),
                )
            )
        finally:
            thread.join()

    def preempt(self):
        """Send this process SIGUSR2, as its user or cluster would."""
        os.kill(os.getpid(), signal.SIGUSR2)


def call_from_world(function, args, kwargs, fields):
    def call():
        launch = wrapper(Platform(**fields))(function).submit(*args, **kwargs)
        results = launch.results()
        pickle.dumps(results)
        return results, launch.state, tuple(launch.logs(rank) for rank in range(2))

    return observe(call)
