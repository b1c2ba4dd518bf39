"""Attempts, agreements, and ends of a `Run` with simulated nodes, and the `Loop` that runs it.

A function simulates the ranks: it handles one message at a time and returns True if the rank must skip its default
reaction. These tests start no processes.
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
from parawrap.launch.coordinator import _coordinator, _standstill
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._ending import results_or_error
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.messages._first_rank_failure import Ended, Requeued, Returned
from parawrap.launch.messages._pickle_values import packed
from parawrap.launch.rank._control_thread import Status
from parawrap.launch.rank._rank_assignment import Surroundings
from tests.helpers.processes import notes_of, ranks

GRACE_S = 30.0


class SimulatedRank:
    """One simulated rank of one attempt."""

    def __init__(self, node, orders, watcher):
        self._node, self._watcher = node, watcher
        self.number, self.restart = orders.place.global_rank, orders.place.restart
        self.received = []

    def send_outcome(self, word, file=None, **body):
        self._watcher.on_word(self.number, word, {"at": time.time(), **body}, file)

    def send(self, word, body):
        """Send a message that does not end the rank."""
        self._watcher.on_word(self.number, word, body, None)

    def ends(self, code=0, lost_with=""):
        """End the rank's process."""
        if self._node.alive.get(self.number) is self:
            del self._node.alive[self.number]
            self._watcher.on_end(self.number, code, lost_with)

    def returns(self, value=None):
        self.send_outcome("returned", packed(value, "result", "the result"))

    def raises(self, error, *, is_echo=False):
        file = packed(error, "exception", "the exception")
        self.send_outcome("raised", file, summary=repr(error), traceback="", is_echo=is_echo)
        self.ends(1)

    def requeues(self):
        self.send_outcome("requeued")


class SimulatedNode:
    """A node of simulated ranks. Messages to ranks arrive in a later turn of the loop, as over a connection."""

    host = "stage"

    def __init__(self, loop, play):
        self._loop, self._play = loop, play
        self.alive, self.started = {}, []
        self.is_lost = self.is_closed = False

    def start(self, orders, watcher):
        rank = SimulatedRank(self, orders, watcher)
        self.started.append(rank)
        self.alive[rank.number] = rank
        watcher.on_start(rank.number, 1000 + rank.number)
        self._deliver(rank, "begin", None)

    def send(self, rank, word, body=None):
        if rank in self.alive:
            self._deliver(self.alive[rank], word, body)

    def lose(self):
        """Lose the node with all its ranks."""
        self.is_lost = True
        for rank in list(self.alive.values()):
            rank.ends(None, "its node")

    def _deliver(self, rank, word, body):
        def deliver():
            if self.alive.get(rank.number) is rank:
                rank.received.append(word if body is None else (word, body))
                if not self._play(rank, word, body):
                    react_by_default(rank, word)

        self._loop.call_soon(deliver)

    def kill(self, rank):
        if rank in self.alive:
            self.alive[rank].ends(-signal.SIGKILL)

    def look(self):
        return float("inf")

    @property
    def is_over(self):
        return not self.alive

    def give_up(self):
        """Do nothing: simulated ranks always report their end."""

    def close(self):
        self.is_closed = True


def react_by_default(rank, word):
    """End the rank if the message says so."""
    if word == "end":
        rank.send_outcome("ended")
        rank.ends(1)
    elif word == "bye":
        rank.ends()


def simulate(play, **fields):
    """Run two simulated ranks and return the platform and the ending."""
    stage = Stage(play, **fields)
    return stage.platform, stage.ending()


class Stage:
    """A run of simulated ranks on one simulated node."""

    def __init__(self, play, count=2, *, failures=0, requeues=False, **fields):
        self.platform = ranks(count, **{"grace_s": GRACE_S} | fields)
        loop = Loop()
        self.node = SimulatedNode(loop, lambda rank, word, body: play(self.run, rank, word, body))
        orders = assignments_of(self.platform, None, Surroundings.here())
        transcripts = [Transcript(rank, printer=None) for rank in range(self.platform.world_size)]
        self.run = Attempts(
            "play", self.platform, loop, [self.node], orders, transcripts, failures=failures, requeues=requeues
        )

    def ending(self):
        """Return the ending of the run, and check that the run closed its node."""
        try:
            self.run.begin()
            return self.run.run()
        finally:
            assert self.node.is_closed

    def results_or_error(self):
        return results_or_error("play", self.platform, self.ending())

    @property
    def starts(self):
        """Return the restart and number of each started rank, in the order of the starts."""
        return [(rank.restart, rank.number) for rank in self.node.started]

    def received(self, restart=0):
        """Return the messages to each rank of an attempt, without those about its start and end."""
        started = [rank for rank in self.node.started if rank.restart == restart]
        return [[word for word in rank.received if word not in {"begin", "end", "bye"}] for rank in started]


# --- attempts ---


def test_ranks_that_return_are_not_started_again():
    """Returned values are the results, even if the platform allows restarts."""

    def play(_run, rank, word, _body):
        if word == "begin":
            rank.returns(rank.number)

    stage = Stage(play, max_restarts=3)
    assert stage.results_or_error() == (0, 1)
    assert stage.starts == [(0, 0), (0, 1)]


def test_failed_ranks_restart_max_restarts_times():
    """Then the last failure is raised, with a note for each earlier attempt."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            rank.raises(ValueError(rank.restart))

    stage = Stage(play, max_restarts=2)
    error = stage.results_or_error()
    assert repr(error) == "ValueError(2)"
    assert stage.starts == [(restart, number) for restart in range(3) for number in range(2)]
    assert [note for note in notes_of(error).splitlines() if note.startswith("attempt")] == [
        "attempt 0 failed: rank 1 raised ValueError(0)",
        "attempt 1 failed: rank 1 raised ValueError(1)",
    ]


def test_a_death_in_an_earlier_attempt_is_noted():
    """The note on the last failure names the rank and the signal."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            rank.ends(-signal.SIGSEGV) if rank.restart == 0 else rank.raises(KeyError("last"))

    error = Stage(play, max_restarts=1).results_or_error()
    assert repr(error) == "KeyError('last')"
    assert "attempt 0 failed: rank 0 was killed by SIGSEGV" in notes_of(error)


def test_a_requeue_uses_up_no_restart():
    """Requeues do not count: a failure after several requeues is still followed by a restart."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart < 3:
            rank.requeues()
        elif word == "begin" and rank.restart == 3:
            rank.raises(ValueError("once"))
        elif word == "begin":
            rank.returns(rank.restart)

    stage = Stage(play, max_restarts=1)
    ending = stage.ending()
    assert results_or_error("play", stage.platform, ending) == (4, 4)
    assert ending.history == [
        *(f"attempt {restart} requested a restart" for restart in range(3)),
        "attempt 3 failed: rank 0 raised ValueError('once')",
    ]


def test_failures_before_the_run_count():
    """Failures of earlier runs of the same launch count towards `max_restarts`."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            rank.raises(ValueError(rank.restart))

    stage = Stage(play, max_restarts=2, failures=1)
    assert repr(stage.results_or_error()) == "ValueError(1)"
    assert stage.run.failures == 2


@pytest.mark.parametrize("requeues", [True, False])
def test_a_lost_node_ends_the_run(requeues):
    """A run cannot restart on a lost node: it ends as requeued if its cluster requeues, otherwise as a failure."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            stage.node.lose()

    stage = Stage(play, max_restarts=1, requeues=requeues)
    ending = stage.ending()
    assert ending.requeued == requeues
    assert "was lost with its node" in str(results_or_error("play", stage.platform, ending))
    assert stage.starts == [(0, 0), (0, 1)]


def test_a_lost_node_without_restarts_left_is_a_failure():
    """A lost node is not requeued after `max_restarts` restarts."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            stage.node.lose()

    stage = Stage(play, requeues=True)
    assert not stage.ending().requeued


def test_the_time_limit_covers_all_attempts():
    """After `timeout_min`, failed attempts do not restart."""
    timers = []

    def play(run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            timer = threading.Timer(0.05, lambda: run._loop.call_soon(lambda: rank.ends(7)))
            timer.start()
            timers.append(timer)
        elif word == "stacks":
            rank.send("stacks", "playing")
            return True
        return False

    stage = Stage(play, max_restarts=10**6, timeout_min=0.3 / 60)
    error = stage.results_or_error()
    for timer in timers:
        timer.join()
    assert isinstance(error, LaunchTimeoutError)
    assert stage.starts[-1][0] > 0


def test_an_attempt_that_cannot_be_started_ends_the_run(monkeypatch):
    """If a rank cannot start, its LaunchError is raised, and the attempt's other ranks are ended."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart == 0:
            rank.raises(ValueError())

    start = SimulatedNode.start

    def refuse(node, orders, watcher):
        if (orders.place.restart, orders.place.global_rank) == (1, 1):
            msg = "no more processes"
            raise LaunchError(msg)
        start(node, orders, watcher)

    monkeypatch.setattr(SimulatedNode, "start", refuse)
    stage = Stage(play, max_restarts=1)
    with pytest.raises(LaunchError, match="no more processes"):
        stage.ending()
    assert not stage.node.alive
    assert stage.starts == [(0, 0), (0, 1), (1, 0)]


# --- cancel ---


@pytest.mark.parametrize("leaves", ["raises", "requeues"])
def test_a_cancel_between_two_attempts_prevents_the_next(leaves):
    """If the cancel arrives while ranks end to restart, they do not restart, and the launch is cancelled."""

    def play(run, rank, word, _body):
        if word == "begin" and leaves == "requeues":
            rank.requeues()
        elif word == "begin" and rank.number == 1:
            rank.raises(ValueError())
        elif word in {"end", "bye"}:
            run.cancel()
            run._loop.call_soon(lambda: react_by_default(rank, word))
            return True
        return False

    stage = Stage(play, max_restarts=1)
    assert isinstance(stage.results_or_error(), LaunchCancelledError)
    assert stage.starts == [(0, 0), (0, 1)]


def test_a_cancel_after_the_last_failure_keeps_the_failure():
    """If no restart is left, a cancel while ranks end does not replace the failure."""

    def play(run, rank, word, _body):
        if word == "begin" and rank.number == 1:
            rank.raises(ValueError("last"))
        elif word == "end":
            run.cancel()
            run._loop.call_soon(lambda: react_by_default(rank, word))
            return True
        return False

    assert repr(Stage(play).results_or_error()) == "ValueError('last')"


def test_a_cancel_ends_the_current_attempt():
    """A cancel in a later attempt ends the ranks of that attempt."""

    def play(run, rank, word, _body):
        if word == "begin" and rank.restart == 0:
            rank.requeues()
        elif word == "begin":
            run.cancel()

    stage = Stage(play)
    assert isinstance(stage.results_or_error(), LaunchCancelledError)
    assert stage.starts[-1] == (1, 1)


# --- preemption ---


def preempted(run, rank, word, counts):
    """Simulate a preemption: rank 0 preempts the run, and all ranks answer with their counts."""
    if word == "begin" and rank.number == 0 and rank.restart == 0:
        run.preempt()
    elif word == "preempt":
        rank.send("answered", counts[rank.number])


def test_ranks_save_at_the_highest_step():
    """Once all ranks have answered, every rank receives the highest count."""

    def play(run, rank, word, body):
        preempted(run, rank, word, [3, 9, 5])
        if word == "checkpoint":
            rank.requeues()
        elif word == "begin" and rank.restart:
            rank.returns("again")

    stage = Stage(play, 3)
    assert stage.results_or_error() == ("again",) * 3
    assert [set(words) for words in stage.received()] == [{"preempt", ("checkpoint", 9)}] * 3


def test_the_step_to_save_at_stays_after_the_foremost_rank_has_left():
    """After the foremost rank has left, the other ranks still receive its count, not an earlier count."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [7, 2, 3])
        if word == "begin" and rank.restart:
            rank.returns()
        elif word == "checkpoint":
            run._loop.call_soon(rank.requeues) if rank.number else rank.requeues()

    stage = Stage(play, 3)
    stage.ending()
    decisions = [word for words in stage.received() for word in words if word != "preempt"]
    assert set(decisions) == {("checkpoint", 7)}


def test_a_rank_that_returns_before_it_answers_blocks_no_agreement():
    """The other ranks agree without the returned rank."""

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
    assert stage.results_or_error() == ("again", "again")
    assert ("checkpoint", 4) in stage.received()[0]


def test_ranks_save_only_after_all_have_answered():
    """A rank that does not answer, and the ranks that wait for it, are ended after grace_s."""

    def play(run, rank, word, _body):
        if word == "preempt" and rank.number == 1:
            return True
        preempted(run, rank, word, [4, 8])
        if word == "begin" and rank.restart:
            rank.returns("again")
        return False

    stage = Stage(play, grace_s=0.05)
    assert stage.results_or_error() == ("again", "again")
    assert stage.received() == [["preempt"], ["preempt"]]


def test_two_preemptions_in_a_row_are_one():
    """Two preemptions in a row send one request and cause one restart."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [0, 0])
        if word == "begin" and rank.number == 0 and rank.restart == 0:
            run.preempt()
        elif word == "checkpoint":
            rank.requeues()
        elif word == "begin" and rank.restart:
            rank.returns(rank.restart)

    stage = Stage(play)
    assert stage.results_or_error() == (1, 1)
    assert [words.count("preempt") for words in stage.received()] == [1, 1]


def test_preempted_ranks_that_return_have_results():
    """Preempted ranks that return do not start again."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [0, 0])
        if word == "checkpoint":
            rank.returns("done")

    stage = Stage(play)
    assert stage.results_or_error() == ("done", "done")
    assert stage.starts == [(0, 0), (0, 1)]


def test_late_preempted_ranks_are_named_and_restarted(caplog):
    """A warning names the ranks that exceed grace_s; all ranks start again, even if another rank has returned."""

    def play(run, rank, word, _body):
        preempted(run, rank, word, [0, 0, 0])
        if (word == "checkpoint" and rank.number == 1) or (word == "begin" and rank.restart):
            rank.returns("again")

    stage = Stage(play, 3, grace_s=0.05)
    ending = stage.ending()
    assert results_or_error("play", stage.platform, ending) == ("again",) * 3
    assert ending.history == ["attempt 0 was preempted"]
    assert "rank(s) 0, 2 of play did not call requeue() within grace_s=0.05" in caplog.text


def test_late_ranks_are_not_ended_if_the_cluster_ends_them():
    """With ``ends_late=False``, ranks may take longer than grace_s, because the cluster has its own limit."""
    timers = []

    def play(run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            run.preempt(ends_late=False)
        elif word == "preempt":
            rank.send("answered", 0)
        elif word == "checkpoint" and len(timers) < 2:
            timers.append(threading.Timer(0.2, lambda: run._loop.call_soon(lambda: rank.returns("late"))))
            timers[-1].start()

    assert Stage(play, grace_s=0.02).results_or_error() == ("late", "late")
    for timer in timers:
        timer.join()


def test_a_late_rank_after_a_requeue_restarts_without_a_warning(caplog):
    """A rank that stays after another rank's requeue is restarted. Without a preemption, no warning is logged."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == "begin" and rank.number == 1:
            rank.requeues()

    assert Stage(play, grace_s=0.05).results_or_error() == ("again", "again")
    assert not caplog.text


@pytest.mark.parametrize("is_preempted", [True, False])
def test_a_failure_wins_over_requeues(is_preempted):
    """If one rank raises while others requeue, its exception is raised."""

    def play(run, rank, word, _body):
        if is_preempted:
            preempted(run, rank, word, [0, 0, 0])
        if word == ("checkpoint" if is_preempted else "begin"):
            rank.raises(ValueError("own")) if rank.number == 2 else rank.requeues()

    stage = Stage(play, 3)
    assert repr(stage.results_or_error()) == "ValueError('own')"
    assert stage.starts == [(0, 0), (0, 1), (0, 2)]


def test_echoes_of_a_requeue_are_not_failures():
    """If a requeue breaks another rank's collective, both ranks start again."""

    def play(_run, rank, word, _body):
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == "begin" and rank.number == 0:
            rank.requeues()
        elif word == "begin":
            rank.raises(RuntimeError("Connection closed by peer"), is_echo=True)

    assert Stage(play).results_or_error() == ("again", "again")


@pytest.mark.parametrize("is_preempted", [True, False])
def test_an_echo_alone_is_a_failure_unless_ranks_were_preempted(is_preempted, monkeypatch):
    """The end of preempted ranks breaks other ranks' collectives, so their echoes do not count."""
    monkeypatch.setattr(_coordinator, "_ECHO_WAIT_S", 0.01)

    def play(run, rank, word, _body):
        if is_preempted:
            preempted(run, rank, word, [0, 0])
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == ("checkpoint" if is_preempted else "begin") and rank.number == 1:
            rank.raises(RuntimeError("Connection closed by peer"), is_echo=True)

    outcome = Stage(play).results_or_error()
    assert outcome == ("again", "again") if is_preempted else isinstance(outcome, RuntimeError)


def test_a_preemption_after_a_cancel_is_ignored():
    """Ranks that are being ended receive no preemption."""

    def play(run, rank, word, _body):
        if word == "begin":
            run.cancel()
        elif word == "end":
            run.preempt()
            run._loop.call_soon(lambda: react_by_default(rank, word))
            return True
        return False

    stage = Stage(play)
    assert isinstance(stage.results_or_error(), LaunchCancelledError)
    assert stage.received() == [[], []]


# --- clusters that requeue the run ---


@pytest.mark.parametrize("asks", [True, False])
def test_a_requeue_ends_the_run_on_a_cluster_that_requeues(asks):
    """The ending is requeued, whether ranks called requeue or exceeded grace_s after a preemption."""

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


def test_failures_restart_in_place_on_a_cluster_that_requeues():
    """The run itself restarts after failures; the cluster only handles requeues."""

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


def test_a_cancel_wins_over_a_requeue():
    """If a cancel arrives while requeueing ranks end, the ending is cancelled, not requeued."""

    def play(run, rank, word, _body):
        if word == "begin":
            rank.requeues()
        elif word == "bye":
            run.cancel()
            run._loop.call_soon(lambda: react_by_default(rank, word))
            return True
        return False

    ending = Stage(play, requeues=True).ending()
    assert (ending.cancelled, ending.requeued) == (True, False)


@pytest.mark.parametrize("is_preempted", [True, False])
def test_ranks_that_wait_for_a_requeued_rank_restart(is_preempted, monkeypatch):
    """Ranks that wait for a requeued rank in a collective are ended and restarted, and do not count as stuck."""
    monkeypatch.setattr(_standstill, "STUCK_S", 0.0)
    waits = Status(1.0, 1.0, 1.0, "a collective")

    def play(run, rank, word, _body):
        if is_preempted:
            preempted(run, rank, word, [0, 0])
        if word == "begin" and rank.restart:
            rank.returns("again")
        elif word == ("checkpoint" if is_preempted else "begin"):
            rank.requeues() if rank.number == 0 else run._loop.call_soon(lambda: rank.send("status", waits))

    assert Stage(play).results_or_error() == ("again", "again")


@pytest.mark.parametrize("loses", ["then fails", "fails"])
def test_a_failure_during_a_preemption_is_requeued(loses):
    """After a preemption, a failure does not restart in place, because the cluster takes the machines back."""

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
            run._loop.call_soon(lambda: react_by_default(rank, word))
            return True
        return False

    stage = Stage(play, requeues=True, max_restarts=1)
    assert stage.ending().requeued
    assert stage.starts == [(0, 0), (0, 1)]


def test_a_node_that_does_not_report_ended_ranks_is_given_up(monkeypatch):
    """A failure ends the launch in bounded time, even if a node's agent is stopped."""
    monkeypatch.setattr(_coordinator, "_GIVE_UP_S", 0.1)

    def play(_run, rank, word, _body):
        if word == "begin" and rank.number == 0:
            rank.raises(ValueError("three"))
        return True

    stage = Stage(play, grace_s=0.1)
    stage.node.kill = lambda _rank: None
    stage.node.give_up = stage.node.lose
    assert repr(results_or_error("play", stage.platform, stage.ending())) == "ValueError('three')"


def test_time_while_the_watcher_was_stopped_is_not_silence(monkeypatch):
    """A watcher that was stopped reads the messages of its ranks before it checks `hang_timeout_s`."""
    clock = time.monotonic
    ahead = 0.0
    monkeypatch.setattr(_coordinator.time, "monotonic", lambda: clock() + ahead)

    def play(run, rank, word, _body):
        nonlocal ahead
        if word == "begin":
            ahead = 1000.0 * (rank.number + 1)  # as if it had been stopped for that long
            run._loop.call_soon(rank.returns)
            return True
        return False

    assert results_or_error("play", *simulate(play, hang_timeout_s=5)) == (None, None)


# --- the loop ---


@contextmanager
def pipe():
    """Open a pipe and yield its two ends as files."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as reading, os.fdopen(writer, "wb", buffering=0) as writing:
        yield reading, writing


@pytest.fixture
def loop():
    with closing(Loop()) as made:
        yield made


def test_call_soon_from_another_thread_wakes_the_loop(loop):
    """The call ends the wait and runs in the loop's thread."""
    called = []
    thread = threading.Thread(target=lambda: loop.call_soon(lambda: called.append(threading.get_ident())))
    thread.start()
    loop.turn(float("inf"))
    thread.join()
    assert called == [threading.get_ident()]


def test_calls_run_in_order(loop):
    """Calls run in the order of `call_soon`, including calls that other calls add."""
    called = []
    loop.call_soon(lambda: (called.append(1), loop.call_soon(lambda: called.append(3))))
    loop.call_soon(lambda: called.append(2))
    loop.turn(0)
    assert called == [1, 2, 3]


def test_a_signal_handler_can_interrupt_call_soon(loop):
    """A signal handler that interrupts `call_soon` can itself use `call_soon` without a deadlock."""
    called = []

    class SignallingQueue(type(loop._calls)):
        def append(self, call):
            if not called:
                called.append("signalled")
                signal.raise_signal(signal.SIGUSR1)
            super().append(call)

    loop._calls = SignallingQueue()
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(lambda: called.append("handler")))
    try:
        loop.call_soon(lambda: called.append("main"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    loop.turn(0)
    assert sorted(called) == ["handler", "main", "signalled"]


def test_a_watched_file_is_handled_until_it_is_forgotten(loop):
    """The handler runs once per turn while the file has data, and never after `forget`."""
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


def test_a_file_forgotten_in_the_same_turn_is_not_handled(loop):
    """If the handler of one readable file forgets and closes another, the other's handler does not run."""
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


def test_call_soon_after_close_does_nothing():
    """A closed loop accepts calls and never runs them."""
    loop = Loop()
    loop.close()
    loop.call_soon(lambda: pytest.fail("called"))


def test_a_loop_leaves_no_file_open():
    """`close` closes the loop's own files, also if it watched others."""
    before = psutil.Process().num_fds()
    loop = Loop()
    with pipe() as (reading, _):
        loop.watch(reading, lambda: None)
        loop.close()
    assert psutil.Process().num_fds() <= before  # less, if files of earlier tests were collected
