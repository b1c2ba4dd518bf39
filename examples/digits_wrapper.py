"""Train, save, and evaluate with ``Wrapper(platform).start(task, args)``.

The task gets its rank and its process group.

The example follows the MNIST example of ddpw, with scikit-learn's digits and parawrap's names. Run
it with ``python examples/digits_wrapper.py``. On a machine with GPUs, use
``Platform(device="gpu")``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.data import DataLoader, Dataset, TensorDataset

from parawrap import Platform, Wrapper, current_rank, functional


class DigitsModel(nn.Module):
    """A model for images of 8x8 pixels with two convolutions, batch normalisation, and dropout.

    It returns log-probabilities.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.bn = nn.BatchNorm2d(64)
        self.drop1 = nn.Dropout2d(0.25)
        self.drop2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 2 * 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.drop1(F.max_pool2d(self.bn(x), 2)).flatten(1)
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(x)))), dim=1)


def train(
    global_rank: int, local_rank: int, group: Any, args: tuple[int, int, Dataset[Any], Path] | None
) -> list[float]:
    """Train in one rank, and return the mean loss of each epoch over all ranks.

    Rank 0 saves the model.
    """
    assert args is not None
    batch_size, epochs, dataset, checkpoint = args
    print(f"global rank {global_rank}; local rank {local_rank}")
    functional.set_default_device(local_rank)
    device = current_rank().device

    net = DigitsModel()
    model = functional.to(net, local_rank)
    sampler: Any = functional.get_dataset_sampler(dataset, global_rank)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    curve = []
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            optimiser.zero_grad()
            loss = F.nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean, group=group)
        curve.append(mean.item() / current_rank().world_size)
        if global_rank == 0:
            print(f"epoch {epoch}: loss {curve[-1]:.4f}")
    if global_rank == 0:
        torch.save(net.state_dict(), checkpoint)
    return curve


@torch.no_grad()
def evaluate(
    global_rank: int, local_rank: int, group: Any, args: tuple[int, Dataset[Any], Path] | None
) -> float:
    """Return the accuracy over all ranks. Each image is evaluated by exactly one rank."""
    assert args is not None
    batch_size, dataset, checkpoint = args
    functional.set_default_device(local_rank)
    device = current_rank().device

    model = DigitsModel()
    model.load_state_dict(torch.load(checkpoint, map_location=device))
    functional.to(model, local_rank, sync_modules=False).eval()
    sampler = functional.get_dataset_sampler(dataset, global_rank, pad=False)

    counts = torch.zeros(2)  # correct predictions, images
    for images, labels in DataLoader(dataset, batch_size, sampler=sampler):
        right = model(images.to(device)).argmax(-1) == labels.to(device)
        counts += torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts, group=group)
    return (counts[0] / counts[1]).item()


def main() -> None:
    """Train on most of the digits, evaluate on the rest."""
    torch.manual_seed(0)
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    trained_on = TensorDataset(images[order[:1437]], labels[order[:1437]])
    kept_back = TensorDataset(images[order[1437:]], labels[order[1437:]])

    wrapper = Wrapper(Platform(device="cpu", n_cpus=2))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "digits.pt"
        wrapper.start(train, (32, 8, trained_on, checkpoint))
        accuracies = wrapper.start(evaluate, (64, kept_back, checkpoint))
    print(f"accuracy {accuracies[0]:.2%}, the same on every rank: {len(set(accuracies)) == 1}")


if __name__ == "__main__":
    main()
