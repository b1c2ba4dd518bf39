"""The folder through which the submitting process and the nodes of a launch communicate.

It is on a shared file system, and only its user may enter it. Each file has one writer. A file appears only once it is
complete, except for journals, which grow.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.clusters._connections import Address
from parawrap.launch.messages._private_files import open_private
from parawrap.launch.rank._rank_assignment import Surroundings

__all__ = ["Folder", "Plan"]

_ROOT = "PARAWRAP_LAUNCH_DIR"
_SUBMITIT = "submitit"


@dataclass(frozen=True)
class Plan:
    """A launch's settings for its nodes, except for the call.

    Attributes:
        name: The function's name.
        platform: The launch's platform.
        surroundings: The surroundings of the submitting process, without its environment.
        token: The secret of the launch.
        lease_s: The launch ends if the submitting process gives no sign of life for this many seconds.
    """

    name: str
    platform: Platform
    surroundings: Surroundings
    token: bytes
    lease_s: float


class Folder:
    """The folder of one launch. Stateless. Its parent folder is shared by submitit and all launches of an array."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.call = path / "call"
        self.submitit = path.parent / _SUBMITIT
        self._plan = path / "plan"
        self._sign = path / "sign-of-life"

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
            planned.root.mkdir(parents=True, exist_ok=True)
            array = Path(tempfile.mkdtemp(prefix=f"{planned.path.parent.name}-", dir=planned.root))  # mode 0700
        except OSError as error:
            msg = f"{planned.root} cannot be written to: {error}; set {_ROOT} to a folder that all nodes share"
            raise LaunchError(msg) from error
        folders: list[Folder] = [cls(array / str(number)) for number in range(count)]
        try:
            for folder in folders:
                folder.path.mkdir(mode=0o700)
        except OSError as error:
            shutil.rmtree(array, ignore_errors=True)
            raise folders[0].unusable(error) from error
        return folders

    @property
    def root(self) -> Path:
        """The folder that contains all launches."""
        return self.path.parent.parent

    def _names(self) -> list[str]:
        """List the folder. Network file systems cache the absence of a single file for a while, but not a listing."""
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries]

    def remove(self) -> None:
        """Remove the folder. The last launch of an array also removes the shared parent folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            if {path.name for path in self.path.parent.iterdir()} <= {_SUBMITIT}:
                shutil.rmtree(self.path.parent, ignore_errors=True)

    # -- from the submitting process to the nodes

    def write_plan(self, plan: Plan) -> None:
        _write(self._plan, pickle.dumps(plan))

    def read_plan(self) -> Plan:
        with open_private(self._plan) as file:
            plan: Plan = pickle.load(file)
        return plan

    def request(self, word: str) -> None:
        """Send a request to the nodes: ``cancel``, ``stacks-N``, or ``preempt-N`` with a number N."""
        _write(self.path / f"request-{word}")

    def requests(self) -> list[str]:
        """Return all requests so far."""
        return [name.removeprefix("request-") for name in self._names() if name.startswith("request-")]

    def rehearsals(self) -> int:
        """Return the number of requested preemptions."""
        return sum(request.startswith("preempt-") for request in self.requests())

    def write_sign_of_life(self, number: int) -> None:
        """Write a sign of life: the submitting process still waits for the results."""
        _write(self._sign, b"%d" % number)

    def sign_of_life(self) -> bytes | None:
        """Return the last number that was written, or None if it cannot be read."""
        with contextlib.suppress(OSError):
            return self._sign.read_bytes()
        return None

    # -- from the nodes, at each start of the job; `start` counts from 0

    def journal(self, start: int) -> Path:
        """Return the path of the first node's journal."""
        return self.path / f"journal-{start}"

    def has_journal(self, start: int) -> bool:
        """True if the journal exists."""
        return f"journal-{start}" in self._names()

    def parcel(self, start: int, rank: int) -> Path:
        """Return the path for a rank's result or exception."""
        return self.path / f"parcel-{start}-{rank}"

    def write_address(self, start: int, address: Address) -> None:
        """Publish where the first node listens."""
        _write(self.path / f"address-{start}", json.dumps([address.hosts, address.port]).encode())

    def address(self, start: int, token: bytes) -> Address | None:
        """Return where the first node listens. Return None before the address is published."""
        path = self.path / f"address-{start}"
        if path.name not in self._names():
            return None
        hosts, port = json.loads(path.read_bytes())
        return Address(tuple(hosts), port, token)

    def troubles(self, start: int) -> list[str]:
        """Return the reasons why nodes cannot take part, one per node."""
        names = sorted(name for name in self._names() if name.startswith(f"trouble-{start}-"))
        return [(self.path / name).read_text() for name in names]

    def write_trouble(self, start: int, node: int, reason: str) -> None:
        """Report the reason why this node cannot take part."""
        _write(self.path / f"trouble-{start}-{node}", reason.encode())

    def mark_preempted(self, start: int) -> None:
        """Mark this start as preempted: another start of the job follows, and this one does not count as a failure."""
        _write(self.path / f"preempted-{start}")

    def was_preempted(self, start: int) -> bool:
        """True if this start was marked as preempted."""
        return f"preempted-{start}" in self._names()

    def note_restarts(self, count: int, failures: int, rehearsals: int) -> None:
        """Store the numbers of restarts, failures, and requested preemptions for the job's next start."""
        _write(self.path / "restarts", json.dumps([count, failures, rehearsals]).encode())

    def restarts(self) -> tuple[int, int, int]:
        """Return the numbers that `note_restarts` stored, or zeros."""
        if "restarts" not in self._names():
            return 0, 0, 0
        count, failures, rehearsals = json.loads((self.path / "restarts").read_bytes())
        return count, failures, rehearsals

    def unusable(self, error: OSError) -> LaunchError:
        """Return the exception for a folder that cannot be read or written."""
        return LaunchError(f"{self.path} cannot be used: {error}; free some space there, or set {_ROOT} to another folder")


def _write(path: Path, data: bytes = b"") -> None:
    """Write a file under a temporary name, then rename it, so that it appears complete."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")  # another thread may write the same file
    temporary.write_bytes(data)
    temporary.rename(path)
