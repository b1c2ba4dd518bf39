"""Many tensors to another device in few copies.

A copy between devices costs some microseconds of the host's time, and a model has hundreds of small tensors. The small
tensors of one dtype travel as one; large tensors travel alone, since packing would copy them once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap._private_names import copy_all
from parawrap.backends import transfer, transfer_into

_SMALL = 1 << 20  # bytes; a copy of more takes longer than the call that starts it
_MOST = 32 << 20  # bytes of one packed tensor, which exists twice for a moment


def copies_at(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lasting copies of tensors on another device. Plain tensors travel together."""
    with lasting():
        tensors = [tensor.detach() for tensor in tensors]
        copies = [
            torch.empty_like(tensor, device=device) if _can_be_written(tensor) else tensor.to(device, copy=True)
            for tensor in tensors
        ]
        plain = [(tensor, each) for tensor, each in zip(tensors, copies, strict=True) if _can_be_written(tensor)]
        packs = pack_small([tensor for tensor, _ in plain])
        for index in {*range(len(plain))} - {index for pack in packs for index in pack}:
            transfer_into(plain[index][1], plain[index][0])
        for pack in packs:
            copy_all([plain[index][1] for index in pack], send_packed([plain[index][0] for index in pack], device))
    return copies


def _can_be_written(tensor: torch.Tensor) -> bool:
    """True if an empty copy of the tensor can be made and written later: a plain, strided tensor."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor; 0 for a sparse one, which torch does not count."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def pack_small(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of tensors that travel together: small tensors of one dtype, up to a number of bytes."""
    packs: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.nbytes > _SMALL:
            continue
        pack, size = filling.get(tensor.dtype, ([], _MOST))
        if size + tensor.nbytes > _MOST:
            pack, size = [], 0
            packs.append(pack)
        pack.append(index)
        filling[tensor.dtype] = pack, size + tensor.nbytes
    return [pack for pack in packs if len(pack) > 1]


def send_packed(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Send tensors of one dtype in one copy. The results share memory, and gradients flow through them."""
    packed = transfer(torch.cat([tensor.reshape(-1) for tensor in tensors]), device)
    pieces = packed.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


class lasting:  # noqa: N801
    """Inside the block, new tensors have no graph and are not inference tensors, whatever the caller's modes."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
