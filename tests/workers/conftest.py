"""Blocks that many tests share. Tests run without gradients, which workers refuse."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.helpers.pools import over


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(
    scope="module", params=["thread", "process", pytest.param("ray", marks=pytest.mark.ray)]
)
def kind(request):
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


def apply(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.fixture(scope="module")
def block(kind):
    """An open block with two lanes. Its target calls its first argument with the others."""
    with torch.no_grad(), over(kind, apply) as block:
        # Threads start with the first call of each
        start = threading.Barrier(2).wait if kind == "thread" else os.getpid
        for future in [block.submit(start) for _ in range(2)]:
            future.result()
        yield block
