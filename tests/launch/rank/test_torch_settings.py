"""Ranks have the settings and the seed of the script's torch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from parawrap import wrapper
from tests.helpers.processes import ranks, run_script


@pytest.fixture
def restored_torch():
    """Restore the settings of torch that these tests set with functions."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng([]):
        yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def settings_of_torch():
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.is_anomaly_enabled(),
        torch.is_grad_enabled(),
    )


def test_ranks_have_settings_of_torch(restored_torch, monkeypatch):
    """Default dtype, determinism, precision, cuDNN's flags, and the grad mode are those of the script at the launch."""
    launchable, before = wrapper(ranks(1))(settings_of_torch), settings_of_torch()
    assert launchable() == (before,)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    for name, value in {"benchmark": True, "deterministic": True, "allow_tf32": False}.items():
        monkeypatch.setattr(torch.backends.cudnn, name, value)
    with torch.autograd.set_detect_anomaly(True), torch.no_grad():
        after = settings_of_torch()
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert launchable() == launchable.inline() == (after,)


def test_ranks_have_newer_flags(tmp_path):
    """They make the older ones unreadable, in ranks as in the script."""
    text = """
    import torch
    from parawrap import Platform, wrapper

    def read():
        backends = torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
        return [each.fp32_precision for each in backends]

    torch.backends.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    print(*read(), wrapper(Platform(device="cpu"))(read)() == (read(),))
    """
    assert run_script(tmp_path, text) == "ieee tf32 ieee bf16 True\n"


def drawn():
    return random.random(), torch.rand(1).item(), np.random.rand()


@pytest.mark.parametrize(("method", "seed"), [("forkserver", 2**63 + 5), ("fork", -3)])
def test_ranks_have_seed_of_the_script(method, seed, restored_torch):
    """Every launch starts from the script's last seed, in all ranks and all generators; so does `inline`."""
    torch.manual_seed(seed)
    launchable = wrapper(ranks(spawn_method=method, ipc_groups=None))(drawn)
    first, second = launchable()
    assert first == second
    assert first[1] == torch.rand(1).item()
    assert launchable() == (first, first)  # also after the script has drawn
    assert launchable.inline() == (first,)
    random.seed(4)
    torch.manual_seed(4)
    np.random.seed(4)
    here = drawn()
    assert here != first
    assert wrapper(ranks(1, seed=4, spawn_method=method))(drawn)() == launchable()[:1] == (here,)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_seed_none_draws_in_every_rank(method):
    """No generator draws the same numbers in two ranks or two launches."""
    launchable = wrapper(ranks(seed=None, spawn_method=method, ipc_groups=None))(drawn)
    draws = [*launchable(), *launchable()]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == 4
