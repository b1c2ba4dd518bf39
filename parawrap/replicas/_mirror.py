"""The copies of a module's tensors on another device: written there, never rebuilt, and the gradients' way home."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.replicas._ledger import Ledger, lasting
from parawrap.replicas._parcel import Parcel, can_be_sent

__all__ = ["Mirror", "send"]


class _Broadcast(torch.autograd.Function):
    """From the originals to their copies: hands the copies forward, and brings the gradients home.

    The copies are made already; nothing is computed. It saves nothing, so one graph serves any number of backwards.
    """

    @staticmethod
    def forward(ctx: Any, copies: Sequence[torch.Tensor], *originals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = originals[0].device
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        there = Parcel([gradient for gradient in gradients if gradient is not None]).at(ctx.home)
        # `.data`: pieces of one pack would otherwise share a version counter, and one gradient's `zero_` touch the others.
        home = iter(there if torch.is_grad_enabled() else [gradient.data for gradient in there])
        return None, *(None if gradient is None else next(home) for gradient in gradients)


class _AtHome(torch.autograd.Function):
    """Stands before parameters whose gradients come from other devices, on the stream on which torch adds those up."""

    @staticmethod
    def forward(ctx: Any, *originals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(original.detach() for original in originals)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: ARG004
        return gradients


class Mirror:
    """The copies of a module's tensors on one other device, shared by the lanes there; written while those are idle."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.originals = Ledger()
        self.linked = False
        self.remade = False
        self.origins: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._links: dict[int, torch.Tensor] = {}
        self._due: dict[int, torch.Tensor] = {}

    def copy_of(self, original: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor; the same tensor has the same copy. One that is new is `unwritten` yet."""
        key = id(original)
        if key not in self._copies:
            with lasting():
                copy = self._made(original)
            if isinstance(original, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=original.requires_grad)
            self._copies[key] = copy
            self.origins[id(copy)] = original
            self.originals.enter(original)
            self.linked = False
        return self._links.get(key, self._copies[key])

    def outdated(self) -> list[torch.Tensor]:
        """The originals that changed since they were written; those of another form than before get new copies.

        `remade` says whether there were such, whose copies no shell has yet.
        """
        changed = self.originals.changed()
        self.remade = not all(map(self._takes, changed))
        if any(tensor.requires_grad != (id(tensor) in self._links) for tensor in changed):
            self.linked = False
        for tensor in changed:
            if not self._takes(tensor):  # of another dtype, shape or part in the graph
                self._forget(id(tensor))
                self.copy_of(tensor)
        return changed

    def held(self) -> Iterable[torch.Tensor]:
        """The copies."""
        return self._copies.values()

    def unwritten(self) -> list[torch.Tensor]:
        """The originals that have a copy in which nothing is written yet."""
        return list(self._due.values())

    def write(self, originals: Sequence[torch.Tensor], parcel: Parcel) -> None:
        """Write into the copies of these originals what they are now, which is what the parcel holds."""
        copies = [self._copies[id(tensor)] for tensor in originals]
        parcel.write(copies)
        backend_of(self.device.type).flush(copies)
        for tensor in originals:
            self.originals.enter(tensor)
            self._due.pop(id(tensor), None)

    def unlink(self) -> None:
        """From now on hand out plain copies. The old graph must go before a new one is made: it knows the old shapes."""
        for link in self._links.values():
            self.origins.pop(id(link), None)
        self._links = {}

    def link(self) -> None:
        """From now on hand out copies through which gradients reach the originals.

        The links share the copies' memory, so they need not be made again when the copies are refreshed.
        """
        originals = [tensor for tensor in self.originals if tensor.requires_grad]
        links: Sequence[torch.Tensor] = ()
        if originals:
            copies = [self._copies[id(tensor)] for tensor in originals]
            with torch.inference_mode(False), torch.enable_grad():
                at_home = _AtHome.apply(*originals)  # type: ignore[no-untyped-call]
                links = _Broadcast.apply(copies, *at_home)  # type: ignore[no-untyped-call]
        self._links = {id(tensor): link for tensor, link in zip(originals, links, strict=True)}
        self.origins.update((id(link), tensor) for tensor, link in zip(originals, links, strict=True))
        self.linked = True

    def keep(self, keys: AbstractSet[int]) -> None:
        """Let go of the copies of all tensors but those with these ids."""
        self.originals.keep(keys)
        for key in set(self._copies) - keys:
            self._forget(key)

    def _made(self, original: torch.Tensor) -> torch.Tensor:
        values = original.detach()
        if not can_be_sent(values):
            return values.to(self.device, copy=True)
        self._due[id(original)] = original
        return torch.empty_like(values, device=self.device)

    def _forget(self, key: int) -> None:
        self._due.pop(key, None)
        for held in (self._copies.pop(key), self._links.pop(key, None)):
            self.origins.pop(id(held), None)

    def _takes(self, original: torch.Tensor) -> bool:
        copy = self._copies[id(original)]
        return (
            copy.dtype == original.dtype
            and copy.shape == original.shape
            and copy.requires_grad == (original.requires_grad and isinstance(original, torch.nn.Parameter))
        )


def send(wanted: Iterable[tuple[Mirror, Sequence[torch.Tensor]]]) -> int:
    """Write those originals into their copies, packed once for all mirrors that want the same; the bytes written."""
    groups: dict[tuple[int, ...], tuple[Sequence[torch.Tensor], list[Mirror]]] = {}
    for mirror, originals in wanted:
        if originals:
            groups.setdefault(tuple(map(id, originals)), (originals, []))[1].append(mirror)
    with lasting():
        for originals, mirrors in groups.values():
            parcel = Parcel([tensor.detach() for tensor in originals])
            for mirror in mirrors:
                mirror.write(originals, parcel)
    return sum(tensor.nbytes * len(mirrors) for originals, mirrors in groups.values() for tensor in originals)
