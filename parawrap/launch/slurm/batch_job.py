"""The batch job of a launch: its resources and its submission. submitit writes the script and submits it.

The job has one task per rank (`task`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._devices import Device
from parawrap.launch._platform import Platform
from parawrap.launch.slurm.commands import slurm_missing
from parawrap.launch.slurm.launch_folder import Folder

# Slurm's time limit is later than the launch's own limit, because only the launch's error shows the ranks' stacks.
_SLACK_MIN = 2.0

_JOB_LOG = "job-%j.log"  # of the batch script and srun; each task has its own files
_ARRAY_LOG = "job-%A_%a.log"

# Submitit handles these parameters itself. All others go to sbatch unchanged.
_OWN = ("additional_parameters", "array_parallelism", "setup", "signal_delay_s", "srun_args", "teardown")
_REFUSED = dict.fromkeys(("nodes", "ntasks", "ntasks_per_node", "use_srun"), "n_nodes, n_cpus, and n_gpus set it")
_REFUSED |= dict.fromkeys(("error", "open_mode", "stderr_to_stdout"), "parawrap reads the output of srun and the tasks")

# Starts submitit with signals blocked: they wait until the rank takes them, and do not end processes that it starts.
_BLOCKING_PYTHON = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2)); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)

_changing = threading.Lock()  # of the environment


def job_script(platform: Platform) -> str:
    """Return the batch script that `submit` would submit. Requires submitit, but not Slurm.

    submitit shows a script only after a submission, so this submits to a program that does nothing.
    """
    folder = Folder.planned(platform.name)
    with tempfile.TemporaryDirectory(prefix="parawrap-preview-") as place:
        for name in ("srun", "sbatch"):
            Path(place, name).write_text("#!/bin/sh\necho Submitted batch job 0\n")
            Path(place, name).chmod(0o700)
        trial = Folder(Path(place, "launch", folder.path.name))
        with _environment(PATH=f"{place}:{os.environ.get('PATH', '')}"):
            _submit(platform, [trial], b"", None)
        text = next(trial.submitit.glob("0_submission.sh")).read_text()
        return text.replace(str(trial.path.parent), str(folder.path.parent))


def submit(platform: Platform, folders: Sequence[Folder], plan: bytes, max_parallel: int | None = None) -> list[str]:
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
    if missing := slurm_missing():
        msg = (
            f"{missing} is not installed here: launch from a login node of a Slurm cluster, or set launcher='local' to "
            "start the ranks here"
        )
        raise LaunchError(msg)
    try:
        with _environment():
            return _submit(platform, folders, plan, max_parallel)
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        msg = (
            f"Slurm refused the job: {_reason_of(error)}. It requested {platform.n_nodes} node(s) with "
            f"{platform.ranks_per_node} rank(s) each, partition={platform.partition!r}, ram={platform.ram!r}; sinfo shows "
            "the cluster's resources. launcher='local' starts the ranks on this machine"
        )
        if len(folders) > 1:
            msg += f". The job is an array of {len(folders)}; 'scontrol show config' shows the limit, MaxArraySize"
        raise LaunchError(msg) from error


@contextlib.contextmanager
def _environment(**added: str) -> Iterator[None]:
    """Add variables for a moment, and hide those of a surrounding job, which ``sbatch`` would read as options."""
    with _changing:
        before = dict(os.environ)
        for name in before:
            if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name != "SLURM_CONF":
                del os.environ[name]
        os.environ |= added
        try:
            yield
        finally:
            os.environ |= before


def _submit(platform: Platform, folders: Sequence[Folder], plan: bytes, max_parallel: int | None) -> list[str]:
    submitit = _import_submitit()
    executor = submitit.SlurmExecutor(folders[0].submitit, max_pickle_size_gb=math.inf, python=_blocking_python())
    parameters = _parameters(platform, folders[0], is_array=len(folders) > 1)
    if len(folders) > 1:
        parameters["array_parallelism"] = max_parallel or len(folders)
    executor.update_parameters(**parameters)
    with executor.batch():
        jobs = [executor.submit(_run_task, str(folder.path), plan) for folder in folders]
    return [str(job.job_id) for job in jobs]


def _blocking_python() -> str:
    return f"{shlex.quote(sys.executable)} -I -S -c {shlex.quote(_BLOCKING_PYTHON)}"


def _run_task(folder: str, plan: bytes) -> None:
    """Run a task of the job. If the node's Python lacks parawrap, submitit reports the error."""
    import gc

    gc.disable()  # collection would take a sixth of the time to import torch
    from parawrap.launch.slurm.task import run_rank

    gc.enable()
    run_rank(folder, plan)


_run_task.__module__ = "__main__"  # so that cloudpickle sends it by value, and nodes without parawrap say so


def _import_submitit() -> Any:
    try:
        import submitit.core.utils
    except ImportError as error:
        msg = (
            "launcher='slurm' needs submitit: pip install 'parawrap-torch[slurm]', or set launcher='local' to start the "
            "ranks on this machine"
        )
        raise LaunchError(msg) from error
    return submitit


def _parameters(platform: Platform, folder: Folder, *, is_array: bool) -> dict[str, Any]:
    """Return the job's resources under submitit's names. ``slurm_additional_parameters`` overrides the others."""
    limit = platform.timeout_min
    has_gpus = platform.device == Device.GPU
    cpus = 1 if platform.device == Device.CPU else platform.n_cpus
    own, options = _additional(platform.slurm_additional_parameters or {})
    log = str(folder.submitit / (_ARRAY_LOG if is_array else _JOB_LOG))
    # Slurm does not pass --cpus-per-task on to the tasks. submitit's script sets a variable for them.
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
    """Split the parameters into submitit's own, with or without its prefix, and options that go to ``sbatch`` unchanged."""
    named = {name.removeprefix("slurm_").replace("-", "_"): value for name, value in given.items()}
    for name, why in _REFUSED.items():
        if name in named:
            msg = f"slurm_additional_parameters={dict(given)!r}: leave {name} out, as {why}"
            raise PlatformError(msg)
    own = {name: value for name, value in named.items() if name in _OWN and name != "additional_parameters"}
    options = {name: value for name, value in named.items() if name not in _OWN} | dict(
        named.get("additional_parameters", {})
    )
    return own, {name.replace("_", "-"): value for name, value in options.items()}


def _reason_of(error: BaseException) -> str:
    """Extract the error lines of ``sbatch`` from submitit's exception."""
    text = getattr(error, "stderr", None) or str(error)
    text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    lines = [line.partition("error:")[2].strip() for line in text.splitlines() if "error:" in line]
    return "; ".join(dict.fromkeys(lines)) or text.strip()
