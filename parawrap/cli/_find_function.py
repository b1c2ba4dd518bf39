"""Find the function that ``parawrap run`` launches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from parawrap.cli._usage_error import UsageError

__all__ = ["find_function"]


def find_function(target: str) -> Callable[..., Any]:
    """Import ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``, and return the function.

    Raises:
        UsageError: If the module, the file, or the function does not exist, or the module exits.
    """
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py")
    if not (name and place and (is_file or all(place.split(".")))):
        msg = f"{target!r} does not name a function. Give MODULE:FUNCTION, such as train:main or jobs/train.py:main"
        raise UsageError(msg)
    try:
        module = _import_file(Path(place)) if is_file else _import(place, Path.cwd())
    except SystemExit as error:
        msg = f"{place} exits while it is imported, with {error.code!r}. Put its script under if __name__ == '__main__':"
        raise UsageError(msg) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        msg = f"{place!r} has no function {name!r}. It has {', '.join(known) or 'no functions'}"
        raise UsageError(msg)
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        msg = f"the file {str(path)!r} does not exist"
        raise UsageError(msg)
    path = path.resolve()  # as Python does with the file of a script
    if path.suffix != ".py" or "." in path.stem:
        msg = f"{str(path)!r} cannot be imported. Rename the file: its name ends with .py, and has no other dot"
        raise UsageError(msg)
    module = _import(path.stem, path.parent)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        msg = f"{path.stem!r} is the name of another module, {found or 'which is built in'}. Rename {str(path)!r}"
        raise UsageError(msg)
    return module


def _import(name: str, folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))  # ranks get it too
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        msg = f"module {name!r} was not found in {folder} or on sys.path"
        raise UsageError(msg) from error
