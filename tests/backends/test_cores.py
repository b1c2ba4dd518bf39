"""The number of CPU lanes and of their threads, within the cores that the process may use."""

from __future__ import annotations

import os

import pytest
import torch

from parawrap.backends import backend_of
from parawrap.backends.cores import _cgroup_quota, usable_cores


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """Set the cores of the affinity mask. The folder of cgroups is `tmp_path`, without a quota."""
    monkeypatch.setattr(_cgroup_quota, "__defaults__", (tmp_path,))
    return lambda count: monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(count)), raising=False
    )


def test_cores_without_an_affinity_mask(cores, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == 3


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "nonsense"}, 4),
        ({}, 4),
    ],
)
def test_usable_cores_have_two_limits(cores, tmp_path, files, usable):
    """The number of usable cores is the minimum of affinity mask and cgroup's quota, and at least
    one.

    Unreadable text sets no limit.
    """
    cores(4)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert usable_cores() == usable


def test_auto_has_up_to_eight_lanes(cores):
    """With more cores, each lane gets more threads, because more lanes would wait for the
    interpreter lock.
    """
    for count, lanes in ((3, 3), (64, 8)):
        cores(count)
        assert len(backend_of("cpu").every_device()) == lanes


@pytest.mark.parametrize(
    ("usable", "torch_threads", "lanes", "threads"),
    [(8, 2, 1, 2), (8, 2, 2, 1), (8, 2, 64, 1), (2, 32, 1, 2)],
)
def test_lanes_share_the_threads(cores, monkeypatch, usable, torch_threads, lanes, threads):
    """Each lane gets an equal number of threads, at least one, and all lanes no more than the
    cores.
    """
    cores(usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    assert backend_of("cpu").intra_op_threads(lanes) == threads
