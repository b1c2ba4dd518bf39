"""The zoo's figures, from made-up times. Nothing is timed, but for one net that is measured with few calls."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import zoo
from benchmarks._apart import Taken

ARMS = ("plain", "default", "auto")


def cell(net="conv", rows=64, user=(4.0, 4.0, 4.0), kept=(4.0, 4.0, 4.0), one_thread=6.0, again=1.0, **given):
    """Times in us of plain, default and auto; the second plain process takes `again` times as long."""
    bursts = {}
    for name, times in (("", user), (", memory kept", kept)):
        for arm, took in zip(ARMS, times, strict=True):
            bursts[arm + name, 1] = [took] * 9
            bursts[arm + name, 2] = [took * (again if arm == "plain" else 1)] * 9
    bursts["plain, memory kept, one thread", 1] = [one_thread] * 9
    given = {"excess": {"auto": 0.0, "plain": 0.0}, **given}
    return zoo.Cell(net, rows, 2, Taken(bursts), 1.0, **given)


@pytest.mark.parametrize(
    ("times", "held"),
    [
        ({}, True),
        ({"user": (4.0, 4.4, 4.2)}, True),
        ({"user": (4.0, 4.0, 4.3)}, False),  # auto, as a user gets it
        ({"kept": (4.0, 4.0, 4.3)}, True),  # is not judged elsewhere
        ({"user": (4.0, 4.5, 4.0)}, False),
        ({"kept": (4.0, 4.5, 4.0)}, False),  # default is judged in both
    ],
)
def test_a_cell_is_held_by_auto_as_a_user_gets_it_and_by_default_in_both(times, held):
    """0.95 of plain for the one, 0.90 for the other."""
    assert cell(**times).row.held is held


def test_a_cell_tells_its_limits():
    """From the plain arm, the one with one thread, and the one whose memory is kept."""
    limits = cell(user=(8.0, 8.0, 8.0), faults=1234.0).row.extra["limits"]
    assert limits == {
        "cores": pytest.approx(4 / 3),
        "interpreter": pytest.approx(4 / (1 + 5 / 2)),
        "page faults": pytest.approx(2),
        "page faults a call": "1,234",
    }
    assert cell(rows=1).limits["interpreter"] == "one row is not cut"


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"user": (8.0, 8.0, 8.0)}, 2 * 4 / (1 + 5 / 2)),  # half of it is page faults, and the rest may be cut
        ({"user": (8.0, 8.0, 8.0), "rows": 1}, 2),
        ({"one_thread": 60.0}, 1),  # the cores are busy already
        ({"user": (3.0, 3.0, 3.0), "rows": 1}, 1),  # noise
    ],
)
def test_a_cell_has_one_limit_of_all(given, limit):
    """Without page faults, times what is gained by cutting, where it gains anything."""
    assert cell(**given).limit == pytest.approx(limit)


def judged(*cells):
    """Whether each row over all cells held, by its name's first words."""
    return {row.name.removeprefix("zoo: ").partition(",")[0].partition(":")[0]: row for row in zoo.together(cells)}


def test_auto_is_judged_by_its_mean_and_its_worst_cell():
    """Above 1.10 by the geometric mean, and no cell below 0.95, both as a user gets it."""
    took = {"mlp": 2.0, "conv": 4.0, "lstm": 2.0, "encoder": 5.0}
    fast, even, faster, slow = (cell(net, user=(4.0, 4.0, us)) for net, us in took.items())
    assert judged(fast, even)["auto"].held
    assert not judged(even)["auto"].held
    row = judged(fast, faster, slow)["auto"]
    assert not row.held
    assert "least 0.80" in row.verdict


def test_measuring_is_judged_by_what_plain_calls_do_not_show():
    """Under 5% in every cell, and what the first plain calls took longer is none of it."""
    cheap = cell(excess={"auto": 0.07, "plain": 0.03}, extra_calls=1)
    dear = cell(net="mlp", excess={"auto": 0.08, "plain": 0.02}, extra_calls=2)
    assert judged(cheap)["what measuring costs"].held
    row = judged(cheap, dear)["what measuring costs"]
    assert not row.held
    assert row.verdict.startswith("most +6.0% (MLP of 3 x 512, 64 rows); the model was run 3 times beyond the calls")


def test_the_comparison_is_judged_by_an_arm_against_itself():
    """Cells that are farther off than 5% are named; the mean over all must not be."""
    row = judged(cell("mlp"), cell(again=1.1))["plain against itself"]
    assert row.held
    assert row.verdict.startswith("geometric mean 0.95; 2 of 4 within 5%<br>conv 3-16-32")
    assert not judged(cell(again=1.1))["plain against itself"].held


def test_kept_memory_is_judged_by_the_largest_convolution():
    """One and a half times as fast as torch as a user gets it."""
    small, large = cell(rows=1), cell(user=(6.0, 6.0, 4.0))
    row = judged(large, small)["the plan keeps memory for convolutions"]
    assert row.held
    assert "64 rows" in row.name
    assert not judged(small)["the plan keeps memory for convolutions"].held
    assert "the plan keeps memory for convolutions" not in judged(cell(net="mlp"))


def test_a_burst_is_short_and_more_than_one_call():
    """About ten milliseconds."""
    assert [zoo.calls_a_burst(call_us) for call_us in (1.0, 100.0, 50_000.0)] == [200, 100, 3]


def test_a_cell_is_measured_from_first_to_last(monkeypatch):
    """Every arm in both environments, one thread, the first calls, page faults and what the plan tells."""
    monkeypatch.setattr(zoo, "FIRST_CALLS", 20)
    monkeypatch.setattr(zoo, "bursts_in_turn", partial(zoo.bursts_in_turn, rounds=(2, 2)))
    monkeypatch.setattr(zoo, "all_apart", partial(zoo.all_apart, processes=1))
    (found,) = zoo._measured("tiny", [8])
    assert set(found.taken.arms) == {
        *ARMS, *(f"{arm}, memory kept" for arm in ARMS), "plain, memory kept, one thread"
    }  # fmt: skip
    assert found.one_row > 0
    assert set(found.excess) == {"auto", "plain"}
    assert found.extra_calls == 0
    assert found.opening_us > 0
    assert found.plan.startswith("plan 'auto'")
    assert found.limits.keys() == {"cores", "interpreter", "page faults", "page faults a call"}
