"""Dynamic batching: run a batch of any size through a model that was compiled for one size.

A core always computes the compiled number of rows, so a short last chunk is filled up with rows of the batch, never with
zeros. The fill is the preceding rows. If the whole batch is smaller than the compiled size, its own rows are repeated.
Outputs of fill rows are dropped. Each output row thus comes from an inference over real rows. If the model treats rows
independently, as data parallelism requires, the other rows of the chunk do not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from parawrap.backends.neuron._runtime import Signature, no_dynamic_batching
from parawrap.errors import ShapeError

__all__ = ["in_chunks"]

Infer = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class _Chunk(NamedTuple):
    """The input rows of one inference, and the output rows to keep."""

    rows: slice | torch.Tensor
    new: slice


def in_chunks(infer: Infer, inputs: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
    """Return the outputs for a batch of any size, including zero, from inferences of the compiled size.

    Raises:
        ShapeError: If the model cannot take other batch sizes, or the inputs differ in their number of rows.
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
        msg = f"the call has {len(inputs)} tensors, but the model is compiled for {len(signature.inputs)}"
        raise ShapeError(msg)
    rows = inputs[0].shape[0] if inputs[0].ndim else -1
    for tensor, spec in zip(inputs, signature.inputs, strict=True):
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            msg = (
                f"{spec.address} has shape {tuple(tensor.shape)}, but {signature.inputs[0].address} has "
                f"{tuple(inputs[0].shape)}: dynamic batching needs the same number of rows on dim 0 of all inputs"
            )
            raise ShapeError(msg)
    return rows
