"""Start loader workers in ranks of a script with two platforms."""

from torch.utils.data import DataLoader

from parawrap import Platform, wrapper


@wrapper(Platform(device="neuron", n_gpus=1, device_ids=[2, 3], verbose=False))
def train(way):
    loader = DataLoader([1, 2], num_workers=1, multiprocessing_context=way)
    return len(list(loader))


@wrapper(Platform(device="neuron", ipc_groups=[[0, 1], [2, 3]], verbose=False))
def evaluate():
    pass


if __name__ == "__main__":
    assert [list(each) for each in train.map(["spawn", "forkserver"])] == [[2], [2]]
