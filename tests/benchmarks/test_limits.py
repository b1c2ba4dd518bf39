"""How much faster a call could be at most, from what was measured beside it."""

from __future__ import annotations

import pytest

from benchmarks._limits import cores_limit, faults_limit, interpreter_limit, listed


def test_cores_share_the_work_of_one_thread():
    """Nothing is left to gain where torch's own threads lose nothing."""
    assert cores_limit(plain=4, one_thread=4, cores=2) == 2
    assert cores_limit(plain=2, one_thread=4, cores=2) == 1


@pytest.mark.parametrize(
    ("one_row", "lanes", "limit"),
    [
        (0, 4, 4),  # nothing but rows: as many as there are lanes
        (1, 2, 4 / (1 + 3 / 2)),  # a lane's own, and half of the rest
        (3, 2, 4 / 6),  # the lock is the limit: twice what one lane holds
        (5, 2, 4 / 10),  # a row that takes longer than all of them: no share is less than nothing
    ],
)
def test_lanes_have_one_interpreter(one_row, lanes, limit):
    """What does not shrink with the rows is each lane's own, and is done one lane after the other."""
    assert interpreter_limit(plain=4, one_thread=4, one_row=one_row, lanes=lanes) == pytest.approx(limit)


def test_page_faults_are_what_kept_memory_saves():
    """The same call, with nothing else different."""
    assert faults_limit(plain=10, kept=4) == 2.5


def test_limits_are_listed_with_what_is_no_figure():
    """Two decimals; words stand as they are."""
    assert (
        listed({"cores": 1.2345, "interpreter": "one row is not cut"}) == "cores: 1.23<br>interpreter: one row is not cut"
    )
