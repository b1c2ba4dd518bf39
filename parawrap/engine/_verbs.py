"""One target on its lanes, and the four verbs: scatter, replicate, apply, gather."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from parawrap.backends import device_of, record_use
from parawrap.engine._call import LanesAwaitThread
from parawrap.engine._entry import Entry
from parawrap.engine._work import Work
from parawrap.lanes import LanePool, first_failure
from parawrap.replicas import LaneReplica, ReplicaSet, home_of
from parawrap.shards import Cutter, FlatCall, GatherRules, Originals, Shard, ShardPlan, gather
from parawrap.tree import Opaque, flatten

__all__ = ["Verbs", "not_a_copy", "originals_of"]

_NOWHERE: tuple[torch.device, ...] = ()


class Verbs:
    """Owns the lanes and the replicas of one target, from when it is made until `close`. Safe to share between threads.

    Each of the four verbs may be called alone, as torch.nn.DataParallel's may; a `Session` makes calls of them.

    `labels` tell of the lanes otherwise than by their devices. `may_try_alone` says that no work in a lane ever waits for
    another lane.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        devices: Sequence[torch.device],
        *,
        cutters: Mapping[str | None, Cutter],
        rules: GatherRules,
        output_device: torch.device | None = None,
        labels: Sequence[str] | None = None,
        may_try_alone: bool = False,
    ) -> None:
        self.target = target
        self.devices = tuple(devices)
        self.cutters = cutters
        self.rules = rules
        self._replicas = ReplicaSet(target, devices) if isinstance(target, torch.nn.Module) else None
        home = home_of(target) if isinstance(target, torch.nn.Module) else None
        self.output_device = output_device  # None: where the module lies, or what a callable is given
        self.pool = LanePool(self.devices, home, labels, may_try_alone=may_try_alone)
        self._stays_on_cpu = all(d is None or d.type == "cpu" for d in (*self.devices, home, output_device))
        self._refreshing = threading.Lock()

    def scatter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardPlan, list[Shard]]:
        """Cut a call into one shard a lane; with fewer rows than lanes, the surplus lanes get none."""
        plan, flat = self.cutters[None].plan(args, kwargs, len(self.devices))
        return plan, self._scattered(plan, flat)

    def replicate(self, lanes: int | None = None) -> list[LaneReplica]:
        """What each of the first lanes runs, brought into line with the original if that has changed.

        Raises:
            ReplicaError: one cannot be made.
            LanesAwaitThread: a lane waits for a thread, which may be this one, and cannot be brought into line.
        """
        lanes = len(self.devices) if lanes is None else lanes
        if self._replicas is None:
            return [LaneReplica(lane, self.target, not_a_copy) for lane in range(lanes)]
        with self._refreshing:
            if self._replicas.stale():
                with self.pool.idle() as alone:
                    if not alone:
                        raise LanesAwaitThread
                    self._replicas.refresh()
                self.pool.home = self._replicas.home
            return self._replicas.replicas(lanes)

    def apply(
        self,
        works: Sequence[Callable[[], Any]],
        kind: Hashable = None,
        sources: Collection[torch.device] = (),
        threads: int | None = None,
    ) -> list[Any]:
        """Run work i in lane i; their values in lane order. Work of one `kind` is taken to last about as long each time.

        `sources` are the devices, other than the module's, that the works take something from. `threads` is how many an
        operator may use in each lane; by default the lane's share of the cores.

        Raises:
            BaseException: the error of the first lane that failed, with a note on lane, device and shard. The other
                lanes have finished by then.
        """
        outcomes = self.pool.run(works, kind, sources, threads)
        error = first_failure(outcomes, self.pool.lanes)
        if error is not None:
            try:
                raise error
            finally:
                del error
                outcomes.clear()  # the traceback holds frames that hold this list: no cycle keeps the call's tensors
        values = [outcome.value for outcome in outcomes]
        if not self._stays_on_cpu:
            record_use(leaf for value in values for leaf in flatten(value)[0])
        return values

    def gather(
        self, outputs: Sequence[Any], sizes: Sequence[int], device: torch.device | None = None, originals: Originals = ()
    ) -> Any:
        """Join the outputs of shards of those sizes, on the output device unless another is given."""
        if self._stays_on_cpu:
            device = None  # where they are
        elif device is None:
            device = self.output_device or self.pool.home or self.devices[0]
        self.pool.backend.flush(outputs)  # all at once: fetched one by one, each would be a graph of its own
        with self.pool.share_of_cores():
            return gather(outputs, sizes, self.rules, device, originals)

    def close(self) -> None:
        """Let the lanes finish, end their threads and let go of the replicas. A call that is under way finishes too."""
        self.pool.close()
        with self._refreshing:
            if self._replicas is not None:
                self._replicas.forget()

    # What the lanes run

    def _scattered(self, plan: ShardPlan, flat: FlatCall) -> list[Shard]:
        return plan.scatter(flat, self.devices)

    def _on_views(self, entry: Entry, replicas: Sequence[LaneReplica], shards: Sequence[Shard]) -> list[Callable[[], Any]]:
        """What the lanes run where nothing is to be brought anywhere: as `_works`, with less on the way."""
        return [
            partial(self._way_into(entry, replica), *shard.args, **shard.kwargs)
            for replica, shard in zip(replicas, shards, strict=True)
        ]

    def _way_into(self, entry: Entry, replica: LaneReplica) -> Callable[..., Any]:
        return entry.plain if replica.module is self.target else entry.of(replica.module)

    def _works(self, entry: Entry, replicas: Sequence[LaneReplica], plan: ShardPlan, flat: FlatCall) -> list[Work]:
        works = []
        for replica, piece in zip(replicas, plan.cut(flat), strict=True):
            afterwards = replica.write_back if replica.lane == 0 else None
            works.append(Work(self._way_into(entry, replica), piece, self.devices[replica.lane], afterwards))
        return works

    # What lies where

    def _beside(self, flat: FlatCall) -> torch.device | None:
        """Where the plain call of a callable would leave its output: where its first tensor lies."""
        if self.output_device is not None or self.pool.home is not None:
            return self.output_device
        return next((device for leaf in flat.leaves if (device := device_of(leaf)) is not None), None)

    def _sources(self, flat: FlatCall) -> Collection[torch.device]:
        """Where inputs lie and the output goes, beside the module's device; none where all of it is the CPU."""
        if self._stays_on_cpu and all(getattr(leaf, "is_cpu", not isinstance(leaf, Opaque)) for leaf in flat.leaves):
            return _NOWHERE
        devices = (*map(device_of, flat.leaves), self.output_device)
        return {device for device in devices if device is not None and device != self.pool.home}

    def _lies_in_lane_0(self, leaves: Sequence[Any]) -> bool:
        """Whether the first lane runs the module itself, and these and the output lie beside it."""
        device = self.devices[0]
        return (
            self._replicas is not None
            and self._replicas.is_on(device)
            and self.output_device in (None, device)
            and all(device_of(leaf) in (None, device) for leaf in leaves)
        )


def originals_of(replicas: Sequence[LaneReplica], works: Sequence[Work]) -> Originals:
    """For each lane, what finds the tensor of the call or of the module that a tensor of that lane is a copy of."""
    of_module = [replica.original_of for replica in replicas]
    if not any(work.copies for work in works):
        return of_module
    return [partial(_found, work.copies, lookup) for work, lookup in zip(works, of_module, strict=True)]


def not_a_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a target without replicas has copies of."""
    return None


def _found(copies: Mapping[int, torch.Tensor], lookup: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    copied = copies.get(id(tensor))
    return lookup(tensor) if copied is None else copied
