"""A folder with the outputs of a stream, so that a later run does not compute them again."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from parawrap.errors import ResumeError
from parawrap.tree import flatten, replace_nodes

_SUFFIX = ".output"
_PROTOCOL = 4  # of pickles that are compared: fixed, because another protocol gives other digests
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class OutputFolder:
    """One file per batch, as `torch.save` writes it: the name of the target, the digest of the batch, and the output.

    A file appears by an atomic rename, so a killed run leaves no partial output.

    Args:
        path: The folder. It is created if it does not exist.
        target: The name of the function that computes the outputs. A folder holds outputs of one function.
        key: A function of a batch that returns what the digest is computed from. By default, the batch itself.

    Raises:
        ResumeError: If the folder cannot be made.
    """

    def __init__(self, path: Path, target: str, key: Callable[[Any], Any] | None = None) -> None:
        self._path = path.expanduser().resolve()
        self._target = target
        self._key = key
        self._digests: dict[int, bytes] = {}  # of the batches in flight
        with _explain(f"resume={str(self._path)!r} cannot be used", "Give the path of a folder", OSError):
            self._path.mkdir(parents=True, exist_ok=True)

    def recall(self, number: int, batch: Any) -> tuple[Any] | None:
        """Return a tuple of the saved output of this batch; None if it is not saved.

        Raises:
            ResumeError: If the saved output belongs to another batch or target, or cannot be loaded; if the batch cannot be
                pickled.
        """
        subject, known_by = ("batch", batch) if self._key is None else ("the key of batch", self._key(batch))
        cure = "Give map(key=...) a function of a batch that returns a string or a number"
        with _explain(f"{subject} {number} cannot be pickled", cure):
            digest = digest_value(known_by)
        file = self._file(number)
        if not file.exists():
            self._digests[number] = digest
            return None
        cure = "Its classes and devices must exist, as in the run that saved it. Or delete the file: its batch runs again"
        with _explain(f"{file} cannot be loaded", cure):
            saved = torch.load(file, weights_only=False)
            target, output = saved["target"], saved["output"]
        if target != self._target:
            msg = f"{file} is an output of {target}, not of {self._target}. Use another folder"
            raise ResumeError(msg)
        if saved["digest"] != digest:
            msg = (
                f"batch {number} is not the batch that {file} was computed from. The source must give the same batches in "
                "the same order in every run: seed its shuffling, or use another folder for each source and each rank. If "
                "equal batches have different pickles, use map(key=...)"
            )
            raise ResumeError(msg)
        return (output,)

    def commit(self, number: int, output: Any) -> None:
        """Save the output of a batch, unless it came from the folder.

        Raises:
            ResumeError: If the output cannot be saved.
        """
        digest = self._digests.pop(number, None)
        if digest is None:
            return
        file, unfinished = self._file(number), self._path / f"{uuid.uuid4().hex}.unfinished"
        cure = "Run the stream in torch.no_grad(), return tensors, numbers, or strings, and leave space on the disk"
        try:
            with _explain(f"the output of batch {number} cannot be saved in {file}", cure):
                kept = replace_nodes(output, _is_tensor, _without_neighbors)
                torch.save({"target": self._target, "digest": digest, "output": kept}, unfinished)
                unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def check_end(self, batches: int) -> None:
        """Check that the folder holds no output of a batch after the end of the source.

        Raises:
            ResumeError: If an earlier run had more batches.
        """
        last = max((int(file.stem) for file in self._path.glob(f"*{_SUFFIX}") if file.stem.isdigit()), default=-1)
        if last >= batches:
            msg = (
                f"the source ended after {batches} batches, but {self._path} holds the output of batch {last}. The source "
                "must give the same batches in every run; use another folder for another source"
            )
            raise ResumeError(msg)

    def _file(self, number: int) -> Path:
        return self._path / f"{number:09d}{_SUFFIX}"


def digest_value(value: Any) -> bytes:
    """Return the digest of a value: equal in every process for equal nested values of tensors, numbers, and texts.

    Values whose pickles differ, such as sets of strings and sparse tensors, have another digest in another process.

    Raises:
        Exception: If the value cannot be pickled, or contains itself.
    """
    leaves, spec = flatten(value)
    content = hashlib.blake2b(repr((type(value), spec)).encode())  # the types of containers, and their keys and lengths
    for leaf in leaves:
        if type(leaf) in _PLAIN_TENSORS and leaf.layout is torch.strided and not (leaf.is_quantized or leaf.is_nested):
            content.update(repr((leaf.dtype, tuple(leaf.shape), sorted(leaf.__dict__.items()))).encode())
            content.update(_memory_of(leaf))
        else:
            content.update(pickle.dumps(leaf, _PROTOCOL))
    return content.digest()


def _memory_of(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor as bytes, whatever memory is around them."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes((ctypes.c_char * data.nbytes).from_address(data.data_ptr())) if data.nbytes else b""


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.Tensor)


def _without_neighbors(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is saved alone. A part of a larger storage would be saved with all of it."""
    if tensor.requires_grad:
        msg = "it has a gradient, which a folder cannot keep"
        raise ValueError(msg)
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not vars(tensor)
    return tensor.clone() if is_plain and tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@contextmanager
def _explain(problem: str, cure: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Raise an error of this kind as `ResumeError`."""
    try:
        yield
    except kind as error:
        msg = f"{problem}: {error}. {cure}"
        raise ResumeError(msg) from error
