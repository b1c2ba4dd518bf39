"""Private names of torch and Python, found without failing the import of parawrap.

Each room keeps the private names that it uses in one file, `_private_names.py`. CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, NoReturn

from parawrap._documentation import cite
from parawrap.errors import VersionError

_ABSENT = object()


class _Missing:
    """Stands for a name that is missing. Every use of it raises VersionError."""

    def __init__(self, path: str, feature: str) -> None:
        self._refusal = (path, feature)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise missing_name(*self._refusal)

    __call__ = __instancecheck__ = __subclasscheck__ = __getattr__ = _refuse


def missing_name(path: str, feature: str) -> VersionError:
    """Return the error for a name that this release of torch or Python lacks."""
    msg = (
        f"{feature} need {path}, which Python {platform.python_version()} with torch {version('torch')} does not have. "
        f"Install releases that {cite('versions')} lists"
    )
    return VersionError(msg)


def private_name(path: str, feature: str) -> Any:
    """Return the object at a dotted path. If it is missing, return an object that raises VersionError when it is used.

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


def private_reader(path: str, feature: str) -> Callable[[Any], Any]:
    """Return a function that reads the attribute of a class, such as ``torch.Tensor._version``, from an instance.

    If the class lacks it, the function raises VersionError.
    """
    found: Any = private_name(path, feature)
    return found if isinstance(found, _Missing) else attrgetter(path.rpartition(".")[2])


def private_attribute(owner: Any, name: str, feature: str) -> Any:
    """Return an attribute that only instances have. Raise VersionError if this one lacks it."""
    found = getattr(owner, name, _ABSENT)
    if found is _ABSENT:
        cls = type(owner)
        path = f"{cls.__module__}.{cls.__qualname__}.{name}"
        raise missing_name(path, feature)
    return found
