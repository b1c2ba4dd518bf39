"""`Platform(trace=...)`: the timeline of a launch."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch.distributed as dist

from parawrap import LaunchError, Platform, RankDiedError, current_rank, wrapper
from parawrap.displays import read_timeline
from parawrap.launch.coordinator._launch_timeline import RankTimes, write_trace

PHASES = ["start", "meeting", "run", "teardown"]


def ranks(trace, **options):
    return Platform(device="cpu", n_cpus=2, verbose=False, trace=trace, **options)


def phases_of(timeline, track):
    """Return the names and errors of a track's spans in order."""
    spans = sorted((span for span in timeline.spans if span.track == track), key=lambda span: span.start)
    assert all(first.end <= second.start for first, second in pairwise(spans))
    return [(span.name, span.details.get("error")) for span in spans]


def test_each_rank_has_four_phases(tmp_path):
    """The timeline has a track for the launch and one per rank, and each rank's phases in order, without overlap."""
    path = tmp_path / "launch.json"
    wrapper(ranks(path))(lambda: None)()
    timeline = read_timeline(path)
    assert timeline.tracks == ["launch", "rank 0", "rank 1"]
    assert phases_of(timeline, 0) == [("prepare", None)]
    assert phases_of(timeline, 1) == phases_of(timeline, 2) == [(name, None) for name in PHASES]
    assert timeline.without_idle == [0]


def test_ranks_without_groups_have_no_meeting(tmp_path):
    """Without a process group, ranks meet nowhere."""
    wrapper(ranks(tmp_path / "t.json", ipc_groups=None))(lambda: None)()
    assert [name for name, _ in phases_of(read_timeline(tmp_path / "t.json"), 1)] == ["start", "run", "teardown"]


def test_a_trace_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    """``~`` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    wrapper(ranks("~/t.json", ipc_groups=None))(lambda: None)()
    assert len(read_timeline(tmp_path / "t.json").tracks) == 3


def test_the_failure_is_in_the_phase_of_the_rank_that_raised(tmp_path):
    """The run of the failing rank has the exception. The launch still writes the file, and raises."""

    def train():
        dist.barrier()  # the launch ends the other rank, which must have begun its run
        if current_rank().global_rank == 1:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        wrapper(ranks(tmp_path / "t.json"))(train)()
    timeline = read_timeline(tmp_path / "t.json")
    assert phases_of(timeline, 2) == [
        ("start", None),
        ("meeting", None),
        ("run", "ValueError: no data"),
        ("teardown", None),
    ]
    assert phases_of(timeline, 1) == [(name, None) for name in PHASES]


def test_a_rank_that_dies_has_a_failure(tmp_path):
    """A process that exits in the function has the failure in its run."""
    with pytest.raises(RankDiedError):
        wrapper(ranks(tmp_path / "t.json"))(lambda: os._exit(3))()
    timeline = read_timeline(tmp_path / "t.json")
    assert ("run", "exited with code 3 and returned nothing") in phases_of(timeline, 1) + phases_of(timeline, 2)


def test_restarts_are_on_the_same_tracks(tmp_path):
    """The phases of the second attempt have its number."""

    def train():
        if current_rank().restart == 0:
            raise ValueError("first")

    wrapper(ranks(tmp_path / "t.json", max_restarts=1))(train)()
    timeline = read_timeline(tmp_path / "t.json")
    assert timeline.tracks == ["launch", "rank 0", "rank 1"]
    for track in (1, 2):
        assert [name for name, _ in phases_of(timeline, track)][-4:] == [f"{name}, restart 1" for name in PHASES]


def test_each_launch_of_map_has_a_file(tmp_path):
    """`map` numbers the files, so that no launch replaces the file of another one."""
    assert len(list(wrapper(ranks(tmp_path / "t.html"))(abs).map([1, -2]))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-0.html", "t-1.html"]


def test_inline_writes_no_trace(tmp_path):
    """`inline` starts no rank."""
    wrapper(ranks(tmp_path / "t.json"))(lambda: None).inline()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused_before_a_rank_starts(tmp_path):
    """LaunchError names the folder. No rank runs, and nothing is created."""
    ran = tmp_path / "ran"
    with pytest.raises(LaunchError, match=r"trace='.*t\.json': the folder of '.*t\.json' does not exist\. Create '.*gone'"):
        wrapper(ranks(str(tmp_path / "gone" / "t.json")))(lambda: ran.touch())()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_loses_no_results(tmp_path, caplog):
    """If the folder is removed while the ranks run, the error is logged, and the results are returned."""
    folder = tmp_path / "folder"
    folder.mkdir()
    assert (
        list(wrapper(ranks(folder / "t.json", ipc_groups=None))(lambda: folder.exists() and folder.rmdir())()) is not None
    )
    assert "the trace of" in caplog.text


def test_hosts_are_named_if_there_are_several(tmp_path):
    """With ranks on two machines, each track has the name of its host."""
    began = {"start": 1.0, "run": 2.0, "teardown": 3.0, "end": 4.0}
    times = [RankTimes(rank, 0, host, began, None) for rank, host in enumerate(["a", "b"])]
    write_trace(tmp_path / "t.json", "train", 0.5, times)
    assert read_timeline(tmp_path / "t.json").tracks == ["launch", "rank 0 on a", "rank 1 on b"]


def test_clocks_that_disagree_give_no_negative_durations(tmp_path):
    """The clock of a rank's machine may lag behind the clock of this one."""
    began = {"start": 10.0, "meeting": 9.0, "run": 9.5, "teardown": 9.75, "end": 11.0}
    write_trace(tmp_path / "t.json", "train", 10.0, [RankTimes(0, 0, "a", began, None)])
    assert min(span.end - span.start for span in read_timeline(tmp_path / "t.json").spans) == 0


def test_a_launch_without_ranks_writes_nothing(tmp_path):
    """A launch that failed before its ranks were started has no timeline."""
    write_trace(tmp_path / "t.json", "train", 0.0, [])
    assert list(tmp_path.iterdir()) == []
