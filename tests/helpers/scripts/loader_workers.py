"""Read a dataset of this script with a worker of a DataLoader in a rank."""

import sys
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader

from parawrap import Platform, wrapper

print("script", __name__, file=sys.stderr)


class Own(list):
    pass


class Batch(NamedTuple):
    rows: torch.Tensor


def collate(samples):
    return Batch(torch.tensor(samples))


@wrapper(Platform(device="cpu", n_cpus=1))
def loads(method):
    import rows

    dataset = Own([1.0, 5.0])
    dataset.source = rows.ROWS  # of a class of a module
    options = {"num_workers": 1, "multiprocessing_context": method}
    (batch,) = DataLoader(dataset, batch_size=4, collate_fn=collate, **options)
    assert type(batch) is Batch  # which the worker pickles as a class of ``__mp_main__``
    return batch.rows.sum().item()


if __name__ == "__main__":
    print(*loads("forkserver"))
