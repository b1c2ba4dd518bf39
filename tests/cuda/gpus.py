"""The GPUs of this tier: how they are named, how work on them is held up, and what of their memory is taken."""

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
"""Clock cycles of a GPU, a third of a second or so: the host does meanwhile whatever a test has it do, many times over."""

cuda = torch.get_device_module(KIND)


@functools.cache
def missing():
    """Why the tests of this folder cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != KIND:
        return f"the accelerator of this process is {accelerator}: run this folder in a process of its own"
    return None


def every():
    """All GPUs that this process sees."""
    return [f"{KIND}:{index}" for index in range(cuda.device_count())]


def sleep(cycles=LONG):
    """Keep the current stream busy; the host goes on."""
    if cycles:
        cuda._sleep(cycles)


def settle():
    """Wait until no GPU has anything left to do."""
    for device in every():
        cuda.synchronize(device)


def held():
    """The bytes that tensors take on all GPUs, once all work is done and nobody has garbage."""
    gc.collect()
    settle()
    cuda.empty_cache()
    return sum(cuda.memory_allocated(device) for device in every())


def forget_workspaces():
    """Give back what torch keeps for each pair of a cuBLAS handle, which a thread has, and a stream."""
    settle()
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def torch_refuses_to_wait():
    """In this block torch raises wherever it would have the host wait for a GPU, in every thread."""
    _set_debug_mode("error")
    try:
        yield
    finally:
        _set_debug_mode("default")


def _set_debug_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says, once, that it does not detect everything
        cuda.set_sync_debug_mode(mode)
