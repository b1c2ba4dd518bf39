"""Compare globals with what was sent before: plain values by content, other objects by a digest, functions by code."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from typing import Any, TypeVar

import torch

from parawrap.launch._private_names import version_of
from parawrap.launch.messages._importable_modules import is_importable
from parawrap.launch.messages._pickle_values import explain_unpicklable
from parawrap.launch.messages._script_pickler import ScriptPickler

__all__ = [
    "DEFINITIONS",
    "DigestPickler",
    "containers_in",
    "content_of",
    "content_of_definition",
    "has_state",
    "is_learned_state",
    "reference_to",
    "state_of",
    "walk",
]

P = TypeVar("P", bound=ScriptPickler)

DEFINITIONS = (type, types.FunctionType, types.ModuleType)
_EXACT = (type(None), bool, int, str, bytes, complex, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset)
_MUTABLE = (list, dict, set)
_CONSTANT = (
    *(PurePath, re.Pattern, logging.Logger, enum.Enum, range, slice, complex, torch.Size),
    *(dt.date, dt.time, dt.timedelta, dt.tzinfo, decimal.Decimal, fractions.Fraction),
)
_LEARNING = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator)
_DEEPEST = 50  # of nested settings; deeper ones are compared as other objects are
_SMALL = 1 << 16  # bytes of a tensor whose elements are compared, about 20 us each; larger ones count by their version


def content_of(value: Any, depth: int = 0) -> Any:
    """Return a comparable copy of a plain value: a number, a string, a setting, or a container of these. None for others.

    Definitions in containers count by their identity.
    """
    kind = type(value)
    if kind in _EXACT or (depth and isinstance(value, DEFINITIONS)):
        return kind, value
    if kind is float:
        return kind, value.hex()
    parts = _parts_of_plain(value)
    if parts is None or depth > _DEEPEST:
        return None
    contents = [content_of(part, depth + 1) for part in parts]
    if any(each is None for each in contents):
        return None
    return (kind, frozenset(contents)) if kind in (set, frozenset) else (kind, tuple(contents))


def containers_in(value: Any) -> Iterator[Any]:
    """Return the lists, dicts, sets, and settings in a plain value, which two globals must not hold as two copies."""
    if isinstance(value, _MUTABLE) or hasattr(value, "__dict__"):
        yield value
    for part in _parts_of_plain(value) or ():
        if not isinstance(part, DEFINITIONS):
            yield from containers_in(part)


def _parts_of_plain(value: Any) -> Iterable[Any] | None:
    kind = type(value)
    if kind in _SEQUENCES:
        return [*value]
    if kind is dict:
        return [part for item in value.items() for part in item]
    if kind in (types.SimpleNamespace, argparse.Namespace) or _is_plain_dataclass(kind):
        return [part for item in vars(value).items() for part in item]
    return None


def _is_plain_dataclass(kind: type) -> bool:
    """True if the fields of a dataclass in its ``__dict__`` are all that its instances hold."""
    return dataclasses.is_dataclass(kind) and all(
        each is object or ("__dataclass_fields__" in vars(each) and "__slots__" not in vars(each)) for each in kind.__mro__
    )


def content_of_definition(value: Any) -> Any:
    """Return a comparable description of a definition, or None if only its pickle describes it."""
    if isinstance(value, types.ModuleType):
        is_found = sys.modules.get(value.__name__) is value and is_importable(value.__name__)
        return ("module", value.__name__) if is_found else None
    if not isinstance(value, types.FunctionType) or value.__closure__ or value.__dict__:
        return None
    defaults = content_of((value.__defaults__, value.__kwdefaults__))
    same = (value.__module__, value.__qualname__, value.__doc__, repr(value.__annotations__))
    return None if defaults is None else ("function", value.__code__, defaults, *same)


def state_of(value: Any) -> Any:
    """Return a comparable copy of what functions may have changed in place in a received global. None if unknown.

    It has the plain parts of a class or function, and the content of a plain value.
    """
    if isinstance(value, type):
        parts = {name: content_of(part) for name, part in vars(value).items() if not name.startswith("__")}
        return tuple((name, part) for name, part in parts.items() if part is not None)
    if isinstance(value, types.FunctionType):
        cells = [content_of(_content_of_cell(cell)) for cell in value.__closure__ or ()]
        return content_of(vars(value)), tuple(cells)
    return content_of(value)


def _content_of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an unassigned variable
        return None


def walk(value: Any, address: str, kind: type[P], is_shared: Callable[[str], bool]) -> tuple[bytes, P]:
    """Return the pickle of a value and of its buffers, and the pickler with what it has noted.

    Raises:
        UnsendableError: If the value cannot be pickled. The message names the unpicklable part, as a path from `address`.
    """
    stream = io.BytesIO()
    buffers: list[memoryview] = []
    pickler = kind(stream, buffers, is_shared)
    with explain_unpicklable(value, address, buffers):
        pickler.dump(value)
    if kind is DigestPickler:
        for buffer in buffers:
            stream.write(buffer)
    return stream.getvalue(), pickler


class DigestPickler(ScriptPickler):
    """Pickles an object to compare it: large tensors as their address and version, and definitions as their identity.

    Attributes:
        definitions: The definitions that the pickle has by identity. While they live, no other object has it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.definitions: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        is_definition = isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__"
        if is_definition and "<" not in obj.__qualname__:
            self.definitions.append(obj)
            return tuple, ((obj.__qualname__, id(obj)),)
        return reduced

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL:
            return super()._reduce_tensor(tensor)
        version = 0 if tensor.is_inference() else version_of(tensor)
        shape = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device))
        return tuple, ((tensor.data_ptr(), version, *shape, tensor.requires_grad),)


def _array_class() -> Any:
    """Return the class of NumPy's arrays; an empty tuple if nothing has imported NumPy."""
    return getattr(sys.modules.get("numpy"), "ndarray", ())


def has_state(value: Any) -> bool:
    """True for an object that two globals must not hold as two copies: a tensor, or an object with attributes."""
    if isinstance(value, _LEARNING) or type(value) is object or isinstance(value, _array_class()):
        return True
    return bool(getattr(value, "__dict__", None)) and not callable(value) and not isinstance(value, _CONSTANT)


def is_learned_state(value: Any) -> bool:
    """True for an object that training changes."""
    return isinstance(value, _LEARNING)


def reference_to(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value. It does not keep the value alive, if its class allows that."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
