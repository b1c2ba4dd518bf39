"""The command line as a whole: help, wrong usage, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import parawrap as package
from tests.helpers.processes import is_gone
from tests.helpers.waiting import eventually


def test_help_has_examples(here):
    shown = here("--help")
    assert shown.returncode == 0
    assert "examples:" in shown.stdout
    for name in "doctor", "run", "timeline":
        assert name in shown.stdout
        assert f"parawrap {name} " in here(name, "--help").stdout.partition("examples:")[2]
    assert here("--version").stdout == f"parawrap {package.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("timeline", "none.json"), "'none.json' cannot be read: No such file or directory"),
        (("timeline", "train.py"), "is not a trace of parawrap"),
    ],
)
def test_wrong_usage_has_one_line(here, args, message):
    """The message names the wrong value, without a traceback, and the exit code is 2."""
    shown = here(*args)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_ctrl_c_ends_a_launch(here, folder):
    started = folder / "started"

    def interrupt():
        eventually(started.exists, "the start of the rank")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        shown = here("run", "train:forever", "--device", "cpu", "--", str(started))
    except KeyboardInterrupt:  # it would end the tests
        pytest.fail("Ctrl-C went through")
    thread.join()
    assert shown.returncode == 130
    assert shown.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in shown.stdout + shown.stderr
    assert is_gone(int(started.read_text()))
