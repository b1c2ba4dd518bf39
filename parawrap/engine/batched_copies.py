"""Many tensors to other devices in few copies.

A copy between devices costs some microseconds of the host's time, and a model has hundreds of small
tensors. The small tensors of one dtype travel as one; large tensors travel alone, since packing
would copy them once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch

from parawrap._private_names import InferenceMode, copy_all, set_grad_enabled
from parawrap.backends import transfer, transfer_into

T = TypeVar("T")
_SMALL = 1 << 20  # bytes; a copy of more takes longer than the call that starts it
_MOST = 32 << 20  # bytes of one packed tensor, which exists twice for a moment
_detach = methodcaller("detach")
_is_contiguous = methodcaller("is_contiguous")
_size_of = methodcaller("numel")
_shape_of = attrgetter("shape")


def copies_on(
    devices: Iterable[torch.device], tensors: Sequence[torch.Tensor]
) -> dict[torch.device, list[torch.Tensor]]:
    """Return lasting copies of tensors on each of these other devices.

    Plain tensors travel together.
    """
    found: dict[torch.device, list[torch.Tensor]] = {}
    with lasting():
        originals = [*map(_detach, tensors)]
        are_plain = [*map(_can_be_written, originals)]
        plain = [*compress(originals, are_plain)]
        packs = pack_small(plain)
        alone = indices_without(packs, len(plain))
        copies_of_plain: list[list[torch.Tensor]] = []
        for device in devices:
            empty = [*map(partial(torch.empty_like, device=device), plain)]
            copies_of_plain.append(empty)
            for index in alone:
                transfer_into(empty[index], plain[index])
            # The copies of all tensors, in their order: those of plain tensors are written below
            unused = iter(empty)
            copies_here = found[device] = []
            for tensor, is_plain in zip(originals, are_plain, strict=True):
                copied = next(unused) if is_plain else tensor.to(device, copy=True)
                copies_here.append(copied)
        # One flat tensor serves all devices, and is freed before the next one is made
        for pack in packs:
            flat = pack.flatten(plain)
            for device, copies in zip(found, copies_of_plain, strict=True):
                # The pieces share their memory and their version. Each copy has its own, so that
                # a write to one of them does not count as a write to all
                copy_all(pack.pick(copies), pack.split(transfer(flat, device)))
    return found


def _can_be_written(tensor: torch.Tensor) -> bool:
    """True for a plain, strided tensor: an empty copy of it can be made, and written later."""
    if type(tensor) is not torch.Tensor or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided


def bytes_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes of tensors, without sparse ones, which torch does not count."""
    strided = torch.strided
    return sum([tensor.nbytes for tensor in tensors if tensor.layout is strided])


class Pack:
    """Small tensors of one dtype that travel as one flat tensor.

    The elements of each tensor lie in the flat tensor in the order of its memory, so that a dense
    tensor of any memory format, such as ``channels_last``, is flattened and split without a copy of
    its own. Gradients flow through all methods.

    Attributes:
        indices: The positions of its tensors in the sequence that was packed.
        sizes: How many elements each of them has.
        size: How many they have together.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
        own = [tensors[index] for index in indices]
        self.indices = indices
        self.sizes = [*map(_size_of, own)]
        self.size = sum(self.sizes)
        self._shapes = [*map(_shape_of, own)]  # in the flat tensor
        # By their places in the pack, the orders of the dims of tensors with another memory format
        self._orders: dict[int, list[int]] = {}
        if not all(map(_is_contiguous, own)):
            self._note_orders(own)

    def _note_orders(self, own: Sequence[torch.Tensor]) -> None:
        for place, tensor in enumerate(own):
            if not tensor.is_contiguous():
                strides = tensor.stride()
                order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
                self._orders[place] = order
                self._shapes[place] = torch.Size([tensor.shape[dim] for dim in order])

    def pick(self, values: Sequence[T]) -> list[T]:
        """Return the values of the tensors of this pack; one value per tensor was packed."""
        return [values[index] for index in self.indices]

    def flatten(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the tensors of this pack, from such a sequence, as one flat tensor.

        At least one of them is given. Zeros fill the places of None.
        """
        own = self.pick(tensors)
        for place, order in self._orders.items():
            tensor = own[place]
            if tensor is not None:
                own[place] = tensor.permute(order)
        present = [tensor for tensor in own if tensor is not None]
        if len(present) == len(own):
            return torch.cat([*map(torch.Tensor.reshape, present, repeat((-1,)))])
        zeros = present[0].new_zeros(max(self.sizes))
        return torch.cat(
            [
                zeros.narrow(0, 0, size) if tensor is None else tensor.reshape(-1)
                for tensor, size in zip(own, self.sizes, strict=True)
            ]
        )

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of this pack as views of a flat tensor."""
        pieces = [*map(torch.Tensor.view, flat.split(self.sizes), self._shapes)]
        for place, order in self._orders.items():
            inverse = sorted(range(len(order)), key=order.__getitem__)
            pieces[place] = pieces[place].permute(inverse)
        return pieces


def pack_small(tensors: Sequence[torch.Tensor]) -> list[Pack]:
    """Return the packs of small tensors of one dtype, up to a number of bytes each."""
    packs: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}  # the newest pack of each dtype
    sizes: dict[torch.dtype, int] = {}  # in bytes, of these packs
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            continue
        dtype, size = tensor.dtype, tensor.nbytes
        if size > _SMALL:
            continue
        if dtype not in filling or sizes[dtype] + size > _MOST:
            filling[dtype] = []
            sizes[dtype] = 0
            packs.append(filling[dtype])
        filling[dtype].append(index)
        sizes[dtype] += size
    # A pack of one tensor would only be copied once more.
    return [Pack(tensors, pack) for pack in packs if len(pack) > 1]


def indices_without(packs: Iterable[Pack], count: int) -> list[int]:
    """Return the positions of tensors that are in no pack; `count` is how many were packed."""
    alone = set(range(count))
    for pack in packs:
        alone.difference_update(pack.indices)
    return sorted(alone)


def send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on another device, the small dense ones of one dtype in one copy.

    Those that travel together share memory. Gradients flow through it.
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
    """Inside the block, new tensors are not inference tensors, whatever the caller's modes.

    Without `grad`, they have no graph either. Use it at once, as ``with lasting():``.
    """
    guard = None
    try:
        # torch changes the mode when it makes the guard. One guard restores both modes, in C, so
        # Ctrl-C cannot come between the two; a guard that no one holds restores them as it ends
        guard = InferenceMode(False)
        set_grad_enabled(grad)
    except BaseException:
        if guard is not None:  # the traceback keeps this frame
            guard.__exit__(None, None, None)
        raise
    return guard  # type: ignore[no-any-return]
