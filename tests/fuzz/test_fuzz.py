"""A short run of the fuzzer. ``make fuzz`` is the long one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import drawn_case, run

pytestmark = pytest.mark.long

OFTEN = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(derandomize=True, deadline=None, max_examples=120, suppress_health_check=OFTEN, database=None)
@given(st.randoms(use_true_random=False))
def test_row_wise_models(random):
    case = drawn_case(random)
    outcome = run(case)
    assert outcome.end != "wrong", f"{outcome.detail}\n{case!r}"
