"""Transcripts keep the complete output of ranks, show it line by line, and never fail a launch."""

from __future__ import annotations

import io
import logging
import resource
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parawrap import Platform
from parawrap.errors import LaunchError
from parawrap.launch.coordinator._printer import Printer
from parawrap.launch.coordinator._transcript import Transcript, new_log_folder

PREFIX = "[rank 3] "
OUT, ERR = 1, 2


class PrintedTranscript(Transcript):
    """A transcript whose output is printed when `write` and `finish` return."""

    def write(self, stream, data):
        super().write(stream, data)
        self.await_print()

    def finish(self):
        super().finish()
        if self._printer is not None:
            self._printer.finish()

    def await_print(self):
        if self._printer is not None:
            printed = threading.Event()
            self._printer.add(printed.set)
            assert printed.wait(10)


def a_transcript(prefix=PREFIX, shown=True, folder=None) -> Transcript:
    return PrintedTranscript(3, printer=Printer() if shown else None, prefix=prefix, folder=folder)


def shown(chunks: list[bytes], prefix=PREFIX) -> str:
    """Return the text that a transcript of these chunks shows on standard output."""
    stream, before = io.StringIO(), sys.stdout
    sys.stdout = stream
    try:
        transcript = a_transcript(prefix)
        for chunk in chunks:
            transcript.write(OUT, chunk)
        transcript.finish()
    finally:
        sys.stdout = before
    return stream.getvalue()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], "[rank 3] one\n[rank 3] two\n"),
        ([b"o", b"ne\nt", b"wo\n"], "[rank 3] one\n[rank 3] two\n"),
        ([b"\n\n"], "[rank 3] \n[rank 3] \n"),
        ([b"partial"], "[rank 3] partial\n"),
        ([b"one\npartial"], "[rank 3] one\n[rank 3] partial\n"),
        ([b"10%\r20%\r", b"30%\n"], "[rank 3] 10%\r[rank 3] 20%\r[rank 3] 30%\n"),
        ([b"dos\r", b"\nunix\n"], "[rank 3] dos\r\n[rank 3] unix\n"),
        ([b"dos\r\nunix\n"], "[rank 3] dos\r\n[rank 3] unix\n"),
        (["µ€🏖\n".encode()], "[rank 3] µ€🏖\n"),
        ([b"\xff\xfe\n"], "[rank 3] ��\n"),
        ([], ""),
        ([b""], ""),
    ],
)
def test_each_line_has_a_rank_prefix(chunks, lines):
    """Lines end at a newline or carriage return. An unfinished last line gets a newline."""
    assert shown(chunks) == lines


def test_a_lone_rank_has_no_prefix():
    """The output of a single rank is shown unchanged."""
    assert shown([b"one\ntwo\n"], prefix="") == "one\ntwo\n"


@given(text=st.text("aé€🏖\n\r ", max_size=30), data=st.data())
@settings(max_examples=80, deadline=None)
def test_chunk_boundaries_do_not_change_the_output(text, data):
    """Chunks may end within a character or within a line end."""
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    chunks = [raw[i:j] for i, j in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert shown(chunks) == shown([raw])


def test_only_newlines_and_carriage_returns_end_a_line():
    """Other line separators of Python's `splitlines` do not end a line."""
    line = "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\n"
    assert shown([line.encode()]) == f"{PREFIX}{line}"


def test_an_incomplete_last_character_is_replaced():
    """An incomplete UTF-8 character at the end is shown as a replacement character."""
    assert shown([b"caf\xc3"]) == f"{PREFIX}caf�\n"


def test_a_very_long_line_is_shown_in_parts():
    """A line without an end is shown in parts, and no text is lost."""
    chunk = b"x" * 10_000
    got = shown([chunk] * 20)
    assert got.replace(PREFIX, "").replace("\n", "") == "x" * 200_000
    assert max(map(len, got.splitlines())) < 100_000


def test_a_line_is_shown_as_soon_as_it_is_complete(capsys):
    """A complete line is shown while the transcript is open."""
    transcript = a_transcript()
    transcript.write(OUT, b"one\ntw")
    assert capsys.readouterr().out == f"{PREFIX}one\n"
    transcript.finish()


def test_both_streams_are_shown_separately(capsys):
    """Standard error is shown on standard error, and lines of the two streams do not mix."""
    transcript = a_transcript()
    for stream, data in ((OUT, b"ou"), (ERR, b"er"), (OUT, b"t\n"), (ERR, b"r\n")):
        transcript.write(stream, data)
    transcript.finish()
    assert list(capsys.readouterr()) == [f"{PREFIX}out\n", f"{PREFIX}err\n"]
    assert transcript.text() == "ouert\nr\n"


def test_a_hidden_transcript_keeps_all_output(capsys):
    """A transcript with ``shown=False`` keeps its output and shows nothing."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, b"one\n")
    transcript.write(ERR, b"two\n")
    transcript.finish()
    assert list(capsys.readouterr()) == ["", ""]
    assert transcript.text() == "one\ntwo\n"


def test_a_replaced_sys_stdout_is_used(monkeypatch):
    """Output goes to the current `sys.stdout`, which notebooks and tests replace while ranks run."""
    transcript = a_transcript()
    first, second = io.StringIO(), io.StringIO()
    for stream in (first, second):
        monkeypatch.setattr(sys, "stdout", stream)
        transcript.write(OUT, b"line\n")
    transcript.finish()
    assert first.getvalue() == second.getvalue() == f"{PREFIX}line\n"


class BrokenPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


class Unflushable(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), BrokenPipe(), Unflushable()], ids=["none", "closed", "pipe", "full"])
def test_a_broken_stdout_does_not_fail_the_transcript(monkeypatch, stream):
    """If standard output is missing, closed, or full, the transcript still keeps all output."""
    monkeypatch.setattr(sys, "stdout", stream)
    transcript = a_transcript()
    transcript.write(OUT, b"one\n")
    transcript.write(OUT, b"two")
    transcript.finish()
    assert transcript.text() == "one\ntwo"


def test_an_unencodable_character_does_not_lose_the_line(monkeypatch):
    """With an ASCII output, a line with another character is still shown."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    transcript = a_transcript()
    transcript.write(OUT, "loss 0.5 µs\nnext\n".encode())
    transcript.finish()
    monkeypatch.undo()
    assert b"loss 0.5" in raw.getvalue()
    assert b"[rank 3] next\n" in raw.getvalue()


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a\r\nb\rc", "a\r\nb\rc"), ("µ€".encode(), "µ€"), (b"\xff!", "�!"), (b"", "")],
)
def test_text_keeps_line_ends(data, text):
    """`text` keeps line ends and replaces invalid UTF-8."""
    transcript = a_transcript(shown=False)
    for i in range(len(data)):
        transcript.write(OUT, data[i : i + 1])
    assert transcript.text() == text


def test_text_can_be_read_at_any_time():
    """`text` works while the rank writes and after `finish`."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, b"one\n")
    assert transcript.text() == "one\n"
    transcript.write(OUT, b"two\n")
    transcript.finish()
    assert [transcript.text(), transcript.text()] == ["one\ntwo\n"] * 2


def test_large_output_is_kept_complete():
    """Megabytes of output, which go to the disk, are read back complete."""
    transcript = a_transcript(shown=False)
    for i in range(300):
        transcript.write(OUT, b"%05d" % i + b"x" * 9_994 + b"\n")
        if i == 150:
            assert len(transcript.text()) == 1_510_000
    text = transcript.text()
    assert len(text) == 3_000_000
    assert [line[:5] for line in text.splitlines()] == [f"{i:05d}" for i in range(300)]


def test_text_can_be_read_by_another_thread():
    """While a rank writes, each reading in another thread is a prefix of the full text."""
    transcript, done, readings = a_transcript(shown=False), threading.Event(), []

    def read() -> None:
        while True:
            last = done.is_set()
            readings.append(transcript.text())
            if last:
                return

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(200):
        transcript.write(OUT, b"%d\n" % i)
    done.set()
    reader.join()
    whole = "".join(f"{i}\n" for i in range(200))
    assert readings[-1] == whole
    assert all(whole.startswith(each) for each in readings)


@pytest.mark.parametrize(
    ("text", "at_most", "words"),
    [
        ("one\ntwo\nthree\n", 100, "one\ntwo\nthree\n"),
        ("one\ntwo\nthree\n", 8, "three\n"),
        ("one\ntwo\nthree\n", 13, "two\nthree\n"),
        ("a long line without an end", 6, "an end"),
        ("", 5, ""),
    ],
)
def test_last_words_are_whole_lines_if_possible(text, at_most, words):
    """`last_words` returns whole lines, or the end of a line that is too long."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, text.encode())
    assert transcript.last_words(at_most) == words


def test_last_words_of_a_crash_include_its_first_line():
    """Long faulthandler stacks displace neither the line that names the crash nor the line before it."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, b"long ago\n" * 50 + b"just before\n")
    transcript.write(ERR, b"Fatal Python error: Aborted\n\n" + b"  File one\n" * 50 + b"  File last\n")
    words = transcript.last_words(200)
    assert "\njust before\nFatal Python error: Aborted\n...\n  File one\n" in words
    assert words.endswith("  File one\n  File last\n")
    assert len(words) <= 200


# -- files


def test_a_log_file_has_all_output_of_its_rank(tmp_path):
    """The file has both streams, without prefixes, while the rank runs."""
    transcript = a_transcript(shown=False, folder=tmp_path)
    transcript.write(OUT, b"out\n\xff")
    transcript.write(ERR, b"err\r\n")
    assert (tmp_path / "rank-3.log").read_bytes() == b"out\n\xfferr\r\n"
    transcript.finish()


def test_an_older_log_is_replaced(tmp_path):
    """A new transcript replaces an existing log file."""
    (tmp_path / "rank-3.log").write_text("old\n")
    transcript = a_transcript(shown=False, folder=tmp_path)
    transcript.write(OUT, b"new\n")
    transcript.finish()
    assert (tmp_path / "rank-3.log").read_text() == "new\n"


def test_a_full_disk_truncates_only_the_log_file(tmp_path, capsys, caplog):
    """One warning is logged, and all output is kept and shown."""
    (tmp_path / "rank-3.log").symlink_to("/dev/full")
    transcript = a_transcript(folder=tmp_path)
    with caplog.at_level(logging.WARNING, "parawrap.launch"):
        for _ in range(3):
            transcript.write(OUT, b"line\n")
        transcript.finish()
    assert len(caplog.records) == 1
    assert "rank-3.log" in caplog.text
    assert "No space left" in caplog.text
    assert transcript.text() == "line\n" * 3
    assert capsys.readouterr().out == f"{PREFIX}line\n" * 3


@pytest.mark.skipif(sys.platform != "linux", reason="the test limits the file size to simulate a full disk")
def test_a_full_temporary_folder_does_not_stop_output(capsys):
    """Very long output is kept in the temporary folder; if the folder is full, all output is still shown."""
    transcript = a_transcript()
    line = b"x" * 9_999 + b"\n"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        for _ in range(300):
            transcript.write(OUT, line)
        text = transcript.text()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    transcript.finish()
    assert len(capsys.readouterr().out) == 300 * (len(PREFIX) + len(line))
    assert text.startswith("x" * 9_999)


def test_without_console_logs_there_is_no_log_folder():
    """With ``console_logs=None``, no folder is created."""
    assert new_log_folder(Platform(device="cpu"), "train") is None


@pytest.mark.parametrize("relative", [True, False])
def test_the_log_folder_is_created_with_its_parents(tmp_path, relative):
    """The path is absolute, so the process can change its working directory."""
    given = "a/b" if relative else str(tmp_path / "a/b")
    folder = new_log_folder(Platform(device="cpu", console_logs=given), "train")
    assert folder.parent == tmp_path / "a/b"
    assert folder.name.startswith("train-")
    assert list(folder.iterdir()) == []


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """``~`` in ``console_logs`` is expanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_log_folder(Platform(device="cpu", console_logs="~/logs"), "train").parent == tmp_path / "logs"


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/logs"])
def test_an_unwritable_log_folder_raises(tmp_path, path):
    """LaunchError names `console_logs`, its value, and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError) as caught:
        new_log_folder(Platform(device="cpu", console_logs=path), "train")
    assert str(caught.value).startswith(f"console_logs={path!r}")
    assert "another folder" in str(caught.value)


def test_a_log_file_that_cannot_be_opened_raises(tmp_path):
    """If the path of the log file is a folder, LaunchError names the file."""
    (tmp_path / "rank-3.log").mkdir()
    with pytest.raises(LaunchError, match=r"rank-3\.log"):
        a_transcript(folder=tmp_path)


UNREAD = """
import os, sys, time
from parawrap import Platform, wrapper
from parawrap.errors import LaunchTimeoutError

@wrapper(Platform(device="cpu", n_cpus=2, ipc_groups=None, timeout_min=1 / 60, grace_s=0))
def talk():
    for _ in range(3000):
        print("x" * 1000, flush=True)
    time.sleep(600)

try:
    talk()
except LaunchTimeoutError:
    os.write(2, b"timed out")
os._exit(0)
"""


def test_a_reader_that_does_not_drain_stdout_does_not_stop_a_time_limit():
    """A launch whose output nobody reads reaches its time limit."""
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        assert script.stderr.read() == b"timed out"


def test_a_slow_reader_gets_all_output_at_the_exit():
    """Output that is not printed when the results arrive is printed before the interpreter exits."""
    code = UNREAD.replace("time.sleep(600)", "").replace("talk()\nexcept", "talk(); os.write(2, b'done')\nexcept")
    code = code.replace("os._exit(0)", "").replace("1 / 60", "1")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        assert script.stderr.read(4) == b"done"
        assert script.stdout.read().count(b"\n") == 6000


def test_output_is_printed_without_another_thread(monkeypatch, capsys):
    """At the limit on threads, the calling thread prints."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    transcript = a_transcript()
    transcript.write(OUT, b"one\ntwo")
    transcript.finish()
    assert capsys.readouterr().out == f"{PREFIX}one\n{PREFIX}two\n"
