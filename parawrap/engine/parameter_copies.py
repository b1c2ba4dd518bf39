"""The copies of a model's parameters on devices other than the model's.

Gradients of the copies find their way back to the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from parawrap._private_names import version_of
from parawrap.backends import transfer
from parawrap.engine.batched_copies import bytes_of, copies_at, pack_small, send_packed

_requires_grad = attrgetter("requires_grad")
_dtype_of = attrgetter("dtype")
_last_step = object()


# A write in place raises the version of a parameter, so stale copies show without a comparison of
# values. The steps of fused optimizers are the exception: they write and leave the version alone.
# Therefore each step of any optimizer makes kept copies stale.
@cache  # torch keeps each registered hook, so there is one per process
def note_optimizer_steps() -> None:
    """Notice the steps of all optimizers: fused ones do not change the versions of parameters."""

    def note(*_: object) -> None:
        global _last_step
        _last_step = object()  # not a count: steps of two threads at the same time could count once

    register_optimizer_step_post_hook(note)


def last_optimizer_step() -> object:
    """Return an object that stands for the last step since `note_optimizer_steps`.

    It is another object after each step.
    """
    return _last_step


def read_sources(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return what writes of tensors change.

    Fused optimizers write without a new version, so the steps of all optimizers count too.
    """
    if not tensors:
        return ()
    versioned = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [*map(version_of, versioned)]
    flags = [*map(_requires_grad, tensors)]
    return last_optimizer_step(), versions, flags, read_memory(tensors)


def read_memory(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.dtype]]:
    """Return where tensors lie, and their dtypes: ``p.data = x`` changes one of them."""
    strided = torch.strided
    # A sparse tensor has no address of its own
    addresses = [each.data_ptr() if each.layout is strided else id(each) for each in tensors]
    return addresses, [*map(_dtype_of, tensors)]


# Two nodes lie between a parameter and its copies. `_Broadcast`, one per device, runs backward on a
# stream of that device. `_AtHome`, one for all devices, runs it on the caller's stream at home:
# there torch adds up what the devices send, and it warns of gradients from other streams.


class _AtHome(torch.autograd.Function):
    """From parameters to the same memory.

    It runs on the caller's stream, where torch adds up the gradients of all devices.
    """

    @staticmethod
    def forward(ctx: Any, *originals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that a call does not use gets no gradient
        same = tuple(tensor.detach() for tensor in originals)
        frozen = []
        for tensor, original in zip(same, originals, strict=True):
            if not original.requires_grad:
                frozen.append(tensor)
        ctx.mark_non_differentiable(*frozen)
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: ARG004
        # The parameters own the gradients from here on, and torch adds to each of them in place.
        return tuple(
            None if gradient is None else _without_neighbors(gradient) for gradient in gradients
        )


class _Broadcast(torch.autograd.Function):
    """From parameters to their copies on one device. The gradients of the copies return together.

    It saves nothing, so one graph serves any number of backward passes.
    """

    @staticmethod
    def forward(
        ctx: Any, device: torch.device, *originals: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a reentrant checkpoint runs the node once per segment
        ctx.home = originals[0].device
        copies = copies_at(device, originals)
        frozen = []
        for copied, original in zip(copies, originals, strict=True):
            if not original.requires_grad:
                frozen.append(copied)
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        present: list[int] = []
        sent: list[torch.Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                present.append(index)
                sent.append(gradient)
        arrived = _send_together(sent, ctx.home)
        found: list[torch.Tensor | None] = [None] * len(gradients)
        for index, arrived_gradient in zip(present, arrived, strict=True):
            found[index] = arrived_gradient
        return (None, *found)


def _without_neighbors(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares its memory with no other.

    Tensors that traveled together share a version, and one of them would keep the memory of all.
    """
    if tensor.layout is not torch.strided:
        return tensor
    is_alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_alone else tensor.clone()


def _send_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on another device, the small dense ones of one dtype in one copy.

    Gradients flow through it.
    """
    found = [*tensors]
    packs = pack_small(tensors)
    alone = set(range(len(found)))
    for pack in packs:
        alone.difference_update(pack)
    for index in alone:
        found[index] = transfer(tensors[index], device)
    for pack in packs:
        pieces = send_packed([tensors[index] for index in pack], device)
        for index, piece in zip(pack, pieces, strict=True):
            found[index] = piece
    return found


class ParameterCopies:
    """Copies of parameters on devices other than the model's.

    They are made at one moment, and shared by the lanes of each device. With gradients, they are
    part of the graph of one call, and each call makes new ones. Without, they are kept until the
    parameters change (`ModelState.have_sources_changed`). New copies are new tensors: a graph may
    hold the old ones.

    Attributes:
        originals: The parameters.
        by_device: Their copies, in the same order.
        sources_then: What `read_sources` found before the copies were made.
        is_linked: True if gradients flow through the copies.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        originals: Sequence[torch.Tensor],
        *,
        detach: bool = False,
    ) -> None:
        self.devices = frozenset(devices)
        self.originals: list[torch.Tensor] = []
        if self.devices:
            # Before the copies are made, so that no later step is missed.
            note_optimizer_steps()
            self.originals += originals
        self.sources_then = read_sources(self.originals)
        self.is_linked = self.must_link() and not detach
        self.by_device: dict[torch.device, list[torch.Tensor]] = {}
        if self.is_linked:
            # Inference tensors cannot be part of a graph.
            with torch.inference_mode(False):
                self.by_device = self._link()
        elif self.originals:
            for device in self.devices:
                self.by_device[device] = copies_at(device, self.originals)
        for original, copied in self.pairs():
            attributes = vars(copied)
            attributes.update(vars(original))
            if isinstance(original, torch.nn.Parameter):
                attributes["_is_param"] = True  # isinstance(copied, torch.nn.Parameter) holds then
        # The versions show whether forward wrote a copy in place, which is refused: the parameter
        # does not get the write. An inference tensor has no version.
        self._pairs = [pair for pair in self.pairs() if not pair[1].is_inference()]
        self._copied = [copied for _, copied in self._pairs]
        self._versions = [*map(version_of, self._copied)]

    @property
    def nbytes(self) -> int:
        """The number of bytes that were copied."""
        return len(self.devices) * sum(map(bytes_of, self.originals))

    def must_link(self) -> bool:
        """True if gradients of a call of this moment must flow through the copies."""
        return torch.is_grad_enabled() and any(map(_requires_grad, self.originals))

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with each of its copies."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for copies in self.by_device.values():
            found += zip(self.originals, copies, strict=True)
        return found

    def find_written(self) -> torch.Tensor | None:
        """Return a parameter with a copy that was written in place; None if there is none."""
        now = [*map(version_of, self._copied)]
        if now == self._versions:
            return None
        for pair, version, before in zip(self._pairs, now, self._versions, strict=True):
            if version != before:
                return pair[0]
        return None

    def clear(self) -> None:
        """Let go of the copies, and of the graph that leads to the parameters.

        While the graph lives, its nodes for the parameters remember the stream of the call.
        """
        self.by_device = {}
        self._pairs = []
        self._copied = []
        self._versions = []

    def _link(self) -> dict[torch.device, list[torch.Tensor]]:
        """Return copies that gradients flow through.

        One node sends all leaves; each computed tensor, such as a parametrized weight, goes alone.
        """
        leaves = [tensor for tensor in self.originals if tensor.is_leaf]
        same: tuple[torch.Tensor, ...] = ()
        if leaves:
            same = _AtHome.apply(*leaves)  # type: ignore[no-untyped-call]
        found: dict[torch.device, list[torch.Tensor]] = {}
        for device in self.devices:
            sent: tuple[torch.Tensor, ...] = ()
            if leaves:
                sent = _Broadcast.apply(device, *same)  # type: ignore[no-untyped-call]
            copies_of_leaves = iter(sent)
            copies: list[torch.Tensor] = []
            for tensor in self.originals:
                if tensor.is_leaf:
                    copies.append(next(copies_of_leaves))
                else:
                    # Its own graph leads to leaves, so torch's plain copy is enough.
                    copies.append(transfer(tensor, device))
            found[device] = copies
        return found


NO_COPIES = ParameterCopies((), ())
