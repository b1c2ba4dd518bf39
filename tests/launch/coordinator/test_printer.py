"""The output of a launch on standard output and standard error."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading

import pytest

from parawrap import LaunchError, current_rank, wrapper
from parawrap.launch.coordinator._printer import Lines, Printer
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S

PREFIX = "[rank 3] "


# -- launches


def write_lines():
    rank = current_rank().global_rank
    print("out", rank)
    print("err", rank, file=sys.stderr)
    os.write(1, b"raw\n")
    logger = logging.getLogger("mine")
    logger.info("info")
    logger.warning("warning")


@pytest.mark.parametrize(
    ("given", "verbose", "shown"), [([1], True, [1]), ((), True, []), (None, True, [0, 1]), (None, False, [])]
)
def test_lines_of_print_ranks_are_shown(given, verbose, shown, capfd):
    """Lines appear on the same stream as in the rank, also those of C code. Only rank 0 logs below WARNING."""
    launch = wrapper(ranks(verbose=verbose, print_ranks=given, ipc_groups=None))(write_lines).submit()
    launch.results(timeout=PATIENCE_S)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[rank {rank}] {text}" for rank in shown for text in (f"out {rank}", "raw")]
    logged = {0: ["INFO:mine:info", "WARNING:mine:warning"], 1: ["WARNING:mine:warning"]}
    assert sorted(err.splitlines()) == [
        f"[rank {rank}] {text}" for rank in shown for text in (*logged[rank], f"err {rank}")
    ]
    assert "err 1\n" in launch.logs(1)


def test_lone_rank_has_no_prefix(capfd):
    """A progress bar is shown, and a last line without a newline is not lost."""

    def draws():
        sys.stdout.write("50%\r")
        sys.stdout.write("100%\r\nend")

    wrapper(ranks(1, verbose=True))(draws)()
    assert capfd.readouterr()[0].replace("\r\n", "\n") == "50%\r100%\nend\n"


def test_lines_of_ranks_never_mix(capfd):

    def pours():
        rank = current_rank().global_rank
        for i in range(2000):
            os.write(1, f"{rank} {i}".encode())
            os.write(1, b" end\n")

    wrapper(ranks(verbose=True, ipc_groups=None))(pours)()
    lines = capfd.readouterr()[0].splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {rank} {i} end" for i in range(2000)]
    assert len(lines) == 4000


UNREAD = """
import os, time
from parawrap import Platform, wrapper
from parawrap.errors import LaunchTimeoutError

def talk(then_s):
    for _ in range(3000):
        print("x" * 1000, flush=True)
    time.sleep(then_s)

fields = dict(device="cpu", n_cpus=2, ipc_groups=None, grace_s=0)
try:
    wrapper(Platform(timeout_min=1 / 60, **fields))(talk)(600)
except LaunchTimeoutError:
    os.write(2, b"timed out")
wrapper(Platform(**fields))(talk)(0)
os.write(2, b", done")
"""


def test_unread_output_stops_no_launch():
    """A launch reaches its time limit even if its output is not read. All of it is printed before the interpreter exits."""
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        expected = b"timed out, done"
        assert script.stderr.read(len(expected)) == expected
        assert script.stdout.read().count(b"\n") >= 6000


class BrokenPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_any_sys_stdout_is_used(monkeypatch):
    """Notebooks and tests replace it while ranks run. It may be missing or broken, or lack a character."""
    printer, raw, last = Printer(), io.BytesIO(), io.StringIO()
    lines = Lines(printer, PREFIX, "stdout")
    for stream in None, BrokenPipe(), io.TextIOWrapper(raw, encoding="ascii", write_through=True), last:
        monkeypatch.setattr(sys, "stdout", stream)
        printer.add(lambda: lines.take("µs\nnext\n".encode()))
        printer.flush()
    printer.finish()
    assert raw.getvalue().splitlines() == [b"[rank 3] \\xb5s", b"[rank 3] next"]
    assert last.getvalue() == f"{PREFIX}µs\n{PREFIX}next\n"


def test_the_limit_on_threads_is_named(monkeypatch, capsys):
    """The calling thread prints, and a launch that cannot be watched raises LaunchError."""

    def refuse(_):
        raise RuntimeError("can't start new thread")

    printer, text = Printer(), r"watches len cannot be started: can't start new thread; .*\(RLIMIT_NPROC\)"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        printer.add(lambda: print("shown"))
        assert capsys.readouterr().out == "shown\n"
        with pytest.raises(LaunchError, match=text):
            wrapper(ranks(1, verbose=True))(len).submit("")
    printer.add(lambda: print("later"))
    printer.finish()
    assert capsys.readouterr().out == "later\n"
