"""The load of other processes during a measurement, which makes its times less reliable."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

__all__ = ["Neighbours", "cores_of_others"]

_STAT = Path("/proc/stat")


class Neighbours(NamedTuple):
    """Processor seconds so far of the whole machine, and of this process and
    its finished children.
    """

    all_s: float
    own_s: float
    at_s: float

    @classmethod
    def now(cls) -> Neighbours | None:
        """Read the counters, or return None on a system without /proc/stat."""
        if not _STAT.exists():
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal: proc(5)
        words = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
        spent = sum(words) - words[3] - words[4]
        usages = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return cls(spent / os.sysconf("SC_CLK_TCK"), own_s, os.times().elapsed)


def cores_of_others(before: Neighbours | None, after: Neighbours | None) -> float | None:
    """Return the average number of cores that other processes used.

    Stolen time counts as theirs.
    """
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    others_s = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return max(0.0, others_s / (after.at_s - before.at_s))
