"""Reduce exceptions to class, arguments, and attributes for a pickler, and rebuild them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["reduce_exception"]


def reduce_exception(error: BaseException, is_sendable: Callable[[Any], bool]) -> Any:
    """Return the pickle reduction of an exception: the state of its builtin base class, its attributes, and its cause.

    The user's ``__init__``, ``__new__``, ``__reduce__``, and ``__setattr__`` often fail, so they are not called. Arguments
    and attributes that cannot be pickled are replaced by their ``repr``.

    A class in C with its own state, such as pydantic's ValidationError, can be made only by its own reduction.
    """

    def sendable(value: Any) -> Any:
        return value if is_sendable(value) else repr(value)

    _, made_from, *known = _builtin_base(type(error)).__reduce__(error)
    try:
        _new(type(error), made_from)
    except TypeError:
        return error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    cause = error.__cause__
    state = {**dict(_slots(error)), **(known[0] if known and isinstance(known[0], dict) else {}), **error.__dict__}
    return _rebuilt, (
        type(error),
        tuple(map(sendable, made_from)),
        tuple(map(sendable, error.args)),
        {name: sendable(value) for name, value in state.items()},
        cause if cause is not None and is_sendable(cause) else None,
    )


def _new(cls: type[BaseException], made_from: tuple[Any, ...]) -> BaseException:
    """Return an exception with the state of its builtin base class only."""
    base = _builtin_base(cls)
    error: BaseException = base.__new__(cls, *made_from)
    base.__init__(error, *made_from)
    return error


def _builtin_base(cls: type[BaseException]) -> Any:
    """Return the builtin class that makes the instances. With ``class E(ValueError, OSError)``, it is OSError."""
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    return base


def _slots(error: BaseException) -> Iterator[tuple[str, Any]]:
    for cls in type(error).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if hasattr(error, mangled):
                yield mangled, getattr(error, mangled)


def _rebuilt(
    cls: type[BaseException],
    made_from: tuple[Any, ...],
    args: tuple[Any, ...],
    state: dict[str, Any],
    cause: BaseException | None,
) -> BaseException:
    error = _new(cls, made_from)
    BaseException.args.__set__(error, args)  # type: ignore[attr-defined]
    for name, value in state.items():
        object.__setattr__(error, name, value)
    if cause is not None:
        error.__cause__ = cause
    return error
