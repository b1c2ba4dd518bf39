"""The trials of ``parawrap doctor``, each in a separate process: ``python -m parawrap.cli._trials NAME``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from parawrap.cli._check import Check, run_command

__all__ = ["TRIALS", "describe_machine", "run_trial"]


def describe_machine(limit_s: float) -> tuple[dict[str, Any], list[Check]]:
    """Return the facts of `torch.utils.collect_env`, and the checks of this machine."""
    described = run_trial("machine", limit_s)
    if described.state == "problem":
        return {}, [described]
    facts, checks = json.loads(described.detail)
    return facts, [Check(*check) for check in checks]


def run_trial(name: str, limit_s: float) -> Check:
    """Run a trial in a process that imports the same modules as this one."""
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    command = [sys.executable, "-P", "-m", "parawrap.cli._trials", name]
    code, output, errors = run_command(command, limit_s, {**os.environ, "PYTHONPATH": path})
    if code == 0:
        return Check(name, "ok", output.splitlines()[-1])
    lines = errors.strip().splitlines() or [f"exit code {code}"]
    return Check(name, "problem", lines[-1], _CURES.get(name, ""), errors)


def _machine() -> str:
    from torch.utils.collect_env import get_env_info

    from parawrap.cli._machine import machine_checks

    return json.dumps([get_env_info()._asdict(), list(machine_checks())])


def _lanes() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _compare_with_plain_call(accelerator or torch.device("cpu"), ["cpu", "cpu"] if accelerator is None else None)


def _workers() -> str:
    import torch

    return _compare_with_plain_call(torch.device("cpu"), ["cpu", "cpu"], workers="process")


def _compare_with_plain_call(device: Any, devices: Sequence[str] | None, **options: Any) -> str:
    import torch

    from parawrap import parallel

    start = perf_counter()
    model, x = torch.nn.Linear(16, 4).to(device), torch.randn(10, 16, device=device)
    with torch.no_grad():
        plain = model(x)
        with parallel(model, devices, out_dims=0, **options) as p:
            output, lanes = model(x), f"{len(p.devices)} {device.type} lane{'s' * (len(p.devices) != 1)}"
    if not torch.allclose(output, plain, rtol=1e-3, atol=1e-3):
        msg = f"{lanes} gave another output than the plain call"
        raise AssertionError(msg)
    return f"{lanes} gave the output of the plain call, {1e3 * (perf_counter() - start):.0f} ms"


def _ranks() -> str:
    from parawrap import Platform, wrapper

    start = perf_counter()
    results = wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(_sum_over_ranks)()
    if list(results) != [1, 1]:
        msg = f"the ranks summed their numbers to {list(results)} instead of [1, 1]"
        raise AssertionError(msg)
    return f"two processes met, and communicated, {1e3 * (perf_counter() - start):.0f} ms"


def _sum_over_ranks() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


TRIALS = {"block on lanes": _lanes, "launch of two ranks": _ranks, "block on two workers": _workers}
_PROCESSES = (
    "Check the limits on processes (ulimit -u) and on open files (ulimit -n), and whether this system allows new processes"
)
_CURES = {
    "machine": "Run python -m torch.utils.collect_env. If it fails, install torch: https://pytorch.org/get-started/locally",
    "block on lanes": "Try torch.ones(1, device=...) on each device. If it works, install parawrap in an empty environment",
    "launch of two ranks": _PROCESSES,
    "block on two workers": _PROCESSES,
}


if __name__ == "__main__":
    print({"machine": _machine, **TRIALS}[sys.argv[1]]())
