"""Which of several ways of doing a thing is the fastest: found out while the thing is done, a call at a time.

Every call is run in one way and is a real one: nothing is run for the sake of measuring. That a way is slow is found out at
the caller's expense, which is bounded:

- A way is given up after one call that takes more than `_HOPELESS` times as long as the best way, after two that both take
  more than `_SLOW` times as long, and once it was tried enough where it takes more than `_BEHIND` times as long.
- Where the first way takes less than `_TOO_SHORT_NS`, no other is tried: to look up a choice, and to hand over to a lane,
  takes as long as could be gained.
- When what was lost to slower ways adds up to `_MOST_LOST` calls of the first way, only those are tried further that lose
  nothing.

Ways that were given up before they were tried enough are tried again when so many calls have passed that what was lost is a
share of one in `_REST`: the first call of a way may be slow for once, and one way may stand before another.

Machines are noisy, so each way is tried several times, in turn, and medians are compared. A turn is a burst of calls, of
which the first are not counted: threads of an operator that used several spin for milliseconds after it, and would take a
core from the way that comes next. The first way, which is the call as it would be without parawrap, keeps its place unless
another gains the rules' margin, `_SURE` times the error of what was measured, and `_ASKING_NS`: what it takes to look up
what was chosen, which plain calls are spared.

A choice is looked at again when the chosen way takes markedly longer or shorter than when it was chosen. That cannot go
back and forth: each time twice as many calls must pass before the next.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from parawrap.engine.plan._way import Way

__all__ = ["CAREFUL", "QUICK", "Race", "Rules", "Times"]

_HOPELESS = 7.0
_SLOW = 2.0
_BEHIND = 1.25
_MOST_LOST = 5.0
_REST = 40.0
_SURE = 3.0
_ASKING_NS = 10_000
_TOO_SHORT_NS = 250_000  # a call that is not spared the look takes 40 to 100 us longer, one that wakes a lane 50 to 100
_SETTLING_NS = 5_000_000
_MOST_SETTLING = 12
_BURST = 3
_LOOKED_BACK_ON = 15
_CHANGED = 1.5


class Rules(NamedTuple):
    """How carefully ways are compared.

    `tries` is how often each is tried, beside what is not counted; `most_tries` how often the two that matter are where
    they are close. Another way than the first must gain the `margin`. `patience` is for how many calls a
    choice stands at the least.
    """

    tries: int
    most_tries: int
    margin: float
    patience: int


CAREFUL = Rules(tries=6, most_tries=30, margin=0.04, patience=400)
QUICK = Rules(tries=4, most_tries=30, margin=0.05, patience=1000)


class Times(NamedTuple):
    """What a way took, in nanoseconds: the median and the middle half, of so many calls."""

    median: float
    low: float
    high: float
    calls: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median, low, high, len(values))

    @property
    def error(self) -> float:
        """The standard error of the median, as a share of it. What takes far longer is a disturbance, and tells nothing."""
        return 2 * (1 - self.low / self.median) / math.sqrt(self.calls)


class _Tries:
    """What calls in one way took: those that count, and beside them only how many there were and the shortest."""

    def __init__(self) -> None:
        self.calls = 0
        self.shortest = math.inf
        self.typical = math.inf  # what three quarters of those that count take at the least
        self.counted: list[float] = []

    def add(self, took_ns: float, *, counts: bool) -> None:
        self.calls += 1
        self.shortest = min(self.shortest, took_ns)
        if counts:
            self.counted.append(took_ns)
        self.typical = sorted(self.counted)[(len(self.counted) - 1) // 4] if self.are_enough else self.shortest

    @property
    def are_enough(self) -> bool:
        """Whether it is not by chance what they took, as far as that goes."""
        return len(self.counted) > 2

    def are_in_vain(self, best: float) -> bool:
        """Whether further ones would tell nothing new, where the best way takes that long."""
        if self.are_enough and self.typical > _BEHIND * best:
            return True
        return self.calls > 0 and self.shortest > (_SLOW if self.calls > 1 else _HOPELESS) * best


class _Burst:
    """Some calls in a row in one way; those that come before the threads of another have settled are not counted."""

    def __init__(self, way: Way | None, most_settling: int = _MOST_SETTLING) -> None:
        self.way = way
        self._most_settling = most_settling
        self._settling = 0
        self._settling_ns = 0.0
        self._counted = 0

    @property
    def is_over(self) -> bool:
        """After as many that count as do not, for else most would not; but after `_BURST` at the least."""
        return self._counted >= max(_BURST, min(self._settling, 2 * _BURST))

    def counts(self, took_ns: float) -> bool:
        """Whether the next call, which took that long, is one of those that count."""
        if self._settling and (self._settling == self._most_settling or self._settling_ns >= _SETTLING_NS):
            self._counted += 1
            return True
        self._settling += 1
        self._settling_ns += took_ns
        return False


class Race:
    """The ways of running one kind of call, what they took, and which of them is chosen.

    Not safe to share between threads: whoever has it holds a lock.
    """

    def __init__(self, ways: Sequence[Way], rules: Rules = CAREFUL) -> None:
        self._rules = rules
        self._patience = rules.patience
        self._since = 0
        self._recent: deque[float] = deque(maxlen=_LOOKED_BACK_ON)
        self._expected = 0.0
        self._begin(ways)

    def _begin(self, ways: Sequence[Way]) -> None:
        self._ways = list(dict.fromkeys(ways))
        self._tries = {way: _Tries() for way in self._ways}
        self._known: dict[Way, Times] = {}
        self._running = list(self._ways)
        self._later: list[Way] = []
        self._rest = 0.0
        self._paid = 0.0
        self._allowed = _MOST_LOST
        self._goal = self._rules.tries
        self._burst = _Burst(None)
        self.choice: Way | None = None

    @property
    def ways(self) -> Sequence[Way]:
        """All that were ever tried, the first one first."""
        return self._ways

    @property
    def is_too_short(self) -> bool:
        """Whether the first way takes less than what others cost beyond it."""
        first = self._tries[self._ways[0]]
        return first.calls > 1 and first.shortest < _TOO_SHORT_NS

    def times(self, way: Way) -> Times | None:
        """What it took; None where nothing was counted."""
        tries = self._tries.get(way)
        if tries is None or not tries.calls:
            return self._known.get(way)
        return Times.of(tries.counted or [tries.typical])

    def turn(self) -> Way:
        """The way in which to run the next call."""
        if self.choice is not None:
            return self.choice
        if self._burst.way not in self._running or self._burst.is_over:
            way = min(self._running, key=lambda way: len(self._tries[way].counted))
            self._burst = _Burst(way, _MOST_SETTLING if self._burst.way is not None else 1)
        assert self._burst.way is not None
        return self._burst.way

    def note(self, way: Way, took_ns: float) -> None:
        """Learn what a call took."""
        if self.choice is not None:
            if way == self.choice:
                self._watch(way, took_ns)
            return
        if way != self._burst.way or way not in self._running:
            return
        self._tries[way].add(took_ns, counts=self._burst.counts(took_ns))
        self._give_up_the_slow()
        self._decide_if_known()

    def settle(self, way: Way) -> None:
        """Choose this way, whatever was measured."""
        self.enter([way])
        self.choice = way
        times = self.times(way)
        self._expected = times.median if times is not None else 0.0
        self._since = 0
        self._recent.clear()

    def enter(self, ways: Sequence[Way]) -> None:
        """Have further ways tried, against what is chosen."""
        self._ways = list(dict.fromkeys([*self._ways, *ways]))
        self._running = list(dict.fromkeys([*self._running, *ways]))
        self._tries = {way: _Tries() for way in ways} | self._tries
        self.choice = None

    def restart(self) -> None:
        """Forget what was measured."""
        self._begin(self._ways)

    def restore(self, choice: Way, known: dict[Way, Times]) -> None:
        """Take over what an earlier run found out."""
        self._begin([*self._ways, *known, choice])
        self._known = dict(known)
        self.settle(choice)

    # How it goes on

    def _give_up_the_slow(self) -> None:
        first, *others = self._running
        best = min((tries.typical for tries in self._tries.values() if tries.are_enough), default=math.inf)
        self._give_up([way for way in others if self._tries[way].are_in_vain(best)])
        lost = self._lost() - self._paid
        if lost > self._allowed:
            self._rest = _REST * lost
            near = (1 + self._rules.margin) * self._tries[first].typical
            self._give_up([way for way in self._running if self._tries[way].typical > near])

    def _give_up(self, ways: Sequence[Way]) -> None:
        """Not to be tried further; those that were not tried enough may be later."""
        self._running = [way for way in self._running if way not in ways]
        self._later += [way for way in ways if not self._tries[way].are_enough]

    def _decide_if_known(self) -> None:
        if self._is_first_alone():
            self._close(self._ways[0])
            return
        if any(len(self._tries[way].counted) < self._goal for way in self._running):
            return
        winner, rival = self._best_two()
        if rival is not None and self._goal < self._rules.most_tries:
            self._running = [winner, rival]
            self._goal = min(self._goal + _BURST, self._rules.most_tries)
            return
        self._close(winner)

    def _is_first_alone(self) -> bool:
        """Whether there is nothing more to compare the first way with, or no use in it."""
        return self.is_too_short or (len(self._running) == 1 and self._tries[self._ways[0]].are_enough)

    def _close(self, winner: Way) -> None:
        self._paid = self._lost()
        self._goal = self._rules.tries
        self.settle(winner)

    def _best_two(self) -> tuple[Way, Way | None]:
        """The fastest, but the first where no other surely gains enough; with it one that may, after more tries."""
        first, *others = self._running
        times = {way: Times.of(self._tries[way].counted) for way in self._running}
        wanted = max(self._rules.margin * times[first].median, _ASKING_NS)
        rival = None
        for way in sorted(others, key=lambda way: times[way].median):
            gain = times[first].median - times[way].median
            error = math.sqrt(2) * max(times[first].error, times[way].error) * times[first].median
            if gain >= max(wanted, _SURE * error):
                return way, None
            may_gain = max(gain, times[first].low - times[way].low) + error >= wanted
            # Under other conditions than now the first can be compared with, but not tried again.
            if rival is None and may_gain and way.memory_kept == first.memory_kept:
                rival = way
        return first, rival

    def _lost(self) -> float:
        """How many calls of the first way all those that were slower could have been, beyond what they were.

        One call by itself may have been slow by chance. It is not counted before another, or before its way is given up.
        """
        first = self._tries[self._ways[0]].typical
        tried = [tries for way, tries in self._tries.items() if tries.calls > (way in self._running)]
        return sum(tries.calls * max(0.0, tries.typical / first - 1) for tries in tried)

    def _watch(self, choice: Way, took_ns: float) -> None:
        """See whether what is chosen still takes what it took."""
        self._since += 1
        self._recent.append(took_ns)
        if len(self._recent) < _LOOKED_BACK_ON or self._since % _LOOKED_BACK_ON:
            return
        now = statistics.median(self._recent)
        if not self._expected:
            self._expected = now
        elif self._since < self._patience:
            return
        elif not 1 / _CHANGED < now / self._expected < _CHANGED:
            self._begin_anew(choice, self._ways)
        elif self._later and self._since >= self._rest:
            self._try_the_rest(choice)

    def _begin_anew(self, choice: Way, ways: Sequence[Way]) -> None:
        """Try these again; where memory is kept by now, all of them with it."""
        self._patience *= 2
        self._begin([way._replace(memory_kept=choice.memory_kept) for way in ways])
        self._allowed = max(_MOST_LOST, self._since / _REST)

    def _try_the_rest(self, choice: Way) -> None:
        """Try what was left for later, against what is chosen; what is known of the others stays."""
        known = {way: times for way in self._ways if (times := self.times(way)) is not None}
        later = sorted(self._later, key=lambda way: self._tries[way].calls)  # the same one is not in the way each time
        self._begin_anew(choice, [self._ways[0], choice, *later])
        self._known = known
        self._ways = list(dict.fromkeys([*self._ways, *known]))
