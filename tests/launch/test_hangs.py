"""What a hang looks like: which ranks `hang_timeout_s` ends, what Ctrl-C shows, and which failure
is reported.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchTimeoutError, RankDiedError, current_rank, wrapper
from tests.helpers.processes import failure_of, ranks, start_python
from tests.helpers.waiting import PATIENCE_S

LIMIT_S = 4.0


def spin(until):
    while time.monotonic() < until:
        sum(range(1000))


def spin_beside_a_collective(prints):
    if current_rank().global_rank == 1:
        for _ in range(8):
            spin(time.monotonic() + LIMIT_S / 4)
            if prints:
                print("computes", flush=True)
        if not prints:
            spin(float("inf"))
    dist.barrier()
    return "done"


def test_limits_name_the_line_of_each_rank(monkeypatch):
    """A time limit shows where the ranks are, also if it comes before the first look at them."""
    monkeypatch.setattr("parawrap.processes.pool._POLL_S", 60.0)

    def stand_still():
        time.sleep(PATIENCE_S)

    with (
        ranks(timeout_min=0.1).open() as opened,
        pytest.raises(LaunchTimeoutError, match=r"rank 0 at test_hangs\.py:\d+ in stand_still"),
    ):
        opened(stand_still)


def test_computing_beside_waits_is_a_hang():
    """The error names the line of each rank, and has their stacks."""
    error = failure_of(spin_beside_a_collective, False, platform=ranks(hang_timeout_s=LIMIT_S))
    assert type(error) is LaunchTimeoutError
    first, _, _ = str(error).partition("\n")
    assert "hang_timeout_s=4 seconds: no rank wrote output, and ranks waited for others" in first
    assert "in spin_beside_a_collective: dist.barrier()" in first
    assert "in spin: " in first
    assert sorted(error.stacks) == [0, 1]


def test_a_rank_that_prints_makes_progress():
    """Other ranks may wait twice as long as the limit for a rank that prints."""
    function = wrapper(ranks(hang_timeout_s=LIMIT_S))(spin_beside_a_collective)
    assert function(True) == ("done", "done")


def test_computing_alone_is_progress():
    function = wrapper(ranks(hang_timeout_s=1.0, ipc_groups=None))(
        lambda: spin(time.monotonic() + 3)
    )
    assert function() == (None, None)


INTERRUPTED = """
import time
from parawrap import Platform, wrapper
def compute_loss():
    print("up", flush=True)
    time.sleep(600)
wrapper(Platform(device="cpu", n_cpus=2))(compute_loss)()
"""


def test_ctrl_c_shows_where_ranks_are(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": tmp_path}
    with start_python(script, **options) as process:
        lines = []
        while sum("up" in line for line in lines) < 2:
            lines.append(process.stdout.readline())
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=PATIENCE_S)[0]
    place = "script.py:6 in compute_loss: time.sleep(600)"
    assert f"compute_loss was interrupted: rank 0 at {place}; rank 1 at {place}" in output
    assert "KeyboardInterrupt" in output


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
