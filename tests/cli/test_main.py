"""The command line as a whole: help, wrong usage, and Ctrl-C."""

from __future__ import annotations

import os
import signal

import pytest

import parawrap as package
from tests.helpers.processes import is_gone, running_script
from tests.helpers.waiting import PATIENCE_S, eventually


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


def test_ctrl_c_ends_a_launch(folder):
    started = folder / "started"
    text = (
        "import sys\nfrom parawrap.cli import main\nsys.path.insert(0, "
        "'.')\nsys.exit(main(sys.argv[1:]))"
    )
    with running_script(
        folder, text, "run", "train:forever", "--device", "cpu", "--", started
    ) as process:
        eventually(lambda: started.exists() or process.poll() is not None, "the start of the rank")
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(PATIENCE_S)
    assert process.returncode == 130
    assert output.splitlines()[-1] == "interrupted"
    assert "Traceback" not in output
    assert is_gone(int(started.read_text()))
