"""Find out if ranks can import a module, or if only this process has it."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["is_importable"]


def is_importable(name: str) -> bool:
    """True if an interpreter with this import path and working folder finds the module, or the package that it is in.

    Modules that were loaded from a file, or made by the script, are not found. Finders that the script added count,
    although ranks do not have them: their error explains it.
    """
    root = name.partition(".")[0]
    module = sys.modules.get(root)
    if root in sys.builtin_module_names or _is_on_path(root, getattr(module, "__file__", None)):
        return True
    for finder in sys.meta_path:
        try:
            if finder.find_spec(root, None) is not None:
                return True
        except Exception:  # noqa: BLE001 (finders may raise anything)
            continue
    return False


def _is_on_path(root: str, file: object) -> bool:
    """True if the file of a module or package is where the import path leads. Saves most searches."""
    if not isinstance(file, str):
        return False
    path = Path(file)
    if path.stem == "__init__":
        path = path.parent
    return path.name.partition(".")[0] == root and str(path.parent) in sys.path
