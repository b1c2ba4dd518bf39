"""The private folder of a Slurm launch, and what its job and its submitter exchange."""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import threading
from pathlib import Path

import pytest

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.slurm import _coordinate_job
from parawrap.launch.slurm._batch_job import log_ends
from parawrap.launch.slurm._coordinate_job import JobCoordinator
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.launch.slurm._task import TaskResult
from parawrap.processes.output import Transcript
from parawrap.processes.settings import Settings
from tests.helpers.waiting import eventually

ADDRESS = Address(("10.0.0.1", "127.0.0.1"), 4321)


def plan(lease_s=1.0, **fields):
    platform = Platform(device="cpu", ipc_groups=None, **fields)
    return Plan("f", platform, Settings.here().for_other_machines(), bytes(32), lease_s)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "launches"))
    (folder,) = Folder.new("my job", 1)
    return folder


def test_the_folder_is_private(tmp_path, monkeypatch):
    """Also the parents that a launch makes are closed to other users, whatever the umask. `remove` removes the folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PARAWRAP_LAUNCH_DIR", raising=False)
    before = os.umask(0o002)
    try:
        (folder,), (other,) = Folder.new("my job", 1), Folder.new("my job", 1)
        folder.request("cancel")
    finally:
        os.umask(before)
    made = [tmp_path / ".parawrap", *(path for path in (tmp_path / ".parawrap").rglob("*") if path.is_dir())]
    assert {folder.submitit, folder.path, other.path} <= set(made)
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    folder.remove()
    assert list(folder.root.iterdir()) == [other.path.parent]


def test_the_last_launch_removes_logs(folder):
    """Each launch of an array has its own folder; the task logs stay until the last launch is removed."""
    first, second = Folder.new("array", 2)
    assert first.submitit == second.submitit
    for number in ("7_1", "7_11"):
        (first.submitit / f"{number}_0_log.err").write_text(f"output of {number}")
    second.tasks_log.write_text("a warning")
    first.remove()
    assert log_ends(second, "7_1", 100) == "7_1_0_log.err:\noutput of 7_1\ntasks.log:\na warning"
    second.remove()
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_a_full_disk_is_named(folder, monkeypatch):
    """LaunchError names the variable that selects another folder, and no folder of an array stays."""
    mkdir = Path.mkdir

    def full(self, **options):
        if self.name == "3":
            raise OSError(28, "No space left on device")
        mkdir(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(
            LaunchError, match=r"No space left on device; free some space there, or set PARAWRAP_LAUNCH_DIR"
        ):
            Folder.new("array", 5)
    assert list(folder.root.iterdir()) == [folder.path.parent]


def reads_of(folder):
    """Return every function that unpickles from a launch folder, and its value."""
    folder.write_plan(plan())
    folder.write_address("0-0", ADDRESS)
    folder.note_earlier(["a failure"])
    values = {folder.read_plan: plan(), folder.earlier: ["a failure"]}
    return values | {lambda: folder.address("0-0"): ADDRESS}


@pytest.mark.parametrize("mode", [0o770, 0o702], ids="{:o}".format)
def test_pickles_of_an_open_folder(folder, mode):
    """They are refused, because other users could have written them. Those of a private folder are read."""
    assert (folder.earlier(), folder.address("0-0")) == ([], None)
    for read, value in reads_of(folder).items():
        folder.path.chmod(mode)
        with pytest.raises(LaunchError, match=rf"other users may write to .*my-job-.*/0 \(mode {mode:o}\)"):
            read()
        folder.path.chmod(0o700)
        assert read() == value
    Path(folder.task_files("7", 0).result_pickle).write_bytes(pickle.dumps(("success", TaskResult("0-0"))))
    follower = JobFollower("7", "f", Platform(device="cpu"), folder)
    folder.submitit.chmod(mode)
    with pytest.raises(LaunchError, match=rf"other users may write to .*submitit \(mode {mode:o}\)"):
        follower.new_result()
    folder.submitit.chmod(0o700)
    assert follower.new_result() == TaskResult("0-0")


def test_pickles_of_a_replaced_folder(folder, monkeypatch, tmp_path):
    """A folder of another user, or a link, is refused."""
    for read in reads_of(folder):
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(LaunchError, match=r"my-job-.* belongs to user \d+, not to user 12345: \w+"):
                read()
    reads = reads_of(folder)
    folder.path.rename(tmp_path / "moved")
    folder.path.symlink_to(tmp_path / "moved")
    for read in reads:
        with pytest.raises(NotADirectoryError):
            read()


# -- what the job and the submitter exchange


@pytest.fixture
def coordinator(folder, monkeypatch):
    """A coordinator of two ranks that have not arrived; its threads end with the test."""
    monkeypatch.setattr(_coordinate_job, "_LOOK_S", 0.01)
    made = JobCoordinator(folder, plan(lease_s=0.3, n_cpus=2), 0, "0-0")
    made.begin()
    yield made
    made._cancel()
    own = "parawrap-"
    eventually(lambda: not any(each.name.startswith(own) for each in threading.enumerate()), "the coordinator's end")


def test_a_full_disk_ends_no_lease(coordinator, folder, monkeypatch):
    """While the folder cannot be read, the coordinator goes on; later it sees the request."""
    failures = []

    def broken():
        failures.append(1)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "requests", broken)
        patch.setattr(folder, "sign_of_life", lambda: b"%d" % len(failures))
        eventually(lambda: len(failures) > 20, "several reads")
        assert not coordinator.is_forgotten
    folder.request("cancel")
    eventually(coordinator._cancelled.is_set, "the cancel")


def test_a_silent_submitter_ends_a_job(coordinator, folder):
    """A request for stacks is answered before."""
    folder.request("stacks-1")
    assert eventually(lambda: folder.answer_to("stacks-1") is not None, "the answer")
    assert folder.answer_to("stacks-2") is None
    eventually(lambda: coordinator.is_forgotten and coordinator._cancelled.is_set(), "the end of the lease")


def test_a_start_after_a_lost_node(folder):
    """An attempt after one that was not preempted is a failure; max_restarts allows as many as it says."""

    def restart_of(number):
        made = JobCoordinator(folder, plan(max_restarts=1), number, f"{number}-0")
        with made._arrivals:
            return made._restart

    assert [restart_of(0), restart_of(1)] == [0, 1]
    with pytest.raises(LaunchError, match="attempt 2 follows a lost node"):
        restart_of(2)
    folder.mark_preempted(1)
    assert [folder.was_preempted(start) for start in range(2)] == [False, True]
    assert restart_of(2) == 2


def test_the_submitter_gets_log_records(folder, caplog):
    with _coordinate_job._LogIntoFile(folder.log):
        logging.getLogger("parawrap.launch").warning("late: %s", "0")
    assert json.loads(folder.log.read_text()) == [logging.WARNING, "late: 0"]
    caplog.clear()
    JobFollower("7", "f", Platform(device="cpu"), folder).take_output()
    assert caplog.record_tuples == [("parawrap.launch", logging.WARNING, "late: 0")]


def test_output_is_taken_while_it_grows(folder):
    """Each byte of both files of a task goes into its rank's transcript once."""
    transcripts = [Transcript(None) for _ in range(2)]
    follower = JobFollower("7", "f", Platform(device="cpu", n_cpus=2), folder)
    follower.write_output_to(transcripts)
    files = folder.task_files("7", 1)
    for text in ("one\n", "two\n"):
        for path in (files.stdout, files.stderr):
            with path.open("a") as file:
                file.write(f"{path.suffix} {text}")
        follower.take_output()
        follower.take_output()
    assert [each.text() for each in transcripts] == ["", ".out one\n.err one\n.out two\n.err two\n"]
