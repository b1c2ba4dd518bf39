"""The number of CPU lanes and of their threads, within the cores that the process may use."""

from __future__ import annotations

import os

import pytest
import torch

from parawrap.backends import backend_of
from parawrap.backends import cpu_backend as cpu_module
from parawrap.backends.cpu_backend import _cgroup_quota, usable_cores


@pytest.fixture
def cores(monkeypatch):
    """Set the cores of the affinity mask and of the cgroup's quota."""

    def pretend(affinity: int, quota: float | None = None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
        monkeypatch.setattr(cpu_module, "_cgroup_quota", lambda *args: quota)

    return pretend


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(4, None, 4), (4, 2.0, 2), (4, 1.5, 1), (4, 0.5, 1), (2, 16.0, 2), (1, None, 1)],
)
def test_usable_cores(cores, affinity, quota, usable):
    """They are the minimum of affinity mask and quota, and at least one."""
    cores(affinity, quota)
    assert usable_cores() == usable


def test_cores_without_an_affinity_mask(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cpu_module, "_cgroup_quota", lambda *args: None)
    assert usable_cores() == 3


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "x y"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "nonsense", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_quotas_of_cgroups(tmp_path, files, quota):
    """Both versions of cgroups are read. Unreadable text, and no file, set no limit."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _cgroup_quota(tmp_path) == quota


def test_auto_has_up_to_eight_lanes(cores):
    """With more cores, each lane gets more threads, because more lanes would wait for the interpreter lock."""
    for count, lanes in ((3, 3), (64, 8)):
        cores(count)
        assert len(backend_of("cpu").every_device()) == lanes


@pytest.mark.parametrize(
    ("usable", "torch_threads", "lanes", "threads"), [(8, 2, 1, 2), (8, 2, 2, 1), (8, 2, 64, 1), (2, 32, 1, 2)]
)
def test_lanes_share_the_threads(cores, monkeypatch, usable, torch_threads, lanes, threads):
    """Each lane gets an equal number of threads, at least one, and all lanes no more than the cores."""
    cores(usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    assert backend_of("cpu").intra_op_threads(lanes) == threads


def test_forked_rng_restores_generators():
    """The block and the code after it draw the same numbers."""
    with backend_of("cpu").forked_rng([torch.device("cpu")]):
        inside = torch.rand(3)
    torch.testing.assert_close(torch.rand(3), inside)
