"""A folder with the outputs of a stream, so that a later run does not compute them again."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from parawrap.engine.digest import DIGEST_BYTES, digest_value
from parawrap.errors import ResumeError

_LOG = logging.getLogger("parawrap.resume")
_FORMAT = 3  # of the files; a folder of another format is refused
_CHECKSUM_BYTES = 32  # of SHA-256
_MANIFEST = "stream.json"
_LOCK = "lock"
_SUFFIX = ".output"
_OUTPUT = re.compile(r"\d{9,}\.output")
_UNFINISHED = "unfinished"


class OutputFolder:
    """One file per batch: a checksum, the digest of the batch, and the output as `torch.save` writes it.

    A file appears by an atomic rename, so a killed run leaves no partial output. A file with a wrong checksum, as after a
    power failure, counts as missing. One run at a time may use a folder.

    Args:
        path: The folder. It is created if it does not exist.
        target: The name of the function that computes the outputs. A folder holds outputs of one function.
        key: A function of a batch that returns what the digest is computed from. By default, the batch itself.

    Raises:
        ResumeError: At the start of the block, if the folder is in use, holds something else, or cannot be made, read, or
            locked.
    """

    def __init__(self, path: Path, target: str, key: Callable[[Any], Any] | None = None) -> None:
        self._path = path.expanduser().resolve()
        self._unfinished = self._path / _UNFINISHED
        self._manifest = {"format": _FORMAT, "target": target}
        self._key = key
        self._committed: set[int] = set()
        self._digests: dict[int, bytes] = {}  # of the batches in flight

    def __enter__(self) -> Self:
        try:
            with _explain(f"{self} cannot be used", "Give the path of a new or an empty folder", OSError):
                self._path.mkdir(parents=True, exist_ok=True)
                self._names()  # before the lock file: a folder that is refused does not change
                self._lock()
                self._read()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        lock = _locks.pop(self, None)
        if lock is not None:
            os.close(lock)

    def recall(self, number: int, batch: Any) -> Future[Any] | None:
        """Return a finished future with the committed output of this batch, or None if there is none.

        Raises:
            ResumeError: If the committed output belongs to another batch or cannot be loaded, or if the batch cannot be
                pickled.
        """
        subject, known_by = ("batch", batch) if self._key is None else ("the key of batch", self._key(batch))
        cure = "Give map(key=...) a function of a batch that returns a string or a number"
        with _explain(f"{subject} {number} cannot be pickled", cure):
            digest = digest_value(known_by)
        recalled = self._load(number, digest) if number in self._committed else None
        if recalled is None:
            self._digests[number] = digest
        return recalled

    def commit(self, number: int, output: Any) -> None:
        """Save the output of a batch, unless it came from the folder.

        Raises:
            ResumeError: If the output cannot be saved.
        """
        digest = self._digests.pop(number, None)
        if digest is None:
            return
        content = io.BytesIO(digest)
        content.seek(DIGEST_BYTES)
        cure = "Run the stream in torch.no_grad(), and return tensors, numbers, or strings"
        with _explain(f"the output of batch {number} cannot be saved", cure):
            torch.save(output, content, pickle_module=_Pickles)
        self._write(self._file(number), _checksum(content.getvalue()) + content.getvalue())

    def check_end(self, batches: int) -> None:
        """Check that the folder holds no output of a batch after the end of the source.

        Raises:
            ResumeError: If an earlier run had more batches.
        """
        last = max(self._committed, default=-1)
        if last >= batches:
            msg = (
                f"the source ended after {batches} batches, but {self._path} holds the output of batch {last}. The source "
                "must give the same batches in every run; use another folder for another source"
            )
            raise ResumeError(msg)

    def __str__(self) -> str:
        return f"resume={str(self._path)!r}"

    def _file(self, number: int) -> Path:
        return self._path / f"{number:09d}{_SUFFIX}"

    def _lock(self) -> None:
        """Lock the folder. The lock ends with the process, and forked children do not hold it.

        Unlike a lock of `fcntl.lockf`, it stays if the process opens and closes the file again, for example to copy it.
        """
        lock = _locks[self] = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        me = f"process {os.getpid()} on {os.uname().nodename}"
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # EWOULDBLOCK, and EACCES on network file systems
            owner = os.read(lock, 100).decode(errors="replace")
            owner = "another stream of this process" if owner == me else owner or "another process"
            msg = f"{self} is in use by {owner}. Give each stream, and each rank, its own folder"
            raise ResumeError(msg) from error
        os.ftruncate(lock, 0)
        os.write(lock, me.encode())

    def _read(self) -> None:
        """Check what the folder belongs to, and list the committed outputs."""
        file, names = self._path / _MANIFEST, self._names()
        if _MANIFEST not in names:
            self._write(file, json.dumps(self._manifest).encode())
        with _explain(f"{file} is damaged", "Use another folder", (ValueError, TypeError, KeyError)):
            manifest = json.loads(file.read_text())
            form, target = manifest["format"], manifest["target"]
        if form != _FORMAT:
            msg = f"{file} was written by another release of parawrap. Use another folder"
            raise ResumeError(msg)
        if target != self._manifest["target"]:
            msg = f"{self} holds the outputs of {target}, not of {self._manifest['target']}. Use another folder"
            raise ResumeError(msg)
        self._committed = {int(name.removesuffix(_SUFFIX)) for name in names if _OUTPUT.fullmatch(name)}
        self._unfinished.unlink(missing_ok=True)

    def _names(self) -> set[str]:
        """Return the names of the files that are complete.

        Raises:
            ResumeError: If there are files, and they are not those of a stream.
        """
        names = {entry.name for entry in os.scandir(self._path)} - {_LOCK, _UNFINISHED}
        if names and _MANIFEST not in names:
            msg = f"{self} holds other files, such as {min(names)}. Use an empty or a new folder"
            raise ResumeError(msg)
        return names

    def _write(self, file: Path, content: bytes) -> None:
        """Write a file that appears complete or not at all."""
        with _explain(f"{file} cannot be written", "Free some space, or use another folder, and run again", OSError):
            self._unfinished.write_bytes(content)
            self._unfinished.replace(file)

    def _load(self, number: int, digest: bytes) -> Future[Any] | None:
        """Return a finished future with a saved output, or None if its file is damaged or deleted."""
        file = self._file(number)
        with _explain(f"{file} cannot be read", "Delete it, or use another folder", OSError):
            try:
                content = file.read_bytes()
            except FileNotFoundError:
                _LOG.warning("%s was deleted: its batch runs again", file)
                return None
        checksum, saved = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if _checksum(saved) != checksum:
            _LOG.warning("%s is damaged: its batch runs again", file)
            return None
        if not saved.startswith(digest):
            msg = (
                f"batch {number} is not the batch that {file} was computed from. The source must give the same batches in "
                "the same order in every run: seed its shuffling, or use another folder. If equal batches have different "
                "pickles, use map(key=...)"
            )
            raise ResumeError(msg)
        cure = "Its classes and devices must exist, as in the run that saved it. Or delete the file: its batch runs again"
        future: Future[Any] = Future()
        with _explain(f"{file} cannot be loaded", cure):
            future.set_result(torch.load(io.BytesIO(saved[DIGEST_BYTES:]), weights_only=False))
        return future


_locks: dict[OutputFolder, int] = {}  # the locked files


def _close_inherited_locks() -> None:
    """Close the files in a forked child, which would hold the locks after the parent is killed."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_close_inherited_locks)


@contextmanager
def _explain(problem: str, cure: str, kind: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
    """Raise an error of this kind as `ResumeError`."""
    try:
        yield
    except kind as error:
        msg = f"{problem}: {error}. {cure}"
        raise ResumeError(msg) from error


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


class _OutputPickler(pickle.Pickler):
    """Saves a tensor that is a part of a larger storage alone. Refuses tensors that require gradients."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad:
            msg = "it has a gradient, which a folder cannot keep"
            raise ValueError(msg)
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not vars(value)
        if is_plain and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


class _Pickles:
    """The pickle module of `torch.save`."""

    Pickler = _OutputPickler
