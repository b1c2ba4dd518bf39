"""Train a small CNN on handwritten digits in two ranks, and evaluate it with ``map`` on two lanes.

Run it with ``make demo``. ``@wrapper`` starts two processes for training. Each trains on half of
every batch, and rank 0 returns the weights and the loss curve. Evaluation runs in this process, in
a ``with parallel(...)`` block. The script writes to demo-output/: pictures of the loss curve and of
the confusion matrix, and timelines of the ranks and of the lanes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from parawrap import Platform, current_rank, functional, parallel, wrapper

mpl.use("Agg")
import matplotlib.pyplot as plt

OUTPUT = Path("demo-output")
RANKS = Platform(device="cpu", n_cpus=2)  # device="gpu" uses every GPU of the machine
# ["cuda:0", "cuda:1"] on a machine with two GPUs; None uses every accelerator
LANES = ["cpu", "cpu"]
EPOCHS = 12
BATCH = 128


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,437 images of 8x8 pixels for training and 360 for testing, with their labels."""
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def cnn() -> nn.Module:
    """Return a model with two convolutions and a classifier, large enough for two busy lanes."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


@wrapper(RANKS)
def train(images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], list[float]] | None:
    """Train in one rank. Rank 0 returns the weights and the mean loss of each epoch."""
    rank = current_rank()
    print(f"process {os.getpid()} on {rank.device}, {torch.get_num_threads()} threads")
    net = cnn()
    model = functional.to(net)
    dataset = TensorDataset(images, labels)
    sampler: Any = functional.get_dataset_sampler(dataset)  # None with one rank
    loader = DataLoader(dataset, BATCH // rank.world_size, sampler=sampler, shuffle=sampler is None)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    curve = []
    for epoch in range(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        losses = torch.stack(
            [train_step(model, optimizer, x.to(rank.device), y.to(rank.device)) for x, y in loader]
        )
        dist.all_reduce(mean := losses.mean() / rank.world_size)
        curve.append(mean.item())
    return (net.state_dict(), curve) if rank.global_rank == 0 else None


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Run a training step, and return the loss."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Stream the test images through the lanes, batch by batch."""
    with torch.no_grad(), parallel(model, LANES) as p:
        with p.trace(OUTPUT / "lanes.html"):
            scores = torch.cat(list(p.map(torch.split(images, 24), progress=True)))
        print(f"evaluated {len(images)} images through map:")
        print(p.stats())
    print(f"wrote {OUTPUT / 'lanes.html'}, a timeline of the lanes")
    correct = (scores.argmax(1) == labels).float().mean().item()
    print(f"test accuracy {correct:.2%}")
    draw_confusion(labels, scores.argmax(1))
    if correct < 0.97:
        msg = f"the accuracy is {correct:.2%}; it should be at least 97%"
        raise SystemExit(msg)


def draw_curve(curve: list[float]) -> None:
    """Plot the mean loss of each epoch over all ranks."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.semilogy(range(1, len(curve) + 1), curve, marker="o")
    axes.set_xlabel("epoch")
    axes.set_ylabel("cross entropy")
    axes.set_title(f"training in {RANKS.world_size} ranks")
    save(figure, "loss.png")


def draw_confusion(labels: Tensor, predicted: Tensor) -> None:
    """Plot the confusion matrix."""
    display = ConfusionMatrixDisplay.from_predictions(
        labels.numpy(), predicted.numpy(), colorbar=False, cmap="Blues"
    )
    display.ax_.set_title("Handwritten digits, test images")
    save(display.figure_, "confusion.png")


def save(figure: Figure, name: str) -> None:
    """Write a picture, and print its path."""
    figure.savefig(OUTPUT / name, dpi=120)
    plt.close(figure)
    print(f"wrote {OUTPUT / name}")


def main() -> None:
    """Train, evaluate, and plot."""
    OUTPUT.mkdir(exist_ok=True)
    train_images, train_labels, test_images, test_labels = digits()
    print(train.dry_run(train_images, train_labels))
    start = time.perf_counter()
    trained = train(train_images, train_labels)[0]
    assert trained is not None
    weights, curve = trained
    print(
        f"trained {EPOCHS} epochs of {len(train_images)} images in {RANKS.world_size} ranks, "
        f"batches of {BATCH},"
    )
    print(
        f"  in {time.perf_counter() - start:.2f} s with the start of the ranks; loss "
        f"{curve[0]:.3f} to {curve[-1]:.3f}"
    )
    draw_curve(curve)
    model = cnn()
    model.load_state_dict(weights)
    evaluate(model, test_images, test_labels)


if __name__ == "__main__":
    main()
