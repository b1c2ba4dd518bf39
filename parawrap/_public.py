"""The module that public names report."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar, get_type_hints

T = TypeVar("T")


def public(value: T) -> T:
    """Let a class or function report ``parawrap`` as its module, and return it.

    Users import it from there, and pickles refer to it by that name.
    """
    own = vars(value).get("__annotations__") if isinstance(value, type) else None
    if own:
        # Annotations are texts. They are evaluated before the module changes, because
        # `typing.get_type_hints` would look up their names in the new module
        with suppress(NameError):  # some names are imported for type checkers only
            hints = get_type_hints(value)
            own.update({name: hints[name] for name in own})
    value.__module__ = "parawrap"
    return value
