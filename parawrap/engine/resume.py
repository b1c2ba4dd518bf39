"""A folder with the outputs of a stream, so that a later run does not compute them again."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from parawrap.engine.fingerprint import FindFingerprint, Fingerprint
from parawrap.errors import ResumeError
from parawrap.tree import TENSORS, flatten, is_dense, replace_nodes

try:
    import fcntl
except ImportError:  # of Windows
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".output"
_UNFINISHED = ".unfinished"
# Names of unfinished files, as `commit` makes them. Other files belong to the user
_OWN_UNFINISHED = re.compile(rf"[0-9a-f]{{32}}{re.escape(_UNFINISHED)}")
_PROTOCOL = 4  # of pickles in digests: always this one, because another gives other digests
_OTHER_MODEL = (
    "Use another folder for this model, or map(..., check_model=False) to take the saved outputs "
    "of any model"
)


class Saved(NamedTuple):
    """An output from the folder. It is wrapped because it may be None."""

    output: Any


class OutputFolder:
    """A folder with one file per batch, as `torch.save` writes it. For one thread.

    A file holds the name and the fingerprint of the target, the digest of the batch, and the
    output. It appears by an atomic rename, so a killed run leaves no partial output.

    Args:
        path: The folder. It is created for this user alone if it does not exist.
        target: The name of the function that computes the outputs. A folder holds outputs of one
            function.
        key: A function of a batch that returns what the digest is computed from. By default, the
            batch itself.
        find_fingerprint: Returns the fingerprint of the target. It is called once, when the first
            batch is recalled. None: outputs of other weights are taken too.

    Raises:
        ResumeError: If the folder cannot be made, or belongs to another user.
    """

    def __init__(
        self,
        path: Path,
        target: str,
        key: Callable[[Any], Any] | None = None,
        find_fingerprint: FindFingerprint | None = None,
    ) -> None:
        if path == Path():  # an empty text, such as an unset variable, gives this path too
            msg = (
                "resume is '' or '.', the working directory. Give the path of a folder for outputs "
                "alone, such as resume='outputs'"
            )
            raise ResumeError(msg)
        self._path = path.expanduser().resolve()
        self._target = target
        self._key = key
        self._find_fingerprint = find_fingerprint
        self._fingerprint: Fingerprint | None = None
        # By number, for the batches in flight with outputs that `commit` will save
        self._digests: dict[int, bytes] = {}
        problem = f"resume={str(self._path)!r} cannot be used"
        with _explain(problem, "Give the path of a folder", OSError):
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_other_owner(self._path, self._path.stat())
            self._remove_unfinished()

    def recall(self, number: int, batch: Any) -> Saved | None:
        """Return the saved output of this batch; None if it is not saved.

        Raises:
            ResumeError: If the saved output belongs to another batch, target, or user, or was
                computed with other weights; if it cannot be loaded; if the batch cannot be pickled.
        """
        self._read_fingerprint()
        digest = self._digest(number, batch)
        file = self._file(number)
        if not file.exists():
            self._digests[number] = digest
            return None
        cure = (
            "Its classes and devices must exist, as in the run that saved it. Or delete the file: "
            "its batch runs again"
        )
        with _explain(f"{file} cannot be loaded", cure), file.open("rb") as content:
            # Loading runs code. By `fstat`: the path may lead to another file by now
            _refuse_other_owner(file, os.fstat(content.fileno()))
            saved = torch.load(content, weights_only=False)
            target, output, saved_digest = saved["target"], saved["output"], saved["digest"]
        if target != self._target:
            msg = f"{file} is an output of {target}, not of {self._target}. Use another folder"
            raise ResumeError(msg)
        if self._fingerprint is not None:
            self._check_fingerprint(file, self._fingerprint, saved.get("model"))
        if saved_digest != digest:
            msg = (
                f"batch {number} is not the batch that {file} was computed from. The source must "
                "give the same batches in the same order in every run: seed its shuffling, or use "
                "another folder for each source and each rank. If equal batches have different "
                "pickles, use map(key=...)"
            )
            raise ResumeError(msg)
        return Saved(output)

    def commit(self, number: int, output: Any) -> None:
        """Save the output of a batch, unless `recall` returned it.

        Raises:
            ResumeError: If the output cannot be saved.
        """
        digest = self._digests.pop(number, None)
        if digest is None:
            return
        file = self._file(number)
        # A unique name: two ranks that use one folder never write the same file
        unfinished = self._path / f"{uuid.uuid4().hex}{_UNFINISHED}"
        problem = f"the output of batch {number} cannot be saved in {file}"
        cure = (
            "Run the stream in torch.no_grad(), return tensors, numbers, or strings, and leave "
            "space on the disk"
        )
        try:
            with _explain(problem, cure):
                saved = {
                    "target": self._target,
                    "model": self._fingerprint,
                    "digest": digest,
                    "output": replace_nodes(output, _is_tensor, _without_neighbors),
                }
                with unfinished.open("xb") as content:
                    # First: a run that begins now removes unfinished files without a lock
                    _lock(content)
                    torch.save(saved, content)
                # Within one folder, this is atomic: readers find no file, or a whole one
                unfinished.replace(file)
        finally:  # also after Ctrl-C; after the rename there is nothing to remove
            unfinished.unlink(missing_ok=True)

    def check_end(self, batches: int) -> None:
        """Check that the folder holds no output of a batch after the end of the source.

        Raises:
            ResumeError: If an earlier run had more batches.
        """
        last = -1
        for file in self._path.glob(f"*{_SUFFIX}"):
            if file.stem.isdecimal():  # a file with another name belongs to the user
                last = max(last, int(file.stem))
        if last >= batches:
            msg = (
                f"the source ended after {batches} batches, but {self._path} holds the output of "
                f"batch {last}. The source must give the same batches in every run; use another "
                "folder for another source"
            )
            raise ResumeError(msg)

    def _read_fingerprint(self) -> None:
        """Compute the fingerprint at the first call: the stream reads the model then too."""
        if self._find_fingerprint is None:
            return
        cure = "map(..., check_model=False) takes the saved outputs of any model"
        with _explain("the weights of the model cannot be compared", cure):
            self._fingerprint = self._find_fingerprint()
        self._find_fingerprint = None

    def _check_fingerprint(self, file: Path, own: Fingerprint, saved: Fingerprint | None) -> None:
        """Refuse an output of other weights than the target's own, or of unknown weights."""
        if saved is None:
            msg = f"{file} does not say which weights computed it. {_OTHER_MODEL}"
            raise ResumeError(msg)
        different = [name for name, value in own.items() if saved.get(name) != value]
        if different:
            names = " and ".join(different)
            msg = f"{file} was computed with other {names} of {self._target}. {_OTHER_MODEL}"
            raise ResumeError(msg)

    def _digest(self, number: int, batch: Any) -> bytes:
        """Return the digest of a batch, or of its key."""
        subject, value = f"batch {number}", batch
        if self._key is not None:
            subject, value = f"the key of batch {number}", self._key(batch)
        cure = "Give map(key=...) a function of a batch that returns a string or a number"
        with _explain(f"{subject} cannot be pickled", cure):
            return digest_value(value)

    def _remove_unfinished(self) -> None:
        """Remove the unfinished files of runs that were killed."""
        for file in self._path.iterdir():
            if _OWN_UNFINISHED.fullmatch(file.name) and not _is_locked(file):
                file.unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self._path / f"{number:09d}{_SUFFIX}"


# Files


def _refuse_other_owner(path: Path, found: os.stat_result) -> None:
    """Refuse a folder or a file of another user, who may have written code into it.

    `found` is its status. On Windows, files have no such owner, and nothing is refused.
    """
    if not hasattr(os, "getuid") or found.st_uid == os.getuid():
        return
    msg = (
        f"{path} belongs to the user with the number {found.st_uid}, and this process runs as "
        f"{os.getuid()}. Outputs are loaded with pickle, which can run code: use a folder of your "
        "own"
    )
    raise ResumeError(msg)


def _lock(content: IO[bytes]) -> None:
    """Lock a file until it is closed, or until the process ends, in whatever way."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks: `_is_locked` finds the same error
            fcntl.flock(content, fcntl.LOCK_EX)


def _is_locked(file: Path) -> bool:
    """True if a process on any machine writes the file, or if locks do not show it."""
    if fcntl is None:
        return True
    try:
        with file.open("rb+") as content:
            fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


# Values


def digest_value(value: Any) -> bytes:
    """Return the digest of a value.

    Equal nested values of tensors, numbers, and texts have the same digest in every process. Other
    leaves are pickled: the pickle of a set of strings, or of a sparse tensor, and so its digest,
    may differ in each process.

    Raises:
        Exception: If the value cannot be pickled, or contains itself.
    """
    leaves, spec = flatten(value)
    # The spec shows the types of containers, their keys, and their lengths
    content = hashlib.blake2b(repr((type(value), spec)).encode())
    for leaf in leaves:
        if _has_plain_memory(leaf):
            attributes = sorted(leaf.__dict__.items())
            content.update(repr((leaf.dtype, tuple(leaf.shape), attributes)).encode())
            content.update(_memory_of(leaf))
        else:
            content.update(pickle.dumps(leaf, _PROTOCOL))
    return content.digest()


def _has_plain_memory(leaf: Any) -> bool:
    """True for a tensor with values that the bytes of its memory show."""
    return type(leaf) in TENSORS and is_dense(leaf) and not leaf.is_quantized


def _memory_of(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor as bytes, without the rest of its storage."""
    # A conjugate or a negative may be a flag of the tensor, which its memory does not show
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not values.nbytes:
        return b""
    # Not by numpy: it need not be installed, and has no bfloat16. `values` keeps the memory alive
    memory = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    return bytes(memory)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.Tensor)


def _without_neighbors(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that `torch.save` writes without other values.

    It writes the whole storage of a tensor, which may be only a part of it.

    Raises:
        ValueError: If the tensor requires a gradient.
    """
    if tensor.requires_grad:
        msg = "it has a gradient, which a folder cannot keep"
        raise ValueError(msg)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
    has_attributes = bool(vars(tensor))  # a clone would lose them
    return tensor.clone() if is_part and not has_attributes else tensor


@contextmanager
def _explain(problem: str, cure: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn an error of this kind into a `ResumeError` with the problem and a cure."""
    try:
        yield
    except ResumeError:
        raise
    except kind as error:
        msg = f"{problem}: {error}. {cure}"
        raise ResumeError(msg) from error
