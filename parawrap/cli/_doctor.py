"""``parawrap doctor``: the limits of a machine that matter, and a trial of lanes and of ranks."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import textwrap
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from parawrap import __version__
from parawrap.displays import spell_count

EXAMPLES = """exit code 1 means that something that should work does not.

examples:
  parawrap doctor
  parawrap doctor --all > machine.txt    # for a bug report
"""
_FEW_FILES = 1024  # the usual default
_SMALL_SHM = 64 << 20  # the default of docker
_GIB = 1 << 30  # bytes
_TRIAL_MIN = 1.0  # minutes: two ranks start in a second, so after a minute, something is wrong


class _Finding(NamedTuple):
    """A fact about the machine. A finding with a cure is a warning."""

    fact: str
    cure: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="then print the report of torch.utils.collect_env, for a bug report",
    )


def run(given: argparse.Namespace) -> int:
    """Print the versions, a line per check, and a summary; with --all, torch's report too.

    Return the exit code: 1 if a check raises, else 0.
    """
    import torch

    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"parawrap {__version__}, {versions}", flush=True)
    counts: Counter[str] = Counter()
    for name, check in _CHECKS.items():
        try:
            fact, below = check()
            state = "warning" if below else "ok"
        except Exception as error:  # noqa: BLE001 (drivers of the machine may fail in any way)
            fact, below = f"{type(error).__name__}: {error}", traceback.format_exc()
            state = "problem"
        counts[state] += 1
        # Flushed, because the next check may take seconds, or end the process
        print(f"{state:>7}  {name:<19}  {fact}", flush=True)
        if below:  # a cure or a traceback, in the column of the facts
            print(textwrap.indent(below, " " * 30))
    problems = spell_count(counts["problem"], "problem")
    warnings = spell_count(counts["warning"], "warning")
    print(f"\n{problems}, {warnings}, {counts['ok']} ok", flush=True)
    if given.all:
        # This report takes seconds: the lines above are shown before it
        from torch.utils.collect_env import get_pretty_env_info

        print(f"\n{get_pretty_env_info()}")
    return int(counts["problem"] > 0)


# --- the limits ---


def _check_cores() -> _Finding:
    from parawrap.backends.cores import usable_cores

    return _Finding(f"{usable_cores()} of {os.cpu_count()} usable")


def _check_shared_memory(folder: Path = Path("/dev/shm")) -> _Finding:
    if not folder.is_dir():
        return _Finding(f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    fact = f"{folder}: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    if usage.total > _SMALL_SHM:
        return _Finding(fact)
    cure = (
        "DataLoader workers need more: start the container with --shm-size=1g. parawrap's own "
        "workers do not use it"
    )
    return _Finding(fact, cure)


def _check_open_files() -> _Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fact = f"{soft} per process (hard limit {hard})"
    if soft >= _FEW_FILES:
        return _Finding(fact)
    cure = f"ulimit -n {_FEW_FILES}"
    if hard < _FEW_FILES:  # only root raises a hard limit
        cure = (
            f"as root, with ulimit -Hn {_FEW_FILES}, or start the container with --ulimit "
            f"nofile={_FEW_FILES}"
        )
    return _Finding(fact, f"A launch needs several per rank. Raise the limit: {cure}")


def _check_accelerators() -> _Finding:
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator(check_available=True)
        return _Finding(f"{torch.accelerator.device_count()} of kind {kind}")
    if shutil.which("nvidia-smi") is None:
        return _Finding("no device")
    # A driver of NVIDIA is installed, so a GPU should be there
    cure = (
        "Compare the driver's version in nvidia-smi with that of torch, and check "
        "CUDA_VISIBLE_DEVICES"
    )
    if torch.version.cuda is None:
        cure = "Install a CUDA build of torch: https://pytorch.org/get-started/locally"
    return _Finding("this machine has nvidia-smi, but torch sees no device", cure)


# --- the trials: a wrong result raises ---


def _try_lanes() -> _Finding:
    import torch

    from parawrap import parallel

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model, x = torch.nn.Linear(16, 4).to(device), torch.randn(10, 16, device=device)
    with torch.no_grad():
        plain = model(x)
        with parallel(model, [device, device], out_dims=0):
            output = model(x)
    # Rounding of TF32 on accelerators is allowed. Rows in the wrong places differ by far more
    torch.testing.assert_close(output, plain, rtol=1e-3, atol=1e-3)
    return _Finding(f"two lanes on {device} gave the output of the plain call")


def _try_ranks() -> _Finding:
    from parawrap import Platform, wrapper

    platform = Platform(
        device="cpu", n_cpus=2, launcher="local", verbose=False, timeout_min=_TRIAL_MIN
    )
    add_ranks = wrapper(platform)(_add_ranks)
    sums = list(add_ranks())
    if sums != [1, 1]:  # the ranks are numbers 0 and 1
        msg = f"the ranks summed their numbers to {sums} instead of [1, 1]"
        raise RuntimeError(msg)
    return _Finding("two processes met, and communicated")


def _add_ranks() -> float:
    """Return the sum of the numbers of all ranks."""
    import torch
    import torch.distributed as dist

    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


# In the order of the printed lines
_CHECKS = {
    "CPU cores": _check_cores,
    "shared memory": _check_shared_memory,
    "open files": _check_open_files,
    "accelerators": _check_accelerators,
    "block on two lanes": _try_lanes,
    "launch of two ranks": _try_ranks,
}
