"""The examples run as they stand, as their reader would run them. ``make demo`` runs examples/digits.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_task_style_trains_saves_and_evaluates():
    """The example that ddpw documents moved to digits, trains in two ranks and evaluates every image once."""
    command = [sys.executable, "-W", "error", EXAMPLES / "digits_wrapper.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "[rank 1] global rank 1; local rank 1" in found.stdout
    last = found.stdout.splitlines()[-1]
    assert float(last.split()[1].rstrip("%,")) > 95, last
    assert "the same on every rank: True" in last


def test_a_training_that_is_preempted_comes_to_the_same_weights():
    """The example of preemption is told to leave, starts anew where it was, and loses nothing."""
    command = [sys.executable, "-W", "error", EXAMPLES / "preemption.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "and started anew 1 time(s)" in found.stdout
    assert found.stdout.splitlines()[-1] == "the same weights as without: True"
