"""The load from other processes during a measurement."""

from __future__ import annotations

from benchmarks._neighbours import Neighbours, cores_of_others


def test_own_work_is_subtracted():
    """The machine worked 15 s in 10 s, and the process 10 s of these: other processes used half a core."""
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(115.0, 15.0, 10.0)) == 0.5
    assert cores_of_others(Neighbours(100.0, 5.0, 0.0), Neighbours(109.0, 15.0, 10.0)) == 0  # the clocks differ slightly
