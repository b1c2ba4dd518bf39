"""The folder through which the submitting process and the tasks of a launch communicate.

    NAME-XXXXXXXX/          private; one per job or job array
      submitit/             the batch script and its log; for each task, its output and the outcome
                            of its rank
      0/  1/  ...           one per launch:
        call                the pickled call of the ranks, from the submitting process
        address-START       the address of the store where the ranks of a start meet, from rank 0
        begun-START         the ranks have met
        preempted-START     this start was preempted, or its ranks requested the next one: it
                            has not failed
        failed-START        a rank of this start failed, and the submitting process requeued the job
        request-START.N     the submitting process requests the stacks of the ranks
        answer-RANK         the number of a request, and the stacks of a rank at that time
        stacks-RANK         the stacks that faulthandler wrote at a signal that ends the rank

The folder is on a file system that the submitting process and all nodes share.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from parawrap.errors import LaunchError
from parawrap.processes.torch_groups import StoreAddress

_ROOT_VARIABLE = "PARAWRAP_LAUNCH_DIR"
_SUBMITIT = "submitit"
_PART = ".part"  # of files that are not complete

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Line breaks and others."""

# sbatch replaces patterns such as %j in the paths of output files. A backslash turns that off, also
# for the pattern that parawrap needs
_SPECIAL_TO_SBATCH = re.compile(rf"[%\\]|{CONTROL_CHARACTERS.pattern}")

START_LINE = "parawrap: start {} of this job"
"""The line that the batch script writes when it starts, because all starts append to one log."""

_START_LINE = re.compile(START_LINE.format(r"(\d+)"))

# If Slurm ends a start to run the job again, slurmstepd logs why. It does so before the next start
# begins, so the line is in the part of the start that ended
_REQUEUED_BY_OTHERS = re.compile(r"CANCELLED AT \S+ DUE TO (JOB REQUEUE|PREEMPTION)")


class Folder:
    """The folder of one launch. All state is in its files, so any thread and process may use it.

    Attributes:
        path: The folder.
        call: The file with the pickled call.
        submitit: The folder of submitit, which the launches of an array share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.call = path / "call"
        self.submitit = path.parent / _SUBMITIT

    @classmethod
    def planned(cls, name: str) -> Folder:
        """Return the folder that `new` would make, without the random suffix of its name.

        Raises:
            LaunchError: If sbatch would read the path of the folder as another one.
        """
        given = os.environ.get(_ROOT_VARIABLE) or "~/.parawrap/launches"
        root = Path(given).expanduser().absolute()
        if _SPECIAL_TO_SBATCH.search(str(root)):
            msg = (
                f"{str(root)!r} cannot be the folder of launches: sbatch replaces %, backslashes, "
                f"and control characters in paths. Set {_ROOT_VARIABLE} to a folder without them "
                "that all nodes share"
            )
            raise LaunchError(msg)
        readable = "".join(each if each.isalnum() else "-" for each in name)
        return cls(root / readable / "0")

    @classmethod
    def new(cls, name: str, count: int) -> list[Folder]:
        """Make the folders for the launches of one job array.

        They are in PARAWRAP_LAUNCH_DIR, or in the home folder.

        Raises:
            LaunchError: If the folders cannot be made, or other users may write to their root.
        """
        planned = cls.planned(name)
        try:
            planned.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_open_root(planned.root)
            prefix = f"{planned.path.parent.name}-"
            array = Path(tempfile.mkdtemp(prefix=prefix, dir=planned.root))  # mode 0700
            folders: list[Folder] = [cls(array / str(number)) for number in range(count)]
            for path in (folders[0].submitit, *(folder.path for folder in folders)):
                path.mkdir(mode=0o700)
        except OSError as error:
            msg = (
                f"{planned.root} cannot be written to: {error}; set {_ROOT_VARIABLE} to a folder "
                "that all nodes share"
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
        with contextlib.suppress(OSError):  # another launch of the array has removed it
            is_last = {*os.listdir(self.path.parent)} <= {_SUBMITIT}  # noqa: PTH208 (names only)
            if is_last:
                shutil.rmtree(self.path.parent, ignore_errors=True)

    def log(self, job: str) -> Path:
        """Return the log of a job: that of its script, srun, and slurmstepd, for all starts.

        `job` is the number of the job, or a pattern of sbatch.
        """
        return self.submitit / f"job-{job}.log"

    def stacks_of(self, rank: int) -> Path:
        """Return the file in which faulthandler writes the stacks of a rank."""
        return self.path / f"stacks-{rank}"

    def write_address(self, start: int, address: StoreAddress) -> None:
        """Publish where the ranks of a start of the job meet."""
        self._write(f"address-{start}", pickle.dumps(address))

    def address(self, start: int) -> StoreAddress | None:
        """Return where the ranks of a start meet. Return None before it is published."""
        if not self.has("address", start):
            return None
        address: StoreAddress = pickle.loads((self.path / f"address-{start}").read_bytes())
        return address

    def mark(self, topic: str, start: int) -> None:
        """Mark a start of the job as "begun", "preempted", or "failed", with an empty file."""
        (self.path / f"{topic}-{start}").touch()

    def has(self, topic: str, start: int) -> bool:
        """True if a start has this file.

        Network file systems cache the absence of a single file, but not a listing.
        """
        return f"{topic}-{start}" in os.listdir(self.path)  # noqa: PTH208 (names only)

    def failures(self, start: int, job: str) -> int:
        """Return the number of starts before this one that failed.

        A start without a mark has failed too, as after the loss of a node, unless the log says that
        a user or a preemption requeued the job.
        """
        names = os.listdir(self.path)  # noqa: PTH208 (names only)
        logs = self.logs_of_starts(job) if start else {}
        failures = 0
        for each in range(start):
            log = logs.get(each, "")
            was_requeued = f"preempted-{each}" in names or _REQUEUED_BY_OTHERS.search(log)
            # A start may be preempted first, and then fail
            if f"failed-{each}" in names or not was_requeued:
                failures += 1
        return failures

    def logs_of_starts(self, job: str) -> dict[int, str]:
        """Return the part of the log that each start of the job has written, by its number."""
        try:
            log = self.log(job).read_text(errors="replace")
        except FileNotFoundError:
            return {}
        # `split` returns the text before the first line, then the number in this line, then the
        # text up to the next line, and so on
        _, *parts = _START_LINE.split(log)
        numbers, texts = parts[::2], parts[1::2]
        return dict(zip(map(int, numbers), texts, strict=True))

    # -- requests for stacks

    def request_stacks(self, start: int, number: int) -> Path:
        """Request the stacks of all ranks of a start. Return the file of the request.

        Later requests of a launch have higher numbers.
        """
        path = self.path / f"request-{start}.{number}"
        path.touch()
        return path

    def last_request(self, start: int) -> int:
        """Return the highest number of a request for stacks. Return 0 if there is none."""
        prefix = f"request-{start}."
        names = os.listdir(self.path)  # noqa: PTH208 (names only)
        numbers = [int(each.removeprefix(prefix)) for each in names if each.startswith(prefix)]
        return max(numbers, default=0)

    def write_answer(self, rank: int, number: int, text: str) -> None:
        """Answer all requests for stacks up to this number."""
        self._write(f"answer-{rank}", f"{number}\n{text}".encode(errors="replace"))

    def answers(self, number: int, ranks: Collection[int]) -> dict[int, str]:
        """Return the stacks of those ranks that have answered this request, or a later one."""
        names = {*os.listdir(self.path)}  # noqa: PTH208 (names only)
        answers = {}
        for rank in ranks:
            name = f"answer-{rank}"
            if name not in names:
                continue
            # A network file system may report an error if the file is replaced at this moment
            with contextlib.suppress(OSError):
                answered, _, text = (self.path / name).read_text(errors="replace").partition("\n")
                if int(answered) >= number:
                    answers[rank] = text
        return answers

    def _write(self, name: str, data: bytes) -> None:
        """Write a file so that readers see all of it or nothing: a rename is atomic."""
        path = self.path / name
        part = path.with_suffix(_PART)
        part.write_bytes(data)
        part.rename(path)


def _refuse_open_root(root: Path) -> None:
    """Raise LaunchError if other users may write to the root of all launch folders.

    The ranks unpickle files of these folders, and a user who may write to the root may replace
    them. The sticky bit forbids that, but not all shared file systems respect it. The mode also
    shows access control lists: that of the group is the mask of all their entries.
    """
    status = root.stat()
    if status.st_uid != os.geteuid():
        msg = (
            f"{root} belongs to another user (number {status.st_uid}), and ranks run what is in "
            f"the launch folders there. Set {_ROOT_VARIABLE} to a folder of your own that all "
            "nodes share"
        )
        raise LaunchError(msg)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        msg = (
            f"other users may write to {root}, and ranks run what is in the launch folders there. "
            f"Run 'chmod go-w {root}', or set {_ROOT_VARIABLE} to another folder that all nodes "
            "share"
        )
        raise LaunchError(msg)
