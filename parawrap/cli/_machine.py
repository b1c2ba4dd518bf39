"""The checks of ``parawrap doctor`` that need no trial: limits, accelerators, and Slurm."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from parawrap._documentation import cite
from parawrap.cli._check import Check, run_command

__all__ = ["machine_checks"]

_FEW_FILES = 1024  # the usual default
_SMALL_SHM = 64 << 20  # the default of docker
_GIB = 1 << 30  # bytes
_SCONTROL_LIMIT_S = 5.0  # scontrol retries for minutes if the controller's machine does not answer


def _check_cores() -> Check:
    from parawrap.backends.cpu_backend import usable_cores

    return Check("CPU cores", "ok", f"{usable_cores()} of {os.cpu_count()} usable")


def _check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    if not folder.is_dir():
        return Check("shared memory", "missing", f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.total > _SMALL_SHM:
        return Check("shared memory", "ok", found)
    cure = "DataLoader workers need more: start the container with --shm-size=1g. parawrap's own workers do not use it"
    return Check("shared memory", "warning", found, cure)


def _check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} per process (hard limit {hard})"
    if soft >= _FEW_FILES:
        return Check("open files", "ok", found)
    return Check(
        "open files", "warning", found, f"A launch needs several per rank. Raise the limit: ulimit -n {_FEW_FILES}"
    )


def _check_accelerators() -> Check:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available() and not (dist.is_available() and dist.is_nccl_available()):
        cure = "Install torch from pytorch.org or PyPI, or use Platform(backend='gloo')"
        return Check("accelerators", "problem", "this build of torch has CUDA, and no NCCL", cure)
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator(check_available=True)
        return Check("accelerators", "ok", f"{torch.accelerator.device_count()} of kind {kind}")
    if shutil.which("nvidia-smi") is None:
        return Check("accelerators", "missing", "no device")
    if torch.version.cuda is None:
        cure = "Install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Check("accelerators", "warning", "this machine has nvidia-smi, but this build of torch has no CUDA", cure)
    cure = "Compare the driver's version in nvidia-smi with that of torch, and check CUDA_VISIBLE_DEVICES"
    return Check("accelerators", "warning", "this machine has nvidia-smi, but torch sees no device", cure)


def _check_neuron() -> Check:
    from parawrap.backends import backend_of, emulates_cores, neuron_is_device
    from parawrap.neuroncores import runtime

    if neuron_is_device():
        count = backend_of("neuron").count()
        cure = "" if count else f"Check the driver with neuron-ls: see {cite('neuron_hardware')}"
        return Check("NeuronCores", "ok" if count else "warning", f"{count} torch devices of kind 'neuron'", cure)
    if emulates_cores():
        return Check("NeuronCores", "ok", f"{runtime().core_count()} emulated cores (PARAWRAP_NEURON_RUNTIME=host)")
    if any(map(importlib.util.find_spec, ("torch_neuronx", "torch_neuron"))):
        return Check("NeuronCores", "ok", f"{runtime().core_count()} cores with {runtime().name}")
    if devices := sorted(map(str, Path("/dev").glob("neuron[0-9]*"))):
        cure = f"Install torch-neuronx from the vendor's index: see {cite('neuron_hardware')}"
        return Check("NeuronCores", "warning", f"{', '.join(devices)}, but torch-neuronx is not installed", cure)
    return Check("NeuronCores", "missing", "no device; parawrap can emulate cores for tests")


def _check_slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check("Slurm", "missing", "no sbatch on PATH")
    code, output, errors = run_command(["scontrol", "ping"], _SCONTROL_LIMIT_S)
    if " is UP" not in output:
        lines = (output + errors).strip().splitlines() or [f"exit code {code}"]
        cure = "Launches on this machine work. For the cluster, check Slurm's configuration with scontrol ping"
        return Check("Slurm", "warning", f"the controller does not answer: {lines[-1]}", cure)
    try:
        version = importlib.metadata.version("submitit")
    except importlib.metadata.PackageNotFoundError:
        cure = "Run pip install 'parawrap-torch[slurm]'"
        return Check("Slurm", "warning", "the controller answers, but submitit is not installed", cure)
    return Check("Slurm", "ok", f"the controller answers; submitit {version}")


_CHECKS: dict[str, Callable[[], Check]] = {
    "CPU cores": _check_cores,
    "shared memory": _check_shared_memory,
    "open files": _check_open_files,
    "accelerators": _check_accelerators,
    "NeuronCores": _check_neuron,
    "Slurm": _check_slurm,
}


def machine_checks() -> Iterator[Check]:
    """Yield one check per part. A check that raises is a problem of its part, and the others follow."""
    for name, check in _CHECKS.items():
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 (drivers and commands of the machine may fail in any way)
            cure = "Try this part without parawrap"
            yield Check(name, "problem", f"{type(error).__name__}: {error}", cure, traceback.format_exc())
