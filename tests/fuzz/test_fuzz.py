"""A short run of the fuzzer. ``make fuzz`` is the long one."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.fuzz.cases import drawn_case, run
from tests.helpers.properties import given, st

pytestmark = pytest.mark.long


@settings(derandomize=True, max_examples=120, database=None)
@given(st.randoms(use_true_random=False))
def test_row_wise_models(random):
    case = drawn_case(random)
    outcome = run(case)
    assert outcome.end != "wrong", f"{outcome.detail}\n{case!r}"
