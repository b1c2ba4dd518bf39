"""Train a classifier of handwritten digits in two ranks.

``train_digits_plain.py`` is the same loop without ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from parawrap import Platform, current_rank, functional, wrapper


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


@wrapper(Platform(device="cpu", n_cpus=2))
def train(epochs: int = 20) -> tuple[list[float], float]:
    """Return the loss of each epoch, and the accuracy on the test images."""
    train_data, test_data = digits()
    rank = current_rank()
    model = functional.to(classifier())
    loader = DataLoader(train_data, batch_size=64 // rank.world_size, shuffle=True)
    loader = functional.shard_loader(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    curve = []
    for _ in range(epochs):
        total, rows = 0.0, 0
        for images, labels in loader:
            scores = model(images.to(rank.device))
            loss = cross_entropy(scores, labels.to(rank.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, rows = total + loss.item() * len(labels), rows + len(labels)
        curve.append(functional.reduce_metrics(total / rows, weight=rows))

    loader = functional.shard_loader(DataLoader(test_data, batch_size=64))
    with torch.no_grad():
        batches = (images.to(rank.device) for images, _ in loader)
        predicted = torch.cat([model(batch).argmax(1).cpu() for batch in batches])
    predicted = functional.gather_rows(predicted, loader)
    return curve, (predicted == test_data.tensors[1]).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    curve, accuracy = train()[0]
    print(*(f"{loss:.3f}" for loss in curve))
    print(f"accuracy {accuracy:.1%}")
