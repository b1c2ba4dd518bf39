"""Classify handwritten digits with one block: on threads, processes, or nodes of a Ray cluster.

    python examples/one_block.py threads processes
    python examples/one_block.py ray                 # on a node of a Ray cluster

Only the arguments in `LANES` differ between them, and the outputs are the same. The model runs GRU
cells in a Python loop. Such a model holds Python's interpreter lock, so threads run it one operator
at a time. ``make demo`` runs the first line.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from parawrap import Platform, parallel

LANES: dict[str, dict[str, Any]] = {
    "threads": {"devices": ["cpu", "cpu"]},
    "processes": {"devices": ["cpu", "cpu"], "workers": "process"},
    "ray": {"devices": Platform(device="ray", n_nodes=2, n_cpus=1)},
}
BATCH = 16
ROUNDS = 10  # times that the stream reads the test images


class LineReader(nn.Module):
    """Reads the rows of an image, and then its columns, with three GRU cells.

    They run in a Python loop of 16 steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(width, 64) for width in (8, 64, 64)])
        self.classify = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (rows, 10) for images of shape (rows, 8, 8)."""
        states = [images.new_zeros(len(images), 64)] * len(self.cells)
        for line in (*images.unbind(1), *images.unbind(2)):
            values = line
            for layer, cell in enumerate(self.cells):
                values = states[layer] = cell(values, states[layer])
        scores: Tensor = self.classify(states[-1])
        return scores


def trained(images: Tensor, labels: Tensor, epochs: int = 15) -> nn.Module:
    """Train the model for a few seconds."""
    torch.manual_seed(0)
    model = LineReader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def classify(model: nn.Module, batches: list[Tensor], kind: str) -> Tensor:
    """Return the scores of all batches, and print how fast the lanes were."""
    with parallel(model, **LANES[kind]) as p:
        model(batches[0])  # starts the lanes
        start = time.perf_counter()
        scores = list(p.map(batches))
        seconds = time.perf_counter() - start
        print(f"{kind}: {len(batches) / seconds:.0f} batches per second")
        print(p.stats())
    return torch.cat(scores)


def main() -> None:
    """Train, and classify the test images with each kind of lanes that the command line names."""
    data: Any = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = trained(images[:1437], labels[:1437])
    batches = list(images[1437:].split(BATCH)) * ROUNDS
    expected = torch.cat([model(batch).detach() for batch in batches])
    print(
        f"test accuracy {(expected.argmax(1) == labels[1437:].repeat(ROUNDS)).float().mean():.1%}"
    )
    for kind in sys.argv[1:] or ["threads", "processes"]:
        torch.testing.assert_close(classify(model, batches, kind), expected)
        print(f"the outputs of {kind} are those of the plain loop")


if __name__ == "__main__":
    main()
