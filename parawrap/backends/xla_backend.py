"""TPUs and other devices of torch_xla: ``xla:0`` to ``xla:N-1``. PJRT_DEVICE sets which devices the process sees.

An operator on such a device only adds to a graph. `flush` compiles the graph of the given tensors, if it is new, and
starts it. ``torch_xla.sync()`` would run the graphs of all tensors on the device, including those that another thread is
building. That gives wrong shapes or ends the process.
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

from parawrap.backends._backend import Backend, Stream
from parawrap.backends._backend_registry import best_backend, not_there
from parawrap.errors import DeviceUnavailableError
from parawrap.tree import flatten

# Lanes with shards of equal shape build the same graph at the same time. The lock lets the first lane compile it and the
# others find it cached; without the lock, torch_xla compiles it once per lane.
_compiling = threading.RLock()


class XlaBackend(Backend):
    """Backend on torch_xla, which is imported on first use."""

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
            with _compiling:  # held during a compilation, not while the device computes
                # sync_xla_data=True would reuse the memory of the inputs, which other pending work may still read.
                _runtime().torch_xla._XLAC._xla_sync_multi(tensors, devices=[], wait=False, sync_xla_data=False)

    @contextlib.contextmanager
    def fork_rng(self, devices: Iterable[torch.device]) -> Iterator[None]:
        with contextlib.ExitStack() as forked:
            forked.enter_context(torch.random.fork_rng(()))
            for device in set(devices):
                forked.enter_context(_runtime().torch_xla.core.xla_model.fork_rng(str(device)))
            yield


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make `device` the thread's current device, which ``device="xla"`` refers to, inside the block.

    torch_xla aborts the process if an operator has inputs on two devices, so a lane must create tensors on its own device.
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
    """Start torch_xla, once: after a failed start, a second attempt may end the process.

    Raises:
        DeviceUnavailableError: If torch_xla cannot be imported.
    """
    alternative = f'device="auto" selects {best_backend().type!r} on this machine'
    try:
        torch_xla = importlib.import_module("torch_xla")
    except ImportError as error:
        msg = (
            f"no xla device is available: torch_xla cannot be imported ({error}). Install the release of torch_xla for "
            f"torch {torch.__version__}. {alternative}"
        )
        raise DeviceUnavailableError(msg) from error
    try:
        return _Runtime(torch_xla, int(torch_xla.device_count()))
    except (OSError, RuntimeError) as error:
        pjrt_device = os.environ.get("PJRT_DEVICE")
        trouble = (
            f"no xla device is available: torch_xla cannot start with PJRT_DEVICE={pjrt_device!r} ({error}). {alternative}"
        )
        return _Runtime(torch_xla, 0, trouble)


BACKEND = XlaBackend()
