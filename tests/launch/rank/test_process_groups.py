"""The process groups of ranks."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import current_rank, wrapper
from tests.helpers.processes import failure_of, notes_of, ranks


def sum_over(group, value):
    total = torch.tensor(float(value))
    dist.all_reduce(total, group=group)
    return total.item()


@pytest.mark.parametrize(
    ("groups", "sums"),
    [([[0, 1], [2, 3]], [1, 1, 5, 5]), ([[3, 1, 0]], [4, 4, None, 4])],
)
def test_ipc_groups_are_made(groups, sums):
    """The group of a rank in no list is None."""

    def total():
        rank = current_rank()
        return rank.group and sum_over(rank.group, rank.global_rank), sum_over(None, 1)

    assert wrapper(ranks(4, ipc_groups=groups))(total)() == tuple((value, 4.0) for value in sums)


@pytest.mark.parametrize("groups", [[], [[0, 1]]], ids=["world", "ipc_groups"])
def test_ipc_timeout_min_limits_a_wait(groups):
    """The error of the collective names the option."""

    def reduces():
        if current_rank().global_rank == 0:
            sum_over(current_rank().group, 1)
        else:
            time.sleep(600)

    error, _ = failure_of(reduces, platform=ranks(ipc_groups=groups, ipc_timeout_min=0.01))
    assert "600ms" in str(error)
    assert "Platform(ipc_timeout_min=...)" in notes_of(error)


def test_no_rank_leaves_before_all_join(tmp_path):
    """On busy cores, a rank may connect seconds later than another one. It would lose a rank that had returned."""
    pid_file = tmp_path / "pid"

    class JoinsLate:
        def __reduce__(self):
            def patched():  # when the rank unpickles its argument, before it joins
                join = dist.init_process_group

                def late(*args, **options):
                    join(*args, **options)
                    if os.environ["RANK"] == "1":
                        time.sleep(2)  # longer than a returned rank stays
                        assert psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE

                dist.init_process_group = late

            return patched, ()

    def function(_):
        rank = current_rank().global_rank
        if rank == 0:
            pid_file.write_text(str(os.getpid()))
        return rank

    assert wrapper(ranks())(function)(JoinsLate()) == (0, 1)
