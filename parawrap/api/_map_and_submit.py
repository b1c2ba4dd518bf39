"""`map` and `submit`: whole calls of one method, each in one lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from parawrap.engine.call import Entry
from parawrap.engine.fingerprint import fingerprint_of
from parawrap.engine.resume import OutputFolder
from parawrap.engine.session import Session
from parawrap.engine.streams import StreamSize, stream
from parawrap.errors import ShardError

if TYPE_CHECKING:
    from parawrap.workers import WorkerSession


class OpenMethod(NamedTuple):
    """A method of a block that is open.

    Attributes:
        session: The session of the block.
        entry: What a lane calls.
        name: The name of the method, with those of its class and module.
    """

    session: Session | WorkerSession
    entry: Entry
    name: str


class MapAndSubmit:
    """`map` and `submit` of a block with one method, or of ``p.method(name)``."""

    _open_method: Callable[[], OpenMethod]
    """Returns the method that is mapped, and the session of the block, which opens on first use."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit one whole call to a lane, and return a future of its output.

        The batch is not cut. On the CPU the first free lane runs the call; elsewhere, the lane with
        the least pending work. ``future.result()`` raises the exception of the call.
        ``future.cancel()`` cancels a call that has not started. If an exception leaves the block,
        all calls that have not started are cancelled.

        The future belongs to the model as it was at the call. After a later change of the model, a
        call that has not started may raise ReplicaError: read the results first.

        Raises:
            SessionError: If the block is closed.
            ShardError: If `methods` names several methods. Use ``p.method(name).submit(...)``.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> with torch.no_grad(), parallel(torch.nn.Linear(3, 1), ["cpu", "cpu"]) as p:
            ...     futures = [p.submit(torch.zeros(rows, 3)) for rows in (4, 2)]
            ...     [len(future.result()) for future in futures]
            [4, 2]
        """
        method = self._open_method()
        return method.session.submit(method.entry, args, kwargs)

    def map(
        self,
        batches: Iterable[Any],
        *,
        prepare: Callable[[Any], Any] | None = None,
        with_inputs: bool = False,
        return_exceptions: bool = False,
        ordered: bool = True,
        buffersize: int | None = None,
        chunksize: int | Literal["auto"] = "auto",
        resume: str | Path | None = None,
        key: Callable[[Any], Any] | None = None,
        check_model: bool = True,
        progress: bool = False,
        total: int | None = None,
        desc: str | None = None,
    ) -> Iterator[Any]:
        """Stream whole batches through the lanes and yield their outputs.

        Each batch runs whole in one lane, without cutting or joining. A tuple batch is
        ``model(*batch)``, a dict batch ``model(**batch)``, any other batch ``model(batch)``. If a
        batch raises, the generator raises in place of its output, with a note on the number of the
        batch. Closing the generator drops the batches that no lane has started. Batches that have
        started run to their end, so write the model after `close` or the end of the block.

        If the model adds to a dict, a list, or another object of a batch, the addition is in the
        caller's own object.

        Args:
            batches: An iterable. The caller's thread reads it, at most `buffersize` batches ahead
                of the outputs.
            prepare: A function of one batch that returns what the model gets, in the forms above.
                It runs in the lane.
            with_inputs: Yield ``(batch, output)``, with the batch as `batches` gave it.
            return_exceptions: Yield the exception of a batch in place of its output, and continue.
            ordered: Yield in the order of the batches. With False, yield each output as soon as it
                is computed.
            buffersize: The number of batches in flight, which bounds the memory: 4 per lane by
                default, and 3 chunks per lane with workers.
            chunksize: With workers, the number of batches that travel in one message, as in
                concurrent.futures. By default, a message holds about 5 ms of work, by the time that
                batches took before: at most 64 batches and 256 KiB; one batch with ``retries=0``.
                With threads it changes nothing.
            resume: A folder for the outputs. Each output is saved once. A later run with the same
                folder yields saved outputs without computing them. The source must give the same
                batches in the same order in every run: a batch with another pickle is refused. So
                are outputs of other weights, buffers, or training flags, and of other options that
                change a whole output. Code is not compared: use a new folder after you change it.
                Outputs are loaded with pickle, so folders and files of other users are refused.
            key: With `resume`, a function of one batch that returns its name or its number, to be
                compared in place of the batch. Use it for batches that cannot be pickled, or that
                take long to compare. The function runs in the caller's thread.
            check_model: With `resume`, compare the model with the model of the saved outputs, once
                per stream. With False, saved outputs of any weights are yielded.
            progress: Draw a tqdm bar (``pip install 'parawrap-torch[cli]'``).
            total: The number of batches for the bar. By default ``len(batches)``, if it has a
                length.
            desc: The text in front of the bar.

        Raises:
            ShardError: If `batches` is a tensor, a mapping, or a text.
            ShardError: If `buffersize` or `chunksize` is below 1, if fewer batches may be in flight
                than a chunk has, if `key` or `check_model` is given without `resume`, or if
                `methods` names several methods. Use ``p.method(name).map(...)``.
            SessionError: If the block is closed, or ends before the generator does.
            ReplicaError: From the generator, if the model changes before the stream ends.
            ResumeError: If the folder cannot be made, or belongs to another user; from the
                generator, if it holds outputs of another target, of other weights, or of other
                batches than the source gives, if a batch cannot be pickled and there is no `key`,
                or if an output cannot be saved.

        Example:
            >>> import torch
            >>> from parawrap import parallel
            >>> model = torch.nn.Linear(3, 1).eval()
            >>> with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p:
            ...     outputs = list(p.map(torch.randn(10, 3).split(4)))
            >>> [tuple(output.shape) for output in outputs]
            [(4, 1), (4, 1), (2, 1)]
        """
        _check_buffer(buffersize, chunksize)
        _refuse_single_batch(batches)
        if resume is None:
            _refuse_options_of_resume(key, check_model=check_model)
        session, entry, name = self._open_method()
        # Without a folder, outputs are not saved
        folder = None
        if resume is not None:
            find = None
            if check_model:
                # Called when the stream begins, because it reads all weights
                find = partial(fingerprint_of, session.target, session.rules)
            folder = OutputFolder(Path(resume), name, key, find)
        if total is None:
            total = _length_of(batches)
        size = StreamSize(None if chunksize == "auto" else chunksize, buffersize, total)
        outputs = stream(
            session.open_stream(entry, prepare, size),
            batches,
            buffersize=buffersize,
            prepare=prepare,
            with_inputs=with_inputs,
            return_exceptions=return_exceptions,
            ordered=ordered,
            folder=folder,
        )
        return _draw_bar(outputs, total, desc) if progress else outputs


def _check_buffer(buffersize: int | None, chunksize: int | Literal["auto"]) -> None:
    """Refuse sizes below 1, and a buffer without room for a chunk."""
    if buffersize is not None and buffersize < 1:
        msg = (
            f"buffersize={buffersize} is too small: at least one batch must be in flight. Use "
            "1 or more"
        )
        raise ShardError(msg)
    if chunksize == "auto":
        return
    is_count = isinstance(chunksize, int) and chunksize >= 1
    if not is_count:
        msg = f'chunksize={chunksize!r}: a message has at least one batch. Use 1 or more, or "auto"'
        raise ShardError(msg)
    if buffersize is not None and buffersize < chunksize:
        msg = (
            f"buffersize={buffersize} has no room for chunksize={chunksize} batches. Use at "
            "least as many"
        )
        raise ShardError(msg)


def _refuse_options_of_resume(key: Callable[[Any], Any] | None, *, check_model: bool) -> None:
    """Refuse options that have no effect without a folder for outputs."""
    if key is not None:
        msg = "key= is given without resume=. Give resume= a folder, or drop key="
        raise ShardError(msg)
    if not check_model:
        msg = (
            "check_model=False is given without resume=. Give resume= a folder, or drop "
            "check_model="
        )
        raise ShardError(msg)


def _refuse_single_batch(batches: object) -> None:
    """Refuse a single batch: iterating it would give its rows, or the names of its parts."""
    if isinstance(batches, torch.Tensor) or hasattr(batches, "__array__"):
        # Only a tensor has the method `split` of the cure
        tensor = "x" if isinstance(batches, torch.Tensor) else "torch.as_tensor(x)"
        msg = (
            f"batches is a {type(batches).__name__}, and iterating it gives single rows without "
            f"their dim. Split it into batches, as in p.map({tensor}.split(32)), or give a list "
            "of batches: p.map([x])"
        )
    elif isinstance(batches, Mapping | str | bytes):
        msg = (
            f"batches is a {type(batches).__name__}, and iterating it gives no batches. Give a "
            "list of them, as in p.map([batch]), or p.map(d.values()) for a dict of batches"
        )
    else:
        return
    raise ShardError(msg)


def _length_of(batches: Iterable[Any]) -> int | None:
    """Return the number of batches; None if it is not known."""
    if isinstance(batches, Sized):
        with suppress(TypeError, NotImplementedError):  # a DataLoader of a dataset without a length
            return len(batches)
    return None


def _draw_bar(outputs: Iterator[Any], total: int | None, desc: str | None) -> Iterator[Any]:
    """Return the outputs, with a tqdm bar for the terminal or for a notebook."""
    try:
        from tqdm.auto import tqdm  # an optional package, and slow to import
    except ImportError as error:
        msg = (
            "progress=True needs tqdm, which is not installed. Run pip install "
            "'parawrap-torch[cli]'"
        )
        raise ImportError(msg) from error
    return iter(tqdm(outputs, total=total, desc=desc, unit="batch"))
