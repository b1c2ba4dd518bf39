"""Transcripts: what ranks write is kept whole, shown line by line, and costs no launch whatever becomes of its readers."""

from __future__ import annotations

import io
import logging
import resource
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parawrap import Platform
from parawrap.errors import LaunchError
from parawrap.launch.watch._transcript import Transcript, new_log_folder

PREFIX = "[rank 3] "
OUT, ERR = 1, 2


def a_transcript(prefix=PREFIX, shown=True, folder=None) -> Transcript:
    return Transcript(3, prefix=prefix, shown=shown, folder=folder)


def shown(chunks: list[bytes], prefix=PREFIX) -> str:
    """What standard output shows of these chunks."""
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
def test_each_line_stands_behind_its_rank(chunks, lines):
    """Lines end at a newline or a carriage return; the last one is ended where the rank did not."""
    assert shown(chunks) == lines


def test_a_lone_rank_has_no_prefix():
    """What it writes is shown as it is."""
    assert shown([b"one\ntwo\n"], prefix="") == "one\ntwo\n"


@given(text=st.text("aé€🏖\n\r ", max_size=30), data=st.data())
@settings(max_examples=80, deadline=None)
def test_it_does_not_matter_how_the_output_is_cut(text, data):
    """Between the bytes of a character, or within the end of a line."""
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    chunks = [raw[i:j] for i, j in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert shown(chunks) == shown([raw])


def test_only_newlines_and_carriage_returns_end_a_line():
    """What Python calls a line besides is a character like any other."""
    line = "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\n"
    assert shown([line.encode()]) == f"{PREFIX}{line}"


def test_a_character_that_is_cut_off_at_the_end_is_shown_as_such():
    """As in the transcript."""
    assert shown([b"caf\xc3"]) == f"{PREFIX}caf�\n"


def test_a_line_without_an_end_is_shown_before_it_fills_the_memory():
    """It is cut, and nothing of it is lost."""
    chunk = b"x" * 10_000
    got = shown([chunk] * 20)
    assert got.replace(PREFIX, "").replace("\n", "") == "x" * 200_000
    assert max(map(len, got.splitlines())) < 100_000


def test_a_line_is_shown_as_soon_as_it_is_there(capsys):
    """Not only at the end."""
    transcript = a_transcript()
    transcript.write(OUT, b"one\ntw")
    assert capsys.readouterr().out == f"{PREFIX}one\n"
    transcript.finish()


def test_both_streams_are_shown_where_they_belong(capsys):
    """Standard error to standard error; a line of one is not cut by the other."""
    transcript = a_transcript()
    for stream, data in ((OUT, b"ou"), (ERR, b"er"), (OUT, b"t\n"), (ERR, b"r\n")):
        transcript.write(stream, data)
    transcript.finish()
    assert list(capsys.readouterr()) == [f"{PREFIX}out\n", f"{PREFIX}err\n"]
    assert transcript.text() == "ouert\nr\n"


def test_a_silent_transcript_keeps_all_and_shows_nothing(capsys):
    """verbose=False."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, b"one\n")
    transcript.write(ERR, b"two\n")
    transcript.finish()
    assert list(capsys.readouterr()) == ["", ""]
    assert transcript.text() == "one\ntwo\n"


def test_what_stands_at_standard_output_later_is_written_to(monkeypatch):
    """Notebooks and tests put other streams there while ranks run."""
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
def test_an_output_that_nobody_reads_costs_no_launch(monkeypatch, stream):
    """The transcript has it all."""
    monkeypatch.setattr(sys, "stdout", stream)
    transcript = a_transcript()
    transcript.write(OUT, b"one\n")
    transcript.write(OUT, b"two")
    transcript.finish()
    assert transcript.text() == "one\ntwo"


def test_an_output_that_has_not_every_character_shows_the_line_nevertheless(monkeypatch):
    """Under LANG=C a line is not lost for one letter."""
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
def test_the_text_is_what_was_written(data, text):
    """Line ends as they were; what is no UTF-8 is marked."""
    transcript = a_transcript(shown=False)
    for i in range(len(data)):
        transcript.write(OUT, data[i : i + 1])
    assert transcript.text() == text


def test_the_text_may_be_read_at_any_time():
    """While the rank writes on, and after it has ended."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, b"one\n")
    assert transcript.text() == "one\n"
    transcript.write(OUT, b"two\n")
    transcript.finish()
    assert [transcript.text(), transcript.text()] == ["one\ntwo\n"] * 2


def test_text_that_outgrows_memory_is_kept_whole():
    """Megabytes go to the disk, and nobody sees a difference."""
    transcript = a_transcript(shown=False)
    for i in range(300):
        transcript.write(OUT, b"%05d" % i + b"x" * 9_994 + b"\n")
        if i == 150:
            assert len(transcript.text()) == 1_510_000
    text = transcript.text()
    assert len(text) == 3_000_000
    assert [line[:5] for line in text.splitlines()] == [f"{i:05d}" for i in range(300)]


def test_the_text_may_be_read_by_another_thread_while_a_rank_writes():
    """Every reading is a beginning of the whole."""
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
def test_the_last_words_are_whole_lines_where_that_can_be(text, at_most, words):
    """Of a line that is longer than allowed, its end."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, text.encode())
    assert transcript.last_words(at_most) == words


def test_the_last_words_of_a_crash_include_what_it_was():
    """Stacks of many threads, which faulthandler writes after its first line, push out neither it nor what was before."""
    transcript = a_transcript(shown=False)
    transcript.write(OUT, b"long ago\n" * 50 + b"just before\n")
    transcript.write(ERR, b"Fatal Python error: Aborted\n\n" + b"  File one\n" * 50 + b"  File last\n")
    words = transcript.last_words(200)
    assert "\njust before\nFatal Python error: Aborted\n...\n  File one\n" in words
    assert words.endswith("  File one\n  File last\n")
    assert len(words) <= 200


# -- files


def test_a_log_file_has_all_that_the_rank_wrote(tmp_path):
    """Both streams, without prefixes, while the rank runs."""
    transcript = a_transcript(shown=False, folder=tmp_path)
    transcript.write(OUT, b"out\n\xff")
    transcript.write(ERR, b"err\r\n")
    assert (tmp_path / "rank-3.log").read_bytes() == b"out\n\xfferr\r\n"
    transcript.finish()


def test_an_older_log_is_replaced(tmp_path):
    """The file is that of the last launch."""
    (tmp_path / "rank-3.log").write_text("old\n")
    transcript = a_transcript(shown=False, folder=tmp_path)
    transcript.write(OUT, b"new\n")
    transcript.finish()
    assert (tmp_path / "rank-3.log").read_text() == "new\n"


def test_a_full_disk_costs_the_log_file_and_not_the_launch(tmp_path, capsys, caplog):
    """It is told once, in parawrap's log; the rest is kept and shown."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files stands in for a full disk")
def test_a_full_temporary_folder_costs_no_launch(capsys):
    """What is kept of very long outputs goes there; where it is full, all is shown nevertheless."""
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


def test_no_log_folder_is_made_where_none_is_named():
    """console_logs=None."""
    assert new_log_folder(Platform(device="cpu"), "train") is None


@pytest.mark.parametrize("relative", [True, False])
def test_the_log_folder_is_made_with_all_above_it(tmp_path, relative):
    """Absolute, however it was written: the process may go to another folder."""
    given = "a/b" if relative else str(tmp_path / "a/b")
    folder = new_log_folder(Platform(device="cpu", console_logs=given), "train")
    assert folder.parent == tmp_path / "a/b"
    assert folder.name.startswith("train-")
    assert list(folder.iterdir()) == []


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """As in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_log_folder(Platform(device="cpu", console_logs="~/logs"), "train").parent == tmp_path / "logs"


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/logs"])
def test_a_log_folder_that_cannot_be_written_to_is_told(tmp_path, path):
    """The message names console_logs and its value, and what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError) as caught:
        new_log_folder(Platform(device="cpu", console_logs=path), "train")
    assert str(caught.value).startswith(f"console_logs={path!r}")
    assert "another folder" in str(caught.value)


def test_a_log_file_that_cannot_be_opened_is_told(tmp_path):
    """A folder stands in its place."""
    (tmp_path / "rank-3.log").mkdir()
    with pytest.raises(LaunchError, match=r"rank-3\.log"):
        a_transcript(folder=tmp_path)
