"""Slurm commands. ``scontrol`` reports the state of a job, so no accounting is needed.

A job is identified by its number, and an element of a job array by a string such as ``123_4``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import NamedTuple

_FINAL_STATES = (
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
)
_COMMAND_S = 60.0  # a busy controller answers late; a guess that no test has contradicted


class _CommandResult(NamedTuple):
    """The exit code and the output of a command, with standard output first."""

    code: int
    output: str


class JobState(NamedTuple):
    """The state of a job.

    Attributes:
        name: Slurm's name of the state, such as ``PENDING`` or ``RUNNING``. ``UNKNOWN`` if Slurm
            does not answer. ``FORGOTTEN`` if Slurm no longer has a record of the job.
        requeues: The number of times that the job was requeued, which is the number of its start.
        fields: All that Slurm says of the job, such as ``Reason`` and ``NodeList``.
    """

    name: str
    requeues: int
    fields: dict[str, str]

    @property
    def is_over(self) -> bool:
        """True if the job will not run again."""
        return self.name in _FINAL_STATES


def job_state(job: str) -> JobState:
    """Return the state of a job."""
    output = _run("scontrol", "--oneliner", "show", "job", job).output
    # Without the name of the job, which comes before, and its command, which comes behind: these
    # may contain anything
    _, state, after_state = output.partition("JobState=")
    shown, *_ = (state + after_state).partition(" Command=")
    pairs = re.findall(r"(\w+)=(\S*)", shown)
    fields = {name: value for name, value in pairs if value != "(null)"}
    if "JobState" not in fields:
        # The second text is that for an element of an array. Other outputs are errors of the
        # command
        is_unknown = "Invalid job id" in output or f"Job {job} not found" in output
        return JobState("FORGOTTEN" if is_unknown else "UNKNOWN", 0, {})
    return JobState(fields["JobState"], int(fields.get("Restarts") or 0), fields)


def hosts_of(nodes: str) -> list[str]:
    """Return the hostnames in a list of nodes as Slurm writes it."""
    return _run("scontrol", "show", "hostnames", nodes).output.split() if nodes else []


def short_name(host: str) -> str:
    """Return a hostname without its domain, so that both spellings of a host compare equal."""
    name, *_ = host.partition(".")
    return name


def is_down(host: str) -> bool:
    """True if Slurm reports this node as down or failed."""
    columns = "--Format=StateComplete:99"
    code, output = _run("sinfo", "--noheader", columns, "--nodes", short_name(host))
    # The message of a sinfo that fails is not a state
    return code == 0 and any(state in output.upper() for state in ("DOWN", "FAIL"))


def cancel_job(job: str) -> None:
    """Cancel a job. Slurm sends SIGTERM first and SIGKILL later."""
    _run("scancel", job)


def signal_job(job: str, name: str) -> None:
    """Send a signal to all tasks of a job, and to the processes that they have started."""
    _run("scancel", f"--signal={name}", job)


def requeue_job(job: str) -> str | None:
    """Let Slurm end a job and start it again. Return the reason if Slurm refuses, otherwise None.

    `job` may be the SLURM_JOB_ID of this task.
    """
    if job == os.environ.get("SLURM_JOB_ID") and "SLURM_ARRAY_TASK_ID" in os.environ:
        # In one element of an array, SLURM_JOB_ID is also the number of the whole array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    code, output = _run("scontrol", "requeue", job)
    # While Slurm ends the job, it may end this command too
    if code in (0, -signal.SIGTERM, -signal.SIGKILL):
        return None
    return output.strip() or f"exit code {code}"


def _run(*command: str) -> _CommandResult:
    """Run a command, and return its result.

    A command that cannot run, or takes too long, has the exit code 1, and the error as its output.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _CommandResult(1, str(error))
    return _CommandResult(done.returncode, done.stdout + done.stderr)
