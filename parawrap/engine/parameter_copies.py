"""The copies of a model's parameters on devices other than the model's.

Gradients of the copies find their way back to the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress
from operator import attrgetter, methodcaller, ne
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
_dtype_of = attrgetter("dtype")
_layout_of = attrgetter("layout")
_address_of = methodcaller("data_ptr")
_STRIDED = frozenset({torch.strided})
_last_step = object()  # another object after each step of an optimizer
# A pack of gradients travels as one tensor if at least this part of its elements has a gradient;
# zeros fill the rest. With a smaller part, more zeros than gradients would travel; a guess that no
# test has contradicted
_LEAST_PART = 0.5


# A write in place raises the version of a parameter, so stale copies show without a comparison of
# values. The steps of fused optimizers are the exception: they write and leave the version alone.
# Therefore each step of any optimizer makes kept copies stale.
@cache  # torch keeps each registered hook, so there is one per process
def note_optimizer_steps() -> None:
    """Notice the steps of all optimizers: fused ones do not change the versions of parameters."""

    def note(*_: object) -> None:
        global _last_step
        # Not a count: two threads that count at the same time may undo each other's step
        _last_step = object()

    register_optimizer_step_post_hook(note)


class Sources:
    """Tensors that have copies elsewhere, as they were before these copies were made.

    It borrows the tensors, and reads them only.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._versioned = [tensor for tensor in tensors if not tensor.is_inference()]
        # The caller copies the tensors afterwards, so a write in between makes the copies stale
        self._facts = self._read()
        self._memory = _read_memory(tensors)

    def have_changed(self) -> bool:
        """True if a tensor was written, moved, frozen, or unfrozen."""
        if not self.tensors:
            return False
        return self._read() != self._facts or self.have_moved()

    def have_moved(self) -> bool:
        """True if a tensor has other memory or another dtype, as after ``p.data = x``."""
        return bool(self.tensors) and _read_memory(self.tensors) != self._memory

    def _read(self) -> tuple[object, list[int], list[bool]]:
        """Return the last step of an optimizer, the versions, and the flags `requires_grad`."""
        flags = [*map(_requires_grad, self.tensors)]
        return _last_step, [*map(version_of, self._versioned)], flags


def _read_memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.dtype]]:
    """Return the addresses and the dtypes of tensors."""
    dtypes = [*map(_dtype_of, tensors)]
    if set(map(_layout_of, tensors)) <= _STRIDED:
        return [*map(_address_of, tensors)], dtypes
    # A sparse tensor has no address: its identity stands for it
    strided = torch.strided
    addresses = [each.data_ptr() if each.layout is strided else id(each) for each in tensors]
    return addresses, dtypes


# Two nodes of autograd's graph lie between a parameter and its copies:
#
#   parameter ── _AtHome ─┬─ _Broadcast of cuda:1 ── copy on cuda:1
#                         └─ _Broadcast of cuda:2 ── copy on cuda:2
#
# `_Broadcast`, one per device, runs backward on a stream of that device: torch runs a node on the
# stream that was current when its first output on an accelerator was made. `_AtHome`, one for all
# devices, runs on the caller's stream at home: there torch adds up the gradients of all devices,
# and it warns of gradients from other streams.
#
# Three kinds of edges lead from `_Broadcast` to `_AtHome`:
#
# - One per pack of small parameters, for their gradients as one flat tensor. torch adds it up once
#   per device; the gradients of a thousand biases would be a thousand additions per device.
# - One per parameter, for a gradient that travels alone. That is the gradient of a large parameter,
#   as its addition takes longer than the call that starts it; a sparse gradient; and one of the few
#   gradients of a backward pass that reaches few parameters. A reentrant checkpoint runs such a
#   pass per segment, and each would send all packs.
# - One for a vector on the CPU, with a 1 for each parameter whose gradient is in a flat tensor.
#   torch adds up these vectors too, so the sum shows which parameters have a gradient on any
#   device. The others must get None, and not the zeros that fill their places.
#
# Neither node saves tensors, so one graph serves any number of backward passes.


class _AtHome(torch.autograd.Function):
    """Lead from the parameters to the edges above. See the comment."""

    @staticmethod
    def forward(
        ctx: Any, packs: Sequence[Pack], *originals: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that a call does not use gets no gradient
        ctx.packs = packs
        same = [*map(torch.Tensor.detach, originals)]
        # autograd reads only the shape, the dtype, and the device of the other outputs. With a
        # stride of 0, all elements of one lie in the same few bytes
        flats: list[torch.Tensor] = []
        for pack in packs:
            first, *_ = pack.pick(same)
            flats.append(first.new_empty_strided((pack.size,), (0,)))
        are_packed = torch.empty_strided((len(same),), (0,), dtype=torch.float32, device="cpu")
        return (*same, *flats, are_packed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # In the order of the outputs of `forward`: one per parameter, one per pack, and the vector
        count = len(gradients) - len(ctx.packs) - 1
        # The parameters own the returned gradients, and torch adds to each of them in place
        found = [
            None if gradient is None else _without_neighbors(gradient)
            for gradient in gradients[:count]
        ]
        *flats, are_packed = gradients[count:]
        # Without the vector, there is no flat tensor. No device is read: the vector is on the CPU
        sums = [] if are_packed is None else are_packed.tolist()
        for pack, flat in zip(ctx.packs, flats, strict=True):
            if flat is None:
                continue
            are_present = [*map(bool, pack.pick(sums))]
            pieces = _own_copies([*compress(pack.split(flat), are_present)])
            for index, piece in zip(compress(pack.indices, are_present), pieces, strict=True):
                alone = found[index]  # of a device where the gradient traveled alone
                found[index] = piece if alone is None else piece + alone
        return (None, *found)


class _Broadcast(torch.autograd.Function):
    """Lead from the edges above to the copies of the parameters on one device."""

    @staticmethod
    def forward(
        ctx: Any,
        packs: Sequence[Pack],
        home: torch.device,
        copies: Sequence[torch.Tensor],
        *edges: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        # A reentrant checkpoint runs the node once per segment, with few gradients. torch must not
        # make zeros for the others
        ctx.set_materialize_grads(False)
        ctx.packs = packs
        ctx.home = home
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dense: list[torch.Tensor | None] = []
        for gradient in gradients:
            is_dense = gradient is not None and gradient.layout is torch.strided
            dense.append(gradient if is_dense else None)

        # Gradients that travel in a pack
        alone = [*gradients]
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
        vector = None
        if any(are_packed):
            vector = torch.tensor(are_packed, dtype=torch.float32, device="cpu")

        # All others
        indices = [index for index, gradient in enumerate(alone) if gradient is not None]
        sent = [gradient for gradient in alone if gradient is not None]
        for index, arrived in zip(indices, send_together(sent, ctx.home), strict=True):
            alone[index] = arrived
        return (None, None, None, *alone, *flats, vector)


def _own_copies(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies that share no memory and no version, in the memory formats of the pieces."""
    # `copy_all` cannot write if a graph records the backward pass (``create_graph=True``), nor into
    # a batch of gradients, which torch makes for `is_grads_batched` and which has no memory
    if torch.is_grad_enabled() or not storage_of(pieces[0]):
        return [piece.clone() for piece in pieces]
    copies = [*map(torch.empty_like, pieces)]
    copy_all(copies, pieces)
    return copies


def _without_neighbors(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it if it shares its memory with other tensors.

    Tensors that traveled together share a version, and one of them would keep the memory of all.
    """
    if not storage_of(tensor):
        return tensor  # sparse, or a batch of gradients
    is_alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_alone else tensor.clone()


class VersionedCopies:
    """Copies of tensors with the versions that they had.

    The versions show whether forward wrote a copy in place. Such a write is refused, since the
    original does not get it.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note the present versions. `pairs` are originals, each with its copy."""
        self._originals: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        for original, copied in pairs:
            if not copied.is_inference():  # an inference tensor has no version
                self._originals.append(original)
                self._copies.append(copied)
        self._versions = [*map(version_of, self._copies)]

    def find_written(self) -> torch.Tensor | None:
        """Return the first original whose copy was written in place; None if there is none."""
        now = [*map(version_of, self._copies)]
        if now == self._versions:
            return None
        are_written = map(ne, now, self._versions)
        return next(compress(self._originals, are_written))


class ParameterCopies:
    """Copies of parameters on devices other than the model's.

    The lanes of a device share its copies. With gradients, copies are part of the graph of one
    call, and each call makes new ones. Without, copies are kept until the parameters change
    (`Sources.have_changed`). New copies are new tensors: a graph may hold the old ones.

    With `detach`, no gradients flow from the copies to the parameters.

    Attributes:
        devices: The devices with copies.
        originals: The parameters, which are borrowed.
        by_device: By device, their copies, in the same order.
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
            # Before the copies are made, so that no later step is missed
            note_optimizer_steps()
            self.originals += originals
        self.sources = Sources(self.originals)
        self.is_linked = self.must_link() and not detach
        self.by_device: dict[torch.device, list[torch.Tensor]] = {}
        if self.is_linked:
            # Inference tensors cannot be part of a graph
            with torch.inference_mode(False):
                self.by_device = self._make_linked_copies()
        elif self.originals:
            self.by_device = copies_on(self.devices, self.originals)
        pairs = self.pairs()
        for original, copied in pairs:
            attributes = vars(copied)
            attributes.update(vars(original))
            if isinstance(original, torch.nn.Parameter):
                attributes[IS_PARAMETER] = True
        self.versions = VersionedCopies(pairs)

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

    def _make_linked_copies(self) -> dict[torch.device, list[torch.Tensor]]:
        """Return copies that gradients flow through, by device.

        The leaves of the graph share the two nodes above. Other parameters were computed, such as a
        parametrized weight. Each of these travels alone.
        """
        originals = self.originals
        leaves = [each for each in originals if each.is_leaf]
        computed = [each for each in originals if not each.is_leaf]
        # A copy of a frozen parameter is in no graph
        learning = [each for each in leaves if each.requires_grad]
        packs = pack_small(learning)
        edges: tuple[torch.Tensor, ...] = ()
        if learning:
            edges = _AtHome.apply(packs, *learning)  # type: ignore[no-untyped-call]
        found = copies_on(self.devices, leaves)
        for device, copies in found.items():
            copy_of = dict(zip(map(id, leaves), copies, strict=True))
            if learning:
                home = learning[0].device
                unlinked = [copy_of[id(each)] for each in learning]
                arguments = packs, home, unlinked, *edges
                linked = _Broadcast.apply(*arguments)  # type: ignore[no-untyped-call]
                copy_of.update(zip(map(id, learning), linked, strict=True))
            for each in computed:
                # torch's own copy is linked to the graph of the original
                copy_of[id(each)] = transfer(each, device)
            found[device] = [copy_of[id(each)] for each in originals]
        return found


NO_COPIES = ParameterCopies((), ())
