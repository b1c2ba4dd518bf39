"""The folder through which the submitting process and the tasks of a launch communicate.

    NAME-XXXXXXXX/          private; one per job or job array
      submitit/             the batch script, and for each task its output, and how its rank ended
      0/  1/  ...           one per launch:
        call                what the ranks run, from the submitting process
        address-START       where the ranks of a start of the job meet, from rank 0
        begun-START         the ranks have met
        preempted-START     this start was preempted, or its ranks requested the next one
        failed-START        it has failed nevertheless
        stacks-RANK         what faulthandler wrote

It is on a file system that the submitting process and all nodes share. Each file has one writer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchError
from parawrap.processes.groups import StoreAddress

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
        """Make the folders for the launches of one job array, in PARAWRAP_LAUNCH_DIR or in the home folder.

        Raises:
            LaunchError: If the folders cannot be made.
        """
        root = cls.planned(name).root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            array = Path(tempfile.mkdtemp(prefix=f"{cls.planned(name).path.parent.name}-", dir=root))  # mode 0700
            folders: list[Folder] = [cls(array / str(number)) for number in range(count)]
            for path in (folders[0].submitit, *(folder.path for folder in folders)):
                path.mkdir()
        except OSError as error:
            msg = f"{root} cannot be written to: {error}; set {_ROOT} to a folder that all nodes share"
            raise LaunchError(msg) from error
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

    def write_address(self, start: int, address: StoreAddress) -> None:
        """Publish where the ranks of a start of the job meet."""
        path = self.path / f"address-{start}"
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(address))
        part.rename(path)

    def address(self, start: int) -> StoreAddress | None:
        """Return where the ranks of a start meet. Return None before it is published."""
        path = self.path / f"address-{start}"
        return pickle.loads(path.read_bytes()) if path.name in self._names() else None

    def mark_begun(self, start: int) -> None:
        """Note that the ranks of a start have met, and run the function."""
        (self.path / f"begun-{start}").touch()

    def has_begun(self, start: int) -> bool:
        """True if the ranks of a start have met."""
        return f"begun-{start}" in self._names()

    def mark_preempted(self, start: int) -> None:
        """Note that the job is preempted, or that its ranks request the next start: this one did not fail."""
        (self.path / f"preempted-{start}").touch()

    def mark_failed(self, start: int) -> None:
        """Note that a start has ended by a failure, whether it was preempted or not."""
        (self.path / f"failed-{start}").touch()

    def failures(self, start: int) -> int:
        """Return the number of starts before this one that ended by a failure, such as the loss of a node."""
        names = self._names()
        return sum(f"failed-{each}" in names or f"preempted-{each}" not in names for each in range(start))

    def stacks_of(self, rank: int) -> Path:
        """Return the file with the stacks of a rank."""
        return self.path / f"stacks-{rank}"

    def _names(self) -> list[str]:
        """List the folder. Network file systems cache the absence of a single file for a while, but not a listing."""
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries]
