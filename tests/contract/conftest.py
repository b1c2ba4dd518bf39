"""One run of all scenarios under each launcher. The tests of the contract read what it observed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.contract import scenarios
from tests.contract.launchers import InlineLauncher, SubmitLauncher, TorchrunLauncher
from tests.helpers.launches import wait_for_reports
from tests.helpers.waiting import eventually

_PARAMS = [
    "inline",
    "local",
    "torchrun",
    pytest.param("slurm", marks=pytest.mark.slurm),
    pytest.param("ray", marks=pytest.mark.ray),
]


@pytest.fixture(scope="session", params=_PARAMS)
def launcher(request, tmp_path_factory):
    """Each launcher in turn, with the cluster or the processes that it needs."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as cleanup:
        if request.param == "inline":
            made = InlineLauncher()
        elif request.param == "local":
            made = SubmitLauncher("local", 1, device="cpu", launcher="local")
        elif request.param == "torchrun":
            made = TorchrunLauncher(tmp_path_factory.mktemp("torchrun"))
        elif request.param == "ray":
            request.getfixturevalue("ray_cluster")
            import ray

            # Because launches of several threads cannot join at once
            ray.init(log_to_driver=False, logging_level="ERROR")
            cleanup.callback(ray.shutdown)
            made = SubmitLauncher("ray", 2, device="ray")
        else:
            cluster = request.getfixturevalue("slurm")
            patch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path_factory.mktemp("launches")))
            cleanup.callback(cluster.settle)
            made = SubmitLauncher("slurm", 2, cluster.hasten, device="slurm")
        yield made


class Observed:
    """The observations of all scenarios under one launcher, by name.

    Scenarios run at the same time.

    Attributes:
        folder: Has a folder for each scenario.
        output: What this process wrote meanwhile.
        stacks: The stacks of the ranks before the cancel, and the state of their launch.
    """

    def __init__(self, launcher, folder):
        self._launcher, self.folder, self._results, self.stacks = launcher, folder, {}, {}
        self._pool = ThreadPoolExecutor(6)  # a guess
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            self._start_all()
            self._pool.shutdown()
        self.output = output.getvalue()

    def __getitem__(self, name):
        return self._results[name]()

    def _play(self, name, function, *args, **options):
        if self._launcher.name == "inline":  # only this thread gets signals
            observation = self._launcher.play(function, *args, **options)
            self._results[name] = lambda: observation
        else:
            self._results[name] = self._pool.submit(
                self._launcher.play, function, *args, **options
            ).result

    def _new_folder(self, name):
        folder = Path(self.folder, name)
        folder.mkdir()
        return folder

    def _start_all(self):
        name = self._launcher.name
        is_watched, has_handle = name in ("local", "ray"), name not in ("torchrun", "inline")
        here, described = os.getpid(), self._new_folder("described")
        # Six scenarios at once can delay a rank's cleanup beyond the default of 5 seconds.
        patient = {"grace_s": 60}
        if is_watched:
            self._play("left elsewhere", scenarios.leave_others_with_a_new_group)
        for limited, limit, is_kept in (
            ("timeout", {"timeout_min": 0.2}, has_handle),
            ("silence", {"hang_timeout_s": 6}, is_watched),
        ):
            if is_kept:
                self._results[limited] = self._pool.submit(
                    self._end_by_limit, self._new_folder(limited), limit, **patient
                ).result
        self._play(
            "described",
            scenarios.describe_rank,
            [1, {"x": torch.arange(3)}],
            lambda rank: 10**rank,
            kwargs={"b": "two", "big": torch.zeros(1 << 21)},
            verbose=True,
            console_logs=described / "logs",
            upon_finish=lambda: (described / f"finished-{os.getpid() == here}").touch(),
            **({"n_cpus": 2} if name in ("slurm", "ray") else {}),
        )
        failed = self._new_folder("raised")
        restarting = self._new_folder("restarting")
        wait_options = {"do": self._preempt(restarting), "max_restarts": 1, **patient}
        self._play(
            "restarting", scenarios.live_through_restarts, restarting, has_handle, **wait_options
        )
        fail = scenarios.fail_while_others_wait
        self._play(
            "raised",
            fail,
            scenarios.raise_odd_error,
            max_restarts=1,
            upon_finish=(failed / "finished").touch,
        )
        self._play("sys.exit", fail, partial(sys.exit, 3))
        dies = {"dies": True} if name == "inline" else {}
        self._play("os._exit", fail, partial(os._exit, 7), **dies)
        self._play("killed", fail, partial(signal.raise_signal, signal.SIGKILL), **dies)
        self._play("result", scenarios.return_lock)
        if name != "inline":
            cancelled = self._new_folder("cancel")
            cancel = self._cancel(cancelled)
            self._play("cancel", scenarios.wait_for_ever, cancelled, do=cancel, **patient)
            self._play("left in a collective", scenarios.leave_others_in_a_collective)

    def _end_by_limit(self, folder, limit, **options):
        """Exceed a limit.

        If a rank had not begun, on a busy machine, try again with a longer limit.
        """
        while True:
            observation = self._launcher.play(scenarios.wait_for_ever, folder, **limit, **options)
            if len([*folder.glob("begun-*")]) == 2:
                return observation
            limit = {name: 5 * value for name, value in limit.items()}

    def _cancel(self, folder):
        def cancel(launch):
            wait_for_reports(folder, "begun", 2)
            if hasattr(launch, "stacks"):
                # Slurm reports it later
                eventually(lambda: launch.state == "running", "the state of the launch")
                self.stacks.update(launch.stacks(), running=(launch.state, launch.done()))
            launch.cancel()

        return cancel

    def _preempt(self, folder):
        def preempt(launch):
            wait_for_reports(folder, "counting", 1 if self._launcher.name == "inline" else 2)
            launch.preempt()

        return preempt


@pytest.fixture(scope="session")
def observed(launcher, tmp_path_factory):
    before = threading.active_count()
    with torch.random.fork_rng([]), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        # On Slurm and Ray the nodes keep the default.
        patch.setattr("parawrap.processes.pool.STUCK_S", 2.0)
        made = Observed(launcher, tmp_path_factory.mktemp(launcher.name))
    assert launcher.name != "local" or threading.active_count() == before
    return made
