"""Many tensors to another device in few copies.

A copy between devices costs some microseconds of the host's time, and a model has hundreds of small
tensors. The small tensors of one dtype travel as one; large tensors travel alone, since packing
would copy them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from parawrap._private_names import InferenceMode, copy_all, set_grad_enabled
from parawrap.backends import transfer, transfer_into

_SMALL = 1 << 20  # bytes; a copy of more takes longer than the call that starts it
_MOST = 32 << 20  # bytes of one packed tensor, which exists twice for a moment


def copies_at(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lasting copies of tensors on another device. Plain tensors travel together."""
    with lasting():
        copies: list[torch.Tensor] = []
        plain: list[torch.Tensor] = []
        empty: list[torch.Tensor] = []  # the copies of the plain ones, which are written below
        for tensor in tensors:
            original = tensor.detach()
            if _can_be_written(original):
                copied = torch.empty_like(original, device=device)
                plain.append(original)
                empty.append(copied)
            else:
                copied = original.to(device, copy=True)
            copies.append(copied)
        packs = pack_small(plain)
        alone = set(range(len(plain)))
        for pack in packs:
            alone.difference_update(pack)
        for index in alone:
            transfer_into(empty[index], plain[index])
        for pack in packs:
            # The pieces of a pack share its memory and its version. Each copy gets its own, so that
            # a write to one of them does not count as a write to all.
            pieces = send_packed([plain[index] for index in pack], device)
            copy_all([empty[index] for index in pack], pieces)
    return copies


def _can_be_written(tensor: torch.Tensor) -> bool:
    """True for a plain, strided tensor: an empty copy of it can be made, and written later."""
    if type(tensor) is not torch.Tensor or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor; 0 for a sparse one, which torch does not count."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def pack_small(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of tensors that travel together.

    These are small tensors of one dtype, up to a number of bytes.
    """
    packs: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}  # the newest pack of each dtype
    sizes: dict[torch.dtype, int] = {}  # in bytes, of these packs
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            continue
        size = tensor.nbytes
        if size > _SMALL:
            continue
        dtype = tensor.dtype
        # A dtype without a pack counts as one with a full pack.
        pack = filling.get(dtype, [])
        total = sizes.get(dtype, _MOST) + size
        if total > _MOST:
            pack = []
            packs.append(pack)
            total = size
        pack.append(index)
        filling[dtype] = pack
        sizes[dtype] = total
    # A pack of one tensor would only be copied once more.
    return [pack for pack in packs if len(pack) > 1]


def send_packed(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Send tensors of one dtype in one copy.

    The results share memory, and gradients flow through them.
    """
    flat = [tensor.reshape(-1) for tensor in tensors]
    packed = transfer(torch.cat(flat), device)
    pieces = packed.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


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
