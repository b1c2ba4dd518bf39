"""Ranks have the settings and the seed of the script."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from parawrap import wrapper
from tests.helpers.processes import ranks
from tests.helpers.ranks import draw_numbers, settings_of_torch


@pytest.fixture
def restored_torch():
    """Restore the settings of torch that these tests set with functions."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng([]):
        yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def test_ranks_have_settings_of_the_script(restored_torch, monkeypatch):
    """Default dtype, determinism, precision, and the choice of cuDNN's algorithms, as at the
    launch.
    """
    launchable, before = wrapper(ranks(1))(settings_of_torch), settings_of_torch()
    assert launchable() == (before,)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    after = settings_of_torch()
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert launchable() == (after,)


@pytest.mark.parametrize("seed", [2**63 + 5, -3])
def test_ranks_have_seed_of_the_script(seed, restored_torch):
    """Every launch starts from the script's last seed, in all ranks and all generators; so does
    `inline`.
    """
    torch.manual_seed(seed)
    launchable = wrapper(ranks(ipc_groups=None))(draw_numbers)
    first, second = launchable()
    assert first == second
    assert first[1] == torch.rand(1).item()
    assert launchable() == (first, first)  # also after the script has drawn
    assert launchable.inline() == (first,)
    random.seed(4)
    torch.manual_seed(4)
    np.random.seed(4)
    here = draw_numbers()
    assert here != first
    assert wrapper(ranks(1, seed=4))(draw_numbers)() == launchable()[:1] == (here,)


def test_seed_none_draws_in_every_rank():
    """No generator draws the same numbers in two ranks or two launches."""
    launchable = wrapper(ranks(seed=None, ipc_groups=None))(draw_numbers)
    draws = [*launchable(), *launchable()]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == 4
