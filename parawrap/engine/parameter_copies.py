"""The copies of a model's parameters on devices other than the model's.

Gradients of the copies find their way back to the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress
from operator import attrgetter, methodcaller, ne, not_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from parawrap._private_names import IS_PARAMETER, copy_all, version_of
from parawrap.backends import transfer
from parawrap.engine.batched_copies import (
    Pack,
    bytes_of_all,
    copies_on,
    pack_small,
    send_together,
)
from parawrap.engine.survey import storage_of

_requires_grad = attrgetter("requires_grad")
_is_leaf = attrgetter("is_leaf")
_dtype_of = attrgetter("dtype")
_layout_of = attrgetter("layout")
_address_of = methodcaller("data_ptr")
_STRIDED = frozenset({torch.strided})
_last_step = object()
# Of the elements of a pack, at least so many must have a gradient for all to travel; a guess. Below
# it, more zeros than gradients would travel, and be added up
_LEAST_PART = 0.5


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


class Sources:
    """Tensors that have copies elsewhere, as they were before these copies were made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._versioned = [tensor for tensor in tensors if not tensor.is_inference()]
        # First the versions: a write that comes meanwhile makes the copies stale
        self._then = self._read()
        self._memory_then = _read_memory(tensors)

    def have_changed(self) -> bool:
        """True if one was written, moved, frozen, or unfrozen."""
        if not self.tensors:
            return False
        return self._read() != self._then or self.have_moved()

    def have_moved(self) -> bool:
        """True if one has other memory, or another dtype: ``p.data = x`` changes one of them."""
        return bool(self.tensors) and _read_memory(self.tensors) != self._memory_then

    def _read(self) -> tuple[object, list[int], list[bool]]:
        # Fused optimizers write without a new version, so the steps of all optimizers count too
        flags = [*map(_requires_grad, self.tensors)]
        return _last_step, [*map(version_of, self._versioned)], flags


def _read_memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.dtype]]:
    """Return where tensors lie, and their dtypes."""
    dtypes = [*map(_dtype_of, tensors)]
    if set(map(_layout_of, tensors)) <= _STRIDED:
        return [*map(_address_of, tensors)], dtypes
    # A sparse tensor has no address
    strided = torch.strided
    addresses = [each.data_ptr() if each.layout is strided else id(each) for each in tensors]
    return addresses, dtypes


# Two nodes lie between a parameter and its copies. `_Broadcast`, one per device, runs backward on a
# stream of that device: torch runs a node on the stream that was current when its first output on
# an accelerator was made. `_AtHome`, one for all devices, runs on the caller's stream at home:
# there torch adds up what the devices send, and it warns of gradients from other streams.
#
# Edges of three kinds lead from `_Broadcast` to `_AtHome`:
#
# - One per pack of small parameters, for their gradients as one flat tensor. torch adds it up once
#   per device; the gradients of a thousand biases would be a thousand additions per device.
# - One per parameter, for a gradient that goes alone: of a large parameter, as its addition takes
#   longer than the call that starts it; a sparse one; and one of few in a backward pass. A
#   reentrant checkpoint runs the node once per segment, and would send all packs each time.
# - One for a vector on the CPU, with a 1 per parameter that has its gradient in a flat tensor.
#   torch adds these vectors too, so the sum says which parameters have a gradient on any device.
#   The others must get None, and not the zeros that fill their places.
#
# Both nodes save nothing, so one graph serves any number of backward passes.


class _AtHome(torch.autograd.Function):
    """From parameters to the edges that `_Broadcast` sends gradients along.

    It runs on the caller's stream, where torch adds up the gradients of all devices.
    """

    @staticmethod
    def forward(
        ctx: Any, packs: Sequence[Pack], *originals: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that a call does not use gets no gradient
        ctx.packs = packs
        same = [*map(torch.Tensor.detach, originals)]
        # Of the other outputs only the shape, the dtype, and the device count. All elements of one
        # have the same memory, which nothing reads
        flats = [same[pack.indices[0]].new_empty_strided((pack.size,), (0,)) for pack in packs]
        are_packed = torch.empty_strided((len(same),), (0,), dtype=torch.float32, device="cpu")
        return (*same, *flats, are_packed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # The parameters own the gradients from here on, and torch adds to each of them in place.
        # They come in the order of `forward`: one per parameter, one per pack, and the vector
        count = len(gradients) - len(ctx.packs) - 1
        found = [
            None if gradient is None else _without_neighbors(gradient)
            for gradient in gradients[:count]
        ]
        *flats, are_packed = gradients[count:]
        # Without a vector, there is no flat tensor. It is on the CPU, so no device waits
        sums = [] if are_packed is None else are_packed.tolist()
        for pack, flat in zip(ctx.packs, flats, strict=True):
            if flat is None:
                continue
            are_present = [*map(bool, pack.pick(sums))]
            pieces = _own_copies([*compress(pack.split(flat), are_present)])
            for index, piece in zip(compress(pack.indices, are_present), pieces, strict=True):
                alone = found[index]  # from another device
                found[index] = piece if alone is None else piece + alone
        return (None, *found)


class _Broadcast(torch.autograd.Function):
    """From the edges of `_AtHome` to the copies of the parameters on one device.

    The gradients of the copies return together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packs: Sequence[Pack],
        home: torch.device,
        copies: Sequence[torch.Tensor],
        *edges: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a reentrant checkpoint runs the node once per segment
        ctx.packs = packs
        ctx.home = home
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        alone: list[torch.Tensor | None] = [*gradients]
        dense = [
            gradient if gradient is not None and gradient.layout is torch.strided else None
            for gradient in gradients
        ]
        flats: list[torch.Tensor | None] = []
        are_packed = [0.0] * len(alone)
        for pack in ctx.packs:
            are_present = [gradient is not None for gradient in pack.pick(dense)]
            elements = sum(compress(pack.sizes, are_present))
            if not any(are_present) or elements < _LEAST_PART * pack.size:
                flats.append(None)
                continue
            flats.append(transfer(pack.flatten(dense), ctx.home))
            for index in compress(pack.indices, are_present):
                are_packed[index] = 1.0
                alone[index] = None
        present = [index for index, gradient in enumerate(alone) if gradient is not None]
        sent = [gradient for gradient in alone if gradient is not None]
        for index, arrived in zip(present, send_together(sent, ctx.home), strict=True):
            alone[index] = arrived
        vector = None
        if any(are_packed):
            vector = torch.tensor(are_packed, dtype=torch.float32, device="cpu")
        return (None, None, None, *alone, *flats, vector)


def _own_copies(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies that share no memory and no version, in the memory formats of the pieces."""
    # A graph does not record the write below, and batches of gradients have no memory to write
    if torch.is_grad_enabled() or not storage_of(pieces[0]):
        return [piece.clone() for piece in pieces]
    copies = [*map(torch.empty_like, pieces)]
    copy_all(copies, pieces)
    return copies


def _without_neighbors(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares its memory with no other.

    Tensors that traveled together share a version, and one of them would keep the memory of all.
    """
    if not storage_of(tensor):
        return tensor  # sparse, or a batch of gradients, which torch makes for `is_grads_batched`
    is_alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_alone else tensor.clone()


class VersionedCopies:
    """Copies of tensors with the versions that they had.

    The versions show whether forward wrote a copy in place, which is refused: the original does not
    get the write.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note the versions of now. `pairs` are originals, each with its copy."""
        # An inference tensor has no version
        versioned = [(each, copied) for each, copied in pairs if not copied.is_inference()]
        self._originals = [original for original, _ in versioned]
        self._copied = [copied for _, copied in versioned]
        self._versions = [*map(version_of, self._copied)]

    def find_written(self) -> torch.Tensor | None:
        """Return an original with a copy that was written in place; None if there is none."""
        now = [*map(version_of, self._copied)]
        if now == self._versions:
            return None
        are_written = map(ne, now, self._versions)
        return next(compress(self._originals, are_written))


class ParameterCopies:
    """Copies of parameters on devices other than the model's.

    They are made at one moment, and shared by the lanes of each device. With gradients, they are
    part of the graph of one call, and each call makes new ones. Without, they are kept until the
    parameters change (`Sources.have_changed`). New copies are new tensors: a graph may hold the old
    ones.

    Attributes:
        originals: The parameters.
        by_device: Their copies, in the same order.
        sources: The parameters as they were before the copies were made.
        versions: The versions of the copies.
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
        self.sources = Sources(self.originals)
        self.is_linked = self.must_link() and not detach
        self.by_device: dict[torch.device, list[torch.Tensor]] = {}
        if self.is_linked:
            # Inference tensors cannot be part of a graph.
            with torch.inference_mode(False):
                self.by_device = self._link()
        elif self.originals:
            self.by_device = copies_on(self.devices, self.originals)
        for original, copied in self.pairs():
            attributes = vars(copied)
            attributes.update(vars(original))
            if isinstance(original, torch.nn.Parameter):
                attributes[IS_PARAMETER] = True
        self.versions = VersionedCopies(self.pairs())

    @property
    def nbytes(self) -> int:
        """The number of bytes that were copied."""
        return len(self.devices) * bytes_of_all(self.originals)

    def must_link(self) -> bool:
        """True if gradients of a call of this moment must flow through the copies."""
        return torch.is_grad_enabled() and any(map(_requires_grad, self.originals))

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with each of its copies."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for copies in self.by_device.values():
            found += zip(self.originals, copies, strict=True)
        return found

    def clear(self) -> None:
        """Let go of the copies, and of the graph that leads to the parameters.

        While the graph lives, its nodes for the parameters remember the stream of the call.
        """
        self.by_device = {}
        self.versions = VersionedCopies(())

    def _link(self) -> dict[torch.device, list[torch.Tensor]]:
        """Return copies that gradients flow through.

        All leaves have the same nodes; each computed tensor, such as a parametrized weight, goes
        alone.
        """
        originals = self.originals
        indices = range(len(originals))
        are_leaves = [*map(_is_leaf, originals)]
        leaves = [*compress(indices, are_leaves)]
        computed = [*compress(indices, map(not_, are_leaves))]
        # A copy of a frozen parameter is in no graph
        learning = [index for index in leaves if originals[index].requires_grad]
        sources = [originals[index] for index in learning]
        packs = pack_small(sources)
        edges: tuple[torch.Tensor, ...] = ()
        if sources:
            edges = _AtHome.apply(packs, *sources)  # type: ignore[no-untyped-call]
        found = copies_on(self.devices, [originals[index] for index in leaves])
        for device, copies in found.items():
            by_index = dict(zip(leaves, copies, strict=True))
            if sources:
                home = sources[0].device
                arguments = packs, home, [by_index[index] for index in learning]
                linked = _Broadcast.apply(*arguments, *edges)  # type: ignore[no-untyped-call]
                by_index.update(zip(learning, linked, strict=True))
            for index in computed:
                # Its own graph leads to leaves, so torch's plain copy is enough.
                by_index[index] = transfer(originals[index], device)
            found[device] = [by_index[index] for index in indices]
        return found


NO_COPIES = ParameterCopies((), ())
