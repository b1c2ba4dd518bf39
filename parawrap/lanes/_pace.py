"""Whether work of a kind is done sooner by the caller alone than by several lanes at once.

Waking a thread takes as long as some work does, and threads that run Python hold each other up: they share the interpreter
lock. What takes no longer than a thread takes to wake up is run by the caller. What takes up to thirty times that may be
tried in both ways, twice each; the way with the best time is kept for a thousand calls, or until the work takes markedly
longer, and then both are tried again. What takes longer still always goes to the lanes.

Only work that never waits for the work of another lane may be tried: run alone, it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["WAKE_UP_NS", "Paces"]

WAKE_UP_NS = 30_000
"""What it takes to wake a thread, roughly: the row of `benchmarks/overhead.py` in which the model sleeps shows it."""

_WORTH_TRYING_NS = 30 * WAKE_UP_NS  # a call or two in a thousand then take at most so long for every lane
_TRIES = 2
_TRY_AGAIN_AFTER = 1000
_MOST_KINDS = 1024


class _Pace:
    """The times of one kind of work so far, in nanoseconds for a whole call."""

    __slots__ = ("alone_ns", "together_ns", "tried_alone", "tried_together")

    def __init__(self) -> None:
        self.tried_alone = self.tried_together = 0
        self.alone_ns = self.together_ns = 0

    def alone(self) -> bool:
        if self.tried_together < _TRIES:
            return False
        return self.tried_alone < _TRIES or self.alone_ns < self.together_ns

    def outlasted(self, took_ns: int) -> bool:
        """Whether a call by the caller alone took so long that what is known of the kind holds no more."""
        return self.tried_alone >= _TRIES and took_ns > 2 * max(self.alone_ns, self.together_ns)

    def note(self, took_ns: int, *, alone: bool) -> None:
        if self.tried_alone + self.tried_together >= _TRY_AGAIN_AFTER:
            self.tried_alone = self.tried_together = 0
        if alone:
            self.alone_ns = min(took_ns, self.alone_ns) if self.tried_alone else took_ns
            self.tried_alone += 1
        else:
            self.together_ns = min(took_ns, self.together_ns) if self.tried_together else took_ns
            self.tried_together += 1


class Paces:
    """What one pool knows of the kinds of work that it is given. Threads that race lose a measurement, no more.

    `may_try_alone` says that no work waits for that of another lane.
    """

    def __init__(self, *, may_try_alone: bool = False) -> None:
        self._may_try_alone = may_try_alone
        self._short: set[Hashable] = set()
        self._tried: dict[Hashable, _Pace] = {}

    def longest_alone_ns(self, kind: Hashable) -> int:
        """How long a piece of such work may take for the caller to go on alone; 0 where lanes are to be woken at once."""
        if kind in self._short:
            return WAKE_UP_NS
        pace = self._tried.get(kind)
        return _WORTH_TRYING_NS if pace is not None and pace.alone() else 0

    def note(self, kind: Hashable, first_ns: int, took_ns: int, *, alone: bool) -> None:
        """Learn from a call: what its first piece took, and the whole of it, by the caller alone or not."""
        if kind is None:
            return
        if first_ns < WAKE_UP_NS:
            if kind not in self._short:
                self._forget_if_many(self._short)
                self._short.add(kind)
            return
        self._short.discard(kind)
        if not self._may_try_alone or first_ns >= _WORTH_TRYING_NS:
            self._tried.pop(kind, None)
            return
        pace = self._tried.get(kind)
        if pace is None:
            self._forget_if_many(self._tried)
            pace = self._tried[kind] = _Pace()
        if alone and pace.outlasted(took_ns):
            self._tried.pop(kind, None)
            return
        pace.note(took_ns, alone=alone)

    def _forget_if_many(self, kinds: set[Hashable] | dict[Hashable, _Pace]) -> None:
        if len(kinds) >= _MOST_KINDS:
            kinds.clear()
