"""Fixtures for tests of the helpers inside a rank."""

from __future__ import annotations

import pytest

from parawrap import Platform


@pytest.fixture(scope="module")
def ranks():
    """Two ranks that stay for the tests of one file. Call it with a function and its arguments."""
    with Platform(device="cpu", n_cpus=2, seed=3, verbose=False).open() as opened:
        yield opened


@pytest.fixture(scope="module")
def lone_ranks():
    with Platform(device="cpu", n_cpus=2, ipc_groups=None, verbose=False).open() as opened:
        yield opened
