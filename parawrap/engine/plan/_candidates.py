"""The ways that are compared: those that a race begins with, and those that are brought in once it is decided."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from parawrap.backends.cpu import usable_cores
from parawrap.engine.plan._case import Case
from parawrap.engine.plan._contest import Contest
from parawrap.engine.plan._memory import HeldMemory, can_hold_memory
from parawrap.engine.plan._plan import Plan
from parawrap.engine.plan._race import CAREFUL, QUICK, Race
from parawrap.engine.plan._way import PLAIN, Way, on_accelerators, on_cpu
from parawrap.lanes import Lane

__all__ = ["Candidates"]

_FAULT_NS = 100  # what the kernel takes to hand out a page, at the least
_WORTHWHILE = 0.02  # of a call's time
_UNEQUAL = 1.15  # times the rows per second


class Candidates:
    """What there is to choose from on one session's lanes. Has the memory that the process is told to keep.

    Args:
        plan: what the user has of it.
        lanes: the session's.
        threads: how many threads an operator may use in each of them.
        is_module: whether the target is a module, to whose parameters a backward pass leads.
    """

    def __init__(self, plan: Plan, lanes: Sequence[Lane], threads: int | None, *, is_module: bool) -> None:
        self.all_lanes = Way(len(lanes), threads or 0)
        self.is_quick = plan.rule == "default"
        self.on_cpu = lanes[0].device.type == "cpu"
        self._cores = usable_cores()  # once: the first call of each kind would wait for files of the system
        self._plan = plan
        self._is_module = is_module
        self._memory = HeldMemory()
        self._keeps_memory = False
        self._trial: Contest | None = None  # where it is tried to keep memory
        self._end = weakref.finalize(self, self._memory.end)

    def race(self, case: Case, rows: int) -> Race:
        """A race between the ways that there are from the first."""
        if self.is_quick:
            return Race([PLAIN, self.all_lanes] if rows > 1 else [PLAIN], QUICK)
        lanes = self.all_lanes.lanes
        if self.on_cpu:
            threads = min(self._cores, torch.get_num_threads())
            ways = on_cpu(lanes, threads, rows=rows, differentiable=case.grad and self._is_module)
        else:
            ways = on_accelerators(lanes, rows=rows)
        return Race([way._replace(memory_kept=self._keeps_memory) for way in ways], CAREFUL)

    def further(self, contest: Contest, race: Race, rows: int, can_trace: Callable[[], bool]) -> Sequence[Way]:
        """Once a way is chosen: what is next to be tried beside it. Each kind of them is asked for once.

        `can_trace` tells whether calls like the last one can be traced; it may try.
        """
        self._end_trial()
        choice = race.choice
        if choice is None or race.is_too_short:
            return ()
        proposals: dict[str, Callable[[], list[Way]]] = {
            "memory": lambda: self._memory_kept(contest, race, choice),
            "traced": lambda: self._traced(contest, choice, rows, can_trace),
            "weights": lambda: self._weighted(contest, race, choice, rows),
        }
        for name, propose in proposals.items():
            if name not in contest.asked:
                contest.asked.add(name)
                if ways := propose():
                    return ways
        return ()

    def prepare(self, way: Way, contest: Contest) -> None:
        """Before a call in this way: its memory may be on trial or chosen in another block, or chosen in another run."""
        self._end_trial()
        if way.memory_kept and not self._memory.held and self._may_keep_memory():
            self._memory.hold()
            if contest.undecided:
                self._trial = contest
            else:
                self._keeps_memory = True

    def close(self) -> None:
        """Undo what was done to the process."""
        self._end()

    def _end_trial(self) -> None:
        """Once it is known whether keeping memory pays. Another block with the same plan may have found it out."""
        trial = self._trial
        if trial is None or trial.undecided:
            return
        self._trial = None
        choice = trial.race.choice if trial.race is not None and trial.fixed is None else None
        self._keeps_memory = self._keeps_memory or (choice is not None and choice.memory_kept)
        if not self._keeps_memory:
            self._memory.release()

    def _may_keep_memory(self) -> bool:
        """Not when the session is closed: nobody would let go of it."""
        return self._plan.keep_memory and self._end.alive and can_hold_memory()

    def _memory_kept(self, contest: Contest, race: Race, choice: Way) -> list[Way]:
        wanted = self.on_cpu and not self._memory.held and self._may_keep_memory()
        times = race.times(choice)
        if not wanted or times is None or contest.faults * _FAULT_NS < _WORTHWHILE * times.median:
            return []
        self._trial = contest
        self._memory.hold()
        return [way._replace(memory_kept=True) for way in dict.fromkeys((PLAIN, choice))]

    def _traced(self, contest: Contest, choice: Way, rows: int, can_trace: Callable[[], bool]) -> list[Way]:
        # With one lane nobody watches the module, and a trace would not be told of what changes in it.
        wanted = self._plan.traced and not contest.case.grad and not contest.case.training and self.all_lanes.lanes > 1
        if not wanted or not can_trace():
            return []
        whole = self.all_lanes._replace(memory_kept=choice.memory_kept)
        return [way._replace(traced=True) for way in dict.fromkeys((choice, whole) if rows > 1 else (choice,))]

    def _weighted(self, contest: Contest, race: Race, choice: Way, rows: int) -> list[Way]:
        """Unequal shares for unequal devices, by the rows that each computes in a second.

        Where one device alone is faster than equal shares of several, unequal ones may be faster still.
        """
        by_lanes = {lanes: contest.speeds_of(lanes) for lanes in contest.speeds}
        lanes = choice.lanes if choice.lanes > 1 else max(by_lanes, key=lambda lanes: sum(by_lanes[lanes]), default=1)
        speeds = by_lanes.get(lanes, ())
        if self.on_cpu or lanes == 1 or len(speeds) != lanes or max(speeds) < _UNEQUAL * min(speeds):
            return []
        times = race.times(choice)
        if times is None or rows > sum(speeds) * times.median:
            return []  # it would take longer though nothing were lost on the way
        return [choice._replace(lanes=lanes, weights=tuple(round(100 * speed / sum(speeds)) or 1 for speed in speeds))]
