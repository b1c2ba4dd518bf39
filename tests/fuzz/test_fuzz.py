"""A short run of the fuzzer. ``make fuzz`` is the long one."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.fuzz.cases import drawn_case, run
from tests.fuzz.contract_cases import drawn_contract_case, run_contract
from tests.fuzz.contract_targets import source_of
from tests.fuzz.races import Race
from tests.helpers.properties import given, st

pytestmark = pytest.mark.long

short = settings(derandomize=True, max_examples=120, database=None)


@short
@given(st.randoms(use_true_random=False))
def test_row_wise_models(random):
    case = drawn_case(random)
    outcome = run(case)
    assert outcome.end != "wrong", f"{outcome.detail}\n{case!r}"


@short
@given(st.randoms(use_true_random=False))
def test_own_borrow_and_hand_over(random):
    case = drawn_contract_case(random)
    outcome = run_contract(case)
    assert outcome.end != "wrong", f"{outcome.detail}\n{source_of(case)}{case!r}"


@pytest.mark.parametrize("lanes", [2, 3])
def test_races(lanes):
    """``python -m tests.fuzz.races --seconds 600`` is the long one."""
    race = Race(lanes, seed=0)
    assert race.run(seconds=15) == []
    assert all(race.counts[job] > 0 for job in ("call", "submit", "stream", "change"))
