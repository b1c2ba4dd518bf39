"""Globals of methods of a global object and of its parts, of functions in a container, and of a
metaclass.
"""

import torch
from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)

SCALE, RATE = 1, 1


class Meta(type):
    def scaled(cls):
        return SCALE


class Model(torch.nn.Module, metaclass=Meta):
    def forward(self):
        return SCALE


class Plain:
    def scaled(self):
        return SCALE


class Optimizer:
    def step(self):
        return RATE


class Trainer:
    def __init__(self, part):
        self.parts = [part]

    def train(self):
        return self.parts[0].step()


trainer = Trainer(Optimizer())
model, plain, handlers = torch.nn.Sequential(Model()), Plain(), {"a": [lambda: SCALE]}


def use():
    return model[0](), plain.scaled(), handlers["a"][0](), Model.scaled()


def train():
    return trainer.train()


with platform.open() as ranks:
    same(ranks(use)[1], (1, 1, 1, 1))
    SCALE = 2
    same(ranks(use)[1], (2, 2, 2, 2))
    same(ranks(train)[1], 1)
    RATE = 2
    same([ranks(train)[1] for _ in range(2)], [2, 2])
