"""The state of a model at its last refresh, and the one question: is the model still the same?

Cut calls, streams, and workers call `ModelState.is_current` before each call. It looks at the
containers of the model (`Snapshot`), and at what these do not show: writes of tensors, moves to
other devices, and the caller's streams. After a call, the snapshot of each replica shows what
forward wrote.

A snapshot compares identities, never values, in plain C loops: ``all(map(is_, ...))`` costs 15 ns
per entry, a loop in Python ten times as much. The garbage collector could read the same entries
faster, but on free-threaded Python it stops all threads. It looks at as little as shows every
change:

looked at                          | shows
---------------------------------- | ---------------------------------------------------------
entries of modules, by name        | another object at an attribute, or another table
lengths of ``__dict__`` of modules | an attribute that was added
values, keys, and lengths of other | another object, another order, another name, an entry
containers                         | that moved from one container to the next
classes of objects                 | ``obj.__class__ = ...``; of the model alone
the process's count of hooks       | a hook in a table that had none; only then are all tables
                                   | of hooks read
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter, setitem
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from parawrap._private_names import HOOK_TABLES, MODULE_ENTRIES, PARAMETERS, version_of
from parawrap.backends import Stream, backend_of
from parawrap.engine.edition import Edition
from parawrap.engine.parameter_copies import NO_COPIES, ParameterCopies, Sources
from parawrap.engine.places import ALWAYS_NEW, LISTS, TABLES, Place, read_items
from parawrap.engine.survey import Survey, home_of_survey
from parawrap.tree import ABSENT

# An entry after all others that equals no value. `map` stops at the shorter of two sequences: with
# this entry, a list that became longer or shorter differs nevertheless
_END_OF_VALUES = (object(),)
_dict_of = attrgetter("__dict__")
_is_dirty = attrgetter("is_dirty")
_requires_grad = attrgetter("requires_grad")
_read_entries = itemgetter.__call__  # takes a getter and a dict


@cache  # modules of one class share a getter
def _make_getter(names: tuple[str, ...]) -> itemgetter[Any]:
    """Return a function that reads these entries of the ``__dict__`` of a module as a tuple."""
    if not names:
        names = (PARAMETERS,)  # a getter needs a name, and each module has this entry
    if len(names) == 1:
        names *= 2  # a getter of one name would return the bare value
    return itemgetter(*names)


def _has_usual_length(container: Any) -> bool:
    """False if the class of a container says itself how long it is, or whether it is true."""
    cls = type(container)
    base = next(base for base in (dict, *LISTS) if issubclass(cls, base))
    return cls.__len__ is base.__len__ and not hasattr(cls, "__bool__")


# Registrations of hooks


_SETTLED_S = 1.0  # a thread that is not run for so long between two lines has other problems
_UNSETTLED = -1  # no count of hooks
_last_count = (_UNSETTLED, 0.0)


def read_settled_count() -> int:
    """Return how many hooks were registered in this process; -1 if one may not be in its table yet.

    torch takes the next number, and then enters the hook into a table. Between the two, another
    thread would find the new number, and the table without the hook.
    """
    global _last_count
    count, since = _last_count  # one step, as the line that writes both
    now = monotonic()
    if count != RemovableHandle.next_id:
        _last_count = RemovableHandle.next_id, now
        return _UNSETTLED
    return count if now - since > _SETTLED_S else _UNSETTLED


class Change(NamedTuple):
    """An entry of a container that holds another object. `key` is None for a whole list."""

    place: Place
    key: Any
    before: Any
    now: Any


class Held(NamedTuple):
    """The contents that a snapshot compares.

    Attributes:
        values: The objects in the containers, one after another. They are compared by identity.
        lengths: The lengths of containers.
        keys: The keys of dicts, one after another.
        classes: The classes of objects.
    """

    values: list[Any]
    lengths: list[int]
    keys: list[Any]
    classes: list[type]


class ModelChanges(NamedTuple):
    """The changes of a model.

    Attributes:
        entries: The entries that hold other objects.
        mark: What the containers held just before the entries were read, so that a write of another
            thread in between is another change. None if that could not be read.
    """

    entries: Sequence[Change]
    mark: Held | None


NO_CHANGES = ModelChanges((), None)


class Container:
    """A container, its owner, and the contents that it must have.

    Attributes:
        own: The container itself.
        before: These contents: a dict for a dict, a list for all others.
    """

    __slots__ = ("before", "own", "owner", "place")

    def __init__(self, place: Place, owner: Any) -> None:
        self.place = place
        self.owner = owner
        self.own = place.container(owner)
        if isinstance(self.own, dict):
            # Other threads may write the model's containers. A list of the items is made in one
            # step, a dict of them is not
            self.before: Any = dict([*dict.items(self.own)])
        else:
            self.before = read_items(self.own)


class _Entered(NamedTuple):
    """The contents of containers when they were entered, sorted as in `Snapshot`."""

    modules: list[dict[str, Any]]
    instances: list[Iterable[Any]]
    views: list[Iterable[Any]]
    keyed: list[Iterable[Any]]
    sized: list[Any]


class Snapshot:
    """What the containers of one model, or of one replica, held at one moment.

    `copy_of` returns the copy of an owner of containers; None to leave the owner out. A look at the
    model (`is_model`) sees everything. A look at a replica leaves out what forward does not do:
    give a parameter another name, an object another class, or a module another table.

    Modules are most of a model, and torch makes most of their entries. These are left out: entries
    are read by name. Hooks are the exception, and `RemovableHandle` counts them.

    Attributes:
        containers: The containers, by the keys of their places.
    """

    def __init__(
        self,
        places: Iterable[Place],
        copy_of: Callable[[Any], Any],
        *,
        is_model: bool = False,
    ) -> None:
        self.containers: dict[tuple[int, str], Container] = {}
        self._is_model = is_model
        self._dicts: list[Container] = []
        self._lists: list[Container] = []
        # Modules are read by name: a getter for entries, and one for tables of hooks
        self._modules: list[Any] = []
        self._getters: list[itemgetter[Any]] = []
        self._hook_getters: list[itemgetter[Any]] = []
        # Other objects with a ``__dict__``, and the items of dicts and lists, are read whole
        self._instances: list[Any] = []
        self._views: list[Iterable[Any]] = []
        # These are compared by their keys, by their lengths, for being empty, or by their class
        self._keyed: list[Iterable[Any]] = []
        self._sized: list[Any] = []
        self._empty: list[Any] = []
        self._without_hooks: list[Any] = []  # tables that are read if the count of hooks changes
        self._owners: list[Any] = []
        self._last_hook = read_settled_count()  # first: a hook that comes meanwhile needs a look
        entered = _Entered([], [], [], [], [])
        for place in places:
            owner = copy_of(place.owner)
            if owner is not None:
                self._enter(Container(place, owner), entered)
        self._views.append(_END_OF_VALUES)
        entered.views.append(_END_OF_VALUES)
        # No second look at the containers: another thread may have written the model in between
        self._held = self._collect(entered)
        self._hooks = self._read_hooks(entered.modules)

    def _enter(self, found: Container, entered: _Entered) -> None:
        """Sort a container into the lists above, and its contents into those of `entered`."""
        own, kind = found.own, found.place.kind
        self.containers[found.place.key] = found
        if not isinstance(own, dict):
            self._lists.append(found)
            self._enter_list(found, entered)
            return
        self._dicts.append(found)
        if kind == "vars" and self._is_model:
            self._owners.append(found.owner)
        # The ``__dict__`` of a block's own module is a `PlainView` with a `__getitem__` in Python.
        # So it is read whole, as those of other objects
        if kind == "vars" and type(own) is dict and isinstance(found.owner, torch.nn.Module):
            self._enter_module(found, entered)
        elif found.before or not _has_usual_length(own):
            self._enter_dict(found, entered)
        elif kind in HOOK_TABLES:
            self._without_hooks.append(own)
        else:
            self._empty.append(own)

    def _enter_list(self, found: Container, entered: _Entered) -> None:
        # Slots and cells always have the same length
        shows_length = isinstance(found.own, LISTS) and _has_usual_length(found.own)
        if shows_length and not found.before:
            self._empty.append(found.own)
            return
        self._views.append(found.own)
        entered.views.append(found.before)
        if shows_length:
            self._sized.append(found.own)
            entered.sized.append(found.before)

    def _enter_module(self, found: Container, entered: _Entered) -> None:
        entries = found.before
        names = [name for name in entries if name not in MODULE_ENTRIES]
        if self._is_model:  # forward gives no module another table
            names += [name for name in TABLES if name in entries]
            names += [name for name in HOOK_TABLES if entries.get(name)]
        hooks = sorted(HOOK_TABLES & entries.keys())
        self._modules.append(found.owner)
        entered.modules.append(entries)
        self._getters.append(_make_getter(tuple(names)))
        self._hook_getters.append(_make_getter(tuple(hooks)))

    def _enter_dict(self, found: Container, entered: _Entered) -> None:
        own, before, kind = found.own, found.before, found.place.kind
        if kind == "vars":
            self._instances.append(found.owner)
            entered.instances.append(before.values())
        else:
            self._views.append(dict.values(own))
            entered.views.append(before.values())
        keys = dict.keys(own)  # with their own length, whatever the class of the dict says
        is_table = kind in TABLES or kind in HOOK_TABLES
        if self._is_model or not is_table:  # forward gives no parameter another name
            self._keyed.append(keys)
            entered.keyed.append(before)
        if not is_table:
            # An entry that moves from one container to the next leaves the order of all that is
            # held. Tables need no length: what enters one comes last, after what was there
            self._sized.append(keys)
            entered.sized.append(before)

    # Is it the same?

    def is_same(self) -> bool:
        """True if the containers hold the very same objects."""
        values, lengths, keys, classes = self._held
        try:
            # `_read_held` in place: each call runs this several times. Each ``__dict__`` is read
            # from its owner, which may have got another one
            dicts = [*map(_dict_of, self._modules)]
            of_modules = map(_read_entries, self._getters, dicts)
            of_instances = map(dict.values, map(_dict_of, self._instances))
            now = chain.from_iterable(chain(of_modules, of_instances, self._views))
            return (
                all(map(is_, now, values))
                and not any(self._empty)
                and [*map(len, dicts), *map(len, self._sized)] == lengths
                and [*chain.from_iterable(self._keyed)] == keys
                and [*map(type, self._owners)] == classes
                # Each registration of a hook takes the next number, for any module of the process.
                # While the number stays, no table can have got a hook
                and (RemovableHandle.next_id == self._last_hook or self._has_same_hooks())
            )
        except (KeyError, RuntimeError):
            # An attribute is missing, or another thread writes a container at this moment
            return False

    def note(self) -> None:
        """Note the objects that are held now."""
        self._last_hook = read_settled_count()  # before the look: a later hook needs another one
        self._held = self._read_held()
        self._hooks = self._read_hooks(map(_dict_of, self._modules))

    def _read_held(self) -> Held:
        dicts = [*map(_dict_of, self._modules)]
        instances: list[Iterable[Any]] = [*map(dict.values, map(_dict_of, self._instances))]
        return self._collect(_Entered(dicts, instances, self._views, self._keyed, self._sized))

    def _collect(self, found: _Entered) -> Held:
        """Return what `is_same` compares, in its order."""
        of_modules = map(_read_entries, self._getters, found.modules)
        values = chain.from_iterable(chain(of_modules, found.instances, found.views))
        lengths = [*map(len, found.modules), *map(len, found.sized)]
        keys = chain.from_iterable(found.keyed)
        return Held([*values], lengths, [*keys], [*map(type, self._owners)])

    def _has_same_hooks(self) -> bool:
        """Look at all tables of hooks: some module of the process has got a hook."""
        number = read_settled_count()  # before the look, as in `note`
        hooks = self._read_hooks(map(_dict_of, self._modules))
        if any(self._without_hooks) or not all(map(is_, hooks, self._hooks)):
            return False
        self._last_hook = number
        return True

    def _read_hooks(self, dicts: Iterable[dict[str, Any]]) -> list[Any]:
        """Return the tables of hooks of all modules, from the ``__dict__`` of each."""
        return [*chain.from_iterable(map(_read_entries, self._hook_getters, dicts))]

    # What changed?

    def read_changes(self) -> ModelChanges:
        """Return the entries that differ from those that must be held, for `accept`."""
        try:
            mark = self._read_held()
        except (KeyError, RuntimeError):  # as in `is_same`: such changes cannot be accepted
            mark = None
        return ModelChanges(self.list_changes(), mark)

    def accept(self, changes: ModelChanges) -> None:
        """Accept changes of entries of dicts."""
        assert changes.mark is not None, "the containers could not be read"
        for place, key, _, now in changes.entries:
            self.containers[place.key].before[key] = now
        self._held = changes.mark

    def list_changes(self) -> list[Change]:
        """Return the entries that differ from those that must be held.

        A replaced ``__dict__`` is an entry.
        """
        found = [
            Change(each.place, "__dict__", each.own, vars(each.owner))
            for each in self._find_replaced()
        ]
        for each in self._find_changed():
            before, own = each.before, each.own
            if isinstance(before, list):
                found.append(Change(each.place, None, before, read_items(own)))
                continue
            for key in dict.fromkeys([*before, *dict.keys(own)]):
                then, now = before.get(key, ABSENT), dict.get(own, key, ABSENT)
                if then is not now:
                    found.append(Change(each.place, key, then, now))
        return found

    def _find_replaced(self) -> list[Container]:
        """Return the ``__dict__`` of each object that has got another one."""
        owned = [each for each in self._dicts if each.place.kind == "vars"]
        return [each for each in owned if each.owner.__dict__ is not each.own]

    def _find_changed(self) -> list[Container]:
        """Return the containers that hold other objects."""
        found: list[Container] = []
        same_length: list[Container] = []
        for each in self._dicts:
            if dict.__len__(each.own) == len(each.before):
                same_length.append(each)
            else:
                found.append(each)
        # The entries of the other dicts are compared in C loops, as many models set an attribute at
        # each step of a training loop: `holders` has the dict of each entry
        holders = [*chain.from_iterable([repeat(each, len(each.before)) for each in same_length])]
        # A key that is another object counts too: `list_changes` compares its entry
        for read in (dict.values, dict.keys):
            # A list of each first, which is one step: other threads may write the model
            now = chain.from_iterable([[*read(each.own)] for each in same_length])
            before = chain.from_iterable([read(each.before) for each in same_length])
            found += compress(holders, map(is_not, now, before))
        for each in self._lists:
            items = read_items(each.own)
            if len(items) != len(each.before) or not all(map(is_, items, each.before)):
                found.append(each)
        return [*dict.fromkeys(found)]

    # Writes

    def restore(self) -> None:
        """Put back what must be held."""
        for each in self._find_replaced():
            object.__setattr__(each.owner, "__dict__", each.own)
        for each in self._find_changed():
            own, before = each.own, each.before
            if isinstance(own, dict):
                # Around the methods of a subclass, which may refuse or convert entries. Ctrl-C
                # after the first line leaves the replica dirty, so the next call repeats this
                kind: Any = OrderedDict if isinstance(own, OrderedDict) else dict
                kind.clear(own)
                kind.update(own, before)
                continue
            own.clear()
            if isinstance(own, set):
                own.update(before)
            else:
                own.extend(before)
        self.note()

    def read(self, place: Place) -> Any:
        """Return the container at a place."""
        return self.containers[place.key].own

    def has(self, place: Place, key: Any) -> bool:
        """True if the container at a place is a dict that must hold the key."""
        found = self.containers.get(place.key)
        return found is not None and isinstance(found.own, dict) and key in found.before

    def put(self, place: Place, key: Any, value: Any) -> None:
        """Set an entry that exists, and accept it once `note` is called."""
        for write in self.writers_of(place, key):
            write(value)

    def writers_of(self, place: Place, key: Any) -> list[Callable[[Any], None]]:
        """Return the functions that set and accept an entry that exists, for as long as this lives.

        They are partials of C functions: many entries are written without a call of Python code.
        """
        found = self.containers.get(place.key)
        if found is None:  # of an object that all lanes use, so it has the model's own entry
            return []
        set_own = dict.__setitem__ if isinstance(found.own, dict) else setitem
        return [partial(set_own, found.own, key), partial(setitem, found.before, key)]

    def clear(self) -> None:
        """Empty the modules and the plain containers, so that cycles among them keep nothing alive.

        `copy.deepcopy` has made these. It may have got any other object from a cache or a registry,
        which has it still, so instances of other classes are left to the garbage collector.
        """
        for each in self.containers.values():
            if isinstance(each.owner, torch.nn.Module) or type(each.owner) in ALWAYS_NEW:
                each.own.clear()


# The state


class Asked(NamedTuple):
    """The objects of `Doubts` at the moment when a refresh began."""

    everything: object
    buffers: object


NEVER_CURRENT = Asked(None, None)
"""For a state that each look finds stale: doubts are never None."""


class Doubts:
    """Reasons to refresh that no look at the model shows.

    Any thread may add one, also a callback in a lane: it stores a new object, in one step. A state
    remembers the objects of the moment when its refresh began, so a doubt that comes during a
    refresh counts for the next call.

    Attributes:
        everything: Another object once everything must be made again.
        buffers: Another object once the lanes' own tensors must be renewed.
    """

    __slots__ = ("buffers", "everything")

    def __init__(self) -> None:
        self.everything = self.buffers = object()

    def read(self) -> Asked:
        """Return the objects of now."""
        return Asked(self.everything, self.buffers)


class Copied(Protocol):
    """The replica of one lane, as far as the state of the model reads it."""

    versioned: list[torch.Tensor]
    is_dirty: bool


CopyT = TypeVar("CopyT", bound=Copied)


class ModelState(Generic[CopyT]):
    """What a model held when its replicas were brought up to date.

    It never changes: each refresh makes another one, and stores it when it is complete.

    Attributes:
        edition: What holds until the structure or a training flag changes.
        survey: That of the edition.
        snapshot: What the containers of the model held. The next state may have the same snapshot,
            with changes accepted.
        replicas: One per lane; empty if calls must run plainly, or a refresh is needed first.
        away: The copies of parameters on other devices than the model's.
        sources: The tensors that have copies elsewhere, as they were before these were made.
        home: The device of the model; None if it has no tensors.
        params: The parameters that have versions.
        asked: The doubts when the refresh began.
        renews_always: That of the edition; False without lanes, which need no tensors.
        generation: How often a refresh has found the model changed.
    """

    def __init__(
        self,
        edition: Edition,
        snapshot: Snapshot,
        doubts: Doubts,
        asked: Asked,
        *,
        devices: Iterable[torch.device] = (),
        replicas: Sequence[CopyT] = (),
        away: ParameterCopies = NO_COPIES,
        sources: Sources | None = None,
        versions: Sequence[int] | None = None,
        generation: int = 0,
    ) -> None:
        """Note the state of now.

        `sources` are those of `away` by default. `versions` are those of `read_versions` before the
        lanes got their copies: a write that came meanwhile makes the state an old one.
        """
        survey = edition.survey
        self.edition = edition
        self.survey = survey
        self.snapshot = snapshot
        self.replicas = replicas
        self.away = away
        self.asked = asked
        self._doubts = doubts
        self.generation = generation
        self.home = home_of_survey(survey)
        tensors = [*survey.params, *survey.tensors]
        self._first = next((tensor for tensor in tensors if tensor.device == self.home), None)
        self.params: list[torch.Tensor] = []
        of_lanes: list[torch.Tensor] = []
        if not survey.is_lazy:  # a tensor without a shape has no version
            self.params += [tensor for tensor in survey.params if not tensor.is_inference()]
            of_lanes += chain.from_iterable(replica.versioned for replica in replicas)
        # The model's buffers and the lanes' own: forward may write either in a call
        self._tracked = [*survey.versioned, *of_lanes]
        self._versions_of_model = read_versions(survey) if versions is None else [*versions]
        self._versions = [*self._versions_of_model, *map(version_of, of_lanes)]
        self.renews_always = bool(replicas) and edition.renews_always
        self.sources = away.sources if sources is None else sources
        self._devices = frozenset(devices)
        self._streams = self._read_streams() if replicas else {}

    def is_current(self) -> bool:
        """True if the replicas are what a call of this moment needs."""
        return (
            self._doubts.everything is self.asked.everything
            and self._doubts.buffers is self.asked.buffers
            and not self.renews_always
            and self.snapshot.is_same()
            # A write in place raises the version. Parameters need no look, unless they have copies:
            # lanes on the model's device hold the same tensors
            and [*map(version_of, self._tracked)] == self._versions
            # A buffer that learns now must be shared, as parameters are
            and True not in map(_requires_grad, self._tracked)
            and True not in map(_is_dirty, self.replicas)
            # ``model.to(...)`` moves all tensors and keeps the parameters, so one of them shows it
            and (self._first is None or self._first.device == self.home)
            # Without lanes elsewhere, the rest is two looks at empty containers
            and (not self.sources.tensors or self.has_same_sources())
            and (not self._streams or self._streams == self._read_streams())
        )

    # For a refresh: how much must be done?

    def must_rebuild(self) -> bool:
        """True if everything must be made again.

        That is on demand, for a model that moved, or for buffers that learn now.
        """
        has_moved = self._first is not None and self._first.device != self.home
        learns = True in map(_requires_grad, self.survey.tensors)
        is_asked = self._doubts.everything is not self.asked.everything
        return not self.replicas or is_asked or has_moved or learns or self.sources.have_moved()

    def must_renew_tensors(self) -> bool:
        """True if a tensor that lanes have copies of was written, perhaps unseen."""
        is_unsure = self.renews_always or self._doubts.buffers is not self.asked.buffers
        return is_unsure or [*map(version_of, self._tracked)] != self._versions

    def has_written_tensors(self) -> bool:
        """True if one of the model's own tensors besides parameters was written."""
        return read_versions(self.survey) != self._versions_of_model

    def has_same_sources(self) -> bool:
        """True if copies elsewhere are those that a call of this moment needs.

        With gradients, copies are part of the graph of one call, so each call needs others.
        """
        with_graph = torch.is_grad_enabled() and (self.away.is_linked or self.away.must_link())
        return not with_graph and not self.sources.have_changed()

    def has_other_streams(self) -> bool:
        """True if the caller is on other streams."""
        return bool(self._streams) and self._streams != self._read_streams()

    def _read_streams(self) -> dict[torch.device, Stream]:
        """Return the caller's current streams on the devices of the model and the lanes."""
        found: dict[torch.device, Stream] = {}
        for device in {self.home, *self._devices}:
            if device is None or device.type == "cpu":
                continue
            stream = backend_of(device.type).stream(device)
            if stream is not None:
                found[device] = stream
        return found


def read_versions(survey: Survey) -> list[int]:
    """Return the versions of the model's own tensors besides parameters, as far as they have any.

    A write raises the version after it. So a version that is read before a copy is made, and is
    still the same after it, is that of the copy.
    """
    return [*map(version_of, survey.versioned)]
