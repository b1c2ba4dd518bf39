"""What a run decides, with nodes that only play their ranks: attempts, agreements, ends. And the loop that it waits in.

How a rank plays is said by a function, a word at a time: it gives True where the rank is not to do as it would by itself.
Nothing here starts a process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, contextmanager

import psutil
import pytest

from parawrap import LaunchCancelledError, LaunchTimeoutError
from parawrap.errors import LaunchError
from parawrap.launch.parcels._outcomes import Ended, Requeued, Returned
from parawrap.launch.parcels._packing import packed
from parawrap.launch.ranks._assignment import Surroundings
from parawrap.launch.watch import _supervisor
from parawrap.launch.watch._ending import verdict
from parawrap.launch.watch._launch import assignments_of
from parawrap.launch.watch._loop import Loop
from parawrap.launch.watch._run import Run
from parawrap.launch.watch._transcript import Transcript
from tests.launch.processes import notes_of, ranks

GRACE_S = 30.0


class PlayedRank:
    """One rank of one attempt: says and does what it is told to by the functions below."""

    def __init__(self, node, orders, watcher):
        self._node, self._watcher = node, watcher
        self.number, self.restart = orders.place.global_rank, orders.place.restart
        self.heard = []

    def say(self, word, file=None, **body):
        self._watcher.on_word(self.number, word, {"at": time.time(), **body}, file)

    def tell(self, word, body):
        """Say something that is no end."""
        self._watcher.on_word(self.number, word, body, None)

    def ends(self, code=0, lost_with=""):
        """Its process does."""
        if self._node.alive.get(self.number) is self:
            del self._node.alive[self.number]
            self._watcher.on_end(self.number, code, lost_with)

    def returns(self, value=None):
        self.say("returned", packed(value, "result", "the result"))

    def raises(self, error, *, is_echo=False):
        file = packed(error, "exception", "the exception")
        self.say("raised", file, summary=repr(error), traceback="", is_echo=is_echo)
        self.ends(1)

    def requeues(self):
        self.say("requeued")


class PlayedNode:
    """A node of such ranks. What is said to them reaches them in a later turn of the loop, as it would over a line."""

    host = "stage"

    def __init__(self, loop, play):
        self._loop, self._play = loop, play
        self.alive, self.cast = {}, []
        self.is_lost = self.is_closed = False

    def start(self, orders, watcher):
        rank = PlayedRank(self, orders, watcher)
        self.cast.append(rank)
        self.alive[rank.number] = rank
        watcher.on_start(rank.number, 1000 + rank.number)
        self._hear(rank, "begin", None)

    def tell(self, rank, word, body=None):
        if rank in self.alive:
            self._hear(self.alive[rank], word, body)

    def lose(self):
        """Break off, with all ranks."""
        self.is_lost = True
        for rank in list(self.alive.values()):
            rank.ends(None, "its node")

    def _hear(self, rank, word, body):
        def hear():
            if self.alive.get(rank.number) is rank:
                rank.heard.append(word if body is None else (word, body))
                if not self._play(rank, word, body):
                    by_itself(rank, word)

        self._loop.call_soon(hear)

    def kill(self, rank):
        if rank in self.alive:
            self.alive[rank].ends(-signal.SIGKILL)

    def look(self):
        return float("inf")

    @property
    def is_over(self):
        return not self.alive

    def give_up(self):
        """Played ranks always tell."""

    def close(self):
        self.is_closed = True


def by_itself(rank, word):
    """What a rank does of its own accord: it ends when told to."""
    if word == "end":
        rank.say("ended")
        rank.ends(1)
    elif word == "bye":
        rank.ends()


def play_out(play, **fields):
    """The platform and the ending of a run of two such ranks."""
    stage = Stage(play, **fields)
    return stage.platform, stage.ending()


class Stage:
    """A run of played ranks, and the node they play on."""

    def __init__(self, play, count=2, *, failures=0, requeues=False, **fields):
        self.platform = ranks(count, **{"grace_s": GRACE_S} | fields)
        loop = Loop()
        self.node = PlayedNode(loop, lambda rank, word, body: play(self.run, rank, word, body))
        orders = assignments_of(self.platform, None, Surroundings.here())
        transcripts = [Transcript(rank, prefix="", shown=False, folder=None) for rank in range(self.platform.world_size)]
        self.run = Run("play", self.platform, loop, [self.node], orders, transcripts, failures=failures, requeues=requeues)

    def ending(self):
        """How the run ends; it closes its node in any case."""
        try:
            self.run.begin()
            return self.run.run()
        finally:
            assert self.node.is_closed

    def verdict(self):
        return verdict("play", self.platform, self.ending())

    @property
    def starts(self):
        """Which start each rank was in, in the order of the starts."""
        return [(rank.restart, rank.number) for rank in self.node.cast]

    def heard(self, restart=0):
        """What each rank of an attempt was told, but for its begin and its end."""
        parts = [rank for rank in self.node.cast if rank.restart == restart]
        return [[word for word in rank.heard if word not in {"begin", "end", "bye", "left"}] for rank in parts]


# --- attempts ---


def test_ranks_that_return_are_not_started_again():
    """Their values are the results, whatever the platform would allow."""

    def play(_run, rank, word, _body):
        if word == "begin":
            rank.returns(rank.number)

    stage = Stage(play, max_restarts=3)
    assert stage.verdict() == (0, 1)
    assert stage.starts == [(0, 0), (0, 1)]


def test_the_group_is_started_anew_as_often_as_the_platform_says():
    """Then the last failure is told, with those before it, each by its attempt and its rank."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            rank.raises(ValueError(rank.restart))

    stage = Stage(play, max_restarts=2)
    error = stage.verdict()
    assert repr(error) == "ValueError(2)"
    assert stage.starts == [(restart, number) for restart in range(3) for number in range(2)]
    assert [note for note in notes_of(error).splitlines() if note.startswith("attempt")] == [
        "attempt 0 failed: rank 1 raised ValueError(0)",
        "attempt 1 failed: rank 1 raised ValueError(1)",
    ]


def test_a_death_between_two_restarts_is_told_in_the_history():
    """By its signal, as it would have been at the end."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            rank.ends(-signal.SIGSEGV) if rank.restart == 0 else rank.raises(KeyError("last"))

    error = Stage(play, max_restarts=1).verdict()
    assert repr(error) == "KeyError('last')"
    assert "attempt 0 failed: rank 0 was killed by SIGSEGV" in notes_of(error)


def test_a_requeue_uses_up_no_restart():
    """However often ranks ask to be started anew, a failure after that is followed by another attempt."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart < 3:
            rank.requeues()
        elif word == "begin" and rank.restart == 3:
            rank.raises(ValueError("once"))
        elif word == "begin":
            rank.returns(rank.restart)

    stage = Stage(play, max_restarts=1)
    ending = stage.ending()
    assert verdict("play", stage.platform, ending) == (4, 4)
    assert ending.history == [
        *(f"attempt {restart} asked for a restart" for restart in range(3)),
        "attempt 3 failed: rank 0 raised ValueError('once')",
    ]


def test_failures_before_the_run_count():
    """Where somebody else has started the ranks before, they are not started anew more often for that."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            rank.raises(ValueError(rank.restart))

    stage = Stage(play, max_restarts=2, failures=1)
    assert repr(stage.verdict()) == "ValueError(1)"
    assert stage.run.failures == 2


@pytest.mark.parametrize("requeues", [True, False])
def test_a_lost_node_is_the_end_of_a_run(requeues):
    """Nothing can be started there: it is left to somebody else, or the loss is told; whatever the platform allows."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            stage.node.lose()

    stage = Stage(play, max_restarts=1, requeues=requeues)
    ending = stage.ending()
    assert ending.requeued == requeues
    assert "was lost with its node" in str(verdict("play", stage.platform, ending))
    assert stage.starts == [(0, 0), (0, 1)]


def test_a_lost_node_is_told_when_no_restart_is_left():
    """Somebody else is not asked to start the ranks anew more often than the platform allows."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            stage.node.lose()

    stage = Stage(play, requeues=True)
    assert not stage.ending().requeued


def test_the_time_limit_is_one_for_all_attempts():
    """Attempts that fail, each of them soon, are no longer started anew when the time is up."""
    going = []

    def play(run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            failing = threading.Timer(0.05, lambda: run._loop.call_soon(lambda: rank.ends(7)))
            failing.start()
            going.append(failing)
        elif word == "stacks":
            rank.tell("stacks", "playing")
            return True
        return False

    stage = Stage(play, max_restarts=10**6, timeout_min=0.3 / 60)
    error = stage.verdict()
    for failing in going:
        failing.join()
    assert isinstance(error, LaunchTimeoutError)
    assert stage.starts[-1][0] > 0


def test_an_attempt_that_cannot_be_started_ends_the_run(monkeypatch):
    """Those of its ranks that were started are ended, and why the others were not is raised."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart == 0:
            rank.raises(ValueError())

    start = PlayedNode.start

    def refuse(node, orders, watcher):
        if (orders.place.restart, orders.place.global_rank) == (1, 1):
            msg = "no more processes"
            raise LaunchError(msg)
        start(node, orders, watcher)

    monkeypatch.setattr(PlayedNode, "start", refuse)
    stage = Stage(play, max_restarts=1)
    with pytest.raises(LaunchError, match="no more processes"):
        stage.ending()
    assert not stage.node.alive
    assert stage.starts == [(0, 0), (0, 1), (1, 0)]


# --- cancel ---


@pytest.mark.parametrize("leaves", ["raises", "requeues"])
def test_a_cancel_between_two_attempts_is_the_end(leaves):
    """Ranks that are leaving to be started anew when it comes are not, and the launch is a cancelled one."""

    def play(run, rank, word, _body):
        if word == "begin" and leaves == "requeues":
            rank.requeues()
        elif word == "begin" and rank.number == 1:
            rank.raises(ValueError())
        elif word in {"end", "bye"}:
            run.cancel()
            run._loop.call_soon(lambda: by_itself(rank, word))
            return True
        return False

    stage = Stage(play, max_restarts=1)
    assert isinstance(stage.verdict(), LaunchCancelledError)
    assert stage.starts == [(0, 0), (0, 1)]


def test_a_cancel_that_comes_when_the_last_attempt_has_failed_leaves_the_failure():
    """Nothing more was going to be started, so there was nothing to cancel."""

    def play(run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            rank.raises(ValueError("told"))
        elif word == "end":
            run.cancel()
            run._loop.call_soon(lambda: by_itself(rank, word))
            return True
        return False

    assert repr(Stage(play).verdict()) == "ValueError('told')"


def test_a_cancel_in_a_later_attempt_ends_that_one():
    """It is the present attempt's ranks that are told to end."""

    def play(run, rank, word, _body):
        if word == "begin" and rank.restart == 0:
            rank.requeues()
        elif word == "begin":
            run.cancel()

    stage = Stage(play)
    assert isinstance(stage.verdict(), LaunchCancelledError)
    assert stage.starts[-1] == (1, 1)


# --- preemption ---


def preempted(run, rank, word, counts):
    """Rank 0 has the run preempted; all answer with their counts."""
    if word == "begin" and rank.number == 0 and rank.restart == 0:
        run.preempt()
    elif word == "preempt":
        rank.tell("answered", counts[rank.number])


def test_the_first_turn_that_none_has_begun_is_the_one_to_save_at():
    """Every rank is told the highest count of all, once all have answered."""

    def play(run, rank, word, body):
        preempted(run, rank, word, [3, 9, 5])
        if word == "checkpoint":
            rank.requeues()
        elif word == "begin" and rank.restart:
            rank.returns("again")

    stage = Stage(play, 3)
    assert stage.verdict() == ("again",) * 3
    assert [set(words) for words in stage.heard()] == [{"preempt", ("checkpoint", 9)}] * 3


def test_the_turn_to_save_at_stays_when_the_rank_that_was_ahead_has_left():
    """Those behind are told no earlier one then: they may not have come that far yet."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [7, 2, 3])
        if word == "begin" and rank.restart:
            rank.returns()
        elif rank.restart == 0 and word == ("checkpoint" if rank.number == 0 else "left"):
            rank.requeues()

    stage = Stage(play, 3)
    stage.ending()
    told = [word for words in stage.heard() for word in words if word != "preempt"]
    assert set(told) == {("checkpoint", 7)}


def test_a_rank_that_leaves_before_it_answers_holds_up_nobody():
    """The others agree among themselves."""

    def play(run, rank, word, _body):
        if word == "preempt" and rank.number == 1:
            rank.returns()
            return True
        preempted(run, rank, word, [4, 8])
        if word == "checkpoint":
            rank.requeues()
        elif word == "begin" and rank.restart:
            rank.returns("again")
        return False

    stage = Stage(play)
    assert stage.verdict() == ("again", "again")
    assert ("checkpoint", 4) in stage.heard()[0]


def test_nobody_is_told_to_save_before_all_have_answered():
    """A rank that gives no answer is ended after grace_s, and so are those that wait for it."""

    def play(run, rank, word, _body):
        if word == "preempt" and rank.number == 1:
            return True
        preempted(run, rank, word, [4, 8])
        if word == "begin" and rank.restart:
            rank.returns("again")
        return False

    stage = Stage(play, grace_s=0.05)
    assert stage.verdict() == ("again", "again")
    assert stage.heard() == [["preempt"], ["preempt"]]


def test_two_preemptions_in_a_row_are_one():
    """Ranks are asked once, and started anew once."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [0, 0])
        if word == "begin" and rank.number == 0 and rank.restart == 0:
            run.preempt()
        elif word == "checkpoint":
            rank.requeues()
        elif word == "begin" and rank.restart:
            rank.returns(rank.restart)

    stage = Stage(play)
    assert stage.verdict() == (1, 1)
    assert [words.count("preempt") for words in stage.heard()] == [1, 1]


def test_preempted_ranks_that_return_have_results():
    """They are not started anew for having been preempted."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [0, 0])
        if word == "checkpoint":
            rank.returns("done")

    stage = Stage(play)
    assert stage.verdict() == ("done", "done")
    assert stage.starts == [(0, 0), (0, 1)]


def test_preempted_ranks_that_are_late_are_named_and_started_anew(caplog):
    """Also where others have returned in time."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [0, 0, 0])
        if (word == "checkpoint" and rank.number == 1) or (word == "begin" and rank.restart):
            rank.returns("again")

    stage = Stage(play, 3, grace_s=0.05)
    ending = stage.ending()
    assert verdict("play", stage.platform, ending) == ("again",) * 3
    assert ending.history == ["attempt 0 was preempted"]
    assert "rank(s) 0, 2 of play had not called requeue() within grace_s=0.05" in caplog.text


def test_late_ranks_are_left_alone_where_somebody_else_ends_them():
    """Then grace_s is no limit of the run's: whoever is in time for the other clock has returned."""
    going = []

    def play(run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            run.preempt(ends_late=False)
        elif word == "preempt":
            rank.tell("answered", 0)
        elif word == "checkpoint" and len(going) < 2:
            going.append(threading.Timer(0.2, lambda: run._loop.call_soon(lambda: rank.returns("late"))))
            going[-1].start()

    assert Stage(play, grace_s=0.02).verdict() == ("late", "late")
    for returning in going:
        returning.join()


def test_a_late_rank_beside_one_that_asked_is_started_anew_without_a_preemption(caplog):
    """Nobody was preempted, so nobody is warned of that."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == "begin" and rank.number == 1:
            rank.requeues()

    assert Stage(play, grace_s=0.05).verdict() == ("again", "again")
    assert not caplog.text


@pytest.mark.parametrize("is_preempted", [True, False])
def test_a_failure_beside_requeues_is_the_failure(is_preempted):
    """What a rank raises of its own is told, whatever the others have asked for."""

    def play(run, rank, word, _body):
        if is_preempted:
            preempted(run, rank, word, [0, 0, 0])
        if word == ("checkpoint" if is_preempted else "begin"):
            rank.raises(ValueError("own")) if rank.number == 2 else rank.requeues()

    stage = Stage(play, 3)
    assert repr(stage.verdict()) == "ValueError('own')"
    assert stage.starts == [(0, 0), (0, 1), (0, 2)]


def test_echoes_of_a_requeue_are_no_failures():
    """A rank whose collective broke because another one has left to be started anew is started anew with it."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == "begin" and rank.number == 0:
            rank.requeues()
        elif word == "begin":
            rank.raises(RuntimeError("Connection closed by peer"), is_echo=True)

    assert Stage(play).verdict() == ("again", "again")


@pytest.mark.parametrize("is_preempted", [True, False])
def test_an_echo_alone_is_a_failure_unless_ranks_were_preempted(is_preempted, monkeypatch):
    """Preempted ranks that are ended break each other's collectives."""
    monkeypatch.setattr(_supervisor, "_ECHO_WAIT_S", 0.01)

    def play(run, rank, word, _body):
        if is_preempted:
            preempted(run, rank, word, [0, 0])
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == ("checkpoint" if is_preempted else "begin") and rank.number == 1:
            rank.raises(RuntimeError("Connection closed by peer"), is_echo=True)

    told = Stage(play).verdict()
    assert told == ("again", "again") if is_preempted else isinstance(told, RuntimeError)


def test_a_preemption_after_the_time_was_up_is_too_late():
    """Ranks that are being ended are asked nothing more."""

    def play(run, rank, word, _body):
        if word == "begin":
            run.cancel()
        elif word == "end":
            run.preempt()
            run._loop.call_soon(lambda: by_itself(rank, word))
            return True
        return False

    stage = Stage(play)
    assert isinstance(stage.verdict(), LaunchCancelledError)
    assert stage.heard() == [[], []]


# --- where somebody else starts the ranks anew ---


@pytest.mark.parametrize("asks", [True, False])
def test_a_run_ends_with_the_wish_where_somebody_else_grants_it(asks):
    """Whether ranks asked, or were late when they were preempted; the outcomes say which."""

    def play(run, rank, word, _body):
        if asks and word == "begin":
            rank.requeues()
        elif not asks:
            preempted(run, rank, word, [0, 0])

    stage = Stage(play, requeues=True, grace_s=0.05)
    ending = stage.ending()
    assert ending.requeued
    assert not ending.is_success
    assert {type(each) for each in ending.outcomes.values()} == {Requeued if asks else Ended}
    assert stage.starts == [(0, 0), (0, 1)]


def test_failures_are_followed_by_restarts_in_place_all_the_same():
    """Only what ranks ask for is left to somebody else."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart == 0:
            rank.raises(ValueError())
        elif word == "begin":
            rank.returns()

    stage = Stage(play, requeues=True, max_restarts=1)
    ending = stage.ending()
    assert not ending.requeued
    assert {type(each) for each in ending.outcomes.values()} == {Returned}
    assert stage.starts[-1] == (1, 1)


def test_a_cancel_of_ranks_that_leave_to_be_requeued_is_a_cancel():
    """Nobody is to grant a wish of a launch that was called off."""

    def play(run, rank, word, _body):
        if word == "begin":
            rank.requeues()
        elif word == "bye":
            run.cancel()
            run._loop.call_soon(lambda: by_itself(rank, word))
            return True
        return False

    ending = Stage(play, requeues=True).ending()
    assert (ending.cancelled, ending.requeued) == (True, False)


@pytest.mark.parametrize("is_preempted", [True, False])
def test_ranks_that_wait_for_one_that_asked_to_be_started_anew_are_not_stuck(is_preempted):
    """They are ended at once, since they will never go on, and are started anew with it."""

    def play(run, rank, word, _body):
        if is_preempted:
            preempted(run, rank, word, [0, 0])
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == ("checkpoint" if is_preempted else "begin") and rank.number == 0:
            rank.requeues()
        elif word == "left":
            rank.tell("stuck", "waits in a collective")

    assert Stage(play).verdict() == ("again", "again")


@pytest.mark.parametrize("loses", ["then fails", "fails"])
def test_ranks_that_fail_on_machines_that_are_wanted_back_are_started_anew_elsewhere(loses):
    """Not where they are: the next attempt there would know nothing of the preemption, and be lost with the machines."""

    def play(run, rank, word, _body):
        if loses == "then fails":
            preempted(run, rank, word, [0, 0])
            if word == "checkpoint" and rank.number == 1:
                rank.raises(ValueError())
            elif word == "begin" and rank.restart:
                rank.returns()
        elif word == "begin" and rank.number == 1:
            rank.raises(ValueError())
        elif word == "end":
            run.preempt(ends_late=False)
            run._loop.call_soon(lambda: by_itself(rank, word))
            return True
        return False

    stage = Stage(play, requeues=True, max_restarts=1)
    assert stage.ending().requeued
    assert stage.starts == [(0, 0), (0, 1)]


def test_a_node_that_does_not_even_tell_of_the_dead_is_given_up(monkeypatch):
    """So that a failure ends the launch in bounded time, also where a node's keeper is stopped."""
    monkeypatch.setattr(_supervisor, "_BURIAL_S", 0.1)

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            rank.raises(ValueError("three"))
        return True

    stage = Stage(play, grace_s=0.1)
    stage.node.kill = lambda _rank: None
    stage.node.give_up = stage.node.lose
    assert repr(verdict("play", stage.platform, stage.ending())) == "ValueError('three')"


def test_silence_while_nobody_watched_is_none(monkeypatch):
    """A process that was stopped, and then finds that much time is gone, hears first what its ranks have said since."""
    clock = time.monotonic
    ahead = 0.0
    monkeypatch.setattr(_supervisor.time, "monotonic", lambda: clock() + ahead)

    def play(run, rank, word, _body):
        nonlocal ahead
        if word == "begin":
            ahead = 1000.0 * (rank.number + 1)  # as if it had been stopped for that long
            run._loop.call_soon(rank.returns)
            return True
        return False

    assert verdict("play", *play_out(play, hang_timeout_s=5)) == (None, None)


# --- the loop ---


@contextmanager
def pipe():
    """The two ends of one, as files."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as reading, os.fdopen(writer, "wb", buffering=0) as writing:
        yield reading, writing


@pytest.fixture
def loop():
    with closing(Loop()) as made:
        yield made


def test_a_wish_of_another_thread_ends_the_wait(loop):
    """However long the loop was going to wait for; the wish is granted by the loop's own thread."""
    granted = []
    wishing = threading.Thread(target=lambda: loop.call_soon(lambda: granted.append(threading.get_ident())))
    wishing.start()
    loop.turn(float("inf"))
    wishing.join()
    assert granted == [threading.get_ident()]


def test_wishes_are_granted_in_their_order_with_those_that_they_lead_to(loop):
    """Also where one of them makes another."""
    granted = []
    loop.call_soon(lambda: (granted.append(1), loop.call_soon(lambda: granted.append(3))))
    loop.call_soon(lambda: granted.append(2))
    loop.turn(0)
    assert granted == [1, 2, 3]


def test_a_signal_may_make_a_wish_while_one_is_made(loop):
    """Its handler runs in the thread that it interrupts, and waits for nothing."""
    granted = []

    class Wishes(type(loop._wishes)):
        def append(self, wish):
            if not granted:
                granted.append("signalled")
                signal.raise_signal(signal.SIGUSR1)
            super().append(wish)

    loop._wishes = Wishes()
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(lambda: granted.append("handler")))
    try:
        loop.call_soon(lambda: granted.append("main"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    loop.turn(0)
    assert sorted(granted) == ["handler", "main", "signalled"]


def test_a_file_that_can_be_read_is_acted_upon_until_it_is_forgotten(loop):
    """Each turn, as long as something is left to read."""
    seen = []
    with pipe() as (reading, writing):
        loop.watch(reading, lambda: seen.append(reading.read(1)))
        loop.turn(0)
        writing.write(b"ab")
        loop.turn(0)
        loop.turn(0)
        assert seen == [b"a", b"b"]
        loop.forget(reading)
        writing.write(b"c")
        loop.turn(0)
        assert seen == [b"a", b"b"]


def test_what_was_forgotten_in_the_same_turn_is_not_acted_upon(loop):
    """Of two files that can both be read, the first one's act may close the other."""
    seen = []

    def act(mine, other):
        seen.append(mine)
        loop.forget(other)
        other.close()

    with pipe() as first, pipe() as second:
        loop.watch(first[0], lambda: act(first[0], second[0]))
        loop.watch(second[0], lambda: act(second[0], first[0]))
        for _, writing in (first, second):
            writing.write(b"!")
        loop.turn(0)
        assert len(seen) == 1
        loop.forget(seen[0])


def test_a_wish_after_the_end_is_nobodys():
    """It may be made, at no cost."""
    loop = Loop()
    loop.close()
    loop.call_soon(lambda: pytest.fail("granted"))


def test_a_loop_leaves_no_file_open():
    """Neither its own nor a claim on those of others."""
    before = psutil.Process().num_fds()
    loop = Loop()
    with pipe() as (reading, _):
        loop.watch(reading, lambda: None)
        loop.close()
    assert psutil.Process().num_fds() == before
