"""The work of lanes: parts of a cut call, and whole calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.backends import record_use
from parawrap.engine.cut import Cutter, Piece, Shard, ShardPlan
from parawrap.engine.extents import FlatCall
from parawrap.replicas import LaneReplica
from parawrap.tree import flatten_call

__all__ = ["Entry", "LaneCall", "Prepare", "Record", "WholeCall", "as_call", "timed"]

Prepare = Callable[[Any], Any]
"""A function of one batch that returns the arguments of a call, in one of the forms of `as_call`."""

Record = Callable[..., None]
"""Takes the index of a lane, the start and the end of its work as ``perf_counter_ns``, and the error if it raised."""


class Entry(NamedTuple):
    """The functions that run a call of the target.

    `plain` is the call without parawrap. `in_lane` is the same for a lane that runs the target itself. `method` is the name
    of a method of a replica; None calls the replica itself, including its hooks. `batch` is the number of a batch in its
    stream, for traces.
    """

    plain: Callable[..., Any]
    method: str | None = None
    in_lane: Callable[..., Any] | None = None
    batch: int | None = None

    def of(self, replica: Any) -> Callable[..., Any]:
        return replica if self.method is None else getattr(replica, self.method)  # type: ignore[no-any-return]


class LaneCall:
    """One lane's part of a cut call. The caller makes it, and a pool runs it once.

    `copy` is the lane's copy of the target. The arguments are `args` and `kwargs`, or lie in `piece`, which `place` copies
    to the lane's device.
    """

    __slots__ = ("args", "copy", "entry", "kwargs", "piece", "record", "shard")

    def __init__(
        self,
        entry: Entry,
        copy: LaneReplica,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        piece: Piece | None = None,
    ) -> None:
        self.entry = entry
        self.copy = copy
        self.args = args
        self.kwargs = {} if kwargs is None else kwargs
        self.piece = piece
        self.shard: Shard | None = None  # once it is placed
        self.record: Record | None = None

    def place(self, device: torch.device) -> None:
        """Copy the arguments to a device, on the thread's streams."""
        if self.piece is not None:
            self.shard, self.piece = self.piece.on(device), None
            self.args, self.kwargs = self.shard.args, self.shard.kwargs


class WholeCall:
    """A call that one lane runs whole. The caller makes it, and a pool runs it once.

    With `prepare`, the lane computes the arguments first, as ``prepare(*args)``; `record_prepare` records that. `record`
    takes the number of rows first. `finish` takes the output, the call, the lane's copy of the target, and the index of the
    lane, and returns the caller's output. `sources` are the devices of the call other than the model's; None if everything
    is on the CPU.
    """

    def __init__(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cutter: Cutter,
        finish: Callable[[Any, WholeCall, LaneReplica, int], Any],
        prepare: Prepare | None = None,
    ) -> None:
        self.entry = entry
        self.args = args
        self.kwargs = kwargs
        self.prepare = prepare
        self.finish = finish
        self.sources: Collection[torch.device] | None = None
        self.record: Record | None = None
        self.record_prepare: Record | None = None
        self.plan: ShardPlan | None = None
        self.flat: FlatCall | None = None
        self.shard: Shard | None = None  # once it is placed
        self._cutter = cutter
        self._rows: int | None = None

    @property
    def rows(self) -> int | None:
        """The number of rows; None before `prepare` has run."""
        if self._rows is None and self.prepare is None:
            only_tensors = not self.kwargs and all(type(each) is torch.Tensor for each in self.args)
            self._rows = self._cutter.rows(self.args) if only_tensors else self.flatten()[0].rows
        return self._rows

    def flatten(self) -> tuple[ShardPlan, FlatCall]:
        """Return the plan that gives the arguments whole to one lane, and the arguments taken apart."""
        if self.plan is None or self.flat is None:
            self.plan, self.flat = self._cutter.whole(self.args, self.kwargs)
        return self.plan, self.flat

    def record_call(self, lane: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one, and records when it ran."""
        rows = self.rows  # counted now: the function may change the arguments
        return function if self.record is None else partial(timed, partial(self.record, rows), lane, function)

    def make_arguments(self, lane: int | None) -> None:
        """Compute the arguments with `prepare`, in the thread of that lane."""
        if self.prepare is not None:
            prepare, self.prepare = self.prepare, None
            self.args, self.kwargs = as_call(timed(self.record_prepare, lane, prepare, *self.args))

    def place(self, device: torch.device) -> None:
        """Copy the arguments to a device, on the thread's streams."""
        plan, flat = self.flatten()
        self.shard = plan.cut(flat)[0].on(device)
        self.args, self.kwargs = self.shard.args, self.shard.kwargs

    def run_placed(self, function: Callable[..., Any], device: torch.device) -> Any:
        """Call a function on other streams than those of `place`. Arguments are kept until these streams are done."""
        if device.type != "cpu":
            record_use(flatten_call(self.args, self.kwargs)[0])
        return function(*self.args, **self.kwargs)


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch: a tuple is spread, a dict becomes keywords, anything else is one argument."""
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    is_spread = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    return (tuple(batch), {}) if is_spread else ((batch,), {})


def timed(record: Record | None, lane: int | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and record when it ran."""
    if record is None:
        return function(*args, **kwargs)
    start, error = perf_counter_ns(), None
    try:
        return function(*args, **kwargs)
    except BaseException as raised:
        error = raised
        raise
    finally:
        record(lane, start, perf_counter_ns(), error)
        del error  # its traceback holds this frame
