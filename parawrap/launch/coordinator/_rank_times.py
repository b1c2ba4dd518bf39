"""The timeline of a launch: when each rank started, met the others, ran the function, and ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from parawrap.displays import Span, Timeline, refusal_of_path, write_timeline
from parawrap.errors import LaunchError
from parawrap.launch._packed_call import Job

__all__ = ["RankTimes", "trace_path", "write_trace"]

_PHASES = "start", "meeting", "run", "teardown"
_NS = 1e9  # per second
_log = logging.getLogger("parawrap.launch")


class RankTimes(NamedTuple):
    """When the phases of a rank began, in seconds since the epoch, by the clock of the rank's machine.

    Attributes:
        rank: The global rank.
        restart: The number of earlier attempts.
        host: The hostname of the rank's node.
        began: The start of each phase that the rank reached. The key "end" is the end of the process.
        failure: How the rank failed; None if it did not.
    """

    rank: int
    restart: int
    host: str
    began: Mapping[str, float]
    failure: str | None


def trace_path(job: Job) -> Path | None:
    """Return the absolute path of the trace; None if ``Platform.trace`` is not set.

    The launches of `map` have numbers: launch.html becomes launch-0.html, launch-1.html, and so on.

    Raises:
        LaunchError: If no file can be written there.
    """
    trace = job.platform.trace
    if trace is None:
        return None
    path = Path(trace).expanduser().absolute()
    refusal = refusal_of_path(path)
    if refusal is not None:
        msg = f"trace={str(trace)!r}: {refusal}"
        raise LaunchError(msg)
    return path if job.number is None else path.with_stem(f"{path.stem}-{job.number}")


def write_trace(path: Path, name: str, submitted: float, times: Sequence[RankTimes]) -> None:
    """Write the timeline of a launch that was submitted at that time. Log an error, so that the results are not lost."""
    if not times:
        return
    hosts = {each.host for each in times}
    ranks = sorted({(each.rank, each.host) for each in times})
    tracks = ["launch", *(f"rank {rank} on {host}" if len(hosts) > 1 else f"rank {rank}" for rank, host in ranks)]
    first = min(each.began["start"] for each in times)
    spans = [_span(0, submitted, first, "prepare", {})]
    for each in times:
        spans += _spans(each, ranks.index((each.rank, each.host)) + 1)
    try:
        write_timeline(path, Timeline(f"launch of {name}", tracks, spans, without_idle=[0]))
    except OSError:
        _log.exception("the trace of %s could not be written", name)


def _spans(times: RankTimes, track: int) -> list[Span]:
    reached = [(phase, times.began[phase]) for phase in (*_PHASES, "end") if phase in times.began]
    failed_in = next((phase for phase, _ in reversed(reached[:-1]) if phase != "teardown"), None)
    restart = times.restart or None
    return [
        _span(track, at, until, phase, {"restart": restart, "error": times.failure if phase == failed_in else None})
        for (phase, at), (_, until) in pairwise(reached)
    ]


def _span(track: int, start: float, end: float, phase: str, details: Mapping[str, str | int | None]) -> Span:
    restart = f", restart {details['restart']}" if details.get("restart") else ""
    begin = round(start * _NS)
    return Span(track, begin, max(begin, round(end * _NS)), f"{phase}{restart}", phase, details)
