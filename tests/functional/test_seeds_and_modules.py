"""`seed_generators`, `optimiser_to`, `has_batch_norm`, `to`, `unwrap`, `device`, and
`set_default_device`.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import Platform, current_rank, functional, wrapper
from tests.helpers.ranks import on


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_seed_and_offset():
    """Python, NumPy, and torch draw the same numbers after the same sum of seed and offset."""
    seed, drawn = 2**32, []
    for value, offset in ((seed, 0), (seed - 2, 2), (seed, 1)):
        functional.seed_generators(value, offset=offset)
        drawn.append(draws())
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def devices_of(value):
    if isinstance(value, torch.Tensor):
        return [value.device.type]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [device for item in items for device in devices_of(item)]


def test_state_of_an_optimiser_moves():
    """The state of an optimizer moves, also lists of tensors, as those of LBFGS."""
    model = nn.Linear(3, 2)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimiser.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    count = len(devices_of(optimiser.state))
    functional.optimiser_to(optimiser, "meta")
    assert devices_of(optimiser.state) == ["meta"] * count
    assert count > 4


def test_step_counters_move_by_group():
    """A fused group keeps its steps on the parameters' device. Without state, nothing moves."""
    layers = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimiser = torch.optim.Adam([{"params": layer.parameters()} for layer in layers])
    functional.optimiser_to(optimiser, "meta")
    assert not optimiser.state
    layers[1](layers[0](torch.ones(1, 2))).sum().backward()
    optimiser.step()
    optimiser.param_groups[1]["fused"] = True
    functional.optimiser_to(optimiser, "meta")
    assert [optimiser.state[layer.weight]["step"].device.type for layer in layers] == [
        "cpu",
        "meta",
    ]


def test_has_batch_norm():
    """Every kind is found at any depth; other normalizations do not count."""
    for layer in (nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d()):
        assert functional.has_batch_norm(
            nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), layer))
        )
    others = nn.Sequential(
        nn.Linear(1, 1), nn.LayerNorm(1), nn.GroupNorm(1, 1), nn.InstanceNorm2d(1)
    )
    assert not functional.has_batch_norm(others)


def test_to_wraps_in_ddp(ranks):
    """Options are those of DistributedDataParallel. On the CPU, batch norm is not converted."""

    def wrap():
        module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        model = functional.to(
            module, find_unused_parameters=True, gradient_as_bucket_view=True, device_ids=None
        )
        assert type(model) is nn.parallel.DistributedDataParallel
        assert model.module is module
        assert type(module[1]) is nn.BatchNorm1d
        assert (model.find_unused_parameters, model.gradient_as_bucket_view, model.device_ids) == (
            True,
            True,
            None,
        )

    ranks(wrap)


def test_to_returns_other_modules(ranks, lone_ranks):
    """With one rank, without a group, with sync_modules=False, and for a frozen module."""

    def is_kept(requires_grad=True, **options):
        module = nn.Linear(2, 2).requires_grad_(requires_grad)
        return functional.to(module, **options) is module

    kept = [
        ranks(is_kept, sync_modules=False),
        ranks(is_kept, False),
        lone_ranks(is_kept),
        on(1, is_kept),
    ]
    assert kept == [(True, True)] * 3 + [(True,)]


@pytest.mark.parametrize("device", ["CPU", "cpu:0", "auto", None, torch.device("meta")], ids=repr)
def test_to_takes_names_of_devices(device, monkeypatch):
    """Outside a launch, `device` accepts the names of Platform and of torch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    module = nn.Linear(1, 1)
    assert functional.to(module, 1, device=device) is module
    assert module.weight.device.type == ("meta" if "meta" in str(device) else "cpu")
    with pytest.raises((ValueError, RuntimeError), match="banana"):
        functional.to(module, device="banana")


def test_unwrap_removes_wrappers(ranks):
    """Wrappers of `to`, torch.compile, and torch's parallel modules are removed in any order.

    Other modules stay.
    """

    def unwrap():
        module = nn.Linear(2, 2)
        compiled = functional.to(torch.compile(module, backend="eager"))
        around = torch.compile(functional.to(module), backend="eager")
        wrapped = [
            functional.to(module),
            functional.to(module, sync_modules=False),
            compiled,
            around,
        ]
        assert all(
            functional.unwrap(each) is module for each in (*wrapped, nn.DataParallel(around))
        )
        own = nn.Sequential()
        own.module = module
        assert functional.unwrap(own) is own

    ranks(unwrap)
    wrapper(Platform(device="cpu", n_cpus=2))(unwrap).inline()


def test_device_of_a_module(ranks):
    """The device is that of the first parameter, else of the first buffer, else the rank's device
    or the CPU.
    """
    buffers = nn.ReLU()
    buffers.register_buffer("mean", torch.zeros(1, device="meta"))
    for module, kind in (
        (nn.Linear(1, 1, device="meta"), "meta"),
        (buffers, "meta"),
        (nn.ReLU(), "cpu"),
    ):
        assert functional.device(module).type == kind
    assert functional.device(nn.Sequential(buffers, nn.Linear(1, 1))).type == "cpu"
    assert ranks(lambda: functional.device(nn.ReLU()) == current_rank().device) == (True, True)


def test_set_default_device():
    """New tensors without a `device` argument lie on the platform's device."""
    torch.set_default_device("meta")
    try:
        functional.set_default_device(platform=Platform(device="cpu"), local_rank=1)
        assert torch.empty(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)
