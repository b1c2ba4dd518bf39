"""Values on their way to another process: one file that holds a pickle and, beside it, the memory of tensors and arrays.

The reader maps the file and builds tensors upon it, so a result of gigabytes is written once, read without a copy, takes
one descriptor whatever its number of tensors, and is gone with the last tensor that lies in it. Functions go by value where
no module could give them to the other side (cloudpickle). Tensors on an accelerator arrive on the CPU.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import struct
import tempfile
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from parawrap.errors import UnsendableError
from parawrap.launch.parcels._exceptions import reduced_exception
from parawrap.launch.parcels._unpicklable import find_unpicklable

__all__ = ["OfMain", "memory_file", "pack", "packed", "unpack"]

_HEAD = struct.Struct("<QQ")  # the pickle's length, the number of buffers
_SPAN = struct.Struct("<QQ")  # a buffer's offset and length
_ALIGNMENT = 64
_WORTH_MAPPING = 1 << 20
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def memory_file(name: str) -> int:
    """A new file without a path, in memory where the system offers that: nothing stays behind whoever dies."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"parawrap-{name}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def packed(value: Any, name: str, address: str) -> int:
    """A new file that holds a value; raises what `pack` raises, and leaves no file then."""
    file = memory_file(name)
    try:
        pack(value, file, address)
    except BaseException:
        os.close(file)
        raise
    return file


def pack(value: Any, file: int, address: str) -> None:
    """Write a value into an open file, from its start.

    A dict with an `OfMain` as its last value gets there what of ``__main__`` has gone into the file by value.

    Raises:
        UnsendableError: it cannot be pickled; the message names the part that cannot, from `address` on.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, buffers).dump(value)
    except Exception as error:
        place, found, reason = find_unpicklable(value, address, _refusal)
        why = str(reason or error) or repr(reason or error)
        msg = f"{place} cannot be sent to another process: {type(found).__qualname__}: {why}"
        raise UnsendableError(msg) from error
    head, spans = _layout(stream.tell(), [each.nbytes for each in buffers])
    with open(file, "wb", closefd=False) as out:
        out.write(head)
        out.write(stream.getbuffer())
        for (offset, _), buffer in zip(spans, buffers, strict=True):
            out.seek(offset)
            out.write(buffer)


def unpack(file: int) -> Any:
    """The value that `pack` wrote into this file. The caller may close the file afterwards."""
    memory = _memory_of(file)
    length, count = _HEAD.unpack_from(memory)
    spans = [_SPAN.unpack_from(memory, _HEAD.size + i * _SPAN.size) for i in range(count)]
    start = _HEAD.size + count * _SPAN.size
    buffers = [memory[offset : offset + size] for offset, size in spans]
    return pickle.loads(memory[start : start + length], buffers=buffers)


def _layout(pickled: int, sizes: list[int]) -> tuple[bytes, list[tuple[int, int]]]:
    """The file's first bytes, and where each buffer goes behind the pickle."""
    end = _HEAD.size + len(sizes) * _SPAN.size + pickled
    spans = []
    for size in sizes:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        spans.append((offset, size))
        end = offset + size
    return _HEAD.pack(pickled, len(sizes)) + b"".join(_SPAN.pack(*span) for span in spans), spans


def _memory_of(file: int) -> memoryview:
    """The file's bytes, writable and private. Small files are read: a mapping keeps a descriptor open."""
    size = os.fstat(file).st_size
    if size >= _WORTH_MAPPING:
        return memoryview(mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    return memoryview(bytearray(os.pread(file, size, 0)))  # not read(): ranks that share the file share its position


def _refusal(value: Any) -> Exception | None:
    """None, or what goes wrong when this value is pickled."""
    try:
        _Pickler(io.BytesIO(), []).dump(value)
    except Exception as error:  # noqa: BLE001 (whatever a class does when it is pickled)
        return error
    return None


class OfMain:
    """Stands for the functions and classes of ``__main__`` that were pickled before it, by their names."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the memory of tensors put aside instead of copied into the pickle. For one value only."""

    def __init__(self, stream: io.BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._of_main: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in _PLAIN_TENSORS and _is_dense(obj):
            return self._reduced_tensor(obj)
        if isinstance(obj, OfMain):
            return dict, (self._of_main,)
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            msg = "DistributedDataParallel belongs to the process group of its rank: send model.module"
            raise pickle.PicklingError(msg)
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__" and obj.__qualname__.isidentifier():
            self._of_main[obj.__qualname__] = obj
        if isinstance(obj, BaseException):
            return reduced_exception(obj, lambda value: _refusal(value) is None)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_bytes_of(obj)),)
        return super().reducer_override(obj)

    def _reduced_tensor(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Tensors that share memory share it on the other side too: they name one storage, which is pickled once."""
        here = tensor.detach().cpu()
        storage = here.untyped_storage()
        storage = self._storages.setdefault((storage.data_ptr(), storage.nbytes()), storage)
        place = (here.storage_offset(), tuple(here.shape), here.stride())
        return _tensor, (type(tensor), storage, here.dtype, *place, tensor.requires_grad)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether memory, shape and strides are all there is to it; torch has its own ways with all others."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__ or tensor._backward_hooks)
    )


def _tensor(
    cls: type[torch.Tensor],
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad) if cls is torch.nn.Parameter else tensor.requires_grad_(requires_grad)


def _storage(memory: Any) -> torch.UntypedStorage:
    if len(memory) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The storage's own memory, not a copy; the pickler keeps the storage alive."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
