"""Modules that code reaches without the target holding them are refused: every lane would run the original."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import ReplicaError
from parawrap.replicas import ReplicaSet, names_of_globals

NORM = nn.BatchNorm1d(4)
LISTED = [nn.ReLU(), NORM]
WITHOUT_TENSORS = nn.ReLU()


def uses_a_global(x):
    return NORM(x)


class ReadsAList(nn.Linear):
    def forward(self, x):
        return LISTED[1](x)


class HasAnAttribute(nn.Linear):
    norm = NORM


def capturing(norm):
    class Captures(nn.Linear):
        @staticmethod
        def help(x):
            return norm(x)

    return Captures


TARGETS = {
    "function": (lambda: lambda x: uses_a_global(x), "uses_a_global uses the global 'NORM', which holds a BatchNorm1d"),
    "list": (lambda: ReadsAList(4, 4), r"ReadsAList\.forward uses the global 'LISTED', which holds a BatchNorm1d"),
    "class": (lambda: HasAnAttribute(4, 4), r"the class attribute HasAnAttribute\.norm is a BatchNorm1d"),
    "closure": (lambda: capturing(NORM)(4, 4), r"Captures\.help captures 'norm', which holds a BatchNorm1d"),
}


@pytest.mark.parametrize(("make", "says"), TARGETS.values(), ids=TARGETS)
def test_hidden_modules_are_refused(make, says):
    """The error names the function or class, the module, and the cure."""
    with pytest.raises(ReplicaError, match=rf"{says}.*Make it an attribute of the model"):
        ReplicaSet(make(), [torch.device("cpu")] * 2)
    model = nn.Sequential(nn.Linear(4, 4))
    replicas = ReplicaSet(model, [torch.device("cpu")] * 2)
    replicas.refresh()
    model.later = [make()]
    with pytest.raises(ReplicaError, match=says):
        replicas.refresh()


class Harmless(nn.Linear):
    """Has an attribute with the name of a global module, and a global layer without tensors."""

    NORM = 1

    def forward(self, x):
        return WITHOUT_TENSORS(super().forward(x)) * self.NORM


def test_other_names_are_accepted():
    ReplicaSet(Harmless(4, 4), [torch.device("cpu")] * 2)
    ReplicaSet(capturing(nn.ReLU())(4, 4), [torch.device("cpu")] * 2)
    assert names_of_globals((lambda: [NORM for _ in LISTED]).__code__) == {"NORM", "LISTED"}
