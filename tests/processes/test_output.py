"""Transcripts keep the complete output of ranks, show it line by line, and never fail a launch."""

from __future__ import annotations

import logging
import tempfile
from functools import partial

import pytest

from parawrap import LaunchError, current_rank, wrapper
from parawrap.launch.coordinator._printer import Printer
from parawrap.launch.coordinator._transcript import Transcript
from tests.helpers.processes import ranks

PREFIX = "[rank 3] "


def written(*chunks, folder=None):
    printer = Printer()
    transcript = Transcript(3, printer=printer, prefix=PREFIX, folder=folder)
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
        ([b"dos\r", b"\nunix\n"], "[rank 3] dos\r\n[rank 3] unix\n"),
        (["€".encode()[:1], "€".encode()[1:]], "[rank 3] €\n"),
        ([b"\xff\xfe\ncaf\xc3"], "[rank 3] ��\n[rank 3] caf�\n"),
        (["a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\n".encode()], "[rank 3] a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\n"),
    ],
)
def test_each_line_has_a_prefix(chunks, lines, capsys):
    """Only newlines and carriage returns end a line. Chunks may end within a line end or a character."""
    written(*chunks)
    assert capsys.readouterr().out == lines


# -- log files


def test_full_disk_cuts_only_the_log(tmp_path, capsys, caplog):
    """One warning is logged, and all output is kept and shown."""
    (tmp_path / "rank-3.log").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "parawrap.launch"):
        transcript = written(*[b"line\n"] * 3, folder=tmp_path)
    (record,) = caplog.records
    assert "rank-3.log" in record.getMessage()
    assert "No space left" in record.getMessage()
    assert transcript.text() == "line\n" * 3
    assert capsys.readouterr().out == f"{PREFIX}line\n" * 3


def test_full_temporary_folder(monkeypatch, capsys):
    """Output of more than 1 MiB is shown, although it cannot be kept."""
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "w+b"))
    text = written(*[b"x" * 9_999 + b"\n"] * 300).text()
    assert text.startswith("x" * 9_999)
    assert capsys.readouterr().out == f"{PREFIX}{'x' * 9_999}\n" * 300


def test_unusable_log_is_named(tmp_path):
    (tmp_path / "rank-3.log").mkdir()
    with pytest.raises(LaunchError, match=r"console_logs: .*rank-3\.log cannot be written to: .*; give another folder"):
        written(folder=tmp_path)
    with pytest.raises(LaunchError, match=f"console_logs='{__file__}' cannot be written to: .*; give another folder"):
        wrapper(ranks(console_logs=__file__))(len).submit("")


def test_each_launch_has_its_log_folder(tmp_path, monkeypatch):
    """``~`` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    launchable = wrapper(ranks(console_logs="~/a/b"))(lambda word: print(word, current_rank().global_rank))
    launches = {word: launchable.submit(word) for word in ("one", "two")}
    for word, launch in launches.items():
        launch.results()
        assert {path.name: path.read_text() for path in launch.log_folder.iterdir()} == {
            "rank-0.log": f"{word} 0\n",
            "rank-1.log": f"{word} 1\n",
        }
    assert len(list((tmp_path / "a/b").iterdir())) == 2
