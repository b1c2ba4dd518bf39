"""How decorated functions travel to other processes: by their name where that leads to them, else by value.

wrapt's wrappers say that they are functions, and cloudpickle would send the bare function in their place. What decorates
nothing any more when it arrives is no use, so the classes here say what they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["Undecorated", "is_global", "own_class", "sent_by_cloudpickle"]


def _type_of(self: object) -> type:
    return type(self)


own_class = property(_type_of)
"""For ``__class__`` of a wrapper class."""


def is_global(decorated: Any) -> bool:
    """Whether the function's own name leads to its decorated form, as it does after ``@decorator`` in a module."""
    found: Any = sys.modules.get(getattr(decorated, "__module__", ""))
    for name in getattr(decorated, "__qualname__", "").split("."):
        found = inspect.getattr_static(found, name, None)
    return found is decorated


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
        """None where another process would not find the function by its name."""
        module = getattr(decorated, "__module__", None)
        if module in (None, "__main__") or not is_global(decorated):
            return None
        try:
            importable = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            importable = False
        return cls(decorated) if importable else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, self._place


def _found(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name)
    bare = found.__wrapped__
    return getattr(bare, "__func__", bare)  # of a classmethod or staticmethod
