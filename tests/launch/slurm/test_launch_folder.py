"""The private folder of a Slurm launch."""

from __future__ import annotations

import os
import stat

import pytest

from parawrap.errors import LaunchError
from parawrap.launch.slurm import launch_folder
from parawrap.launch.slurm.launch_folder import Folder


def test_the_folder_is_private(tmp_path, monkeypatch):
    """The folder of a launch and the folder of all launches are private, whatever the umask. The
    files of an array stay until its last launch is removed.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PARAWRAP_LAUNCH_DIR", raising=False)
    before = os.umask(0o002)
    try:
        (other,), (first, second) = Folder.new("my job", 1), Folder.new("array", 2)
    finally:
        os.umask(before)
    for path in first.root, first.path.parent, other.path.parent:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    first.remove()
    assert second.submitit.is_dir()
    second.remove()
    assert list(first.root.iterdir()) == [other.path.parent]


def test_starts_without_a_mark_are_failures(tmp_path, monkeypatch):
    """A failure after a preemption counts. A restart that a user or Slurm wanted does not."""
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path))
    (folder,) = Folder.new("job", 1)
    folder.mark("preempted", 1)
    assert [folder.failures(start, "7") for start in range(4)] == [0, 1, 1, 2]
    folder.mark("failed", 1)
    assert folder.failures(3, "7") == 3
    ends = [
        "DUE TO JOB REQUEUE ***",
        "DUE TO PREEMPTION ***",
        "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    ]
    lines = [
        f"{launch_folder.START_LINE.format(start)}\nJOB 7 CANCELLED AT 2026 {end}\n"
        for start, end in enumerate(ends)
    ]
    folder.log("7").write_text("".join(lines))
    assert [folder.failures(start, "7") for start in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("mode", [0o770, 0o1777])
def test_roots_that_others_write_are_refused(mode, tmp_path, monkeypatch):
    """Ranks would run what another user puts there. The cure in the message works."""
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(mode)
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(root))
    with pytest.raises(LaunchError, match=f"Run 'chmod go-w {root}'"):
        Folder.new("job", 1)
    root.chmod(mode & ~0o022)
    Folder.new("job", 1)


def test_a_root_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(LaunchError, match="belongs to another user"):
        Folder.new("job", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["100%", "back\\slash", "line\nbreak"])
def test_paths_changed_by_sbatch_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / name))
    with pytest.raises(LaunchError, match="Set PARAWRAP_LAUNCH_DIR"):
        Folder.planned("job")
