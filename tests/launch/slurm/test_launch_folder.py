"""The folder of a Slurm launch: private, and read only while other users cannot write into it."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.messages._first_rank_failure import Parcel
from parawrap.launch.messages._pickle_values import packed
from parawrap.launch.rank._process_groups import StoreAddress
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.slurm._batch_job import log_ends
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.launch.slurm._task import TaskResult

ADDRESS = Address(("10.0.0.1", "127.0.0.1"), 4321, 2, StoreAddress("10.0.0.1", 1234))


def plan():
    return Plan("f", Platform(device="cpu"), Surroundings.here().without_environ(), b"t", 1.0)


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
    """Return every function that unpickles from a launch folder."""
    folder.write_plan(plan())
    folder.write_address("0-0", ADDRESS)
    folder.note_earlier(([], []))
    parcel = Parcel(packed(1, "result", "it")).put(folder.path / "parcel")
    return [folder.read_plan, lambda: folder.address("0-0"), folder.earlier, parcel.open]


@pytest.mark.parametrize("mode", [0o770, 0o702], ids="{:o}".format)
def test_pickles_of_an_open_folder(folder, mode):
    """They are refused, because other users could have written them."""
    for read in reads_of(folder):
        folder.path.chmod(mode)
        with pytest.raises(LaunchError, match=rf"other users may write to .*my-job-.*/0 \(mode {mode:o}\)"):
            read()
        folder.path.chmod(0o700)
    Path(folder.task_files("7", 0).result_pickle).write_bytes(pickle.dumps(("success", TaskResult("0-0"))))
    follower = JobFollower("7", "f", Platform(device="cpu"), folder)
    folder.submitit.chmod(mode)
    with pytest.raises(LaunchError, match=rf"other users may write to .*submitit \(mode {mode:o}\)"):
        follower.new_result()
    folder.submitit.chmod(0o700)
    assert follower.new_result() == TaskResult("0-0")
