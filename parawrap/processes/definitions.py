"""Copies of definitions that cloudpickle makes wrongly, or not at all.

A class that travels by value keeps its slots, and does not run `__init_subclass__` again. A generic
function of functools.singledispatch takes its implementations along.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from parawrap._private_names import make_class, make_enum

_HOOK = "__init_subclass__"


def adapt_class(cls: type, reduced: Any) -> Any:
    """Return cloudpickle's reduction of a class, with its slots, and without running hooks."""
    if not isinstance(reduced, tuple) or reduced[0] not in (make_class, make_enum):
        return reduced  # the class goes by its name, or a reducer of the user made this
    make, args, *rest = reduced
    if make is make_class and "__slots__" in vars(cls):
        _constructor, _name, bases, namespace, *_ = args
        # cloudpickle sets `__slots__` after the class was made, which has no effect. NamedTuple
        # makes its own
        if NamedTuple not in bases:
            namespace["__slots__"] = vars(cls)["__slots__"]
    if list(_owners_of_hooks(cls.__bases__)):
        return _make_without_hooks, (make, *args), *rest
    return reduced


def _owners_of_hooks(bases: Iterable[Any]) -> Iterator[type]:
    """Yield the classes with an `__init_subclass__` that may run for a new class of these bases.

    A class may come twice. Hooks of the standard library, such as Generic's, are left out: they
    need no arguments and register nothing.
    """
    for base in bases:
        cls = getattr(base, "__origin__", base)  # the base may be an alias such as Generic[T]
        for owner in getattr(cls, "__mro__", ()):  # an alias of typing may have none
            package = str(owner.__module__).partition(".")[0]
            if _HOOK in vars(owner) and package not in sys.stdlib_module_names:
                yield owner


# Held while the hooks of bases are replaced: two threads that replace the hook of one base would
# each restore the replacement of the other. A fork takes the lock too, so that no child keeps a
# replacement. It is reentrant, because a metaclass may unpickle another class.
_hooks_lock = threading.RLock()


def _make_without_hooks(make: Callable[..., type], *args: Any) -> type:
    """Make a class without running `__init_subclass__`.

    The hook has run where the class was defined, and attributes that it has set in the class travel
    with the class. It may require arguments of the class statement, which do not travel.

    Python always calls the hook when it makes a class. So the bases get a replacement meanwhile.
    """
    if make is make_class:
        _constructor, name, bases, *_ = args
    else:
        bases, name, *_ = args
    borrowed: list[tuple[type, Any]] = []  # the bases and their own hooks
    with _hooks_lock:
        try:
            for owner in _owners_of_hooks(bases):
                hook = vars(owner)[_HOOK]
                try:
                    # A trial, which changes nothing. By `type`: a metaclass may refuse attributes
                    type.__setattr__(owner, _HOOK, hook)
                except TypeError:
                    continue  # a class in C, whose hook cannot be replaced
                # Noted before the hook is replaced: after Ctrl-C between the two lines, restoring
                # it changes nothing
                borrowed.append((owner, hook))
                type.__setattr__(owner, _HOOK, _stand_in_for(hook, name))
            return make(*args)
        finally:
            _give_back(borrowed)


def _stand_in_for(hook: Any, name: str) -> Any:
    """Return a hook that skips the class with this name in this thread, and runs for all others."""
    maker = threading.get_ident()

    def __init_subclass__(cls: type, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        is_skipped = threading.get_ident() == maker and cls.__name__ == name
        if not is_skipped:
            # as Python binds it: a classmethod, but a class may have any callable as its hook
            bound = hook.__get__(None, cls) if hasattr(hook, "__get__") else hook
            bound(*args, **kwargs)

    return classmethod(__init_subclass__)


def _give_back(borrowed: list[tuple[type, Any]]) -> None:
    """Restore all hooks, also if Ctrl-C raises between two of them."""
    error: BaseException | None = None
    while borrowed:
        try:
            owner, hook = borrowed[-1]
            type.__setattr__(owner, _HOOK, hook)
            borrowed.pop()  # last: Ctrl-C before this line restores the hook once more
        except BaseException as reason:  # noqa: BLE001 (raised once all are restored)
            error = error or reason
    if error is not None:
        raise error


os.register_at_fork(
    before=_hooks_lock.acquire,
    after_in_parent=_hooks_lock.release,
    # the only thread of the child is the one that forked, and has acquired the lock
    after_in_child=_hooks_lock.release,
)


# -- generic functions: those of functools.singledispatch

_GENERIC: Any = functools.singledispatch(len)  # a sample, to recognize others
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def is_generic(value: Any) -> bool:
    """True for a function that functools.singledispatch returned."""
    # singledispatch makes each from the same code
    return type(value) is types.FunctionType and value.__code__ is _GENERIC.__code__


def reduce_generic(function: Any) -> tuple[Any, ...]:
    """Reduce a generic function to its implementations and attributes.

    Its cache has weak references, which cannot be pickled. The implementations may use the function
    itself, so they are state, which is pickled afterwards.
    """
    # Those of the user: singledispatch makes the others again
    own = {name: value for name, value in vars(function).items() if name not in vars(_GENERIC)}
    own["__wrapped__"] = function.__wrapped__
    names = {name: getattr(function, name) for name in _NAMES}
    state = dict(function.registry), names | own
    # The six parts of `object.__reduce__`; a function has no items of a list or dict
    return _new_generic, (function.__name__,), state, None, None, _set_generic_state


def _new_generic(name: str) -> Any:
    def fallback(*args: Any) -> Any:
        raise NotImplementedError  # `_set_generic_state` replaces it before the first call

    fallback.__name__ = name  # singledispatch keeps the name for its errors
    return functools.singledispatch(fallback)


def _set_generic_state(
    function: Any, state: tuple[Mapping[type, Callable[..., Any]], Mapping[str, Any]]
) -> None:
    implementations, attributes = state
    for cls, implementation in implementations.items():
        function.register(cls, implementation)
    for name, value in attributes.items():
        setattr(function, name, value)
