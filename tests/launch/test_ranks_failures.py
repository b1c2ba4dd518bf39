"""Failures of ranks that stay: the ranks answer the next call, or they end, and later calls say why."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parawrap import LaunchCancelledError, LaunchError, LaunchTimeoutError, RankDiedError, current_rank
from tests.helpers.processes import SILENT_S, assert_gone, is_gone, notes_of, pids_in, ranks, running_scripts
from tests.helpers.waiting import PATIENCE_S, eventually

STATE = {}


def my_rank():
    return current_rank().global_rank


def all_sum(value=1.0):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def block(how):
    """Block forever if only some ranks call it."""
    if how == "all_reduce":
        dist.all_reduce(torch.ones(3))
    elif how == "barrier":
        dist.barrier()
    elif how == "recv":
        dist.recv(torch.ones(3), src=(my_rank() + 1) % dist.get_world_size())
    elif how == "gather_objects":
        dist.all_gather_object([None] * dist.get_world_size(), "object")
    elif how == "event":
        threading.Event().wait()
    elif how == "sleep":
        time.sleep(600)
    elif how == "compute":
        number = 0
        while True:
            number += 1
    else:
        ctypes.PyDLL(None).sleep(600)


def keep_group():
    STATE["group"] = dist.group.WORLD


def has_same_group():
    return STATE["group"] is dist.group.WORLD


@pytest.fixture(scope="module")
def worlds():
    """All ranks that `world` has opened: one world, unless a failing test ended it."""
    opened = [ranks(seed=0).open()]
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
def world(worlds):
    """Two shared ranks. They answer before and after the test, from the same processes."""
    if worlds[-1].state == "ended":
        worlds.append(ranks(seed=0).open())
    opened = worlds[-1]
    opened(keep_group)
    before = opened(os.getpid)
    yield opened
    assert opened(os.getpid) == before
    assert opened(all_sum) == (2.0, 2.0)


# -- exceptions


def fail_beside(failing, how):
    """Raise in one rank while all others are blocked."""
    if my_rank() == failing:
        raise KeyError("weight", 7)  # the user's line
    block(how)


@pytest.mark.parametrize("how", ["all_reduce", "barrier", "recv", "gather_objects", "event", "sleep", "compute"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_beside_a_blocked_rank(world, how, failing):
    """The exception arrives with a note that has its rank and traceback, and the next collective works."""
    with pytest.raises(KeyError) as caught:
        world(fail_beside, failing, how)
    assert caught.value.args == ("weight", 7)
    assert f"raised in rank {failing} of 2 (node 0, {os.uname().nodename})" in notes_of(caught.value)
    assert 'raise KeyError("weight", 7)  # the user\'s line' in notes_of(caught.value)
    assert "parawrap/launch" not in notes_of(caught.value)
    assert world(all_sum) == (2.0, 2.0)
    in_collective = how in ("all_reduce", "barrier", "recv", "gather_objects")
    assert world(has_same_group) == (not in_collective,) * 2


def fail_in_turn():
    if my_rank() == 1:
        raise LookupError("first")
    block("all_reduce" if my_rank() == 0 else "sleep")


def test_an_exception_beside_two_blocked_ranks():
    """One of three ranks raises, one waits in a collective, and one sleeps."""
    with ranks(3).open() as opened:
        before = opened(os.getpid)
        for _ in range(3):
            with pytest.raises(LookupError, match="first") as caught:
                opened(fail_in_turn)
            assert "raised in rank 1 of 3" in notes_of(caught.value)
            assert opened(all_sum) == (3.0,) * 3
        assert opened(os.getpid) == before


def test_failures_may_follow_each_other(world):
    """Each failure makes new process groups, and no rank keeps descriptors or threads of the old ones."""

    def fail(count):
        for number in range(count):
            with pytest.raises(KeyError):
                world(fail_beside, number % 2, "all_reduce")
            assert world(all_sum, float(number)) == (2.0 * number,) * 2

    pids = world(os.getpid)
    fail(2)
    before, _ = resources(pids)
    fail(6)
    assert resources(pids)[0] == before


def test_a_call_of_one_rank_may_fail(world):
    """The other rank is idle, and stays so."""

    def fails():
        raise LookupError("alone")

    with pytest.raises(LookupError, match="alone") as caught:
        world[1](fails)
    assert "raised in rank 1 of 2" in notes_of(caught.value)
    assert world(has_same_group) == (True, True)


def prepare():
    torch.manual_seed(0)
    STATE["model"] = DistributedDataParallel(torch.nn.Linear(4, 1))


def train():
    model = STATE["model"]
    model.zero_grad()
    model(torch.ones(2, 4) * (1 + my_rank())).sum().backward()
    return model.module.weight.grad.tolist()


def fail_everywhere():
    dist.barrier()
    raise LookupError(f"in rank {my_rank()}")


def test_an_exception_of_all_ranks_keeps_a_model(world):
    """The process groups stay if no rank is blocked, so that DistributedDataParallel stays usable."""
    world(prepare)
    before = world(train)
    with pytest.raises(LookupError, match="in rank"):
        world(fail_everywhere)
    assert world(train) == before
    assert world(has_same_group) == (True, True)


def start_and_fail():
    if my_rank() == 0:
        STATE["work"] = dist.all_reduce(torch.ones(3), async_op=True)
    raise LookupError("after the collective")


def test_a_collective_of_one_rank_makes_new_groups(world):
    """One rank has begun a collective, and does not wait for it: the groups would mix it up with the next one."""
    with pytest.raises(LookupError, match="after the collective"):
        world(start_and_fail)
    assert world(all_sum, 3.0) == (6.0, 6.0)
    assert world(has_same_group) == (False, False)


def test_a_model_of_old_groups_says_so(world):
    """After new process groups, a model from before raises; a note says to make it again, which works."""
    world(prepare)
    with pytest.raises(KeyError):
        world(fail_beside, 0, "all_reduce")
    with pytest.raises(RuntimeError) as caught:
        world(train)
    assert "the process groups of these ranks were made again after the call of fail_beside had failed" in notes_of(
        caught.value
    )
    assert "Make them again" in notes_of(caught.value)
    world(prepare)
    assert world(train) == ([[3.0] * 4],) * 2


def fail_while_busy(seconds):
    if my_rank() == 0:
        raise LookupError("early")
    time.sleep(seconds)
    STATE["finished"] = True


def finished():
    return STATE.pop("finished", False)


def test_a_busy_rank_may_finish_its_call(world):
    """A rank gets a moment to finish on its own after another one has failed."""
    with pytest.raises(LookupError, match="early"):
        world(fail_while_busy, 0.2)
    assert world[1](finished) is True
    with pytest.raises(LookupError, match="early"):
        world(fail_while_busy, 600)
    assert world[1](finished) is False


def test_new_groups_are_those_of_the_platform():
    """The ranks of one list of `ipc_groups` form their group again, and the others are idle."""

    def sum_in_group():
        group = current_rank().group
        total = torch.ones(1)
        if group is not None:
            dist.all_reduce(total, group=group)
        return total.item()

    def fails():
        if my_rank() == 0:
            raise LookupError
        sum_in_group()

    with ranks(3, ipc_groups=[[0, 1]]).open() as opened:
        assert opened(sum_in_group) == (2.0, 2.0, 1.0)
        with pytest.raises(LookupError):
            opened(fails)
        assert opened(sum_in_group) == (2.0, 2.0, 1.0)


def requeue():
    current_rank().requeue()


def test_requeue_raises_in_ranks_that_stay(world):
    with pytest.raises(LaunchError, match=r"requeue\(\) was called in ranks that stay, which cannot restart"):
        world(requeue)


def test_preempt_has_no_effect(world):
    def checkpoint():
        return current_rank().should_checkpoint()

    launch = world.submit(checkpoint)
    launch.preempt()
    assert launch.results(PATIENCE_S) == (False, False)


# -- deadlocks


def return_early():
    if my_rank() == 1:
        block("all_reduce")


def test_waiting_for_a_returned_rank_raises(monkeypatch):
    """LaunchError has the stack of the rank that waits, and the ranks answer the next call."""
    monkeypatch.setattr("parawrap.launch.coordinator._standstill.STUCK_S", 0.5)
    with ranks().open() as opened:
        with pytest.raises(LaunchError) as caught:
            opened(return_early)
        assert type(caught.value) is LaunchError
        assert "return_early is deadlocked: rank(s) 0 have returned" in str(caught.value)
        assert "rank 1:" in str(caught.value)
        assert "in block" in str(caught.value)
        assert opened(all_sum) == (2.0, 2.0)
        with pytest.raises(LaunchError, match="all_sum is deadlocked: the ranks that were called wait"):
            opened[0](all_sum)
        assert opened(all_sum) == (2.0, 2.0)


# -- deaths


def die(how):
    if my_rank() == 1:
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            sys.exit(3)
        os._exit(4)
    block("all_reduce")


@pytest.mark.parametrize(
    ("how", "number", "code", "text"),
    [
        ("sigkill", signal.SIGKILL, None, "was killed by SIGKILL"),
        ("exit", None, 3, "called sys.exit(3)"),
        ("_exit", None, 4, "exited with code 4"),
    ],
)
def test_a_death_ends_all_ranks(how, number, code, text):
    """The call raises RankDiedError, no rank survives, and all later calls name the first death."""
    opened = ranks(grace_s=1).open()
    pids = opened(os.getpid)
    with pytest.raises(RankDiedError) as caught:
        opened(die, how)
    assert (caught.value.rank, caught.value.signal, caught.value.exit_code) == (1, number, code)
    assert text in str(caught.value)
    assert_gone(pids)
    assert opened.state == "ended"
    for call in (opened, opened[0], opened.submit):
        with pytest.raises(RankDiedError) as later:
            call(all_sum)
        assert "these ranks have ended, and cannot call all_sum" in str(later.value)
        assert "rank 1" in str(later.value)
        assert text in str(later.value)
        assert (later.value.rank, later.value.signal, later.value.exit_code) == (1, number, code)
    opened.close()
    with pytest.raises(LaunchError, match="closed"):
        opened(all_sum)


def test_a_death_of_an_idle_rank_is_named():
    """A rank that is killed between two calls ends all ranks; the next call names it."""
    with ranks(grace_s=1).open() as opened:
        pids = opened(os.getpid)
        os.kill(pids[0], signal.SIGKILL)
        assert_gone(pids)
        eventually(lambda: opened.state == "ended", "the end of the ranks")
        with pytest.raises(RankDiedError, match=r"cannot call all_sum.* rank 0 .*was killed by SIGKILL") as caught:
            opened(all_sum)
        assert (caught.value.rank, caught.value.signal) == (0, signal.SIGKILL)


def test_a_death_ends_the_calls_that_wait(tmp_path):
    """Calls that were submitted before the death do not run."""
    with ranks(grace_s=1).open() as opened:
        first, second = opened.submit(die, "sigkill"), opened.submit(all_sum)
        for launch in first, second:
            with pytest.raises(RankDiedError, match="SIGKILL"):
                launch.results(PATIENCE_S)


# -- time limits


def sleep_for(seconds):
    time.sleep(seconds)


@pytest.mark.parametrize(("field", "limit"), [("timeout_min", SILENT_S / 60), ("hang_timeout_s", SILENT_S)])
def test_a_time_limit_counts_per_call(field, limit):
    """Neither earlier calls nor the time between calls count. A call that exceeds the limit ends the ranks."""
    opened = ranks(grace_s=0.5, **{field: limit}).open()
    pids = opened(os.getpid)
    if field == "timeout_min":
        for _ in range(3):
            opened(sleep_for, 0.4 * SILENT_S)
    else:
        time.sleep(1.2 * SILENT_S)
    with pytest.raises(LaunchTimeoutError) as caught:
        opened(block, "event")
    assert field in str(caught.value)
    assert sorted(caught.value.stacks) == [0, 1]
    for rank, stack in caught.value.stacks.items():
        assert f"rank {rank}" in str(caught.value)
        assert "in block" in stack
    assert_gone(pids)
    with pytest.raises(LaunchError, match=f"(?s)cannot call all_sum.*{field}"):
        opened(all_sum)
    opened.close()


def test_a_rank_that_cannot_be_stopped_ends_all():
    """If a rank holds the GIL after another one has failed, the ranks end, and a note says so."""
    with ranks(grace_s=0.5).open() as opened:
        pids = opened(os.getpid)
        with pytest.raises(KeyError) as caught:
            opened(fail_beside, 0, "hold_gil")
        assert "the ranks were ended: rank(s) 1 did not stop within grace_s=0.5" in notes_of(caught.value)
        assert_gone(pids)
        with pytest.raises(LaunchError, match=r"cannot call all_sum.*rank\(s\) 1 did not stop"):
            opened(all_sum)


def test_a_cancelled_collective_keeps_the_ranks(world):
    """`cancel` of a call whose ranks wait for each other ends it."""

    def waits():
        print("waits", flush=True)
        block("recv")

    launch = world.submit(waits)
    eventually(lambda: launch.logs(0) and launch.logs(1), "output of the call")
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results()


# -- many calls


def use(value):
    return value


def resources(pids):
    gc.collect()
    found = [psutil.Process(pid) for pid in pids]
    counts = [(each.num_fds(), each.num_threads()) for each in found]
    return counts, [each.memory_info().rss for each in found]


@pytest.mark.stress
def test_many_calls_leave_nothing_behind(world):
    """2,000 calls leave the descriptors, threads, and memory of this process and of the ranks as they were."""
    pids = [os.getpid(), *world(os.getpid)]
    tensor = torch.ones(1 << 16)

    def calls(count):
        for number in range(count):
            world(all_sum, float(number))
            world[number % 2](use, number)
            world(lambda number=number: number)
            world(use, {"large": tensor, "text": "x" * 1000})
            if number % 25 == 0:
                with pytest.raises(LookupError):
                    world(fail_everywhere)
                world.submit(use, tensor).results()

    calls(100)
    before_counts, before_memory = resources(pids)
    calls(500)
    counts, memory = resources(pids)
    assert counts == before_counts
    grown = [after - before for before, after in zip(before_memory, memory, strict=True)]
    assert max(grown) < 10 << 20, grown


# -- Ctrl-C and the end of the parent

PARENT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from parawrap import LaunchError, Platform, current_rank

how, folder = sys.argv[1:]

def all_sum():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

def waits(how, folder):
    rank = current_rank().global_rank
    try:
        report_pid(folder)
        if how == "collective":
            dist.recv(torch.ones(1), src=1 - rank)
        while True:
            time.sleep(600)
    except KeyboardInterrupt:
        Path(folder, f"{rank}.interrupted").touch()
        raise

def ignores(how, folder):
    report_pid(folder)
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            Path(folder, f"{current_rank().global_rank}.interrupted").touch()

def work(ranks):
    pids = ranks(os.getpid)
    try:
        ranks(ignores if how.startswith("ignores") else waits, how, folder)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        print(*ranks(all_sum), ranks(os.getpid) == pids)
    except LaunchError as error:
        print(error)

def report():
    report_pid(folder)

def leave(ranks):
    ranks(report)
    if how == "busy":
        ranks.submit(time.sleep, 600)

def fork(ranks):
    pid = os.fork()
    if pid == 0:
        try:
            ranks(all_sum)
        except LaunchError as error:
            print(error, flush=True)
        ranks.close()
        os._exit(0)
    os.waitpid(pid, 0)
    print(*ranks(all_sum))

if __name__ == "__main__":
    grace_s = {"ignores": 600, "ignores once": 0.5}.get(how, 30)
    method = "forkserver" if how in ("group", "killed busy") else "fork"  # which need no further process that loads torch
    ranks = Platform(device="cpu", n_cpus=2, grace_s=grace_s, verbose=False, spawn_method=method).open()
    if how in ("idle", "busy", "killed idle", "killed busy"):
        how, is_killed = how.split()[-1], " " in how
        leave(ranks)
        time.sleep(600 if is_killed else 0)
    elif how == "fork":
        fork(ranks)
    else:
        work(ranks)
"""


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Scripts with ranks that stay, started together, because each of them loads torch."""
    ways = ["sleep", "group", "collective", "ignores", "ignores once", "fork", "idle", "busy", "killed idle", "killed busy"]
    cases = {how: lambda folder, how=how: (PARENT, how, folder) for how in ways}
    with running_scripts(tmp_path_factory.mktemp("parents"), cases) as started:
        yield started


def interrupted_in(folder):
    return sorted(path.name for path in folder.glob("*.interrupted"))


@pytest.mark.parametrize("how", ["sleep", "group", "collective"])
def test_ctrl_c_keeps_ranks_that_answer(how, parents):
    """Each rank's function raises KeyboardInterrupt, also in a collective, and the same processes answer the next call."""
    parent, folder = parents[how]
    pids = pids_in(folder, 2)
    if how == "collective":
        time.sleep(0.3)  # until the ranks wait
    (os.killpg if how == "group" else os.kill)(parent.pid, signal.SIGINT)
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert output.splitlines() == ["interrupted", "2.0 2.0 True"]
    if how != "collective":
        assert interrupted_in(folder) == ["0.interrupted", "1.interrupted"]
    assert parent.returncode == 0
    assert_gone(pids)


def test_a_second_ctrl_c_ends_the_ranks(parents):
    """The first Ctrl-C waits for functions that ignore KeyboardInterrupt; the second one ends the ranks."""
    parent, folder = parents["ignores"]
    pids = pids_in(folder, 2)
    os.kill(parent.pid, signal.SIGINT)
    eventually(lambda: len(interrupted_in(folder)) == 2, "KeyboardInterrupt in both ranks")
    os.kill(parent.pid, signal.SIGINT)
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert output.startswith("interrupted\nthese ranks have ended, and cannot call all_sum")
    assert_gone(pids)


def test_a_function_that_ignores_ctrl_c_is_ended(parents):
    """After ``grace_s``, ranks that did not answer end, and the next call says why."""
    parent, folder = parents["ignores once"]
    pids = pids_in(folder, 2)
    os.kill(parent.pid, signal.SIGINT)
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert output.startswith("interrupted\nthese ranks have ended, and cannot call all_sum")
    assert "did not stop within grace_s=0.5" in output
    assert_gone(pids)


def test_a_fork_cannot_use_the_ranks(parents):
    """A forked child that calls or closes the ranks gets an error, and leaves them to its parent."""
    parent, _ = parents["fork"]
    output, _ = parent.communicate(timeout=PATIENCE_S)
    refusal, answer = output.splitlines()
    assert refusal.startswith(f"these ranks belong to process {parent.pid}: call all_sum there, not in a forked child")
    assert answer == "2.0 2.0"


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_ranks_end_with_the_interpreter(how, parents):
    """A script that never closes its ranks exits without delay, and no process survives."""
    parent, folder = parents[how]
    pids = pids_in(folder, 2)
    parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == 0
    assert_gone(pids)


@pytest.mark.parametrize("how", ["killed idle", "killed busy"])
def test_ranks_end_with_a_killed_parent(how, parents):
    parent, folder = parents[how]
    pids = pids_in(folder, 2)
    family = {each.pid for each in psutil.Process(parent.pid).children(recursive=True)}
    assert family >= set(pids)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=PATIENCE_S)
    try:
        assert_gone(family)
    finally:
        for pid in family:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def swap(value, fails=False):
    """Exchange a number with the other rank of two."""
    other, received = 1 - my_rank(), torch.zeros(1)
    sending = dist.isend(torch.tensor([value]), other)
    if fails:
        raise ValueError("between send and recv")
    dist.recv(received, other)
    sending.wait()
    return received.item()


def make_group_in_rank_0():
    if my_rank() == 0:
        dist.new_group([0])
        raise ValueError("after new_group")
    time.sleep(0.2)


def sum_in_new_group():
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    return total.item()


def ignore_every_end():
    if my_rank() == 1:
        raise ValueError("of rank 1")
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            continue


def test_no_message_of_a_failed_call_arrives_later():
    """Counts of operations agree, but a message from rank to rank waits for its receiver."""
    with ranks(2).open() as world:
        with pytest.raises(ValueError, match="between send"):
            world(swap, 6.0, fails=True)
        assert world(swap, 5.0) == (5.0, 5.0)


def test_a_group_that_one_rank_made_is_forgotten():
    with ranks(2).open() as world:
        with pytest.raises(ValueError, match="after new_group"):
            world(make_group_in_rank_0)
        assert world(sum_in_new_group) == (2.0, 2.0)


def test_a_rank_that_ignores_its_end_ends_the_ranks():
    """The first error has a note, and later calls say why the ranks have ended."""
    with ranks(2, grace_s=0.5).open() as world:
        with pytest.raises(ValueError, match="of rank 1") as raised:
            world(ignore_every_end)
        assert "did not stop within grace_s" in notes_of(raised.value)
        with pytest.raises(LaunchError, match="did not stop within grace_s"):
            world(my_rank)
