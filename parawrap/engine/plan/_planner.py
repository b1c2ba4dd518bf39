"""Which way the next call of a session goes, and what is learned from how long it took."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from parawrap.backends import backend_of
from parawrap.engine._entry import Entry
from parawrap.engine.plan._backward_clock import when_backward_is_done
from parawrap.engine.plan._candidates import Candidates
from parawrap.engine.plan._case import Case
from parawrap.engine.plan._contest import Contest
from parawrap.engine.plan._kinds import Kind, Kinds
from parawrap.engine.plan._memory import page_faults
from parawrap.engine.plan._plan import Plan
from parawrap.engine.plan._spares import Spares
from parawrap.engine.plan._way import PLAIN, Way
from parawrap.errors import GatherError
from parawrap.lanes import Lane
from parawrap.shards import FlatCall, ShardPlan
from parawrap.tree import flatten

__all__ = ["Planner", "Turn"]

_MOST_MISSED = 32  # calls in a row that are not as those that count: then these count
_MOST_RESTARTS = 3
_MOST_LEARNED = 1024
_LOOKS_AGAIN_AFTER = 64  # calls on devices, which would otherwise be given work without a pause
_NUMBERS = frozenset({int, float, complex})


class _Before(NamedTuple):
    """What the counters said when a call began."""

    at_ns: int
    faults: int
    busy_ns: Sequence[int]


class Turn:
    """One call on its way: a ``with`` block around it. What leaves it without an error is learned from.

    `way` is the way to run it, and `plan` how it is cut then; with `measures`, lanes are to wait for their devices.
    """

    __slots__ = ("_before", "_output", "_planner", "_ticket", "entry", "faults", "flat", "kind", "measures", "plan", "way")

    def __init__(self, planner: Planner, kind: Kind, entry: Entry, plan: ShardPlan, flat: FlatCall, way: Way) -> None:
        self._planner = planner
        self._output: Any = None
        self._ticket = 0
        self.faults = 0  # pages that the kernel handed out meanwhile, where it measures
        self.kind = kind
        self.entry = entry
        self.flat = flat
        self.way = way
        self.plan = kind.cut(plan, way)
        kind.calls += 1
        self.measures = kind.contest.undecided or planner.looks_again(kind)

    def __enter__(self) -> Self:
        if self.measures:
            self._planner.wait_for_devices()
        self._ticket = self._planner.begins()
        busy = [lane.busy_ns for lane in self._planner.lanes] if self.measures else ()
        self._before = _Before(perf_counter_ns(), page_faults() if self.measures else 0, busy)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self.measures and error is None:
                self._planner.wait_for_devices()
        finally:
            took_ns = perf_counter_ns() - self._before.at_ns
            alone = self._planner.ends(self._ticket)
        if isinstance(error, GatherError):
            self._planner.fix(self)  # else a call would fail or not by the way that it goes
        if error is None and alone:
            self.faults = page_faults() - self._before.faults if self.measures else 0
            self._planner.note(self, took_ns, self._output)
        self._output = None

    def timed(self, works: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """Works that are not over before their device is, where that is measured."""
        if not self.measures:
            return [*works]
        return [partial(_waited_for, work, lane.device) for work, lane in zip(works, self._planner.lanes, strict=False)]

    def came_to(self, output: Any) -> Any:
        """Tell what the call gave; it is handed on."""
        if self.plan.rows > 1 and self.way.lanes == 1 and _depends_on_lanes(output):
            self._planner.fix(self)  # an attribute of the module has changed since, say
        if self.kind.contest.case.grad:
            self._output = output
        return output

    def learn(self, outputs: Sequence[Any]) -> None:
        """Tell what the lanes returned."""
        self._planner.learn(self, outputs)

    def void(self) -> None:
        """It was not run in this way after all."""
        self._ticket = -1

    def busy_ns(self) -> list[int]:
        """How long each lane has worked since it began."""
        return [lane.busy_ns - before for lane, before in zip(self._planner.lanes, self._before.busy_ns, strict=True)]


class Planner:
    """The plan of one session at work. Safe to share between threads; calls that overlap are not learned from.

    Args:
        plan: what the user has of it.
        target: what is called.
        lanes: the session's.
        threads: how many threads an operator may use in each of them.
        writes_buffers: whether the lanes write buffers in the calls as they are made now.
        can_trace: whether calls like this one can be traced; it may try.
    """

    def __init__(
        self,
        plan: Plan,
        target: Any,
        lanes: Sequence[Lane],
        threads: int | None,
        writes_buffers: Callable[[], bool],
        can_trace: Callable[[Turn], bool],
    ) -> None:
        self.lanes = lanes
        self._module = target if isinstance(target, torch.nn.Module) else None
        is_module = self._module is not None
        self._candidates = Candidates(plan, lanes, threads, is_module=is_module)
        self._book = plan.book(target, [lane.label for lane in lanes])
        self._devices = () if self._candidates.on_cpu else tuple(dict.fromkeys(lane.device for lane in lanes))
        self._writes_buffers = writes_buffers
        self._can_trace = can_trace
        self._kinds = Kinds(self._contest)
        self._learned: set[Case] = set()  # not the book's: its other blocks may have another target of the same structure
        self._spares = Spares()
        self._overlap = threading.Lock()
        self._under_way = 0
        self._begun = 0

    @property
    def is_quick(self) -> bool:
        """Whether only calls that can be cut are looked at."""
        return self._candidates.is_quick

    def turn(self, entry: Entry, plan: ShardPlan, flat: FlatCall) -> Turn:
        """The next call's: in which way it is to be run."""
        kind = self._kinds.of(entry, plan, flat, training=self._is_training())
        contest = kind.contest
        if contest.fixed is not None:
            return Turn(self, kind, entry, plan, flat, contest.fixed)
        must_not_choose = self.is_quick and torch.are_deterministic_algorithms_enabled()
        if contest.race is None or contest.case not in self._learned or must_not_choose:
            return Turn(self, kind, entry, plan, flat, self._candidates.all_lanes)
        with self._book.access:
            contest.forward_alone()
            way = contest.race.turn()
        self._candidates.prepare(way, contest)
        return Turn(self, kind, entry, plan, flat, way)

    def learn(self, turn: Turn, outputs: Sequence[Any]) -> None:
        """See from what the lanes returned whether there is a choice at all."""
        contest = turn.kind.contest
        if contest.fixed is not None:
            return
        if self._writes_buffers():
            self.fix(turn)
        elif contest.case not in self._learned:
            if _depends_on_lanes(outputs[0]):
                self.fix(turn)
            elif contest.race is None:
                contest.race = self._candidates.race(contest.case, turn.plan.rows)
            self._is_learned(contest.case)

    def fix(self, turn: Turn) -> None:
        """Have such calls cut over all lanes from now on: there is no other way in which they give the same."""
        turn.kind.contest.fixed = self._candidates.all_lanes
        self._spares.withdraw()

    def note(self, turn: Turn, took_ns: int, output: Any) -> None:
        """Learn from a call that ran by itself."""
        contest = turn.kind.contest
        race = contest.race
        if race is None or contest.fixed is not None:
            return
        if turn.kind.elements != contest.elements:
            self._missed(turn, took_ns)
            return
        contest.missed = 0
        if not (turn.measures or self._candidates.on_cpu):
            return  # nobody waited for the devices
        learn = partial(self._backward_done, turn if turn.measures else None, contest, turn.way, took_ns)
        if contest.case.grad and when_backward_is_done(output, learn, self.wait_for_devices):
            contest.awaits = (turn.way, took_ns)
            if turn.measures:
                return
        else:
            with self._book.access:
                race.note(turn.way, took_ns)
        self._noted(turn, took_ns)

    def begins(self) -> int:
        """Count a call in; its ticket, or -1 where another one is under way."""
        with self._overlap:
            self._under_way += 1
            self._begun += 1
            return self._begun if self._under_way == 1 else -1

    def ends(self, ticket: int) -> bool:
        """Count a call out; whether it has been alone all the time."""
        with self._overlap:
            self._under_way -= 1
            return ticket == self._begun

    def looks_again(self, kind: Kind) -> bool:
        """Whether the devices are to be waited for though a way is chosen, to see if it takes what it took."""
        return not self._candidates.on_cpu and kind.contest.fixed is None and kind.calls % _LOOKS_AGAIN_AFTER == 0

    def wait_for_devices(self) -> None:
        """Until the devices have done what they were given: a clock that is read before that tells nothing."""
        for device in self._devices:
            _wait_for(device)

    def close(self) -> None:
        """Undo what was done to the process."""
        self._candidates.close()

    def spare(self, entry: Entry, flat: FlatCall) -> None:
        """Have calls like this one, which cannot be cut, be plain, and go no further than where they come in."""
        self._spares.grant(entry, flat, training=self._is_training())

    def count_extra(self, runs: int) -> None:
        """The model was run so often beyond the calls that were made of it."""
        with self._overlap:
            self._begun += 1  # no call that is under way now tells how long it takes
        with self._book.access:
            self._book.extra_calls += runs

    def spared_calls(self) -> int:
        """How many calls went no further."""
        return self._spares.used()

    def _is_training(self) -> bool:
        return getattr(self._module, "training", False)  # a frozen module has lost it

    def _contest(self, case: Case, plan: ShardPlan, elements: int) -> Contest:
        new_race = partial(self._candidates.race, case, plan.rows)
        contest = self._book.contest(case, elements, new_race)
        if len(plan.sizes) == 1:  # not cut: nothing is to be learned from how it is
            self._is_learned(case)
            if contest.race is None:
                contest.race = new_race()
        return contest

    def _is_learned(self, case: Case) -> None:
        if len(self._learned) >= _MOST_LEARNED:
            self._learned.clear()  # a call of each will be cut again
        self._learned.add(case)

    # What is learned

    def _backward_done(self, turn: Turn | None, contest: Contest, way: Way, forward_ns: int, backward_ns: int) -> None:
        """After the backward pass of a call; with its turn, which has its input, only where it was measured."""
        with self._book.access:
            if contest.awaits != (way, forward_ns):
                return
            contest.followed(forward_ns, backward_ns)
        if turn is not None:
            self._noted(turn, forward_ns)

    def _noted(self, turn: Turn, took_ns: int) -> None:
        contest, race = turn.kind.contest, turn.kind.contest.race
        if turn.measures:
            self._look_closer(turn, contest)
        if race is None or race.choice is None:
            return
        if turn.measures and not self.is_quick:
            ways = self._candidates.further(contest, race, turn.plan.rows, partial(self._can_trace, turn))
            if ways:
                with self._book.access:
                    race.enter(ways)
        if race.choice == turn.way and not contest.undecided:
            self._grant(turn, took_ns)

    def _missed(self, turn: Turn, took_ns: int) -> None:
        """After a call of the case that is not as the calls that count."""
        contest = turn.kind.contest
        contest.missed += 1
        if contest.undecided and contest.missed >= _MOST_MISSED and contest.race is not None:
            with self._book.access:
                contest.missed, contest.elements = 0, turn.kind.elements
                contest.restarts += 1
                if contest.restarts <= _MOST_RESTARTS:
                    contest.race.restart()
                else:  # no two calls are alike: what is safe on this kind of device
                    contest.race.settle(PLAIN if self._candidates.on_cpu else self._candidates.all_lanes)
        elif not contest.undecided:
            self._grant(turn, took_ns)

    def _look_closer(self, turn: Turn, contest: Contest) -> None:
        """Note what tells whether a further way is worth trying."""
        if turn.way.lanes == 1:
            contest.faults = turn.faults
        elif not self._candidates.on_cpu and not turn.way.weights:
            speeds = [size / max(1, busy) for size, busy in zip(turn.plan.sizes, turn.busy_ns(), strict=False)]
            contest.note_speeds(turn.way.lanes, speeds)

    def _grant(self, turn: Turn, took_ns: int) -> None:
        """Spare calls like this one the long way, where they are plain."""
        if turn.way._replace(memory_kept=False) == PLAIN and self._candidates.on_cpu:
            self._spares.grant(
                turn.entry,
                turn.flat,
                training=self._is_training(),
                took_ns=took_ns,
                may_be_plain=lambda: turn.kind.contest.fixed is None,
            )


def _waited_for(work: Callable[[], Any], device: torch.device) -> Any:
    value = work()
    _wait_for(device)
    return value


def _wait_for(device: torch.device) -> None:
    stream = backend_of(device.type).stream(device)
    if stream is not None:
        stream.synchronize()


def _depends_on_lanes(output: Any) -> bool:
    """Whether something in it is not one value a row: what becomes of it depends on how many lanes there are."""
    if type(output) is torch.Tensor:
        return output.ndim == 0
    return any(leaf.ndim == 0 if isinstance(leaf, torch.Tensor) else type(leaf) in _NUMBERS for leaf in flatten(output)[0])
