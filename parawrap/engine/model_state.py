"""The state of a model at its last refresh, and the one question: is the model still the same?

Cut calls, streams, and workers call `ModelState.is_current` before each call. It compares the
containers of the model (`Snapshot`), and three things that containers do not show: writes into
tensors, moves to other devices, and the caller's streams. After a call, the snapshot of each
replica shows what forward wrote.

A snapshot compares identities, never values, in plain C loops: ``all(map(is_, ...))`` costs 15 ns
per entry, a loop in Python ten times as much. The garbage collector could read the same entries
faster, but on free-threaded Python it stops all threads. A snapshot reads no more than this:

read                               | shows
---------------------------------- | ---------------------------------------------------------
entries of modules, by name        | another object at an attribute, or another table
lengths of ``__dict__`` of modules | an attribute that was added
values, keys, and lengths of other | another object, another order, another name, an entry
containers                         | that moved from one container to the next
classes of objects                 | ``obj.__class__ = ...``; only in the model, not in replicas
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
from parawrap.engine.parameter_copies import NO_COPIES, ParameterCopies, Sources
from parawrap.engine.places import ALWAYS_NEW, LISTS, TABLES, Place, read_items
from parawrap.engine.possible_writes import PossibleWrites
from parawrap.engine.survey import Survey, home_of_survey
from parawrap.tree import ABSENT

# The last of all compared values: no other object is this one. `map` stops at the shorter of two
# sequences. Without this value, a list that lost or got an item at its end would compare as equal
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
    """False if the class of a container has its own ``__len__`` or ``__bool__``."""
    cls = type(container)
    base = next(base for base in (dict, *LISTS) if issubclass(cls, base))
    return cls.__len__ is base.__len__ and not hasattr(cls, "__bool__")


# Registrations of hooks


# Longer than a thread takes from one line of torch to the next; a guess that no test has
# contradicted
_SETTLED_S = 1.0
_UNSETTLED = -1  # equals no count of hooks
_last_count = (_UNSETTLED, 0.0)  # a count of hooks, and the time when it was first read


def read_settled_count() -> int:
    """Return the number of hooks that this process has registered; -1 for about a second after one.

    torch first counts a hook, and then enters it into a table. Between the two steps, another
    thread would read the new count, and a table without the hook.
    """
    global _last_count
    # The tuple is read and written in one step, so a count and its time belong together
    count, first_read = _last_count
    now = monotonic()
    if count != RemovableHandle.next_id:
        _last_count = RemovableHandle.next_id, now
        return _UNSETTLED
    return count if now - first_read > _SETTLED_S else _UNSETTLED


class Change(NamedTuple):
    """An entry of a container that holds another object. `key` is None for a whole list."""

    place: Place
    key: Any
    before: Any
    now: Any


class Held(NamedTuple):
    """The contents that a snapshot compares.

    Attributes:
        values: The objects in all containers, one after another. They are compared by identity.
        lengths: The lengths of containers.
        keys: The keys of all dicts, one after another.
        classes: The classes of the model's objects; empty for a replica.
    """

    values: list[Any]
    lengths: list[int]
    keys: list[Any]
    classes: list[type]


class ModelChanges(NamedTuple):
    """The changes of a model.

    Attributes:
        entries: The entries that hold other objects.
        held: The contents of the containers, read just before `entries`. So the next look finds a
            write of another thread that came in between. None if they could not be read.
    """

    entries: Sequence[Change]
    held: Held | None


NO_CHANGES = ModelChanges((), None)


class Container:
    """A container, its owner, and the contents that it must have.

    Attributes:
        live: The container itself, which the model or a replica uses.
        expected: A copy of the contents that it must have: a dict for a dict, a list for others.
    """

    __slots__ = ("expected", "live", "owner", "place")

    def __init__(self, place: Place, owner: Any) -> None:
        self.place = place
        self.owner = owner
        self.live = place.container(owner)
        if isinstance(self.live, dict):
            # Other threads may write the model's containers. A list of the items is made in one
            # step, a dict of them is not
            self.expected: Any = dict([*dict.items(self.live)])
        else:
            self.expected = read_items(self.live)


class _Contents(NamedTuple):
    """The contents of containers, in the order of the lists of the same names in `Snapshot`."""

    modules: list[dict[str, Any]]
    instances: list[Iterable[Any]]
    views: list[Iterable[Any]]
    keyed: list[Iterable[Any]]
    sized: list[Any]


class Snapshot:
    """The contents of all containers of one model, or of one replica, at one moment.

    `copy_of` returns the replica's copy of an owner of containers; None to leave the owner out. A
    snapshot of the model (`is_model`) shows every change. A snapshot of a replica does not show
    changes that forward never makes: a parameter under another name, an object with another class,
    or a module with another table.

    Most containers of a model are the ``__dict__`` of a module, and torch makes most entries of
    these. So a snapshot reads only the other entries, by name. It reads a table of hooks that was
    empty again only after `RemovableHandle` has counted a new hook.

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
        # Of each module: itself, a getter of its compared entries, and one of its tables of hooks
        self._modules: list[Any] = []
        self._getters: list[itemgetter[Any]] = []
        self._hook_getters: list[itemgetter[Any]] = []
        # Objects that are not modules: all values of their ``__dict__`` are compared
        self._instances: list[Any] = []
        # Views of other dicts, and lists: all their values are compared
        self._views: list[Iterable[Any]] = []
        self._keyed: list[Iterable[Any]] = []  # views of dicts with keys that are compared
        self._sized: list[Any] = []  # containers with lengths that are compared
        self._empty: list[Any] = []  # containers that must stay empty
        self._without_hooks: list[Any] = []  # empty tables, read if the count of hooks changes
        self._owners: list[Any] = []  # objects of the model with classes that are compared
        # First: a hook that is registered from here on changes the count
        self._last_hook = read_settled_count()
        contents = _Contents([], [], [], [], [])
        for place in places:
            owner = copy_of(place.owner)
            if owner is not None:
                self._enter(Container(place, owner), contents)
        self._views.append(_END_OF_VALUES)
        contents.views.append(_END_OF_VALUES)
        # From the contents that were read above. If the containers were read again, a write of
        # another thread in between would stay unseen
        self._held = self._collect(contents)
        self._hooks = self._read_hooks(contents.modules)

    def _enter(self, container: Container, contents: _Contents) -> None:
        """Enter a container into the lists above, and what it holds into those of `contents`."""
        live, kind = container.live, container.place.kind
        self.containers[container.place.key] = container
        if not isinstance(live, dict):
            self._lists.append(container)
            self._enter_list(container, contents)
            return
        self._dicts.append(container)
        if kind == "vars" and self._is_model:
            self._owners.append(container.owner)
        # The ``__dict__`` of a block's own module is a `PlainView` with a `__getitem__` in Python.
        # So it is read whole, as those of other objects
        if kind == "vars" and type(live) is dict and isinstance(container.owner, torch.nn.Module):
            self._enter_module(container, contents)
        elif container.expected or not _has_usual_length(live):
            self._enter_dict(container, contents)
        elif kind in HOOK_TABLES:
            self._without_hooks.append(live)
        else:
            self._empty.append(live)

    def _enter_list(self, container: Container, contents: _Contents) -> None:
        live, expected = container.live, container.expected
        # Slots and cells always have the same length
        shows_length = isinstance(live, LISTS) and _has_usual_length(live)
        if shows_length and not expected:
            self._empty.append(live)
            return
        self._views.append(live)
        contents.views.append(expected)
        if shows_length:
            self._sized.append(live)
            contents.sized.append(expected)

    def _enter_module(self, container: Container, contents: _Contents) -> None:
        entries = container.expected
        names = [name for name in entries if name not in MODULE_ENTRIES]
        if self._is_model:  # forward gives no module another table
            names += [name for name in TABLES if name in entries]
            names += [name for name in HOOK_TABLES if entries.get(name)]
        hooks = sorted(HOOK_TABLES & entries.keys())
        self._modules.append(container.owner)
        contents.modules.append(entries)
        self._getters.append(_make_getter(tuple(names)))
        self._hook_getters.append(_make_getter(tuple(hooks)))

    def _enter_dict(self, container: Container, contents: _Contents) -> None:
        live, expected, kind = container.live, container.expected, container.place.kind
        if kind == "vars":
            self._instances.append(container.owner)
            contents.instances.append(expected.values())
        else:
            self._views.append(dict.values(live))
            contents.views.append(expected.values())
        keys = dict.keys(live)  # past the methods of a subclass, also for the length
        is_table = kind in TABLES or kind in HOOK_TABLES
        if self._is_model or not is_table:  # forward gives no parameter another name
            self._keyed.append(keys)
            contents.keyed.append(expected)
        if not is_table:
            # All values are compared in one sequence. If an entry moves from the end of a container
            # to the beginning of the next one, the sequence stays the same, but the lengths do not.
            # Tables need no length: a new entry comes last in its table
            self._sized.append(keys)
            contents.sized.append(expected)

    # Is it the same?

    def is_same(self) -> bool:
        """True if the containers hold the very same objects."""
        values, lengths, keys, classes = self._held
        try:
            # The same steps as `_read_held`, without its calls: this runs several times per call.
            # Each ``__dict__`` is read from its owner, which may have got another one
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
        """Accept the objects that the containers hold now, for `is_same`."""
        # Before the containers are read: a hook that is registered from here on needs a look
        self._last_hook = read_settled_count()
        self._held = self._read_held()
        self._hooks = self._read_hooks(map(_dict_of, self._modules))

    def _read_held(self) -> Held:
        dicts = [*map(_dict_of, self._modules)]
        instances: list[Iterable[Any]] = [*map(dict.values, map(_dict_of, self._instances))]
        return self._collect(_Contents(dicts, instances, self._views, self._keyed, self._sized))

    def _collect(self, contents: _Contents) -> Held:
        """Return what `is_same` compares, in its order."""
        of_modules = map(_read_entries, self._getters, contents.modules)  # a tuple for each module
        containers = chain(of_modules, contents.instances, contents.views)
        values = chain.from_iterable(containers)
        lengths = [*map(len, contents.modules), *map(len, contents.sized)]
        keys = chain.from_iterable(contents.keyed)
        return Held([*values], lengths, [*keys], [*map(type, self._owners)])

    def _has_same_hooks(self) -> bool:
        """True if no table has got or lost a hook. If so, accept the process's new count of hooks.

        Call this after the count has changed: a module has got a hook, perhaps in another model.
        """
        count = read_settled_count()  # before the tables are read, as in `note`
        hooks = self._read_hooks(map(_dict_of, self._modules))
        # A table that was empty has an entry now; or another one has, and all are compared in the
        # order of the last look
        if any(self._without_hooks) or not all(map(is_, hooks, self._hooks)):
            return False
        self._last_hook = count
        return True

    def _read_hooks(self, dicts: Iterable[dict[str, Any]]) -> list[Any]:
        """Return the tables of hooks of all modules, from the ``__dict__`` of each."""
        return [*chain.from_iterable(map(_read_entries, self._hook_getters, dicts))]

    # What changed?

    def read_changes(self) -> ModelChanges:
        """Return the entries that differ from the expected ones, for `accept`."""
        try:
            held = self._read_held()
        except (KeyError, RuntimeError):  # as in `is_same`: such changes cannot be accepted
            held = None
        return ModelChanges(self.list_changes(), held)

    def accept(self, changes: ModelChanges) -> None:
        """Accept changes of entries of dicts."""
        assert changes.held is not None, "the containers could not be read"
        for place, key, _, now in changes.entries:
            self.containers[place.key].expected[key] = now
        self._held = changes.held

    def list_changes(self) -> list[Change]:
        """Return the entries that differ from the expected ones.

        For an object with another ``__dict__``, the key is "__dict__".
        """
        found = [
            Change(each.place, "__dict__", each.live, vars(each.owner))
            for each in self._find_replaced()
        ]
        for each in self._find_changed():
            expected, live = each.expected, each.live
            if isinstance(expected, list):
                found.append(Change(each.place, None, expected, read_items(live)))
                continue
            # A dict of no values is a set that keeps the order
            for key in dict.fromkeys([*expected, *dict.keys(live)]):
                before, now = expected.get(key, ABSENT), dict.get(live, key, ABSENT)
                if before is not now:
                    found.append(Change(each.place, key, before, now))
        return found

    def _find_replaced(self) -> list[Container]:
        """Return the former ``__dict__`` of each object that has got another one."""
        dicts_of_objects = [each for each in self._dicts if each.place.kind == "vars"]
        return [each for each in dicts_of_objects if each.owner.__dict__ is not each.live]

    def _find_changed(self) -> list[Container]:
        """Return the containers that hold other objects than expected."""
        found: list[Container] = []
        same_length: list[Container] = []
        for each in self._dicts:
            if dict.__len__(each.live) == len(each.expected):
                same_length.append(each)
            else:
                found.append(each)
        # The entries of dicts of the same length are compared in C loops, since many models set an
        # attribute at each step of a training loop. `holders` has, for each entry, its dict
        lengths = [len(each.expected) for each in same_length]
        holders = [*chain.from_iterable(map(repeat, same_length, lengths))]
        # If only a key is another object, `list_changes` finds whether its entry has changed
        for read in (dict.values, dict.keys):
            # A list of each dict, which is made in one step: other threads may write the model
            now = chain.from_iterable([[*read(each.live)] for each in same_length])
            expected = chain.from_iterable([read(each.expected) for each in same_length])
            found += compress(holders, map(is_not, now, expected))
        for each in self._lists:
            items = read_items(each.live)
            if len(items) != len(each.expected) or not all(map(is_, items, each.expected)):
                found.append(each)
        return [*dict.fromkeys(found)]  # each container once

    # Writes

    def restore(self) -> None:
        """Put back the expected contents. Only for a replica, which owns its containers.

        Ctrl-C between any two lines leaves the replica dirty, so the next call repeats all of them.
        """
        for each in self._find_replaced():
            object.__setattr__(each.owner, "__dict__", each.live)
        for each in self._find_changed():
            live, expected = each.live, each.expected
            if isinstance(live, dict):
                # Not by the methods of a subclass, which may refuse or convert entries. Those of
                # dict would not update the order that an OrderedDict notes itself
                cls: Any = OrderedDict if isinstance(live, OrderedDict) else dict
                cls.clear(live)
                cls.update(live, expected)
                continue
            live.clear()
            if isinstance(live, set):
                live.update(expected)
            else:
                live.extend(expected)
        self.note()

    def read(self, place: Place) -> Any:
        """Return the container at a place."""
        return self.containers[place.key].live

    def has(self, place: Place, key: Any) -> bool:
        """True if the container at a place is a dict that is expected to hold the key."""
        found = self.containers.get(place.key)
        return found is not None and isinstance(found.live, dict) and key in found.expected

    def put(self, place: Place, key: Any, value: Any) -> None:
        """Set an entry that exists, and expect the new value. Afterwards, call `note`."""
        for write in self.writers_of(place, key):
            write(value)

    def writers_of(self, place: Place, key: Any) -> list[Callable[[Any], None]]:
        """Return the functions that set an entry that exists, and expect its new value.

        They are partials of C functions: many entries are written without a call of Python code.
        """
        found = self.containers.get(place.key)
        if found is None:  # lanes share its owner, which keeps the model's own entry
            return []
        write_live = dict.__setitem__ if isinstance(found.live, dict) else setitem
        return [partial(write_live, found.live, key), partial(setitem, found.expected, key)]

    def clear(self) -> None:
        """Empty the modules and the plain containers, so that cycles among them keep nothing alive.

        Only for a replica. `copy.deepcopy` has made these objects, so the replica owns them. An
        instance of another class may belong to a cache or a registry of the user's, and stays.
        """
        for each in self.containers.values():
            if isinstance(each.owner, torch.nn.Module) or type(each.owner) in ALWAYS_NEW:
                each.live.clear()


# The state


class Doubts:
    """Reasons to refresh that no comparison of the model shows.

    Any thread may add a doubt, also a callback in a lane: it stores a new object in an attribute,
    in one step. A refresh copies the doubts when it begins, and its state keeps the copy. So a
    doubt that comes during a refresh counts for the next call. A counter would not do: two threads
    that count at the same time may undo each other's step.

    Attributes:
        everything: A new object if all replicas must be built again.
        buffers: A new object if the lanes' own tensors must be renewed.
    """

    __slots__ = ("buffers", "everything")

    def __init__(self) -> None:
        self.everything = self.buffers = object()


NEVER_CURRENT = Doubts()
"""The known doubts of a state that is never current: no other doubts have these objects."""


class ReplicaLike(Protocol):
    """The attributes of a replica that `ModelState` reads. `replica.py` imports this file."""

    versioned: list[torch.Tensor]
    is_dirty: bool


ReplicaT = TypeVar("ReplicaT", bound=ReplicaLike)


class ModelState(Generic[ReplicaT]):
    """The state of a model when its replicas were brought up to date.

    A state never changes: each refresh makes another one, and stores it when it is complete. Only
    its snapshot may accept changes, for the next state.

    Attributes:
        possible_writes: What forward may write.
        survey: What the model leads to.
        snapshot: What the containers of the model held.
        replicas: One per lane; empty if calls must run plainly, or a refresh is needed first.
        away: The copies of parameters on other devices than the model's.
        sources: The tensors that have copies elsewhere, as they were before these were made.
        home: The device of the model; None if it has no tensors.
        params: The parameters that have versions.
        known_doubts: A copy of the doubts from when the refresh began.
        renews_always: As in `PossibleWrites`; False without lanes, which need no tensors.
        generation: How often a refresh has found the model changed.
    """

    def __init__(
        self,
        possible_writes: PossibleWrites,
        snapshot: Snapshot,
        doubts: Doubts,
        known_doubts: Doubts,
        *,
        devices: Iterable[torch.device] = (),
        replicas: Sequence[ReplicaT] = (),
        away: ParameterCopies = NO_COPIES,
        sources: Sources | None = None,
        versions: Sequence[int] | None = None,
        generation: int = 0,
    ) -> None:
        """Note the present state of the model.

        `sources` are those of `away` by default. `versions` are those that `read_versions` returned
        before the lanes got their copies, so that the state is stale after a write in between.
        """
        self.possible_writes = possible_writes
        self.survey = survey = possible_writes.survey
        self.snapshot = snapshot
        self.replicas = replicas
        self.away = away
        self.known_doubts = known_doubts
        self._doubts = doubts
        self.generation = generation
        self.home = home_of_survey(survey)
        tensors = [*survey.params, *survey.tensors]
        # A tensor that shows whether the model has moved
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
        self.renews_always = bool(replicas) and possible_writes.renews_always
        self.sources = away.sources if sources is None else sources
        self._devices = frozenset(devices)
        self._streams = self._read_streams() if replicas else {}

    def is_current(self) -> bool:
        """True if the replicas are what a call of this moment needs."""
        return (
            self._doubts.everything is self.known_doubts.everything
            and self._doubts.buffers is self.known_doubts.buffers
            and not self.renews_always
            and self.snapshot.is_same()
            # A write in place raises the version. Parameters are not among these tensors: lanes on
            # the model's device share them, and for lanes elsewhere `sources` shows their writes
            and [*map(version_of, self._tracked)] == self._versions
            # Lanes must share a buffer that requires gradients now, as they share parameters
            and True not in map(_requires_grad, self._tracked)
            and True not in map(_is_dirty, self.replicas)
            # ``model.to(...)`` moves all tensors and keeps their identities, so one shows the move
            and (self._first is None or self._first.device == self.home)
            # `sources` is empty without lanes elsewhere, and `_streams` if all devices are the CPU
            and (not self.sources.tensors or self.has_same_sources())
            and (not self._streams or self._streams == self._read_streams())
        )

    # For a refresh: how much must be done?

    def must_rebuild(self) -> bool:
        """True if all replicas must be made again.

        The reasons are a doubt, a model that moved, and a buffer that requires gradients now.
        """
        is_in_doubt = self._doubts.everything is not self.known_doubts.everything
        if not self.replicas or is_in_doubt or self.sources.have_moved():
            return True
        has_moved = self._first is not None and self._first.device != self.home
        return has_moved or True in map(_requires_grad, self.survey.tensors)

    def must_renew_tensors(self) -> bool:
        """True if the model's tensors besides parameters, or a lane's, were or may be written."""
        is_in_doubt = self._doubts.buffers is not self.known_doubts.buffers
        if self.renews_always or is_in_doubt:
            return True
        return [*map(version_of, self._tracked)] != self._versions

    def has_written_tensors(self) -> bool:
        """True if one of the model's own tensors besides parameters was written."""
        return read_versions(self.survey) != self._versions_of_model

    def has_same_sources(self) -> bool:
        """True if the next call may use the copies of parameters on other devices.

        With gradients, copies are part of the graph of one call, so each call needs new ones.
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
    """Return the versions of the model's own tensors besides parameters and inference tensors.

    torch increments the version after it has written. So read versions before you copy tensors: if
    a version is still the same later, the copy has the tensor's values.
    """
    return [*map(version_of, survey.versioned)]
