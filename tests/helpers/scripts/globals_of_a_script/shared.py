"""Globals of one call share their objects."""

import torch
from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

net = torch.nn.Linear(2, 1)
trained = [net.weight]


def is_tied():
    return trained[0] is net.weight


with platform.open() as ranks:
    same([ranks(is_tied), ranks(is_tied)], [(True, True)] * 2)
