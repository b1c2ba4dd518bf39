"""TPUs, and what else torch_xla drives: ``xla:0`` to ``xla:N-1``, as PJRT_DEVICE has the process see them.

An operator on such a device only adds to a graph. `flush` compiles the graph of some tensors, where it is a new one, and
sets the device to work on it. ``torch_xla.sync()`` would do that for every tensor on the device, also for those that
another thread is at work on, which ends in wrong shapes or in the end of the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from parawrap.backends._base import Backend, Stream
from parawrap.backends._registry import best_backend, not_there
from parawrap.errors import DeviceUnavailableError
from parawrap.tree import flatten

__all__ = ["BACKEND", "XlaBackend"]

# Lanes with shards of one shape come with the same graph, all at once: the first compiles it, and the others find it done.
# torch_xla alone would compile it once a lane.
_compiling = threading.RLock()


class XlaBackend(Backend):
    """Asks torch_xla, which is imported when a device of the kind is first asked for."""

    type = "xla"
    compiles_each_shape = True

    def count(self) -> int:
        try:
            return _runtime().devices
        except DeviceUnavailableError:
            return 0

    def device(self, index: int | None) -> torch.device:
        runtime = _runtime()
        if runtime.trouble:
            raise DeviceUnavailableError(runtime.trouble)
        if index is None:
            index = int(runtime.torch_xla.device().index)
        if not 0 <= index < runtime.devices:
            raise not_there(self.type, index, runtime.devices)
        return torch.device(self.type, index)

    def activate(self, device: torch.device, stream: Stream | None) -> AbstractContextManager[object]:
        return _current(device)

    def flush(self, value: object) -> None:
        pending: dict[torch.device, list[torch.Tensor]] = {}
        for leaf in flatten(value)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.type:
                pending.setdefault(leaf.device, []).append(leaf)
        for tensors in pending.values():
            with _compiling:  # waits for a compilation, and not for the device
                # sync_xla_data would reuse the inputs' memory, as if nothing else were still to be computed from them.
                _runtime().torch_xla._XLAC._xla_sync_multi(tensors, devices=[], wait=False, sync_xla_data=False)

    @contextlib.contextmanager
    def forked_rng(self, devices: Iterable[torch.device]) -> Iterator[None]:
        with contextlib.ExitStack() as forked:
            forked.enter_context(torch.random.fork_rng(()))
            for device in set(devices):
                forked.enter_context(_runtime().torch_xla.core.xla_model.fork_rng(str(device)))
            yield


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """The thread's current device, on which ``device="xla"`` makes a tensor.

    torch_xla aborts the process at an operator that has inputs on two devices: a lane must not make one on another's.
    """
    torch_xla = _runtime().torch_xla
    before = torch_xla.device()
    torch_xla.device(device.index)  # makes it the current one
    try:
        yield
    finally:
        torch_xla.device(before.index)


class _Runtime(NamedTuple):
    torch_xla: Any
    devices: int
    trouble: str = ""


@functools.cache
def _runtime() -> _Runtime:
    """What torch_xla sees. It is started once: where that failed, a second attempt may end the process."""
    there = f'device="auto" takes the best there is, {best_backend().type!r}'
    try:
        torch_xla = importlib.import_module("torch_xla")
    except ImportError as error:
        msg = (
            f"no xla device is there, as torch_xla cannot be imported ({error}): install the release of torch_xla that "
            f"goes with torch {torch.__version__}; {there}"
        )
        raise DeviceUnavailableError(msg) from error
    try:
        return _Runtime(torch_xla, int(torch_xla.device_count()))
    except (OSError, RuntimeError) as error:
        wanted = os.environ.get("PJRT_DEVICE")
        trouble = f"no xla device is there, as torch_xla cannot start for PJRT_DEVICE={wanted!r} ({error}); {there}"
        return _Runtime(torch_xla, 0, trouble)


BACKEND = XlaBackend()
