"""Tensors on a device are sent to other processes by a copy in host memory."""

from __future__ import annotations

import os

import torch

from parawrap.launch.messages._pickle_values import memory_file, pack, unpack
from tests import simdevice  # noqa: F401  # makes the devices


def test_device_tensors_arrive_unchanged():
    """Their copies in host memory live until they are written."""
    tensors = [torch.full((1 << 21,), float(index)).to("sim:0") for index in range(4)]
    file = memory_file("test")
    try:
        pack(tensors, file, "value")
        assert [tensor.unique().tolist() for tensor in unpack(file)] == [[0], [1], [2], [3]]
    finally:
        os.close(file)
