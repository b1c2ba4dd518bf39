"""The backend of launches on this machine and on Ray: this process supervises their ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from parawrap.launch._packed_call import Job
from parawrap.launch._platform import Platform
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.coordinator._latch import Latch
from parawrap.launch.coordinator._standstill import report_interval_s
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.rank._process_groups import StoreAddress
from parawrap.launch.rank._rank_assignment import Assignment, Surroundings
from parawrap.launch.rank._set_up_rank import Place

__all__ = ["AttemptsBackend", "assignments_of"]


class AttemptsBackend(ABC):
    """Implements `LaunchBackend` with the attempts of one launch. Subclasses start them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._platform = job.platform
        self._attempts: Attempts | None = None
        self._cancelled = Latch()

    @abstractmethod
    def _begin(self, transcripts: Sequence[Transcript], cleanup: ExitStack) -> Attempts:
        """Start the ranks. `cleanup` takes callbacks for the end of the launch."""

    @property
    def has_begun(self) -> bool:
        return self._attempts is not None

    def supervise(self, transcripts: Sequence[Transcript], on_begin: Callable[[], None]) -> Ending:
        try:
            with ExitStack() as cleanup:
                self._attempts = attempts = self._begin(transcripts, cleanup)
                on_begin()
                if self._cancelled.is_set():
                    attempts.cancel()
                ending = attempts.run()
        except BaseException as error:
            self._end_calls(error)
            raise
        self._end_calls(ending)
        return ending

    def _end_calls(self, ending: Ending | BaseException) -> None:
        if self._job.calls is not None:
            self._job.calls.end(ending)

    def cancel(self) -> None:
        self._cancelled.set()
        if self._attempts is not None:
            self._attempts.cancel()

    def preempt(self) -> None:
        if self._attempts is not None:
            self._attempts.preempt()

    def stacks(self) -> dict[int, str]:
        return {} if self._attempts is None else self._attempts.stacks()

    def state_of(self, rank: int) -> str:
        return "starting" if self._attempts is None else self._attempts.state_of(rank)


def assignments_of(
    platform: Platform,
    meeting: StoreAddress | None,
    surroundings: Surroundings,
    *,
    interface: str | None = None,
    may_idle: bool = False,
    stays: bool = False,
) -> Callable[[int, int], Assignment]:
    """Return a function that makes the assignment for a rank and a restart number.

    Ranks that `may_idle` do not report the state of their main thread. Ranks that stay report it during calls.
    """
    world_size, per_node = platform.world_size, platform.ranks_per_node

    def assignment(rank: int, restart: int) -> Assignment:
        node, local_rank = divmod(rank, per_node)
        return Assignment(
            place=Place(rank, local_rank, node, world_size, per_node, restart),
            meeting=meeting,
            surroundings=surroundings,
            grace_s=platform.grace_s,
            report_s=math.inf if may_idle else report_interval_s(platform),
            on_cluster=surroundings.environ is None,
            interface=interface,
            stays=stays,
        )

    return assignment
