"""The results of a launch, and the handle of a running launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Literal, TypeVar

from parawrap._public import public
from parawrap.displays import Table, safe_repr, shortened

__all__ = ["Launch", "RankResults", "State"]

_LONGEST = 100  # characters of a value
_MOST_SHOWN = 8  # ranks

R = TypeVar("R", covariant=True)

State = Literal["pending", "running", "finished", "failed", "cancelled"]


@public
class RankResults(tuple[R, ...]):
    """A tuple with one result per rank: ``results[0]`` is the value that rank 0 returned.

    >>> RankResults(["a", "b"])[1]
    'b'
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[R]) -> RankResults[R]:
        return super().__new__(cls, tuple(values))

    def __repr__(self) -> str:
        shown = [shortened(safe_repr(value), _LONGEST) for value in self[:_MOST_SHOWN]]
        more = [f"... {len(self)} ranks"] if len(self) > _MOST_SHOWN else []
        return f"RankResults({', '.join([*shown, *more])})"

    def _repr_html_(self) -> str:
        rows = [(f"{rank}", type(value).__name__, shortened(safe_repr(value), _LONGEST)) for rank, value in enumerate(self)]
        title = f"results of {len(self)} rank{'s' * (len(self) != 1)}"
        return Table(title, ("rank", "type", "value"), rows, texts=("type", "value")).html()


@public
class Launch(ABC, Generic[R]):
    r"""The handle of running or ended ranks. ``.submit`` of a decorated function returns one. Thread-safe.

    Attributes:
        log_folder: The folder of this launch under ``Platform.console_logs``. None if ``console_logs`` is not set.

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

    def _repr_html_(self) -> str:
        """Return the state now: one row per rank with its state and its last line of output."""
        rows = [(f"{rank}", state, shortened(line, _LONGEST)) for rank, (state, line) in enumerate(self._states())]
        return Table(repr(self)[1:-1], ("rank", "state", "last line"), rows, texts=("state", "last line")).html()

    @abstractmethod
    def _states(self) -> list[tuple[str, str]]:
        """Return the state and the last line of output of each rank."""

    @abstractmethod
    def results(self, timeout: float | None = None) -> RankResults[R]:
        """Wait for the ranks and return their results. May be called again.

        Args:
            timeout: Seconds to wait. None waits until the launch ends. The launch continues after a timeout.

        Raises:
            TimeoutError: If the ranks still run after `timeout` seconds.
            BaseException: If a rank raised: the exception of the rank that failed first, with notes that name the rank.
            RankDiedError: If a rank was killed, or exited without returning.
            LaunchError: If ranks could not be started, or wait for ranks that have exited.
            LaunchTimeoutError: If the launch exceeded the platform's ``timeout_min`` or ``hang_timeout_s``.
            LaunchCancelledError: If `cancel` was called.
        """

    @abstractmethod
    def done(self) -> bool:
        """True if the launch has ended, including ``upon_finish``."""

    @abstractmethod
    def cancel(self) -> None:
        """End the ranks and wait until they have ended. Ranks that do not end within ``grace_s`` are killed."""

    @abstractmethod
    def preempt(self) -> None:
        """Simulate a preemption, without waiting for it. Has no effect if the launch is still pending.

        ``current_rank().should_checkpoint()`` becomes True in every rank. Ranks that still run after the platform's
        ``grace_s`` are ended. The launch then restarts, unless all ranks returned. On Slurm, the job is requeued.
        """

    @property
    @abstractmethod
    def state(self) -> State:
        """``"pending"`` (waiting for machines), ``"running"``, ``"finished"``, ``"failed"``, or ``"cancelled"``."""

    @abstractmethod
    def logs(self, rank: int) -> str:
        """Return a rank's output so far: standard output and standard error in order of arrival.

        Raises:
            IndexError: If `rank` is not a rank of this launch.
        """

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of each running rank, by global rank.

        If a rank does not answer in time, its text says so.
        """
