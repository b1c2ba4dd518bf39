"""Writes of a call in a worker into its arguments: those into tensors go back to the caller's own, others are refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from parawrap.errors import SessionError
from parawrap.tree import TreeSpec, addresses, flatten_call

Written = tuple[list[int], list[str], list[torch.Tensor]]
"""The positions of written tensors among the leaves of a call, the addresses of all leaves, and the new values."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Contents:
    """The contents of the containers among some arguments, without the contents of tensors.

    They are compared by their pickles, with tensors by identity. An argument that plain pickle cannot handle, such as a
    function of the script, is not compared.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        self._values = [each for each in values if not isinstance(each, (torch.Tensor, *_ATOMS))]
        self._tensors: list[torch.Tensor] = []  # alive, so that no later one has the identity of one of them
        self._before = self._read()

    def check(self) -> None:
        """Compare the contents.

        Raises:
            SessionError: If a container has other contents.
        """
        now = self._read()
        if now == self._before:
            return
        again = self._read()  # a class may make new parts each time that it is pickled
        if any(before != after == still for before, after, still in zip(self._before, now, again, strict=True)):
            msg = (
                "the model wrote into an argument that is not a tensor, and such writes stay in the worker. Return the new "
                "value from the call instead, or run the model in threads"
            )
            raise SessionError(msg)

    def _read(self) -> list[bytes | None]:
        return [_pickle(each, self._tensors) for each in self._values]


def _pickle(value: Any, tensors: list[torch.Tensor]) -> bytes | None:
    stream = io.BytesIO()
    try:
        _TensorsByIdentity(stream, tensors).dump(value)
    except Exception:  # noqa: BLE001 (classes may raise anything)
        return None
    return stream.getvalue()


class _TensorsByIdentity(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream, 5)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor):
            self._tensors.append(obj)
            return id(obj)
        return None


def find_written(leaves: Sequence[Any], spec: TreeSpec, is_written: Sequence[bool]) -> Written:
    """Return the written leaves of a call, for `write_back`."""
    positions = [position for position, was_written in enumerate(is_written) if was_written]
    return positions, addresses(spec, ("args", "kwargs")), [leaves[position] for position in positions]


def write_back(written: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into the caller's tensors what a call wrote into those of the worker.

    Raises:
        SessionError: If the call changed a shape in place, or wrote into an argument that has other leaves in the worker.
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
        leaf = leaves[position]
        if leaf.shape != value.shape:
            msg = (
                f"the model changed the shape of an argument in place, from {tuple(leaf.shape)} to {tuple(value.shape)}, "
                "which a worker cannot do to the caller's. Return the new value from the call instead"
            )
            raise SessionError(msg)
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.copy_(value)
