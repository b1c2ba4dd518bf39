"""Save and resume a preempted training with ``should_checkpoint``, ``requeue``, and ``restart``.

Run it with ``python examples/preemption.py``. ``Launch.preempt`` simulates the preemption of a
cluster. On Slurm, use ``Platform(device="slurm", ...)`` and a path on a shared file system. The
loop stays the same.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from parawrap import Platform, current_rank, functional, wrapper

Weights = dict[str, Tensor]

BATCH = 128  # rows per step, over all ranks
STEPS = 140
REPORTED = 20
_LOOK_S = 0.01


def rows_of(step: int, count: int) -> Tensor:
    """Return this rank's rows of a step's batch.

    They depend only on the step, so a restart continues in order.
    """
    per_epoch = count // BATCH
    epoch, index = divmod(step, per_epoch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    rank = current_rank()
    return order[index * BATCH : (index + 1) * BATCH][rank.global_rank :: rank.world_size]


def save(state: dict[str, Any], checkpoint: Path) -> None:
    """Save under a temporary name, then rename.

    If the process ends in between, the older checkpoint stays intact.
    """
    temporary = checkpoint.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(checkpoint)


@wrapper(Platform(device="cpu", n_cpus=2, grace_s=60))
def train(
    images: Tensor, labels: Tensor, checkpoint: Path, wait_at: int | None = None
) -> tuple[int, int, Weights]:
    """Train to the last step.

    Return the first step of this start, the number of restarts, and the weights.

    Args:
        images: One row per image of 8x8 pixels.
        labels: The digits on the images.
        checkpoint: The file to save to when the launch is preempted, and to resume from.
        wait_at: The step at which the first start waits for its preemption, so that a late
            preemption still finds it.
    """
    rank = current_rank()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = functional.to(net)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    begun = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["net"])
        optimiser.load_state_dict(state["optimiser"])
        begun = state["step"]
    print(f"start {rank.restart} begins at step {begun}")

    step = begun
    while step < STEPS:
        if rank.should_checkpoint():  # True at the same step in every rank
            if rank.global_rank == 0:
                save(
                    {"net": net.state_dict(), "optimiser": optimiser.state_dict(), "step": step},
                    checkpoint,
                )
            rank.requeue()  # the next start begins when every rank is here
        if step == wait_at and rank.restart == 0:
            time.sleep(_LOOK_S)
            continue
        if step % REPORTED == 0 and rank.global_rank == 0:
            print(f"at step {step}")
        rows = rows_of(step, len(images))
        optimiser.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimiser.step()
        step += 1
    return begun, rank.restart, net.state_dict()


def main() -> None:
    """Train once with and once without preemption, and compare the weights."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    with tempfile.TemporaryDirectory() as folder:
        launch = train.submit(images, labels, Path(folder, "preempted.pt"), wait_at=STEPS - 1)
        while f"at step {2 * REPORTED}\n" not in launch.logs(0) and not launch.done():
            time.sleep(_LOOK_S)
        launch.preempt()
        begun, restart, weights = launch.results()[0]
        undisturbed = train(images, labels, Path(folder, "undisturbed.pt"))[0][2]
    is_equal = all(torch.equal(weights[name], undisturbed[name]) for name in weights)
    print(f"preempted at step {begun} of {STEPS}, restarted {restart} time(s)")
    print(f"the same weights as without preemption: {is_equal}")


if __name__ == "__main__":
    main()
