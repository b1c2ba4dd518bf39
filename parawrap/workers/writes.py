"""Writes of a call in a worker into its arguments: they return to the caller, or are refused."""

from __future__ import annotations

import io
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch

from parawrap._private_names import version_of
from parawrap.engine.flat_call import is_plain_value
from parawrap.engine.given_arguments import ArgumentChanges, Given
from parawrap.errors import SessionError
from parawrap.processes.pickling import IdentityPickler
from parawrap.tree import WholeLeaf

_INTO_OTHERS = (
    "the model wrote into an argument that is neither a tensor nor a container, and such writes "
    "stay in the worker. Return "
    "the new value from the call instead, or run the model in threads"
)
_INTO_OTHER_PARTS = (
    "the model wrote into an argument that has other parts in the worker: it changed a shape in "
    "place, or the argument's "
    "class changes its parts when it is pickled. Return the new value from the call instead"
)


class Written(NamedTuple):
    """The writes of a call into its arguments.

    Attributes:
        tensors: For each leaf of the arguments its new value, or None if the call has not written
            it.
        changes: The new entries of containers, and objects with rules; None if there are none.
        has_marks: True if the output has marks in place of arguments.
    """

    tensors: Sequence[torch.Tensor | None]
    changes: ArgumentChanges | None
    has_marks: bool


class PickledContents:
    """The contents of objects of unknown classes in the arguments of one call, before the call.

    Writes into them cannot return to the caller. Their pickles before and after the call are
    compared. They have only the identities of tensors, classes, and functions. An object that plain
    pickle cannot handle, such as a lock, is not compared.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._values = [leaf for leaf in leaves if not (_is_known(leaf) or is_plain_value(leaf))]
        self._returned = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        # Objects that are pickled as their identities. Kept alive: no new object gets one of these
        self._met: list[Any] = []
        self._before = self._read()

    def check(self) -> None:
        """Raise SessionError if an object has other contents than before the call."""
        now = self._read()
        if now == self._before:
            return
        again = self._read()
        for before, after, still in zip(self._before, now, again, strict=True):
            # A class may make new parts each time that it is pickled: that shows no write
            is_comparable = after == still
            if is_comparable and before != after:
                raise SessionError(_INTO_OTHERS)

    def _read(self) -> list[Any]:
        return [self._pickle(each) for each in self._values]

    def _pickle(self, value: Any) -> bytes | None:
        stream = io.BytesIO()
        try:
            _Pickler(stream, self._met, self._returned).dump(value)
        except Exception:  # noqa: BLE001 (classes may raise anything)
            return None  # not compared
        return stream.getvalue()


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, WholeLeaf))


class _Pickler(IdentityPickler):
    """Pickles tensors as their identities; with their versions, unless `returned` has them.

    Writes into the tensors of `returned` return to the caller.
    """

    def __init__(self, stream: io.BytesIO, met: list[Any], returned: Container[int]) -> None:
        super().__init__(stream, met, torch.Tensor)
        self._returned = returned

    def persistent_id(self, obj: Any) -> Any:
        found = super().persistent_id(obj)
        if isinstance(obj, torch.Tensor) and found not in self._returned and not obj.is_inference():
            return found, version_of(obj)
        return found


def write_back(written: Written, given: Given) -> None:
    """Repeat the writes of a call in the caller's arguments.

    Raises:
        SessionError: If an argument has other leaves or shapes here than in the worker.
    """
    if len(given.leaves) != len(written.tensors):
        raise SessionError(_INTO_OTHER_PARTS)
    pairs = []
    # All are checked before the first write
    for leaf, value in zip(given.leaves, written.tensors, strict=True):
        if value is None:
            continue
        if getattr(leaf, "shape", None) != value.shape:
            raise SessionError(_INTO_OTHER_PARTS)
        pairs.append((leaf, value))
    for leaf, value in pairs:
        # Torch writes into an inference tensor in inference mode only
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.copy_(value)
    if written.changes is not None:
        try:
            given.replay(written.changes)
        except (ValueError, LookupError) as error:
            raise SessionError(_INTO_OTHER_PARTS) from error
