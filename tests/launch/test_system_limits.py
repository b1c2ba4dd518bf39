"""Launches with few or very many open descriptors return results or name the limit and its value."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, RankDiedError, current_rank, wrapper
from tests.helpers.processes import notes_of, ranks, run_script

SCRIPT = """
import json, os, resource
import torch
from parawrap import Platform, current_rank, wrapper

SIZE = 1 << 18

@wrapper(Platform(device="cpu", n_cpus=2, ipc_protocol="file", verbose=False, grace_s=1))
def make():
    return torch.full((SIZE,), float(current_rank().global_rank))

def outcome():
    try:
        return [float(each.sum()) / SIZE for each in make()]
    except Exception as error:
        return "\\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])

outcomes = [outcome()]  # starts the warm process and runs late imports
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
for free in (*range(1, 24, 4), 100):
    files = []
    try:
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for file in files[-free:]:
        os.close(file)
    outcomes.append(outcome())
    for file in files[:-free]:
        os.close(file)
print(json.dumps(outcomes))
"""


def test_parent_names_its_limit(tmp_path):
    """With any number of descriptors left, a launch returns all results, or raises an error with the limit."""
    first, *others, last = json.loads(run_script(tmp_path, SCRIPT))
    assert first == last == [0.0, 1.0]
    failed = [outcome for outcome in others if outcome != first]
    assert failed
    for error in failed:
        assert "returned nothing" not in error
        assert "this process may open 200 files (RLIMIT_NOFILE" in error


def test_rank_at_limit_reports():
    """The result arrives, or the error names the limit; it never says "returned nothing"."""

    def use_all_descriptors():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        return torch.ones(1 << 18)

    launch = wrapper(ranks(1))(use_all_descriptors).submit()
    try:
        assert launch.results()[0].sum() == 1 << 18
    except (LaunchError, OSError) as error:
        outcome = f"{error!r}\n{notes_of(error)}"
    assert launch.state == "finished" or "may open 150 files (RLIMIT_NOFILE" in outcome


def test_open_files_are_no_limit(tmp_path):
    """With more than 1,024 open descriptors, launches run, and ranks clean up."""

    def fails():
        dist.barrier()
        if current_rank().global_rank == 1:
            os._exit(3)
        try:
            time.sleep(600)
        finally:
            (tmp_path / "cleaned").touch()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(Path(os.devnull).open())
        with pytest.raises(RankDiedError, match="rank 1 of 2 exited with code 3"):
            wrapper(ranks())(fails)()
    assert (tmp_path / "cleaned").exists()
