"""The batch job of a launch: its resources and its submission.

The job has one task per rank (`task`). submitit writes the script and submits it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._devices import Device
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.slurm.launch_folder import CONTROL_CHARACTERS, START_LINE, Folder
from parawrap.launch.slurm.task import run_rank

# Slurm's time limit is later than the launch's own limit, because only the launch's error shows the
# ranks' stacks
_SLACK_MIN = 2.0

# Parameters that submitit handles itself. All others go to sbatch unchanged
_OF_SUBMITIT = ("array_parallelism", "setup", "signal_delay_s", "srun_args", "teardown")
# Options that would change the tasks, or hide their output from `BatchRun`
_REFUSED = (
    "nodes",
    "ntasks",
    "ntasks_per_node",
    "use_srun",
    "output",
    "error",
    "open_mode",
    "stderr_to_stdout",
)

# Variables of sbatch, and the option that each one sets. They only choose where, for how long, and
# for whom a job runs. Users set them for all their jobs, so they hold unless the platform or its
# additional parameters set the option
_CHOICES = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}

# Starts submitit in three steps:
# - Block SIGUSR2: it waits until the rank takes it, and does not end processes that the rank
#   starts. `env --block-signal` does the same, but torch supports systems without it.
# - Check that the folder, the last argument, belongs to this user: submitit unpickles its files.
# - Run Python with -P. Otherwise the working folder would be first in the import path, and a file
#   `random.py` there would replace Python's.
_STARTER = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,)); "
    "os.stat(sys.argv[-1]).st_uid == os.geteuid() or "
    "sys.exit(f'{sys.argv[-1]} belongs to another user on this node, so nothing in it was run: "
    "set PARAWRAP_LAUNCH_DIR to a folder of your own that all nodes share'); "
    "os.execv(sys.executable, [sys.executable, '-P', *sys.argv[1:]])"
)
PYTHON = f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(_STARTER)}"
"""The command of the tasks, in place of ``python``. Its last argument is the submitit folder.

It imports only the standard library: -I leaves out the working folder and the variables of Python,
and -S the packages.
"""

# Held while `_without_options_in_environment` hides variables. Another thread would take the rest
# for the whole environment, and restore only that
_hiding = threading.Lock()


def job_script(platform: PlatformFields) -> str:
    """Return the batch script that `submit` would submit. Requires submitit, but not Slurm."""
    _import_submitit()
    from submitit.slurm.slurm import _make_sbatch_string

    folder = Folder.planned(platform.name)
    command = f"{PYTHON} -u -m submitit.core._submit {shlex.quote(str(folder.submitit))}"
    parameters = _parameters(platform, folder.log("%j"))
    return str(_make_sbatch_string(command, folder.submitit, **parameters))


def submit(
    platform: PlatformFields,
    folders: Sequence[Folder],
    plan: bytes,
    max_parallel: int | None = None,
) -> list[str]:
    """Submit one job per folder; several jobs form a job array. Return the job numbers.

    Args:
        platform: The platform of each launch.
        folders: The folders of the launches. They share one submitit folder.
        plan: The pickled platform and settings of the ranks.
        max_parallel: The number of jobs of an array that may run at a time. None sets no limit.

    Raises:
        LaunchError: If submitit or Slurm is missing, or Slurm refuses the job.
    """
    submitit = _import_submitit()
    for command in ("sbatch", "srun", "scontrol", "scancel"):
        if shutil.which(command) is None:
            msg = (
                f"{command} is not installed here: launch from a login node of a Slurm cluster, or "
                "set launcher='local' to start the ranks here"
            )
            raise LaunchError(msg)
    is_array = len(folders) > 1
    # The numbers of the array and of its element, or the number of the job
    log = folders[0].log("%A_%a" if is_array else "%j")
    parameters = _parameters(platform, log)
    if is_array:
        parameters["array_parallelism"] = max_parallel or len(folders)
    given = {name for name, value in parameters.items() if value is not None}
    given |= parameters["additional_parameters"].keys()
    executor = submitit.SlurmExecutor(folders[0].submitit, python=PYTHON)
    executor.update_parameters(**parameters)
    try:
        # The end of `batch` submits the calls as one job
        with _without_options_in_environment(given), executor.batch():
            jobs = [executor.submit(run_rank, str(folder.path), plan) for folder in folders]
    except submitit.core.utils.FailedJobError as error:
        raise LaunchError(_describe_refusal(error, platform, len(folders))) from error
    return [str(job.job_id) for job in jobs]


def _describe_refusal(error: Exception, platform: PlatformFields, jobs: int) -> str:
    """Return the message for a job that sbatch did not accept, with the lines of sbatch."""
    reasons = []
    for line in str(error).splitlines():
        reason = line.partition("error: ")[2]
        reasons.append(reason or line)
    msg = (
        f"Slurm refused the job: {'; '.join(reasons)}. It requested {platform.n_nodes} node(s) "
        f"with {platform.ranks_per_node} rank(s) each, partition={platform.partition!r}, "
        f"ram={platform.ram!r}; sinfo shows the cluster's resources. launcher='local' starts "
        "the ranks on this machine"
    )
    if jobs > 1:
        msg += (
            f". The job is an array of {jobs}; 'scontrol show config' shows the limit, MaxArraySize"
        )
    return msg


@contextlib.contextmanager
def _without_options_in_environment(given: AbstractSet[str]) -> Iterator[None]:
    """Hide variables that sbatch would read as options inside the block.

    They are those of a surrounding job, and SBATCH_*, which would override the script: for sbatch,
    a variable is stronger than a line of the script.

    Args:
        given: The options that the script has.
    """
    # submitit starts sbatch with the environment of this process, so only this process can hide
    # them. Other threads miss the variables until sbatch has answered
    with _hiding:
        hidden = {name: value for name, value in os.environ.items() if _is_hidden(name, given)}
        try:
            for name in hidden:
                os.environ.pop(name, None)
            yield
        finally:
            os.environ |= hidden


def _is_hidden(name: str, given: AbstractSet[str]) -> bool:
    if name.startswith("SBATCH_"):
        return name not in _CHOICES or _CHOICES[name] in given
    # SLURM_CONF names the cluster, not a job
    return name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF"


def _import_submitit() -> Any:
    try:
        import submitit.core.utils
    except ImportError as error:
        msg = (
            "launcher='slurm' needs submitit: pip install 'parawrap-torch[slurm]', or set "
            "launcher='local' to start the ranks on this machine"
        )
        raise LaunchError(msg) from error
    return submitit


def _parameters(platform: PlatformFields, log: Path) -> dict[str, Any]:
    """Return the job's resources under submitit's names.

    ``slurm_additional_parameters`` overrides the others. `log` is the output of the script and
    srun: submitit gives each task files of its own.

    Raises:
        PlatformError: If a value would end its line of the script.
    """
    limit_min = platform.timeout_min
    if limit_min is not None:
        limit_min = math.ceil(limit_min + platform.grace_s / 60 + _SLACK_MIN)
    has_gpus = platform.device == Device.GPU
    cpus = 1 if platform.device == Device.CPU else platform.n_cpus
    given = platform.slurm_additional_parameters or {}
    of_submitit, options = _split_additional(given)
    _refuse_line_breaks(platform, options)
    notice_s = of_submitit.pop("signal_delay_s", math.ceil(platform.grace_s))
    # Not left to submitit, which reads SUBMITIT_PREEMPT_SIGNAL of this process
    own_options = {"output": f"{log}", "error": f"{log}", "signal": f"USR2@{notice_s}"}
    start = START_LINE.format("${SLURM_RESTART_COUNT:-0}")
    srun = [
        "--kill-on-bad-exit=1",
        f"--wait={max(1, math.ceil(platform.grace_s))}",
        "--export=ALL",
        "--open-mode=append",
        "--distribution=block",
        # Since Slurm 22.05, srun does not take it from the job
        f"--cpus-per-task={options.get('cpus-per-task', cpus)}",
    ]
    return {
        "job_name": platform.name,
        "partition": platform.partition,
        "nodes": platform.n_nodes,
        "ntasks_per_node": platform.ranks_per_node,
        "cpus_per_task": cpus,
        "gpus_per_node": platform.n_gpus if has_gpus else None,
        "mem": None if platform.ram is None else f"{math.ceil(1024 * platform.ram)}M",
        "time": limit_min,
        "wckey": None,  # submitit would set one
        **of_submitit,
        # These come after `of_submitit`, because they contain its lists
        "additional_parameters": own_options | options,
        "srun_args": [*srun, *of_submitit.get("srun_args", ())],
        "setup": [
            f'echo "{start}"',
            *of_submitit.get("setup", ()),
            "export SUBMITIT_LOG_LEVEL=CRITICAL SUBMITIT_PREEMPT_SIGNAL=USR2",
        ],
    }


def _split_additional(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the parameters into those of submitit and options that go to ``sbatch`` unchanged.

    Those of submitit may have its prefix, ``slurm_``.

    Raises:
        PlatformError: If a name is refused.
    """
    named = {name.removeprefix("slurm_").replace("-", "_"): value for name, value in given.items()}
    nested = named.pop("additional_parameters", {})
    named |= {name.replace("-", "_"): value for name, value in nested.items()}
    of_submitit: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in named.items():
        if CONTROL_CHARACTERS.search(name):
            msg = f"slurm_additional_parameters: {name!r} is not an option of sbatch"
            raise PlatformError(msg)
        if name in _REFUSED:
            msg = (
                f"slurm_additional_parameters={dict(given)!r}: leave {name} out, as n_nodes, "
                "n_cpus, and n_gpus set the tasks, and parawrap reads their output"
            )
            raise PlatformError(msg)
        if name in _OF_SUBMITIT:
            of_submitit[name] = value
        else:
            options[name.replace("_", "-")] = value
    return of_submitit, options


def _refuse_line_breaks(platform: PlatformFields, options: Mapping[str, Any]) -> None:
    """Raise PlatformError if a value contains a control character.

    Each option becomes a line ``#SBATCH --NAME=VALUE`` of the script. The text of a value after a
    line break would be a command.
    """
    fields: dict[str, Any] = {"name": platform.name, "partition": platform.partition}
    fields |= {f"slurm_additional_parameters[{name!r}]": value for name, value in options.items()}
    for field, value in fields.items():
        if CONTROL_CHARACTERS.search(str(value)):
            msg = (
                f"{field}={value!r}: it becomes one line of the batch script. Leave out line "
                "breaks and other control characters"
            )
            raise PlatformError(msg)
