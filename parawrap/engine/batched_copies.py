"""Many tensors to another device in few copies.

A copy between devices costs some microseconds of the host's time, and a model has hundreds of small tensors. The small
tensors of one dtype travel as one; large tensors travel alone, since packing would copy them once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap.backends import transfer, transfer_into
from parawrap.engine._private_names import copy_all

_SMALL = 1 << 20  # bytes; a copy of more takes longer than the call that starts it
_MOST = 32 << 20  # bytes of one packed tensor, which exists twice for a moment


class PackedTensors:
    """Tensors of one device, packed once and sent to any number of devices."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._packs = [(pack, _pack([tensors[index] for index in pack])) for pack in _packs(tensors)]
        packed = {index for pack, _ in self._packs for index in pack}
        self._single = [index for index in range(len(tensors)) if index not in packed]

    def write(self, copies: Sequence[torch.Tensor]) -> None:
        """Write the tensors into these copies of theirs, which lie on one device; large ones straight."""
        for index in self._single:
            transfer_into(copies[index], self._tensors[index])
        for pack, flat in self._packs:
            there = transfer(flat, copies[0].device)
            pieces = there.split([self._tensors[index].numel() for index in pack])
            shaped = [piece.view(self._tensors[index].shape) for index, piece in zip(pack, pieces, strict=True)]
            copy_all([copies[index] for index in pack], shaped)


def copies_at(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors on another device. Plain tensors travel together."""
    sent = {index for index, tensor in enumerate(tensors) if can_be_sent(tensor)}
    copies = [
        torch.empty_like(tensor, device=device) if index in sent else tensor.to(device, copy=True)
        for index, tensor in enumerate(tensors)
    ]
    written = [copies[index] for index in sent]
    PackedTensors([tensors[index] for index in sent]).write(written)
    return copies


def can_be_sent(tensor: torch.Tensor) -> bool:
    """True if an empty copy of the tensor can be made and written later: a plain, strided tensor."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes of a tensor; 0 for a sparse one, which torch does not count."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _packs(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
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


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class lasting:  # noqa: N801
    """Inside the block, new tensors have no graph and are not inference tensors, whatever the caller's modes."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
