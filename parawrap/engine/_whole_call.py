"""A call that one lane runs whole: its arguments, and the steps of a lane on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.engine._call_recorder import Recorder, Work
from parawrap.engine._shard_task import Placed
from parawrap.replicas import LaneReplica
from parawrap.shards import FlatCall, Shard, ShardPlan

if TYPE_CHECKING:
    from parawrap.engine._session import Entry, Session

__all__ = ["Prepare", "WholeCall", "as_call", "originals_of", "prepared"]

Prepare = Callable[[Any], Any]
"""A function of one batch that returns the arguments of a call, in one of the forms of `as_call`."""


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch: a tuple is spread, a dict becomes keywords, anything else is one argument."""
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    is_spread = isinstance(batch, tuple) and not isinstance(batch, PackedSequence)
    return (tuple(batch), {}) if is_spread else ((batch,), {})


def prepared(
    prepare: Prepare, batch: tuple[Any, ...], recorder: Recorder, number: int | None, lane: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `prepare` makes of a batch, in this lane. `number` is that of the batch, for traces."""
    if recorder.traces:
        prepare = partial(recorder.run, Work("prepare", number, None), lane, prepare)
    return as_call(prepare(*batch))


class WholeCall:
    """A call that one lane of an accelerator runs whole: `take` its arguments, `place` them on the device, and `run` it."""

    def __init__(self, session: Session, entry: Entry, replica: LaneReplica, sources: Collection[torch.device]) -> None:
        self._session = session
        self._entry = entry
        self._replica = replica
        self._sources = sources
        self._plan: ShardPlan
        self._flat: FlatCall
        self._placed: Placed

    def take(self, plan: ShardPlan, flat: FlatCall) -> None:
        """Set the arguments."""
        self._plan, self._flat = plan, flat
        (self._placed,), _ = self._session.scatter(self._entry, [self._replica], plan, flat, self._sources, whole=True)

    def place(self) -> None:
        """Copy the arguments to the lane's device."""
        self._placed.place()

    def run(self) -> Any:
        """Run the call, and return its output on the output device."""
        originals = partial(originals_of, [self._replica], 1, [], ())
        device = self._session.device_of_output(self._flat)
        output = self._session.gather([self._placed.run_placed()], self._plan.sizes, device, originals)
        self._plan.update(self._flat, [self._placed.shard])
        self._session.tally.whole(self._replica.lane, self._plan.rows)
        return output


def originals_of(
    replicas: Sequence[LaneReplica], count: int, shards: Sequence[Shard], whole: Sequence[Any]
) -> Sequence[Callable[[Any], Any]]:
    """Return one function per shard. It maps a lane's copy of a value to the caller's value, or to None.

    `whole` are the leaves that every lane gets as they are.
    """
    of_module = [replica.original_of for replica in replicas][:count]
    same = {id(value): value for leaf in whole for value in (leaf, getattr(leaf, "value", leaf))}
    origins = [{**same, **shard.origins} for shard in shards] or [same] * count
    return [partial(_found, *each) for each in zip(origins, of_module, strict=True)]


def _found(origins: Mapping[int, Any], find: Callable[[Any], Any], value: Any) -> Any:
    found = origins.get(id(value))
    return find(value) if found is None and isinstance(value, torch.Tensor) else found
