"""Stand-ins for the methods of one module while it is parallel. They leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import wrapt

__all__ = ["PlainView", "StandIn", "original_method", "put", "restore"]

_MISSING: Any = object()


class StandIn(wrapt.FunctionWrapper[..., Any]):
    """A function with the signature and the name of a method, kept in the module's ``__dict__``.

    `put` notes the value below it. A copy or a pickle of it is one of the plain method.
    """

    _self_before: Any = _MISSING
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
        self._hidden: dict[str, Any] = {}

    def open(self, module: torch.nn.Module) -> None:
        """Take the place of the module's ``__dict__``."""
        self._before = vars(module)
        _make_equal(self, self._before)
        object.__setattr__(module, "__dict__", self)

    def close(self, module: torch.nn.Module) -> None:
        """Give the module its own ``__dict__`` back, with all that was set in the meantime."""
        plain = self._plain()
        shown = {name: value for name, value in self._hidden.items() if plain.get(name) is None}
        self._hidden.clear()
        _make_equal(self._before, plain | shown)
        object.__setattr__(module, "__dict__", self._before)

    def hide(self, name: str) -> None:
        """Put None in the place of an attribute until `close`."""
        if (value := dict.get(self, name)) is not None:
            self._hidden[name] = value
            dict.__setitem__(self, name, None)

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


def put(module: torch.nn.Module, view: PlainView, stand_ins: Mapping[str, StandIn], hidden: Iterable[str] = ()) -> None:
    """Put stand-ins into the module's own dictionary, on top of earlier ones. `restore` removes them.

    `view` takes the place of the dictionary, unless another block has one there. The module has None in place of the
    attributes `hidden` until its last stand-in is removed.
    """
    own = vars(module)
    if not isinstance(own, PlainView):
        view.open(module)
        own = view
    for name in hidden:
        own.hide(name)
    for name, stand_in in stand_ins.items():
        stand_in._self_before = dict.get(own, name, _MISSING)
        dict.__setitem__(own, name, stand_in)


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


def restore(module: torch.nn.Module, stand_ins: Mapping[str, StandIn]) -> None:
    """Remove these stand-ins. Others, also those above them, stay, and so does a value that other code has put over one."""
    own = vars(module)
    for name, stand_in in stand_ins.items():
        top, before = dict.get(own, name), stand_in._self_before
        above = _above(top, stand_in)
        if above is not None:
            above._self_before = before
        elif top is stand_in:
            dict.pop(own, name) if before is _MISSING else dict.__setitem__(own, name, before)
    if isinstance(own, PlainView) and own.is_plain:
        own.close(module)


def _above(top: Any, stand_in: StandIn) -> StandIn | None:
    """Return the stand-in that lies directly on that one; None if there is none."""
    while isinstance(top, StandIn) and top._self_before is not stand_in:
        top = top._self_before
    return top if isinstance(top, StandIn) else None


def original_method(value: Any) -> Any:
    """Return the method under all stand-ins."""
    while isinstance(value, StandIn):
        value = value.__wrapped__
    return value
