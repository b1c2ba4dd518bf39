"""The command line as a whole: help, completion, wrong usage, and Ctrl-C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import ROOT

SUBCOMMANDS = ["doctor", "run", "timeline", "completion"]


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


@pytest.mark.parametrize("args", ['["--help"]', '["run", "--help"]', '["completion", "bash"]', '["timeline", "none.json"]'])
def test_help_does_not_import_torch(args):
    """Help, completion, and timelines do not wait for torch."""
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
        (("doctr",), "'doctr' is not a command. Did you mean doctor?"),
        (("x",), "'x' is not a command. Give one of doctor, run, timeline, completion"),
        (("doctor", "--timeout", "inf"), "inf is not a number of seconds above 0"),
        (("doctor", "--timeout", "1e9"), "1e9 is not a number of seconds above 0, and at most 1000000"),
        (("doctor", "--timeout", "nan"), "nan is not a number of seconds above 0"),
        (("doctor", "--timeout", "0"), "0 is not a number of seconds above 0"),
        (("doctor", "--timeout", "1m"), "1m is not a number of seconds above 0"),
        (("doctor", "--", "1"), "doctor takes no arguments after --"),
        (("completion", "cmd"), "invalid choice: 'cmd'"),
        (("timeline", "none.json"), "'none.json' cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_has_one_line_and_exit_code_2(parawrap, args, message):
    """The message names the wrong value. There is no traceback."""
    shown = parawrap(*args)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_completion_is_a_script(parawrap):
    """The script for bash is valid, and knows the subcommands and their options."""
    script = parawrap("completion", "bash").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert all(word in script for word in (*SUBCOMMANDS, "--dry-run"))


def test_completion_without_its_package_names_it(parawrap, tmp_path):
    """Without shtab, the message says what to install."""
    (tmp_path / "shtab.py").write_text("raise ImportError")
    shown = parawrap("completion", "bash", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert shown.returncode == 2
    assert "pip install 'parawrap-torch[cli]'" in shown.stderr


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


def test_colors_are_for_terminals(tmp_path):
    """The states of checks are colored on a terminal, unless NO_COLOR is set, and never in a pipe."""
    code = "from parawrap.cli._doctor import _colored; print(_colored('ok', 'ok'))"

    def shown_on_terminal(**environ):
        reader, writer = pty.openpty()
        run = {"cwd": ROOT, "check": True, "env": {**os.environ, "TERM": "xterm", **environ}}
        subprocess.run([sys.executable, "-c", code], stdout=writer, **run)
        os.close(writer)
        shown = os.read(reader, 100)
        os.close(reader)
        return shown.strip()

    assert shown_on_terminal(NO_COLOR="") == b"\x1b[32mok\x1b[0m"
    assert shown_on_terminal(NO_COLOR="1") == b"ok"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout == b"ok\n"


def test_closed_output_ends_the_command_quietly():
    """A reader that stops reading, such as `head -1`, causes no traceback."""
    command = f"{sys.executable} -m parawrap completion bash | head -1"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(shown.stdout.splitlines()) == 1
    assert shown.stderr == ""


def test_output_that_cannot_be_written_is_an_error():
    """A full disk gives exit code 1, and one line with the reason."""
    command = f"{sys.executable} -m parawrap completion bash > /dev/full"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert shown.stderr == "parawrap completion: the output cannot be written: No space left on device\n"


def test_errors_do_not_go_to_standard_output():
    """Also if standard error is closed."""
    command = f"{sys.executable} -m parawrap run gone:main 2>&-"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (2, "")


def test_closed_standard_output_is_no_error():
    """Without a standard output, a command that succeeds has exit code 0."""
    command = f"{sys.executable} -m parawrap completion bash >&-"
    shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stderr == ""
