"""Ranks on NeuronCores that are torch devices: each rank has one device."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from parawrap import Platform, PlatformError, current_rank, functional, wrapper
from parawrap.launch import RankPlace
from parawrap.launch.set_up import set_up


def test_each_rank_has_a_device(monkeypatch):
    """The device of a rank is the current device until `set_default_device` sets another. parawrap
    sets no cores of the machine.
    """
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)

    @wrapper(Platform(device="neuron", n_gpus=2, verbose=False))
    def where():
        model = functional.to(torch.nn.Linear(3, 2), sync_modules=False)
        own = [current_rank().device, torch.empty(1, device="neuron").device, model.weight.device]
        functional.set_default_device(local_rank=2)
        default = [torch.empty(1).device, torch.empty(1, device="neuron").device]
        return (
            list(map(str, own)),
            list(map(str, default)),
            dist.get_backend_config(),
            os.environ.get("NEURON_RT_VISIBLE_CORES"),
        )

    groups = "cpu:gloo,neuron:neuron"
    assert list(where()) == [
        ([f"neuron:{rank}"] * 3, ["neuron:2"] * 2, groups, None) for rank in range(2)
    ]


def test_one_rank_per_device():
    """Without n_gpus, a launch uses every device. More ranks than devices are refused."""
    assert Platform(device="neuron").world_size == 4
    with pytest.raises(PlatformError, match="n_gpus=8: 4 are visible"):
        Platform(device="neuron", n_gpus=8)


def test_rank_without_its_device():
    """The error names the device, the node's count, and what to check."""
    place = RankPlace(global_rank=5, local_rank=5, node=0, world_size=6, ranks_per_node=6)
    with pytest.raises(PlatformError, match=r"rank 5 needs neuron:5 .* sees 4 .*reduce n_gpus"):
        set_up(place, Platform(device="neuron"), None)


def test_torch_devices_keep_numbers(monkeypatch):
    """Torch devices keep their numbers in the ranks, since no variable selects them."""
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)

    @wrapper(Platform(device="neuron", device_ids=[3, 1], verbose=False))
    def where(_=None):
        model = functional.to(torch.nn.Linear(3, 2), sync_modules=False)
        current = torch.empty(1, device="neuron")
        return [str(each) for each in (current_rank().device, model.weight.device, current.device)]

    @wrapper(where.platform)
    def where_by_default():
        functional.set_default_device(platform=current_rank().platform)
        return str(torch.empty(1).device)

    assert list(where()) == [["neuron:3"] * 3, ["neuron:1"] * 3]
    assert list(where_by_default()) == ["neuron:3", "neuron:1"]
    assert "local rank 0, neuron:3" in where.dry_run()
    assert list(where.inline()) == [["neuron:3"] * 3]
    one = wrapper(Platform(device="neuron", n_gpus=1, device_ids=[3, 1], verbose=False))(
        where.__wrapped__
    )
    found = {tuple(outcome[0]) for outcome in one.map(range(4), max_parallel=2)}
    assert found == {("neuron:3",) * 3, ("neuron:1",) * 3}
