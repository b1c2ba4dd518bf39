"""The contract, where the machines are wanted for something else: ranks save at the same turn, and go on from there."""

from __future__ import annotations

import pytest

from tests.contract import scenarios
from tests.contract.harness import all_said

pytestmark = pytest.mark.contract


def test_a_preempted_loop_goes_on_where_it_was(launcher, tmp_path):
    """All ranks leave at the same turn, the next start goes on at exactly that one, and ranks know which start it is."""

    def preempt(launch):
        all_said(tmp_path, "counting0", launcher.world_size)
        launch.preempt()

    results = launcher.play(scenarios.count_on, tmp_path, 5, do=preempt, grace_s=20).given()
    (due,) = {int(turn) for turn in all_said(tmp_path, "due", launcher.world_size)}
    assert due > 0
    assert list(results) == [(due, due + 5, 1)] * launcher.world_size


def test_ranks_may_ask_to_be_started_anew(launcher):
    """Without being preempted."""
    assert list(launcher.play(scenarios.ask_to_be_requeued).given()) == [1] * launcher.world_size
