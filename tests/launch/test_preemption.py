"""Preemption: ranks save at the same step and the next start continues from it; local, inline, and under torchrun."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchCancelledError, Platform, current_rank, wrapper
from parawrap.launch._rank import Rank
from parawrap.launch.rank._preemption import Preemption
from parawrap.launch.rank._preemption_store import StoreAgreement
from parawrap.launch.rank._signed_values import SignedStore, Signer
from tests.helpers.processes import failure_of, ranks
from tests.helpers.waiting import PATIENCE_S, eventually
from tests.launch.test_env import torchrun

HERE = Path(__file__).parent
_PREEMPTIONS = 10


def patient_ranks(number=2, **fields):
    """Return a platform with a `grace_s` that is long enough for a busy machine."""
    return ranks(number, **{"grace_s": 60} | fields)


def wait_for_files(folder, pattern, number):
    """Wait until `number` files match the pattern, and return their contents."""
    found = eventually(lambda: len(paths := sorted(folder.glob(pattern))) == number and paths, f"{number} {pattern}")
    return [path.read_text() for path in found]


def wait_for_requests(launch):
    """Wait until every rank has received the preemption. Ranks answer in order, so an answer to `stacks` proves it."""
    eventually(lambda: "no answer" not in str(launch.stacks()), "an answer of every rank")


# --- local: loops ---


def test_ten_preemptions_neither_lose_nor_repeat_a_step(tmp_path):
    """Each start continues at the step at which all ranks of the previous start saved."""

    @wrapper(patient_ranks(4))
    def train():
        rank = current_rank()
        state = Path(tmp_path, f"{rank.global_rank}.state")
        steps = [int(each) for each in state.read_text().split()] if state.exists() else []
        begun, total = len(steps), torch.ones(1)
        for step in count(begun):
            if rank.restart == _PREEMPTIONS and step == begun + 3:
                return steps
            if rank.should_checkpoint():
                state.write_text(" ".join(map(str, steps)))
                rank.requeue()
            dist.all_reduce(total)
            total /= rank.world_size
            steps.append(step)
            if step == begun + 1:
                Path(tmp_path, f"{rank.restart}-{rank.global_rank}.runs").touch()
        raise AssertionError

    launch = train.submit()
    for start in range(_PREEMPTIONS):
        wait_for_files(tmp_path, f"{start}-*.runs", 4)
        launch.preempt()
    results = launch.results(timeout=PATIENCE_S)
    assert results == (list(range(len(results[0]))),) * 4
    assert len(results[0]) >= 2 * _PREEMPTIONS + 3
    assert launch.state == "finished"


def test_ranks_at_different_steps_save_at_the_same_step(tmp_path):
    """Ranks behind continue to the step of the foremost rank, even if that rank has already saved and exited."""

    @wrapper(patient_ranks())
    def train():
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        step = 0
        while rank.restart == 0 and not rank.should_checkpoint():
            step += 1
            if step == (7 if rank.global_rank == 0 else 2):
                Path(tmp_path, f"{rank.global_rank}.waits").touch()
                while not Path(tmp_path, "go").exists():
                    time.sleep(0.01)
            while step == 4 and rank.global_rank == 1 and not Path(tmp_path, "0.saved").exists():
                time.sleep(0.01)
        if rank.restart == 0:
            saved.write_text(str(step))
            rank.requeue()
        return int(saved.read_text())

    launch = train.submit()
    wait_for_files(tmp_path, "*.waits", 2)
    launch.preempt()
    wait_for_requests(launch)
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (7, 7)


def test_a_slow_rank_finishes_the_collective_before_saving(tmp_path):
    """If a rank waits in a collective, the slow rank takes part in it, and both ranks save afterwards."""

    @wrapper(patient_ranks())
    def train():
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        if rank.restart:
            return int(saved.read_text())
        for step in count():
            while step == 2 and rank.global_rank == 1 and not Path(tmp_path, "go").exists():
                time.sleep(0.01)
            if rank.should_checkpoint():
                saved.write_text(str(step))
                rank.requeue()
            if step == 2:
                Path(tmp_path, f"{rank.global_rank}.waits").touch()
            dist.all_reduce(torch.ones(1))
        raise AssertionError

    launch = train.submit()
    wait_for_files(tmp_path, "0.waits", 1)
    launch.preempt()
    wait_for_requests(launch)
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (3, 3)


def test_a_rank_that_is_still_starting_saves_at_the_step_of_the_others(tmp_path):
    """A rank that is preempted while it unpickles its arguments catches up with running ranks."""

    def unpacked(folder):
        try:
            Path(folder, "first").touch(exist_ok=False)
        except FileExistsError:
            while not Path(folder, "go").exists():
                time.sleep(0.01)

    class Slow:
        """Unpickles at once in the first rank, and after the test's signal in the other."""

        def __reduce__(self):
            return unpacked, (str(tmp_path),)

    @wrapper(patient_ranks(ipc_groups=None))
    def train(_slow):
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        if rank.restart:
            return int(saved.read_text())
        for step in count():
            if rank.should_checkpoint():
                saved.write_text(str(step))
                rank.requeue()
            if step == 5:
                Path(tmp_path, f"{rank.global_rank}.runs").touch()
        raise AssertionError

    launch = train.submit(Slow())
    wait_for_files(tmp_path, "*.runs", 1)
    launch.preempt()
    wait_for_requests(launch)
    (tmp_path / "go").touch()
    first, second = launch.results(timeout=PATIENCE_S)
    assert first == second > 5


# --- local: functions that do not requeue ---


def test_a_function_that_ignores_preemption_is_ended_and_restarted(tmp_path, caplog):
    """A function that never calls `should_checkpoint` is ended after grace_s, with a warning; its finally blocks run."""

    @wrapper(patient_ranks(grace_s=0.5))
    def train():
        rank = current_rank()
        if rank.restart:
            return rank.restart
        try:
            Path(tmp_path, f"{rank.global_rank}.runs").touch()
            threading.Event().wait()
        finally:
            Path(tmp_path, f"{rank.global_rank}.cleaned").touch()

    launch = train.submit()
    wait_for_files(tmp_path, "*.runs", 2)
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)
    wait_for_files(tmp_path, "*.cleaned", 2)
    assert "rank(s) 0, 1 of " in caplog.text
    assert "did not call requeue() within grace_s=0.5" in caplog.text


def test_a_preempted_function_can_return_results(tmp_path):
    """If a preempted function returns without `requeue`, its results count; more preemptions change nothing."""

    @wrapper(patient_ranks())
    def train():
        rank = current_rank()
        Path(tmp_path, f"{rank.global_rank}.runs").touch()
        while not rank.should_checkpoint():
            dist.barrier()
        return rank.restart

    launch = train.submit()
    wait_for_files(tmp_path, "*.runs", 2)
    launch.preempt()
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (0, 0)
    launch.preempt()
    assert launch.results() == (0, 0)
    assert launch.state == "finished"


def test_a_preemption_during_the_start_is_kept():
    """The function's first `should_checkpoint` returns True."""

    @wrapper(patient_ranks())
    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.should_checkpoint():
            rank.requeue()
        return rank.restart

    launch = train.submit()
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)


def test_a_cancelled_launch_is_not_preempted(tmp_path):
    """Ranks that clean up after a cancel do not start again."""

    @wrapper(patient_ranks())
    def train():
        rank = current_rank()
        Path(tmp_path, f"{rank.restart}-{rank.global_rank}.runs").touch()
        try:
            threading.Event().wait()
        finally:
            Path(tmp_path, f"{rank.global_rank}.cleans").touch()
            while not Path(tmp_path, "go").exists():
                time.sleep(0.01)

    launch = train.submit()
    wait_for_files(tmp_path, "0-*.runs", 2)
    canceller = threading.Thread(target=launch.cancel)
    canceller.start()
    wait_for_files(tmp_path, "*.cleans", 2)
    launch.preempt()
    (tmp_path / "go").touch()
    canceller.join()
    with pytest.raises(LaunchCancelledError):
        launch.results()
    assert not list(tmp_path.glob("1-*.runs"))


# --- local: requeues without a preemption ---


def test_a_requeue_of_one_rank_restarts_all_ranks(tmp_path):
    """The other ranks' broken collective does not count as a failure, and finally blocks run."""

    @wrapper(patient_ranks(3))
    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.global_rank == 0:
            try:
                rank.requeue()
            finally:
                Path(tmp_path, "finally").touch()
        value = torch.ones(1)
        dist.all_reduce(value)
        return rank.restart, value.item()

    assert train.submit().results(timeout=PATIENCE_S) == ((1, 3.0),) * 3
    assert (tmp_path / "finally").exists()


def test_an_exception_wins_over_a_requeue():
    """If one rank raises while others requeue, the exception is raised, and no rank starts again."""

    def train():
        rank = current_rank()
        if rank.global_rank == 1:
            raise ValueError(rank.restart)
        rank.requeue()

    error, _ = failure_of(train, platform=patient_ranks(3))
    assert repr(error) == "ValueError(0)"


# --- inline ---


def inline(function):
    (result,) = wrapper(Platform(device="cpu"))(function).inline()
    return result


@pytest.fixture
def own_handler():
    """A SIGUSR2 handler that must be in place before and after a call."""

    def handle(*_):
        raise AssertionError

    before = signal.signal(signal.SIGUSR2, handle)
    yield handle
    assert signal.getsignal(signal.SIGUSR2) is handle
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("own_handler")
def test_a_signal_to_this_process_preempts_an_inline_call():
    """After SIGUSR2, `should_checkpoint` returns True, and `requeue` calls the function again in the same thread."""
    steps = []

    def train():
        rank = current_rank()
        if rank.restart:
            return rank.restart, threading.get_ident(), dist.get_world_size()
        for step in count():
            if rank.should_checkpoint():
                rank.requeue()
            steps.append(step)
            if step == 3:
                signal.raise_signal(signal.SIGUSR2)
        raise AssertionError

    assert inline(train) == (1, threading.get_ident(), 1)
    assert steps == [0, 1, 2, 3]


@pytest.mark.usefixtures("own_handler")
def test_an_inline_call_can_be_preempted_in_every_start():
    """Each start can be preempted again, and the process's signal handler is restored if the function raises."""

    def train():
        rank = current_rank()
        assert not rank.should_checkpoint()
        if rank.restart == 2:
            raise KeyError
        signal.raise_signal(signal.SIGUSR2)
        assert rank.should_checkpoint()
        rank.requeue()

    with pytest.raises(KeyError):
        inline(train)


def test_an_inline_call_in_another_thread_ignores_signals(own_handler):
    """The call is never preempted and keeps the signal handler; `requeue` works."""
    seen = []

    def train():
        rank = current_rank()
        seen.append((rank.restart, rank.should_checkpoint(), signal.getsignal(signal.SIGUSR2) is own_handler))
        if rank.restart == 0:
            rank.requeue()

    thread = threading.Thread(target=inline, args=(train,))
    thread.start()
    thread.join()
    assert seen == [(0, False, True), (1, False, True)]


# --- a torchrun world ---


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The results of each scenario of preempted_world.py in each of two ranks, by name."""
    folder = tmp_path_factory.mktemp("world")
    assert torchrun(folder, script=HERE / "preempted_world.py", PYTHONPATH=HERE.parents[1]) == 0
    endings = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    return {name: [ending[name] for ending in endings] for name in endings[0]}


def test_a_signal_to_one_rank_of_a_world_preempts_all_ranks(world):
    """All ranks save at the same step, although they loop independently; finally blocks run, and pids stay the same."""
    pids = [pid for pid, *_ in world["a_signal_to_one_rank"]]
    first, second = world["a_signal_to_one_rank"][0][1]
    assert first == (pids[0], 1, [first[2][0], True, "left"])
    assert second == (pids[1], 1, first[2])
    assert first[2][0] >= 2
    assert world["a_signal_to_one_rank"][1][1] == (first, second)


def test_nothing_of_a_preemption_is_left_in_a_world(world):
    """After the call, the signal handler is restored, and no parawrap thread runs."""
    for _, _, has_own_handler, threads in world["a_signal_to_one_rank"]:
        assert has_own_handler
        assert not [name for name in threads if name.startswith("parawrap")]


def test_a_rank_of_a_world_that_returned_does_not_block_the_agreement(world):
    """The other rank saves, all ranks start again, and a signal to the returned rank does no harm."""
    assert world["a_rank_that_ends_early"] == [["again", "again"]] * 2


def test_an_exception_in_a_world_wins_over_a_requeue(world):
    """Every process raises the exception, including the process that called `requeue`."""
    assert world["a_failure_during_a_requeue"] == ["ValueError('own')"] * 2


def test_a_requeue_of_one_rank_of_a_world_restarts_all_ranks(world):
    """The other rank's broken collective does not count as a failure."""
    assert world["a_rank_that_requeues_alone"] == [[(1, 2.0)] * 2] * 2


# --- Preemption and StoreAgreement ---


def test_no_checkpoint_is_due_without_a_preemption():
    """`is_due` returns False until a decision, and `hold_back` returns the number of its calls."""
    preemption = Preemption()
    assert not any(preemption.is_due() for _ in range(100))
    assert preemption.hold_back() == 100


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_checkpoint_is_due_from_the_decided_call_on(ahead):
    """`is_due` returns False before the decided call, and True from this call on."""
    preemption = Preemption()
    preemption.is_due()
    preemption.decide(preemption.hold_back() + ahead)
    assert [preemption.is_due() for _ in range(ahead + 2)] == [False] * ahead + [True, True]


def test_a_repeated_decision_changes_nothing():
    """A decision can arrive twice, for example if another rank left in between."""
    preemption = Preemption()
    for _ in range(2):
        preemption.decide(preemption.hold_back())
    assert preemption.is_due()


def test_is_due_waits_for_the_decision():
    """After `hold_back`, `is_due` blocks until `decide`."""
    preemption, answers = Preemption(), []
    preemption.hold_back()
    caller = threading.Thread(target=lambda: answers.append(preemption.is_due()))
    caller.start()
    eventually(lambda: vars(preemption._changed)["_waiters"], "the call of is_due")
    assert answers == []
    preemption.decide(0)
    caller.join()
    assert answers == [True]


class Agreements:
    """The agreements of several ranks, all in this process."""

    def __init__(self, number):
        self.store = SignedStore(dist.HashStore(), "test", Signer(b"secret"))
        self.all = [StoreAgreement(lambda: self.store, rank, number) for rank in range(number)]

    def call_is_due(self, rank, times):
        """Call `is_due` of a rank `times` times."""
        assert not any(self.all[rank].preemption.is_due() for _ in range(times))

    def decided(self, rank):
        preemption = self.all[rank].preemption
        return eventually(lambda: preemption._due_from is not None and [preemption._due_from], "a decision")[0]


def test_ranks_of_a_world_agree_over_a_store():
    """All ranks decide on the highest number of calls, whichever rank was preempted."""
    agreements = Agreements(3)
    for rank, times in enumerate((2, 5, 3)):
        agreements.call_is_due(rank, times)
    with agreements.all[0], agreements.all[1], agreements.all[2]:
        agreements.all[2].request()
        assert [agreements.decided(rank) for rank in range(3)] == [5, 5, 5]
    assert not [thread for thread in threading.enumerate() if thread.name == "parawrap-rank-agreement"]


def test_a_rank_that_ended_is_not_part_of_the_agreement():
    """The other ranks agree without the calls of a rank that has ended."""
    agreements = Agreements(2)
    with agreements.all[0]:
        with agreements.all[1]:
            agreements.call_is_due(1, 9)
        agreements.call_is_due(0, 4)
        agreements.all[0].request()
        assert agreements.decided(0) == 4


def test_a_preempted_rank_can_end_without_an_agreement():
    """If other ranks never answer, a preempted rank can still end, without a decision."""
    agreements = Agreements(2)
    with agreements.all[0]:
        agreements.all[0].request()
        eventually(lambda: agreements.store.check(["answered/0"]), "the answer of rank 0")
    assert agreements.all[0].preemption._due_from is None


def test_a_forged_request_preempts_no_rank(caplog):
    """A request that is not signed with the ranks' secret is logged, and no rank saves."""
    store = dist.HashStore()
    store.set("test/requested", "forged")
    with StoreAgreement(lambda: SignedStore(store, "test", Signer(b"secret")), 0, 1) as agreement:
        eventually(lambda: "the ranks cannot agree on when to save" in caplog.text, "the message")
        assert not any(agreement.preemption.is_due() for _ in range(3))


def test_a_pickled_rank_has_no_preemption():
    """A `Rank` keeps its numbers when it is pickled; the copy's `should_checkpoint` returns False."""
    preemption = Preemption()
    rank = Rank(1, 1, 0, 2, torch.device("cpu"), ranks(), None, 3, preemption)
    preemption.decide(0)
    assert rank.should_checkpoint()
    copy = pickle.loads(pickle.dumps(rank))
    assert (copy, copy.restart, copy.preemption) == (rank, 3, None)
    assert not copy.should_checkpoint()
    assert rank.preemption is preemption


def test_a_rank_can_be_returned_as_a_result():
    """A returned `Rank` keeps its numbers but has no group and no preemption."""
    (rank, pid), *_ = wrapper(ranks(1))(lambda: (current_rank(), os.getpid()))()
    assert (rank.global_rank, rank.preemption, rank.group) == (0, None, None)
    assert pid != os.getpid()
