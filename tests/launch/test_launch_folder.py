"""The folder of a launch on a cluster, its journal, and the send queue of a line: all data arrives once and in order."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.clusters import _batch, _journal
from parawrap.launch.clusters._folder import Folder, Plan
from parawrap.launch.clusters._journal import Journal, JournalReader, JournalRecord, LogsIntoJournal
from parawrap.launch.clusters._network import Address
from parawrap.launch.clusters._send_queue import SendQueue
from parawrap.launch.parcels._outcomes import Parcel
from parawrap.launch.parcels._packing import memory_file, packed
from parawrap.launch.parcels._wire import Wire, is_readable
from parawrap.launch.ranks._assignment import Surroundings
from tests.launch.processes import eventually


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "launches"))
    (folder,) = Folder.new("my job", 1)
    return folder


def test_a_launch_has_a_folder_of_its_own(folder):
    """Other users may not enter it, launches of the same name have different ones, and it is removed as a whole."""
    (other,) = Folder.new("my job", 1)
    assert other.path != folder.path
    assert folder.path.parent.name.startswith("my-job-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700
    folder.request("cancel")
    folder.remove()
    assert list(folder.root.iterdir()) == [other.path.parent]
    assert other.path.exists()


def test_the_launches_of_an_array_share_what_the_last_one_removes(folder):
    """Each has its own folder, and their tasks' logs stay until no launch is left."""
    first, second = Folder.new("array", 2)
    assert first.submitit == second.submitit
    first.submitit.mkdir()
    for number in ("7_1", "7_11"):
        (first.submitit / f"{number}_0_log.err").write_text(f"said by {number}")
    first.remove()
    assert _batch.log_ends(second, "7_1", 100) == "7_1_0_log.err:\nsaid by 7_1"
    second.remove()
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_a_folder_that_cannot_be_made_raises_with_advice(tmp_path, monkeypatch):
    """The message names the folder and the variable that sets another."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match=r"file cannot be written to: .*PARAWRAP_LAUNCH_DIR"):
        Folder.new("job", 1)


def test_folders_that_cannot_all_be_made_are_removed(folder, monkeypatch):
    """A file system that is full in the middle of an array keeps none of its folders."""
    mkdir = Path.mkdir

    def full(self, **options):
        if self.name == "3":
            raise OSError(28, "No space left on device")
        mkdir(self, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(LaunchError, match=r"No space left on device; free some space there, or set PARAWRAP_LAUNCH_DIR"):
        Folder.new("array", 5)
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_what_is_written_is_read(folder):
    """The plan, requests, signs of life, addresses, troubles, and counts have their last values."""
    plan = Plan("f", Platform(device="cpu"), Surroundings.here().without_environ(), b"t", 1.0)
    folder.write_plan(plan)
    assert folder.read_plan() == plan
    assert (folder.requests(), folder.rehearsals(), folder.sign_of_life()) == ([], 0, None)
    folder.request("preempt-0")
    folder.request("cancel")
    folder.write_sign_of_life(7)
    assert (sorted(folder.requests()), folder.rehearsals(), folder.sign_of_life()) == (["cancel", "preempt-0"], 1, b"7")
    assert (folder.address(0, b"t"), folder.troubles(0), folder.restarts()) == (None, [], (0, 0, 0))
    here = Address(("10.0.0.1", "127.0.0.1"), 4321, b"t")
    folder.write_address(0, here)
    assert b"t" not in (folder.path / "address-0").read_bytes()
    folder.write_trouble(0, 1, "node 1 is blind")
    folder.note_restarts(3, 1, 1)
    assert (folder.address(0, b"t"), folder.troubles(0), folder.restarts()) == (here, ["node 1 is blind"], (3, 1, 1))
    assert (folder.address(1, b"t"), folder.troubles(1)) == (None, [])
    assert not folder.has_journal(0)
    Journal(folder.journal(0)).close()
    assert folder.has_journal(0)
    folder.mark_preempted(0)
    assert folder.was_preempted(0)
    assert not folder.was_preempted(1)


def reads(folder):
    """Every function that unpickles something from a folder."""
    Journal(folder.journal(0)).close()
    folder.write_plan(Plan("f", Platform(device="cpu"), Surroundings.here().without_environ(), b"t", 1.0))
    parcel = Parcel(packed(1, "result", "it")).put(folder.parcel(0, 0))
    return [folder.read_plan, JournalReader(folder.journal(0)).new_entries, parcel.open]


def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(folder):
    """Another user could have put a pickle there."""
    for mode in (0o770, 0o702):
        for read in reads(folder):
            folder.path.chmod(mode)
            with pytest.raises(LaunchError, match=rf"other users may write to .*my-job-.*/0 \(mode {mode:o}\)"):
                read()
            folder.path.chmod(0o700)


@pytest.mark.parametrize("replaced_by", ["another user's folder", "a link"])
def test_nothing_is_loaded_from_a_folder_that_took_its_place(replaced_by, folder, monkeypatch, tmp_path):
    """A user who may rename the launch folder could have put another one in its place."""
    for read in reads(folder):
        if replaced_by == "a link":
            folder.path.rename(tmp_path / "moved")
            folder.path.symlink_to(tmp_path / "moved")
            with pytest.raises(NotADirectoryError):
                read()
            folder.path.unlink()
            (tmp_path / "moved").rename(folder.path)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(os, "geteuid", lambda: 12345)
                with pytest.raises(LaunchError, match=r"my-job-.* belongs to user \d+, not to user 12345: \w+"):
                    read()


def test_submitit_is_not_run_in_a_folder_that_others_may_write_to(folder):
    """It would unpickle files from there."""
    command = [*shlex.split(_batch._python()), "-c", "print('ran')", str(folder.submitit)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "ran\n"
    folder.submitit.parent.chmod(0o777)
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"other users may write to {folder.submitit.parent}\n"


def test_a_journal_is_read_while_it_is_written(tmp_path):
    """Each entry is read once and in order; after close, all of them are there."""
    path = tmp_path / "journal"
    journal, reader = Journal(path), JournalReader(path)
    for number in range(2000):
        journal.add("output", number, b"x" * (number % 700))
    read = []
    eventually(lambda: read.extend(reader.new_entries()) or read, "the first entries")
    journal.close()
    read += reader.new_entries()
    assert [entry[1] for entry in read] == list(range(2000))
    assert all(len(entry[2]) == entry[1] % 700 for entry in read)


def test_half_an_entry_is_not_read(tmp_path):
    """An entry is read once it is complete."""
    journal = Journal(tmp_path / "whole")
    journal.add("first")
    journal.add("second", b"y" * 1000)
    journal.close()
    data = (tmp_path / "whole").read_bytes()
    growing, reader = tmp_path / "growing", JournalReader(tmp_path / "growing")
    seen = []
    with growing.open("wb", buffering=0) as file:
        for start in range(0, len(data), 37):
            file.write(data[start : start + 37])
            seen += reader.new_entries()
    assert seen == [("first",), ("second", b"y" * 1000)]


def test_a_journal_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    """The next `add` raises, and `close` returns."""

    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_journal.os, "fsync", full)
    journal = Journal(tmp_path / "journal")
    journal.add("first")

    def added():
        try:
            journal.add("more")
        except LaunchError as error:
            return str(error)
        return None

    assert "cannot be written: [Errno 28]" in eventually(added, "the error")
    journal.close()


def test_a_journal_that_cannot_be_created_raises_at_once(tmp_path):
    """Its constructor raises."""
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "nowhere" / "journal")


def test_two_threads_may_write_the_same_request(folder):
    """Any number of threads may make the same request at once."""
    asking = [threading.Thread(target=lambda: [folder.request("cancel") for _ in range(100)]) for _ in range(4)]
    errors = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    finally:
        threading.excepthook = hook
    assert not errors
    assert folder.requests() == ["cancel"]


def test_output_and_log_records_go_into_the_journal(tmp_path):
    """Entries have the rank, the stream, and the level; the end of the output is kept for last words."""
    journal = Journal(tmp_path / "journal")
    record, handler = JournalRecord(journal, 3), LogsIntoJournal(journal)
    record.write(1, b"one\n")
    record.write(2, b"two\n")
    record.record("a traceback")
    handler.handle(logging.LogRecord("parawrap", logging.WARNING, "", 0, "late: %s", ("0",), None))
    journal.close()
    assert record.last_words(5) == "two\n"
    assert JournalReader(tmp_path / "journal").new_entries() == [
        ("output", 3, 1, b"one\n"),
        ("output", 3, 2, b"two\n"),
        ("record", 3, "a traceback"),
        ("log", logging.WARNING, "late: 0"),
    ]


def test_a_parcel_in_a_file_outlives_the_file_once_it_is_open(tmp_path):
    """An opened value does not need the file any more."""
    parcel = Parcel(packed(torch.ones(1 << 20), "result", "it")).put(tmp_path / "parcel")
    assert parcel.put(tmp_path / "elsewhere") is parcel
    value = parcel.open()
    (tmp_path / "parcel").unlink()
    assert torch.equal(value, torch.ones(1 << 20))


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    with closing(Wire(ours)) as here, closing(Wire(theirs)) as there:
        yield here, there


def test_no_more_is_sent_than_the_other_end_reads(line):
    """A message with a size waits for room, later messages wait behind it, and all arrive in the end."""
    here, there = line
    queue = SendQueue(here)
    for number in range(40):
        queue.send("output", (0, 1, bytes([number]) * 16384), 16384)
    queue.send("end", (0, 0))
    assert queue.is_full
    come = []
    while len(come) < 41:
        read = 0
        while is_readable(there, 0):
            come.append(there.receive())
            read += 16384
        assert 0 < read <= 10 * 16384
        queue.acknowledge(read)
    assert [message.body[2][0] for message in come[:40]] == list(range(40))
    assert come[40].word == "end"
    assert not queue.is_full


def test_a_file_goes_in_pieces_before_its_word(line):
    """So does an empty file."""
    here, there = line
    queue = SendQueue(here)
    for size in (0, 1, 65536, 300_000):
        file = memory_file("parcel")
        os.write(file, os.urandom(size))
        data = os.pread(file, size, 0)
        queue.send_file(2, file)
        queue.send("word", (2, "returned"))
        got = b""
        while (message := there.receive()).word == "piece":
            assert message.body[0] == 2
            got += message.body[1]
            queue.acknowledge(len(message.body[1]))
        assert (got, message.word) == (data, "word")


def test_a_queue_to_a_closed_line_drops_its_messages(line):
    """The queue is broken, its files are closed, and later messages are dropped."""
    here, there = line
    queue = SendQueue(here)
    there.close()
    file = memory_file("parcel")
    queue.send("hello", 0)
    queue.send_file(0, file)
    assert queue.is_broken
    assert not queue.is_full
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
