"""Fingerprints of batches: the same for equal batches in every run, and different for batches with other values."""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch

from parawrap.errors import ResumeError

__all__ = ["FINGERPRINT_BYTES", "fingerprint", "global_name"]

FINGERPRINT_BYTES = 16
_PROTOCOL = 4  # of pickle, for the state of objects
_EXTENDED = "gG"  # numpy's types with more precision, whose bytes have padding


def fingerprint(batch: Any) -> bytes:
    """Return the fingerprint of a nested value. Objects of other classes count with their state, as pickle saves it.

    Raises:
        ResumeError: If an object in the batch has no state that can be compared, such as a lock.
    """
    try:
        return _digest_of(batch, ())
    except RecursionError as error:
        _refuse(batch, error)


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
    add = _RULES.get(type(value), _add_object)
    if isinstance(value, torch.Tensor):
        add = _add_tensor
    elif add is _add_object and (numpy := sys.modules.get("numpy")) is not None:
        if type(value) is numpy.ndarray:
            add = _add_array
        elif isinstance(value, numpy.generic):
            value, add = numpy.asarray(value), _add_array
    add(digest, value, around)


def _add_text(digest: hashlib.blake2b, value: Any, around: tuple[int, ...]) -> None:
    digest.update(f"{hex(value) if type(value) is int else repr(value)};".encode())


def _add_bytes(digest: hashlib.blake2b, value: bytes | bytearray, around: tuple[int, ...]) -> None:
    digest.update(f"{len(value)};".encode())
    digest.update(value)


def _add_items(digest: hashlib.blake2b, value: Sequence[Any], around: tuple[int, ...]) -> None:
    digest.update(f"{len(value)};".encode())
    for item in value:
        _add(digest, item, around)


def _add_dict(digest: hashlib.blake2b, value: dict[Any, Any], around: tuple[int, ...]) -> None:
    _add_items(digest, [part for item in value.items() for part in item], around)


def _add_set(digest: hashlib.blake2b, value: set[Any] | frozenset[Any], around: tuple[int, ...]) -> None:
    digest.update(f"{len(value)};".encode())
    digest.update(b"".join(sorted(_digest_of(item, around) for item in value)))


def _add_global(digest: hashlib.blake2b, value: Any, around: tuple[int, ...]) -> None:
    name = global_name(value)
    if name is None:
        _refuse(value, f"{_name(value)} cannot be found by its name")
    digest.update(f"{name}{getattr(value, '_fields', '')};".encode())  # classes of namedtuples may have one name


def _add_object(digest: hashlib.blake2b, value: Any, around: tuple[int, ...]) -> None:
    if isinstance(value, type):
        _add_global(digest, value, around)
    else:
        _add_items(digest, _state(value), around)


def _state(value: Any) -> list[Any]:
    """Return what pickle would save of an object. The pickle itself may differ between equal objects."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced: Any = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
        if isinstance(reduced, str):  # the name of a global object
            return [getattr(value, "__module__", None), reduced]
        make, args, state, items, pairs = [*reduced, None, None, None][:5]
        return [make, args, state, list(items or ()), list(pairs or ())]
    except Exception as error:  # noqa: BLE001 (a class may raise anything)
        _refuse(value, error)


_RULES: dict[type, Callable[[hashlib.blake2b, Any, tuple[int, ...]], None]] = {
    **dict.fromkeys((type(None), bool, int, float, complex, str), _add_text),
    **dict.fromkeys((bytes, bytearray), _add_bytes),
    **dict.fromkeys((list, tuple), _add_items),
    **dict.fromkeys((set, frozenset), _add_set),
    **dict.fromkeys((type(_add_text), type(len)), _add_global),
    dict: _add_dict,
}


def global_name(value: Any) -> str | None:
    """Return the module and the name of a function or a class; None if it cannot be found there, as a lambda."""
    try:
        module, name = value.__module__, value.__qualname__
        found = attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError, TypeError):
        return None
    return f"{module}.{name}" if found is value else None


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _add_array(digest: hashlib.blake2b, array: Any, around: tuple[int, ...]) -> None:
    """Add a numpy array. Padding between its fields or numbers does not count."""
    digest.update(f"{array.dtype.str}{array.shape};".encode())
    if array.dtype.names is not None:
        _add_items(digest, [part for name in array.dtype.names for part in (name, array[name])], around)
    elif array.dtype.hasobject:
        _add_items(digest, array.ravel().tolist(), around)
    elif array.dtype.char in _EXTENDED:
        _add_items(digest, list(map(repr, array.ravel().tolist())), around)
    else:
        digest.update(array.tobytes())


def _add_tensor(digest: hashlib.blake2b, tensor: torch.Tensor, around: tuple[int, ...]) -> None:
    sizes = None if tensor.is_nested else tuple(tensor.shape)
    digest.update(f"{tensor.dtype}{tensor.layout}{sizes};".encode())
    if (taken_apart := getattr(tensor, "__tensor_flatten__", None)) is not None:  # it consists of other tensors
        names, context = taken_apart()
        _add_items(digest, [*(getattr(tensor, name) for name in names), context], around)
    elif tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        _add_items(digest, _strided_parts(tensor.detach()), around)
    else:
        _add_memory(digest, tensor)
    if (attributes := object.__getstate__(tensor)) is not None:  # with those in slots, and without the tensor's memory
        _add(digest, attributes, around)


def _add_memory(digest: hashlib.blake2b, tensor: torch.Tensor) -> None:
    try:
        data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        start, count = data.data_ptr(), data.nbytes
    except Exception as error:  # noqa: BLE001 (of a subclass, or on the meta device)
        _refuse(tensor, error)
    if count and not start:
        _refuse(tensor, "it has no memory of its own")
    digest.update((ctypes.c_char * count).from_address(start) if count else b"")


def _strided_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return strided tensors that together have the values of a nested, sparse, or quantized tensor.

    Raises:
        ResumeError: If the layout is not one of these.
    """
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return tensor.int_repr(), *_scales(tensor)
    if tensor.layout == torch.sparse_coo:
        merged = tensor.coalesce()
        return merged.indices(), merged.values()
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return _refuse(tensor, f"its layout is {tensor.layout}")


def _scales(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        return (torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64),)
    axis = torch.tensor(tensor.q_per_channel_axis())
    return tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), axis


def _refuse(value: Any, why: object) -> NoReturn:
    msg = (
        f"the batch holds a {_name(type(value))}, which cannot be compared with the batch of another run: {why}. "
        "Yield paths, numbers, arrays, or tensors, and make other objects in prepare"
    )
    raise ResumeError(msg)
