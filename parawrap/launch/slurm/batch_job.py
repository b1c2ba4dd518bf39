"""The batch job of a launch: its resources and its submission. submitit writes the script and
submits it.

The job has one task per rank (`task`).
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
from typing import Any

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._devices import Device
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.slurm.launch_folder import Folder
from parawrap.launch.slurm.task import run_rank

# Slurm's time limit is later than the launch's own limit, because only the launch's error shows the
# ranks' stacks.
_SLACK_MIN = 2.0

# Submitit handles these parameters itself. All others go to sbatch unchanged.
_OWN = ("array_parallelism", "setup", "signal_delay_s", "srun_args", "teardown")
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

# Starts submitit with signals blocked: they wait until the rank takes them, and do not end
# processes that it starts. `env --block-signal` does the same, but not on systems as old as those
# that torch supports.
_BLOCKING_PYTHON = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, "
    "signal.SIGUSR2)); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
PYTHON = f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(_BLOCKING_PYTHON)}"
"""The command of the tasks, in place of ``python``."""

_changing = threading.Lock()  # of the environment


def job_script(platform: PlatformFields) -> str:
    """Return the batch script that `submit` would submit. Requires submitit, but not Slurm."""
    _import_submitit()
    from submitit.slurm.slurm import _make_sbatch_string

    folder = Folder.planned(platform.name)
    command = f"{PYTHON} -u -m submitit.core._submit {folder.submitit}"
    return str(_make_sbatch_string(command, folder.submitit, **_parameters(platform, folder)))


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
    if missing := [
        name for name in ("sbatch", "srun", "scontrol", "scancel") if shutil.which(name) is None
    ]:
        msg = (
            f"{missing[0]} is not installed here: launch from a login node of a Slurm cluster, or "
            "set launcher='local' to start the ranks here"
        )
        raise LaunchError(msg)
    parameters = _parameters(platform, folders[0])
    if len(folders) > 1:
        log = parameters["additional_parameters"]
        log |= {name: log[name].replace("%j", "%A_%a") for name in ("output", "error")}
        parameters["array_parallelism"] = max_parallel or len(folders)
    executor = submitit.SlurmExecutor(folders[0].submitit, python=PYTHON)
    executor.update_parameters(**parameters)
    try:
        with _without_surrounding_job(), executor.batch():
            jobs = [executor.submit(run_rank, str(folder.path), plan) for folder in folders]
    except submitit.core.utils.FailedJobError as error:
        said = [
            line.partition("error: ")[2] or line for line in str(error).splitlines()
        ]  # by sbatch
        msg = (
            f"Slurm refused the job: {'; '.join(said)}. It requested {platform.n_nodes} node(s) "
            f"with {platform.ranks_per_node} rank(s) each, partition={platform.partition!r}, "
            f"ram={platform.ram!r}; sinfo shows the cluster's resources. launcher='local' starts "
            "the ranks on this machine"
        )
        if len(folders) > 1:
            msg += (
                f". The job is an array of {len(folders)}; 'scontrol show config' shows the limit, "
                "MaxArraySize"
            )
        raise LaunchError(msg) from error
    return [str(job.job_id) for job in jobs]


@contextlib.contextmanager
def _without_surrounding_job() -> Iterator[None]:
    """Hide the variables of a surrounding job for a moment:

    ``sbatch`` would read them as options.
    """
    with _changing:
        names = [
            name
            for name in os.environ
            if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF"
        ]
        hidden = {name: os.environ.pop(name) for name in names}
        try:
            yield
        finally:
            os.environ |= hidden


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


def _parameters(platform: PlatformFields, folder: Folder) -> dict[str, Any]:
    """Return the job's resources under submitit's names.

    ``slurm_additional_parameters`` overrides the others.
    """
    limit = platform.timeout_min
    has_gpus = platform.device == Device.GPU
    cpus = 1 if platform.device == Device.CPU else platform.n_cpus
    own, options = _additional(platform.slurm_additional_parameters or {})
    log = str(
        folder.submitit / "job-%j.log"
    )  # of the batch script and srun; each task has its own files
    # Slurm does not pass --cpus-per-task on to the tasks. submitit's script sets a variable for
    # them.
    srun = [
        "--kill-on-bad-exit=1",
        f"--wait={max(1, math.ceil(platform.grace_s))}",
        "--export=ALL",
        "--open-mode=append",
        "--distribution=block",
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
        "time": None if limit is None else math.ceil(limit + platform.grace_s / 60 + _SLACK_MIN),
        "signal_delay_s": math.ceil(platform.grace_s),
        "wckey": None,
        **own,
        "additional_parameters": {"output": log, "error": log} | options,
        "srun_args": [*srun, *own.get("srun_args", ())],
        "setup": [*own.get("setup", ()), "export SUBMITIT_LOG_LEVEL=CRITICAL"],
    }


def _additional(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the parameters into submitit's own, with or without its prefix, and options that go to
    ``sbatch`` unchanged.
    """
    named = {name.removeprefix("slurm_").replace("-", "_"): value for name, value in given.items()}
    named |= {
        name.replace("-", "_"): value
        for name, value in named.pop("additional_parameters", {}).items()
    }
    for name in named:
        if name in _REFUSED:
            msg = (
                f"slurm_additional_parameters={dict(given)!r}: leave {name} out, as n_nodes, "
                "n_cpus, and n_gpus set the tasks, and parawrap reads their output"
            )
            raise PlatformError(msg)
    own = {name: value for name, value in named.items() if name in _OWN}
    return own, {name.replace("_", "-"): value for name, value in named.items() if name not in _OWN}
