"""Leave a block with workers open at the end."""

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
        if x[0] == 1:
            Path(self.folder, f"{os.getpid()}.pid").touch()
            threading.Event().wait()
        return x


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    p = parallel(Blocked(sys.argv[1]), ["cpu", "cpu"], workers="process")
    futures = [p.submit(torch.full((2,), value)) for value in (0.0, *map(float, sys.argv[2:]))]
    print(futures[0].result().tolist(), flush=True)
    if "1" in sys.argv and sys.argv[-1] != "1":
        futures[1].result()
