"""Dynamic batching: a batch of any size through a model that was compiled for one size.

The core always computes the compiled number of rows, so a last chunk that is short has to be filled up. It is filled with
rows of the batch itself, never with zeros: with the rows before it, or, where the whole batch is smaller than the compiled
one, with its own rows in turn. What the filling gives is dropped. So each output row is that of an inference over real
rows, and where the model treats rows independently, which data parallelism asks of it anyway, exactly the row that it would
be in any other company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from parawrap.backends.neuron._contract import Signature, no_dynamic_batching
from parawrap.errors import ShapeError

__all__ = ["in_chunks"]

Infer = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class _Chunk(NamedTuple):
    """The rows of one inference, and which of its output rows are new."""

    rows: slice | torch.Tensor
    new: slice


def in_chunks(infer: Infer, inputs: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
    """The outputs for a batch of any size, zero included, by inferences of the compiled size.

    Raises:
        ShapeError: the model is not eligible, or the inputs disagree on their rows.
    """
    batch = signature.batch
    if batch is None:
        raise no_dynamic_batching(signature.why_fixed())
    rows = _rows(inputs, signature)
    if rows == batch:
        return list(infer(inputs))
    if rows == 0:
        return [torch.empty((0, *spec.shape[1:]), dtype=spec.dtype, device="cpu") for spec in signature.outputs]
    parts = [
        [output[chunk.new] for output in infer([tensor[chunk.rows] for tensor in inputs])] for chunk in _chunks(rows, batch)
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _chunks(rows: int, batch: int) -> Iterator[_Chunk]:
    whole = rows // batch * batch
    for start in range(0, whole, batch):
        yield _Chunk(slice(start, start + batch), slice(None))
    if whole == rows:
        return
    if rows < batch:
        yield _Chunk(torch.arange(batch, device="cpu") % rows, slice(rows))
    else:
        yield _Chunk(slice(rows - batch, rows), slice(whole - rows, None))


def _rows(inputs: Sequence[torch.Tensor], signature: Signature) -> int:
    if len(inputs) != len(signature.inputs):
        msg = f"the call has {len(inputs)} tensors, and the model is compiled for {len(signature.inputs)}"
        raise ShapeError(msg)
    rows = inputs[0].shape[0] if inputs[0].ndim else -1
    for tensor, spec in zip(inputs, signature.inputs, strict=True):
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            msg = (
                f"{spec.address} has shape {tuple(tensor.shape)} and {signature.inputs[0].address} has "
                f"{tuple(inputs[0].shape)}: with dynamic batching all inputs have the same rows on dim 0"
            )
            raise ShapeError(msg)
    return rows
