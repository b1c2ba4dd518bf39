"""Models for these tests, in double precision, so that the order of additions changes no result
noticeably.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.cuda.gpus import HOME
from tests.helpers.device_models import Tied, mlp


def conv_net():
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ]
    return nn.Sequential(*layers).double()


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()


NETS = {
    "mlp": (mlp, (5,)),
    "conv": (conv_net, (2, 6, 6)),
    "encoder": (encoder_layer, (4, 8)),
    "tied": (Tied, (5,)),
}


def net_and_rows(name, count):
    """Return a net on the first GPU, and a batch for it on the CPU."""
    make, shape = NETS[name]
    return make().to(HOME).eval(), torch.randn(count, *shape, dtype=torch.float64)
