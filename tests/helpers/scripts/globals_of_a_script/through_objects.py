"""Globals of methods of a global object, of functions in a container, and of a metaclass."""

import torch
from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

SCALE = 1


class Meta(type):
    def scaled(cls):
        return SCALE


class Model(torch.nn.Module, metaclass=Meta):
    def forward(self):
        return SCALE


class Plain:
    def scaled(self):
        return SCALE


model, plain, handlers = torch.nn.Sequential(Model()), Plain(), {"a": [lambda: SCALE]}


def use():
    return model[0](), plain.scaled(), handlers["a"][0](), Model.scaled()


with platform.open() as ranks:
    same(ranks(use)[1], (1, 1, 1, 1))
    SCALE = 2
    same(ranks(use)[1], (2, 2, 2, 2))
