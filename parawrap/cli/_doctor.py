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
_TRIAL_MIN = 1.0  # two ranks start in a second: after a minute, something is wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="then print the report of torch.utils.collect_env, for a bug report",
    )


def run(given: argparse.Namespace) -> int:
    """Print the versions, a line per check, and a summary; with --all, torch's report too.

    Return 1 if a check raises.
    """
    import torch

    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"parawrap {__version__}, {versions}", flush=True)
    counts: Counter[str] = Counter()
    for name, check in _CHECKS.items():
        try:
            detail, cure = check()
            state = "warning" if cure else "ok"
            below = cure
        except Exception as error:  # noqa: BLE001 (drivers of the machine may fail in any way)
            state, detail = "problem", f"{type(error).__name__}: {error}"
            below = traceback.format_exc()
        counts[state] += 1
        print(f"{state:>7}  {name:<19}  {detail}", flush=True)
        if below:
            print(textwrap.indent(below, " " * 30))
    problems = spell_count(counts["problem"], "problem")
    warnings = spell_count(counts["warning"], "warning")
    print(f"\n{problems}, {warnings}, {counts['ok']} ok", flush=True)
    if given.all:
        # It takes seconds. The lines above are shown before it
        from torch.utils.collect_env import get_pretty_env_info

        print(f"\n{get_pretty_env_info()}")
    return int(counts["problem"] > 0)


# --- the limits: each check returns a finding, and a cure if it is a warning ---


def _check_cores() -> tuple[str, str]:
    from parawrap.backends.cores import usable_cores

    return f"{usable_cores()} of {os.cpu_count()} usable", ""


def _check_shared_memory(folder: Path = Path("/dev/shm")) -> tuple[str, str]:
    if not folder.is_dir():
        return f"this system has no {folder}", ""
    usage = shutil.disk_usage(folder)
    found = f"{folder}: {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
    cure = (
        "DataLoader workers need more: start the container with --shm-size=1g. parawrap's own "
        "workers do not use it"
    )
    return found, cure if usage.total <= _SMALL_SHM else ""


def _check_open_files() -> tuple[str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} per process (hard limit {hard})"
    if soft >= _FEW_FILES:
        return found, ""
    cure = f"ulimit -n {_FEW_FILES}"
    if hard < _FEW_FILES:
        cure = (
            f"as root, with ulimit -Hn {_FEW_FILES}, or start the container with --ulimit "
            f"nofile={_FEW_FILES}"
        )
    return found, f"A launch needs several per rank. Raise the limit: {cure}"


def _check_accelerators() -> tuple[str, str]:
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator(check_available=True)
        return f"{torch.accelerator.device_count()} of kind {kind}", ""
    if shutil.which("nvidia-smi") is None:
        return "no device", ""
    cure = (
        "Compare the driver's version in nvidia-smi with that of torch, and check "
        "CUDA_VISIBLE_DEVICES"
    )
    if torch.version.cuda is None:
        cure = "Install a CUDA build of torch: https://pytorch.org/get-started/locally"
    return "this machine has nvidia-smi, but torch sees no device", cure


# --- the trials ---


def _try_lanes() -> tuple[str, str]:
    import torch

    from parawrap import parallel

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model, x = torch.nn.Linear(16, 4).to(device), torch.randn(10, 16, device=device)
    with torch.no_grad():
        plain = model(x)
        with parallel(model, [device, device], out_dims=0):
            output = model(x)
    # Accelerators may multiply with TF32. Rows in the wrong places differ by far more
    torch.testing.assert_close(output, plain, rtol=1e-3, atol=1e-3)
    return f"two lanes on {device} gave the output of the plain call", ""


def _try_ranks() -> tuple[str, str]:
    from parawrap import Platform, wrapper

    platform = Platform(
        device="cpu", n_cpus=2, launcher="local", verbose=False, timeout_min=_TRIAL_MIN
    )
    found = list(wrapper(platform)(_sum_over_ranks)())
    if found != [1, 1]:
        msg = f"the ranks summed their numbers to {found} instead of [1, 1]"
        raise RuntimeError(msg)
    return "two processes met, and communicated", ""


def _sum_over_ranks() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


_CHECKS = {
    "CPU cores": _check_cores,
    "shared memory": _check_shared_memory,
    "open files": _check_open_files,
    "accelerators": _check_accelerators,
    "block on two lanes": _try_lanes,
    "launch of two ranks": _try_ranks,
}
