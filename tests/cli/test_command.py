"""The command line as a whole: help, wrong usage, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import ROOT

SUBCOMMANDS = ["doctor", "run", "timeline"]


def test_help_lists_the_subcommands_and_examples(parawrap):
    """`parawrap --help` has each subcommand, and examples."""
    shown = parawrap("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in SUBCOMMANDS)
    assert "examples:" in shown.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_has_examples(parawrap, name):
    """The help of a subcommand ends with examples of its own."""
    shown = parawrap(name, "--help")
    assert shown.returncode == 0
    assert f"parawrap {name} " in shown.stdout.partition("examples:")[2]


@pytest.mark.parametrize("args", ['["--help"]', '["run", "--help"]', '["timeline", "none.json"]'])
def test_help_does_not_import_torch(args):
    """Help and timelines do not wait for torch."""
    code = f"""
import sys
from parawrap.cli import main
try:
    main({args})
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_version_is_that_of_the_package(parawrap):
    """`parawrap --version` prints the package's version."""
    import parawrap as package

    assert parawrap("--version").stdout == f"parawrap {package.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("doctr",), "invalid choice: 'doctr'"),
        (("completion", "bash"), "invalid choice: 'completion'"),
        (("timeline", "a.json", "b.json"), "parawrap timeline: unrecognized arguments: b.json\n"),
        (("doctor", "--timeout", "inf"), "inf is not a number of seconds above 0"),
        (("doctor", "--timeout", "1e9"), "1e9 is not a number of seconds above 0, and at most 1000000"),
        (("doctor", "--timeout", "nan"), "nan is not a number of seconds above 0"),
        (("doctor", "--timeout", "0"), "0 is not a number of seconds above 0"),
        (("doctor", "--timeout", "1m"), "1m is not a number of seconds above 0"),
        (("doctor", "--", "1"), "doctor takes no arguments after --"),
        (("timeline", "none.json"), "'none.json' cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_has_one_line_and_exit_code_2(parawrap, args, message):
    """The message names the wrong value. There is no traceback."""
    shown = parawrap(*args)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_ctrl_c_ends_a_launch_without_a_traceback(tmp_path, parawrap):
    """Ctrl-C gives exit code 130, one word, and no process that survives."""
    started = tmp_path / "started"
    command = [sys.executable, "-m", "parawrap", "run", "train:forever", "--device", "cpu", "--", str(started)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_closed_output_ends_the_command_quietly():
    """A reader that has gone, such as a finished `head -1`, causes no traceback."""
    command = f"{sys.executable} -m parawrap run json:dumps -- --help | true"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stderr == ""


def test_output_that_cannot_be_written_is_an_error():
    """A full disk gives exit code 1, and one line with the reason."""
    command = f"{sys.executable} -m parawrap run json:dumps -- --help > /dev/full"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert shown.stderr == "parawrap run: the output cannot be written: No space left on device\n"


def test_errors_do_not_go_to_standard_output():
    """Also if standard error is closed."""
    command = f"{sys.executable} -m parawrap run gone:main 2>&-"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (2, "")


def test_closed_standard_output_is_no_error():
    """Without a standard output, a command that succeeds has exit code 0."""
    command = f"{sys.executable} -m parawrap run json:dumps -- --help >&-"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stderr == ""
