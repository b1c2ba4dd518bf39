"""Ranks with one GPU each, which reduce over NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from parawrap import Platform, current_rank, functional, wrapper
from tests.cuda.gpus import HOME, every
from tests.helpers.processes import run_script

# A rank loads all of CUDA, and NCCL looks at the whole machine
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import torch
from parawrap import Platform, current_rank, wrapper

if __name__ == "__main__":

    @wrapper(Platform(device="gpu", n_gpus=1, verbose=False))
    def place():
        return torch.ones(1, device=current_rank().device).device

    print(*place(), torch.cuda.is_initialized())
"""


def all_reduced():
    """Return the function that ranks run, which is pickled by value."""

    def reduced(value):
        rank = current_rank()
        x = torch.full((3,), float(value + rank.global_rank), device=rank.device)
        dist.all_reduce(x, group=rank.group)
        on_host = torch.ones(1)
        dist.all_reduce(on_host, group=rank.group)
        return str(rank.device), torch.cuda.current_device(), x.tolist(), on_host.item()

    return reduced


def test_parents_without_cuda(tmp_path):
    """The rank computes on its GPU, and the launch does not initialize CUDA in the parent."""
    assert run_script(tmp_path, SCRIPT).splitlines()[-1] == f"{HOME} False"


def test_parents_that_use_cuda():
    """The rank reduces on its GPU, since it is forked from a process without CUDA."""
    torch.ones(1, device=HOME).add_(1)
    platform = Platform(device="gpu", n_gpus=1, verbose=False)
    assert list(wrapper(platform)(all_reduced())(5)) == [(HOME, 0, [5.0] * 3, 1.0)]


def test_a_rank_on_every_gpu(several):
    world = len(several)
    total = [float(sum(range(1, world + 1)))] * 3
    results = list(wrapper(Platform(device="gpu", verbose=False))(all_reduced())(1))
    assert results == [(device, index, total, float(world)) for index, device in enumerate(every())]


def test_loaders_on_the_default_device():
    """A DataLoader draws the seed of its workers on the default device, with a generator of that
    device.
    """
    loader = functional.shard_loader(DataLoader(range(3), 3, collate_fn=list))
    with torch.device("cuda"):
        assert list(loader) == [[0, 1, 2]]
    assert list(loader) == [[0, 1, 2]]


def test_launches_share_out_gpus():
    """Each launch sees the GPUs that it was given, and numbers them from 0."""

    @wrapper(Platform(device="gpu", n_gpus=1, verbose=False))
    def place(_):
        x = torch.ones(1, device=current_rank().device)
        return (
            str(x.device),
            torch.cuda.device_count(),
            str(torch.cuda.get_device_properties(0).uuid),
        )

    count = torch.cuda.device_count()
    outcomes = [outcome[0] for outcome in place.map(range(2 * count), max_parallel=count + 1)]
    assert {outcome[:2] for outcome in outcomes} == {("cuda:0", 1)}
    uuids = {str(torch.cuda.get_device_properties(index).uuid) for index in range(count)}
    assert {uuid for _, _, uuid in outcomes} == uuids
