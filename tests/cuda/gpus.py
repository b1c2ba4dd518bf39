"""Names of the GPUs, functions that delay their work, and readings of their memory."""

from __future__ import annotations

import functools
import gc
import warnings
from contextlib import contextmanager

import torch

KIND = "cuda"
HOME = f"{KIND}:0"
ONE = [HOME]
TWICE = [HOME, HOME]
LONG = 600_000_000
"""GPU clock cycles, about a third of a second: much longer than the host's work in a test."""

cuda = torch.get_device_module(KIND)


@functools.cache
def missing():
    """Return why these tests cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != KIND:
        return f"the accelerator of this process is {accelerator}: run this folder in a process of its own"
    return None


def every():
    """Return the names of all visible GPUs."""
    return [f"{KIND}:{index}" for index in range(cuda.device_count())]


def sleep(cycles=LONG):
    """Keep the current stream busy without blocking the host."""
    if cycles:
        cuda._sleep(cycles)


def settle():
    """Wait until all GPUs are idle."""
    for device in every():
        cuda.synchronize(device)


def held():
    """Return the bytes of live tensors on all GPUs, after all work and a garbage collection."""
    gc.collect()
    settle()
    cuda.empty_cache()
    return sum(cuda.memory_allocated(device) for device in every())


@contextmanager
def torch_refuses_to_wait():
    """Have torch raise in all threads if the host would wait for a GPU inside this block."""
    _set_debug_mode("error")
    try:
        yield
    finally:
        _set_debug_mode("default")


def _set_debug_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says, once, that it does not detect everything
        cuda.set_sync_debug_mode(mode)
