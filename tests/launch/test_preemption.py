"""Preemption: ranks save at the same turn, leave, and go on from there; locally, inline, and in a world of torchrun's."""

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
from parawrap.launch.ranks._preemption import Preemption
from parawrap.launch.ranks._store_agreement import StoreAgreement
from tests.launch.processes import PATIENCE_S, eventually, failure_of, ranks
from tests.launch.test_env import torchrun

HERE = Path(__file__).parent
_REHEARSALS = 10


def patient(number=2, **fields):
    """A platform whose preempted ranks have time, however busy the machine is."""
    return ranks(number, **{"grace_s": 60} | fields)


def signs(folder, pattern, number):
    """Wait until there are as many files of this pattern; what they hold."""
    found = eventually(lambda: len(paths := sorted(folder.glob(pattern))) == number and paths, f"{number} {pattern}")
    return [path.read_text() for path in found]


def asked(launch):
    """Wait until every rank has been asked for its turn: it answers on a line, and answers in order."""
    eventually(lambda: "no answer" not in str(launch.stacks()), "an answer of every rank")


# --- local: loops ---


def test_a_loop_loses_and_repeats_no_turn_over_ten_preemptions(tmp_path):
    """Each start goes on at the turn at which all ranks of the one before saved."""

    @wrapper(patient(4))
    def train():
        rank = current_rank()
        state = Path(tmp_path, f"{rank.global_rank}.state")
        turns = [int(each) for each in state.read_text().split()] if state.exists() else []
        begun, total = len(turns), torch.ones(1)
        for step in count(begun):
            if rank.restart == _REHEARSALS and step == begun + 3:
                return turns
            if rank.should_checkpoint():
                state.write_text(" ".join(map(str, turns)))
                rank.requeue()
            dist.all_reduce(total)
            total /= rank.world_size
            turns.append(step)
            if step == begun + 1:
                Path(tmp_path, f"{rank.restart}-{rank.global_rank}.runs").touch()
        raise AssertionError

    launch = train.submit()
    for start in range(_REHEARSALS):
        signs(tmp_path, f"{start}-*.runs", 4)
        launch.preempt()
    results = launch.results(timeout=PATIENCE_S)
    assert results == (list(range(len(results[0]))),) * 4
    assert len(results[0]) >= 2 * _REHEARSALS + 3
    assert launch.state == "finished"


def test_ranks_at_different_turns_save_at_the_same_one(tmp_path):
    """Those behind go on to where the foremost is; also when that one has saved and is gone by then."""

    @wrapper(patient())
    def train():
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        turn = 0
        while rank.restart == 0 and not rank.should_checkpoint():
            turn += 1
            if turn == (7 if rank.global_rank == 0 else 2):
                Path(tmp_path, f"{rank.global_rank}.waits").touch()
                while not Path(tmp_path, "go").exists():
                    time.sleep(0.01)
            while turn == 4 and rank.global_rank == 1 and not Path(tmp_path, "0.saved").exists():
                time.sleep(0.01)
        if rank.restart == 0:
            saved.write_text(str(turn))
            rank.requeue()
        return int(saved.read_text())

    launch = train.submit()
    signs(tmp_path, "*.waits", 2)
    launch.preempt()
    asked(launch)
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (7, 7)


def test_a_rank_that_waits_in_a_collective_is_not_left_there(tmp_path):
    """Whoever is ahead waits for the slow one; that one takes its part, and both save after it."""

    @wrapper(patient())
    def train():
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        if rank.restart:
            return int(saved.read_text())
        for turn in count():
            while turn == 2 and rank.global_rank == 1 and not Path(tmp_path, "go").exists():
                time.sleep(0.01)
            if rank.should_checkpoint():
                saved.write_text(str(turn))
                rank.requeue()
            if turn == 2:
                Path(tmp_path, f"{rank.global_rank}.waits").touch()
            dist.all_reduce(torch.ones(1))
        raise AssertionError

    launch = train.submit()
    signs(tmp_path, "0.waits", 1)
    launch.preempt()
    asked(launch)
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (3, 3)


def test_a_rank_that_has_not_begun_saves_at_the_turn_of_the_others(tmp_path):
    """It is asked while it unpacks its arguments, and catches up with the ranks that run already."""

    def unpacked(folder):
        try:
            Path(folder, "first").touch(exist_ok=False)
        except FileExistsError:
            while not Path(folder, "go").exists():
                time.sleep(0.01)

    class Slow:
        """Unpacked at once where that is done first, and when the test says so elsewhere."""

        def __reduce__(self):
            return unpacked, (str(tmp_path),)

    @wrapper(patient(ipc_groups=None))
    def train(_slow):
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        if rank.restart:
            return int(saved.read_text())
        for turn in count():
            if rank.should_checkpoint():
                saved.write_text(str(turn))
                rank.requeue()
            if turn == 5:
                Path(tmp_path, f"{rank.global_rank}.runs").touch()
        raise AssertionError

    launch = train.submit(Slow())
    signs(tmp_path, "*.runs", 1)
    launch.preempt()
    asked(launch)
    (tmp_path / "go").touch()
    first, second = launch.results(timeout=PATIENCE_S)
    assert first == second > 5


# --- local: functions that do not play along ---


def test_a_function_that_never_asks_is_ended_and_started_from_the_beginning(tmp_path, caplog):
    """After grace_s, with a warning; its finally blocks run."""

    @wrapper(patient(grace_s=0.5))
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
    signs(tmp_path, "*.runs", 2)
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)
    signs(tmp_path, "*.cleaned", 2)
    assert "rank(s) 0, 1 of " in caplog.text
    assert "had not called requeue() within grace_s=0.5" in caplog.text


def test_a_function_that_returns_instead_of_requeueing_has_its_results(tmp_path):
    """Preempted twice in a row, and once more when all is over, which changes nothing."""

    @wrapper(patient())
    def train():
        rank = current_rank()
        Path(tmp_path, f"{rank.global_rank}.runs").touch()
        while not rank.should_checkpoint():
            dist.barrier()
        return rank.restart

    launch = train.submit()
    signs(tmp_path, "*.runs", 2)
    launch.preempt()
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (0, 0)
    launch.preempt()
    assert launch.results() == (0, 0)
    assert launch.state == "finished"


def test_a_preemption_during_the_start_is_kept_for_the_function():
    """Its very first question is answered with True."""

    @wrapper(patient())
    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.should_checkpoint():
            rank.requeue()
        return rank.restart

    launch = train.submit()
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)


def test_a_cancelled_launch_is_not_preempted(tmp_path):
    """Ranks that clean up because the launch was called off are not started anew."""

    @wrapper(patient())
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
    signs(tmp_path, "0-*.runs", 2)
    cancelling = threading.Thread(target=launch.cancel)
    cancelling.start()
    signs(tmp_path, "*.cleans", 2)
    launch.preempt()
    (tmp_path / "go").touch()
    cancelling.join()
    with pytest.raises(LaunchCancelledError):
        launch.results()
    assert not list(tmp_path.glob("1-*.runs"))


# --- local: requeues of their own accord ---


def test_one_rank_that_leaves_has_all_started_anew(tmp_path):
    """The collective that it leaves the others in breaks, which is no failure; what it has in finally blocks runs."""

    @wrapper(patient(3))
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


def test_what_a_rank_raises_while_others_requeue_is_raised():
    """And none of them is started anew."""

    def train():
        rank = current_rank()
        if rank.global_rank == 1:
            raise ValueError(rank.restart)
        rank.requeue()

    error, _ = failure_of(train, platform=patient(3))
    assert repr(error) == "ValueError(0)"


# --- inline ---


def inline(function):
    (result,) = wrapper(Platform(device="cpu"))(function).inline()
    return result


@pytest.fixture
def own_handler():
    """What this process does at SIGUSR2 before and after a call."""

    def handle(*_):
        raise AssertionError

    before = signal.signal(signal.SIGUSR2, handle)
    yield handle
    assert signal.getsignal(signal.SIGUSR2) is handle
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("own_handler")
def test_a_signal_to_this_process_preempts_an_inline_call():
    """The next question is answered with True, and a requeue makes the same call again, in the same thread."""
    turns = []

    def train():
        rank = current_rank()
        if rank.restart:
            return rank.restart, threading.get_ident(), dist.get_world_size()
        for turn in count():
            if rank.should_checkpoint():
                rank.requeue()
            turns.append(turn)
            if turn == 3:
                signal.raise_signal(signal.SIGUSR2)
        raise AssertionError

    assert inline(train) == (1, threading.get_ident(), 1)
    assert turns == [0, 1, 2, 3]


@pytest.mark.usefixtures("own_handler")
def test_an_inline_call_may_be_preempted_in_every_start():
    """Each start asks anew, and the handler of the process is its own again when the function fails."""

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


def test_an_inline_call_off_the_main_thread_takes_no_signals(own_handler):
    """It is never preempted, may ask and be called again, and leaves the handler alone."""
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


# --- a world that is there already ---


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """How every scenario of preempted_world.py ended in each of two ranks, by its name."""
    folder = tmp_path_factory.mktemp("world")
    assert torchrun(folder, script=HERE / "preempted_world.py", PYTHONPATH=HERE.parents[1]) == 0
    endings = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    return {name: [ending[name] for ending in endings] for name in endings[0]}


def test_a_signal_to_one_rank_of_a_world_preempts_all_at_the_same_turn(world):
    """Each of them turned at its own pace; they start anew in place, and finally blocks run."""
    pids = [pid for pid, *_ in world["a_signal_to_one_rank"]]
    first, second = world["a_signal_to_one_rank"][0][1]
    assert first == (pids[0], 1, [first[2][0], True, "left"])
    assert second == (pids[1], 1, first[2])
    assert first[2][0] >= 2
    assert world["a_signal_to_one_rank"][1][1] == (first, second)


def test_nothing_of_a_preemption_is_left_in_a_world(world):
    """Neither the thread that looks out for it, nor the handler of the signal."""
    for _, _, has_own_handler, threads in world["a_signal_to_one_rank"]:
        assert has_own_handler
        assert not [name for name in threads if name.startswith("parawrap")]


def test_a_rank_of_a_world_that_ended_early_holds_up_no_agreement(world):
    """The others save without it, all start anew, and a signal that comes when it has returned does it no harm."""
    assert world["a_rank_that_ends_early"] == [["again", "again"]] * 2


def test_a_failure_in_a_world_goes_before_a_requeue(world):
    """Every process raises it, also the one that asked to be started anew."""
    assert world["a_failure_during_a_requeue"] == ["ValueError('own')"] * 2


def test_one_rank_of_a_world_that_leaves_has_all_started_anew(world):
    """The other one's collective breaks, which is no failure."""
    assert world["a_rank_that_requeues_alone"] == [[(1, 2.0)] * 2] * 2


# --- the parts ---


def test_no_checkpoint_is_due_before_anybody_asks():
    """However often the function asks."""
    preemption = Preemption()
    assert not any(preemption.is_due() for _ in range(100))
    assert preemption.hold_back() == 100


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_checkpoint_is_due_at_the_decided_call_and_ever_after(ahead):
    """Until then the function goes on."""
    preemption = Preemption()
    preemption.is_due()
    preemption.decide(preemption.hold_back() + ahead)
    assert [preemption.is_due() for _ in range(ahead + 2)] == [False] * ahead + [True, True]


def test_a_decision_that_is_told_twice_is_the_same():
    """As when a rank has left in between."""
    preemption = Preemption()
    for _ in range(2):
        preemption.decide(preemption.hold_back())
    assert preemption.is_due()


def test_an_answer_that_is_held_back_is_given_once_ranks_have_agreed():
    """A function that asks meanwhile waits."""
    preemption, answers = Preemption(), []
    preemption.hold_back()
    asking = threading.Thread(target=lambda: answers.append(preemption.is_due()))
    asking.start()
    eventually(lambda: vars(preemption._changed)["_waiters"], "the question")
    assert answers == []
    preemption.decide(0)
    asking.join()
    assert answers == [True]


class Agreements:
    """The agreements of several ranks, all of them in this process."""

    def __init__(self, number):
        self.store = dist.HashStore()
        self.all = [StoreAgreement(lambda: self.store, rank, number) for rank in range(number)]

    def ask(self, rank, times):
        """Have this rank's function ask so often."""
        assert not any(self.all[rank].preemption.is_due() for _ in range(times))

    def decided(self, rank):
        preemption = self.all[rank].preemption
        return eventually(lambda: preemption._due_from is not None and [preemption._due_from], "a decision")[0]


def test_ranks_that_nobody_watches_agree_over_a_store():
    """On the turn of the foremost, whoever of them was asked."""
    agreements = Agreements(3)
    for rank, times in enumerate((2, 5, 3)):
        agreements.ask(rank, times)
    with agreements.all[0], agreements.all[1], agreements.all[2]:
        agreements.all[2].ask()
        assert [agreements.decided(rank) for rank in range(3)] == [5, 5, 5]
    assert not [thread for thread in threading.enumerate() if thread.name == "parawrap-rank-agreement"]


def test_a_rank_that_nobody_watches_may_end_before_it_is_asked():
    """It has no say: the others agree without it."""
    agreements = Agreements(2)
    with agreements.all[0]:
        with agreements.all[1]:
            agreements.ask(1, 9)
        agreements.ask(0, 4)
        agreements.all[0].ask()
        assert agreements.decided(0) == 4


def test_a_rank_that_is_alone_with_its_wish_ends_when_it_likes():
    """Others that never come leave it waiting for nothing but its own function."""
    agreements = Agreements(2)
    with agreements.all[0]:
        agreements.all[0].ask()
        eventually(lambda: agreements.store.check(["answered/0"]), "its answer")
    assert agreements.all[0].preemption._due_from is None


def test_a_rank_travels_without_its_line_to_the_others():
    """What arrives elsewhere knows its place, and is never asked to save."""
    preemption = Preemption()
    rank = Rank(1, 1, 0, 2, torch.device("cpu"), ranks(), None, 3, preemption)
    preemption.decide(0)
    assert rank.should_checkpoint()
    sent = pickle.loads(pickle.dumps(rank))
    assert (sent, sent.restart, sent.preemption) == (rank, 3, None)
    assert not sent.should_checkpoint()
    assert rank.preemption is preemption


def test_a_rank_knows_its_process():
    """What a rank returns of itself arrives, without what cannot travel."""
    (rank, pid), *_ = wrapper(ranks(1))(lambda: (current_rank(), os.getpid()))()
    assert (rank.global_rank, rank.preemption, rank.group) == (0, None, None)
    assert pid != os.getpid()
