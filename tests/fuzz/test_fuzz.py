"""A short run of the fuzzer. ``make fuzz`` is the long one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import drawn_case, drawn_devices, run
from tests.fuzz.mixing import drawn_mixing_case, run_mixing

pytestmark = pytest.mark.long

OFTEN = [HealthCheck.too_slow, HealthCheck.data_too_large]


def cases(count: int) -> settings:
    """Settings of hypothesis for that many cases, the same in each run."""
    return settings(derandomize=True, deadline=None, max_examples=count, suppress_health_check=OFTEN, database=None)


@cases(120)
@given(st.randoms(use_true_random=False))
def test_row_wise_models(random):
    case = drawn_case(random)
    outcome = run(case)
    assert outcome.end != "wrong", f"{outcome.detail}\n{case!r}"


@cases(100)
@given(st.randoms(use_true_random=False))
def test_models_that_mix_rows(random):
    case = drawn_mixing_case(random, *drawn_devices(random, "cpu"))
    outcome = run_mixing(case)
    assert outcome.end != "wrong", f"{outcome.detail}\n{case!r}"
