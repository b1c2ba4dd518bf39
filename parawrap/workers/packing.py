"""The values of one message: small descriptions of tensors, and the memory of these tensors in one block.

A message has an item for each value, so a value that cannot be pickled, or unpickled, fails alone:

| the value | its item |
|---|---|
| a plain tensor: strided, on the CPU, without a graph | a tuple: offset in the block, dtype, shape, strides |
| a tuple of plain tensors that share no memory | a list of such tuples |
| containers, numbers, and texts of Python with such tensors | a pickle, as bytes |
| anything else | a `General`: a pickle of parawrap's pickler, and the spans of its buffers in the block |
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from parawrap.processes.pickling import pickle_apart
from parawrap.tree import flatten, unflatten

ALIGNMENT = 64  # bytes, as torch aligns CPU tensors
WORTH_NAMING = 1 << 20  # bytes of an output that lies in an argument; copying fewer takes less time than renewing a slab

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
_GAPS = [bytes(count) for count in range(ALIGNMENT)]
_byte = ctypes.c_ubyte


class General(NamedTuple):
    """The pickle of any value, and the offset and length of each of its buffers."""

    pickled: bytes
    spans: list[tuple[int, int]]


class NotPlainError(Exception):
    """The value has a part that the general pickler must handle."""


class Block(NamedTuple):
    """The memory of a message: its tensors lie at their offsets from `base`. It is alive as long as one of them."""

    memory: Any
    base: int = 0


def aligned(memory: memoryview) -> Block:
    """Return a copy of a block, aligned for tensors."""
    copied = bytearray(len(memory) + ALIGNMENT)
    base = -ctypes.addressof(_byte.from_buffer(copied)) % ALIGNMENT
    copied[base : base + len(memory)] = memory
    return Block(copied, base)


class Packer:
    """The block of one message that is being written.

    The memory of tensors of up to `copied` bytes is copied at once, because the caller may write into it before the message
    leaves.
    `given` is the range of addresses of the message that is answered: a large output that lies there is named, not copied.

    Attributes:
        pieces: The block in pieces. Values in `kept` own the memory of tensors.
        size: The number of bytes so far.
        names_given: True if an item refers to the message that is answered.
    """

    def __init__(self, given: tuple[int, int] = (0, 0), *, copied: float = 0) -> None:
        self.pieces: list[Any] = []
        self.size = 0
        self.kept: list[Any] = []
        self.names_given = False
        self._given = given
        self._copied = copied

    def add(self, value: Any, address: str) -> Any:
        """Add a value, and return its item.

        Raises:
            UnsendableError: If it cannot be pickled. `address` is its name in the message.
        """
        size, pieces = self.size, len(self.pieces)
        try:
            if type(value) is torch.Tensor:
                return self._add_tensor(value)
            if type(value) is tuple and value and _are_apart(value):
                return [self._add_tensor(each) for each in value]
            stream = io.BytesIO()
            _PlainPickler(stream, self).dump(value)
            return stream.getvalue()
        except (NotPlainError, RecursionError):
            self.size = size
            del self.pieces[pieces:]
        pickled, buffers = pickle_apart(trim_tensors(value), address)
        self.kept.append(value)
        return General(bytes(pickled), [(self._add_piece(_held(each), each.nbytes), each.nbytes) for each in buffers])

    def _add_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Describe a tensor by its elements. The rest of its storage stays: a shard is a view of the whole batch."""
        if not _is_plain(tensor):
            raise NotPlainError
        code, shape, start, length = _CODES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr(), tensor.nbytes
        stride = None
        if not tensor.is_contiguous():
            stride = tensor.stride()
            length = tensor.element_size() * _span(shape, stride)
        first, last = self._given
        if length >= WORTH_NAMING and first <= start and start + length <= last:
            self.names_given = True
            return start - first, code, shape, stride, True
        if length > self._copied:
            self.kept.append(tensor)
        return self._add_piece((_byte * length).from_address(start), length), code, shape, stride

    def _add_piece(self, memory: Any, length: int) -> int:
        gap = -self.size % ALIGNMENT
        if gap:
            self.pieces.append(_GAPS[gap])
        start = self.size + gap
        self.pieces.append(bytes(memory) if length <= self._copied else memory)
        self.size = start + length
        return start


class _PlainPickler(pickle.Pickler):
    """Pickles one value in C. Its `reducer_override` is called for everything that is not a builtin of Python."""

    def __init__(self, stream: io.BytesIO, packer: Packer) -> None:
        super().__init__(stream, 5)
        self._packer = packer
        self._storages: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if obj is _build:
            return NotImplemented  # pickled by its name
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            raise NotPlainError
        storage = obj.untyped_storage().data_ptr()
        if storage in self._storages:  # tensors that share memory must share it in the other process
            raise NotPlainError
        self._storages.add(storage)
        return _build, self._packer._add_tensor(obj)


NOWHERE = Block(b"")
_loading = threading.local()  # `blocks` of the message with the pickle that this thread loads


def restore(item: Any, block: Block, given: Block = NOWHERE) -> Any:
    """Return the value of an item. `given` is the block of the message that was answered.

    Raises:
        Exception: What the classes of the value raise.
    """
    kind = type(item)
    if kind is tuple:
        return _tensor(block, given, *item)
    if kind is list:
        return tuple([_tensor(block, given, *each) for each in item])
    if kind is bytes:
        _loading.blocks = block, given
        try:
            return pickle.loads(item)
        finally:
            _loading.blocks = None
    memory = memoryview(block.memory).cast("B")
    buffers = [memory[block.base + offset : block.base + offset + length] for offset, length in item.spans]
    return pickle.loads(item.pickled, buffers=buffers)


def _build(*described: Any) -> torch.Tensor:
    return _tensor(*_loading.blocks, *described)


def _tensor(
    block: Block,
    given: Block,
    offset: int,
    code: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    is_given: bool = False,
) -> torch.Tensor:
    """Return a tensor on the memory of a block, or on that of the message that was answered."""
    memory, base = given if is_given else block
    count = math.prod(shape) if stride is None else _span(shape, stride)
    tensor = torch.frombuffer(memory, dtype=_DTYPES[code], count=count, offset=base + offset)
    if stride is not None:
        return tensor.as_strided(shape, stride)
    return tensor if len(shape) == 1 else tensor.view(shape)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last."""
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if elements, shape, and strides describe the tensor completely."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in _CODES
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and tensor.numel() > 0
    )


def _are_apart(values: tuple[Any, ...]) -> bool:
    """True for tensors that share no memory."""
    if any(type(each) is not torch.Tensor or each.layout is not torch.strided for each in values):
        return False
    return len(values) == 1 or len({each.untyped_storage().data_ptr() for each in values}) == len(values)


def _held(buffer: memoryview) -> Any:
    """Return memory that can be copied from without a look at its format."""
    return bytes(buffer) if buffer.readonly else (_byte * buffer.nbytes).from_buffer(buffer)


# -- views of large storages, in values that are not plain


def trim_tensors(value: Any) -> Any:
    """Return the value with smaller storages, which hold the elements of its tensors alone: a shard is a view of the batch.

    Tensors that share memory share it in the result too.
    """
    leaves, spec = flatten(value)
    by_storage: dict[int, list[torch.Tensor]] = {}
    for leaf in leaves:
        if type(leaf) is torch.Tensor and leaf.device.type == "cpu" and _travels_plainly(leaf):
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(leaf)
    cut: dict[int, torch.Tensor] = {}
    for tensors in by_storage.values():
        start, end = _extent(tensors)
        if end - start < tensors[0].untyped_storage().nbytes():
            cut.update(_cut_out(tensors, start, end))
    return unflatten(spec, [cut.get(id(leaf), leaf) for leaf in leaves]) if cut else value


def _travels_plainly(tensor: torch.Tensor) -> bool:
    bits = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    return tensor.layout is torch.strided and not bits and tensor.numel() > 0


def _extent(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the first byte of these tensors in their storage, and the byte behind the last."""
    starts, ends = [], []
    for tensor in tensors:
        size, start = tensor.element_size(), tensor.storage_offset()
        last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        starts.append(int(start) * size)
        ends.append(int(start + last + 1) * size)
    return min(starts), max(ends)


def _cut_out(tensors: Sequence[torch.Tensor], start: int, end: int) -> dict[int, torch.Tensor]:
    """Return tensors on the bytes of a storage between `start` and `end`, without a copy, by the identity of the originals.

    The caller keeps the originals alive.
    """
    cut = {}
    address = tensors[0].untyped_storage().data_ptr() + start
    memory = torch.frombuffer((_byte * (end - start)).from_address(address), dtype=torch.uint8).untyped_storage()
    for tensor in tensors:
        offset = (tensor.storage_offset() * tensor.element_size() - start) // tensor.element_size()
        piece = torch.empty(0, dtype=tensor.dtype).set_(memory, offset, tensor.shape, tensor.stride())
        cut[id(tensor)] = piece.requires_grad_(tensor.requires_grad)
    return cut
