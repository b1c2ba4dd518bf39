"""Writes of a call in a worker into its arguments: those into tensors go back to the caller's own, others are refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from parawrap.errors import SessionError
from parawrap.tree import TreeSpec, addresses, flatten_call

Written = tuple[list[int], list[str], list[torch.Tensor]]
"""The positions of written tensors among the leaves of a call, the addresses of all leaves, and the new values."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Fingerprint:
    """The contents of the containers among some arguments, without the contents of tensors.

    They are compared by their pickles, with tensors by identity. An argument that plain pickle cannot handle, such as a
    function of the script, is not compared.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        self._values = [each for each in values if not isinstance(each, (torch.Tensor, *_ATOMS))]
        self._before = [*map(_Reading, self._values)]

    def check(self) -> None:
        """Compare the contents.

        Raises:
            SessionError: If a container has other contents.
        """
        if self._values and self._differs():
            msg = (
                "the model wrote into an argument that is not a tensor, and such writes stay in the worker. Return the new "
                "value from the call instead, or run the model in threads"
            )
            raise SessionError(msg)

    def _differs(self) -> bool:
        now = [*map(_Reading, self._values)]
        if all(map(_Reading.equals, self._before, now)):
            return False
        again = [*map(_Reading, self._values)]  # a class may make new parts each time that it is pickled
        changes = zip(self._before, now, again, strict=True)
        return any(not before.equals(after) and after.equals(still) for before, after, still in changes)


class _Reading:
    """The pickle of an argument. Its tensors stay alive, so that no later one has the identity of one of them."""

    def __init__(self, value: Any) -> None:
        stream = io.BytesIO()
        pickler = _TensorsByIdentity(stream, 5)
        self.tensors = pickler.tensors
        self._pickled: bytes | None = None
        with suppress(Exception):  # classes may raise anything
            pickler.dump(value)
            self._pickled = stream.getvalue()

    def equals(self, other: _Reading) -> bool:
        return self._pickled == other._pickled


class _TensorsByIdentity(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return id(obj)
        return None


def find_written(leaves: Sequence[Any], spec: TreeSpec, is_written: Sequence[bool]) -> Written:
    """Return the written leaves of a call, for `write_back`."""
    positions = [position for position, was_written in enumerate(is_written) if was_written]
    return positions, addresses(spec, ("args", "kwargs")), [leaves[position] for position in positions]


def write_back(written: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the caller's tensors what a call wrote into those of the worker.

    Raises:
        SessionError: If the call changed a shape in place, and the caller's tensor cannot have it, or if it wrote into an
            argument that has other leaves in the worker.
    """
    positions, places, values = written
    leaves, spec = flatten_call(args, kwargs)
    if addresses(spec, ("args", "kwargs")) != places:
        msg = (
            "the model wrote into an argument that has other parts in a worker, because its class changes them when it is "
            "pickled. Return the new value from the call instead"
        )
        raise SessionError(msg)
    for position, value in zip(positions, values, strict=True):
        _write(leaves[position], value)


def _write(leaf: torch.Tensor, value: torch.Tensor) -> None:
    if leaf.shape != value.shape and not _give_shape(leaf, value):
        msg = (
            f"the model changed the shape of an argument in place, from {tuple(leaf.shape)} to {tuple(value.shape)}, which "
            "a worker cannot do to the caller's. Return the new value from the call instead"
        )
        raise SessionError(msg)
    with torch.inference_mode(leaf.is_inference()), torch.no_grad():
        leaf.copy_(value)


def _give_shape(leaf: torch.Tensor, value: torch.Tensor) -> bool:
    """Give a tensor with its own memory another shape, as the call did. Return False if that is impossible."""
    if not leaf.is_contiguous() or leaf.untyped_storage().nbytes() != leaf.nbytes:
        return False
    try:
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.resize_(value.shape)
    except RuntimeError:  # its memory belongs to numpy, for instance
        return False
    return True
