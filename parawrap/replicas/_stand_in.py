"""What stands in for a method of one module while that module is parallel, and goes without a trace."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import wrapt

from parawrap.errors import SessionError

__all__ = ["StandIn", "put", "restore", "without_stand_ins"]

_MISSING: Any = object()


class StandIn(wrapt.FunctionWrapper[..., Any]):
    """A method with the same signature and name, kept in the module's ``__dict__``; replicas are made without it.

    `put` notes in it what it stands in for. Should it be copied or pickled on its own, the plain method is.
    """

    _self_before: Any = _MISSING

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

    Raises:
        SessionError: one of them lies under the stand-in of another block; nothing is changed then.
    """
    own = vars(module)
    for name, value, _ in replaced:
        if isinstance(own.get(name), StandIn) and own[name] is not value:
            msg = (
                f"this block on {type(module).__name__}.{name} is not the innermost one: another was opened on the same "
                "module after it and is still open; close that one first"
            )
            raise SessionError(msg)
    for name, value, before in reversed(replaced):
        if own.get(name, _MISSING) is not value:
            continue
        if before is _MISSING:
            del own[name]
        else:
            own[name] = before
