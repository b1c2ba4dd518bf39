"""The values of one message: descriptions of tensors, and their memory in one block.

A message has one item per value. A value that cannot be pickled, or unpickled, fails alone. An item
is of one of these kinds:

| the value | its item |
|---|---|
| a plain tensor: strided, on the CPU, no graph | a tuple: offset, dtype, shape, strides |
| a tuple of plain tensors that share no memory | a list of such tuples |
| containers, numbers, and texts of Python with plain tensors | a pickle, as bytes |
| the same, if the pickle is large | a slice: the place of the pickle in the block |
| anything else | a range: the place in the block of a `Packed` value |

The tensors of a received message lie in its block, and keep it alive.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import torch

from parawrap.processes.pickling import Packed, PickleStream, pack, unpack
from parawrap.processes.refusals import reason_of_mode
from parawrap.processes.shared_memory import ALIGNMENT, Block
from parawrap.tree import flatten, unflatten

# Bytes of a pickle that travels in the body of a message: less than the 32 KiB of a small message
_LARGEST_ITEM = 16 << 10
_LARGEST_ELEMENT = 16  # bytes of the largest dtype, complex128
# An item has the position of a dtype. Both ends run the same version, so the order may change
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
_GAPS = [bytes(count) for count in range(ALIGNMENT)]  # zeros between two aligned pieces
_byte = ctypes.c_ubyte


class _NotPlainError(Exception):
    """The value has a part that the general pickler must handle."""


class Packer(Block):
    """The block of one message that is being written.

    By default, the block borrows the memory of the values until the message has left. With
    `copies_up_to`, it copies all pickles, and tensors of up to so many bytes, at once: then the
    caller may write into these before.
    """

    def __init__(self, *, copies_up_to: float = 0) -> None:
        super().__init__()
        self._borrowed: list[torch.Tensor] = []  # kept alive, because `parts` has their memory
        self._copies_up_to = copies_up_to

    def add(self, value: Any, address: str) -> Any:
        """Add a value, and return its item.

        Raises:
            UnsendableError: If it cannot be pickled. `address` is its name in the message.
        """
        size, n_parts = self.size, len(self.parts)
        try:
            if type(value) is torch.Tensor:
                return self._add_tensor(value)
            if type(value) is tuple and value and _are_apart(value):
                return [self._add_tensor(each) for each in value]
            stream = PickleStream()
            _PlainPickler(stream, self).dump(value)
        except (_NotPlainError, RecursionError):  # the general pickler explains a RecursionError
            # Drop the tensors that the pickler has added before
            self.size = size
            del self.parts[n_parts:]
            return self.add_packed(pack(_trim_tensors(value), address))
        length = sum(map(len, stream.pieces))
        # A larger one goes into the block, as the tensors: it may lie in a slab
        if length <= _LARGEST_ITEM:
            return b"".join(stream.pieces)
        start = self.size
        self.parts += self._copies_of(stream.pieces)
        self.size += length
        return slice(start, self.size)

    def add_packed(self, packed: Packed) -> range:
        """Add a value that parawrap's pickler has packed, and return its item."""
        start = self._align()
        self.parts += self._copies_of(packed.parts)
        self.size = start + packed.size
        return range(start, self.size)

    def _copies_of(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Return the parts, or copies of them if the caller may change their memory."""
        if self._copies_up_to == 0:
            return parts
        return [bytes(part) for part in parts]  # `bytes` of bytes is no copy

    def _add_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Add the elements of a tensor, and return its item.

        The rest of its storage is left out: a shard is a view of the whole batch.
        """
        if not _is_described_by_elements(tensor):
            raise _NotPlainError
        shape, length, stride = tuple(tensor.shape), tensor.nbytes, None
        if not tensor.is_contiguous():
            stride = tensor.stride()
            length = tensor.element_size() * _span(shape, stride)
        # From the address, because a view by numpy refuses bfloat16
        memory = (_byte * length).from_address(tensor.data_ptr())
        start = self._align()
        if length > self._copies_up_to:
            self._borrowed.append(tensor)
            self.parts.append(memory)
        else:
            self.parts.append(bytes(memory))
        self.size = start + length
        return start, _CODES[tensor.dtype], shape, stride

    def _align(self) -> int:
        """Fill the gap to the next aligned place. Return this place."""
        gap = -self.size % ALIGNMENT
        if gap:
            self.parts.append(_GAPS[gap])
        return self.size + gap


class _PlainPickler(pickle.Pickler):
    """Pickles one value in C, with its tensors in the block of a packer.

    C code pickles builtin objects of Python, and calls `reducer_override` for all others.
    """

    def __init__(self, stream: PickleStream, packer: Packer) -> None:
        super().__init__(stream, 5)
        self._packer = packer
        self._storages: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if obj is _build:
            return NotImplemented  # pickled by its name
        # Exact classes: a subclass may have a state of its own, and a sparse tensor has no storage
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            raise _NotPlainError
        storage = obj.untyped_storage().data_ptr()
        # Tensors that share memory must share it in the other process, which items cannot describe
        if storage in self._storages:
            raise _NotPlainError
        self._storages.add(storage)
        return _build, self._packer._add_tensor(obj)


# `block` is that of the message whose pickle this thread loads: `_build` gets no other reference
_loading = threading.local()


def restore(item: Any, block: memoryview) -> Any:
    """Return the value of an item.

    Raises:
        Exception: What the classes of the value raise.
    """
    kind = type(item)
    if kind is tuple:
        return _tensor(block, *item)
    if kind is list:
        return tuple([_tensor(block, *each) for each in item])
    if kind is range:
        return unpack(block[item.start : item.stop])
    pickled = block[item] if kind is slice else item
    _loading.block = block
    try:
        return pickle.loads(pickled)
    finally:
        _loading.block = None  # frees the memory of the message with its tensors


def _build(*item: Any) -> torch.Tensor:
    """Return a tensor of a pickle, from its item."""
    return _tensor(_loading.block, *item)


def _tensor(
    block: memoryview,
    offset: int,
    code: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return a tensor on the memory of a block."""
    count = math.prod(shape) if stride is None else _span(shape, stride)
    tensor = torch.frombuffer(block, dtype=_DTYPES[code], count=count, offset=offset)
    if stride is not None:
        return tensor.as_strided(shape, stride)
    # `frombuffer` returns one dimension
    return tensor if len(shape) == 1 else tensor.view(shape)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements in memory from the first to the last of a tensor."""
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


def _is_described_by_elements(tensor: torch.Tensor) -> bool:
    """True if elements, shape, and strides describe the tensor completely."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in _CODES
        and not (tensor.requires_grad or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg())  # the memory of such views has other values
        and not tensor.__dict__  # attributes of the user
        and tensor.numel() > 0  # `frombuffer` refuses an empty tensor
    )


def _are_apart(values: tuple[Any, ...]) -> bool:
    """True if all values are tensors, and no two share memory."""
    for value in values:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return False
    if len(values) == 1:
        return True
    storages = {each.untyped_storage().data_ptr() for each in values}
    return len(storages) == len(values)


def _trim_tensors(value: Any) -> Any:
    """Return the value with tensors whose storages are cut to the parts in use.

    parawrap's pickler packs whole storages. Tensors that share memory share it in the result too.
    """
    if reason_of_mode() is not None:
        return value  # the pickler refuses its tensors
    try:
        leaves, spec = flatten(value)
    except RecursionError:  # a container that contains itself, which pickle supports
        return value
    by_storage: dict[int, list[torch.Tensor]] = {}
    for leaf in leaves:
        if type(leaf) is not torch.Tensor or leaf.__dict__:
            continue
        if _is_described_by_elements(leaf.detach()):  # `requires_grad` does not matter here
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(leaf)
    trimmed: dict[int, torch.Tensor] = {}
    for tensors in by_storage.values():
        trimmed |= _trim_storage(tensors)
    if not trimmed:
        return value
    return unflatten(spec, [trimmed.get(id(leaf), leaf) for leaf in leaves])


def _trim_storage(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return new tensors for those of one storage, on the part in use, by the ids of the old ones.

    The result is empty if they use all of the storage.
    """
    starts, ends = [], []  # in bytes
    for tensor in tensors:
        start = int(tensor.storage_offset()) * tensor.element_size()
        starts.append(start)
        ends.append(start + tensor.element_size() * _span(tensor.shape, tensor.stride()))
    whole = tensors[0].untyped_storage()
    # Rounded down, so that the offset of each tensor is a number of elements of any dtype
    first = min(starts) // _LARGEST_ELEMENT * _LARGEST_ELEMENT
    used = whole[first : max(ends)]
    if used.nbytes() == whole.nbytes():
        return {}
    trimmed: dict[int, torch.Tensor] = {}
    for tensor, start in zip(tensors, starts, strict=True):
        offset = (start - first) // tensor.element_size()
        part = torch.empty(0, dtype=tensor.dtype)
        part.set_(used, offset, tensor.shape, tensor.stride())
        trimmed[id(tensor)] = part.requires_grad_(tensor.requires_grad)
    return trimmed
