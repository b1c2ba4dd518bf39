"""`make device`: its parts run in turn, within the time, and leave a page. No test needs a GPU."""

from __future__ import annotations

import psutil

from benchmarks.device import Part, run

WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def part(name, code, share=1.0):
    return Part(name, ("-c", code), share)


def test_parts_run_in_turn(tmp_path):
    """Each part has its exit code and its log. A part that fails does not stop the next one."""
    script = "import os, parawrap; print(os.environ['PARAWRAP_TEST_REQUIRE'], os.environ['PARAWRAP_BENCHMARK_RESULTS'])"
    outcomes = run([part("first", "raise SystemExit(3)"), part("second", script)], tmp_path, 60)
    assert [(each.name, each.code) for each in outcomes] == [("first", 3), ("second", 0)]
    assert (tmp_path / "second.log").read_text().split() == ["cuda", str(tmp_path)]


def test_late_parts_are_ended(tmp_path):
    """It leaves the rest of the time to the next part, and no process."""
    outcomes = run([part("long", WITH_A_CHILD, 0.2), part("next", "print('here')")], tmp_path, 40)
    assert [each.code for each in outcomes] == [None, 0]
    child = int((tmp_path / "long.log").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
