"""The folder through which the submitting process and the tasks of a launch communicate.

It is on a shared file system, and only its user may enter it. Each file has one writer, and appears once it is complete.
submitit's own folder is next to it: it holds the batch script, the output of the tasks, and the values that they return.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch._private_files import make_private, open_private
from parawrap.processes.settings import Settings

__all__ = ["Address", "Folder", "Plan"]

_ROOT = "PARAWRAP_LAUNCH_DIR"
_SUBMITIT = "submitit"
_OVER = "over"


@dataclass(frozen=True)
class Plan:
    """A launch's settings for its tasks, except for the call.

    Attributes:
        name: The function's name.
        platform: The launch's platform.
        settings: The settings of the submitting process, without its environment.
        token: The secret of the launch.
        lease_s: The launch ends if the submitting process gives no sign of life for this many seconds.
    """

    name: str
    platform: Platform
    settings: Settings
    token: bytes
    lease_s: float


@dataclass(frozen=True)
class Address:
    """Where the tasks of one attempt meet.

    Attributes:
        hosts: The addresses of rank 0's machine. Each task may reach a different one.
        port: The port of rank 0's task.
    """

    hosts: Sequence[str]
    port: int


class Folder:
    """The folder of one launch. Stateless. Its parent folder is shared by submitit and all launches of an array."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.call = path / "call"
        self.log = path / "log"
        self.tasks_log = path / "tasks.log"
        self.submitit = path.parent / _SUBMITIT
        self._plan = path / "plan"
        self._sign = path / "sign-of-life"
        self._earlier = path / "earlier"

    @classmethod
    def planned(cls, name: str) -> Folder:
        """Return the folder that `new` would make, without the random suffix of its name."""
        root = Path(os.environ.get(_ROOT) or "~/.parawrap/launches").expanduser().absolute()
        return cls(root / "".join(each if each.isalnum() else "-" for each in name) / "0")

    @classmethod
    def new(cls, name: str, count: int) -> list[Folder]:
        """Make the folders for the launches of one job array, in PARAWRAP_LAUNCH_DIR or in the home folder.

        Raises:
            LaunchError: If the folders cannot be made.
        """
        planned = cls.planned(name)
        try:
            make_private(planned.root)
            array = Path(tempfile.mkdtemp(prefix=f"{planned.path.parent.name}-", dir=planned.root))  # mode 0700
        except OSError as error:
            msg = f"{planned.root} cannot be written to: {error}; set {_ROOT} to a folder that all nodes share"
            raise LaunchError(msg) from error
        folders: list[Folder] = [cls(array / str(number)) for number in range(count)]
        try:
            for path in (folders[0].submitit, *(folder.path for folder in folders)):
                path.mkdir(mode=0o700)
        except OSError as error:
            shutil.rmtree(array, ignore_errors=True)
            raise folders[0].unusable(error) from error
        return folders

    def task_files(self, job: str, rank: int) -> Any:
        """Return submitit's paths of a task: its output in ``stdout`` and ``stderr``, its value in ``result_pickle``."""
        import submitit.core.utils  # an optional package

        return submitit.core.utils.JobPaths(self.submitit, job_id=job, task_id=rank)

    @property
    def root(self) -> Path:
        """The folder that contains all launches."""
        return self.path.parent.parent

    def remove(self) -> None:
        """Remove the folder. The last launch of an array also removes the shared parent folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.parent.iterdir()} <= {_SUBMITIT}:
                shutil.rmtree(self.path.parent, ignore_errors=True)

    def unusable(self, error: OSError) -> LaunchError:
        """Return the exception for a folder that cannot be read or written."""
        return LaunchError(f"{self.path} cannot be used: {error}; free some space there, or set {_ROOT} to another folder")

    # -- from the submitting process to the tasks

    def write_plan(self, plan: Plan) -> None:
        _write(self._plan, pickle.dumps(plan))

    def read_plan(self) -> Plan:
        with open_private(self._plan) as file:
            plan: Plan = pickle.load(file)
        return plan

    def request(self, word: str) -> None:
        """Send a request to rank 0's task: ``cancel``, ``preempt-N``, or ``stacks-N`` with a number N."""
        _write(self.path / f"request-{word}")

    def requests(self) -> set[str]:
        """Return all requests so far."""
        return {name.removeprefix("request-") for name in self._names() if name.startswith("request-")}

    def write_sign_of_life(self, number: int) -> None:
        """Write a sign of life: the submitting process still waits for the results."""
        _write(self._sign, b"%d" % number)

    def sign_of_life(self) -> bytes | None:
        """Return the last number that was written, or None if it cannot be read."""
        with contextlib.suppress(OSError):
            return self._sign.read_bytes()
        return None

    # -- from the tasks; an attempt is named by the job's start and the turn of the loop in its script: "0-0"

    def write_address(self, attempt: str, address: Address) -> None:
        """Publish where the tasks of an attempt meet."""
        _write(self.path / f"address-{attempt}", pickle.dumps(address))

    def address(self, attempt: str) -> Address | None:
        """Return where the tasks of an attempt meet. Return None before it is published."""
        path = self.path / f"address-{attempt}"
        if path.name not in self._names():
            return None
        with open_private(path) as file:
            address: Address = pickle.load(file)
        return address

    def has_begun(self, start: int) -> bool:
        """True if an attempt of this start of the job has begun."""
        return self._count(f"address-{start}-") > 0

    def write_trouble(self, start: int, node: int, reason: str) -> None:
        """Report the reason why a node cannot take part."""
        _write(self.path / f"trouble-{start}-{node}", reason.encode())

    def troubles(self, start: int) -> list[str]:
        """Return the reasons why nodes cannot take part, one per node."""
        names = sorted(name for name in self._names() if name.startswith(f"trouble-{start}-"))
        return [(self.path / name).read_text() for name in names]

    def attempts(self) -> int:
        """Return the number of attempts that have begun."""
        return self._count("address-")

    def preemptions(self) -> int:
        """Return the number of starts of the job that ended by a preemption or by `requeue`."""
        return self._count("preempted-")

    def mark_preempted(self, start: int) -> None:
        """Mark this start as preempted: another start of the job follows, and this one does not count as a failure."""
        _write(self.path / f"preempted-{start}")

    def was_preempted(self, start: int) -> bool:
        """True if this start was marked as preempted."""
        return f"preempted-{start}" in self._names()

    def mark_over(self) -> None:
        """Mark the launch as over. The loop in the batch script then ends."""
        _write(self.path / _OVER)

    def note_earlier(self, earlier: list[str]) -> None:
        """Store how the attempts so far ended, for the next attempt."""
        _write(self._earlier, pickle.dumps(earlier))

    def earlier(self) -> list[str]:
        """Return what `note_earlier` stored."""
        if self._earlier.name not in self._names():
            return []
        with open_private(self._earlier) as file:
            earlier: list[str] = pickle.load(file)
        return earlier

    def answer(self, request: str, stacks: dict[int, str]) -> None:
        """Answer a request for stacks."""
        _write(self.path / f"answer-{request}", json.dumps(stacks).encode())

    def answer_to(self, request: str) -> dict[int, str] | None:
        """Return the answer to a request for stacks, or None if there is none yet."""
        path = self.path / f"answer-{request}"
        if path.name not in self._names():
            return None
        return {int(rank): text for rank, text in json.loads(path.read_bytes()).items()}

    def _names(self) -> list[str]:
        """List the folder. Network file systems cache the absence of a single file for a while, but not a listing."""
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries]

    def _count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self._names())


def _write(path: Path, data: bytes = b"") -> None:
    """Write a file under a temporary name, then rename it, so that it appears complete."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")  # another thread may write the same file
    temporary.write_bytes(data)
    temporary.rename(path)
