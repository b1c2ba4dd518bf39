"""What a launch gives back: the values of its ranks, or a handle on ranks that still run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Literal, TypeVar

__all__ = ["Launch", "RankResults", "State"]

R = TypeVar("R", covariant=True)

State = Literal["pending", "running", "finished", "failed", "cancelled"]


class RankResults(tuple[R, ...]):
    """What each rank returned: ``results[0]`` is rank 0's value, ``len(results)`` the world size. A tuple.

    >>> RankResults(["a", "b"])[1]
    'b'
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[R]) -> RankResults[R]:
        return super().__new__(cls, tuple(values))

    def __repr__(self) -> str:
        return f"RankResults({', '.join(map(repr, self))})"


class Launch(ABC, Generic[R]):
    r"""Ranks that run, or ran. From ``.submit`` of a decorated function; safe to use from any thread.

    Attributes:
        log_folder: the folder of this launch under ``Platform.console_logs``; None without that.

    >>> from parawrap import Platform, current_rank, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
    ... def train():
    ...     print("in rank", current_rank().global_rank)
    >>> launch = train.submit()
    >>> launch.results()
    RankResults(None, None)
    >>> launch.state, launch.done(), launch.logs(1)
    ('finished', True, 'in rank 1\n')
    """

    log_folder: Path | None = None

    @abstractmethod
    def results(self, timeout: float | None = None) -> RankResults[R]:
        """Wait for the ranks, and give what they returned. May be called again.

        Args:
            timeout: seconds to wait; None waits until the end. The launch goes on after a timeout.

        Raises:
            TimeoutError: the ranks still run after `timeout` seconds.
            BaseException: what the first rank that failed raised, with its own type and with notes on where.
            RankDiedError: a rank was killed, or left without returning.
            LaunchError: ranks could not be started, or wait for others that have left.
            LaunchTimeoutError: the platform's ``timeout_min`` or ``hang_timeout_s`` is over.
            LaunchCancelledError: `cancel` was called.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, ``upon_finish`` included."""

    @abstractmethod
    def cancel(self) -> None:
        """Have the ranks end, and wait until they have: at most the platform's ``grace_s``, and a moment."""

    @abstractmethod
    def preempt(self) -> None:
        """Rehearse the loss of the machines, without waiting for it; a launch that has none has nothing to lose.

        ``current_rank().should_checkpoint()`` becomes True in every rank, and those that have not left after the platform's
        ``grace_s`` are ended. Unless all of them have returned, the launch starts anew; on Slurm by a job that is requeued.
        """

    @property
    @abstractmethod
    def state(self) -> State:
        """``"pending"`` (waits for machines), ``"running"``, ``"finished"``, ``"failed"`` or ``"cancelled"``."""

    @abstractmethod
    def logs(self, rank: int) -> str:
        """All that a rank has written so far, to standard output and error, in the order of its arrival.

        Raises:
            IndexError: there is no such rank.
        """

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """By global rank, what every thread of each running rank is doing; a rank that cannot answer says so."""
