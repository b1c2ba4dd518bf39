"""Names of the GPUs."""

from __future__ import annotations

import functools

import torch
from torch import cuda

HOME = "cuda:0"
ONE = [HOME]
TWICE = [HOME, HOME]


@functools.cache
def missing():
    """Return why these tests cannot run here, or None if they can."""
    if not cuda.is_available():
        return "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        return (
            f"the accelerator of this process is {accelerator}: run this folder in a process of "
            "its own"
        )
    return None


def every():
    return [f"cuda:{index}" for index in range(cuda.device_count())]


def settle():
    for device in every():
        cuda.synchronize(device)
