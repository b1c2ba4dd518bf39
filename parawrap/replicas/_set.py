"""The replicas of one module for the lanes of one session, and what keeps them fresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from parawrap.errors import ReplicaError
from parawrap.replicas._ledger import Ledger
from parawrap.replicas._shell import Replica
from parawrap.replicas._tensors import Mirror, Tensors
from parawrap.replicas._watch import Watch, may_be_written_unseen, module_tree

__all__ = ["Freshness", "ReplicaSet", "home_of"]


@dataclass(slots=True)
class Freshness:
    """How often something was copied into replicas, and how many bytes in all."""

    refreshes: int = 0
    copied_bytes: int = 0


def home_of(module: torch.nn.Module) -> torch.device | None:
    """The one device that a module's parameters and buffers are on; None for a module without any.

    Raises:
        ReplicaError: they are on several devices; the message names two of them.
    """
    home: torch.device | None = None
    first = ""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if home is None:
            home, first = tensor.device, name
        elif tensor.device != home:
            msg = (
                f"the module lies on several devices: {first!r} on {home} and {name!r} on {tensor.device}. A replica of it "
                "would need as many devices again; put the module on one device, or make its parts parallel one by one"
            )
            raise ReplicaError(msg)
    return home


class ReplicaSet:
    """One module for each lane: the original itself in lane 0 where it lies there, shells in the other lanes.

    The caller sees to it that no lane runs during `refresh`. Lives as long as the session.
    """

    def __init__(self, module: torch.nn.Module, devices: Sequence[torch.device]) -> None:
        _refuse_wrapped(module)
        self.original = module
        self.devices = tuple(devices)
        self.freshness = Freshness()
        self._lanes: list[Replica | None] = []  # None: the original itself
        self._mirrors: dict[torch.device, Mirror] = {}
        self._buffers = Ledger()
        self._names: dict[torch.nn.Module, str] = {}
        self._watch = Watch([])
        self._unseen: list[torch.Tensor] = []
        self._home: torch.device | None = None
        self._probe: torch.Tensor | None = None
        self._ready = False

    def modules(self, lanes: int) -> list[torch.nn.Module]:
        """What each of the first lanes runs."""
        return [self.original if replica is None else replica.module for replica in self._lanes[:lanes]]

    def ready(self) -> bool:
        """Whether every parameter has a shape already; a lazy module gets its shapes from its first, plain call."""
        if not self._ready:
            self._ready = not any(map(is_lazy, [*self.original.parameters(), *self.original.buffers()]))
        return self._ready

    def stale(self) -> bool:
        """Whether the module changed since the last `refresh`: a tensor, an attribute, a submodule, its device."""
        if not self._lanes:
            return True
        return (
            self._moved()
            or not self._watch.intact()
            or any(mirror.originals.changed() for mirror in self._mirrors.values())
            or bool(self._unseen)
            or bool(self._buffers.changed())
            or self._unlinked()
        )

    def refresh(self) -> None:
        """Bring every replica into line with the module."""
        if not self._lanes or self._moved():
            self._build()
        elif [module for module, _ in module_tree(self.original)] != list(self._names):
            self._rebuild()
        changed = self._watch.changed()
        self._refresh_tensors()
        if any(not mirror.linked for mirror in self._mirrors.values()):
            changed = list(self._names)  # copies were made anew, or are to be linked: every shell takes them up
            if torch.is_grad_enabled():
                for mirror in self._mirrors.values():
                    mirror.link()
        if changed:
            self._fill(changed)

    def originals(self, lanes: int) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
        """For each of the first lanes, what finds the module's own tensor that a tensor of that lane is a copy of."""
        return [_itself if replica is None else replica.tensors.original_of for replica in self._lanes[:lanes]]

    def write_back(self) -> None:
        """Keep lane 0's buffer updates where lane 0 ran a replica and not the original."""
        if self._lanes[0] is not None:
            self._lanes[0].write_back()

    def scratch(self) -> torch.nn.Module:
        """A replica at home whose buffers nobody else has, for a run that must leave no trace."""
        home = home_of(self.original) or self.devices[0]
        return Replica(self.original, Tensors(home, None, Ledger())).module

    def _refresh_tensors(self) -> None:
        written = sum(mirror.refresh() for mirror in self._mirrors.values())
        buffers = list(dict.fromkeys([*self._buffers.changed(), *self._unseen]))
        written += sum(replica.refresh_buffers(buffers) for replica in self._shelled())
        for buffer in buffers:
            self._buffers.enter(buffer)
        if written:
            self.freshness.refreshes += 1
            self.freshness.copied_bytes += written

    def _shelled(self) -> list[Replica]:
        return [replica for replica in self._lanes if replica is not None]

    def _moved(self) -> bool:
        return self._probe is not None and self._probe.device != self._home

    def _unlinked(self) -> bool:
        return torch.is_grad_enabled() and any(not mirror.linked for mirror in self._mirrors.values())

    def _build(self) -> None:
        tensors = [*self.original.named_parameters(), *self.original.named_buffers()]
        self._home = home_of(self.original)
        self._probe = tensors[0][1] if tensors else None
        if self._home is not None and self._home.type == "meta":
            msg = f"no replica of the module can be made: {tensors[0][0]!r} is on the meta device and has no data to copy"
            raise ReplicaError(msg)
        at_home = (None, self._home) if self._home is not None else (None, *self.devices)
        self._mirrors = {device: Mirror(device) for device in self.devices if device not in at_home}
        self._buffers = Ledger()
        self._lanes = [
            None
            if lane == 0 and device in at_home
            else Replica(self.original, Tensors(device, self._mirrors.get(device), self._buffers))
            for lane, device in enumerate(self.devices)
        ]
        self._look()

    def _rebuild(self) -> None:
        """Make the shells anew for another tree of modules; tensors that are still in it keep their copies."""
        kept = [*self.original.parameters(), *self.original.buffers()]
        self._buffers.keep(kept)
        for mirror in self._mirrors.values():
            mirror.keep(kept)
        for replica in self._shelled():
            replica.tensors.keep(kept)
            replica.build()
        self._look()

    def _fill(self, modules: Sequence[torch.nn.Module]) -> None:
        for replica in self._shelled():
            for module in modules:
                replica.fill(module, self._names[module])
        self._look()

    def _look(self) -> None:
        self._names = dict(module_tree(self.original))
        if self._shelled():
            self._watch = Watch(list(self._names))
            self._unseen = [
                buffer
                for module in self.original.modules()
                for buffer in module._buffers.values()
                if buffer is not None and may_be_written_unseen(module, buffer)
            ]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refuse_wrapped(module: torch.nn.Module) -> None:
    for part, name in module_tree(module):
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            place = f"submodule {name!r}" if name else "the module"
            msg = f"no replica of {place} can be made: DistributedDataParallel is parallel already; give what it wraps"
            raise ReplicaError(msg)
