"""The folder of one launch on a cluster, by which the submitting process and the nodes tell each other what they must.

It lies on a file system that all of them see, and nobody else may enter it. Every file is written by one of them, and is
there only once it is whole; but for journals, which grow.
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
from parawrap.launch.clusters._network import Address
from parawrap.launch.parcels._private_files import open_private
from parawrap.launch.ranks._assignment import Surroundings

__all__ = ["Folder", "Plan"]

_ROOT = "PARAWRAP_LAUNCH_DIR"
_SUBMITIT = "submitit"


@dataclass(frozen=True)
class Plan:
    """What the nodes of a launch know of it, beside the call.

    Attributes:
        name: of the function.
        platform: of the launch.
        surroundings: of the submitting process, without its environment.
        token: what nodes have to know to be let in.
        lease_s: without a sign of the submitting process for so long, nobody waits for the results any more.
    """

    name: str
    platform: Platform
    surroundings: Surroundings
    token: bytes
    lease_s: float


class Folder:
    """The folder of one launch: a numbered one, in a folder that it shares with submitit and the launches of one array.

    Has no state of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.call = path / "call"
        self.submitit = path.parent / _SUBMITIT
        self._plan = path / "plan"
        self._sign = path / "sign-of-life"

    @classmethod
    def planned(cls, name: str) -> Folder:
        """Return the folder that `new` would make, except for the random end of its name."""
        root = Path(os.environ.get(_ROOT) or "~/.parawrap/launches").expanduser().absolute()
        return cls(root / "".join(each if each.isalnum() else "-" for each in name) / "0")

    @classmethod
    def new(cls, name: str, count: int) -> list[Folder]:
        """Make the folders of launches that one job array runs, in PARAWRAP_LAUNCH_DIR or in the home folder.

        Raises:
            LaunchError: If they cannot be made.
        """
        planned = cls.planned(name)
        try:
            planned.root.mkdir(parents=True, exist_ok=True)
            array = Path(tempfile.mkdtemp(prefix=f"{planned.path.parent.name}-", dir=planned.root))  # mode 0700
            folders: list[Folder] = [Folder(array / str(number)) for number in range(count)]
            for folder in folders:
                folder.path.mkdir(mode=0o700)
        except OSError as error:
            msg = f"{planned.root} cannot be written to: {error}; name a folder that all nodes share in {_ROOT}"
            raise LaunchError(msg) from error
        return folders

    @property
    def root(self) -> Path:
        """The folder of all launches."""
        return self.path.parent.parent

    def _names(self) -> list[str]:
        """What is in it now. A network's file system remembers for a while that a file was not there, but not this."""
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries]

    def remove(self) -> None:
        """Remove the folder; the last one of an array removes what they share."""
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
        """Ask the nodes for something: ``cancel``, or ``stacks-`` or ``preempt-`` and a number."""
        _write(self.path / f"request-{word}")

    def requests(self) -> list[str]:
        """What was asked for, whenever that was."""
        return [name.removeprefix("request-") for name in self._names() if name.startswith("request-")]

    def rehearsals(self) -> int:
        """How often a preemption was asked for."""
        return sum(request.startswith("preempt-") for request in self.requests())

    def give_sign_of_life(self, number: int) -> None:
        """Tell the nodes that somebody waits for the results."""
        _write(self._sign, b"%d" % number)

    def sign_of_life(self) -> bytes | None:
        """The last number that was given."""
        with contextlib.suppress(OSError):
            return self._sign.read_bytes()
        return None

    # -- from the nodes, each time that the job is started; `start` counts from 0

    def journal(self, start: int) -> Path:
        """All that the first node tells."""
        return self.path / f"journal-{start}"

    def has_journal(self, start: int) -> bool:
        """Whether it was begun."""
        return f"journal-{start}" in self._names()

    def parcel(self, start: int, rank: int) -> Path:
        """What a rank returned or raised."""
        return self.path / f"parcel-{start}-{rank}"

    def write_address(self, start: int, address: Address) -> None:
        """Where the other nodes find the first."""
        _write(self.path / f"address-{start}", json.dumps([address.hosts, address.port]).encode())

    def address(self, start: int, token: bytes) -> Address | None:
        """What was written; None as long as nothing was."""
        path = self.path / f"address-{start}"
        if path.name not in self._names():
            return None
        hosts, port = json.loads(path.read_bytes())
        return Address(tuple(hosts), port, token)

    def troubles(self, start: int) -> list[str]:
        """What keeps nodes from taking part, in the words of those that could not."""
        names = sorted(name for name in self._names() if name.startswith(f"trouble-{start}-"))
        return [(self.path / name).read_text() for name in names]

    def write_trouble(self, start: int, node: int, what: str) -> None:
        """Tell what keeps this node from taking part."""
        begun = self.path / f".trouble-{node}"
        begun.write_text(what)
        begun.rename(self.path / f"trouble-{start}-{node}")

    def mark_preempted(self, start: int) -> None:
        """Note that this start of the job is going to be followed by another one, and that this is as it should be."""
        _write(self.path / f"preempted-{start}")

    def was_preempted(self, start: int) -> bool:
        """Whether that was noted."""
        return f"preempted-{start}" in self._names()

    def note_restarts(self, count: int, failures: int, rehearsals: int) -> None:
        """Keep, for the next start of the job, how often ranks were started anew, for a failure, and for a rehearsal."""
        _write(self.path / "restarts", json.dumps([count, failures, rehearsals]).encode())

    def restarts(self) -> tuple[int, int, int]:
        """What was noted last."""
        if "restarts" not in self._names():
            return 0, 0, 0
        count, failures, rehearsals = json.loads((self.path / "restarts").read_bytes())
        return count, failures, rehearsals

    def unusable(self, error: OSError) -> LaunchError:
        """What to raise where something cannot be read or written here."""
        return LaunchError(f"{self.path} cannot be used: {error}; make room there, or name another folder in {_ROOT}")


def _write(path: Path, data: bytes = b"") -> None:
    """Under another name first: whoever finds the file finds all of it."""
    begun = path.with_name(f".{path.name}-{secrets.token_hex(4)}")  # others may write it at the same time
    begun.write_bytes(data)
    begun.rename(path)
