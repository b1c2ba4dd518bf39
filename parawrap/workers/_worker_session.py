"""The calls of a target with lanes in other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from parawrap.engine import Entry, Prepare, Ready, Session, Work
from parawrap.errors import SessionError
from parawrap.lanes import Lane, LaneFuture
from parawrap.launch import Platform
from parawrap.shards import Cutter, JoinRules, join
from parawrap.tree import flatten
from parawrap.workers._build import Build
from parawrap.workers._local_worker import LocalWorkers
from parawrap.workers._ray_workers import RayWorkers
from parawrap.workers._requests import CallRequest
from parawrap.workers._server import Call, Returned, pickled_function
from parawrap.workers._worker_pool import WorkerPool
from parawrap.workers._worker_replicas import WorkerReplicas, Workers, landed

__all__ = ["open_session"]

_CPU = torch.device("cpu")
_GRADIENTS = (
    "{} requires a gradient, and gradients do not travel between processes. For inference, call inside torch.no_grad(). To "
    "train on several processes, use @wrapper with DistributedDataParallel"
)


class WorkerSession(Session):
    """A session with lanes that send their shards to workers. Thread-safe."""

    def __init__(self, target: Any, replicas: WorkerReplicas, **options: Any) -> None:
        self._workers = replicas
        self._worker_pool = WorkerPool(replicas.lanes, replicas.backlog)
        super().__init__(target, [_CPU] * len(replicas.lanes), replicas=replicas, pool=self._worker_pool, **options)
        self._parameters = [*target.parameters()] if isinstance(target, torch.nn.Module) else []
        self._prepare = 0, b""
        self._prepares = count(1)

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut a call, and run its shards in the workers."""
        self._refuse_gradients(args, kwargs)
        return super().call(entry, args, kwargs)

    def submit(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Prepare | None = None,
        ready: Ready | None = None,
    ) -> LaneFuture:
        """Run a call whole in the worker with the least work. With `prepare`, the worker computes the arguments first."""
        self._refuse_gradients(args, kwargs)
        ready = ready or self.get_ready()
        if ready is None:
            return super().submit(entry, args, kwargs, prepare)
        modes = ready.modes
        rows = 0 if prepare is not None else self._rows(entry, args, kwargs)  # this process does not see prepared rows
        call = Call(entry.method, None, self._workers.packed_modes(modes), None, False, args, kwargs)
        numbered = None if prepare is None else self._numbered(prepare)
        read = partial(self._landed, rows, args, kwargs)
        request = CallRequest(call, read, numbered, is_inference=modes.inference)
        if self.recorder.traces:
            known_rows = None if prepare is not None else rows
            request.record = partial(self.recorder.record, self.recorder.work(entry.method, entry.batch, known_rows))
        return self._worker_pool.submit(request)

    def cancel(self) -> None:
        """Drop submitted calls, and end the workers, also in the middle of a call."""
        for lane in self._workers.lanes:
            lane.is_over = True  # it does not replace its worker any more
        self._workers.end_workers()  # a lane may be waiting for a cluster
        self._worker_pool.cancel()

    def _recorded(self, work: Work, replica: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which makes a lane's part of a call, with a record of when its worker is busy."""
        return partial(_recorded_shard, partial(self.recorder.record, work), function)

    def _run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(self.target, Build) or self.must_run_plainly():
            return super()._run_plainly(entry, args, kwargs)
        return self.submit(entry, args, kwargs).result()  # this process has no model

    def _landed(self, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Returned, lane: Lane) -> Any:
        """Count a whole call, and return its output."""
        output = landed(self._workers, returned, args, kwargs)
        output = output if self.rules.keep_single else join([output], (1,), self.rules)
        self.tally.whole(lane.index, rows)
        return output

    def _rows(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        cutter = self.cutters[entry.method]
        if not kwargs and all(type(each) is torch.Tensor for each in args):
            return cutter.rows(args)
        return cutter.whole(args, kwargs)[0].rows

    def _numbered(self, prepare: Prepare) -> tuple[int, bytes]:
        """Return a number and the pickle of a function. Pickled each time, because what it refers to may have changed."""
        pickled = pickled_function(prepare, "prepare")
        if pickled != self._prepare[1]:
            self._prepare = next(self._prepares), pickled
        return self._prepare

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        leaves = flatten((args, kwargs))[0]
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise SessionError(_GRADIENTS.format("an argument"))
        if any(parameter.requires_grad for parameter in self._parameters):
            raise SessionError(_GRADIENTS.format("a parameter of the model"))


def open_session(
    target: Any,
    devices: Sequence[torch.device] | Platform,
    *,
    cutters: Mapping[str | None, Cutter],
    rules: JoinRules,
    output_device: torch.device | None = None,
    retries: int = 1,
) -> Session:
    """Open a session with one worker process per device, or with the workers of a platform for Ray.

    A call whose worker died runs `retries` more times.
    """
    workers: Workers = RayWorkers(devices) if isinstance(devices, Platform) else LocalWorkers(devices)
    replicas = WorkerReplicas(target, workers, retries)
    return WorkerSession(target, replicas, cutters=cutters, rules=rules, output_device=output_device)


def _recorded_shard(record: Callable[..., None], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return a lane's part of a call, with `record` for its request."""
    shard = function(*args, **kwargs)
    shard.record = record
    return shard
