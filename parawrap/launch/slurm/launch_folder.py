"""The folder through which the submitting process and the tasks of a launch communicate.

    NAME-XXXXXXXX/          private; one per job or job array
      submitit/             the batch script, and for each task its output, and how its rank ended
      0/  1/  ...           one per launch:
        call                what the ranks run, from the submitting process
        address-START       where the ranks of a start of the job meet, from rank 0
        begun-START         the ranks have met
        preempted-START     this start was preempted, or its ranks requested the next one: it
                            has not failed
        stacks-RANK         what faulthandler wrote

It is on a file system that the submitting process and all nodes share.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
from pathlib import Path

from parawrap.errors import LaunchError
from parawrap.processes.process_groups import StoreAddress

_ROOT = "PARAWRAP_LAUNCH_DIR"
_SUBMITIT = "submitit"


class Folder:
    """The folder of one launch. Stateless."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.call = path / "call"
        self.submitit = path.parent / _SUBMITIT

    @classmethod
    def planned(cls, name: str) -> Folder:
        """Return the folder that `new` would make, without the random suffix of its name."""
        root = Path(os.environ.get(_ROOT) or "~/.parawrap/launches").expanduser().absolute()
        return cls(root / "".join(each if each.isalnum() else "-" for each in name) / "0")

    @classmethod
    def new(cls, name: str, count: int) -> list[Folder]:
        """Make the folders for the launches of one job array, in PARAWRAP_LAUNCH_DIR or in the home
        folder.

        Raises:
            LaunchError: If the folders cannot be made.
        """
        planned = cls.planned(name)
        try:
            planned.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            array = Path(
                tempfile.mkdtemp(prefix=f"{planned.path.parent.name}-", dir=planned.root)
            )  # mode 0700
            folders: list[Folder] = [cls(array / str(number)) for number in range(count)]
            for path in (folders[0].submitit, *(folder.path for folder in folders)):
                path.mkdir()
        except OSError as error:
            msg = (
                f"{planned.root} cannot be written to: {error}; set {_ROOT} to a folder that all "
                "nodes share"
            )
            raise LaunchError(msg) from error
        return folders

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

    def stacks_of(self, rank: int) -> Path:
        """Return the file with the stacks of a rank."""
        return self.path / f"stacks-{rank}"

    def write_address(self, start: int, address: StoreAddress) -> None:
        """Publish where the ranks of a start of the job meet."""
        path = self.path / f"address-{start}"
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(address))
        part.rename(path)

    def address(self, start: int) -> StoreAddress | None:
        """Return where the ranks of a start meet. Return None before it is published."""
        return (
            pickle.loads((self.path / f"address-{start}").read_bytes())
            if self.has("address", start)
            else None
        )

    def mark(self, topic: str, start: int) -> None:
        """Note that the ranks of a start have "begun", or that it was "preempted"."""
        (self.path / f"{topic}-{start}").touch()

    def has(self, topic: str, start: int) -> bool:
        """True if a start has this file.

        Network file systems cache the absence of a single file, but not a listing.
        """
        return f"{topic}-{start}" in os.listdir(self.path)  # noqa: PTH208 (names only)

    def mark_failed(self, start: int) -> None:
        """Note that a start has ended by a failure, although it was preempted before."""
        (self.path / f"preempted-{start}").unlink(missing_ok=True)

    def failures(self, start: int) -> int:
        """Return the number of starts before this one that ended by a failure, such as the loss of
        a node.
        """
        return sum(not self.has("preempted", each) for each in range(start))
