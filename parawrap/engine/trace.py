"""The timeline of a block: the calls of each lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Self

import torch

from parawrap import displays
from parawrap.errors import SessionError, ShardError, add_note

_CALLER = -1  # in a span that is recorded: the track of plain calls


class Recorder:
    """The open traces of a session. Thread-safe."""

    def __init__(self, target: Callable[..., Any]) -> None:
        name = getattr(target, "__name__", type(target).__name__)
        self.title = f"{name} in lanes"
        self._method = "forward" if isinstance(target, torch.nn.Module) else name
        self.traces: list[Trace] = []

    def record(
        self,
        method: str | None,
        batch: int | None,
        rows: int | None,
        lane: int | None,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        """Add a call to all traces that were open when it began.

        `method` is None for a call of the target itself, `lane` for a plain call, and `batch`
        outside of streams. `start` and `end` are as ``perf_counter_ns``.
        """
        kind = method or self._method
        label = kind
        if batch is not None:
            label += f", batch {batch}"
        if rows is not None:
            label += f", {rows} row" if rows == 1 else f", {rows} rows"
        # The name alone: an error would hold frames, and their tensors, until the trace is written
        failure = None if error is None else type(error).__name__
        details = {"batch": batch, "rows": rows, "error": failure}
        track = _CALLER if lane is None else lane
        span = displays.Span(track, start, end, label, kind, details)
        # A copy, which is one step: another thread may open or close a trace during the loop
        for trace in [*self.traces]:
            if start >= trace.began:
                trace.spans.append(span)  # one step, for lanes that end calls at the same time


class Trace:
    """Records the calls that begin and end inside its ``with`` block.

    It writes a file at the end of the block. `lanes` name the tracks.

    Attributes:
        began: The start of the block, as ``time.perf_counter_ns``; 0 before it.
        spans: One entry per call and lane. Its track is the index of the lane, or -1 for a plain
            call, which ran in the thread of the caller.
    """

    def __init__(self, recorder: Recorder, lanes: Sequence[object], path: str | Path) -> None:
        refusal = displays.refusal_of_path(path)
        if refusal is not None:
            msg = f"trace: {refusal}"
            raise ShardError(msg)
        self._recorder = recorder
        self._lanes = lanes
        # Absolute, because the block may change the working directory
        self._path = Path(path).expanduser().absolute()
        self.began = 0
        self.spans: list[displays.Span] = []

    def __repr__(self) -> str:
        spans = f"{len(self.spans)} spans"
        return f"<trace of {self._recorder.title}: {spans}, written to {str(self._path)!r}>"

    def __enter__(self) -> Self:
        if self.began:
            msg = (
                f"the trace for {str(self._path)!r} was already used. Call p.trace(...) for each "
                "`with` block"
            )
            raise SessionError(msg)
        # Before the recorder has the trace: `record` leaves out calls that began earlier
        self.began = perf_counter_ns()
        self._recorder.traces.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._recorder.traces.remove(self)
        try:
            displays.write_timeline(self._path, self.timeline())
        except OSError as failure:
            if error is None:
                raise
            # The error of the block goes on, since it matters more than the trace
            add_note(error, f"the trace could not be written: {failure}")

    def timeline(self) -> displays.Timeline:
        """Return the spans on one track per lane; plain calls are on a separate track."""
        title = self._recorder.title
        tracks = [str(lane) for lane in self._lanes]
        caller = len(tracks)  # the track after those of the lanes
        spans = []
        has_plain_calls = False
        # A copy, which is one step: the trace may still be open, and lanes add spans
        for span in [*self.spans]:
            if span.track == _CALLER:
                has_plain_calls = True
                spans.append(span._replace(track=caller))
            else:
                spans.append(span)
        if not has_plain_calls:
            return displays.Timeline(title, tracks, spans)
        # Between plain calls, the caller's thread does other work, so the track shows no idle time
        tracks.append("caller's thread")
        return displays.Timeline(title, tracks, spans, without_idle=[caller])


def record_call(
    record: Callable[..., None] | None,
    lane: int | None,
    function: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function, and record its lane, start, end, and error.

    `record` is `Recorder.record` with its first arguments; None records nothing. `lane` is None for
    a plain call.
    """
    if record is None:
        return function(*args, **kwargs)
    start, error = perf_counter_ns(), None
    try:
        return function(*args, **kwargs)
    except BaseException as raised:  # also Ctrl-C: the span shows where it came
        error = raised
        raise
    finally:
        record(lane, start, perf_counter_ns(), error)
        del error  # its traceback holds this frame: a cycle
