"""Every exception that parawrap raises of its own accord.

An exception raised by *your* code inside a lane is never replaced by one of these: it reaches you with its own type
and traceback and gains a note that names the lane, the device and the shard.

::

    ParawrapError
    ├── ShardError (ValueError)                 a call that cannot be cut: rows disagree, an ambiguous list
    ├── GatherError (ValueError)                outputs that cannot be joined: ragged shapes, unequal keys
    ├── VerifyError (RuntimeError)              verify=True found a parallel output that differs from the plain one
    ├── ShapeError (ValueError)                 a compiled model does not take this shape
    ├── ReplicaError (RuntimeError)             a module of which no replica can be made
    ├── SessionError (RuntimeError)             a block used after it was closed, or closed out of order
    ├── DeviceListError (ValueError)            a list of devices that makes no sense: empty, or of mixed types
    ├── DeviceUnavailableError (RuntimeError)   a device that this machine does not have
    ├── PlatformError (ValueError)              a field of Platform with a value that is not allowed
    └── LaunchError (RuntimeError)              a launch that could not be started or finished
        ├── RankDiedError                       a rank that was killed, or left without a result
        ├── LaunchTimeoutError                  ranks that took, or were silent for, too long
        ├── LaunchCancelledError                the results of a launch that was cancelled
        └── UnsendableError (TypeError)         an argument or a result that cannot be sent to another process
"""

from __future__ import annotations

from collections.abc import Mapping
from signal import Signals


class ParawrapError(Exception):
    """The root: ``except ParawrapError`` catches everything that parawrap itself raises."""


class ShardError(ParawrapError, ValueError):
    """A call that cannot be cut into shards; the message names the argument, its rows and the cure."""


class GatherError(ParawrapError, ValueError):
    """Outputs of several lanes that cannot be joined; the message names the place in the output and the cure."""


class VerifyError(ParawrapError, RuntimeError):
    """With ``verify=True``: the parallel output differs from the plain one by more than rounding."""


class ShapeError(ParawrapError, ValueError):
    """A compiled model that does not take this shape or dtype; the message names both."""


class ReplicaError(ParawrapError, RuntimeError):
    """A module of which no replica can be made on a device; the message names the submodule."""


class SessionError(ParawrapError, RuntimeError):
    """A parallel block used after it was closed, or closed while a later one on the same model is still open."""


class DeviceListError(ParawrapError, ValueError):
    """A list of devices that makes no sense on any machine: empty, of mixed types, or with an entry of no device."""


class DeviceUnavailableError(ParawrapError, RuntimeError):
    """A device that this machine does not have; the message names those that it has."""


class PlatformError(ParawrapError, ValueError):
    """A field of ``Platform`` whose value is not allowed; the message names the field, the value and what is."""


class LaunchError(ParawrapError, RuntimeError):
    """A launch that could not be started or finished."""


class RankDiedError(LaunchError):
    """A rank that was killed by a signal, or left without handing back a result.

    Attributes:
        rank: the global rank.
        signal: what killed it (a number, where the signal has no name), None where it left by itself.
        exit_code: what it left with, None where it was killed.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, signal: Signals | int | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal
        self.exit_code = exit_code


class LaunchTimeoutError(LaunchError):
    """Ranks that took longer than ``timeout_min``, or were silent for longer than ``hang_timeout_s``.

    Attributes:
        stacks: by global rank, what each of its threads was doing.
    """

    def __init__(self, message: str, *, stacks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = dict(stacks or {})


class LaunchCancelledError(LaunchError):
    """The results were asked of a launch that was cancelled."""


class UnsendableError(LaunchError, TypeError):
    """An argument or a result that cannot be sent to another process, named by its address."""
