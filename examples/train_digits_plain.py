"""Train a classifier of handwritten digits with a plain loop.

``train_digits_ranks.py`` runs it in two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,408 images of 8x8 pixels for training and 389 for testing, with their labels."""
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1408], order[1408:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def classifier() -> nn.Module:
    """Return a new model."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def train(epochs: int = 20) -> tuple[list[float], float]:
    """Return the loss of each epoch, and the accuracy on the test images."""
    train_data, test_data = digits()
    model = classifier()
    loader = DataLoader(train_data, batch_size=64, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    curve = []
    for _ in range(epochs):
        total, rows = 0.0, 0
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, rows = total + loss.item() * len(labels), rows + len(labels)
        curve.append(total / rows)

    loader = DataLoader(test_data, batch_size=64)
    with torch.no_grad():
        predicted = torch.cat([model(images).argmax(1) for images, _ in loader])
    return curve, (predicted == test_data.tensors[1]).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    curve, accuracy = train()
    print(*(f"{loss:.3f}" for loss in curve))
    print(f"accuracy {accuracy:.1%}")
