"""A folder with the outputs of a stream, so that a later run does not compute them again."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from parawrap.engine._fingerprint import FINGERPRINT_BYTES, fingerprint
from parawrap.errors import ResumeError

__all__ = ["OutputFolder"]

_LOG = logging.getLogger("parawrap.resume")
_FORMAT = 2
_CHECKSUM_BYTES = 32
_MANIFEST = "stream.json"
_LOCK = "lock"
_SUFFIX = ".output"
_OUTPUT = re.compile(r"\d{9,}\.output")
_UNFINISHED = ".unfinished"
_opened: set[Path] = set()
_opening = threading.RLock()  # a garbage collection in the block may close a stream that nobody refers to


class OutputFolder:
    """One file per batch: a checksum, a fingerprint of the batch, and the output as `torch.save` writes it.

    A file appears by an atomic rename, so a killed run leaves no partial output. A file with a wrong checksum, as after a
    power failure, counts as missing. One run at a time may use a folder.

    Args:
        path: The folder. It is created if it does not exist.
        target: The name of the function that computes the outputs. A folder holds outputs of one function.

    Raises:
        ResumeError: At the start of the block, if the folder is in use, holds something else, or cannot be made, read, or
            locked.
    """

    def __init__(self, path: Path, target: str) -> None:
        self._path = path.expanduser().resolve()
        self._target = target
        self._committed: set[int] = set()
        self._fingerprints: dict[int, bytes] = {}  # of the batches in flight
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._names()  # before the lock file: a folder that is refused does not change
            with _opening:
                if self._path in _opened:
                    self._refuse_in_use("another stream of this process")
                self._lock = self._locked()
                _opened.add(self._path)
            self._read()
        except BaseException as failure:
            self.__exit__(None, None, None)
            if isinstance(failure, OSError):  # a file has this name, or permissions are missing
                msg = f"resume={str(self._path)!r} cannot be used: {failure}. Give the path of a new or an empty folder"
                raise ResumeError(msg) from failure
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with _opening:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
                _opened.discard(self._path)

    def recall(self, number: int, batch: Any) -> Future[Any] | None:
        """Return a finished future with the committed output of this batch, or None if there is none.

        Raises:
            ResumeError: If the committed output belongs to another batch, or the batch cannot be compared.
        """
        of_batch = fingerprint(batch)
        if number in self._committed and (saved := self._saved(number)) is not None:
            committed_for, output = saved
            if committed_for != of_batch:
                msg = (
                    f"batch {number} is not the batch that {self._file(number)} was computed from. The source must give "
                    "the same batches in the same order in every run: seed its shuffling, or use another folder"
                )
                raise ResumeError(msg)
            future: Future[Any] = Future()
            future.set_result(output)
            return future
        self._fingerprints[number] = of_batch
        return None

    def commit(self, number: int, output: Any) -> None:
        """Save the output of a batch, unless it came from the folder.

        Raises:
            ResumeError: If the output cannot be saved.
        """
        of_batch = self._fingerprints.pop(number, None)
        if of_batch is None:
            return
        body = of_batch + _saved_bytes(output, number)
        self._write(self._file(number), hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest() + body)

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

    def _file(self, number: int) -> Path:
        return self._path / f"{number:09d}{_SUFFIX}"

    def _locked(self) -> int:
        """Lock the folder. The lock ends with the process, and forked children do not have it."""
        lock = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            import fcntl
        except ImportError:  # Windows
            return lock
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as lockf(3) says
            owner = os.read(lock, 100).decode(errors="replace")
            os.close(lock)
            self._refuse_in_use(owner or "another process")
        except OSError:  # a file system without locks
            os.close(lock)
            raise
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
        return lock

    def _refuse_in_use(self, owner: str) -> None:
        msg = f"resume={str(self._path)!r} is in use by {owner}. Give each stream, and each rank, its own folder"
        raise ResumeError(msg)

    def _read(self) -> None:
        """Check what the folder belongs to, and list the committed outputs."""
        manifest = self._path / _MANIFEST
        names = self._names()
        if manifest.name in names:
            try:
                found = json.loads(manifest.read_text())
            except ValueError as error:
                msg = f"{manifest} is damaged: {error}. Use another folder"
                raise ResumeError(msg) from error
            if not isinstance(found, dict):
                msg = f"{manifest} is damaged. Use another folder"
                raise ResumeError(msg)
            if found.get("format") != _FORMAT:
                msg = f"{manifest} was written by another release of parawrap. Use another folder"
                raise ResumeError(msg)
            if found != self._description():
                msg = (
                    f"resume={str(self._path)!r} holds the outputs of {found.get('target')}, not of {self._target}. "
                    "Use another folder"
                )
                raise ResumeError(msg)
        else:
            self._write(manifest, json.dumps(self._description()).encode())
        self._committed = {int(name.removesuffix(_SUFFIX)) for name in names if _OUTPUT.fullmatch(name)}
        for unfinished in self._path.glob(f"*{_UNFINISHED}"):
            unfinished.unlink()

    def _write(self, file: Path, content: bytes) -> None:
        """Write a file that appears complete or not at all."""
        unfinished = file.with_suffix(_UNFINISHED)
        try:
            unfinished.write_bytes(content)
            unfinished.replace(file)
        except OSError as error:
            msg = f"{file} cannot be written: {error}. Free some space, or use another folder, and run again"
            raise ResumeError(msg) from error

    def _names(self) -> set[str]:
        """Return the names of the files that are complete, without the lock.

        Raises:
            ResumeError: If there are files, and they are not those of a stream.
        """
        names = {entry.name for entry in os.scandir(self._path) if not entry.name.endswith(_UNFINISHED)} - {_LOCK}
        if names and _MANIFEST not in names:
            msg = f"resume={str(self._path)!r} holds other files, such as {min(names)}. Use an empty or a new folder"
            raise ResumeError(msg)
        return names

    def _description(self) -> dict[str, Any]:
        return {"format": _FORMAT, "target": self._target}

    def _saved(self, number: int) -> tuple[bytes, Any] | None:
        """Return the fingerprint of the batch and its output, or None if the file is damaged or deleted."""
        file = self._file(number)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            _LOG.warning("%s was deleted: its batch runs again", file)
            return None
        except OSError as error:
            msg = f"{file} cannot be read: {error}. Delete it, or use another folder"
            raise ResumeError(msg) from error
        checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest() != checksum:
            _LOG.warning("%s is damaged: its batch runs again", file)
            return None
        try:
            output = torch.load(io.BytesIO(body[FINGERPRINT_BYTES:]), weights_only=False)
        except Exception as error:
            msg = (
                f"{file} cannot be loaded: {error}. Its classes and devices must exist, as in the run that saved it. Or "
                "delete the file: its batch runs again"
            )
            raise ResumeError(msg) from error
        return body[:FINGERPRINT_BYTES], output


class _OutputPickler(pickle.Pickler):
    """Saves a tensor that is a part of a larger storage alone. Refuses tensors that require gradients."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad:
            msg = "it has a gradient, which a folder cannot keep. Run the stream in torch.no_grad()"
            raise ResumeError(msg)
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not vars(value)
        if is_plain and value.untyped_storage().nbytes() > value.nbytes:
            return value.clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


class _Pickles:
    """The pickle module of `torch.save`."""

    Pickler = _OutputPickler


def _saved_bytes(output: Any, number: int) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(output, buffer, pickle_module=_Pickles)
    except Exception as error:
        remedy = "" if isinstance(error, ResumeError) else ". Return tensors, numbers, or strings"
        msg = f"the output of batch {number} cannot be saved: {error}{remedy}"
        raise ResumeError(msg) from error
    return buffer.getvalue()
