"""The launch folder on a cluster, its journal, and the send queue: all data arrives once and in order."""

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
from parawrap.launch.clusters._connections import Address
from parawrap.launch.clusters._send_queue import SendQueue
from parawrap.launch.messages._channel import Channel, is_readable
from parawrap.launch.messages._first_rank_failure import Parcel
from parawrap.launch.messages._pickle_values import memory_file, packed
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.slurm import _batch_job, _report_journal
from parawrap.launch.slurm._launch_folder import Folder, Plan
from parawrap.launch.slurm._report_journal import Journal, JournalReader, JournalRecord, LogsIntoJournal
from tests.launch.processes import eventually


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "launches"))
    (folder,) = Folder.new("my job", 1)
    return folder


def test_each_launch_has_a_private_folder(folder):
    """Other users cannot enter a launch folder, equal names give different folders, and `remove` removes the folder."""
    (other,) = Folder.new("my job", 1)
    assert other.path != folder.path
    assert folder.path.parent.name.startswith("my-job-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.parent.stat().st_mode & 0o777 == 0o700
    folder.request("cancel")
    folder.remove()
    assert list(folder.root.iterdir()) == [other.path.parent]
    assert other.path.exists()


def test_the_last_launch_of_an_array_removes_the_shared_logs(folder):
    """Each launch of an array has its own folder; the task logs stay until the last launch is removed."""
    first, second = Folder.new("array", 2)
    assert first.submitit == second.submitit
    first.submitit.mkdir()
    for number in ("7_1", "7_11"):
        (first.submitit / f"{number}_0_log.err").write_text(f"output of {number}")
    first.remove()
    assert _batch_job.log_ends(second, "7_1", 100) == "7_1_0_log.err:\noutput of 7_1"
    second.remove()
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_an_unwritable_folder_raises(tmp_path, monkeypatch):
    """LaunchError names the folder and the variable that selects another folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match=r"file cannot be written to: .*PARAWRAP_LAUNCH_DIR"):
        Folder.new("job", 1)


def test_a_failed_array_leaves_no_folders(folder, monkeypatch):
    """If the disk is full before all folders of an array exist, all of them are removed."""
    mkdir = Path.mkdir

    def full(self, **options):
        if self.name == "3":
            raise OSError(28, "No space left on device")
        mkdir(self, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(LaunchError, match=r"No space left on device; free some space there, or set PARAWRAP_LAUNCH_DIR"):
        Folder.new("array", 5)
    assert list(folder.root.iterdir()) == [folder.path.parent]


def test_folder_contents_are_read_as_written(folder):
    """The plan, requests, signs of life, addresses, troubles, and counts have the last written values."""
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


def unpickling_functions(folder):
    """Return every function that unpickles from a launch folder."""
    Journal(folder.journal(0)).close()
    folder.write_plan(Plan("f", Platform(device="cpu"), Surroundings.here().without_environ(), b"t", 1.0))
    parcel = Parcel(packed(1, "result", "it")).put(folder.parcel(0, 0))
    return [folder.read_plan, JournalReader(folder.journal(0)).new_entries, parcel.open]


def test_nothing_is_unpickled_from_a_folder_that_others_can_write(folder):
    """If other users can write to the folder, reading raises LaunchError, because they could have written a pickle."""
    for mode in (0o770, 0o702):
        for read in unpickling_functions(folder):
            folder.path.chmod(mode)
            with pytest.raises(LaunchError, match=rf"other users may write to .*my-job-.*/0 \(mode {mode:o}\)"):
                read()
            folder.path.chmod(0o700)


@pytest.mark.parametrize("replaced_by", ["another user's folder", "a link"])
def test_nothing_is_unpickled_from_a_replaced_folder(replaced_by, folder, monkeypatch, tmp_path):
    """Reading raises if another user's folder or a link has replaced the launch folder."""
    for read in unpickling_functions(folder):
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


def test_submitit_does_not_run_in_a_folder_that_others_can_write(folder):
    """The job exits before submitit unpickles files from such a folder."""
    command = [*shlex.split(_batch_job._python()), "-c", "print('ran')", str(folder.submitit)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "ran\n"
    folder.submitit.parent.chmod(0o777)
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == f"other users may write to {folder.submitit.parent}\n"


def test_a_journal_can_be_read_while_it_is_written(tmp_path):
    """Each entry is read once and in order; after `close`, all entries can be read."""
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


def test_an_incomplete_entry_is_not_read(tmp_path):
    """A reader returns an entry only once the entry is complete."""
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


def test_a_full_disk_makes_the_journal_raise(tmp_path, monkeypatch):
    """After a failed write, the next `add` raises LaunchError, and `close` returns."""

    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_report_journal.os, "fsync", full)
    journal = Journal(tmp_path / "journal")
    journal.add("first")

    def error_of_add():
        try:
            journal.add("more")
        except LaunchError as error:
            return str(error)
        return None

    assert "cannot be written: [Errno 28]" in eventually(error_of_add, "the error")
    journal.close()


def test_a_journal_in_a_missing_folder_raises(tmp_path):
    """The constructor raises FileNotFoundError."""
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "nowhere" / "journal")


def test_several_threads_can_write_the_same_request(folder):
    """Four threads that write the same request at once get no errors."""
    threads = [threading.Thread(target=lambda: [folder.request("cancel") for _ in range(100)]) for _ in range(4)]
    errors = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert not errors
    assert folder.requests() == ["cancel"]


def test_output_and_log_records_go_into_the_journal(tmp_path):
    """Entries have the rank, stream, and log level; `last_words` returns the end of the output."""
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


def test_an_opened_parcel_outlives_its_file(tmp_path):
    """A value that was read from a parcel stays valid after the file is removed."""
    parcel = Parcel(packed(torch.ones(1 << 20), "result", "it")).put(tmp_path / "parcel")
    assert parcel.put(tmp_path / "elsewhere") is parcel
    value = parcel.open()
    (tmp_path / "parcel").unlink()
    assert torch.equal(value, torch.ones(1 << 20))


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as here, closing(Channel(theirs)) as there:
        yield here, there


def test_the_send_queue_limits_unread_bytes(line):
    """A message with a size waits for room, later messages wait behind it, and all messages arrive."""
    here, there = line
    queue = SendQueue(here)
    for number in range(40):
        queue.send("output", (0, 1, bytes([number]) * 16384), 16384)
    queue.send("end", (0, 0))
    assert queue.is_full
    received = []
    while len(received) < 41:
        read = 0
        while is_readable(there, 0):
            received.append(there.receive())
            read += 16384
        assert 0 < read <= 10 * 16384
        queue.acknowledge(read)
    assert [message.body[2][0] for message in received[:40]] == list(range(40))
    assert received[40].word == "end"
    assert not queue.is_full


def test_a_file_is_sent_in_pieces_before_the_next_message(line):
    """Files of any size, including 0, arrive complete before the message that follows them."""
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


def test_a_queue_on_a_closed_connection_drops_messages(line):
    """The queue is broken, closes its files, and drops later messages."""
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
