"""The exceptions that parawrap raises.

An exception that *your* code raises inside a lane keeps its type and traceback. parawrap adds a
note that names the lane, the device, and the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from signal import Signals

ADDRESS = ""  # the address of the documentation; setup.py sets it in a build
# The ends that `ParawrapError.__str__` adds to texts. An error that quotes another error drops the
# end of the quoted one
_PLACES = re.compile(r' \((?:the page "Errors" of the documentation, \w+|\S+/errors\.html#\w+)\)')


def add_note(error: BaseException, note: str) -> None:
    """Add a note like ``error.add_note``, also to an exception whose class refuses new attributes.

    >>> error = ValueError("too long")
    >>> add_note(error, "in lane 1")
    >>> error.__notes__
    ['in lane 1']
    """
    # A new list: the old one may be shared with a copy of the exception
    error.__dict__["__notes__"] = [*error.__dict__.get("__notes__", ()), note]


def name_section(page: str, title: str, section: str) -> str:
    """Return where a section of the documentation is: an address, or the titles in words."""
    if ADDRESS:
        return f"{ADDRESS}/{page}.html#{section.lower().replace(' ', '-')}"
    return f'the page "{title}" of the documentation, section "{section}"'


class ParawrapError(Exception):
    """The base class of every exception that parawrap defines.

    The text of an exception ends with its section in the documentation: its address, if the package
    was built with one, or the title of the page.
    """

    # A constructor with a parameter of this name, because DataLoader raises an error of its workers
    # again as ``kind(message=...)``
    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        """The text without its section in the documentation, and without those of quoted errors."""
        return _PLACES.sub("", super().__str__())

    def __str__(self) -> str:
        name = type(self).__name__
        place = f'the page "Errors" of the documentation, {name}'
        if ADDRESS:
            place = f"{ADDRESS}/errors.html#{name.lower()}"
        return f"{self.message} ({place})"


class ShardError(ParawrapError, ValueError):
    """A call cannot be cut into shards.

    The message names the argument, its rows, and the remedy.
    """


class GatherError(ParawrapError, ValueError):
    """The outputs of several lanes cannot be joined.

    The message names the place in the output and the remedy.
    """


class VerifyError(ParawrapError, RuntimeError):
    """A parallel output differs from the plain one by more than rounding.

    Raised by `parawrap.testing.check_rowwise`.
    """


class ShapeError(ParawrapError, ValueError):
    """A compiled model does not accept a shape or dtype.

    The message names both the given and the compiled one.
    """


class ReplicaError(ParawrapError, RuntimeError):
    """A module cannot be replicated on a device. The message names the submodule or attribute."""


class SessionError(ParawrapError, RuntimeError):
    """A block or a trace is used after its end, or workers cannot make a call.

    The message names the remedy.
    """


class ResumeError(ParawrapError, RuntimeError):
    """A stream cannot resume: source, target, or folder is not that of the earlier run."""


class DeviceListError(ParawrapError, ValueError):
    """A device list is empty, mixes types, or has an entry that is not a device on any machine."""


class DeviceUnavailableError(ParawrapError, RuntimeError):
    """This machine does not have a device. The message names the devices that it has."""


class PlatformError(ParawrapError, ValueError):
    """A field of ``Platform`` has a value that is not allowed.

    The message names the field, the value, and valid values.
    """


class LaunchError(ParawrapError, RuntimeError):
    """A launch could not start or finish."""


class RankDiedError(LaunchError):
    """A rank was killed by a signal, or exited without returning a result.

    Attributes:
        rank: The global rank.
        signal: The signal that killed the rank, as a number if it has no name. None if the rank
            exited.
        exit_code: The exit code. None if a signal killed the rank.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        signal: Signals | int | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal
        self.exit_code = exit_code


class LaunchTimeoutError(LaunchError):
    """Ranks ran for longer than ``timeout_min``, or were silent for longer than ``hang_timeout_s``.

    Attributes:
        stacks: The stacks of all threads of each rank, by global rank.
    """

    def __init__(self, message: str, *, stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = dict(stacks or {})


class LaunchCancelledError(LaunchError):
    """A launch was cancelled, so it has no results."""


class UnsendableError(LaunchError, TypeError):
    """An argument or a result cannot be sent to another process.

    The message names the part that cannot be sent.
    """
