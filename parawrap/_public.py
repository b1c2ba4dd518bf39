"""The module that public names report."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["public"]

T = TypeVar("T")


def public(value: T) -> T:
    """Let a class or function report ``parawrap`` as its module: users import it from there, and pickles refer to it."""
    value.__module__ = "parawrap"
    return value
