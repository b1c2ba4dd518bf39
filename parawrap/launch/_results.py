"""The results of a launch, and the handle on a launch that still runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Literal, TypeVar

__all__ = ["Launch", "RankResults", "State"]

R = TypeVar("R", covariant=True)

State = Literal["pending", "running", "finished", "failed", "cancelled"]


class RankResults(tuple[R, ...]):
    """The results of all ranks: ``results[0]`` is rank 0's value, ``len(results)`` the world size. A tuple.

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
        """Wait for the ranks, and return their results. May be called again.

        Args:
            timeout: seconds to wait; None waits until the end. The launch goes on after a timeout.

        Raises:
            TimeoutError: If the ranks still run after `timeout` seconds.
            BaseException: If a rank raised: the exception of the rank that failed first, with notes on the place.
            RankDiedError: If a rank was killed, or left without returning.
            LaunchError: If ranks could not be started, or wait for ranks that have left.
            LaunchTimeoutError: If the platform's ``timeout_min`` or ``hang_timeout_s`` is over.
            LaunchCancelledError: If `cancel` was called.
        """

    @abstractmethod
    def done(self) -> bool:
        """True if it has ended, ``upon_finish`` included."""

    @abstractmethod
    def cancel(self) -> None:
        """End the ranks, and wait until they have ended: at most the platform's ``grace_s``, and a moment."""

    @abstractmethod
    def preempt(self) -> None:
        """Rehearse the loss of the machines, without waiting for it. Without effect on a launch that has no machines yet.

        ``current_rank().should_checkpoint()`` becomes True in every rank. Ranks that have not left after the platform's
        ``grace_s`` are ended. Unless all of them have returned, the launch restarts; on Slurm the job is requeued.
        """

    @property
    @abstractmethod
    def state(self) -> State:
        """``"pending"`` (waits for machines), ``"running"``, ``"finished"``, ``"failed"`` or ``"cancelled"``."""

    @abstractmethod
    def logs(self, rank: int) -> str:
        """Return the output of a rank so far, standard output and error in order of arrival.

        Raises:
            IndexError: If there is no such rank.
        """

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each running rank, by global rank, or a text if a rank does not answer."""
