"""``parawrap doctor``: facts about a machine, the limits that matter, and a trial of lanes and of ranks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import textwrap
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from parawrap import __version__
from parawrap._documentation import cite

HELP = "Check what this machine has, and try a block on two lanes and a launch of two ranks"
EXAMPLES = """exit code 1 means that something that should work does not.

examples:
  parawrap doctor
  parawrap doctor --json > machine.json
"""
_SHOWN = ("os", "python_version", "torch_version", "cuda_compiled_version", "nvidia_driver_version", "nvidia_gpu_models")
_FEW_FILES = 1024  # the usual default
_SMALL_SHM = 64 << 20  # the default of docker
_GIB = 1 << 30  # bytes
_SCONTROL_LIMIT_S = 5.0  # scontrol retries for minutes if the controller's machine does not answer
_TRIAL_MIN = 1.0  # two ranks start in a second


class Check(NamedTuple):
    """The state of one part of a machine.

    Attributes:
        state: "ok"; "missing", if an optional part is not there; "warning", if parawrap works, but this part is limited or
            cannot be used; "problem", if something that should work does not.
        detail: The finding.
        cure: The remedy; empty if there is nothing to do.
    """

    state: Literal["ok", "missing", "warning", "problem"]
    detail: str
    cure: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all of torch.utils.collect_env")


def run(given: argparse.Namespace) -> int:
    """Print facts, and one line per check. Return 1 if there is a problem."""
    if given.json:
        checks = dict(_run_checks())
        machine = _collect_facts()
        listed = [{"name": name, **check._asdict()} for name, check in checks.items()]
        print(json.dumps({"parawrap": __version__, "machine": machine, "checks": listed}))
        return int(any(check.state == "problem" for check in checks.values()))
    print(f"parawrap {__version__}", flush=True)
    facts = _collect_facts()
    for name in _SHOWN:
        if facts.get(name):
            print(f"{name.replace('_', ' ')}: {', '.join(facts[name].splitlines())}")
    print()
    counts: Counter[str] = Counter()
    for name, check in _run_checks():
        counts[check.state] += 1
        print(f"{check.state:>8}  {name:<19}  {check.detail}", flush=True)
        if check.cure:
            print(textwrap.indent(check.cure, " " * 31))
    problems, warnings = (f"{counts[state]} {state}{'s' * (counts[state] != 1)}" for state in ("problem", "warning"))
    print(f"\n{problems}, {warnings}, {counts['ok']} ok, {counts['missing']} missing")
    return int(counts["problem"] > 0)


def _collect_facts() -> dict[str, Any]:
    """Return the facts of `torch.utils.collect_env`; nothing if torch cannot be imported."""
    try:
        from torch.utils.collect_env import get_env_info
    except ImportError:
        return {}
    facts: dict[str, Any] = get_env_info()._asdict()
    return facts


def _run_checks() -> Iterator[tuple[str, Check]]:
    """Yield the name and the state of each part. A check that raises is a problem of its part.

    The others follow, unless torch itself cannot be imported.
    """
    for name, (check, cure) in _CHECKS.items():
        try:
            yield name, check()
        except Exception as error:  # noqa: BLE001 (drivers and commands of the machine may fail in any way)
            yield name, Check("problem", f"{type(error).__name__}: {error}", f"{cure}\n{traceback.format_exc()}")
            if name == "torch":
                return


# --- the parts ---


def _check_torch() -> Check:
    import torch

    return Check("ok", torch.__version__)


def _check_cores() -> Check:
    from parawrap.backends.cpu_backend import usable_cores

    return Check("ok", f"{usable_cores()} of {os.cpu_count()} usable")


def _check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    if not folder.is_dir():
        return Check("missing", f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.total > _SMALL_SHM:
        return Check("ok", found)
    cure = "DataLoader workers need more: start the container with --shm-size=1g. parawrap's own workers do not use it"
    return Check("warning", found, cure)


def _check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} per process (hard limit {hard})"
    if soft >= _FEW_FILES:
        return Check("ok", found)
    return Check("warning", found, f"A launch needs several per rank. Raise the limit: ulimit -n {_FEW_FILES}")


def _check_accelerators() -> Check:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available() and not (dist.is_available() and dist.is_nccl_available()):
        cure = "Install torch from pytorch.org or PyPI, or use Platform(backend='gloo')"
        return Check("problem", "this build of torch has CUDA, and no NCCL", cure)
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator(check_available=True)
        return Check("ok", f"{torch.accelerator.device_count()} of kind {kind}")
    if shutil.which("nvidia-smi") is None:
        return Check("missing", "no device")
    if torch.version.cuda is None:
        cure = "Install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Check("warning", "this machine has nvidia-smi, but this build of torch has no CUDA", cure)
    cure = "Compare the driver's version in nvidia-smi with that of torch, and check CUDA_VISIBLE_DEVICES"
    return Check("warning", "this machine has nvidia-smi, but torch sees no device", cure)


def _check_neuron() -> Check:
    from parawrap.backends import backend_of, emulates_cores, neuron_is_device
    from parawrap.neuroncores import runtime

    if neuron_is_device():
        count = backend_of("neuron").count()
        cure = "" if count else f"Check the driver with neuron-ls: see {cite('neuron_hardware')}"
        return Check("ok" if count else "warning", f"{count} torch devices of kind 'neuron'", cure)
    if emulates_cores() or any(map(importlib.util.find_spec, ("torch_neuronx", "torch_neuron"))):
        return Check("ok", f"{runtime().core_count()} cores with the runtime {runtime().name}")
    if devices := sorted(map(str, Path("/dev").glob("neuron[0-9]*"))):
        cure = f"Install torch-neuronx from the vendor's index: see {cite('neuron_hardware')}"
        return Check("warning", f"{', '.join(devices)}, but torch-neuronx is not installed", cure)
    return Check("missing", "no device; parawrap can emulate cores for tests")


def _check_slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check("missing", "no sbatch on PATH")
    cure = "Launches on this machine work. For the cluster, check Slurm's configuration with scontrol ping"
    try:
        pinged = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Check("warning", f"the controller does not answer within {_SCONTROL_LIMIT_S:g} s", cure)
    if " is UP" not in pinged.stdout:
        line = (pinged.stdout + pinged.stderr).strip().rpartition("\n")[2]
        return Check("warning", f"the controller does not answer: {line}", cure)
    if importlib.util.find_spec("submitit") is None:
        cure = "Run pip install 'parawrap-torch[slurm]'"
        return Check("warning", "the controller answers, but submitit is not installed", cure)
    return Check("ok", "the controller answers")


# --- the trials ---


def _try_lanes() -> Check:
    import torch

    from parawrap import parallel

    start = perf_counter()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    model, x = torch.nn.Linear(16, 4).to(device), torch.randn(10, 16, device=device)
    with torch.no_grad():
        plain = model(x)
        with parallel(model, ["cpu", "cpu"] if accelerator is None else [device, device], out_dims=0):
            output = model(x)
    torch.testing.assert_close(output, plain, rtol=1e-3, atol=1e-3)
    return Check("ok", f"two lanes on {device} gave the output of the plain call, {1e3 * (perf_counter() - start):.0f} ms")


def _try_ranks() -> Check:
    from parawrap import Platform, wrapper

    start = perf_counter()
    platform = Platform(device="cpu", n_cpus=2, launcher="local", verbose=False, timeout_min=_TRIAL_MIN)
    found = list(wrapper(platform)(_sum_over_ranks)())
    if found != [1, 1]:
        return Check("problem", f"the ranks summed their numbers to {found} instead of [1, 1]")
    return Check("ok", f"two processes met, and communicated, {1e3 * (perf_counter() - start):.0f} ms")


def _sum_over_ranks() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


_HERE = "Try this part without parawrap"
_CHECKS = {
    "torch": (_check_torch, "Install torch: https://pytorch.org/get-started/locally"),
    "CPU cores": (_check_cores, _HERE),
    "shared memory": (_check_shared_memory, _HERE),
    "open files": (_check_open_files, _HERE),
    "accelerators": (_check_accelerators, _HERE),
    "NeuronCores": (_check_neuron, _HERE),
    "Slurm": (_check_slurm, _HERE),
    "block on two lanes": (_try_lanes, "Try torch.ones(1, device=...) on each device"),
    "launch of two ranks": (_try_ranks, "Check the limits on processes (ulimit -u) and on open files (ulimit -n)"),
}
