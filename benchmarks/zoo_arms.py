"""What the processes of an arm do: a net's calls, its training steps, a stream of batches, and requests under load.

Made by name in a process of their own (`benchmarks._apart`); each answers `burst` with the times of so many calls.
"""

from __future__ import annotations

import itertools
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks._apart import Burst, timed
from benchmarks.zoo_nets import ZOO

__all__ = ["Forward", "Requests", "Step", "Stream"]

_WARM = 5
_WARM_S = 0.05
_WINDOW = 2  # batches in flight for each lane, as `map` has it


class Forward:
    """Calls of a net, in eval mode and without gradients; plainly, or in a block that stays open.

    Args:
        net: a name of the zoo.
        plan: what `parallel` is given; "plain" is no block at all.
        at_a_time: how many calls count as one.
    """

    def __init__(self, net: str, plan: str, at_a_time: int = 1) -> None:
        torch.manual_seed(0)
        torch.set_grad_enabled(False)
        self._net = ZOO[net]
        model = self._net.make().eval()
        self._plain = deepcopy(model)  # the block rewrites the model in place
        self._model = model
        self._block = _block(model, plan)
        self._at_a_time = at_a_time
        self._x = self._net.batch(1)

    def prepare(self, rows: int) -> None:
        """The calls have so many rows from now on. The process is warm for them; the block has not met them."""
        self._x = self._net.batch(rows)
        for _ in range(_WARM):
            self._plain(self._x)

    def open(self, rows: int) -> float:
        """What the first call that is cut takes beyond a plain one, in microseconds: it makes replicas, and threads."""
        x = self._net.batch(rows)
        plain, first = (timed(partial(each, x), 1, unsettled=True)[0] for each in (self._plain, self._model))
        return first - plain

    def first(self, calls: int, warm: bool = True) -> float:
        """What so many calls took together, in microseconds. The processor is warm then, and the block as it was."""
        until = time.monotonic() + _WARM_S * warm
        while time.monotonic() < until:
            self._plain(self._x)
        return timed(lambda: [self._call() for _ in range(calls)], 1, unsettled=True)[0]

    def burst(self, calls: int) -> Burst:
        return timed(self._call, calls)

    def faults(self, calls: int) -> float:
        """How many pages the kernel handed out, a call."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        timed(self._call, calls, unsettled=True)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls

    def told(self) -> dict[str, Any]:
        """What the block's plan has to say."""
        return {"extra_calls": self._block.plan.extra_calls, "plan": str(self._block.plan)} if self._block else {}

    def _call(self) -> None:
        for _ in range(self._at_a_time):
            self._model(self._x)


class Step:
    """Training steps of a net: forward, backward, SGD."""

    def __init__(self, net: str, plan: str, rows: int) -> None:
        torch.manual_seed(0)
        self._model = ZOO[net].make().train()
        self._x = ZOO[net].batch(rows)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        plain = deepcopy(self._model)
        for _ in range(_WARM):
            plain(self._x).square().mean().backward()
        self._block = _block(self._model, plan)

    def burst(self, calls: int) -> Burst:
        return timed(self._step, calls)

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._x).square().mean().backward()
        self._optimizer.step()


class Stream:
    """A list of batches: one by one in a loop, or through lanes.

    Args:
        net: a name of the zoo.
        way: "loop"; "map" is parawrap's, "executor" that of a ThreadPoolExecutor with as many workers.
        traced: whether the net is traced first.
        rows: of a batch.
        batches: how many of them are one call.
    """

    def __init__(self, net: str, way: str, *, traced: bool, rows: int, batches: int) -> None:
        torch.manual_seed(0)
        torch.set_grad_enabled(False)
        model = ZOO[net].make().eval()
        self._batches = [ZOO[net].batch(rows) for _ in range(batches)]
        self._model = torch.jit.trace(model, self._batches[0]) if traced else model
        self._run = _ways(self._model)[way]()

    def burst(self, calls: int) -> Burst:
        return timed(lambda: self._run(self._batches), calls)


class Requests:
    """Small calls, one after the other, while all lanes are at work on a stream of larger batches.

    Args:
        net: a name of the zoo.
        way: "map" is parawrap's `map` and `submit`, "executor" a ThreadPoolExecutor with as many workers.
        rows: of a batch of the stream; 0: there is no stream.
    """

    def __init__(self, net: str, way: str, rows: int) -> None:
        torch.manual_seed(0)
        torch.set_grad_enabled(False)
        model = ZOO[net].make().eval()
        self._small = ZOO[net].batch(1)
        self._large = ZOO[net].batch(rows) if rows else None
        if way == "map":
            block = _opened(model)
            self._submit: Callable[[torch.Tensor], Future[Any]] = block.submit
            self._map: Callable[[Iterable[Any]], Iterator[Any]] = block.map
        else:
            pool = _one_thread_each()
            self._submit = lambda x: pool.submit(_without_gradients, model, x)
            self._map = lambda batches: _windowed(pool, model, batches)

    def burst(self, calls: int) -> Burst:
        with self._at_work():
            return timed(lambda: self._submit(self._small).result(), calls)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self._large is None:
            yield
            return
        busy, over = threading.Event(), threading.Event()

        def load() -> None:
            with torch.no_grad():
                for done, _ in enumerate(self._map(itertools.repeat(self._large))):
                    if done > _WINDOW:
                        busy.set()
                    if over.is_set():
                        return

        thread = threading.Thread(target=load)
        thread.start()
        busy.wait()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _block(model: nn.Module, plan: str) -> Any:
    """An open block with that plan; "plain" is none, and "default" what `parallel` does unasked."""
    return None if plan == "plain" else _opened(model, **({} if plan == "default" else {"plan": plan}))


def _opened(model: nn.Module, **given: Any) -> Any:
    from parawrap import parallel

    return parallel(model, "cpu", **given).__enter__()  # it ends with the process


def _ways(model: nn.Module) -> dict[str, Callable[[], Callable[[list[torch.Tensor]], object]]]:
    def loop() -> Callable[[list[torch.Tensor]], object]:
        return lambda batches: [model(batch) for batch in batches]

    def mapped() -> Callable[[list[torch.Tensor]], object]:
        block = _opened(model)
        return lambda batches: list(block.map(batches))

    def executor() -> Callable[[list[torch.Tensor]], object]:
        pool = _one_thread_each()
        return lambda batches: list(_windowed(pool, model, batches))

    return {"loop": loop, "map": mapped, "executor": executor}


def _one_thread_each() -> ThreadPoolExecutor:
    """As many workers as lanes, whose operators use one thread each."""
    from parawrap.backends.cpu import usable_cores

    def begin() -> None:
        torch.get_num_threads()  # what is set before a thread's first look at it is forgotten
        torch.set_num_threads(1)

    return ThreadPoolExecutor(usable_cores(), initializer=begin)


def _windowed(pool: ThreadPoolExecutor, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """Executor.map would read all batches at once."""
    window, waiting = _WINDOW * pool._max_workers, deque[Future[Any]]()
    for batch in batches:
        waiting.append(pool.submit(_without_gradients, model, batch))
        if len(waiting) >= window:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _without_gradients(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(batch)
