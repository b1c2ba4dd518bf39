"""The batch job of a launch: its resources and its submission. submitit writes the script and submits it.

The job has one task per node, which starts the node's ranks. So torch is imported once per node, and the task outlives the
ranks and reports how they ended.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._devices import Device
from parawrap.launch._platform import Platform
from parawrap.launch.slurm._commands import slurm_missing, submitting_environment
from parawrap.launch.slurm._launch_folder import Folder

__all__ = ["log_ends", "script", "submit"]

# Slurm's time limit is later than the launch's own limit, because only the launch's error shows the ranks' stacks.
_SLACK_MIN = 2.0

# Starts submitit with signals blocked, so that they stay pending until a handler is installed. submitit unpickles the files
# in its folder, so refuse a folder that another user owns or can write to.
_GUARDED_PYTHON = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2, signal.SIGTERM)); "
    "folder = os.path.dirname(sys.argv[-1]); status = os.lstat(folder); "
    "status.st_uid != os.geteuid() and sys.exit(folder + ' belongs to another user'); "
    "status.st_mode & 0o022 and sys.exit('other users may write to ' + folder); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)

# Run in each task by the node's own Python, which may lack parawrap. Until parawrap is imported, signals are only recorded.
_TASK = """
import os, signal, socket, sys
noted = []
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, _: noted.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2, signal.SIGTERM))
node, start = int(os.environ.get("SLURM_NODEID", "0")), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
try:
    from parawrap.launch.slurm._task import serve
except BaseException as error:
    reason = f"node {node} ({socket.gethostname()}): {sys.executable} cannot import parawrap: {error!r}"
    with open(os.path.join(folder, f".trouble-{node}"), "w") as file:
        file.write(reason)
    os.rename(file.name, os.path.join(folder, f"trouble-{start}-{node}"))
    raise
serve(folder, node, start, noted)
"""


def script(platform: Platform, folder: Folder) -> str:
    """Return the batch script that `submit` would submit. Requires submitit, but not Slurm."""
    slurm = _submitit().slurm.slurm
    command = f"{_python()} -u -m submitit.core._submit {shlex.quote(str(folder.submitit))}"
    return str(slurm._make_sbatch_string(command=command, folder=folder.submitit, **_parameters(platform)))


def submit(platform: Platform, folders: Sequence[Folder], max_parallel: int | None = None) -> list[str]:
    """Submit one job per folder; several jobs form a job array. Return the job numbers.

    Args:
        platform: The platform of each launch.
        folders: The folders of the launches. They share one submitit folder.
        max_parallel: The number of jobs of an array that may run at a time. None sets no limit.

    Raises:
        LaunchError: If submitit or Slurm is missing, or Slurm refuses the job.
    """
    submitit = _submitit()
    if missing := slurm_missing():
        msg = f"{missing} is not installed here: launch from a login node of a Slurm cluster, or set launcher='local'"
        raise LaunchError(msg)
    executor = submitit.SlurmExecutor(folders[0].submitit, python=_python())
    executor.update_parameters(**{"array_parallelism": len(folders)} | _parameters(platform))
    if max_parallel is not None:
        executor.update_parameters(array_parallelism=max_parallel)
    try:
        with submitting_environment(), executor.batch():
            jobs = [executor.submit(exec, _TASK, {"folder": str(folder.path)}) for folder in folders]
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        msg = (
            f"Slurm refused the job: {_reason_of(error)}. It requested {platform.n_nodes} node(s) with "
            f"{platform.ranks_per_node} rank(s) each, partition={platform.partition!r}, ram={platform.ram!r}; sinfo shows "
            "the cluster's resources"
        )
        if len(folders) > 1:
            msg += f". The job is an array of {len(folders)}; 'scontrol show config' shows the limit, MaxArraySize"
        raise LaunchError(msg) from error
    return [str(job.job_id) for job in jobs]


def log_ends(folder: Folder, job: str, at_most: int) -> str:
    """Return the ends of the logs that a job's tasks wrote. They do not contain the ranks' output."""
    logs = [*sorted(folder.submitit.glob(f"{job}_*_log.err")), *sorted(folder.submitit.glob(f"{job}_*_log.out"))]
    ends = [(path.name, path.read_text(errors="replace").strip()[-at_most:]) for path in logs]
    return "\n".join(f"{name}:\n{end}" for name, end in ends if end)


def _python() -> str:
    return f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(_GUARDED_PYTHON)}"


def _submitit() -> Any:
    try:
        import submitit.slurm.slurm
    except ImportError as error:
        msg = "launcher='slurm' needs submitit: pip install 'parawrap-torch[slurm]'"
        raise LaunchError(msg) from error
    return submitit


def _parameters(platform: Platform) -> dict[str, Any]:
    """Return the job's resources under submitit's names. ``slurm_additional_parameters`` overrides the others."""
    limit = platform.timeout_min
    has_gpus = platform.device == Device.GPU
    parameters: dict[str, Any] = {
        "job_name": platform.name,
        "partition": platform.partition,
        "nodes": platform.n_nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": platform.cpus_per_node,
        "gpus_per_node": platform.n_gpus if has_gpus else None,
        "mem": None if platform.ram is None else f"{math.ceil(1024 * platform.ram)}M",
        "time": None if limit is None else math.ceil(limit + platform.grace_s / 60 + _SLACK_MIN),
        "signal_delay_s": math.ceil(platform.grace_s),
        "srun_args": ["--kill-on-bad-exit=1", "--export=ALL"],  # submitit's script sets a variable for the tasks
        "wckey": None,
    }
    more = _additional(platform.slurm_additional_parameters or {})
    return parameters | more | {"srun_args": [*parameters["srun_args"], *more.get("srun_args", ())]}


def _additional(given: Mapping[str, Any]) -> dict[str, Any]:
    """Split the parameters into submitit's own, with or without its prefix, and options that go to ``sbatch`` unchanged."""
    known = set(_submitit().slurm.slurm._get_default_parameters())
    named = {name.removeprefix("slurm_"): value for name, value in given.items()}
    for name in ("ntasks_per_node", "nodes"):
        if name in named:
            msg = f"slurm_additional_parameters={dict(given)!r}: leave {name} out, as n_nodes, n_cpus, and n_gpus set it"
            raise PlatformError(msg)
    others = {name: value for name, value in named.items() if name not in known}
    taken = {name: value for name, value in named.items() if name in known}
    return taken | {"additional_parameters": {**others, **taken.get("additional_parameters", {})}}


def _reason_of(error: BaseException) -> str:
    """Extract the error lines of ``sbatch`` from submitit's exception."""
    text = getattr(error, "stderr", None) or str(error)
    text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    lines = [line.partition("error:")[2].strip() for line in text.splitlines() if "error:" in line]
    return "; ".join(lines) or text.strip()
