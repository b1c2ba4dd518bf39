"""The call that a launch makes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.shares import CoreShare
from parawrap.processes.script_globals import PackedCall, SentScript

# Flags of functions whose calls return a coroutine or a generator
_SUSPENDS = (
    inspect.CO_COROUTINE
    | inspect.CO_GENERATOR
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)

DECORATED: dict[type, Callable[..., Job]] = {}
"""By the class of a decorated function: a function that makes a `Job` from a call of it."""

_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Job:
    """One call of a function on a platform. Frozen; may be launched any number of times.

    Attributes:
        bound_to: The object of a bound method, as a tuple of one; empty for a function.
        sent_as: An object to send instead of the function, which unpickles as the function; None to
            send the function.
        number: The number of the launch among those of `map`, which stands in front of its output;
            None for other launches.
        cores: The cores of the launch; None for all.
    """

    platform: PlatformFields
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    sent_as: Any = None
    bound_to: tuple[Any, ...] = ()
    number: int | None = None
    cores: CoreShare | None = None

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def call(self) -> Any:
        """Call the function in this process."""
        return self.function(*self.bound_to, *self.args, **self.kwargs)

    def pack(self, script: SentScript | None = None) -> PackedCall:
        """Pickle the call, with the globals that its ranks lack.

        Raises:
            UnsendableError: If the function or an argument cannot be pickled. The message names the
                unpicklable part.
        """
        function = self.function if self.sent_as is None else self.sent_as
        return (script or SentScript()).pack_call(function, self.args, self.kwargs, self.bound_to)

    def finish(self) -> None:
        """Call ``upon_finish`` after all ranks have returned.

        Log its exception, so that the results are not lost.
        """
        try:
            if self.platform.upon_finish is not None:
                self.platform.upon_finish()
        except Exception:  # noqa: BLE001 (user code may raise anything)
            _log.exception(
                "upon_finish failed after all ranks of %s had returned; their results are kept",
                self.name,
            )


def check_function(function: Any, opening: str = "ranks cannot run") -> None:
    """Raise TypeError if ranks cannot run this object, or cannot send what it returns.

    `opening` begins the message.
    """
    if not callable(function):
        msg = f"{opening} {function!r}, which is not callable. Give it a function"
        raise TypeError(msg)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & _SUSPENDS:
        msg = (
            f"{function.__qualname__} returns a coroutine or a generator, which a rank cannot "
            "send. Return values instead"
        )
        raise TypeError(msg)


def check_signature(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise Python's TypeError if the arguments do not match, before any rank starts."""
    try:
        # Not of the function in `__wrapped__`: a decorator with `functools.wraps` may pass it other
        # arguments than those of the call
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        # Some builtins have no signature: their call in the rank raises the error
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        # The words of Python, with the name of the function
        msg = f"{getattr(function, '__name__', function)}() {error}"
        takes_class = [*signature.parameters][:1] == ["cls"]
        lacks_class = bool(args) and not isinstance(args[0], type)
        # The function of a classmethod that Python has not bound. Until 3.12, @classmethod bound
        # the methods of the decorated function too, such as `submit`
        if takes_class and lacks_class:
            msg += (
                ". Since Python 3.13, write @wrapper(...) above @classmethod to use submit, map, "
                "dry_run, and inline"
            )
        raise TypeError(msg) from None
