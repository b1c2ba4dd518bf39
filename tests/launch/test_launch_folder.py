"""The folder of a Slurm launch, the messages between its tasks, and its batch script."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shlex
import signal
import stat
import subprocess
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._platform import Platform
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.messages._first_rank_failure import Parcel
from parawrap.launch.messages._pickle_values import packed
from parawrap.launch.messages._private_files import make_private
from parawrap.launch.rank._process_groups import StoreAddress
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.rank._signed_values import Signer
from parawrap.launch.slurm import _batch_job, _coordinate_job
from parawrap.launch.slurm._coordinate_job import JobCoordinator
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.launch.slurm._store_messages import StoreQueue
from parawrap.launch.slurm._task import TaskResult
from tests.helpers.waiting import eventually

ADDRESS = Address(("10.0.0.1", "127.0.0.1"), 4321, 2, StoreAddress("10.0.0.1", 1234))


def plan(lease_s=1.0, **fields):
    return Plan("f", Platform(device="cpu", **fields), Surroundings.here().without_environ(), b"t", lease_s)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "launches"))
    (folder,) = Folder.new("my job", 1)
    return folder


# -- the folder


def test_each_launch_has_a_private_folder(folder):
    """Other users cannot enter a launch folder, equal names give different folders, and `remove` removes the folder."""
    (other,) = Folder.new("my job", 1)
    assert other.path != folder.path
    assert folder.path.parent.name.startswith("my-job-")
    for path in (folder.path, folder.path.parent, folder.submitit):
        assert path.stat().st_mode & 0o777 == 0o700
    folder.request("cancel")
    folder.remove()
    assert list(folder.root.iterdir()) == [other.path.parent]
    assert other.path.exists()


@pytest.fixture
def open_umask():
    """A umask with which new folders are open to a group, as it is on many clusters."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_all_folders_are_private_whatever_the_umask(tmp_path, monkeypatch, open_umask):
    """Also the parents that a launch makes are closed to other users, and no umask leaves them open."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PARAWRAP_LAUNCH_DIR", raising=False)
    (folder,) = Folder.new("job", 1)
    made = [tmp_path / ".parawrap", *(path for path in (tmp_path / ".parawrap").rglob("*") if path.is_dir())]
    assert folder.submitit in made
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def test_an_open_folder_of_this_user_is_mended(tmp_path):
    """A folder that others may write to loses their access. A folder that they may only read keeps its mode."""
    for mode, mended in ((0o775, 0o700), (0o777, 0o700), (0o755, 0o755), (0o700, 0o700)):
        path = tmp_path / f"{mode:o}"
        path.mkdir()
        path.chmod(mode)
        make_private(path)
        assert stat.S_IMODE(path.stat().st_mode) == mended


def test_the_last_launch_of_an_array_removes_the_shared_logs(folder):
    """Each launch of an array has its own folder; the task logs stay until the last launch is removed."""
    first, second = Folder.new("array", 2)
    assert first.submitit == second.submitit
    for number in ("7_1", "7_11"):
        (first.submitit / f"{number}_0_log.err").write_text(f"output of {number}")
    second.tasks_log.write_text("a warning")
    first.remove()
    assert _batch_job.log_ends(second, "7_1", 100) == "7_1_0_log.err:\noutput of 7_1\ntasks.log:\na warning"
    second.remove()
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_an_unwritable_folder_raises(tmp_path, monkeypatch):
    """LaunchError names the folder and the variable that selects another folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match=r"file cannot be written to: .*PARAWRAP_LAUNCH_DIR"):
        Folder.new("job", 1)


def test_a_failed_array_leaves_no_folders(folder, monkeypatch):
    """If the disk is full before all folders of an array exist, all of them are removed."""
    mkdir = Path.mkdir

    def full(self, **options):
        if self.name == "3":
            raise OSError(28, "No space left on device")
        mkdir(self, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(LaunchError, match=r"No space left on device; free some space there, or set PARAWRAP_LAUNCH_DIR"):
        Folder.new("array", 5)
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_folder_contents_are_read_as_written(folder):
    """The plan, requests, signs of life, addresses, and so on have the last written values."""
    given = plan()
    folder.write_plan(given)
    assert folder.read_plan() == given
    assert (folder.requests(), folder.sign_of_life()) == (set(), None)
    folder.request("preempt-0")
    folder.request("cancel")
    folder.write_sign_of_life(7)
    assert (folder.requests(), folder.sign_of_life()) == ({"cancel", "preempt-0"}, b"7")
    assert (folder.address("0-0"), folder.troubles(0), folder.attempts(), folder.has_begun(0)) == (None, [], 0, False)
    folder.write_address("0-0", ADDRESS)
    folder.write_trouble(0, 1, "node 1 is blind")
    assert (folder.address("0-0"), folder.troubles(0)) == (ADDRESS, ["node 1 is blind"])
    assert (folder.address("1-0"), folder.troubles(1)) == (None, [])
    assert (folder.attempts(), folder.has_begun(0), folder.has_begun(1)) == (1, True, False)
    folder.mark_preempted(0)
    assert (folder.was_preempted(0), folder.was_preempted(1), folder.preemptions()) == (True, False, 1)
    assert folder.earlier() == ([], [])
    folder.note_earlier((["attempt 0 failed"], []))
    assert folder.earlier() == (["attempt 0 failed"], [])
    assert folder.answer_to("stacks-0") is None
    folder.answer("stacks-0", {3: "a stack"})
    assert folder.answer_to("stacks-0") == {3: "a stack"}


def write_result(folder):
    """Write the result of a task like submitit, and return a function that reads it."""
    files = folder.task_files("7", 0)
    Path(files.result_pickle).write_bytes(pickle.dumps(("success", TaskResult("0-0"))))
    return JobFollower("7", "f", Platform(device="cpu"), folder).new_result


def transcripts(count):
    return [Transcript(rank, printer=None) for rank in range(count)]


def unpickling_functions(folder):
    """Return every function that unpickles from a launch folder."""
    folder.write_plan(plan())
    folder.write_address("0-0", ADDRESS)
    folder.note_earlier(([], []))
    parcel = Parcel(packed(1, "result", "it")).put(folder.path / "parcel")
    return [folder.read_plan, lambda: folder.address("0-0"), folder.earlier, parcel.open]


def test_nothing_is_unpickled_from_a_folder_that_others_can_write(folder):
    """If other users can write to the folder, reading raises LaunchError, because they could have written a pickle."""
    for mode in (0o770, 0o702):
        for read in unpickling_functions(folder):
            folder.path.chmod(mode)
            with pytest.raises(LaunchError, match=rf"other users may write to .*my-job-.*/0 \(mode {mode:o}\)"):
                read()
            folder.path.chmod(0o700)
        read = write_result(folder)
        folder.submitit.chmod(mode)
        with pytest.raises(LaunchError, match=rf"other users may write to .*submitit \(mode {mode:o}\)"):
            read()
        folder.submitit.chmod(0o700)
        assert read() == TaskResult("0-0")


@pytest.mark.parametrize("replaced_by", ["another user's folder", "a link"])
def test_nothing_is_unpickled_from_a_replaced_folder(replaced_by, folder, monkeypatch, tmp_path):
    """Reading raises if another user's folder or a link has replaced the launch folder."""
    for read in unpickling_functions(folder):
        if replaced_by == "a link":
            folder.path.rename(tmp_path / "moved")
            folder.path.symlink_to(tmp_path / "moved")
            with pytest.raises(NotADirectoryError):
                read()
            folder.path.unlink()
            (tmp_path / "moved").rename(folder.path)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: 12345)
                with pytest.raises(LaunchError, match=r"my-job-.* belongs to user \d+, not to user 12345: \w+"):
                    read()


def test_several_threads_can_write_the_same_request(folder):
    """Four threads that write the same request at once get no errors."""
    threads = [threading.Thread(target=lambda: [folder.request("cancel") for _ in range(100)]) for _ in range(4)]
    errors = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert not errors
    assert folder.requests() == {"cancel"}


# -- messages between tasks


def queue(store, name="0-0/reports", secret=b"secret"):
    return StoreQueue(store, name, Signer(secret))


def test_messages_arrive_in_order_and_leave_the_store():
    """Two writers share a queue; each message is read once, and its key is removed."""
    store = dist.HashStore()
    reader, writers = queue(store), [queue(store), queue(store)]
    for number in range(6):
        writers[number % 2].send(number, "word", {"at": 1.0})
    assert [reader.receive() for _ in range(6)] == [(number, "word", {"at": 1.0}) for number in range(6)]
    assert store.num_keys() == 1  # the counter


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("kind", ["without a signature", "with another secret", "of another attempt", "sent before"])
def test_a_message_that_is_not_signed_for_its_place_is_refused(kind, tmp_path):
    """LaunchError is raised, and the message is not unpickled."""
    store = dist.HashStore()
    attack = Malice(tmp_path / "executed")
    if kind == "without a signature":
        store.set("0-0/reports/1", pickle.dumps((attack,)))
    elif kind == "with another secret":
        queue(store, secret=b"other").send(attack)
    else:
        name = "0-1/reports" if kind == "of another attempt" else "0-0/reports"
        queue(store, name).send("first")
        queue(store, name).send("second")
        store.set("0-0/reports/1", store.get(f"{name}/2"))
    with pytest.raises(LaunchError, match="is not signed with this process's key"):
        queue(store).receive()
    assert not (tmp_path / "executed").exists()


# -- rank 0's coordinator


def own_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


@pytest.fixture
def coordinator(folder, monkeypatch):
    """A coordinator of two ranks that have not arrived; its threads end with the test."""
    monkeypatch.setattr(_coordinate_job, "_LOOK_S", 0.01)
    with contextlib.ExitStack() as cleanup:
        made = JobCoordinator(folder, plan(lease_s=0.3, n_cpus=2, ipc_groups=None), 0, "0-0", cleanup)
        made.begin()
        yield made
        made._cancel()
        eventually(lambda: not own_threads(), "the end of the coordinator")


def test_a_full_disk_ends_neither_lease_nor_cancel(coordinator, folder, monkeypatch):
    """While the folder cannot be read, the coordinator goes on: later it sees the request, or that the lease is over."""

    def broken():
        failures.append(1)
        raise OSError(28, "No space left on device")

    failures = []
    with monkeypatch.context() as patch:
        patch.setattr(folder, "requests", broken)
        patch.setattr(folder, "sign_of_life", lambda: b"%d" % len(failures))
        eventually(lambda: len(failures) > 20, "several reads")
        assert not coordinator.is_forgotten
    folder.request("cancel")
    eventually(coordinator._cancelled.is_set, "the cancel")


def test_a_silent_submitter_ends_the_launch(coordinator):
    """Without a sign of life for the time of the lease, the launch is cancelled."""
    eventually(lambda: coordinator.is_forgotten and coordinator._cancelled.is_set(), "the end of the lease")
    eventually(lambda: coordinator.ending.cancelled, "the ending")


def test_a_start_after_a_lost_node_is_refused(folder):
    """An attempt after one that was not preempted is a failure; max_restarts allows as many as it says."""
    given = plan(ipc_groups=None, max_restarts=1)
    for attempt in ("0-0", "1-0"):
        with contextlib.ExitStack() as cleanup:
            assert JobCoordinator(folder, given, 0, attempt, cleanup).address.restart == int(attempt[0])
    with contextlib.ExitStack() as cleanup, pytest.raises(LaunchError, match="attempt 2 follows a lost node"):
        JobCoordinator(folder, given, 2, "2-0", cleanup)
    folder.mark_preempted(1)
    with contextlib.ExitStack() as cleanup:
        assert JobCoordinator(folder, given, 2, "2-0", cleanup).address.restart == 2


def test_log_records_of_the_coordinator_are_logged_by_the_submitter(folder, caplog):
    """A warning keeps its level and text."""
    with _coordinate_job._LogIntoFile(folder.log):
        logging.getLogger("parawrap.launch").warning("late: %s", "0")
    assert json.loads(folder.log.read_text()) == [logging.WARNING, "late: 0"]
    caplog.clear()
    JobFollower("7", "f", Platform(device="cpu"), folder).take_output()
    assert caplog.record_tuples == [("parawrap.launch", logging.WARNING, "late: 0")]


def test_output_is_taken_while_it_grows(folder):
    """Each byte of both files of a task goes into its rank's transcript once."""
    given = transcripts(2)
    follower = JobFollower("7", "f", Platform(device="cpu", n_cpus=2), folder)
    follower.write_output_to(given)
    files = folder.task_files("7", 1)
    for text in ("one\n", "two\n"):
        for path in (files.stdout, files.stderr):
            with path.open("a") as file:
                file.write(f"{path.suffix} {text}")
        follower.take_output()
        follower.take_output()
    assert given[0].text() == ""
    assert given[1].text() == ".out one\n.err one\n.out two\n.err two\n"


# -- the batch job


def slurm_platform(**fields):
    return Platform(**{"device": "slurm", "n_nodes": 2, "n_cpus": 4} | fields)


def test_the_script_has_one_task_per_rank(folder):
    """The preview's script requests the platform's resources, names the planned folder, and needs no Slurm."""
    text = _batch_job.script(slurm_platform(n_gpus=2, ram=1.5), folder)
    for line in ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4", "--gpus-per-node=2", "--mem=1536M"):
        assert f"#SBATCH {line}\n" in text
    assert str(folder.submitit) in text
    assert "parawrap-preview" not in text
    assert "--kill-on-bad-exit=1" in text


def test_parameters_of_the_user_override(folder):
    """Options of sbatch and parameters of submitit are passed on; parts of a script come around those of parawrap."""
    more = {"account": "lab", "slurm_signal_delay_s": 77, "mail_type": "BEGIN", "setup": ["echo before"], "time": 9}
    text = _batch_job.script(slurm_platform(timeout_min=3, slurm_additional_parameters=more), folder)
    for line in ("--account=lab", "--signal=USR2@77", "--mail-type=BEGIN", "--time=9"):
        assert f"#SBATCH {line}\n" in text
    assert text.index("echo before") < text.index("for PARAWRAP_ATTEMPT")


@pytest.mark.parametrize("name", ["nodes", "ntasks_per_node", "slurm_nodes", "use_srun"])
def test_parameters_that_contradict_the_platform_are_refused(name, folder):
    """PlatformError names the parameter."""
    with pytest.raises(PlatformError, match=name.removeprefix("slurm_")):
        _batch_job.script(slurm_platform(slurm_additional_parameters={name: 1}), folder)


def run_loop(folder, platform, codes):
    """Run the loop of a script with tasks that exit with these codes. Return its exit code and the attempts."""
    parameters = _batch_job._parameters(platform, folder)
    lines = ["end_with() { return $1; }", f"codes=({' '.join(map(str, codes))})", *parameters["setup"]]
    task = ["echo $PARAWRAP_ATTEMPT", "end_with ${codes[$PARAWRAP_ATTEMPT]}"]
    script = "\n".join([*lines, *task, *parameters["teardown"]])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.split()


def test_the_script_runs_the_tasks_again(folder):
    """The loop ends at a success, after max_restarts, or once the launch is over."""
    assert run_loop(folder, slurm_platform(), [1]) == (1, ["0"])
    assert run_loop(folder, slurm_platform(max_restarts=2), [1, 0, 1]) == (0, ["0", "1"])
    assert run_loop(folder, slurm_platform(max_restarts=1), [3, 4]) == (4, ["0", "1"])
    folder.mark_over()
    assert run_loop(folder, slurm_platform(max_restarts=2), [5, 0, 0]) == (5, ["0"])


def test_a_job_is_submitted_from_a_job_without_its_variables(folder, tmp_path, monkeypatch):
    """The command sbatch does not see the variables of the surrounding job, and this process keeps them."""
    for name, line in {
        "sbatch": f"env > {tmp_path}/seen; echo Submitted batch job 7",
        "srun": "",
        "scontrol": "",
        "scancel": "",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "here")
    watched, seen = threading.Event(), set()

    def watch():
        while not watched.wait(0.001):
            seen.add(os.environ.get("SLURM_JOB_ID"))

    thread = threading.Thread(target=watch)
    thread.start()
    assert _batch_job.submit(slurm_platform(), [folder]) == ["7"]
    watched.set()
    thread.join()
    assert seen == {"here"}
    names = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert {name for name in names if name.startswith("SLURM_")} == {"SLURM_CONF"}


def test_submitit_does_not_run_in_a_folder_that_others_can_write(folder):
    """The job exits before submitit unpickles files from such a folder."""
    command = [*shlex.split(_batch_job._guarded_python()), "-c", "print('ran')", str(folder.submitit / "any")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "ran\n"
    folder.submitit.chmod(0o777)
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"other users may write to {folder.submitit}\n"


def test_signals_stay_pending_until_the_task_handles_them(folder):
    """Slurm's signals are blocked when submitit starts."""
    show = "import signal; print(*sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))"
    command = [*shlex.split(_batch_job._guarded_python()), "-c", show, str(folder.submitit)]
    blocked = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {str(int(signal.SIGUSR2)), str(int(signal.SIGTERM))} <= set(blocked)
