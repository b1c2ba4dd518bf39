"""The trials of ``parawrap doctor``: blocks and a launch, each in a separate process.

``python -m parawrap.cli._trials NAME`` runs one trial, and prints its result as JSON on the last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from parawrap.cli._check import Check

__all__ = ["ON_ACCELERATORS", "ON_CPU", "Trial"]


class Trial:
    """One trial. Its process imports torch at once, and runs the trial when `check` is called.

    The end of its ``with`` block kills the process. The processes that it started end with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._refusal = ""
        try:
            self._process = _started(name)
        except OSError as error:  # the system allows no further process
            self._refusal = f"the process did not start: {error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def check(self, limit_s: float) -> Check:
        """Run the trial, for at most `limit_s` seconds."""
        if self._process is None:
            return Check(self._name, "problem", self._refusal, _CURES[self._name])
        try:
            output, errors = self._process.communicate("start\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, errors = self._process.communicate()
            return Check(self._name, "problem", f"not done after {limit_s:g} seconds", _CURES[self._name], traceback=errors)
        lines = output.splitlines()
        if self._process.returncode or not lines:
            why = [line.strip() for line in errors.splitlines() if line.strip()]
            why = why or [f"exit code {self._process.returncode}"]
            return Check(self._name, "problem", why[-1], _CURES[self._name], traceback=errors)
        result = json.loads(lines[-1])
        return Check(self._name, "ok", result["detail"], milliseconds=result["milliseconds"])


def _started(name: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "parawrap.cli._trials", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C reaches this process alone
    )


def _two_lanes() -> str:
    return _block(["cpu", "cpu"])


def _accelerators() -> str:
    return _block(None)


def _two_workers() -> str:
    return _block(["cpu", "cpu"], workers="process")


def _two_ranks() -> str:
    from parawrap import Platform, wrapper

    results = wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(_sum_of_ranks)()
    if list(results) != [1, 1]:
        msg = f"the ranks summed their numbers to {list(results)} instead of [1, 1]"
        raise AssertionError(msg)
    return "two processes met, and communicated"


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


def _block(devices: Sequence[str] | None, **options: Any) -> str:
    """Compare a call inside a block with the plain call."""
    import torch

    from parawrap import parallel

    model, x = torch.nn.Linear(16, 4), torch.randn(10, 16)
    with torch.no_grad():
        plain = model(x)
        if devices is None:
            model.to(torch.accelerator.current_accelerator())
            x = x.to(torch.accelerator.current_accelerator())
        with parallel(model, devices, out_dims=0, **options) as p:
            output = model(x)
            count = len(p.devices)
    lanes = f"{count} lane{'s' * (count != 1)}"
    if not torch.allclose(output.cpu(), plain, rtol=1e-3, atol=1e-3):
        msg = f"{lanes} gave another output than the plain call"
        raise AssertionError(msg)
    return f"{lanes} gave the output of the plain call"


ON_CPU: dict[str, Callable[[], str]] = {
    "block on two CPU lanes": _two_lanes,
    "launch of two ranks": _two_ranks,
    "block on two workers": _two_workers,
}
ON_ACCELERATORS: dict[str, Callable[[], str]] = {"block on the accelerators": _accelerators}
_PROCESSES = (
    "Check the limits on processes (ulimit -u) and on open files (ulimit -n), and whether this system allows new processes"
)
_CURES = {
    "block on two CPU lanes": "Install torch and parawrap again, in an empty environment",
    "block on the accelerators": "Check the driver: a plain torch.ones(1, device=...) must work",
    "launch of two ranks": _PROCESSES,
    "block on two workers": _PROCESSES,
}


def main(name: str) -> int:
    """Run one trial in this process, after a line on standard input."""
    from parawrap import parallel, wrapper  # noqa: F401 (the imports are not part of the time)

    sys.stdin.readline()
    start = perf_counter()
    try:
        detail = {**ON_CPU, **ON_ACCELERATORS}[name]()
    except Exception:  # noqa: BLE001 (shown by the doctor)
        traceback.print_exc()
        return 1
    print(json.dumps({"detail": detail, "milliseconds": 1e3 * (perf_counter() - start)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
