"""How busy the machine was with others while something was measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks._neighbours import Neighbours, cores_of_others


def test_what_is_ones_own_is_nobody_elses():
    """Of 15 s of work in 10 s, 10 are one's own: half a core is left."""
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(115.0, 15.0, 10.0)) == 0.5
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(109.0, 15.0, 10.0)) == 0  # clocks are not that exact


def test_where_nothing_tells_nothing_is_said():
    """A system without /proc/stat."""
    assert cores_of_others(None, None) is None


@pytest.mark.skipif(Neighbours.now() is None, reason="/proc/stat is Linux's")
def test_a_child_that_has_ended_is_ones_own():
    """Its processor time is no longer only everybody's."""
    before = Neighbours.now()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    after = Neighbours.now()
    assert after.own_s > before.own_s
    assert after.all_s >= before.all_s
