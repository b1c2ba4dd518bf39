"""Tracing helpers for every runtime: read example inputs, restore buffers, and hide torch's deprecation warnings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["arguments_of", "buffers_kept", "quiet_about_torchscript"]

# Warning filters are per process. If two threads leave catch_warnings blocks in the wrong order, one filter stays forever.
_filtering = threading.RLock()


def arguments_of(example_inputs: Any) -> tuple[Any, ...]:
    """Return the positional arguments as torch.jit.trace does: a tuple or list holds all; anything else is the only one."""
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


@contextmanager
def buffers_kept(model: Callable[..., Any]) -> Iterator[None]:
    """Restore the module's buffers at the end of the block, because the user did not request the run inside it."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            if not torch.equal(buffer, value):
                buffer.copy_(value)


@contextmanager
def quiet_about_torchscript() -> Iterator[None]:
    """Hide the warning that torch.jit is deprecated: the vendor's compilers still return a ScriptModule.

    Only one thread at a time runs inside this block.
    """
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)", DeprecationWarning)
        yield
