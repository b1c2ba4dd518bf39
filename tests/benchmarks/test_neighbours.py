"""The load from other processes during a measurement."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._neighbours import Neighbours, cores_of_others


def test_work_of_the_process_is_subtracted():
    """The machine worked 15 s in 10 s, and the process 10 s of these: other processes used half a core."""
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(115.0, 15.0, 10.0)) == 0.5
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(109.0, 15.0, 10.0)) == 0  # the clocks differ slightly


def test_without_counters_the_load_is_unknown():
    """A system without /proc/stat gives None."""
    assert cores_of_others(None, None) is None


@pytest.mark.skipif(Neighbours.now() is None, reason="/proc/stat is Linux's")
def test_finished_children_count_as_work_of_the_process():
    """Their processor time is added to that of the process."""
    before = Neighbours.now()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    after = Neighbours.now()
    assert after.own_s > before.own_s
    assert after.all_s >= before.all_s
