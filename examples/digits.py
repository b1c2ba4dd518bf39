"""Train a small CNN on scikit-learn's handwritten digits inside ``with parallel(...)``, and evaluate it through ``map``.

Run it with ``make demo``. The same loop is run plainly beside it, batch by batch, on a copy of the model, so that time and
result can be compared. Two pictures are written into demo-output/: a confusion matrix and a timeline of the lanes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parawrap import Parallel, parallel

mpl.use("Agg")
import matplotlib.pyplot as plt

LANES = ["cpu", "cpu"]  # ["cuda:0", "cuda:1"] on a machine with two GPUs; None takes whatever there is
EPOCHS = 12
BATCH = 128
OUTPUT = Path("demo-output")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,437 images of 8x8 pixels to train on, and 360 to test on."""
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def cnn() -> nn.Module:
    """Two convolutions and a classifier, with room enough to give two lanes something to do."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 10),
    )


def batches(images: Tensor, labels: Tensor, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The images in a new order each epoch; the last batch is short."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        yield images[rows], labels[rows]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """An ordinary training step: nothing in it knows about lanes. Returns the seconds it took."""
    start = time.perf_counter()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return time.perf_counter() - start


def train(images: Tensor, labels: Tensor) -> nn.Module:
    """Train one model in parallel and its twin plainly, step by step in turn."""
    model = cnn()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    twins_optimizer = torch.optim.Adam(twin.parameters(), lr=2e-3)
    in_lanes = plainly = 0.0
    with parallel(model, LANES) as p:
        for epoch in range(EPOCHS):
            for x, y in batches(images, labels, epoch):
                in_lanes += train_step(model, optimizer, x, y)
                plainly += train_step(twin, twins_optimizer, x, y)
        print(f"trained {EPOCHS} epochs of {len(images)} images on {len(p.devices)} lanes, batches of {BATCH}:")
        print(p.stats())
    gap = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    print(f"  in lanes {in_lanes:.2f} s, plainly {plainly:.2f} s with torch's own {torch.get_num_threads()} threads")
    print(f"  the weights differ from those of the plain loop by at most {gap:.1e}")
    return model


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Stream the test images through the lanes, batch by batch."""
    with torch.no_grad(), parallel(model, LANES) as p:
        with p.trace(OUTPUT / "lanes.json") as trace:
            scores = torch.cat(list(p.map(torch.split(images, 24), progress=True)))
        print(f"evaluated {len(images)} images through map:")
        print(p.stats())
        draw_timeline(p, [(span.lane, span.start, span.end) for span in trace.spans])
    correct = (scores.argmax(1) == labels).float().mean().item()
    print(f"test accuracy {correct:.2%}")
    draw_confusion(labels, scores.argmax(1))
    if correct < 0.97:
        msg = f"the accuracy is {correct:.2%}; it should be at least 97%"
        raise SystemExit(msg)


def draw_confusion(labels: Tensor, predicted: Tensor) -> None:
    """Which digits were taken for which."""
    display = ConfusionMatrixDisplay.from_predictions(labels.numpy(), predicted.numpy(), colorbar=False, cmap="Blues")
    display.ax_.set_title("Handwritten digits, test images")
    save(display.figure_, "confusion.png")


def draw_timeline(p: Parallel[nn.Module], spans: list[tuple[int, int, int]]) -> None:
    """When each lane was working."""
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.7 * len(p.devices)), layout="constrained")
    first = min(start for _, start, _ in spans)
    for lane, device in enumerate(p.devices):
        bars = [((start - first) / 1e6, (end - start) / 1e6) for index, start, end in spans if index == lane]
        axes.broken_barh(bars, (lane - 0.35, 0.7), facecolors=f"C{lane}", edgecolor="white", label=f"{device}")
    axes.set_yticks(range(len(p.devices)), [f"lane {lane} ({device})" for lane, device in enumerate(p.devices)])
    axes.set_xlabel("milliseconds")
    axes.set_title("map: one bar a batch")
    save(figure, "lanes.png")


def save(figure: Figure, name: str) -> None:
    """Write a picture and say where it is."""
    OUTPUT.mkdir(exist_ok=True)
    figure.savefig(OUTPUT / name, dpi=120)
    plt.close(figure)
    print(f"wrote {OUTPUT / name}")


def main() -> None:
    """Train, evaluate, draw."""
    torch.manual_seed(0)
    train_images, train_labels, test_images, test_labels = digits()
    model = train(train_images, train_labels)
    evaluate(model, test_images, test_labels)


if __name__ == "__main__":
    main()
