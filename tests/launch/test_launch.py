"""The handle of a launch: states, results, output, cancel, and ``upon_finish``."""

from __future__ import annotations

import ctypes
import os

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchCancelledError, LaunchError, current_rank, wrapper
from parawrap.launch import Job, Launch
from parawrap.launch.run import Run, RunOutput
from tests.helpers.processes import is_gone, pids_in, ranks, running_script
from tests.helpers.scripts import read_script
from tests.helpers.waiting import PATIENCE_S, eventually


def test_handle_follows_the_launch(tmp_path):
    """`submit` does not wait; `state`, `done`, `logs`, and `results` show how far the launch is."""

    def waits(go):
        print("in rank", current_rank().global_rank, flush=True)
        eventually(go.exists, "go")
        return current_rank().global_rank

    launch = wrapper(ranks())(waits).submit(tmp_path / "go")
    assert (launch.state, launch.done()) in (("pending", False), ("running", False))
    eventually(
        lambda: [launch.logs(rank) for rank in (0, 1)] == ["in rank 0\n", "in rank 1\n"],
        "both lines",
    )
    says = (
        r"still run after 0\.01 seconds, and they continue: call results\(\) again, or cancel\(\)"
    )
    with pytest.raises(TimeoutError, match=says):
        launch.results(timeout=0.01)
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (0, 1)
    assert launch.results() is launch.results()
    launch.cancel()  # too late
    assert (launch.state, launch.done(), launch.logs(1)) == ("finished", True, "in rank 1\n")
    with pytest.raises(IndexError, match="rank=2: there are the ranks 0 to 1"):
        launch.logs(2)


def test_state_of_a_launch_that_fails_meanwhile():
    class FailingRun(Run):
        def is_done(self):
            self.end(LaunchError("at this moment"))
            return super().is_done()

    launch = Launch(FailingRun(Job(ranks(1), len), RunOutput()))
    assert launch.state == "failed"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_arguments_are_those_at_submit(size):
    """The caller may change a tensor once `submit` has returned."""
    tensor = torch.ones(size)
    launch = wrapper(ranks(1))(lambda given: given.sum().item()).submit(tensor)
    tensor.zero_()
    assert launch.results(PATIENCE_S) == (size,)


# -- cancel


def test_cancel_waits_for_the_ranks(tmp_path):
    """`cancel` waits for the end of ranks that wait in a collective or hold the GIL."""

    def waits(folder):
        (folder / f"{os.getpid()}.pid").touch()
        if current_rank().global_rank == 0:
            dist.all_reduce(torch.ones(1))
        ctypes.PyDLL(None).sleep(600)

    launch = wrapper(ranks(grace_s=0.5))(waits).submit(tmp_path)
    pids = pids_in(tmp_path, 2)
    launch.cancel()
    assert all(map(is_gone, pids))
    launch.cancel()
    assert (launch.state, launch.done()) == ("cancelled", True)
    with pytest.raises(LaunchCancelledError, match="waits was cancelled"):
        launch.results()


def test_upon_finish_may_use_its_launch(tmp_path, caplog):
    """`upon_finish` can read the results of its launch, cancel it without effect, and start another
    launch.

    Its error is logged.
    """
    calls = []

    def finish():
        launch.cancel()
        calls.append((launch.results(), wrapper(ranks(1))(lambda: 2)()))
        raise LookupError("in finish")

    launch = wrapper(ranks(1, upon_finish=finish))(lambda go: eventually(go.exists, "go")).submit(
        tmp_path / "go"
    )
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == launch.results() == (True,)
    assert (calls, launch.state) == ([((True,), (2,))], "finished")
    assert "LookupError: in finish" in caplog.text


# -- two Ctrl-C during the start of a launch


def processes_with_mark(mark):
    found = psutil.process_iter(["environ"])
    return [
        each for each in found if (each.info["environ"] or {}).get("PARAWRAP_TEST_MARK") == mark
    ]


def test_two_interrupts_leave_nothing(tmp_path):
    """A script can catch two interrupts at any moment of a start and launch again, or end, although
    it keeps the exceptions. No process is left.
    """
    rounds = int(os.environ.get("PARAWRAP_CHAOS", "8"))
    with running_script(tmp_path, read_script("two_interrupts"), tmp_path, rounds) as script:
        output, _ = script.communicate(PATIENCE_S)
        assert [line for line in output.splitlines() if line == "1 1"] == ["1 1"] * (1 + rounds), (
            output
        )
        assert (
            "\nKeyboardInterrupt" in output
        )  # Python may write more if the second one comes while it exits
        eventually(lambda: not processes_with_mark(str(tmp_path)), "the end of all processes")
