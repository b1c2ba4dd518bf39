"""The replicas of one module for the lanes of one session, and what keeps them fresh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from parawrap.backends import Stream, backend_of, record_use
from parawrap.errors import ReplicaError
from parawrap.replicas._ledger import Ledger
from parawrap.replicas._mirror import Mirror, send
from parawrap.replicas._pure import writes_nothing
from parawrap.replicas._shell import Replica
from parawrap.replicas._tensors import Tensors
from parawrap.replicas._watch import Watch, may_be_written_unseen, module_tree

__all__ = ["Freshness", "LaneReplica", "ReplicaSet", "home_of"]


@dataclass(slots=True)
class Freshness:
    """How often something was copied into replicas, and how many bytes in all."""

    refreshes: int = 0
    copied_bytes: int = 0


def home_of(module: torch.nn.Module) -> torch.device | None:
    """The one device that a module's tensors are on; None for a module without any.

    Raises:
        ReplicaError: they are on several devices; the message names two of them.
    """
    home: torch.device | None = None
    first = ""
    for name, tensor in _tensors(module):
        if home is None:
            home, first = tensor.device, name
        elif tensor.device != home:
            msg = (
                f"the module lies on several devices: {first!r} on {home} and {name!r} on {tensor.device}. A replica of it "
                "would need as many devices again; put the module on one device, or make its parts parallel one by one"
            )
            raise ReplicaError(msg)
    return home


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name; of a module that has neither, the first tensor that is a plain attribute."""
    own = itertools.chain(module.named_parameters(), module.named_buffers())
    first = next(own, None)
    if first is not None:
        return itertools.chain((first,), own)
    attributes = (
        (f"{name}.{key}".lstrip("."), value) for part, name in module_tree(module) for key, value in vars(part).items()
    )
    return itertools.islice(((name, value) for name, value in attributes if isinstance(value, torch.Tensor)), 1)


class LaneReplica(NamedTuple):
    """The module that one lane runs.

    `original_of` finds the module's own tensor that a tensor of the lane is a copy of. `write_back` gives the buffers that
    the lane wrote to the module; None if it has none.
    """

    lane: int
    module: Any
    original_of: Callable[[torch.Tensor], torch.Tensor | None]
    write_back: Callable[[], None] | None = None


class ReplicaSet:
    """One replica per lane. If the module's code writes nothing, the original serves all lanes of its device.

    The caller ensures that no lane runs during `refresh`. Lives as long as the session.
    """

    def __init__(self, module: torch.nn.Module, devices: Sequence[torch.device]) -> None:
        _refuse_wrapped(module)
        self.original = module
        self.devices = tuple(devices)
        self.freshness = Freshness()
        self._lanes: list[Replica | None] = []  # None: the original itself
        self._has_shells = False
        self._given: list[Any] = []
        self._given_sizes: list[int] = []
        self._mirrors: dict[torch.device, Mirror] = {}
        self._buffers = Ledger()
        self._names: dict[torch.nn.Module, str] = {}
        self._seen_tree: list[tuple[torch.nn.Module, type]] = []
        self._watch = Watch([])
        self._unseen: list[torch.Tensor] = []
        self.current: list[LaneReplica] = []  # by lane, when last looked at
        self._touchable: list[Replica] = []
        self._home: torch.device | None = None
        self._probe: torch.Tensor | None = None
        self._linked_on: Stream | None = None
        self._memory_from: dict[torch.device, Stream | None] = {}
        self.is_ready = False
        self.training: tuple[Any, ...] = ()  # the train mode of each module, when last looked at
        self.structure = 0  # one more after each change beyond train modes and tensors in place
        self.generators: tuple[torch.Generator, ...] = ()  # that modules hold, and lanes therefore share

    def ready(self) -> bool:
        """True if every parameter has a shape; a lazy module gets its shapes from its first, plain call."""
        if not self.is_ready:
            self.is_ready = not any(map(is_lazy, [*self.original.parameters(), *self.original.buffers()]))
        return self.is_ready

    @property
    def home(self) -> torch.device | None:
        """Where the module lay when the replicas were last refreshed."""
        return self._home

    def is_on(self, device: torch.device) -> bool:
        """Whether the module lies on that device now."""
        first = next(_tensors(self.original), None)
        return first is not None and first[1].device == device

    def stale(self) -> bool:
        """True if the module changed since the last `refresh`, or a lane's buffers did: a tensor, an attribute, ..."""
        if not self._lanes or (self._probe is not None and self._probe.device != self._home):
            return True
        if not self._has_shells:
            return False
        if list(map(len, self._given)) != self._given_sizes:
            self.refuse_grown()
        if self._unseen or not self._watch.intact():
            return True
        if not self._mirrors and not self._touchable:
            return False
        return (
            any(mirror.originals.changed() for mirror in self._mirrors.values())
            or bool(self._buffers.changed())
            or bool(self._unlinked())
            or any(replica.touched() for replica in self._touchable)
        )

    def refuse_grown(self) -> None:
        """Refuse a module that makes layers or parameters in a call: each lane would train its own.

        Raises:
            ReplicaError: If a lane made one. The message names it.
        """
        for replica in self._shelled():
            grown = replica.grown()
            if grown is not None:
                module, name = grown
                place = f"{self._names[module]}.{name}".lstrip(".")
                msg = (
                    f"{type(module).__name__} makes {place!r} in forward, and each lane made its own. Call the model once "
                    "before the block, so that it exists when the replicas are made"
                )
                raise ReplicaError(msg)

    def refresh(self) -> None:
        """Bring every replica into line with the module; if that fails midway, the next refresh begins anew."""
        try:
            self._refresh()
        except BaseException:
            self._lanes = []
            raise

    def _refresh(self) -> None:
        self._keep_for_here()
        changed = self._watch.changed()
        self.structure += bool(changed) and self._watch.took_another_form()
        if not self._lanes or self._moved() or (changed and home_of(self.original) != self._home):
            self._build()
            changed = []
        elif self._tree() != self._seen_tree:
            self._rebuild()
            changed = []
        if any(replica.tensors.containers_changed() for replica in self._shelled()):
            changed = list(self._names)
        self._write_new()
        if self._refresh_tensors():
            changed = list(self._names)
        self._fill(changed)
        self._relink()
        self._write_new()
        for replica in self._shelled():
            replica.tensors.write_new()

    def forget(self) -> None:
        """Let go of the replicas; the next refresh makes them anew."""
        self._keep_for_here()
        self._lanes = []
        self._mirrors = {}
        self._buffers = Ledger()
        self._watch = Watch([])
        self._unseen, self.current, self._touchable = [], [], []
        self._given, self._given_sizes = [], []

    def _keep_for_here(self) -> None:
        """Where other streams than these took the replicas' memory: keep it, once let go of, until these are done with it.

        These come after all that lanes have done with it; the others need not.
        """
        here = {device: backend_of(device.type).stream(device) for device in self.devices}
        if here != self._memory_from:
            record_use(tensor for mirror in self._mirrors.values() for tensor in mirror.held())
            record_use(tensor for replica in self._shelled() for tensor in replica.tensors.held())
            self._memory_from = here

    def scratch(self) -> torch.nn.Module:
        """A replica at home whose buffers nobody else has, for a run that must leave no trace."""
        home = home_of(self.original) or self.devices[0]
        return Replica(self.original, Tensors(home, home, None, Ledger())).module

    def _write_new(self) -> None:
        send((mirror, mirror.unwritten()) for mirror in self._mirrors.values())

    def _refresh_tensors(self) -> bool:
        """Copy what changed; whether a tensor took another form, so that there are copies that no shell has yet."""
        outdated = [(mirror, mirror.outdated()) for mirror in self._mirrors.values()]
        took_another_form = any(mirror.remade for mirror, _ in outdated)
        written = send(outdated)
        changed = [*self._buffers.changed(), *self._unseen]
        for replica in self._shelled():
            written += replica.refresh_buffers(list(dict.fromkeys([*changed, *replica.wrote()])))
        for buffer in changed:
            self._buffers.enter(buffer)
        if written:
            self.freshness.refreshes += 1
            self.freshness.copied_bytes += written
        return took_another_form

    def _relink(self) -> None:
        """Where copies were made anew, or gradients are wanted for the first time, every shell takes the copies up."""
        unlinked = self._unlinked()
        if not unlinked:
            return
        self._linked_on = self._home_stream()
        for mirror in unlinked:
            mirror.unlink()
        self._fill(list(self._names))
        for mirror in unlinked:
            mirror.link()
        self._fill(list(self._names))

    def _shelled(self) -> list[Replica]:
        return [replica for replica in self._lanes if replica is not None]

    def _moved(self) -> bool:
        return self._probe is not None and self._probe.device != self._home

    def _unlinked(self) -> list[Mirror]:
        """Where gradients are wanted: the mirrors from which none would come home, or not by the caller's stream there."""
        if not self._mirrors or not torch.is_grad_enabled():
            return []
        same_stream = _are_one(self._home_stream(), self._linked_on)
        return [mirror for mirror in self._mirrors.values() if not (mirror.linked and same_stream)]

    def _home_stream(self) -> Stream | None:
        return None if self._home is None else backend_of(self._home.type).stream(self._home)

    def _build(self) -> None:
        self._home = home_of(self.original)
        if self._home is not None and self._home.type == "meta":
            name = next(_tensors(self.original))[0]
            msg = f"no replica of the module can be made: {name!r} is on the meta device and has no data to copy"
            raise ReplicaError(msg)
        at_home = self.devices if self._home is None else (self._home,)
        self._mirrors = {device: Mirror(device) for device in self.devices if device not in at_home}
        self._buffers = Ledger()
        shared = writes_nothing(self.original)
        self._lanes = [
            None if device in at_home and shared else Replica(self.original, self._tensors_on(device))
            for device in self.devices
        ]
        self._look()

    def _tensors_on(self, device: torch.device) -> Tensors:
        return Tensors(device, self._home, self._mirrors.get(device), self._buffers)

    def _rebuild(self) -> None:
        """Make the shells anew for another tree of modules; tensors that are still in it keep their copies."""
        for replica in self._shelled():
            replica.build()
        self._prune()
        self._look()

    def _fill(self, modules: Sequence[torch.nn.Module]) -> None:
        if not modules:
            return
        for replica in self._shelled():
            if len(modules) == len(self._names):
                replica.tensors.forget_containers()
            for module in modules:
                replica.fill(module, self._names[module])
        self._prune()
        self._look()

    def _prune(self) -> None:
        """Let go of the copies of what the module no longer has."""
        used = {replica: replica.tensors_in_use() for replica in self._shelled()}
        self._buffers.keep(set().union(*used.values()))
        for replica, keys in used.items():
            replica.tensors.keep(keys)
        for mirror in self._mirrors.values():
            mirror.keep(set().union(*(keys for replica, keys in used.items() if replica.tensors.mirror is mirror)))

    def _tree(self) -> list[tuple[torch.nn.Module, type]]:
        return [(module, type(module)) for module, _ in module_tree(self.original)]

    def _look(self) -> None:
        """Note what the module looks like now, which is what the replicas look like."""
        self._seen_tree = self._tree()
        self._names = dict(module_tree(self.original))
        self._probe = next(_tensors(self.original), (None, None))[1]
        self.current = [
            LaneReplica(lane, self.original, _itself)
            if replica is None
            else LaneReplica(lane, replica.module, replica.tensors.original_of, replica.write_back_buffers())
            for lane, replica in enumerate(self._lanes)
        ]
        self._touchable = [replica for replica in self._shelled() if replica.may_be_touched()]
        self._has_shells = bool(self._shelled())
        self.training = tuple(getattr(module, "training", None) for module in self._names)
        held = (value for module in self._names for value in vars(module).values())
        self.generators = tuple(value for value in held if isinstance(value, torch.Generator))
        self._given = next((replica.given() for replica in self._shelled()), [])  # all lanes run the same code
        self._given_sizes = list(map(len, self._given))
        if self._has_shells:
            self._watch = Watch(list(self._names))
            self._unseen = [
                buffer
                for module in self.original.modules()
                for buffer in module._buffers.values()
                if buffer is not None and may_be_written_unseen(module, buffer)
            ]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _are_one(stream: Stream | None, other: Stream | None) -> bool:
    """Whether two streams are the same; torch's own comparison takes None for neither equal nor unequal."""
    return stream is other or (stream is not None and other is not None and stream == other)


def _refuse_wrapped(module: torch.nn.Module) -> None:
    for part, name in module_tree(module):
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            place = f"submodule {name!r}" if name else "the module"
            msg = f"no replica of {place} can be made: DistributedDataParallel is parallel already; give what it wraps"
            raise ReplicaError(msg)
