"""The module that public names report."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar, get_type_hints

T = TypeVar("T")


def public(value: T) -> T:
    """Let a class or function report ``parawrap`` as its module.

    Users import it from there, and pickles refer to it.

    Annotations of a class are evaluated first, because `typing.get_type_hints` looks their names up
    in that module.
    """
    own = vars(value).get("__annotations__") if isinstance(value, type) else None
    if own:
        with suppress(NameError):  # names that are imported for type checkers only
            own.update({name: hint for name, hint in get_type_hints(value).items() if name in own})
    value.__module__ = "parawrap"
    return value
