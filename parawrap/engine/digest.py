"""Digests of values: equal for equal values in every process, and different for different values."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from typing import Any

import torch

DIGEST_BYTES = 32  # of SHA-256
_PROTOCOL = 4  # fixed, because another protocol gives other digests


def digest_value(value: Any) -> bytes:
    """Return the digest of the pickle of a value.

    Raises:
        Exception: If the value cannot be pickled, or contains itself.
    """
    content = _Hash()
    _ValuePickler(content).dump(value)
    return content.digest()


class _Hash:
    """A file that keeps only the hash of its content."""

    def __init__(self) -> None:
        content = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.write = content.update
        self.digest = content.digest


class _ValuePickler(pickle.Pickler):
    """Writes pickles that depend on values alone. They cannot be loaded.

    A usual pickle also depends on which equal objects are identical, on the memory around a view of a tensor, and on the
    order of sets, which differs between processes.
    """

    def __init__(self, file: _Hash) -> None:
        super().__init__(file, _PROTOCOL)
        self.fast = True  # without a memo: an object that occurs twice is written twice

    def persistent_id(self, value: Any) -> Any:
        """Return the content of a set or a tensor. Return None for other values, which are pickled as usual."""
        if isinstance(value, (set, frozenset)):
            return str(type(value)), sorted(map(digest_value, value)), object.__getstate__(value)
        if isinstance(value, torch.Tensor) and _has_own_memory(value):
            kind = f"{type(value)} {value.dtype} {tuple(value.shape)}"
            return kind, _digest_memory(value), object.__getstate__(value)
        if isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):  # its pickle has an address
            msg = "it holds the memory of a tensor, such as of a quantized one"
            raise pickle.PicklingError(msg)
        return None


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """True if the memory of a tensor is its values. Pickle takes other tensors apart, such as sparse ones."""
    is_strided = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_strided and not hasattr(tensor, "__tensor_flatten__")


def _digest_memory(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    start, size = data.data_ptr(), data.nbytes
    if size and not start:
        msg = f"a {type(tensor).__qualname__} shares memory with others"
        raise pickle.PicklingError(msg)
    memory = (ctypes.c_char * size).from_address(start) if size else b""
    return hashlib.blake2b(memory, digest_size=DIGEST_BYTES).digest()
