"""Decorated functions and methods: their metadata, how they bind, and how they are pickled."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle

from parawrap.processes.pickling import is_among

_Reduction = tuple[Any, ...]


class Decorated:
    """A decorated function or bound method. Never changed, so it is thread-safe.

    Attributes that its class lacks are those of the function.

    It is pickled by name if its name leads to it, as after ``@decorator`` in a module, and by value
    otherwise. As with functions, cloudpickle also pickles by value if the module is ``__main__`` or
    registered with ``cloudpickle.register_pickle_by_value``.
    """

    if TYPE_CHECKING:
        # As properties: from Python 3.14 on, annotations of names in the class body would hide the
        # annotations of the function
        @property
        def __wrapped__(self) -> Callable[..., Any]: ...
        @property
        def __name__(self) -> str: ...
        @property
        def __qualname__(self) -> str: ...

    def __init__(self, function: Callable[..., Any], setting: Any, defined: Any = None) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        # The argument of the decorator: the platform of `wrapper`, or the count of `tp_collate`
        self._setting = setting
        # Of a bound method: the decorated function in the class; None otherwise
        self._defined = defined

    def __init_subclass__(cls) -> None:
        # Both pickle and cloudpickle call `__reduce_ex__`. This table is for cloudpickle alone
        table: Any = cloudpickle.CloudPickler.dispatch_table
        table[cls] = _reduce_for_cloudpickle

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind the function as Python does: to the instance, or to the class of a classmethod."""
        # Looked up on the type, as Python does it for special methods
        bind = getattr(type(self.__wrapped__), "__get__", None)
        bound = None if bind is None else bind(self.__wrapped__, instance, owner)
        if isinstance(bound, types.MethodType):
            return type(self)(bound, self._setting, self)
        return self  # in the class itself, of a staticmethod, or of an object that does not bind

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self)["__wrapped__"], name)

    def __reduce_ex__(self, protocol: object) -> _Reduction:
        if self._defined is not None:
            return getattr, (self.__wrapped__.__self__, self.__name__)  # type: ignore[attr-defined]
        if is_global(self):
            return look_up, (self.__module__, self.__qualname__)
        return _reduce_by_value(self)


# --- pickles: each function returns the function and the arguments that make the object again ---


def _reduce_by_value(decorated: Decorated) -> _Reduction:
    return type(decorated), (decorated.__wrapped__, decorated._setting)


def _reduce_for_cloudpickle(decorated: Decorated) -> _Reduction:
    if decorated._defined is None and is_sent_by_value(decorated):
        return _reduce_by_value(decorated)
    return decorated.__reduce_ex__(4)  # the number is not used


def is_sent_by_value(decorated: Any) -> bool:
    """True if cloudpickle pickles the functions of the module by value.

    It asks its table before its own rules for functions, which are repeated here.
    """
    module = getattr(decorated, "__module__", None)
    registered = cloudpickle.list_registry_pickle_by_value()
    return module == "__main__" or is_among(module, registered)


def is_global(decorated: Any) -> bool:
    """True if the module and the name of a decorated object lead to it."""
    # A decorated partial, for example, has no name
    module = getattr(decorated, "__module__", None)
    name = getattr(decorated, "__qualname__", "")
    return module in sys.modules and look_up(module, name) is decorated


def look_up(module: str, qualname: str) -> Any:
    """Return the object with a qualified name, without binding it to its class; else None.

    Of a classmethod or staticmethod, return the function in it.
    """
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name, None)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
