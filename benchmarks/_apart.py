"""Arms that live in processes of their own, which are asked in turn to time themselves.

What belongs to a process (the allocator, the threads of operators, what was autotuned or compiled) then belongs to one arm
alone. Whoever asks does not compute, and an arm that is not asked sleeps in a read: before it answers it waits until none
of its threads is running, because those of OpenMP spin on after their last operator, on a core that the next arm needs.

Two processes are one arm, because one process differs from the next by more than its calls do among themselves (where its
heap lies, for one). How the second one of an arm compares with its first tells what a figure is worth.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks._measure import Arm, Ratio, arm_of, in_turn, ratio_of

__all__ = [
    "ALLOCATOR",
    "AS_A_USER_GETS_IT",
    "KEPT",
    "Apart",
    "Burst",
    "Process",
    "Taken",
    "all_apart",
    "bursts_in_turn",
    "timed",
]

# glibc returns large buffers to the kernel unless told not to, and a comparison may then be one of page faults.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
KEPT: Mapping[str, str | None] = ALLOCATOR
AS_A_USER_GETS_IT: Mapping[str, str | None] = dict.fromkeys([*ALLOCATOR, "GLIBC_TUNABLES"])  # None: not set

_ROOT = Path(__file__).parent.parent
_QUIET_S = 0.002
_SHARE_OF_QUIET = 0.2
_PATIENCE_S = 1.0
_SETTLING = 2

Burst = list[float]
Process = tuple[str, int]  # an arm, and which of its processes


class Apart:
    """An object in a process of its own. What it is asked, it does there; the answer comes back as JSON has it.

    Args:
        made_by: ``module:callable``, called in the new process with `given`; its methods are what can be asked for.
        env: what is set for the process beside what there is; None takes away.
        given: keyword arguments, as JSON has them.
    """

    def __init__(self, made_by: str, env: Mapping[str, str | None] | None = None, **given: Any) -> None:
        words = {**os.environ, **(env or {})}
        self._made_by = made_by
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "benchmarks._apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in words.items() if value is not None},
            cwd=_ROOT,
            text=True,
        )
        self._send([made_by, given])
        self._is_ready = False

    def ask(self, method: str, **given: Any) -> Any:
        """What the object's method returns.

        Raises:
            RuntimeError: it raised, or the process has ended; the message has its traceback.
        """
        self.wait_until_ready()
        self._send([method, given])
        return self._answer(method)

    def wait_until_ready(self) -> None:
        """Processes start beside each other; this waits for one of them."""
        if not self._is_ready:
            self._is_ready = True
            self._answer("its start")

    def close(self) -> None:
        """End the process; what is still at work there is given up."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, words: Sequence[Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it has ended is what its answer tells
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def _answer(self, asked: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            msg = f"the process of {self._made_by} ended with exit code {self._process.wait()} when asked for {asked}"
            raise RuntimeError(msg)
        failed, value = json.loads(line)
        if failed:
            msg = f"{self._made_by} failed when asked for {asked}:\n{value}"
            raise RuntimeError(msg)
        return value


class Taken:
    """What bursts took, in us: for each process of each arm, the median call of each of its bursts, round by round."""

    def __init__(self, bursts: Mapping[Process, Sequence[float]]) -> None:
        self._bursts = bursts

    def of(self, arm: str) -> list[float]:
        """In each round, the mean of the arm's processes, as ratios have it."""
        processes = [bursts for (name, _), bursts in self._bursts.items() if name == arm]
        return [statistics.geometric_mean(bursts) for bursts in zip(*processes, strict=True)]

    def median(self, arm: str) -> float:
        return statistics.median(self.of(arm))

    def gain(self, arm: str, over: str) -> Ratio:
        """How many times as fast as another arm."""
        return ratio_of(self.of(over), self.of(arm))

    def itself(self, arm: str) -> Ratio:
        """How many times as fast the second process of an arm is as its first: 1.00, and what is not is noise."""
        return ratio_of(self._bursts[arm, 1], self._bursts[arm, 2])

    @property
    def arms(self) -> dict[str, Arm]:
        return {name: arm_of(self.of(name)) for name in dict.fromkeys(arm for arm, _ in self._bursts)}


@contextlib.contextmanager
def all_apart(starts: Mapping[str, Callable[[], Apart]], processes: int = 2) -> Iterator[dict[Process, Apart]]:
    """Start so many processes of every arm beside each other, and go on when the last is ready; they end with the block."""
    with ExitStack() as stack:
        started = {
            (name, number): stack.enter_context(start())
            for name, start in starts.items()
            for number in range(1, processes + 1)
        }
        for each in started.values():
            each.wait_until_ready()
        yield started


def bursts_in_turn(
    processes: Mapping[Process, Apart],
    *,
    calls: int,
    pairs: Mapping[str, str],
    within: float = 0.02,
    rounds: tuple[int, int] = (16, 60),
    seconds: float = 6.0,
) -> Taken:
    """Ask each process for a burst of so many calls, round by round.

    It goes on until the ratio of both arms of each of the `pairs` is known to `within`, or the most rounds or the seconds
    are over; fewer rounds than the first figure there never are.
    """
    bursts: dict[Process, list[float]] = {process: [] for process in processes}
    taken = Taken(bursts)
    deadline = time.monotonic() + seconds
    asked = {process: partial(_median_call, apart, calls) for process, apart in processes.items()}
    few, many = rounds
    for done in range(2, many + 1, 2):
        for process, values in in_turn(asked, 2).items():
            bursts[process] += values
        known = all(_is_known(taken.gain(arm, other), within) for arm, other in pairs.items())
        if done >= few and (known or time.monotonic() > deadline):
            break
    return taken


def _median_call(arm: Apart, calls: int) -> float:
    times: Burst = arm.ask("burst", calls=calls)
    return statistics.median(times)


def _is_known(ratio: Ratio, within: float) -> bool:
    return ratio.high - ratio.low <= 2 * within * ratio.median


def timed(work: Callable[[], object], calls: int, *, unsettled: bool = False) -> Burst:
    """What each of so many calls took, in microseconds; called in an arm's own process.

    Unless they are to be had unsettled, a quarter as many calls come before and are not counted: they find the caches as
    the arm before left them.
    """
    clock = time.perf_counter_ns
    for _ in range(0 if unsettled else max(_SETTLING, calls // 4)):
        work()
    times = []
    for _ in range(calls):
        start = clock()
        work()
        times.append((clock() - start) / 1e3)
    return times


def _become_quiet() -> None:
    """Wait until no thread of this process uses its core any more."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        used, since = time.process_time(), time.monotonic()
        time.sleep(_QUIET_S)
        if time.process_time() - used < _SHARE_OF_QUIET * (time.monotonic() - since):
            return


def _serve() -> None:
    """The process's own loop: a line is a question, a line is its answer. What is printed meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(work: Callable[[], Any]) -> bool:
        failed, value = False, None
        try:
            value = work()
        except Exception:  # noqa: BLE001 (whatever it was, the asker is told)
            failed, value = True, traceback.format_exc()
        _become_quiet()
        answers.write(json.dumps([failed, value]) + "\n")
        answers.flush()
        return failed

    made: list[Any] = []
    made_by, given = json.loads(sys.stdin.readline())
    module, _, name = made_by.partition(":")
    if answer(lambda: made.append(getattr(importlib.import_module(module), name)(**given))):
        return
    for line in sys.stdin:
        method, given = json.loads(line)
        answer(lambda method=method, given=given: getattr(made[0], method)(**given))


if __name__ == "__main__":
    _serve()
    sys.stdout.flush()
    os._exit(0)  # a block that is open has threads, which nobody waits for
