"""Stand-ins for the methods of one module while it is parallel. They leave no trace."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import wrapt

from parawrap.errors import SessionError

__all__ = ["PlainView", "StandIn", "original_method", "put", "restore"]

_MISSING: Any = object()


class StandIn(wrapt.FunctionWrapper[..., Any]):
    """A function with the signature and the name of a method, kept in the module's ``__dict__``.

    `put` notes the value that it replaces. A copy or a pickle of it is one of the plain method.
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


class PlainView(dict[str, Any]):
    """The ``__dict__`` of a module inside a block.

    Attribute lookup, which is C code, finds the stand-ins. Python code that reads or copies the dict finds what was there
    before, so copies, clones, and pickles of the module are plain modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Any] = {}

    def open(self, module: torch.nn.Module) -> None:
        """Take the place of the module's ``__dict__``."""
        self._before = vars(module)
        _make_equal(self, self._before)
        object.__setattr__(module, "__dict__", self)

    def close(self, module: torch.nn.Module) -> None:
        """Give the module its own ``__dict__`` back, with all that was set in the meantime."""
        _make_equal(self._before, self._plain())
        object.__setattr__(module, "__dict__", self._before)

    @property
    def is_plain(self) -> bool:
        """True if no stand-in is left."""
        return StandIn not in map(type, dict.values(self))

    def _plain(self) -> dict[str, Any]:
        plain = {name: value for name, value in dict.items(self) if type(value) is not StandIn}
        if dict.__len__(self) != len(plain):
            for name, value in dict.items(self):
                if name not in plain and (under := _under(value)) is not _MISSING:
                    plain[name] = under
        return plain

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        under = _under(value)
        return value if under is _MISSING else under

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain())

    def __len__(self) -> int:
        return len(self._plain())

    def __eq__(self, other: object) -> bool:
        return self._plain() == (other._plain() if isinstance(other, PlainView) else other)

    def __or__(self, other: Any) -> Any:
        return self._plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._plain()

    def __repr__(self) -> str:
        return repr(self._plain())

    def keys(self) -> Any:
        return self._plain().keys()

    def values(self) -> Any:
        return self._plain().values()

    def items(self) -> Any:
        return self._plain().items()

    def copy(self) -> dict[str, Any]:
        return self._plain()

    __hash__ = None

    def __copy__(self) -> dict[str, Any]:
        return self._plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._plain(),)


def put(module: torch.nn.Module, view: PlainView, name: str, value: Any) -> Any:
    """Put `value` into the module's own dictionary; return what was there before, for `restore`.

    `view` takes the place of the dictionary, unless another block has one there.
    """
    if not isinstance(vars(module), PlainView):
        view.open(module)
    own = vars(module)
    before = dict.get(own, name, _MISSING)
    if isinstance(value, StandIn):
        value._self_before = before
        value._self_thread = threading.get_ident()
    dict.__setitem__(own, name, value)
    return before


def _make_equal(own: dict[str, Any], other: dict[str, Any]) -> None:
    """Make two dicts equal. At no moment does it lack a name of both: another thread may be reading it."""
    dict.update(own, other)
    for name in [name for name in dict.keys(own) if name not in other]:
        dict.pop(own, name)


def _under(value: Any) -> Any:
    """Return the value that was in the place of a stand-in before the first one; any other value as it is."""
    while type(value) is StandIn:
        value = value._self_before
    return value


def restore(module: torch.nn.Module, replaced: Sequence[tuple[str, Any, Any]]) -> None:
    """Undo each (name, value, before). A value that other code has put over one of these stays.

    A block that another thread opened on the same module, and has not closed yet, goes on without this one.

    Raises:
        SessionError: If one of them lies under the stand-in of a block that this thread opened later. Nothing changes then.
    """
    own = vars(module)
    above = {name: _above(dict.get(own, name), value) for name, value, _ in replaced}
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
        elif dict.get(own, name, _MISSING) is value:
            dict.pop(own, name) if before is _MISSING else dict.__setitem__(own, name, before)
    if isinstance(own, PlainView) and own.is_plain:
        own.close(module)


def _above(top: Any, value: Any) -> StandIn | None:
    """Return the stand-in that lies directly on that one; None if there is none."""
    while isinstance(top, StandIn) and isinstance(value, StandIn) and top is not value:
        if top._self_before is value:
            return top
        top = top._self_before
    return None


def original_method(value: Any) -> Any:
    """Return the method under all stand-ins."""
    while isinstance(value, StandIn):
        value = value.__wrapped__
    return value
