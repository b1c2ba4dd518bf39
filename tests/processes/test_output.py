"""Transcripts keep the complete output of ranks, show it line by line, and never fail a launch."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc

import pytest

from parawrap import LaunchError, RankDiedError, UnsendableError, current_rank, wrapper
from parawrap.processes.output import Printer, Transcript
from tests.helpers.processes import ranks
from tests.helpers.scripts import read_script
from tests.helpers.waiting import PATIENCE_S, eventually

PREFIX = "[rank 3] "


def written(*chunks, folder=None):
    printer = Printer()
    transcript = Transcript(printer, PREFIX, None if folder is None else folder / "rank-3.log")
    for data in chunks:
        transcript.write(1, data)
    transcript.finish()
    printer.finish()
    return transcript


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"o", b"ne\nt", b"wo\n"], "[rank 3] one\n[rank 3] two\n"),
        ([b"one\npartial"], "[rank 3] one\n[rank 3] partial\n"),
        ([b"10%\r20%\r", b"30%\n"], "[rank 3] 10%\r[rank 3] 20%\r[rank 3] 30%\n"),
        ([b"do", b"s\r\nunix\n"], "[rank 3] dos\r\n[rank 3] unix\n"),
        (["€".encode()[:1], "€".encode()[1:]], "[rank 3] €\n"),
        ([b"\xff\xfe\ncaf\xc3"], "[rank 3] ��\n[rank 3] caf�\n"),
        (
            ["a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\n".encode()],
            "[rank 3] a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\n",
        ),
    ],
)
def test_each_line_has_a_prefix(chunks, lines, capsys):
    """Newlines and carriage returns end a line, and nothing else. Chunks may end within a line or a
    character.
    """
    written(*chunks)
    assert capsys.readouterr().out == lines


# -- log files


def test_full_disk_cuts_only_the_log(tmp_path, capsys, caplog):
    """One warning is logged, and all output is kept and shown."""
    (tmp_path / "rank-3.log").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "parawrap.launch"):
        transcript = written(*[b"line\n"] * 3, folder=tmp_path)
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert transcript.text() == "line\n" * 3
    assert capsys.readouterr().out == f"{PREFIX}line\n" * 3


def test_full_disk_for_a_moment(monkeypatch, capsys, caplog):
    """Output that cannot be kept is shown, and later output is kept again."""
    piece = b"x" * (1 << 19) + b"\n"
    real, full = tempfile.TemporaryFile, [True]

    def make(*args, **kwargs):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", make)
    printer = Printer()
    transcript = Transcript(printer, "")
    with caplog.at_level(logging.WARNING, "parawrap.launch"):
        for number in range(5):
            full[0] = number < 3
            transcript.write(1, piece)
    transcript.finish()
    printer.finish()
    assert len(caplog.records) == 1
    assert len(transcript.text()) == 3 * len(piece)
    assert len(capsys.readouterr().out) == 5 * len(piece)


def test_unread_output_costs_no_memory(monkeypatch):
    """Output that the terminal does not take waits on disk, however small its pieces are."""
    gate = threading.Event()

    class Blocked(io.StringIO):
        def write(self, text):
            gate.wait(PATIENCE_S)
            return super().write(text)

    shown = Blocked()
    monkeypatch.setattr(sys, "stdout", shown)
    printer = Printer()
    transcript = Transcript(printer, "")
    tracemalloc.start()
    try:
        for number in range(30_000):
            transcript.write(1, b"%099d\n" % number)
        assert tracemalloc.get_traced_memory()[0] < 3 << 19
    finally:
        tracemalloc.stop()
        gate.set()
    transcript.finish()
    printer.finish()
    eventually(lambda: len(shown.getvalue()) == 3_000_000, "all output")
    assert shown.getvalue().splitlines() == [f"{number:099d}" for number in range(30_000)]


def test_unusable_log_is_named(tmp_path):
    (tmp_path / "rank-3.log").mkdir()
    with pytest.raises(
        LaunchError,
        match=r"console_logs: .*rank-3\.log cannot be written to: .*; give another folder",
    ):
        written(folder=tmp_path)
    with pytest.raises(
        LaunchError,
        match=f"console_logs='{__file__}' cannot be written to: .*; give another folder",
    ):
        wrapper(ranks(console_logs=__file__))(len).submit("")


def test_each_launch_has_its_log_folder(tmp_path, monkeypatch):
    """``~`` is the home folder. A call that cannot be sent makes no folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    launchable = wrapper(ranks(console_logs="~/a/b"))(
        lambda word: print(word, current_rank().global_rank)
    )
    with pytest.raises(UnsendableError):
        launchable(threading.Lock())
    launches = {word: launchable.submit(word) for word in ("one", "two")}
    for word, launch in launches.items():
        launch.results()
        assert {path.name: path.read_text() for path in launch.log_folder.iterdir()} == {
            "rank-0.log": f"{word} 0\n",
            "rank-1.log": f"{word} 1\n",
        }
    assert len(list((tmp_path / "a/b").iterdir())) == 2


def test_log_folders_of_map_have_numbers(tmp_path):
    for _ in wrapper(ranks(1, console_logs=tmp_path))(len).map(["", "", ""]):
        pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.split("-")[:2] for name in names] == [["len", "0"], ["len", "1"], ["len", "2"]]


# -- launches


def write_lines():
    print("out", current_rank().global_rank)
    os.write(1, b"raw\n")
    logging.getLogger("mine").info("info")
    logging.getLogger("mine").warning("warning")


@pytest.mark.parametrize(
    ("given", "verbose", "shown"),
    [([1], True, [1]), ((), True, []), (None, True, [0, 1]), (None, False, [])],
)
def test_lines_of_print_ranks_are_shown(given, verbose, shown, capfd):
    """Lines appear on the same stream as in the rank, also those of C code.

    Only rank 0 logs below WARNING.
    """
    launch = wrapper(ranks(verbose=verbose, print_ranks=given, ipc_groups=None))(
        write_lines
    ).submit()
    launch.results(timeout=PATIENCE_S)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {text}" for rank in shown for text in (f"out {rank}", "raw")
    ]
    logged = {0: ["INFO:mine:info", "WARNING:mine:warning"], 1: ["WARNING:mine:warning"]}
    assert sorted(err.splitlines()) == [
        f"[rank {rank}] {text}" for rank in shown for text in logged[rank]
    ]
    assert "WARNING:mine:warning\n" in launch.logs(1)


def test_lone_rank_has_no_prefix(capfd):
    """A progress bar is shown, and a last line without a newline is not lost."""

    def draws():
        sys.stdout.write("50%\r")
        sys.stdout.write("100%\r\nend")

    wrapper(ranks(1, verbose=True))(draws)()
    assert capfd.readouterr()[0].replace("\r\n", "\n") == "50%\r100%\nend\n"


def test_unbuffered_output(monkeypatch):
    """PYTHONUNBUFFERED of the script holds in ranks: a killed rank has written everything."""

    def die():
        sys.stdout.write("no newline")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    launch = wrapper(ranks(1))(die).submit()
    with pytest.raises(RankDiedError):
        launch.results(timeout=PATIENCE_S)
    assert launch.logs(0) == "no newline"


def test_unread_output_stops_no_launch():
    """A launch reaches its time limit even if its output is not read.

    All of it is printed before the interpreter exits.
    """
    with subprocess.Popen(
        [sys.executable, "-c", read_script("unread_output")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as script:
        expected = b"timed out, done"
        assert script.stderr.read(len(expected)) == expected
        assert script.stdout.read().count(b"\n") >= 2400


class BrokenPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_any_sys_stdout_is_used(monkeypatch):
    """Notebooks and tests replace it while ranks run.

    It may be missing or broken, or lack a character.
    """
    printer, raw, last = Printer(), io.BytesIO(), io.StringIO()
    transcript = Transcript(printer, PREFIX)
    for stream in (
        None,
        BrokenPipe(),
        io.TextIOWrapper(raw, encoding="ascii", write_through=True),
        last,
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        transcript.write(1, "µs\nnext\n".encode())
        printer.flush()
    printer.finish()
    assert raw.getvalue().splitlines() == [b"[rank 3] \\xb5s", b"[rank 3] next"]
    assert last.getvalue() == f"{PREFIX}µs\n{PREFIX}next\n"
