"""What stands in for a method of one module while that module is parallel, and goes without a trace."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
import wrapt

from parawrap.errors import SessionError

__all__ = ["StandIn", "original_method", "put", "restore", "without_stand_ins"]

_MISSING: Any = object()


class StandIn(wrapt.FunctionWrapper[..., Any]):
    """A method with the same signature and name, kept in the module's ``__dict__``; replicas are made without it.

    `put` notes what it replaces. A copy or pickle of it is one of the plain method.
    """

    _self_before: Any = _MISSING
    _self_thread: int = 0
    _torchdynamo_disable = True  # torch.compile breaks its graph here; torch.compiler.disable leaves the same mark
    _torchdynamo_disable_msg = "calls inside a parallel block run in lanes"

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__wrapped__.__reduce_ex__(protocol)


def put(module: torch.nn.Module, name: str, value: Any) -> Any:
    """Put `value` into the module's own dictionary; what was there before, for `restore`."""
    before = vars(module).get(name, _MISSING)
    if isinstance(value, StandIn):
        value._self_before = before
        value._self_thread = threading.get_ident()
    vars(module)[name] = value
    return before


def without_stand_ins(own: dict[str, Any]) -> dict[str, Any]:
    """A module's dictionary as it would be outside all blocks."""
    plain = {name: _under(value) for name, value in own.items()}
    return {name: value for name, value in plain.items() if value is not _MISSING}


def _under(value: Any) -> Any:
    """What was in the place of a stand-in before the first of them; anything else as it is."""
    while isinstance(value, StandIn):
        value = value._self_before
    return value


def restore(module: torch.nn.Module, replaced: Sequence[tuple[str, Any, Any]]) -> None:
    """Undo each (name, value, before). What somebody else has put over a value in the meantime is left to them.

    A block that another thread opened on the same module, and has not closed yet, goes on without this one.

    Raises:
        SessionError: one of them lies under the stand-in of a block that this thread opened later; nothing is changed then.
    """
    own = vars(module)
    above = {name: _above(own.get(name), value) for name, value, _ in replaced}
    for name, value, _ in replaced:
        top = above[name]
        if top is not None and top._self_thread == value._self_thread:
            msg = (
                f"this block on {type(module).__name__}.{name} is not the innermost one: another was opened on the same "
                "module after it and is still open; close that one first"
            )
            raise SessionError(msg)
    for name, value, before in reversed(replaced):
        top = above[name]
        before = value._self_before if isinstance(value, StandIn) else before  # noqa: PLW2901
        if top is not None:
            top._self_before = before
        elif own.get(name, _MISSING) is value:
            own.pop(name) if before is _MISSING else own.__setitem__(name, before)


def _above(top: Any, value: Any) -> StandIn | None:
    """The stand-in that lies directly on that one; None where there is none."""
    while isinstance(top, StandIn) and isinstance(value, StandIn) and top is not value:
        if top._self_before is value:
            return top
        top = top._self_before
    return None


def original_method(value: Any) -> Any:
    """What a method is under all stand-ins."""
    while isinstance(value, StandIn):
        value = value.__wrapped__
    return value
