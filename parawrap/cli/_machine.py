"""The facts of a machine that ``parawrap doctor`` lists."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from parawrap.cli._check import Check

__all__ = ["machine_checks"]

_FEW_FILES = 1024
_SMALL_SHM = 64 << 20  # the default of docker
_GIB = 1 << 30
_SBATCH_LIMIT_S = 5.0


def _python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def _torch() -> Check:
    import torch

    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    )
    return Check("torch", "ok", f"{torch.__version__}, {build} build, {torch.get_num_threads()} threads")


def _cores() -> Check:
    from parawrap.backends.cpu_backend import usable_cores

    usable, all_cores = usable_cores(), os.cpu_count()
    limited = " (limited by the affinity or the quota of this process)" if usable != all_cores else ""
    return Check("CPU cores", "ok", f"{usable} of {all_cores} usable{limited}")


def _memory() -> Check:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _memory_limit()
    if limit is None or limit >= there:
        return Check("memory", "ok", f"{there / _GIB:.1f} GiB")
    return Check("memory", "ok", f"{limit / _GIB:.1f} GiB for this process, of {there / _GIB:.1f} GiB")


def _memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the limit of a container in bytes, from cgroup v2 or v1; None if there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return int((root / name).read_text())
        except (OSError, ValueError):  # not there, or "max"
            pass
    return None


def _shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    if not folder.is_dir():
        return Check("shared memory", "missing", f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.total <= _SMALL_SHM:
        cure = "DataLoader workers need more: start the container with --shm-size=1g. parawrap's own workers do not use it"
        return Check("shared memory", "warning", found, cure)
    return Check("shared memory", "ok", found)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} per process (hard limit {hard})"
    if soft < _FEW_FILES:
        return Check(
            "open files", "warning", found, f"A launch needs several per rank. Raise the limit: ulimit -n {_FEW_FILES}"
        )
    return Check("open files", "ok", found)


def _cuda() -> Check:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = [torch.cuda.get_device_properties(index) for index in range(count)]
        return Check("CUDA", "ok", ", ".join(f"{each.name} ({each.total_memory / _GIB:.0f} GiB)" for each in names))
    if shutil.which("nvidia-smi") is None:
        return Check("CUDA", "missing", "no device")
    if torch.version.cuda is None:
        cure = "Install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Check("CUDA", "warning", "this machine has nvidia-smi, but this build of torch has no CUDA", cure)
    cure = "Compare the driver's version in nvidia-smi with that of torch, and check CUDA_VISIBLE_DEVICES"
    return Check("CUDA", "warning", "this machine has nvidia-smi, but torch sees no device", cure)


def _mps() -> Check:
    import torch

    return Check("MPS", "ok", "1 device") if torch.backends.mps.is_available() else Check("MPS", "missing", "no device")


def _xla() -> Check:
    version = _version("torch_xla")
    return (
        Check("XLA", "missing", "torch_xla is not installed")
        if version is None
        else Check("XLA", "ok", f"torch_xla {version}")
    )


def _neuron() -> Check:
    from parawrap.backends import backend_of, emulates_cores, neuron_is_device
    from parawrap.neuroncores import runtime

    if neuron_is_device():
        return _neuron_devices(backend_of("neuron").count())
    cores = [str(path) for path in sorted(Path("/dev").glob("neuron[0-9]*"))]
    if emulates_cores():
        return Check("NeuronCores", "ok", f"{runtime().core_count()} emulated cores (PARAWRAP_NEURON_RUNTIME=host)")
    if any(map(importlib.util.find_spec, ("torch_neuronx", "torch_neuron"))):
        return Check("NeuronCores", "ok", f"{runtime().core_count()} cores with {runtime().name}")
    if cores:
        cure = "Install torch-neuronx from the vendor's index: see docs/neuron_hardware.md"
        return Check("NeuronCores", "warning", f"{', '.join(cores)}, but torch-neuronx is not installed", cure)
    return Check("NeuronCores", "missing", "no device; parawrap can emulate cores for tests")


def _neuron_devices(count: int) -> Check:
    found = f"{count} torch devices of kind 'neuron'"
    if count:
        return Check("NeuronCores", "ok", found)
    return Check("NeuronCores", "warning", found, "Check the driver with neuron-ls: see docs/neuron_hardware.md")


def _other_accelerator() -> Check:
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or device.type in ("cuda", "mps"):
        return Check("other accelerator", "missing", "no device")
    return Check("other accelerator", "ok", f"{torch.accelerator.device_count()} of kind {device.type!r}")


def _gloo() -> Check:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return Check("gloo", "ok", "ranks can communicate on CPUs")
    return Check("gloo", "problem", "this build of torch has no gloo", "Install torch from pytorch.org or PyPI")


def _nccl() -> Check:
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_nccl_available():
        return Check("NCCL", "ok", "ranks can communicate on GPUs")
    if torch.cuda.is_available():
        cure = "Install torch from pytorch.org or PyPI, or use Platform(backend='gloo')"
        return Check("NCCL", "problem", "this build of torch has CUDA, and no NCCL", cure)
    return Check("NCCL", "missing", "needed on GPUs only")


def _slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check("Slurm", "missing", "no sbatch on PATH")
    answer = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=_SBATCH_LIMIT_S, check=False)
    found = answer.stdout.strip() or "sbatch"
    if _version("submitit") is None:
        return Check(
            "Slurm", "warning", f"{found}, but submitit is not installed", "Run pip install 'parawrap-torch[slurm]'"
        )
    return Check("Slurm", "ok", f"{found}, submitit {_version('submitit')}")


def _package(name: str, extra: str, purpose: str) -> Check:
    version = _version(name.lower())
    if version is None:
        return Check(name, "missing", f"not installed; for {purpose}: pip install 'parawrap-torch[{extra}]'")
    return Check(name, "ok", version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_CHECKS: dict[str, Callable[[], Check]] = {
    "Python": _python,
    "torch": _torch,
    "CPU cores": _cores,
    "memory": _memory,
    "shared memory": _shared_memory,
    "open files": _open_files,
    "CUDA": _cuda,
    "MPS": _mps,
    "XLA": _xla,
    "NeuronCores": _neuron,
    "other accelerator": _other_accelerator,
    "gloo": _gloo,
    "NCCL": _nccl,
    "Slurm": _slurm,
    "Ray": partial(_package, "Ray", "ray", "launches and workers on Ray"),
    "tqdm": partial(_package, "tqdm", "cli", "progress bars of map"),
}


def machine_checks() -> Iterator[Check]:
    """Yield one check per part. A check that raises is a problem of its part, and the others follow."""
    for name, check in _CHECKS.items():
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 (drivers and commands of the machine may fail in any way)
            cure = "Try this part without parawrap"
            yield Check(name, "problem", f"{type(error).__name__}: {error}", cure, traceback=traceback.format_exc())
