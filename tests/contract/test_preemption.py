"""Contract tests of preemption: ranks save at the same step, and the next start continues from it."""

from __future__ import annotations

import pytest

from tests.contract import scenarios
from tests.contract.harness import wait_for_reports

pytestmark = pytest.mark.contract


def test_a_preempted_loop_continues_at_the_same_step(launcher, tmp_path):
    """All ranks stop at the same step. The next start continues from it, and its ranks read `restart == 1`."""

    def preempt(launch):
        wait_for_reports(tmp_path, "counting0", launcher.world_size)
        launch.preempt()

    results = launcher.play(scenarios.count_until_preempted, tmp_path, 5, do=preempt, grace_s=20).expect_results()
    (due,) = {int(step) for step in wait_for_reports(tmp_path, "due", launcher.world_size)}
    assert due > 0
    assert list(results) == [(due, due + 5, 1)] * launcher.world_size


def test_ranks_can_requeue_without_a_preemption(launcher):
    """If every rank calls `requeue()` without a preemption, the launch starts again."""
    assert list(launcher.play(scenarios.requeue_once).expect_results()) == [1] * launcher.world_size
