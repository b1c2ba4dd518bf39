"""The tensors of one replica: its device's copies of parameters, and buffers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from operator import is_
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.replicas._ledger import Ledger, lasting
from parawrap.replicas._mirror import Mirror
from parawrap.replicas._parcel import Parcel, can_be_sent
from parawrap.tree import flatten, unflatten

__all__ = ["Tensors"]


class Tensors:
    """The tensors of one replica: parameters from the original or from its device's mirror, buffers of its own."""

    def __init__(self, device: torch.device, home: torch.device | None, mirror: Mirror | None, buffers: Ledger) -> None:
        self.device = device
        self.home = home
        self._containers: dict[int, tuple[Any, list[Any]]] = {}
        self.asked: set[int] = set()  # the ids of the originals that were asked for; whoever fills a shell reads it
        self.mirror = mirror
        self._ledger = buffers
        self._own: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._origins: dict[int, torch.Tensor] = {}
        self._new: dict[int, torch.Tensor] = {}

    def parameter(self, original: torch.Tensor) -> torch.Tensor:
        self.asked.add(id(original))
        return original if self.mirror is None else self.mirror.copy_of(original)

    def buffer(self, original: torch.Tensor) -> torch.Tensor:
        """A lane's own copy, which it may write; a buffer that takes part in a graph is treated as a parameter."""
        if original.requires_grad:
            return self.parameter(original)
        key = id(original)
        self.asked.add(key)
        if key not in self._own:
            if original not in self._ledger:
                self._ledger.enter(original)
            with lasting():
                self._take(original, self._made(original))
        return self._own[key]

    def held(self) -> Iterable[torch.Tensor]:
        """The lane's own buffers."""
        return self._own.values()

    def write_new(self) -> None:
        """Write into the buffers that were made since the last time what the originals are."""
        if self._new:
            originals, self._new = list(self._new.values()), {}
            with lasting():
                copies = [self._own[id(tensor)] for tensor in originals]
                Parcel([tensor.detach() for tensor in originals]).write(copies)
                backend_of(self.device.type).flush(copies)
            for original, copy in zip(originals, copies, strict=True):
                self._versions[id(original)] = copy._version

    def renew_buffers(self, changed: Sequence[torch.Tensor]) -> int:
        """Copy those originals into new buffers of the lane's own; the bytes copied.

        New ones, because a graph that is still waiting for its backward pass may hold the present ones: written in place
        they would no longer be what that graph saved.
        """
        mine = [tensor for tensor in changed if id(tensor) in self._own]
        with lasting():
            copies = self._copied(mine)
        for tensor, own in zip(mine, copies, strict=True):
            self._forget(id(tensor))
            self._take(tensor, own)
        return sum(tensor.nbytes for tensor in mine)

    def written_by_lane(self, original: torch.Tensor, current: torch.Tensor) -> bool:
        """Whether what the replica has in the place of that buffer is not what it was given."""
        own = self._own.get(id(original))
        return current is not own or current._version != self._versions[id(original)]

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The module's tensor that this one is, or is a copy of; None for any other."""
        found = self._origins.get(id(tensor))
        return self.mirror.origins.get(id(tensor)) if found is None and self.mirror is not None else found

    def keep(self, keys: AbstractSet[int]) -> None:
        """Let go of the lane's own copies of all buffers but those with these ids."""
        for key in set(self._own) - keys:
            self._forget(key)

    def written(self) -> list[torch.Tensor]:
        """The buffers whose copies the lane has written since it was given them."""
        versions = self._versions
        return [self._origins[id(own)] for key, own in self._own.items() if own._version != versions[key]]

    def _made(self, original: torch.Tensor) -> torch.Tensor:
        values = original.detach()
        if self.home == self.device or not can_be_sent(values):
            return values.to(self.device, copy=True)
        self._new[id(original)] = original
        return torch.empty_like(values, device=self.device)

    def _copied(self, originals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = [tensor.detach() for tensor in originals]
        if self.home == self.device:
            return [tensor.clone() for tensor in values]
        # `.data`: pieces of one parcel would otherwise share a version counter, which tells what a lane writes.
        return [tensor.data for tensor in Parcel(values).at(self.device)]

    def _take(self, original: torch.Tensor, own: torch.Tensor) -> None:
        self._own[id(original)] = own
        self._versions[id(original)] = own._version
        self._origins[id(own)] = original

    def _forget(self, key: int) -> None:
        self._new.pop(key, None)
        own = self._own.pop(key)
        del self._versions[key], self._origins[id(own)]

    def attribute(self, value: Any) -> Any:
        """A plain attribute: tensors, also in a list, tuple or dict, are brought to the device; all else is shared."""
        if self.mirror is None:
            return value
        if isinstance(value, torch.Tensor):
            return self._brought(value)
        if not isinstance(value, (list, tuple, dict)):
            return value
        leaves, spec = flatten(value)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return value
        self._containers[id(value)] = value, leaves
        return unflatten(spec, [self._brought(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def has_containers(self) -> bool:
        """Whether tensors were brought here out of a list, tuple or dict."""
        return bool(self._containers)

    def containers_changed(self) -> bool:
        """Whether an attribute that is a list, tuple or dict of tensors holds others than when it was brought here."""
        return any(
            len(now := flatten(value)[0]) != len(leaves) or not all(map(is_, now, leaves))
            for value, leaves in self._containers.values()
        )

    def forget_containers(self) -> None:
        """Before every shell is filled again."""
        self._containers.clear()

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.mirror is not None
        if id(tensor) in self._own:
            return self._own[id(tensor)]
        if tensor.device != self.home:
            return tensor  # the module wants it elsewhere than where its parameters are
        if tensor.is_leaf or tensor in self.mirror.originals:
            return self.parameter(tensor)
        return tensor.to(self.device)  # computed for this call, by a hook that makes a weight, say: the graph goes along
