"""Gradients of copies come back to the parameters, whatever their layout.

Two names of the CPU are the devices here.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from parawrap.engine.parameter_copies import ParameterCopies

DEVICES = (torch.device("cpu"), torch.device("cpu:0"))


class Words(nn.Module):
    """Its tables get sparse gradients; one of them gets a dense one too, from the rows that are
    zero.
    """

    def __init__(self):
        super().__init__()
        self.sparse = nn.Embedding(11, 6, sparse=True, dtype=torch.float64)
        self.mixed = nn.Parameter(torch.randn(11, 6, dtype=torch.float64))
        self.dense = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, words):
        found = self.dense(
            self.sparse(words) + functional.embedding(words, self.mixed, sparse=True)
        )
        is_zero = (words == 0)[:, None]
        return found + torch.where(is_zero, self.mixed.sum(0), 0) if is_zero.any() else found


def run_on_copies(model, rows):
    """Run the model on each device with its copies of the parameters, and return the rows of all
    devices.
    """
    copies = ParameterCopies(DEVICES, [*model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    outputs = []
    for device, part in zip(DEVICES, rows.chunk(2), strict=True):
        named = dict(zip(names, copies.by_device[device], strict=True))
        outputs.append(torch.func.functional_call(model, named, (part,)))
    return torch.cat(outputs)


def test_sparse_gradients():
    """Sparse gradients stay sparse; the sum of a sparse and a dense one is dense; those of the
    other parameters travel as ever.
    """
    model = Words()
    plain = copy.deepcopy(model)
    for words in (
        torch.tensor([1, 3, 3, 5]),
        torch.tensor([1, 3, 0, 3]),
        torch.tensor([0, 0, 0, 1]),
    ):
        run_on_copies(model, words).square().sum().backward()
        plain(words).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad.layout == theirs.grad.layout
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())
        model.zero_grad()
        plain.zero_grad()
