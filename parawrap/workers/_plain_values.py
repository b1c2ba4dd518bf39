"""Pickle plain values in C: containers, numbers, and strings of Python, and contiguous tensors on the CPU.

Most calls consist of these alone, and a pickler that also handles classes and functions takes ten times as long.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any

import torch

__all__ = ["pickle_plain"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class _NotPlainError(Exception):
    """The value has a part that another pickler must handle."""


def pickle_plain(value: Any) -> tuple[memoryview, list[memoryview]] | None:
    """Return the pickle of a plain value, and the memory of its tensors, which is not copied; None for other values."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    try:
        _PlainPickler(stream, buffers).dump(value)
    except (_NotPlainError, RecursionError):
        return None
    return stream.getbuffer(), [buffer.raw() for buffer in buffers]


class _PlainPickler(pickle.Pickler):
    """Each instance pickles one value. C code calls `reducer_override` for every class that is not a builtin container."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._storages: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if obj is _tensor:
            return NotImplemented  # pickled by its name
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            raise _NotPlainError
        storage = obj.untyped_storage().data_ptr()
        if storage in self._storages:  # tensors that share memory must share it in the other process
            raise _NotPlainError
        self._storages.add(storage)
        memory = (ctypes.c_ubyte * obj.nbytes).from_address(obj.data_ptr())
        return _tensor, (pickle.PickleBuffer(memory), _CODES[obj.dtype], tuple(obj.shape), obj.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if elements, shape, and strides describe the tensor completely."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in _CODES
        and not (tensor.is_nested or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def _tensor(memory: Any, code: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=_DTYPES[code]).as_strided_(shape, stride)
