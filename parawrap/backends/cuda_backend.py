"""NVIDIA (and, through ROCm, AMD) GPUs."""

from __future__ import annotations

import torch

from parawrap.backends._backend import Traits
from parawrap.backends.accelerator_backend import AcceleratorBackend


class CudaBackend(AcceleratorBackend):
    """Devices ``cuda:0`` to ``cuda:N-1``, numbered as CUDA_VISIBLE_DEVICES lists them."""

    takes_pageable_at_once = True  # CUDA Runtime API, "API synchronization behavior"

    def traits(self, device: torch.device) -> Traits:
        properties = torch.cuda.get_device_properties(device)
        return Traits(properties.total_memory, properties.multi_processor_count)


BACKEND = CudaBackend("cuda")
