"""What Slurm says of a job. By ``scontrol``, which every cluster has; where it has forgotten the job, by ``sacct``.

Knows no launches: a job is a number, or for an element of a job array ``123_4``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = [
    "JobState",
    "cancel_job",
    "is_down",
    "job_state",
    "requeue_job",
    "send_signal",
    "slurm_missing",
    "submitting_environment",
]

_ENDED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "FORGOTTEN",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
]
_WAITING = ["CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED"]
_PATIENCE_S = 60.0

_submitting = threading.Lock()


class JobState(NamedTuple):
    """A job, as Slurm sees it.

    Attributes:
        name: ``PENDING``, ``RUNNING``, ``COMPLETED`` and so on; ``UNKNOWN`` where Slurm cannot be asked, and
            ``FORGOTTEN`` where it knows of no such job any more.
        reason: why it is so, in a word of Slurm's.
        starts: how often it was requeued.
        nodes: those that it has or had, as Slurm writes them.
        time_limit: as Slurm writes it.
    """

    name: str
    reason: str = ""
    starts: int = 0
    nodes: str = ""
    time_limit: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it will not run any more."""
        return self.name in _ENDED

    @property
    def waits(self) -> bool:
        """Whether it has no machines."""
        return self.name in _WAITING


def slurm_missing() -> str | None:
    """Which of Slurm's commands this machine lacks."""
    return next((name for name in ("sbatch", "srun", "scontrol", "scancel") if shutil.which(name) is None), None)


def job_state(job: str) -> JobState:
    """How a job does."""
    told = _told("scontrol", "--oneliner", "show", "job", job)
    fields = dict(re.findall(r"(\w+)=(\S*)", told.partition(" Command=")[0]))
    if "JobState" not in fields:
        is_unknown = "Invalid job id" in told or f"Job {job} not found" in told  # the latter of an element of an array
        return JobState(_state_in_accounts(job) if is_unknown else "UNKNOWN")
    nodes = fields.get("NodeList", "")
    return JobState(
        name=fields["JobState"],
        reason=fields.get("Reason", ""),
        starts=int(fields.get("Restarts") or 0),
        nodes="" if nodes == "(null)" else nodes,
        time_limit=fields.get("TimeLimit", ""),
    )


def _state_in_accounts(job: str) -> str:
    """The controller forgets a job some minutes after its end, unless the cluster's configuration says otherwise."""
    code, told = _ran("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", "--jobs", job)
    found = re.match(r"[A-Z_]+", told)
    return found.group() if found and not code else "FORGOTTEN"  # without accounting it fails, with a message


def is_down(host: str) -> bool:
    """Whether Slurm has given this node up."""
    return "DOWN" in _told("sinfo", "--noheader", "--Format=StateComplete:99", "--nodes", host.partition(".")[0]).upper()


def cancel_job(job: str) -> None:
    """Have Slurm end it: it sends SIGTERM, and a while later SIGKILL."""
    _told("scancel", job)


def send_signal(job: str, name: str) -> None:
    """Send a signal to all tasks of a job that runs. For an element of an array that is pending, this takes a minute."""
    _told("scancel", f"--signal={name}", job)


def requeue_job(job: str) -> str | None:
    """Have Slurm end it and start it again; why not, where it does not. The job may be given as its tasks' SLURM_JOB_ID."""
    if job == os.environ.get("SLURM_JOB_ID") and "SLURM_ARRAY_TASK_ID" in os.environ:
        # In one element of an array this is the number of the whole array.
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    code, told = _ran("scontrol", "requeue", job)
    return (told.strip() or f"exit code {code}") if code else None


def _told(*command: str) -> str:
    """What the command says, also where it fails, as it may for a moment while the controller is busy or restarted."""
    return _ran(*command)[1]


def _ran(*command: str) -> tuple[int, str]:
    """The exit code of a command, and what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def submitting_environment() -> Iterator[None]:
    """Without what Slurm has told this process, where it is in a job itself: ``sbatch`` would take it for wishes."""
    with _submitting:  # another thread would find nothing to hide, and soon all of it there again
        in_a_job = "SLURM_JOB_ID" in os.environ
        told = [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF"]
        hidden = {name: os.environ.pop(name) for name in told if in_a_job}
        try:
            yield
        finally:
            os.environ.update(hidden)
