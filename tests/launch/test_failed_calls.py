"""Failed calls of ranks that stay: the error arrives, and the ranks answer the next call with
working process groups.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    RankDiedError,
    UnsendableError,
    current_rank,
    functional,
)
from tests.helpers.processes import assert_gone, assert_nothing_left, notes_of, ranks
from tests.helpers.ranks import all_sum, my_rank
from tests.helpers.waiting import PATIENCE_S, eventually

STATE = {}


def block(how):
    """Block forever if only some ranks call it, and leave the file ``blocked``."""
    work = dist.all_reduce(torch.ones(3), async_op=True) if how == "all_reduce" else None
    while how == "ignore":
        try:
            Path("blocked").touch()
            time.sleep(0.1)
        except BaseException:
            continue
    Path("blocked").touch()
    if work is not None:
        work.wait()
    elif how == "recv":
        dist.recv(torch.ones(3), src=(my_rank() + 1) % dist.get_world_size())
    elif how == "event":
        threading.Event().wait()
    elif how == "exit":
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.exit(130)
    while how == "compute":
        pass


def keep_group():
    STATE["group"] = dist.group.WORLD


@pytest.fixture(scope="module")
def shared_world():
    with ranks(seed=0).open() as opened:
        yield opened


@pytest.fixture
def world(shared_world):
    """Two ranks, shared unless a failing test has ended them.

    They answer after the test, from the same processes.
    """
    with (
        ranks(seed=0).open()
        if shared_world.state == "ended"
        else nullcontext(shared_world) as opened
    ):
        opened(keep_group)
        before = opened(os.getpid)
        yield opened
        assert opened.submit(os.getpid).results(PATIENCE_S) == before
        assert opened(all_sum) == (2.0, 2.0)


def fail_beside(failing, how):
    """Raise in one rank while the other one is blocked, or about to block."""
    if my_rank() == failing:
        eventually(Path("blocked").exists, "the block")
        Path("blocked").unlink()
        raise KeyError("weight", 7)  # the user's line
    block(how)


@pytest.mark.parametrize(
    ("how", "failing"), [("all_reduce", 0), ("recv", 1), ("event", 0), ("exit", 0), ("compute", 1)]
)
def test_an_error_beside_a_blocked_rank(world, how, failing):
    """The exception has a note with its rank and traceback.

    The process groups are new after a broken collective.
    """
    with pytest.raises(KeyError) as caught:
        world(fail_beside, failing, how)
    assert caught.value.args == ("weight", 7)
    assert f"raised in rank {failing} of 2 (node 0, {os.uname().nodename})" in notes_of(
        caught.value
    )
    assert 'raise KeyError("weight", 7)  # the user\'s line' in notes_of(caught.value)
    assert world(all_sum) == (2.0, 2.0)
    if how != "recv":  # the rank may not have waited yet
        assert world(lambda: STATE["group"] is dist.group.WORLD) == (how != "all_reduce",) * 2


def use(value):
    return value


@pytest.mark.stress
def test_calls_leave_nothing_behind(world):
    """A hundred calls of each kind and some failures leave nothing in any process."""
    tensor = torch.ones(1 << 16)

    def calls(count):
        for number in range(count):
            world(all_sum, float(number))
            world[number % 2](use, number)
            world(use, {"large": tensor, "text": "x" * 1000})
            if number % 100 == 0:
                with pytest.raises(KeyError):
                    world(fail_beside, number % 2, "all_reduce")
                world.submit(use, tensor).results()

    assert_nothing_left([os.getpid(), *world(os.getpid)], lambda: calls(11), lambda: calls(101))


def prepare():
    torch.manual_seed(0)
    STATE["model"] = DistributedDataParallel(torch.nn.Linear(4, 1))


def wrap_again():
    """Do what the error says."""
    STATE["model"] = functional.to(functional.unwrap(STATE["model"]))
    functional.sync(STATE["model"])


def train():
    model = STATE["model"]
    model.zero_grad()
    model(torch.ones(2, 4) * (1 + my_rank())).sum().backward()
    return model.module.weight.grad.tolist()


def test_a_model_after_a_failed_call(world):
    """A model stays usable if no rank was blocked.

    One of old process groups raises an error that says what to do.
    """

    def fail_everywhere():
        dist.barrier()
        raise LookupError(f"in rank {my_rank()}")

    def fail_alone():
        raise LookupError("alone")

    world(prepare)
    before = world(train)
    with pytest.raises(LookupError, match="in rank"):
        world(fail_everywhere)
    with pytest.raises(LookupError, match="alone") as caught:
        world[1](fail_alone)
    assert "raised in rank 1 of 2" in notes_of(caught.value)
    assert world(train) == before
    with pytest.raises(KeyError):
        world(fail_beside, 0, "all_reduce")
    with pytest.raises(LaunchError) as caught:
        world(train)
    assert str(caught.value).startswith(
        "the process groups of these ranks were made again after a failed call"
    )
    assert (
        "Connection"
        not in "".join(traceback.format_exception(caught.value)).partition("\nraised in rank")[0]
    )
    # The error of the connection is below
    assert "Connection closed by peer" in notes_of(caught.value)
    world(wrap_again)
    assert world(train) == before == ([[3.0] * 4],) * 2


APART = "The ranks may be one step apart now. Call functional.sync(model, optimizer) in all ranks"


def step_and_fail(failing, how):
    """Make a step in one rank, which then fails; the others are interrupted in another step."""
    STATE["model"].weight.data.fill_(my_rank())
    fail_beside(failing, how)


@pytest.mark.parametrize("how", ["compute", "all_reduce"])
def test_first_error_of_a_step_names_cure(world, how):
    """The note that names the cure comes with the first error, and again once a call has succeeded.
    The cure works, also after a broken collective.
    """

    def make():
        STATE["model"] = torch.nn.Linear(1, 1)
        STATE["optimizer"] = torch.optim.SGD(STATE["model"].parameters())

    def agree():
        functional.sync(STATE["model"], STATE["optimizer"])
        return STATE["model"].weight.item()

    world(make)
    with pytest.raises(KeyError) as caught:
        world(step_and_fail, 1, how)
    assert notes_of(caught.value).count(APART) == 1
    wraps = "make models in DistributedDataParallel again" in notes_of(caught.value)
    assert wraps == (how == "all_reduce")
    with pytest.raises(KeyError) as caught:
        world(step_and_fail, 1, how)
    assert APART not in notes_of(caught.value)
    assert world(agree) == (0.0, 0.0)
    with pytest.raises(KeyError) as caught:
        world(step_and_fail, 1, how)
    assert APART in notes_of(caught.value)


def test_ranks_without_groups_cannot_agree():
    """Without process groups, no call keeps ranks equal: the error has no note."""
    with ranks(ipc_groups=None).open() as opened:
        with pytest.raises(KeyError) as caught:
            opened(fail_beside, 1, "compute")
        assert APART not in notes_of(caught.value)


def test_errors_that_keep_the_ranks_in_step(world):
    """A call of one rank has no note, and neither has one whose arguments do not arrive.

    A cancelled call has one.
    """

    def fail():
        raise KeyError("weight")

    class Unreadable:
        def __reduce__(self):
            return int, ("no number",)

    for call, error in [
        (lambda: world[1](fail), KeyError),
        (lambda: world(use, threading.Lock()), UnsendableError),
        (lambda: world(use, Unreadable()), ValueError),
    ]:
        with pytest.raises(error) as caught:
            call()
        assert APART not in notes_of(caught.value)
    launch = world.submit(block, "event")
    eventually(Path("blocked").exists, "the call")
    Path("blocked").unlink()
    launch.cancel()
    for _ in range(2):
        with pytest.raises(LaunchCancelledError) as caught:
            launch.results()
        assert notes_of(caught.value).count(APART) == 1


class FailsInRanks:
    """An argument that ranks cannot unpickle. They try it once the next call is being pickled."""

    def __init__(self, pickling):
        self.pickling = pickling

    def __reduce__(self):
        return _fail_in_rank, (self.pickling,)


def _fail_in_rank(pickling):
    eventually(pickling.exists, "the next call")
    raise ZeroDivisionError


class WaitsForLaunch:
    """An argument that is pickled once a launch has ended."""

    def __init__(self, launch, pickling):
        self.launch = launch
        self.pickling = pickling

    def __reduce__(self):
        self.pickling.touch()
        eventually(self.launch.done, "the end of the call before")
        return int, ()


CALLS = {
    "call": lambda opened, *given: opened(*given),
    "submit": lambda opened, *given: opened.submit(*given).results(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_global_stays_old_after_a_failed_call(call, tmp_path, monkeypatch):
    """A call that is pickled while the one with its globals fails is refused. The settings that
    it has for later calls arrive.
    """
    script = {"__name__": "a_script", "x": 1}
    exec("def read(_):\n    return x", script)
    pickling = tmp_path / "pickling"
    with ranks().open() as opened:
        assert opened(script["read"], 0) == (1, 1)
        script["x"] = 2
        failing = opened.submit(script["read"], FailsInRanks(pickling))
        monkeypatch.setenv("PARAWRAP_LATE", "yes")
        waiting = WaitsForLaunch(failing, pickling)
        with pytest.raises(LaunchError, match="a call before read could not bring its function"):
            call(opened, script["read"], waiting)
        with pytest.raises(ZeroDivisionError):
            failing.results()
        assert opened(script["read"], 0) == (2, 2)
        assert opened(os.environ.get, "PARAWRAP_LATE") == ("yes", "yes")


# -- no operation of a failed call meets one of a later call


def begin_and_fail():
    if my_rank() == 0:
        STATE["work"] = dist.all_reduce(torch.ones(3), async_op=True)
    raise LookupError


def test_operations_of_a_failed_call(world):
    """A collective that a single rank has begun is not mixed up with those of the next call."""
    with pytest.raises(LookupError):
        world(begin_and_fail)
    assert world(all_sum, 5.0) == (10.0, 10.0)


def test_a_rank_that_does_not_stop():
    """All ranks end if one does not stop. The first error has a note, and later calls say why the
    ranks have ended.
    """
    with ranks(grace_s=0.5).open() as opened:
        pids = opened(os.getpid)
        # Imports this module, so that the next call is interrupted in the function
        opened(keep_group)
        with pytest.raises(KeyError) as caught:
            opened(fail_beside, 0, "ignore")
        assert "the ranks were ended: rank(s) 1 did not stop within grace_s=0.5" in notes_of(
            caught.value
        )
        assert_gone(pids)
        with pytest.raises(LaunchError, match=r"cannot call all_sum.*rank\(s\) 1 did not stop"):
            opened(all_sum)


def test_a_wait_in_a_group_of_the_function():
    """The error arrives, and the ranks end, since nothing else ends a wait in `new_group`."""

    def fail():
        group = dist.new_group([0, 1])
        if my_rank() == 1:
            dist.barrier(group)
            time.sleep(0.2)  # rank 0 waits in the next barrier
            raise KeyError("weight")
        dist.barrier(group)
        dist.barrier(group)

    with ranks(grace_s=0.5).open() as opened:
        pids = opened(os.getpid)
        with pytest.raises(KeyError, match="weight"):
            opened(fail)
        assert_gone(pids)


def test_preemption_of_ranks_that_stay(world):
    """`preempt` has no effect, and `requeue` raises, because such ranks cannot restart."""
    launch = world.submit(lambda: current_rank().should_checkpoint())
    launch.preempt()
    assert launch.results(PATIENCE_S) == (False, False)
    with pytest.raises(
        LaunchError, match=r"requeue\(\) was called in ranks that stay, which cannot restart"
    ):
        world(lambda: current_rank().requeue())


def test_deaths_show_the_output_of_the_call():
    """Output of earlier calls, such as the traceback of an error, is no clue to a death."""

    def fail():
        raise KeyError("earlier")

    def die(says):
        if says:
            print("last words", flush=True)
        os._exit(3)

    for says in True, False:
        with ranks(1).open() as opened:
            with pytest.raises(KeyError):
                opened(fail)
            with pytest.raises(RankDiedError) as caught:
                opened(die, says)
            assert ("last words" in str(notes_of(caught.value))) == says
            assert says or "earlier" not in str(notes_of(caught.value))
