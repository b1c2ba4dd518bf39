"""What a hang looks like: which ranks `hang_timeout_s` ends, what Ctrl-C shows, and which failure
is reported.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchTimeoutError, RankDiedError, current_rank, wrapper
from tests.helpers.processes import failure_of, ranks
from tests.helpers.waiting import PATIENCE_S, eventually

LIMIT_S = 3.0


def spin(until):
    while time.monotonic() < until:
        sum(range(1000))


def spin_beside_a_collective():
    if current_rank().global_rank == 1:
        spin(float("inf"))
    dist.barrier()


def print_beside_a_collective():
    if current_rank().global_rank == 1:
        for _ in range(16):
            time.sleep(LIMIT_S / 12)
            print("computes", flush=True)
    dist.barrier()
    return "done"


def test_limits_name_the_line_of_each_rank(monkeypatch):
    """A time limit shows where the ranks are, also if it comes before the first look at them."""
    monkeypatch.setattr("parawrap.processes.pool._POLL_S", 60.0)

    def stand_still():
        time.sleep(PATIENCE_S)

    wrapper(ranks())(int)()  # the first ranks of a process may take seconds to start
    with (
        ranks(timeout_min=0.1).open() as opened,
        pytest.raises(LaunchTimeoutError, match=r"rank 0 at test_hangs\.py:\d+ in stand_still"),
    ):
        opened(stand_still)


def test_computing_beside_waits_is_a_hang():
    """The error names the line of each rank, and has their stacks."""
    with ranks(hang_timeout_s=LIMIT_S).open() as opened:
        opened(spin, 0.0)  # imports this module
        with pytest.raises(LaunchTimeoutError) as caught:
            opened(spin_beside_a_collective)
    error = caught.value
    first, _, _ = str(error).partition("\n")
    assert "hang_timeout_s=3 seconds: no rank wrote output, and ranks waited for others" in first
    assert "in spin_beside_a_collective: dist.barrier()" in first
    assert "in spin: " in first
    assert sorted(error.stacks) == [0, 1]


def test_a_rank_that_prints_makes_progress():
    """Other ranks may wait longer than the limit for a rank that prints."""
    with ranks(hang_timeout_s=LIMIT_S).open() as opened:
        assert opened(print_beside_a_collective) == ("done", "done")


def test_computing_alone_is_progress():
    function = wrapper(ranks(hang_timeout_s=1.0, ipc_groups=None))(
        lambda: spin(time.monotonic() + 2)
    )
    assert function() == (None, None)


def test_ctrl_c_shows_where_ranks_are(caplog, tmp_path):
    def compute_loss():
        (tmp_path / str(current_rank().global_rank)).touch()
        time.sleep(PATIENCE_S)

    def interrupt():
        eventually(lambda: len([*tmp_path.iterdir()]) == 2, "the calls")
        time.sleep(0.2)  # they are in `sleep` then
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wrapper(ranks())(compute_loss)()
    thread.join()
    place = r"test_hangs\.py:\d+ in compute_loss: time\.sleep\(PATIENCE_S\)"
    shown = rf"compute_loss was interrupted: rank 0 at {place}; rank 1 at {place}"
    assert re.search(shown, caplog.text)


# -- which failure is reported


def fail_alone(how):
    if current_rank().global_rank == 0:
        dist.barrier()
        if how == "async":
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        elif how == "backward":
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
        else:
            dist.barrier()
    else:
        dist.barrier()
        sys.exit(3)


@pytest.mark.parametrize("how", ["collective", "async", "backward"])
def test_lost_connections_are_no_failures(how):
    """The rank that has left the collective is reported, and not the one that noticed it."""
    error = failure_of(fail_alone, how)
    assert type(error) is RankDiedError
    assert error.rank == 1
    assert error.exit_code == 3


def raise_in(place):
    def request():
        raise RuntimeError("request failed: connection reset by peer")

    dist.barrier()
    if current_rank().global_rank == 1:
        return time.sleep(0.2)
    if place == "thread":
        errors = []

        def run():
            try:
                request()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        raise errors[0]
    return request()


@pytest.mark.parametrize("place", ["function", "thread"])
def test_errors_of_users_stay_unchanged(place):
    """An error of the user is raised as it is, also if its text mentions a connection, and other
    ranks have returned.
    """
    error = failure_of(raise_in, place)
    assert repr(error) == "RuntimeError('request failed: connection reset by peer')"
