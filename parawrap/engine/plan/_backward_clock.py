"""How long the backward pass of one call takes, wherever it is run from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from parawrap.tree import flatten

__all__ = ["when_backward_is_done"]


def when_backward_is_done(output: Any, tell: Callable[[int], None], wait: Callable[[], None]) -> bool:
    """Call `tell` with the nanoseconds of the first backward pass through this output, once; False without a graph.

    `wait` returns when the devices have done what they were given: the pass is not over before.
    """
    nodes = [leaf.grad_fn for leaf in flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    clock = _Clock(tell, wait)
    for node in nodes:
        node.register_prehook(clock)
    return bool(nodes)


class _Clock:
    """A hook that runs before the output's node does."""

    def __init__(self, tell: Callable[[int], None], wait: Callable[[], None]) -> None:
        self._tell: Callable[[int], None] | None = tell
        self._wait = wait

    def __call__(self, grads: tuple[torch.Tensor, ...]) -> None:
        tell, self._tell = self._tell, None
        if tell is None:
            return
        # The engine calls this when the whole pass is over; DistributedDataParallel ends its passes so too.
        torch.autograd.Variable._execution_engine.queue_callback(partial(_end, perf_counter_ns(), self._wait, tell))


def _end(start_ns: int, wait: Callable[[], None], tell: Callable[[int], None]) -> None:
    wait()
    tell(perf_counter_ns() - start_ns)
