"""The benchmark of `keep_freed_memory`: its goal and its measurement. No test depends on a time."""

from __future__ import annotations

import pytest

from benchmarks import memory_kept


@pytest.mark.parametrize(("kept_us", "met"), [(2.0, True), (2.1, False)])
def test_the_goal_is_one_and_a_half_times_the_speed(kept_us, met):
    """Each process contributes its median. The page faults are results."""
    bursts = {
        "default": [{"us": [3.0, 3.0, 90.0], "faults": 5000.0}] * 3,
        "keep_freed_memory": [{"us": [kept_us] * 3, "faults": 1.0}] * 3,
    }
    row = memory_kept.kept_row(bursts)
    assert row.met is met
    faults = {result.quantity: result.value for result in row.results[1:]}
    assert faults == {"page faults, default": 5000, "page faults, keep_freed_memory": 1}


@pytest.mark.parametrize("kept", [True, False])
def test_a_burst_counts_calls_and_page_faults(kept):
    """One time per call."""
    found = memory_kept.burst(kept=kept, calls=3, size=2)
    assert len(found["us"]) == 3
    assert found["faults"] >= 0
