"""Train, look at the loss, and train on, in two ranks that stay. ``make demo`` runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parawrap import Platform, functional

model: nn.Module  # `load` assigns these in the ranks
optimizer: torch.optim.Optimizer
x: Tensor
y: Tensor


def load() -> None:
    """Store a model and its data in the rank, for later calls."""
    global model, optimizer, x, y
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    y = torch.sin(3 * x)
    model = functional.to(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)


def train(steps: int) -> float:
    """Train the model that `load` stored, and return the loss of the last step."""
    losses: list[float] = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1]


if __name__ == "__main__":
    with Platform(device="cpu", n_cpus=2, seed=0).open() as ranks:
        ranks(load)
        for _ in range(3):
            print(f"{ranks}: the loss is {ranks(train, 40)[0]:.4f}")
