"""Rank 0 of a Slurm job coordinates the ranks, and the submitter follows."""

from __future__ import annotations

import contextlib
import json
import logging
import threading

import pytest
import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.rank._signed_values import Signer
from parawrap.launch.slurm import _coordinate_job
from parawrap.launch.slurm._coordinate_job import JobCoordinator
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Folder, Plan
from parawrap.launch.slurm._store_messages import StoreQueue
from tests.helpers.waiting import eventually


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path))
    (folder,) = Folder.new("job", 1)
    return folder


def plan(lease_s=1.0, **fields):
    platform = Platform(device="cpu", ipc_groups=None, **fields)
    return Plan("f", platform, Surroundings.here().without_environ(), b"t", lease_s)


@pytest.fixture
def coordinator(folder, monkeypatch):
    """A coordinator of two ranks that have not arrived; its threads end with the test."""
    monkeypatch.setattr(_coordinate_job, "_LOOK_S", 0.01)
    with contextlib.ExitStack() as cleanup:
        made = JobCoordinator(folder, plan(lease_s=0.3, n_cpus=2), 0, "0-0", cleanup)
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


def test_a_start_after_a_lost_node(folder):
    """An attempt after one that was not preempted is a failure; max_restarts allows as many as it says."""

    def restart_of(number):
        with contextlib.ExitStack() as cleanup:
            return JobCoordinator(folder, plan(max_restarts=1), number, f"{number}-0", cleanup).address.restart

    assert [restart_of(0), restart_of(1)] == [0, 1]
    with pytest.raises(LaunchError, match="attempt 2 follows a lost node"):
        restart_of(2)
    folder.mark_preempted(1)
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
    transcripts = [Transcript(rank, printer=None) for rank in range(2)]
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


def test_messages_of_another_attempt():
    """They are refused, although the secret is the same."""
    store, signer = dist.HashStore(), Signer(b"secret")
    old, new = (StoreQueue(store, f"{attempt}/reports", signer) for attempt in ("0-0", "0-1"))
    for word in "first", "second":
        old.send(word, {"at": 1.0})
    assert [old.receive(), old.receive()] == [("first", {"at": 1.0}), ("second", {"at": 1.0})]
    old.send("third")
    store.set("0-1/reports/1", store.get("0-0/reports/3"))
    with pytest.raises(LaunchError, match="is not signed with this process's key"):
        new.receive()
