"""`Platform(trace=...)`: the timeline of a launch."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from parawrap import LaunchError, RankDiedError, current_rank, wrapper
from parawrap.displays import read_timeline
from tests.helpers.processes import ranks


def error_of(path, track):
    """Return the error of the span of a track's run."""
    (found,) = (
        span.details.get("error") for span in read_timeline(path).spans if (span.track, span.name) == (track, "run")
    )
    return found


def test_failure_is_in_its_run(tmp_path):
    """The run of the rank that raised has the exception; the run of a rank that dies has its exit code."""

    def train(dies):
        dist.barrier()  # the launch ends the other rank, which must have begun its run
        if current_rank().global_rank == 1:
            os._exit(3) if dies else [].pop()
        dist.barrier()

    launchable = wrapper(ranks(trace=tmp_path / "t.json"))(train)
    with pytest.raises(IndexError):
        launchable(dies=False)
    assert error_of(tmp_path / "t.json", 2) == "IndexError: pop from empty list"
    with pytest.raises(RankDiedError):
        launchable(dies=True)
    assert error_of(tmp_path / "t.json", 2) == "exited with code 3 and returned nothing"


def test_missing_folder_is_refused(tmp_path):
    """LaunchError names the folder, and no rank runs."""
    with pytest.raises(LaunchError, match=r"trace='.*t\.json': the folder of '.*t\.json' does not exist\. Create '.*gone'"):
        wrapper(ranks(trace=tmp_path / "gone" / "t.json"))((tmp_path / "ran").touch)()
    assert list(tmp_path.iterdir()) == []


def test_lost_trace_loses_no_result(tmp_path, caplog):
    """If the folder is removed while the ranks run, the error is logged."""
    folder = tmp_path / "folder"
    folder.mkdir()
    assert wrapper(ranks(1, trace=folder / "t.json"))(folder.rmdir)() == (None,)
    assert "the trace of" in caplog.text
