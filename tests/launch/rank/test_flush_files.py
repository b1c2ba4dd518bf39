"""Files that a rank's function leaves open are complete."""

from __future__ import annotations

import gc
import gzip
import os
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parawrap import LaunchError, current_rank, wrapper
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S, eventually


def leave_files_open(folder):
    """Leave files of many kinds open, in globals and in a cycle."""
    globals()["_pool"] = pool = ThreadPoolExecutor(1)
    pool.submit(int).result()  # its idle thread does not block the end
    gc.collect()  # so that none follows before the function returns: Python itself would lose the buffer of the cycle
    globals()["_kept"] = text, update, compressed, archive = [
        (folder / "text").open("w"),
        (folder / "update").open("w+b"),
        gzip.GzipFile(fileobj=(folder / "gzip").open("wb"), mode="wb"),
        zipfile.ZipFile(folder / "zip", "w"),
    ]
    text.write("text")
    update.write(b"update")
    compressed.write(b"gzip")
    archive.writestr("member", "zip")
    cycle = [(folder / "cycle").open("w")]
    cycle.append(cycle)
    cycle[0].write("cycle")


@pytest.mark.parametrize(
    ("method", "error"),
    [("forkserver", None), ("fork", KeyError), ("forkserver", LaunchError), ("forkserver", IndexError)],
    ids=["returns", "raises", "exits", "other rank raises"],
)
def test_open_files_are_complete(method, error, tmp_path):
    """However a rank ends, also by the failure of another one, buffers are written, and compressed files are complete."""
    files, left_open = tmp_path / "files", tmp_path / "left open"
    files.mkdir()

    def works():
        if current_rank().global_rank == 1:
            eventually(left_open.exists, "the files of rank 0")
            return [].pop() if error is IndexError else None
        leave_files_open(files)
        left_open.touch()
        if error is KeyError:
            raise KeyError
        return sys.exit(3) if error is LaunchError else time.sleep(600) if error is IndexError else None

    launch = wrapper(ranks(spawn_method=method, grace_s=PATIENCE_S))(works).submit()
    if error is None:
        launch.results()
    else:
        with pytest.raises(error):
            launch.results()
    for name in "text", "update", "cycle":
        assert (files / name).read_text() == name
    assert gzip.decompress((files / "gzip").read_bytes()) == b"gzip"
    with zipfile.ZipFile(files / "zip") as archive:
        assert archive.read("member") == b"zip"


def test_parents_buffer_is_not_written(tmp_path):
    """Output that this process had not yet written when it forked a rank is written once, by this process."""
    with (tmp_path / "log").open("w") as log:
        log.write("line\n")
        assert wrapper(ranks(spawn_method="fork"))(lambda: gc.collect() >= 0)() == (True, True)
    assert (tmp_path / "log").read_text() == "line\n"


def test_incomplete_files_are_named(tmp_path):
    """A full disk and a blocked pipe do not keep the rank from ending or writing other files."""

    def works():
        from parawrap.launch.rank import _flush_files

        _flush_files.WAIT_S = 0.5
        reader, writer = os.pipe()
        globals()["_kept"] = blocked, full, disk = [
            os.fdopen(writer, "wb", buffering=1 << 20),
            Path("/dev/full").open("w"),  # noqa: SIM115
            (tmp_path / "disk").open("w"),
        ]
        blocked.write(bytes(1 << 19))
        full.write("x")
        disk.write("on disk")
        return reader, writer

    launch = wrapper(ranks(1))(works).submit()
    _, writer = launch.results(timeout=PATIENCE_S)[0]
    assert (tmp_path / "disk").read_text() == "on disk"
    for name, why in (writer, "its buffer was not written"), ("/dev/full", "OSError: [Errno 28]"):
        assert f"the file {name!r}, which the function left open, is incomplete: {why}" in launch.logs(0)
