"""Private names of torch and Python, found without failing the import of parawrap.

Each room keeps the private names that it uses in one file, `_private_names.py`. CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any, NoReturn

from parawrap.errors import VersionError

__all__ = ["private_name"]


class _Missing:
    """Stands for a name that is missing. Every use of it raises VersionError."""

    def __init__(self, path: str, feature: str) -> None:
        self._refusal = (path, feature)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        path, feature = self._refusal
        msg = (
            f"{feature} need {path}, which Python {platform.python_version()} with torch {version('torch')} does not have. "
            "Install releases that docs/versions.md lists"
        )
        raise VersionError(msg)

    __call__ = __instancecheck__ = __getattr__ = _refuse


def private_name(path: str, feature: str) -> Any:
    """Return the object at a dotted path. If it is missing, return an object whose use raises VersionError.

    `feature` is the subject of the message, in the plural.

    >>> private_name("atexit._clear", "exits").__name__
    '_clear'
    >>> private_name("atexit._gone", "exits")()
    Traceback (most recent call last):
    parawrap.errors.VersionError: exits need atexit._gone, which Python ... with torch ... does not have. ...
    """
    try:
        return resolve_name(path)
    except (ImportError, AttributeError):
        return _Missing(path, feature)
