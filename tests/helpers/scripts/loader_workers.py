"""Read a dataset of this script with a worker of a DataLoader in a rank."""

import sys

from torch.utils.data import DataLoader

from parawrap import Platform, wrapper

print("script", __name__, file=sys.stderr)


class Own(list):
    pass


@wrapper(Platform(device="cpu", n_cpus=1))
def loads(method):
    import rows

    dataset = Own([1.0, 5.0])
    dataset.source = rows.ROWS  # of a class of a module
    (batch,) = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=method)
    return batch.sum().item()


if __name__ == "__main__":
    print(*loads("forkserver"))
