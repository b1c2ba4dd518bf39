"""The replicas of one target for the lanes of one session, and what keeps them up to date."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from parawrap.backends import Stream, backend_of, record_use, warn_caller
from parawrap.errors import ReplicaError
from parawrap.replicas._gradients import Mirror, send_to_mirrors
from parawrap.replicas._hidden_modules import refuse_hidden
from parawrap.replicas._lane_tensors import LaneTensors, is_parameter
from parawrap.replicas._ledger import Ledger, buffers_written_unseen, with_other_buffers
from parawrap.replicas._parts import Kind, kind_of
from parawrap.replicas._private_names import PARAMETERS, check_modules, uses_cuda_graphs
from parawrap.replicas._replica import Order, Replica, give_buffers
from parawrap.replicas._snapshot import Change, Snapshot
from parawrap.replicas._survey import Survey, SurveyNode

__all__ = ["Freshness", "LaneReplica", "ReplicaSet", "home_of"]

_MOST_NAMED = 3  # names in a message: more would not fit a line


@dataclass(slots=True)
class Freshness:
    """How often something was copied into replicas, and how many bytes in all."""

    refreshes: int = 0
    copied_bytes: int = 0


class LaneReplica(NamedTuple):
    """The copy of the target that one lane runs.

    `original_of` finds the model's own tensor that a tensor of the lane is a copy of. `run` calls a function in the lane
    for a cut call, and `run_whole` for a whole call. Both bring the replica to the model's state first. `write_back` gives
    the buffers that the lane wrote to the model when all lanes are idle. None if there is nothing to do. With `versions`,
    those of the parameters when a whole call was submitted, the call raises if a parameter was written since.
    """

    lane: int
    module: Any
    original_of: Callable[[torch.Tensor], torch.Tensor | None]
    run: Callable[..., Any] | None = None
    run_whole: Callable[..., Any] | None = None
    write_back: Callable[[], None] | None = None
    versions: list[int] | None = None

    def prepared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that prepares the replica, calls `function`, and refuses what it must not write."""
        return function if self.run is None else partial(self.run, function)

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same for a whole call, and then gives the buffers of lane 0 to the model."""
        return function if self.run_whole is None else partial(self.run_whole, self.versions, function)


def home_of(module: torch.nn.Module) -> torch.device | None:
    """Return the one device that the tensors of a module are on; None for a module without tensors.

    Raises:
        ReplicaError: If they are on several devices. The message names two of them.
    """
    return _home_of(Survey(module))


class ReplicaSet:
    """One replica per lane, of a module or of another callable that leads to modules.

    With `detach`, no gradients flow from the replicas to the target. Without `gives_back`, lane 0 is like every lane: each
    call starts from the target's buffers, and `write_back` alone gives buffers to the target.
    The caller ensures that no lane runs during `refresh`. Lives as long as the session.

    Raises:
        ReplicaError: If the target cannot be copied.
        VersionError: If this release of torch lacks a private name that replicas need.
    """

    def __init__(
        self, target: Any, devices: Sequence[torch.device], *, detach: bool = False, gives_back: bool = True
    ) -> None:
        check_modules()
        self.original = target
        self.devices = tuple(devices)
        self._detach = detach
        self._gives_back = gives_back
        self.freshness = Freshness()
        self.current: list[LaneReplica] = []  # by lane, since the last refresh
        self.is_ready = False
        self.generators: tuple[torch.Generator, ...] = ()  # that modules hold, and lanes therefore share
        self.home: torch.device | None = None
        self._survey = Survey(target)
        refuse_hidden(self._survey)
        self.learns = _learns(self._survey)  # True if a tensor of the target required gradients at the last refresh
        self.home = _home_of(self._survey)
        self._first = _find_first_tensor(self._survey)
        self._replicas: list[Replica] = []
        self._mirrors: dict[torch.device, Mirror] = {}
        self._watch = Snapshot(())
        self._ledger = Ledger((), ())
        self._unseen: list[torch.Tensor] = []
        self._renews_all = False
        self._streams: dict[torch.device, Stream] = {}  # of the caller, at the last refresh
        self._mirrored: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        self._written_state: list[str] = []  # the places that a call wrote, for a warning
        self._has_warned = False

    @property
    def has_model(self) -> bool:
        """True if the target leads to a module, or to a tensor that learns."""
        return bool(self._survey.modules or self._survey.tensors)

    def ready(self) -> bool:
        """True if every parameter has a shape. A lazy module gets its shapes from its first, plain call."""
        if not self.is_ready:
            self.is_ready = not any(is_lazy(node.value) for node in self._survey.tensors)
            if not self.is_ready:
                self._survey = Survey(self.original)
        return self.is_ready

    def is_on(self, device: torch.device) -> bool:
        """True if the model lies on that device now, or has no tensors."""
        return self._first is None or self._first.device == device

    def stale(self) -> bool:
        """True if the target changed since the last `refresh`, or lanes wrote their own tensors.

        If not, lanes on the model's device still copy its buffers before they run, since this does not see writes through
        ``.data``.
        """
        if not (self._replicas and self._watch.intact() and self._ledger.same_form()):
            return True
        if torch.is_grad_enabled():
            if self._mirrors or (self._streams and self._streams != self._callers_streams()):
                return True
        elif self._renews_all or (self._mirrors and self._ledger.has_seen_steps):
            return True
        return bool(self._unseen) or not self._ledger.unwritten() or any(map(Replica.touched, self._replicas))

    def refresh(self) -> None:
        """Bring every replica up to date. If that fails, the next refresh makes all of them again."""
        try:
            self._refresh()
        except BaseException:
            self._replicas = []
            raise

    def renew(self) -> None:
        """Copy everything at the next refresh, also what looks unchanged."""
        self._renews_all = True
        self._replicas = []

    def ran_plainly(self) -> None:
        """Note a call in the caller's thread. Copies elsewhere need the buffers that it may have written unseen."""
        if self._mirrors:
            self._ledger.suspect(buffers_written_unseen(self._survey.all_modules()))

    def for_later(self) -> list[LaneReplica]:
        """Return the current replicas for whole calls that run later: they raise if a parameter was written meanwhile."""
        at_home = [replica.tensors.device not in self._mirrors for replica in self._replicas]
        if not any(at_home):
            return self.current
        versions = self._replicas[at_home.index(True)].tensors.versions()
        pairs = zip(self.current, at_home, strict=True)
        return [replica._replace(versions=versions if shares else None) for replica, shares in pairs]

    def warn(self) -> None:
        """Warn once of attributes and items that calls wrote: they do not reach the model."""
        if not self._written_state or self._has_warned:
            return
        self._has_warned = True
        names = [*map(repr, self._written_state)]
        more = "" if len(names) <= _MOST_NAMED else f" and {len(names) - _MOST_NAMED} more"
        warn_caller(
            f"the model wrote {', '.join(names[:_MOST_NAMED])}{more} during a call. Each lane wrote its own, and these "
            "writes do not come back to the model: the next call starts without them. Return the value from the call "
            "instead, or register a tensor as a buffer: the buffers of lane 0 come back. If the model prepares itself in "
            "its first call, call it once before the block"
        )

    def share_buffers(self) -> None:
        """Give the first replica the model's own buffers, if they are on its device."""
        self._replicas[0].share_buffers()

    def forget(self) -> None:
        """Drop the replicas. The next refresh makes them again."""
        self._follow_streams()
        self._let_go(keep_mirrors=False, relinks=False)
        _clear_caches(self._survey)
        self._ledger = Ledger((), ())
        self._unseen = []
        self._survey = Survey(None)

    def _refresh(self) -> None:
        has_other_streams = self._follow_streams()
        if self._replicas and self._replicas[0].gives_back and self._replicas[0].is_pending:
            self._replicas[0].write_back()  # of a call in another thread, which has yet to do so
        self._restore()
        changes = self._watch.changes() if self._replicas and not has_other_streams else None
        written = with_other_buffers(self._ledger.written(), self._survey.all_modules())
        changed = {id(tensor): tensor for tensor in (*written, *self._ledger.moved())}
        self._renews_all = self._renews_all or self._ledger.has_seen_steps
        self._ledger.enter_versions()  # before the copies: the next call sees what another thread writes meanwhile
        if changes is not None and self._update(changes):
            replaced = {id(change.now): change.now for change in changes if isinstance(change.now, torch.Tensor)}
            self._renew(changed | replaced)
        else:
            self._build(changed, relinks=has_other_streams)
        self._renews_all = bool(self._mirrors) and torch.is_grad_enabled()
        trains = any(getattr(module, "training", False) for module in self._survey.all_modules())
        self._unseen = buffers_written_unseen(self._survey.all_modules())
        for replica in self._replicas:
            replica.trains, replica.trains_norms = trains, bool(self._unseen)

    def _restore(self) -> None:
        """Put back what callers of `replicate` changed. No variable may keep an old replica while new ones are made."""
        for replica in self._replicas:
            replica.state.restore()

    def _update(self, changes: Sequence[Change]) -> bool:
        """Set replaced values in every replica; return False if replicas must be built again."""
        if not (self._ledger.same_form() and all(map(self._can_set, changes))):
            return False
        tensors = [id(change.now) for change in changes if isinstance(change.now, torch.Tensor)]
        if len(set(tensors)) < len(tensors):
            return False
        for change in changes:
            if isinstance(change.now, torch.Tensor):
                self._survey.replace(change.before, change.now)
            for replica in self._replicas:
                replica.apply(change)
        self._watch.take(changes)
        for replica in self._replicas if changes else ():
            replica.state.accept()
        if tensors:
            self._note_tensors()
        return True

    def _can_set(self, change: Change) -> bool:
        """True if a number, a flag, or a string took the place of another, or a tensor that of a tensor in one place."""
        node, key, before, now = change
        own = {Kind.DICT: node.value}.get(node.kind, getattr(node.value, "__dict__", {}))
        if node.key == PARAMETERS or dict.get(own, key, self) is not now:
            return False
        if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
            is_alone = self._survey.holders(before) == [node] and id(now) not in self._survey.nodes
            return is_alone and now.device == before.device and _is_plain(before) and _is_plain(now)
        return _is_simple(before) and _is_simple(now)

    def _renew(self, changed: Mapping[int, torch.Tensor]) -> None:
        """Copy the tensors that changed; on other devices all tensors if gradients are enabled."""
        written = self._write_mirrors(self._mirrored, changed)
        everything = torch.is_grad_enabled() or self._renews_all
        for replica in self._replicas:
            is_away = replica.tensors.device in self._mirrors
            written += replica.renew(self._own if everything and is_away else [*changed.values(), *self._unseen])
        self._count(written)

    def _write_mirrors(self, originals: Sequence[torch.Tensor], changed: Mapping[int, torch.Tensor]) -> int:
        """Write the copies of parameters that changed, or that may have changed; return the bytes written."""
        everything = torch.is_grad_enabled() or self._renews_all
        written = send_to_mirrors(self._mirrors.values(), [each for each in originals if everything or id(each) in changed])
        for mirror in self._mirrors.values():
            mirror.advance(each for each in originals if id(each) in changed)
        return written

    def _count(self, written: int) -> None:
        if written:
            self.freshness.refreshes += 1
            self.freshness.copied_bytes += written

    def _build(self, changed: Mapping[int, torch.Tensor], *, relinks: bool) -> None:
        """Make every replica for the structure of now. Parameters that are still there keep their copies."""
        self._survey = survey = Survey(self.original)
        refuse_hidden(survey)
        home = _home_of(survey)
        _refuse_meta(survey, home)
        _refuse_cuda_graphs(survey, self.devices)
        self._let_go(keep_mirrors=home == self.home, relinks=relinks)
        self.home = home
        self._streams = self._callers_streams()
        tensors = [node.value for node in survey.tensors]
        at_home = self.devices if home is None else (home,)
        away = dict.fromkeys(device for device in self.devices if device not in at_home)
        self._mirrors = {device: self._mirrors.get(device) or Mirror(device) for device in away}
        if away:
            _refuse_left_behind(survey)
        self._mirrored = [each for each in tensors if is_parameter(each) and each.is_leaf and each.device == home]
        kept = [mirror.take(self._mirrored) for mirror in self._mirrors.values()]  # the same in each
        self._count(self._write_mirrors(kept[0] if kept else (), changed))
        order, written = Order(), self._written_state
        self._replicas = [
            Replica(survey, LaneTensors(device, home, self._mirrors.get(device), detach=self._detach), order, written)
            for device in self.devices
        ]
        self._replicas[0].gives_back = self._gives_back
        self._note_tensors()
        self._watch = Snapshot((node, node.value) for node in survey.copied)
        self.generators = survey.generators
        self.current = [_as_lane_replica(lane, self._replicas) for lane in range(len(self._replicas))]

    def _note_tensors(self) -> None:
        """Note the tensors of the target, and their versions."""
        tensors = [node.value for node in self._survey.tensors]
        self.learns = _learns(self._survey)
        self._first = _find_first_tensor(self._survey)
        self._own = [tensor for tensor in tensors if not is_parameter(tensor)]
        self._ledger = Ledger(tensors, tensors if self._mirrors else self._own)

    def _let_go(self, *, keep_mirrors: bool, relinks: bool) -> None:
        """Drop the old replicas first: parameters remember the shapes and the stream of the graphs that lead to them."""
        for replica in self._replicas:
            replica.is_over = True
        self._replicas, self.current = [], []
        self._watch = Snapshot(())
        if not keep_mirrors:
            self._mirrors = {}
        for mirror in self._mirrors.values() if relinks else ():
            mirror.unlink()

    def _callers_streams(self) -> dict[torch.device, Stream]:
        """Return the caller's streams: gradients of replicas reach the parameters on that of the model's device."""
        found = {each: backend_of(each.type).stream(each) for each in (self.home, *self.devices) if each is not None}
        return {device: stream for device, stream in found.items() if stream is not None}

    def _follow_streams(self) -> bool:
        """Return True if the caller uses other streams than at the last refresh.

        If so, keep the memory that earlier streams took for replicas, once it is freed, until the new streams are done.
        They come after all that lanes have done with it.
        """
        if not (self._replicas or self._mirrors):
            return True
        streams = self._callers_streams()
        if streams == self._streams:
            return False
        record_use(tensor for mirror in self._mirrors.values() for tensor in mirror.held())
        record_use(tensor for replica in self._replicas for tensor in replica.tensors.held())
        self._streams = streams
        return True


def _learns(survey: Survey) -> bool:
    return any(node.value.requires_grad for node in survey.tensors)


def _as_lane_replica(lane: int, replicas: Sequence[Replica]) -> LaneReplica:
    replica = replicas[lane]
    write_back = None if not replica.has_own else replica.write_back if lane else partial(give_buffers, replicas)
    return LaneReplica(lane, replica.target, replica.original_of, replica.run, replica.run_whole, write_back)


def _clear_caches(survey: Survey) -> None:
    """Empty the caches of methods, which hold the replicas that they were called on."""
    for cls in {base for module in survey.all_modules() for base in type(module).__mro__}:
        for value in vars(cls).values():
            if kind_of(type(value)) is Kind.CACHED:
                value.cache_clear()


def _is_simple(value: Any) -> bool:
    """True for an atom other than a generator."""
    return kind_of(type(value)) is Kind.ATOM and not isinstance(value, torch.Generator)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.grad_fn is None


def _refuse_left_behind(survey: Survey) -> None:
    """Refuse tensors that only functions refer to, and that lanes on other devices would find on the model's."""
    for node in survey.shared:
        if node.kind is Kind.TENSOR and node.parent is not None and node.parent.kind is Kind.CELL:
            msg = (
                f"no replica can be made on another device: {node.path} is a tensor that only a function holds. "
                "Register it as a buffer of the model"
            )
            raise ReplicaError(msg)


def _iterate_registered(survey: Survey) -> Iterator[tuple[SurveyNode, str, torch.Tensor]]:
    """Yield the parameters and buffers of all modules, with the module and the name; else a tensor in a plain attribute."""
    found = False
    for node in survey.modules:
        for name, tensor in chain(node.value.named_parameters(recurse=False), node.value.named_buffers(recurse=False)):
            found = True
            yield node, name, tensor
    if not found:
        for node in survey.tensors[:1]:
            yield node.parent or node, node.key, node.value


def _find_first_tensor(survey: Survey) -> torch.Tensor | None:
    return next((tensor for *_, tensor in _iterate_registered(survey)), None)


def _refuse_meta(survey: Survey, home: torch.device | None) -> None:
    if home is not None and home.type == "meta":
        node, name, _ = next(_iterate_registered(survey))
        msg = f"no replica of the module can be made: {node.path_of(name)!r} is on the meta device and has no data to copy"
        raise ReplicaError(msg)


def _refuse_cuda_graphs(survey: Survey, devices: Collection[torch.device]) -> None:
    """Refuse models that torch.compile runs as CUDA graphs: torch keeps these for one thread and one stream."""
    for node in survey.copied:
        if node.kind is Kind.COMPILED and uses_cuda_graphs(node.value) and any(each.type == "cuda" for each in devices):
            msg = (
                f"{repr(node.path) if node.parent else 'the model'} is compiled to run as CUDA graphs, which only one "
                "thread can use, and each lane has its own. Compile it with torch.compile(model) or with "
                'torch.compile(model, mode="max-autotune-no-cudagraphs")'
            )
            raise ReplicaError(msg)


def _home_of(survey: Survey) -> torch.device | None:
    first: tuple[SurveyNode, str, torch.Tensor] | None = None
    for node, name, tensor in _iterate_registered(survey):
        if first is None:
            first = node, name, tensor
        elif tensor.device != first[2].device:
            msg = (
                f"the model lies on several devices: {first[0].path_of(first[1])!r} on {first[2].device} and "
                f"{node.path_of(name)!r} on {tensor.device}. A replica of it would need as many devices again; put the "
                "model on one device, or make its parts parallel one by one"
            )
            raise ReplicaError(msg)
    return None if first is None else first[2].device
