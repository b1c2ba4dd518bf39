"""Replace methods of one module while a block is open. The class never changes, and the block leaves no trace."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from parawrap._private_names import COMPILED_CALL
from parawrap.engine.call import NOWHERE, Entry, Stub
from parawrap.engine.holdings import ABSENT

_rewriting = threading.RLock()


class PlainView(dict[str, Any]):
    """The ``__dict__`` of a module inside a block.

    Attribute lookup, which is C code, finds the stubs. Python code that reads or copies the dict finds what was there
    before, so copies, clones, and pickles of the module are plain modules.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(vars(module))
        self._before = vars(module)
        self._compiled = dict.get(self, COMPILED_CALL)  # it would trace through the stub and run the batch as one
        if self._compiled is not None:
            dict.__setitem__(self, COMPILED_CALL, None)

    def close(self, module: torch.nn.Module) -> None:
        """Give the module its own ``__dict__`` back, with all that was set in the meantime."""
        now = self.plain()
        if self._compiled is not None and now.get(COMPILED_CALL) is None:
            now[COMPILED_CALL] = self._compiled
        dict.update(self._before, now)  # at no moment does it lack a name: another thread may be reading it
        for name in [name for name in [*self._before] if name not in now]:
            dict.pop(self._before, name)
        object.__setattr__(module, "__dict__", self._before)

    def plain(self) -> dict[str, Any]:
        """Return the items with what lies under the stubs."""
        found = {name: _under(value) for name, value in [*dict.items(self)]}  # a copy: other threads may set attributes
        return {name: value for name, value in found.items() if value is not ABSENT}

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        under = _under(value)
        return value if under is ABSENT else under

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain())

    def keys(self) -> Any:
        return self.plain().keys()

    def values(self) -> Any:
        return self.plain().values()

    def items(self) -> Any:
        return self.plain().items()

    copy = __copy__ = plain

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.plain(),)


class PatchedMethods:
    """Puts stubs into the module's ``__dict__``, and removes them again.

    Several blocks may be open on one module, in any threads; a global lock serializes the changes.
    """

    def __init__(self, module: torch.nn.Module, methods: Sequence[str]) -> None:
        self._module = module
        self._methods = methods
        self._stubs: dict[str, Stub] = {}

    def install(self, calls: Any) -> None:
        """Send every call of the methods to the `call` of a session, through any reference to the module."""
        with _rewriting:
            if not isinstance(vars(self._module), PlainView):
                object.__setattr__(self._module, "__dict__", PlainView(self._module))
            own = vars(self._module)
            for name in dict.fromkeys(self._methods):
                plain = getattr(self._module, name)
                stub = Stub(plain, dict.get(own, name, ABSENT))
                of_class = getattr(type(self._module), name, None)
                stub._self_route = (
                    weakref.ref(calls),
                    Entry(partial(_call_plainly, self._module, stub, name, of_class), name),
                )
                dict.__setitem__(own, name, stub)
                self._stubs[name] = stub

    def uninstall(self) -> None:
        """Restore the module. Other blocks on it go on, and what other code has put over a stub stays."""
        with _rewriting:
            own = vars(self._module)
            for name, stub in self._stubs.items():
                stub._self_route = NOWHERE
                top = dict.get(own, name)
                if top is stub:
                    dict.pop(own, name) if stub._self_under is ABSENT else dict.__setitem__(own, name, stub._self_under)
                while type(top) is Stub:
                    if top._self_under is stub:
                        top._self_under = stub._self_under
                    top = top._self_under
            self._stubs = {}
            if isinstance(own, PlainView) and Stub not in map(type, [*dict.values(own)]):
                own.close(self._module)


def _call_plainly(module: torch.nn.Module, stub: Stub, name: str, of_class: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method that a stub stands for; that of the class, if it was replaced while the block is open."""
    now = getattr(type(module), name, None)
    if now is of_class or stub._self_under is not ABSENT:
        return stub.__wrapped__(*args, **kwargs)
    return now.__get__(module)(*args, **kwargs)  # type: ignore[union-attr]


def _under(value: Any) -> Any:
    """Return the value that was in the place of a stub before the first one; any other value as it is."""
    while type(value) is Stub:
        value = value._self_under
    return value


def original_method(value: Any) -> Any:
    """Return the method under all stubs."""
    while type(value) is Stub:
        value = value.__wrapped__
    return value
