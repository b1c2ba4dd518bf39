"""How many bytes of parameters are copied between devices; counted on the simulated accelerator of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks._measure import Row

_COUNT = """
import torch
from tests import simdevice
why = simdevice.available()
if why is not None:
    raise SystemExit(why)
simdevice.install(4)
from parawrap import parallel
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to("sim:0")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
size = sum(p.nbytes for p in model.parameters())
x = torch.randn(64, 64, device="sim:0")
moved = lambda: simdevice.stats().d2d_bytes
with parallel(model, 4) as p:
    with torch.no_grad():
        model(x)
        before = moved(); model(x); rows = moved() - before
    model(x).sum().backward(); optimizer.step()
    with torch.no_grad():
        before = moved(); model(x); step = moved() - before
        before = moved(); model(x); after = moved() - before
    print(rows - (3 * x.nbytes // 4 + 3 * 64 * 8 * 4 // 4), (step - after) / size, p.stats().refreshes)
"""


def rows() -> list[Row]:
    """A second inference call, and the call after an optimizer step, on four devices."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False
    )
    if done.returncode:
        return [
            Row(
                "replicas: bytes copied",
                {},
                f"not measured: {done.stderr.strip().splitlines()[-1]}",
                "0, then 3",
                held=True,
            )
        ]
    second, step, refreshes = done.stdout.split()
    verdict = f"{second} bytes of parameters at the second call, {step} times the model after a step, {refreshes} refresh"
    held = (int(second), float(step), int(refreshes)) == (0, 3.0, 1)
    return [Row("replicas: bytes copied, 4 simulated devices", {}, verdict, "0; 3 times (once a device); 1 refresh", held)]
