"""The copies of a model's parameters on another device, and the way of their gradients back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from parawrap.backends import backend_of, transfer
from parawrap.replicas._batched_copies import PackedTensors, bytes_of, copies_at, lasting
from parawrap.replicas._private_names import make_subclass

__all__ = ["Mirror", "link_view", "send_to_mirrors"]


class _Link(torch.autograd.Function):
    """From a parameter to its copy. Nothing is computed; the gradient of the copy goes to the parameter's device.

    It saves nothing, so one graph serves any number of backward passes.
    """

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.home = original.device
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return transfer(gradients[0], ctx.home), None


class _View(torch.autograd.Function):
    """From a tensor to another tensor object with the same memory and version, of another class.

    Unlike a view, it keeps its place in the graph when the memory is written in place, as an optimizer does.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        return make_subclass(kind, tensor.detach())  # `as_subclass` would make a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ARG004
        return gradients[0], None


def link_view(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of class `kind` with the memory and the version of `tensor`. Gradients flow through it."""
    if not tensor.requires_grad:
        return tensor.detach().as_subclass(kind)
    linked: torch.Tensor = _View.apply(tensor, kind)  # type: ignore[no-untyped-call]
    return linked


class Mirror:
    """The copies of parameters on one device, shared by the lanes there; written while those are idle."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._originals: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._links: dict[int, torch.Tensor] = {}

    def take(self, originals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep copies of these tensors and of no others; return the tensors that had copies, which may be stale."""
        self._originals = {id(tensor): tensor for tensor in originals}
        fits = {key for key, tensor in self._originals.items() if self._fits(key, tensor)}
        self._copies = {key: copy for key, copy in self._copies.items() if key in fits}
        self._links = {key: link for key, link in self._links.items() if key in fits}
        missing = [tensor.detach() for key, tensor in self._originals.items() if key not in fits]
        with lasting():
            made = copies_at(self.device, missing)
        self._copies.update(zip([key for key in self._originals if key not in fits], made, strict=True))
        return [tensor for key, tensor in self._originals.items() if key in fits]

    def unlink(self) -> None:
        """Make new links at the next use."""
        self._links = {}

    def link(self, original: torch.Tensor) -> torch.Tensor:
        """Return the copy of a parameter. Its gradients reach the parameter."""
        key = id(original)
        if not original.requires_grad:
            return self._copies[key]
        if key not in self._links:
            with torch.inference_mode(False), torch.enable_grad():
                # On the caller's stream at home, where torch adds up the gradients of all devices.
                at_home = original[...]
                self._links[key] = _Link.apply(at_home, self._copies[key])  # type: ignore[no-untyped-call]
        return self._links[key]

    def held(self) -> Iterable[torch.Tensor]:
        """The copies."""
        return self._copies.values()

    def write(self, originals: Sequence[torch.Tensor], parcel: PackedTensors) -> None:
        """Write the parcel, which holds these originals, into their copies. Versions stay what they are."""
        copies = [self._copies[id(tensor)].data for tensor in originals]
        parcel.write(copies)
        backend_of(self.device.type).flush(copies)

    def advance(self, originals: Iterable[torch.Tensor]) -> None:
        """Advance the versions of copies like an in-place write: a graph that saved one refuses its backward pass."""
        copies = [self._copies[id(tensor)] for tensor in originals if id(tensor) in self._copies]
        torch.autograd.graph.increment_version(copies)

    def _fits(self, key: int, original: torch.Tensor) -> bool:
        copy = self._copies.get(key)
        linked = key in self._links
        return (
            copy is not None
            and copy.dtype == original.dtype
            and copy.shape == original.shape
            and (original.requires_grad or not linked)
        )


def send_to_mirrors(mirrors: Collection[Mirror], originals: Sequence[torch.Tensor]) -> int:
    """Write originals, packed once, into their copies in all mirrors; return the bytes written."""
    if not (mirrors and originals):
        return 0
    with lasting():
        parcel = PackedTensors([tensor.detach() for tensor in originals])
        for mirror in mirrors:
            mirror.write(originals, parcel)
    return sum(map(bytes_of, originals)) * len(mirrors)
