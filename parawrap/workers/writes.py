"""Writes of a call in a worker into its arguments: those into tensors go back to the caller's own, others are refused."""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from parawrap._private_names import version_of
from parawrap.errors import SessionError
from parawrap.processes.pickling import IdentityPickler
from parawrap.tree import flatten, tensors_in

Written = Sequence[torch.Tensor | None]
"""For each leaf of the arguments its new value, or None if the call has not written it."""

_ATOMS = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)
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
    cannot handle, such as a lock, is not compared. `returned` are the ids of the tensors that writes come back from.
    """

    def __init__(self, values: Iterable[Any], registered: Sequence[Any], returned: Container[int]) -> None:
        self._returned = returned
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
        return [self._pickle(each) for each in self._values] + [*map(version_of, self._inner)]

    def _pickle(self, value: Any) -> bytes | None:
        stream = io.BytesIO()
        try:
            _Pickler(stream, self._met, self._returned).dump(value)
        except Exception:  # noqa: BLE001 (classes may raise anything)
            return None
        return stream.getvalue()


class _Pickler(IdentityPickler):
    """Pickles tensors as their identities; those that are not `returned` to the caller with their versions."""

    def __init__(self, stream: io.BytesIO, met: list[Any], returned: Container[int]) -> None:
        super().__init__(stream, met, torch.Tensor)
        self._returned = returned

    def persistent_id(self, obj: Any) -> Any:
        found = super().persistent_id(obj)
        if isinstance(obj, torch.Tensor) and found not in self._returned and not obj.is_inference():
            return found, version_of(obj)
        return found


def write_back(written: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the caller's tensors what a call wrote into those of the worker. Raises SessionError if they differ."""
    leaves = flatten((args, kwargs))[0]
    pairs = [(leaf, value) for leaf, value in zip(leaves, written, strict=False) if value is not None]
    if len(leaves) != len(written) or any(getattr(leaf, "shape", None) != value.shape for leaf, value in pairs):
        raise SessionError(_INTO_OTHER_PARTS)
    for leaf, value in pairs:
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.copy_(value)
