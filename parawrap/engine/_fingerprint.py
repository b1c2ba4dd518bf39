"""Fingerprints of batches: the same for equal batches in every run, and different for batches with other values."""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from parawrap.errors import ResumeError

__all__ = ["FINGERPRINT_BYTES", "fingerprint"]

FINGERPRINT_BYTES = 16
_PROTOCOL = 4  # of pickle, for the state of objects


def fingerprint(batch: Any) -> bytes:
    """Return the fingerprint of a nested value. Objects of other classes count with their state, as pickle saves it.

    Raises:
        ResumeError: If an object in the batch has no state that can be compared, such as a lock.
    """
    return _digest_of(batch, ())


def _digest_of(value: Any, around: tuple[int, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    _add(digest, value, around)
    return digest.digest()


def _add(digest: hashlib.blake2b, value: Any, around: tuple[int, ...]) -> None:
    """Add a nested value. `around` are the ids of the values that contain it."""
    if id(value) in around:  # a cycle
        digest.update(f"{around.index(id(value))};".encode())
        return
    around = (*around, id(value))
    digest.update(f"{_name(type(value))};".encode())
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif value is None or isinstance(value, str | int | float | complex):
        digest.update(f"{value!r};".encode())
    elif isinstance(value, Mapping):
        _add(digest, [part for item in value.items() for part in item], around)
    elif isinstance(value, AbstractSet):
        digest.update(b"".join(sorted(_digest_of(item, around) for item in value)))
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        digest.update(f"{len(value)};".encode())
        for item in value:
            _add(digest, item, around)
    elif (view := _buffer_of(value)) is not None:
        digest.update(f"{view.format}{view.shape};".encode())
        digest.update(view.tobytes())
    elif callable(convert := getattr(value, "tolist", None)):  # an array of objects
        _add(digest, convert(), around)
    elif isinstance(value, type):
        digest.update(f"{_name(value)};".encode())
    else:
        _add(digest, _state(value), around)


def _state(value: Any) -> list[Any]:
    """Return what pickle would save of an object. The pickle itself may differ between equal objects."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
    except Exception as error:
        msg = (
            f"the batch holds a {_name(type(value))}, which cannot be compared with the batch of another run: {error}. "
            "Yield paths, numbers, arrays, or tensors, and make other objects in prepare"
        )
        raise ResumeError(msg) from error
    if isinstance(reduced, str):  # the name of a global object
        return [reduced]
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    maker = _name(make) if hasattr(make, "__qualname__") else make
    return [maker, args, state, list(items or ()), list(pairs or ())]


def _name(thing: Any) -> str:
    """Return the full name of a class or a function."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _add_tensor(digest: hashlib.blake2b, tensor: torch.Tensor) -> None:
    sizes = None if tensor.is_nested else tuple(tensor.shape)
    digest.update(f"{tensor.dtype}{tensor.layout}{sizes};".encode())
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        for part in _strided_parts(tensor.detach()):
            _add_tensor(digest, part)
        return
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b"")


def _strided_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return strided tensors that together have the values of a nested, sparse, or quantized tensor.

    Raises:
        ResumeError: If the layout is not one of these.
    """
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return (tensor.dequantize(),)
    if tensor.layout == torch.sparse_coo:
        merged = tensor.coalesce()
        return merged.indices(), merged.values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    msg = f"the batch holds a tensor of layout {tensor.layout}, which cannot be compared. Yield strided or sparse tensors"
    raise ResumeError(msg)


def _buffer_of(value: Any) -> memoryview | None:
    """Return the bytes of a numpy array or another buffer of plain values; None for other objects."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError):
        return None
    return None if "O" in view.format else view
