"""Models for these tests, in double precision, so that the order of additions changes no result noticeably."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from parawrap.lanes import here
from tests.cuda.gpus import HOME, cuda, sleep
from tests.helpers.device_models import Tied, mlp

WIDTH = 512
SHAPE = (4096, WIDTH)
"""16 MiB in double precision. The caching allocator keeps separate blocks for this size and reuses equal ones."""


def conv_net():
    """A convolution with BatchNorm."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers).double()


def encoder_layer():
    """A layer of a transformer."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()


NETS = {"mlp": (mlp, (5,)), "conv": (conv_net, (2, 6, 6)), "encoder": (encoder_layer, (4, 8)), "tied": (Tied, (5,))}


def net_and_rows(name, count=17, *, train=False):
    """Return a net on the first GPU, and a batch for it on the CPU."""
    make, shape = NETS[name]
    return make().to(HOME).train(train), torch.randn(count, *shape, dtype=torch.float64)


class Where(nn.Module):
    """A module that records the device, stream, and current device of each shard."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        type(self).seen = []  # on the class: a replica has its own attributes

    def forward(self, x):
        self.seen.append((x.device.index, cuda.current_stream(x.device).stream_id, cuda.current_device()))
        return x * self.weight


class Late(nn.Module):
    """A module that adds one to its input. `late` maps lanes to their delay in GPU cycles."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.late = SimpleNamespace(lanes=(), cycles=0)

    def forward(self, x):
        lane = here.lane
        if lane is not None and lane.index in self.late.lanes:
            sleep(self.late.cycles)
        return x + self.weight

    def keep_busy(self, lanes, cycles):
        """Delay these lanes from now on."""
        self.late.lanes, self.late.cycles = lanes, cycles
