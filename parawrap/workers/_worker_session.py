"""The calls of a target with lanes in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from parawrap.engine import Entry, Prepare, Session
from parawrap.errors import SessionError
from parawrap.lanes import Lane, LaneFuture, Modes
from parawrap.shards import Cutter, JoinRules, join
from parawrap.tree import flatten
from parawrap.workers._build import Build
from parawrap.workers._server import Call, pickled_function
from parawrap.workers._worker_pool import WorkerPool
from parawrap.workers._worker_replicas import CallRequest, WorkerReplicas

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
        self._prepare: tuple[Prepare | None, tuple[int, bytes]] = None, (0, b"")
        self._prepares = count()

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut a call, and run its shards in the workers."""
        self._refuse_gradients(args, kwargs)
        return super().call(entry, args, kwargs)

    def submit(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None = None
    ) -> LaneFuture:
        """Run a call whole in the worker with the least work. With `prepare`, the worker computes the arguments first."""
        self._refuse_gradients(args, kwargs)
        if self.must_run_plainly():
            return super().submit(entry, args, kwargs, prepare)
        self.replicate()
        modes = self._workers.packed_modes(Modes.capture(self._workers.packed_modes.kind))
        rows = 0 if prepare is not None else self._rows(entry, args, kwargs)  # this process does not see prepared rows
        call = Call(entry.method, None, modes, None, False, args, kwargs)
        numbered = None if prepare is None else self._numbered(prepare)
        return self._worker_pool.submit(CallRequest(call, partial(self._landed, rows), numbered))

    def cancel(self) -> None:
        """Drop submitted calls, and end the workers, also in the middle of a call."""
        self._worker_pool.cancel()

    def _run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.target, Build) and not self.must_run_plainly():
            return self.submit(entry, args, kwargs).result()  # this process has no model
        return super()._run_plainly(entry, args, kwargs)

    def _landed(self, rows: int, value: tuple[Any, ...], lane: Lane) -> Any:
        """Count a whole call, and return its output."""
        self.tally.whole(lane.index, rows)
        return value[0] if self.rules.keep_single else join([value[0]], (1,), self.rules)

    def _rows(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        cutter = self.cutters[entry.method]
        if not kwargs and all(type(each) is torch.Tensor for each in args):
            return cutter.rows(args)
        return cutter.whole(args, kwargs)[0].rows

    def _numbered(self, prepare: Prepare) -> tuple[int, bytes]:
        """Return a number and the pickle of a function. One stream uses one function, so the last one is kept."""
        function, numbered = self._prepare
        if function is not prepare:
            numbered = next(self._prepares), pickled_function(prepare, "prepare")
            self._prepare = prepare, numbered
        return numbered

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
    devices: Sequence[torch.device],
    *,
    cutters: Mapping[str | None, Cutter],
    rules: JoinRules,
    output_device: torch.device | None = None,
    verify: bool = False,
    retries: int = 1,
) -> Session:
    """Open a session with one worker process per device. A call whose worker died runs `retries` more times."""
    replicas = WorkerReplicas(target, devices, retries)
    return WorkerSession(target, replicas, cutters=cutters, rules=rules, output_device=output_device, verify=verify)
