"""Writes of a call in a worker into its arguments: those into tensors go back to the caller's own, others are refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch

from parawrap._private_names import version_of
from parawrap.errors import SessionError
from parawrap.tree import flatten, tensors_in

Written = Sequence[torch.Tensor | None]
"""For each leaf of the arguments its new value, or None if the call has not written it."""

_ATOMS = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)
_BY_IDENTITY = (torch.Tensor, type, FunctionType)  # plain pickle finds no class or function of the script by its name
_INTO_OTHERS = (
    "the model wrote into an argument that is not a tensor, and such writes stay in the worker. Return the new value from "
    "the call instead, or run the model in threads"
)
_INTO_OTHER_PARTS = (
    "the model wrote into an argument that has other tensors in the worker: it changed a shape in place, or the argument's "
    "class changes its parts when it is pickled. Return the new value from the call instead"
)


class Contents:
    """The contents of the containers among some arguments, and the versions of tensors in values with registered rules.

    They are compared by their pickles, with tensors, classes, and functions by identity. An argument that plain pickle
    cannot handle, such as a lock, is not compared.
    """

    def __init__(self, values: Iterable[Any], registered: Sequence[Any]) -> None:
        self._values = [each for each in values if not isinstance(each, _ATOMS)]
        self._inner = [*tensors_in(registered)]
        self._met: list[Any] = []  # alive, so that no later object has the identity of one of them
        self._before = self._read()

    def check(self) -> None:
        """Raise SessionError if a container has other contents."""
        now = self._read()
        if now != self._before:
            again = self._read()  # a class may make new parts each time that it is pickled
            if any(before != after == still for before, after, still in zip(self._before, now, again, strict=True)):
                raise SessionError(_INTO_OTHERS)

    def _read(self) -> list[Any]:
        return [_pickle(each, self._met) for each in self._values] + [*map(version_of, self._inner)]


def _pickle(value: Any, met: list[Any]) -> bytes | None:
    stream = io.BytesIO()
    try:
        _PartsByIdentity(stream, met).dump(value)
    except Exception:  # noqa: BLE001 (classes may raise anything)
        return None
    return stream.getvalue()


class _PartsByIdentity(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, met: list[Any]) -> None:
        super().__init__(stream, 5)
        self._met = met

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, _BY_IDENTITY):
            self._met.append(obj)
            return id(obj)
        return None


def write_back(written: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the caller's tensors what a call wrote into those of the worker. Raises SessionError if they differ."""
    leaves = flatten((args, kwargs))[0]
    pairs = [(leaf, value) for leaf, value in zip(leaves, written, strict=False) if value is not None]
    if len(leaves) != len(written) or any(getattr(leaf, "shape", None) != value.shape for leaf, value in pairs):
        raise SessionError(_INTO_OTHER_PARTS)
    for leaf, value in pairs:
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.copy_(value)
