"""Leave two blocks with workers open at the end: one is idle, the other one in a call."""

import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from parawrap import parallel


class Blocked(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def forward(self, x):
        Path(self.folder, f"{os.getpid()}.pid").touch()
        if x[0] == 1:
            threading.Event().wait()
        return x


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    model = Blocked(sys.argv[1])
    idle = parallel(model, ["cpu"], workers="process")
    print(idle.submit(torch.zeros(2)).result().tolist(), flush=True)
    busy = parallel(model, ["cpu", "cpu"], workers="process")
    futures = [busy.submit(torch.ones(2)) for _ in range(2)]
    try:
        futures[0].result()
    except KeyboardInterrupt:
        print("interrupted")
