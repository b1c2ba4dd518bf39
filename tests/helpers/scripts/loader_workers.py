"""Start workers of a DataLoader by each method in rank 1, and collect what they find.

Workers by spawn and by forkserver run this script again, before they know of the rank. They see
fewer devices than its platforms name.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader

from parawrap import LaunchError, Platform, current_rank, wrapper

METHODS = "fork", "forkserver", "spawn"


class Own(list):
    """A dataset of the script."""


class Batch(NamedTuple):
    rows: torch.Tensor
    place: tuple[int, str]
    error: str


@wrapper(Platform(device="neuron", ipc_groups=[[0, 1], [2, 3]], verbose=False))
def evaluate():
    pass


def launch():
    """Launch in a process that must not, and return the error."""
    try:
        evaluate()
    except LaunchError as error:
        return str(error)
    return "no error"


def collate(samples):
    place = current_rank().global_rank, os.environ["RANK"]
    return Batch(torch.tensor(samples), place, launch())


@wrapper(Platform(device="neuron", device_ids=[2, 3], ipc_groups=None, verbose=False))
def train():
    if current_rank().global_rank == 0:
        return None
    import rows

    dataset = Own([1.0, 5.0])
    dataset.source = rows.ROWS  # of a class of a module
    options = {"num_workers": 1, "batch_size": 4, "collate_fn": collate}
    started = [
        iter(DataLoader(dataset, multiprocessing_context=method, **options)) for method in METHODS
    ]
    batches = [next(each) for each in started]
    # The worker pickles it as a class of ``__mp_main__``
    assert all(type(batch) is Batch for batch in batches)
    return {
        method: {**batch._asdict(), "rows": batch.rows.tolist()}
        for method, batch in zip(METHODS, batches, strict=True)
    }


with Path("runs").open("a") as file:
    print(__name__, launch() if __name__ == "__mp_main__" else "", file=file)

if __name__ == "__main__":
    found = train()[1]
