"""The calls of a target with lanes in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parawrap.engine import Entry, Prepare, Session
from parawrap.errors import SessionError
from parawrap.lanes import Lane, LaneFuture
from parawrap.shards import Cutter, JoinRules, join
from parawrap.tree import flatten
from parawrap.workers._build import Build
from parawrap.workers._worker_replicas import WorkerReplicas

__all__ = ["open_session"]

_CPU = torch.device("cpu")
_GRADIENTS = (
    "{} requires a gradient, and gradients do not travel between processes. For inference, call inside torch.no_grad(). To "
    "train on several processes, use @wrapper with DistributedDataParallel"
)


class WorkerSession(Session):
    """A session with lanes on the CPU that send their shards to workers. Thread-safe."""

    def __init__(self, target: Any, replicas: WorkerReplicas, lanes: int, **options: Any) -> None:
        self._workers = replicas
        super().__init__(target, [_CPU] * lanes, replicas=replicas, labels=replicas.labels, **options)
        self._parameters = [*target.parameters()] if isinstance(target, torch.nn.Module) else []

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut a call, and run its shards in the workers."""
        self._refuse_gradients(args, kwargs)
        return super().call(entry, args, kwargs)

    def submit(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Prepare | None = None
    ) -> LaneFuture:
        """Run a call whole in the first free worker."""
        self._refuse_gradients(args, kwargs)
        return super().submit(entry, args, kwargs, prepare)

    def cancel(self) -> None:
        """Drop submitted calls, and end the workers, also in the middle of a call."""
        super().cancel()
        self._workers.end()

    def _run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.target, Build) and self.pool.alive:
            return super().submit(entry, args, kwargs).result()  # this process has no model
        return super()._run_plainly(entry, args, kwargs)

    def _run_prepared(
        self, entry: Entry, replicas: Sequence[Any], batch: tuple[Any, ...], prepare: Prepare, lane: Lane
    ) -> Any:
        """Run a call with arguments that the worker computes. Its rows are not counted: this process does not see them."""
        self.tally.whole(lane.index, 0)
        output = replicas[lane.index].whole_prepared(entry.method, prepare)(*batch)
        return output if self.rules.keep_single else join([output], (1,), self.rules)

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
    """Open a session with one worker process per device. A call that a worker died of runs `retries` more times."""
    replicas = WorkerReplicas(target, devices, retries)
    options = {"cutters": cutters, "rules": rules, "output_device": output_device, "verify": verify}
    return WorkerSession(target, replicas, len(devices), **options)
