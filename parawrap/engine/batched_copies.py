"""Many tensors to other devices in few copies.

A copy between devices costs some microseconds of the host's time, and a model has hundreds of small
tensors. The small tensors of one dtype travel as one; large tensors travel alone, since packing
would copy them once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch

from parawrap._private_names import InferenceMode, copy_all, set_grad_enabled
from parawrap.backends import transfer, transfer_into

T = TypeVar("T")
# Both are guesses that no test has contradicted
_SMALL = 1 << 20  # bytes of a small tensor; a larger copy takes longer than the call that starts it
_LARGEST_PACK = 32 << 20  # bytes; its tensors take this memory twice for a moment
_detach = methodcaller("detach")
_as_vector = methodcaller("reshape", -1)
_is_contiguous = methodcaller("is_contiguous")
_size_of = methodcaller("numel")
_shape_of = attrgetter("shape")


def copies_on(
    devices: Iterable[torch.device], tensors: Sequence[torch.Tensor]
) -> dict[torch.device, list[torch.Tensor]]:
    """Return copies of tensors on each of these other devices, in the same order.

    The caller owns the copies. They can be used in every mode, and have no graphs. Small plain
    tensors travel together.
    """
    found: dict[torch.device, list[torch.Tensor]] = {}
    with lasting():
        originals = [*map(_detach, tensors)]  # a detached parameter is a plain tensor
        are_plain = [*map(_is_plain, originals)]
        plain = [*compress(originals, are_plain)]
        packs = pack_small(plain)
        alone = indices_without(packs, len(plain))
        plain_copies: dict[torch.device, list[torch.Tensor]] = {}
        for device in devices:
            found[device] = copies = []
            for tensor, is_plain in zip(originals, are_plain, strict=True):
                if is_plain:  # written below
                    copies.append(torch.empty_like(tensor, device=device))
                else:
                    copies.append(tensor.to(device, copy=True))
            plain_copies[device] = [*compress(copies, are_plain)]
            for index in alone:
                transfer_into(plain_copies[device][index], plain[index])
        # One flat tensor serves all devices, and is freed before the next one is made
        for pack in packs:
            flat = pack.flatten(plain)
            for device, copies in plain_copies.items():
                # The pieces of the flat tensor share memory and a version. So they are copied once
                # more: a write into one copy must not count as a write into all of them
                copy_all(pack.pick(copies), pack.split(transfer(flat, device)))
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a strided tensor of torch's own class. Its copy can be made empty, and written."""
    if type(tensor) is not torch.Tensor or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided


def bytes_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes of tensors, without sparse ones, which torch does not count."""
    strided = torch.strided
    return sum([tensor.nbytes for tensor in tensors if tensor.layout is strided])


class Pack:
    """Small tensors of one dtype that travel as one flat tensor.

    The elements of each tensor lie in the flat tensor in the order of its memory. So a dense tensor
    of any memory format, such as ``channels_last``, is flattened and split without a further copy.
    Gradients flow through all methods.

    Attributes:
        indices: The positions of the pack's tensors in the sequence that was packed.
        sizes: The number of elements of each tensor of the pack.
        size: The number of elements of the flat tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        self.indices = indices
        packed = self.pick(tensors)
        self.sizes = [*map(_size_of, packed)]
        self.size = sum(self.sizes)
        # With the dims in the order of the memory
        self._shapes = [*map(_shape_of, packed)]
        # By the position in the pack: the dims of a tensor that is not contiguous, in that order
        self._orders: dict[int, list[int]] = {}
        if not all(map(_is_contiguous, packed)):
            self._note_orders(packed)

    def _note_orders(self, packed: Sequence[torch.Tensor]) -> None:
        for position, tensor in enumerate(packed):
            if not tensor.is_contiguous():
                order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
                self._orders[position] = order
                self._shapes[position] = tensor.permute(order).shape

    def pick(self, values: Sequence[T]) -> list[T]:
        """Return the values of this pack. `values` has one per tensor that `pack_small` got."""
        return [values[index] for index in self.indices]

    def flatten(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the tensors of this pack as one flat tensor, with zeros in the places of None.

        `tensors` has one entry per tensor that `pack_small` got. At least one entry of this pack is
        a tensor.
        """
        picked = self.pick(tensors)
        for position, order in self._orders.items():
            tensor = picked[position]
            if tensor is not None:
                picked[position] = tensor.permute(order)
        present = [tensor for tensor in picked if tensor is not None]
        if len(present) == len(picked):
            return torch.cat([*map(_as_vector, present)])
        zeros = present[0].new_zeros(max(self.sizes))
        pieces: list[torch.Tensor] = []
        for tensor, size in zip(picked, self.sizes, strict=True):
            piece = zeros[:size] if tensor is None else tensor.reshape(-1)
            pieces.append(piece)
        return torch.cat(pieces)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of this pack as views of a flat tensor."""
        pieces = [*map(torch.Tensor.view, flat.split(self.sizes), self._shapes)]
        for position, order in self._orders.items():
            inverse = sorted(range(len(order)), key=order.__getitem__)
            pieces[position] = pieces[position].permute(inverse)
        return pieces


def pack_small(tensors: Sequence[torch.Tensor]) -> list[Pack]:
    """Return packs of the small tensors, each pack of one dtype and of a limited size."""
    packs: list[list[int]] = []
    newest: dict[torch.dtype, list[int]] = {}  # the pack that gets the next tensor of a dtype
    sizes: dict[torch.dtype, int] = {}  # of these packs, in bytes
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            continue
        dtype, size = tensor.dtype, tensor.nbytes
        if size > _SMALL:
            continue
        if dtype not in newest or sizes[dtype] + size > _LARGEST_PACK:
            newest[dtype] = []
            sizes[dtype] = 0
            packs.append(newest[dtype])
        newest[dtype].append(index)
        sizes[dtype] += size
    # A tensor that is alone in its pack travels faster by itself
    return [Pack(tensors, indices) for indices in packs if len(indices) > 1]


def indices_without(packs: Iterable[Pack], count: int) -> list[int]:
    """Return the positions of the tensors that are in no pack, of `count` tensors."""
    alone = set(range(count))
    for pack in packs:
        alone.difference_update(pack.indices)
    return sorted(alone)


def send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on another device, with one copy for the small ones of each dtype.

    Tensors that travel together share memory. Gradients flow through the copies.
    """
    found = [*tensors]
    packs = pack_small(tensors)
    for index in indices_without(packs, len(found)):
        found[index] = transfer(tensors[index], device)
    for pack in packs:
        pieces = pack.split(transfer(pack.flatten(tensors), device))
        for index, piece in zip(pack.indices, pieces, strict=True):
            found[index] = piece
    return found


def lasting(*, grad: bool = False) -> AbstractContextManager[Any]:
    """Leave inference mode inside the block, so that new tensors can be used in every mode.

    `grad` says whether the block records graphs. Use the value at once, as ``with lasting():``,
    since the modes change with this call.
    """
    guard = None
    try:
        # torch changes the inference mode when it makes the guard. At its end, the guard restores
        # both modes in C, so Ctrl-C cannot come between the two. A guard that is dropped, as by
        # Ctrl-C before the block begins, restores them too
        guard = InferenceMode(False)
        set_grad_enabled(grad)
    except BaseException:
        # The traceback keeps this frame, and so the guard
        if guard is not None:
            guard.__exit__(None, None, None)
        raise
    return guard  # type: ignore[no-any-return]
