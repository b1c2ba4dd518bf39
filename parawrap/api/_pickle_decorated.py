"""Pickle decorated functions: by name if possible, else by value.

The ``__class__`` of a wrapt wrapper is that of the wrapped function, so cloudpickle would pickle the undecorated function.
The wrapper classes therefore define their own ``__class__``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle


def _type_of(self: object) -> type:
    return type(self)


own_class = property(_type_of)
"""The ``__class__`` attribute of a wrapper class."""


def is_global(decorated: Any) -> bool:
    """True if the function's qualified name refers to its decorated form, as after ``@decorator`` in a module."""
    return (
        _look_up(sys.modules.get(getattr(decorated, "__module__", "")), getattr(decorated, "__qualname__", "")) is decorated
    )


def _look_up(module: Any, qualname: str) -> Any:
    """Return the object with a qualified name, without binding it to its class; None if there is none."""
    found = module
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name, None)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def reduce_by_name(decorated: Any) -> str | tuple[Any, ...]:
    """Return the reduction of a global decorated function. In a class, attribute access would bind it."""
    if "." not in decorated.__qualname__:
        return str(decorated.__qualname__)
    return _find_decorated, (decorated.__module__, decorated.__qualname__)


def _find_decorated(module: str, qualname: str) -> Any:
    return _look_up(importlib.import_module(module), qualname)


def register_with_cloudpickle(cls: type, by_value: Callable[[Any], tuple[Any, ...]]) -> None:
    """Make cloudpickle reduce objects of `cls` as pickle does, except by value if ``__main__`` defines them."""

    def reduced(decorated: Any) -> str | tuple[Any, ...]:
        reduction: str | tuple[Any, ...] = decorated.__reduce_ex__(4)
        return by_value(decorated) if decorated.__module__ == "__main__" else reduction

    cloudpickle.CloudPickler.dispatch_table[cls] = reduced  # pyright: ignore[reportIndexIssue]


class Undecorated:
    """A stand-in for the undecorated function inside a global decorated one. It unpickles as that function.

    Pickled by value, the undecorated function would take along every global that it uses, such as locks and open files.
    """

    def __init__(self, decorated: Any) -> None:
        self._place = (decorated.__module__, decorated.__qualname__)

    @classmethod
    def of(cls, decorated: Any) -> Undecorated | None:
        """Return a stand-in, or None if another process cannot import the function or should receive it by value."""
        module = getattr(decorated, "__module__", None)
        if module in (None, "__main__") or not is_global(decorated) or _goes_by_value(module):
            return None
        return cls(decorated) if _is_importable(module) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, self._place


def _goes_by_value(module: str) -> bool:
    """True if the user registered the module, or a package that contains it, with cloudpickle for pickling by value."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    return any(module == each or module.startswith(f"{each}.") for each in by_value)


def _is_importable(module: str) -> bool:
    """True if the import path finds the module. A loaded module need not be importable: it may come from a file path."""
    path: Any = None
    parts = module.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((spec for find in finders if find and (spec := find(name, path))), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _find(module: str, qualname: str) -> Any:
    bare = _look_up(importlib.import_module(module), qualname).__wrapped__
    return getattr(bare, "__func__", bare)  # the function of a classmethod or staticmethod
