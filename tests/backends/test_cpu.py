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
def test_usable_cores_are_the_lesser_of_affinity_and_quota(cores, affinity, quota, usable):
    """The usable cores are the minimum of affinity mask and quota, and at least one."""
    cores(affinity, quota)
    assert usable_cores() == usable


def test_without_an_affinity_mask_all_cores_count(monkeypatch):
    """On systems without sched_getaffinity, os.cpu_count() is used."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cpu_module, "_cgroup_quota", lambda *args: None)
    assert usable_cores() == 3


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("200000 100000\n", 2.0),
        ("max 100000\n", None),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("", None),
        ("x y", None),
    ],
)
def test_a_quota_of_cgroup_v2_is_read(tmp_path, text, quota):
    """cpu.max holds microseconds per period, or "max". Unreadable text sets no limit."""
    (tmp_path / "cpu.max").write_text(text)
    assert _cgroup_quota(tmp_path) == quota


@pytest.mark.parametrize(("limit", "quota"), [("300000\n", 3.0), ("-1\n", None), ("0\n", None), ("nonsense", None)])
def test_a_quota_of_cgroup_v1_is_read(tmp_path, limit, quota):
    """The quota is cpu.cfs_quota_us divided by cpu.cfs_period_us. A negative quota sets no limit."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(limit)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _cgroup_quota(tmp_path) == quota


def test_without_a_cgroup_there_is_no_limit(tmp_path):
    """A folder without either file sets no limit, as on systems without cgroups."""
    assert _cgroup_quota(tmp_path) is None


def test_auto_has_one_lane_per_core_up_to_eight(cores):
    """With more cores, each of eight lanes gets more threads, because more lanes would wait for the interpreter lock."""
    cores(3)
    assert len(backend_of("cpu").every_device()) == 3
    cores(64)
    assert len(backend_of("cpu").every_device()) == 8


@pytest.mark.parametrize(("lanes", "threads"), [(1, 2), (2, 1), (3, 1), (64, 1)])
def test_lanes_share_the_threads_that_an_operator_may_use(cores, monkeypatch, lanes, threads):
    """Each lane gets an equal number of threads, rounded down, and at least one."""
    cores(8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert backend_of("cpu").intra_op_threads(lanes) == threads


def test_lanes_never_use_more_threads_than_cores(cores, monkeypatch):
    """The lanes share the usable cores if torch.get_num_threads() is higher."""
    cores(2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    assert backend_of("cpu").intra_op_threads(1) == 2


def test_the_cpu_is_one_device():
    """There is one CPU device, without an index."""
    backend = backend_of("cpu")
    assert backend.count() == 1
    assert backend.device(None) == backend.device(0) == torch.device("cpu")
