"""What tracing comes to in every runtime: the examples as arguments, a run that leaves no trace, torch's own warnings."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["arguments_of", "buffers_kept", "quiet_about_torchscript"]

# The filters of warnings are the process's: two threads that leave such blocks crosswise would leave one's for good.
_filtering = threading.RLock()


def arguments_of(example_inputs: Any) -> tuple[Any, ...]:
    """As torch.jit.trace reads them: a tensor or a dict is the one argument, a tuple or list holds them all."""
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)


@contextmanager
def buffers_kept(model: Callable[..., Any]) -> Iterator[None]:
    """Leave a module with the buffers that it has: the run inside the block is none of the user's."""
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
    """Keep to itself that torch.jit is deprecated: the vendor's compilers give a ScriptModule all the same.

    One thread at a time is inside.
    """
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)", DeprecationWarning)
        yield
