"""Fixtures of the cluster tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The launch folder; the fixture fails if a launch leaves files in it."""
    folder = tmp_path / "launches"
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(folder))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def cluster(slurm, folders):
    yield slurm
    slurm.settle()
