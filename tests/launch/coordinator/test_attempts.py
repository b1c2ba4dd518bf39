"""Attempts of a launch: restarts, cancels, preemptions, and requeues, with simulated and with real ranks.

Simulated ranks handle one message at a time. A handler returns True if the rank must skip its default reaction.
"""

from __future__ import annotations

import re
import signal
import time

import pytest

from parawrap import LaunchTimeoutError
from parawrap.launch.coordinator import _coordinator, _standstill
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._ending import results_or_error
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.messages._first_rank_failure import Ended, Requeued
from parawrap.launch.messages._pickle_values import packed
from parawrap.launch.rank._control_thread import Status
from parawrap.launch.rank._rank_assignment import Surroundings
from tests.helpers.processes import failure_of, notes_of, ranks


class SimulatedRank:
    """One simulated rank of one attempt."""

    def __init__(self, node, orders, watcher):
        self._node, self._watcher = node, watcher
        self.number, self.restart = orders.place.global_rank, orders.place.restart

    def send(self, word, body, file=None):
        self._watcher.on_word(self.number, word, body, file)

    def ends(self, code=0, lost_with=""):
        if self._node.alive.get(self.number) is self:
            del self._node.alive[self.number]
            self._watcher.on_end(self.number, code, lost_with)

    def returns(self, value=None):
        self.send("returned", {"at": time.time()}, packed(value, "result", "the result"))

    def raises(self, error):
        body = {"at": time.time(), "summary": repr(error), "traceback": "", "is_echo": False}
        self.send("raised", body, packed(error, "exception", "the exception"))
        self.ends(1)

    def requeues(self):
        self.send("requeued", {"at": time.time()})

    def react(self, word):
        """End if the message says so."""
        if word == "end":
            self.send("ended", {"at": time.time()})
        if word in {"end", "bye"}:
            self.ends(1 if word == "end" else 0)


class SimulatedNode:
    """A node of simulated ranks. Messages to ranks arrive in a later turn of the loop, as over a connection."""

    host = "stage"

    def __init__(self, loop, handle):
        self._loop, self._handle = loop, handle
        self.alive, self.starts = {}, []
        self.is_lost = False

    def start(self, orders, watcher):
        rank = SimulatedRank(self, orders, watcher)
        self.starts.append((rank.restart, rank.number))
        self.alive[rank.number] = rank
        watcher.on_start(rank.number, 1000 + rank.number)
        self.send(rank.number, "begin")

    def send(self, number, word, body=None):
        rank = self.alive.get(number)

        def deliver():
            if rank is self.alive.get(number) and not self._handle(rank, word, body):
                rank.react(word)

        if rank is not None:
            self._loop.call_soon(deliver)

    def lose(self):
        self.is_lost = True
        for rank in list(self.alive.values()):
            rank.ends(None, "its node")

    def kill(self, rank):
        if rank in self.alive:
            self.alive[rank].ends(-signal.SIGKILL)

    @property
    def is_over(self):
        return not self.alive

    def close(self):
        """Do nothing: no connection exists."""


class Stage:
    """A run of two simulated ranks on one simulated node.

    Args:
        first: Handles the start of a rank in the first attempt.
        later: Handles the start of a rank in later attempts. By default the rank returns "again".
        counts: Preempt the run once rank 0 has started; each rank answers with its count of steps.
        handlers: Handle other messages to ranks, by word.
        fields: Fields of the platform.
    """

    def __init__(self, *, first=None, later=None, counts=None, requeues=False, handlers=(), **fields):
        self.platform = ranks(2, **{"grace_s": 30.0} | fields)
        self._counts, self._handlers = counts, dict(handlers)
        self._first, self._later = first, later or (lambda rank: rank.returns("again"))
        self.saves = set()
        self.loop = Loop()
        self.node = SimulatedNode(self.loop, self._handle)
        orders = assignments_of(self.platform, None, Surroundings.here())
        transcripts = [Transcript(rank, printer=None) for rank in range(2)]
        self.run = Attempts("play", self.platform, self.loop, [self.node], orders, transcripts, requeues=requeues)

    def _handle(self, rank, word, body):
        is_first = word == "begin" and rank.restart == 0
        if self._counts and is_first and rank.number == 0:
            self.run.preempt()
        if word == "checkpoint":
            self.saves.add((rank.number, body))
        if word in self._handlers:
            return self._handlers[word](rank)
        if word == "begin":
            handler = self._first if is_first else self._later
            return handler(rank) if handler is not None else False
        if word == "preempt" and self._counts:
            rank.send("answered", self._counts[rank.number])
        return False

    def later(self, call):
        """Run a call in a later turn of the loop; return True."""
        self.loop.call_soon(call)
        return True

    def ending(self):
        self.run.begin()
        return self.run.run()

    def outcome(self):
        return results_or_error("play", self.platform, self.ending())


ONCE = [(0, 0), (0, 1)]


def fails(rank):
    if rank.number == 1:
        rank.raises(ValueError(rank.restart))


def requeues(rank):
    rank.requeues()


# --- restarts ---


def test_restarts_up_to_max_restarts():
    """Then the last failure is raised, with a note for each earlier attempt."""

    def first(rank):
        if rank.number == 0:
            rank.ends(-signal.SIGSEGV)

    stage = Stage(first=first, later=fails, max_restarts=2)
    error = stage.outcome()
    assert repr(error) == "ValueError(2)"
    assert stage.node.starts == [(restart, number) for restart in range(3) for number in range(2)]
    notes = [note for note in notes_of(error).splitlines() if note.startswith("attempt")]
    assert notes[0].startswith("attempt 0 failed: rank 0 was killed by SIGSEGV")
    assert notes[1:] == ["attempt 1 failed: rank 1 raised ValueError(1)"]


@pytest.mark.parametrize(("requeued", "max_restarts"), [(True, 1), (False, 1), (True, 0)])
def test_a_lost_node_ends_the_run(requeued, max_restarts):
    """It ends as requeued if its cluster requeues and a restart is left, otherwise as a failure."""
    stage = Stage(first=lambda rank: rank.number and stage.node.lose(), requeues=requeued, max_restarts=max_restarts)
    ending = stage.ending()
    assert ending.requeued == (requeued and max_restarts > 0)
    assert "was lost with its node" in str(results_or_error("play", stage.platform, ending))
    assert stage.node.starts == ONCE


@pytest.mark.parametrize(("leave", "on_cluster"), [(fails, False), (requeues, False), (requeues, True)])
def test_a_cancel_prevents_a_restart(leave, on_cluster):
    """The cancel arrives while ranks end to restart."""

    def cancels(word, rank):
        stage.run.cancel()
        return stage.later(lambda: rank.react(word))

    handlers = {word: (lambda rank, word=word: cancels(word, rank)) for word in ("end", "bye")}
    stage = Stage(first=leave, handlers=handlers, requeues=on_cluster, max_restarts=1)
    ending = stage.ending()
    assert (ending.cancelled, ending.requeued, stage.node.starts) == (True, False, ONCE)


# --- preemption ---


@pytest.mark.parametrize("returns", [True, False])
def test_a_rank_that_does_not_answer(returns):
    """If it returns, the others agree without it. Otherwise no rank saves, and all end after grace_s."""

    def preempt(rank):
        if rank.number == 0:
            rank.send("answered", 4)
        elif returns:
            rank.returns()

    grace_s = 30 if returns else 0.05
    stage = Stage(counts=[4, 8], handlers={"preempt": preempt, "checkpoint": requeues}, grace_s=grace_s)
    assert stage.outcome() == ("again", "again")
    assert ((0, 4) in stage.saves) == returns


@pytest.mark.parametrize(("counts", "returns"), [(None, False), ([0, 0], False), (None, True)])
def test_a_wait_for_a_rank(counts, returns, monkeypatch):
    """It is a deadlock if the rank has returned, but not if it has requeued. LaunchError has the stack of the wait."""
    monkeypatch.setattr(_standstill, "STUCK_S", 0.0)
    waits = Status(1.0, 1.0, 1.0, "a collective")

    def leave(rank):
        if rank.number == 0:
            return rank.returns() if returns else rank.requeues()
        return stage.later(lambda: rank.send("status", waits))

    handlers = {"checkpoint": leave, "stacks": lambda rank: rank.send("stacks", "in a collective")}
    stage = Stage(counts=counts, first=None if counts else leave, handlers=handlers)
    deadlock = r"play is deadlocked: rank\(s\) 0 have returned[\s\S]*rank 1:\nin a collective"
    assert re.search(deadlock if returns else r"^RankResults\('again', 'again'\)$", str(stage.outcome()))


# --- clusters that requeue the run ---


@pytest.mark.parametrize("asks", [True, False])
def test_a_requeue_on_a_cluster(asks):
    """The ending is requeued, whether ranks called requeue or exceeded grace_s after a preemption."""
    stage = Stage(first=requeues if asks else None, counts=None if asks else [0, 0], requeues=True, grace_s=0.05)
    ending = stage.ending()
    assert (ending.requeued, ending.is_success) == (True, False)
    assert {type(each) for each in ending.outcomes.values()} == {Requeued if asks else Ended}
    assert stage.node.starts == ONCE


@pytest.mark.parametrize("counts", [None, [0, 0]], ids=["then preempted", "preempted"])
def test_a_failure_around_a_preemption(counts):
    """It does not restart in place, because the cluster takes the machines back."""

    def end(rank):
        stage.run.preempt(ends_late=False)
        return stage.later(lambda: rank.react("end"))

    handlers = {"checkpoint": fails} if counts else {"end": end}
    stage = Stage(counts=counts, first=None if counts else fails, handlers=handlers, requeues=True, max_restarts=1)
    assert stage.ending().requeued
    assert stage.node.starts == ONCE


# --- limits ---


def test_a_silent_node_is_given_up(monkeypatch):
    """A failure ends the launch, even if a node's agent is stopped."""
    monkeypatch.setattr(_coordinator, "_GIVE_UP_S", 0.1)
    stage = Stage(first=lambda rank: not fails(rank), handlers={"end": lambda rank: True}, grace_s=0.1)
    stage.node.kill = lambda rank: None
    stage.node.give_up = stage.node.lose
    assert repr(stage.outcome()) == "ValueError(0)"


def test_a_stopped_watcher(monkeypatch):
    """A watcher that was stopped reads the messages of its ranks before it checks `hang_timeout_s`."""
    clock, ahead = time.monotonic, []
    monkeypatch.setattr(_coordinator.time, "monotonic", lambda: clock() + 1000.0 * len(ahead))

    def first(rank):
        ahead.append(rank)  # as if it had been stopped for that long
        return stage.later(rank.returns)

    stage = Stage(first=first, hang_timeout_s=5)
    assert stage.outcome() == (None, None)


# --- real ranks ---


def test_the_time_limit_of_restarts():
    def train():
        raise ValueError

    error, _ = failure_of(train, platform=ranks(max_restarts=10**6, timeout_min=1 / 60, ipc_groups=None))
    assert type(error) is LaunchTimeoutError
    assert "timeout_min" in str(error)
