"""Pickle calls of ranks that stay, and their results: definitions of ``__main__`` by name.

Both processes have a ``__main__`` with the same definitions. A function or class that is found there under its name is
pickled as that name. All other functions of ``__main__``, such as lambdas, are pickled by value, and use the globals of the
reader's ``__main__``. Likewise, functions of a module that are pickled by value use the globals of the reader's module.
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import cloudpickle
import torch

from parawrap.launch.messages._importable_modules import is_importable
from parawrap.launch.messages._line import trim_tensors
from parawrap.launch.messages._pickle_values import ValuePickler, explain_unpicklable
from parawrap.launch.messages._plain_values import pickle_plain
from parawrap.launch.messages._script_names import globals_used_by

__all__ = ["ScriptPickler", "find_in_main", "goes_by_value", "pickle_definition", "pickle_with_names"]

_WITHOUT_STATE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)


def find_in_main(qualname: str) -> Any:
    """Return what ``__main__`` has under a qualified name, without binding it.

    Raises:
        AttributeError: If there is nothing.
    """
    found: Any = sys.modules["__main__"]
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name)
    return found


class _ModuleGlobals(dict[str, Any]):
    """Placeholder for the globals of a module in the reader's process."""


def _globals_of_module(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


class ScriptPickler(ValuePickler):
    """A pickler that knows the definitions of ``__main__`` by name.

    Args:
        stream: Receives the pickle.
        buffers: Receives the memory of tensors. None keeps it in the pickle.
        is_shared: True for a global of ``__main__`` that the reader has too.
        defines: The globals that this pickle defines. Their parts are pickled by value.

    Attributes:
        required: The globals of ``__main__`` that the reader needs to load the pickle.
        used: The globals that the pickled functions read. Some may not exist yet, or are names of Python.
        assigned: Those that they only assign or delete.
        objects: The pickled objects with a state, such as tensors and modules.
        sources: The lines of files that do not exist, such as cells of a notebook.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        buffers: list[memoryview] | None,
        is_shared: Callable[[str], bool],
        defines: Collection[str] = (),
    ) -> None:
        super().__init__(stream, buffers, in_main=True)
        self._is_shared = is_shared
        self._defines = defines
        self.required: dict[str, None] = {}
        self.used: dict[str, None] = {}
        self.assigned: dict[str, None] = {}
        self.objects: list[Any] = []

    @property
    def sources(self) -> dict[str, list[str]]:
        return self._sources

    @property
    def reads_names(self) -> bool:
        """True if a pickled function may use any global, as `eval` does."""
        return self._reads_names

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            top = obj.__qualname__.partition(".")[0]
            if top not in self._defines and self._is_shared(top) and _is_found(obj):
                self.required[top] = None
                return find_in_main, (obj.__qualname__,)
        if isinstance(obj, _ModuleGlobals):
            return _globals_of_module, (obj["__name__"],)
        if not isinstance(obj, _WITHOUT_STATE):
            self.objects.append(obj)
        if isinstance(obj, types.FunctionType):
            return self._reduce_function(obj)
        return super().reducer_override(obj)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        """Reduce a function. One that is pickled by value uses the globals of its module in the reader's process."""
        module, name = function.__globals__, str(function.__globals__.get("__name__"))
        is_importable_module = name in sys.modules and vars(sys.modules[name]) is module and is_importable(name)
        if is_importable_module and name != "__main__" and not goes_by_value(name):
            self.globals_ref[id(module)] = _ModuleGlobals(__name__=name)
        reduced: Any = super().reducer_override(function)
        is_by_value = reduced is not NotImplemented and len(reduced) > 2 and isinstance(reduced[2], tuple)  # by cloudpickle
        if is_by_value and name == "__main__" and module is vars(sys.modules["__main__"]):
            self._leave_globals(function, reduced)
        elif is_by_value and isinstance(self.globals_ref.get(id(module)), _ModuleGlobals):
            reduced[2][1]["__globals__"] = {}
        return reduced

    def _leave_globals(self, function: types.FunctionType, reduced: Any) -> None:
        """Note the globals of a function, and leave out their values."""
        state = reduced[2][1]
        names, state["__globals__"] = state["__globals__"], {}
        read = globals_used_by(function.__code__)
        self.used |= dict.fromkeys(sorted(read))
        self.assigned |= dict.fromkeys(name for name in names if name not in read)


def goes_by_value(module: str) -> bool:
    """True if the user registered the module, or a package that contains it, with cloudpickle for pickling by value."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    return any(module == each or module.startswith(f"{each}.") for each in by_value)


def _is_found(value: Any) -> bool:
    try:
        return find_in_main(value.__qualname__) is value
    except AttributeError:
        return False


def pickle_with_names(value: Any, address: str, is_shared: Callable[[str], bool]) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle of a value, and the memory of its tensors, which is not copied.

    Raises:
        UnsendableError: If the value cannot be pickled. The message names the unpicklable part, as a path from `address`.
    """
    if (plain := pickle_plain(value)) is not None:
        return plain
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    with explain_unpicklable(value, address, buffers):
        ScriptPickler(stream, buffers, is_shared).dump(trim_tensors(value))
    return stream.getbuffer(), buffers


def pickle_definition(names: Sequence[str], value: Any, is_shared: Callable[[str], bool]) -> tuple[bytes, ScriptPickler]:
    """Return the pickle of functions, classes, and modules of ``__main__``, and the pickler with what it has noted.

    Args:
        names: Their names.
        value: The only one of them, or a dict of all.
        is_shared: As in `ScriptPickler`.

    Raises:
        UnsendableError: If it cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = ScriptPickler(stream, None, is_shared, names)
    with explain_unpicklable(value, f"the global {names[0]!r}", []):
        pickler.dump(value)
    return stream.getvalue(), pickler
