"""The copies of a model's parameters on other devices than the model's, and the way of their gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from parawrap._private_names import version_of
from parawrap.backends import transfer
from parawrap.engine.batched_copies import bytes_of, copies_at, pack_small, send_packed

_address_of = torch.Tensor.data_ptr
_requires_grad = attrgetter("requires_grad")
_last_step = object()


@cache
def note_optimizer_steps() -> None:
    """Notice the steps of all optimizers: fused ones write parameters and leave their versions alone."""

    def note(*_: object) -> None:
        global _last_step
        _last_step = object()  # not a count: steps of two threads at the same time could count once

    register_optimizer_step_post_hook(note)


def last_optimizer_step() -> object:
    """Return an object that stands for the last step since `note_optimizer_steps`: another one after each step."""
    return _last_step


class _AtHome(torch.autograd.Function):
    """From parameters to the same memory, on the caller's stream, where torch adds up the gradients of all devices."""

    @staticmethod
    def forward(ctx: Any, *originals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        same = tuple(tensor.detach() for tensor in originals)
        ctx.mark_non_differentiable(*[each for each, of in zip(same, originals, strict=True) if not of.requires_grad])
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: ARG004
        return tuple(None if gradient is None else _without_neighbors(gradient) for gradient in gradients)


class _Broadcast(torch.autograd.Function):
    """From parameters to their copies on one device. The gradients of the copies return together.

    It saves nothing, so one graph serves any number of backward passes.
    """

    @staticmethod
    def forward(ctx: Any, device: torch.device, *originals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a reentrant checkpoint runs the node once per segment
        ctx.home = originals[0].device
        copies = copies_at(device, originals)
        frozen = [copy for copy, tensor in zip(copies, originals, strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        arrived = _send_together([each for each in gradients if each is not None], ctx.home)
        found: list[torch.Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(present, arrived, strict=True):
            found[index] = gradient
        return (None, *found)


def _without_neighbors(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares its memory with no other: tensors that traveled together share a version."""
    if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()


def _send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on another device, the small dense ones of one dtype in one copy. Gradients flow through it."""
    found = [*tensors]
    packs = pack_small(tensors)
    for index in {*range(len(found))} - {index for pack in packs for index in pack}:
        found[index] = transfer(tensors[index], device)
    for pack in packs:
        for index, piece in zip(pack, send_packed([tensors[index] for index in pack], device), strict=True):
            found[index] = piece
    return found


class ParameterCopies:
    """The copies of parameters on other devices than the model's, shared by the lanes of each device.

    With gradients, they are made for each call, and are part of its graph. Without, they are kept until a version, the
    memory, or an optimizer step shows a write. New copies are new tensors, because a graph may hold the old ones.

    Attributes:
        copies: The copies of the originals, by device; empty before the first refresh.
    """

    def __init__(self, devices: Iterable[torch.device], originals: Sequence[torch.Tensor]) -> None:
        note_optimizer_steps()
        self.devices = frozenset(devices)
        self.originals = list(originals)
        self.copies: dict[torch.device, list[torch.Tensor]] = {}
        self._is_linked = False
        self._state: tuple[Any, ...] = ()
        self._versions: list[int] = []  # of the copies

    def is_stale(self) -> bool:
        """True if the copies are not those that a call of this moment needs."""
        if not (self.devices and self.originals):
            return False
        has_needless_link = self._is_linked and torch.is_grad_enabled()  # of a model that was frozen since
        return has_needless_link or self._must_link() or self._state != self._read_state()

    def has_moved(self) -> bool:
        """True if a parameter has other memory than at the last refresh, or another dtype."""
        return bool(self._state) and self._state[2] != [*map(_address, self.originals)]

    def has_changed(self) -> bool:
        """True if a parameter was written since the last refresh."""
        return bool(self._state) and self._state != self._read_state()

    def refresh(self, *, detach: bool = False) -> int:
        """Bring the copies up to date; return the bytes copied."""
        if not self.is_stale():
            return 0
        self._state = self._read_state()
        self._is_linked = self._must_link() and not detach
        if self._is_linked:
            with torch.inference_mode(False):
                self.copies = self._link()
        else:
            self.copies = {device: copies_at(device, self.originals) for device in self.devices}
        for original, copied in self.pairs():
            vars(copied).update(vars(original))
            if isinstance(original, torch.nn.Parameter):
                vars(copied)["_is_param"] = True  # isinstance(copied, torch.nn.Parameter) holds then
        self._versions = self._read_versions()
        return len(self.devices) * sum(map(bytes_of, self.originals))

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with each of its copies."""
        return [pair for copies in self.copies.values() for pair in zip(self.originals, copies, strict=True)]

    def invalidate(self) -> None:
        """Make new copies at the next refresh."""
        self._state = ()

    def find_written(self) -> torch.Tensor | None:
        """Return a parameter with a copy that was written in place since the last refresh; None if there is none."""
        now = self._read_versions()
        if now == self._versions:
            return None
        found = zip(self.pairs(), now, self._versions, strict=True)
        return next((original for (original, _), version, before in found if version != before), None)

    def drop(self) -> None:
        """Drop the copies, and the graph that leads to the parameters."""
        self.copies, self._versions, self._state, self._is_linked = {}, [], (), False

    def _link(self) -> dict[torch.device, list[torch.Tensor]]:
        """Return copies that gradients flow through: one node for all leaves, and one for each computed tensor."""
        leaves = [tensor for tensor in self.originals if tensor.is_leaf]
        same = _AtHome.apply(*leaves) if leaves else ()  # type: ignore[no-untyped-call]
        found: dict[torch.device, list[torch.Tensor]] = {}
        for device in self.devices:
            copies = iter(_Broadcast.apply(device, *same) if leaves else ())  # type: ignore[no-untyped-call]
            found[device] = [next(copies) if each.is_leaf else transfer(each, device) for each in self.originals]
        return found

    def _read_versions(self) -> list[int]:
        return [*map(_version, chain.from_iterable(self.copies.values()))]

    def _must_link(self) -> bool:
        return torch.is_grad_enabled() and any(map(_requires_grad, self.originals))

    def _read_state(self) -> tuple[Any, ...]:
        return _last_step, [*map(_version, self.originals)], [*map(_address, self.originals)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _address(tensor: torch.Tensor) -> Any:
    return (_address_of(tensor), tensor.dtype) if tensor.layout is torch.strided else id(tensor)
