"""Fixtures for tests of the public classes and functions."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def _deterministic():
    """Use deterministic algorithms during one test, so that all lanes run in turns."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
