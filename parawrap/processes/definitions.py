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
    """Return cloudpickle's reduction of a class with what it lacks."""
    if not isinstance(reduced, tuple) or reduced[0] not in (make_class, make_enum):
        return reduced
    make, args, *rest = reduced
    if make is make_class and "__slots__" in vars(cls):
        _constructor, _name, bases, namespace, *_ = args
        # NamedTuple has no slots. cloudpickle sets those of others when it is too late.
        if NamedTuple not in bases:
            namespace["__slots__"] = vars(cls)["__slots__"]
    if next(_owners_of_hooks(cls.__bases__), None) is not None:
        return _make_without_hooks, (make, *args), *rest
    return reduced


def _owners_of_hooks(bases: Iterable[Any]) -> Iterator[type]:
    """Yield the classes with an `__init_subclass__` that may run for a new class of these bases.

    A class may come twice.

    The hooks of the standard library, such as Generic's, need no arguments and register nothing.
    """
    for base in bases:
        # an original base may be an alias such as Generic[T]
        for owner in getattr(getattr(base, "__origin__", base), "__mro__", ()):
            module = str(owner.__module__).partition(".")[0]
            if _HOOK in vars(owner) and module not in sys.stdlib_module_names:
                yield owner


# Two threads that borrow the hook of one base would each give back what the other has set. A fork
# takes the lock too, so that no child keeps a borrowed hook. It is reentrant, because a metaclass
# may unpickle another class.
_borrows_hooks = threading.RLock()


def _make_without_hooks(make: Callable[..., type], *args: Any) -> type:
    """Make a class without running `__init_subclass__`.

    The class has run it where it was defined, and what the hook has set in the class follows. The
    arguments of the class statement, which a hook may require, are not known any more.

    Type creation always calls the hook of the next class, so the bases lend theirs for that time.
    """
    if make is make_class:
        _constructor, name, bases, *_ = args
    else:
        bases, name, *_ = args
    borrowed: list[tuple[type, Any]] = []
    with _borrows_hooks:
        try:
            for owner in _owners_of_hooks(bases):
                hook = vars(owner)[_HOOK]
                try:
                    # A trial, which changes nothing. Past the metaclass, which may refuse it
                    type.__setattr__(owner, _HOOK, hook)
                except TypeError:
                    continue  # a class in C
                # Before the hook is replaced: Ctrl-C between the two lines does no harm
                borrowed.append((owner, hook))
                type.__setattr__(owner, _HOOK, _stand_in_for(hook, name))
            return make(*args)
        finally:
            _give_back(borrowed)


def _stand_in_for(hook: Any, name: str) -> Any:
    """Return a hook that skips the class that this thread makes, and runs for all others."""
    maker = threading.get_ident()

    def __init_subclass__(cls: type, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if threading.get_ident() != maker or cls.__name__ != name:
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
            borrowed.pop()
        except BaseException as reason:  # noqa: BLE001 (raised once all are restored)
            error = error or reason
    if error is not None:
        raise error


os.register_at_fork(
    before=_borrows_hooks.acquire,
    after_in_parent=_borrows_hooks.release,
    # by the thread that forked, which has acquired it
    after_in_child=_borrows_hooks.release,
)


# -- generic functions

_GENERIC: Any = functools.singledispatch(len)
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def is_generic(value: Any) -> bool:
    """True for a function that functools.singledispatch returned."""
    # each is made from the same code
    return type(value) is types.FunctionType and value.__code__ is _GENERIC.__code__


def reduce_generic(function: Any) -> tuple[Any, ...]:
    """Reduce a generic function to its implementations and attributes.

    Its cache has weak references, which cannot be pickled. The implementations may use the function
    itself, so they are state, which is pickled afterwards.
    """
    own = {name: value for name, value in vars(function).items() if name not in vars(_GENERIC)}
    own["__wrapped__"] = function.__wrapped__
    names = {name: getattr(function, name) for name in _NAMES}
    state = dict(function.registry), names | own
    return _new_generic, (function.__name__,), state, None, None, _set_generic_state


def _new_generic(name: str) -> Any:
    def fallback(*args: Any) -> Any:
        raise NotImplementedError  # replaced before the first call

    fallback.__name__ = name  # which singledispatch keeps for its errors
    return functools.singledispatch(fallback)


def _set_generic_state(
    function: Any, state: tuple[Mapping[type, Callable[..., Any]], Mapping[str, Any]]
) -> None:
    implementations, attributes = state
    for cls, implementation in implementations.items():
        function.register(cls, implementation)
    for name, value in attributes.items():
        setattr(function, name, value)
