"""The CPU time of other programs, while this process measures something.

Linux reports CPU times in the files of /proc. On other systems, nothing is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_FELT_CORES = 0.25
"""Cores that other programs may use while calls run on the CPU.

torch divides an operator among all cores and waits for its slowest thread. One busy thread of
another program thus slows a call on a machine of any size. A quarter of a core is more than idle
desktops and system services use.
"""
_FELT_SHARE = 0.5
"""The share of the cores that other programs may use while calls run on accelerators.

Such calls need a few cores: half of the cores are enough for them.
"""


class CoreTimes(NamedTuple):
    """CPU times since the start of the machine, in clock ticks.

    Attributes:
        clock: The time of the reading, in seconds.
        cores: The number of cores that this process may use.
        busy: Ticks that these cores worked, for any program.
        own: Ticks by process id, of this process and of its descendants, such as workers. The ticks
            of a process include those of its children that have ended.
    """

    clock: float
    cores: int
    busy: int
    own: dict[int, int]


def read_core_times(proc: Path = Path("/proc")) -> CoreTimes | None:
    """Return the CPU times at this moment; None if this system does not report them."""
    try:
        cores = os.sched_getaffinity(0)
        clock = time.perf_counter()
        busy = _read_busy_ticks(proc, cores)
        own = _read_own_ticks(proc)
    except (AttributeError, OSError, LookupError, ValueError):  # no Linux, or no complete /proc
        return None
    return CoreTimes(clock, len(cores), busy, own)


def describe_other_programs(
    start: CoreTimes | None,
    end: CoreTimes | None,
    *,
    needs_all_cores: bool,
) -> str:
    """Return a sentence on other programs between two readings, or "" if they used little.

    Args:
        start: The first reading; None if this system reports none.
        end: The last reading; None if this system reports none.
        needs_all_cores: True if calls ran on the CPU, where one busy core slows them.
    """
    if start is None or end is None:
        return ""
    tick = 1 / os.sysconf("SC_CLK_TCK")
    seconds = end.clock - start.clock
    # A process that has ended is left out. Its parent has its ticks, or they are lost
    own = sum(ticks - start.own.get(process, 0) for process, ticks in end.own.items())
    others = tick * (end.busy - start.busy - own) / seconds
    # The error of the counters, each of which is rounded down to a tick: one per core, and two per
    # process (user and system time). In a short measurement it would look like another program
    rounding = tick * (end.cores + 2 * len(end.own)) / seconds
    felt = _FELT_CORES if needs_all_cores else _FELT_SHARE * end.cores
    if others < felt + rounding:
        return ""
    used = f"{others:.1f} of {end.cores} cores"
    return f"Other programs used {used} meanwhile: measure again on an idle machine."


def _read_busy_ticks(proc: Path, cores: set[int]) -> int:
    """Return the ticks that these cores worked.

    Raises:
        LookupError: If a core is missing. Some containers give the cores other numbers.
    """
    busy = {}  # by core
    for line in (proc / "stat").read_text().splitlines():
        name, *ticks = line.split()
        number = name.removeprefix("cpu")
        if name.startswith("cpu") and number.isdecimal():
            # Column 8 of proc(5) is left out: a hypervisor took that time, and no program of this
            # machine. Columns 9 and 10 are parts of `user` and `nice`
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, ticks[:7])
            busy[int(number)] = user + nice + system + interrupts + soft_interrupts
    return sum(busy[core] for core in cores)


def _read_own_ticks(proc: Path) -> dict[int, int]:
    """Return the ticks of this process, and of each process that descends from it, by id.

    Raises:
        LookupError: If this process is missing.
    """
    children: dict[int, list[int]] = {}
    ticks = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:  # the process ended meanwhile
            continue
        # The name of the program, in parentheses, may itself contain spaces and parentheses
        _, _, after_name = text.rpartition(")")
        _state, parent, *fields = after_name.split()
        process = int(folder.name)
        children.setdefault(int(parent), []).append(process)
        # Fields 14 to 17 of proc(5): user and system time, of the process and of its children that
        # have ended. `fields` begins with field 5
        times = fields[9:13]
        ticks[process] = sum(map(int, times))

    own = {}
    pending = [os.getpid()]
    while pending:
        process = pending.pop()
        own[process] = ticks[process]
        pending.extend(children.get(process, []))
    return own
