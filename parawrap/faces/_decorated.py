"""How decorated functions travel to other processes: by their name where that leads to them, else by value.

wrapt's wrappers say that they are functions, and cloudpickle would send the bare function in their place. What decorates
nothing any more when it arrives is no use, so the classes here say what they are.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["Undecorated", "is_global", "own_class", "reduced_by_name", "sent_by_cloudpickle"]


def _type_of(self: object) -> type:
    return type(self)


own_class = property(_type_of)
"""For ``__class__`` of a wrapper class."""


def is_global(decorated: Any) -> bool:
    """Whether the function's own name leads to its decorated form, as it does after ``@decorator`` in a module."""
    return (
        _looked_up(sys.modules.get(getattr(decorated, "__module__", "")), getattr(decorated, "__qualname__", ""))
        is decorated
    )


def _looked_up(module: Any, qualname: str) -> Any:
    """What a qualified name leads to, without binding it to the class that holds it; None where it leads nowhere."""
    found = module
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name, None)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def reduced_by_name(decorated: Any) -> str | tuple[Any, ...]:
    """Return how pickle finds a global decorated function. In a class, attribute access would bind it."""
    if "." not in decorated.__qualname__:
        return str(decorated.__qualname__)
    return _decorated_at, (decorated.__module__, decorated.__qualname__)


def _decorated_at(module: str, qualname: str) -> Any:
    return _looked_up(importlib.import_module(module), qualname)


def sent_by_cloudpickle(cls: type, by_value: Callable[[Any], tuple[Any, ...]]) -> None:
    """Have cloudpickle send objects of `cls` as pickle does, but by value what ``__main__`` defines, as it promises."""

    def reduced(decorated: Any) -> str | tuple[Any, ...]:
        reduction: str | tuple[Any, ...] = decorated.__reduce_ex__(4)
        return by_value(decorated) if decorated.__module__ == "__main__" else reduction

    cloudpickle.CloudPickler.dispatch_table[cls] = reduced  # pyright: ignore[reportIndexIssue]


class Undecorated:
    """Stands for the bare function within a global decorated one, and is that function once it was unpickled.

    By value, a bare function would take all the globals that it uses with it, locks and open files among them.
    """

    def __init__(self, decorated: Any) -> None:
        self._place = (decorated.__module__, decorated.__qualname__)

    @classmethod
    def of(cls, decorated: Any) -> Undecorated | None:
        """None where another process would not find the function by its name, or is not to look for it."""
        module = getattr(decorated, "__module__", None)
        if module in (None, "__main__") or not is_global(decorated) or _goes_by_value(module):
            return None
        return cls(decorated) if _is_importable(module) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, self._place


def _goes_by_value(module: str) -> bool:
    """Whether the user told cloudpickle so, of the module or of a package that it is in."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    return any(module == each or module.startswith(f"{each}.") for each in by_value)


def _is_importable(module: str) -> bool:
    """Whether the import path leads to it. That it was loaded here says nothing: that may have been by a file's path."""
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


def _found(module: str, qualname: str) -> Any:
    bare = _looked_up(importlib.import_module(module), qualname).__wrapped__
    return getattr(bare, "__func__", bare)  # of a classmethod or staticmethod
