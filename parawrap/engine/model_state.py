"""The state of a model at its last refresh, and the one question: is the model still the same?

`ModelState.is_current` is asked by cut calls, by streams, and by workers. Identities are compared,
never values, in plain C loops: ``all(map(is_, ...))`` over what the containers of the model hold
costs 15 ns per entry, a loop in Python ten times as much. The garbage collector could read the same
entries faster, but on free-threaded Python it stops all threads.

A `Snapshot` is what containers held at one moment. The model has one, and each replica has one,
which shows what forward wrote.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, itemgetter, ne, not_, setitem
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from parawrap._private_names import (
    BUFFERS,
    CHILDREN,
    COMPILED_CALL,
    HOOK_TABLES,
    MODULE_ENTRIES,
    PARAMETERS,
    version_of,
)
from parawrap.backends import Stream, backend_of
from parawrap.engine.parameter_copies import NO_COPIES, ParameterCopies, read_memory, read_sources
from parawrap.engine.places import (
    ALWAYS_NEW,
    LISTS,
    SIMPLE,
    Place,
    has_own_rules,
    read_items,
)
from parawrap.engine.survey import Survey, first_tensor
from parawrap.tree import ABSENT

_TABLES = (PARAMETERS, BUFFERS, CHILDREN)
_MOST_UNCHANGED = 2
_IN_ORDER = ALWAYS_NEW - {set, types.CellType}
_DICTS = (dict, OrderedDict)
# An entry after all others that equals no value: a list that became longer or shorter differs
_END_OF_VALUES = ((object(),),)
_dict_of = attrgetter("__dict__")
_is_dirty = attrgetter("is_dirty")
_requires_grad = attrgetter("requires_grad")
_read_entries = itemgetter.__call__  # takes a getter and a dict


@cache
def _getter(names: tuple[str, ...]) -> itemgetter[Any]:
    """Return a function that reads these entries of a dict as a tuple.

    Modules of one class share it. A getter of one name would return the bare value, so that name is
    read twice.
    """
    return itemgetter(*names) if len(names) > 1 else itemgetter(*names, *names)


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


class _Container:
    """A container, its owner, and what it must hold."""

    __slots__ = ("before", "own", "owner", "place")

    def __init__(self, place: Place, owner: Any) -> None:
        self.place = place
        self.owner = owner
        self.own = place.container(owner)
        # Other threads may write the model's containers. A list of the items is made in one step,
        # a dict of them is not
        if isinstance(self.own, dict):
            self.before: Any = dict([*dict.items(self.own)])
        else:
            self.before = read_items(self.own)

    def has_other_dict(self) -> bool:
        """True if its owner has got another ``__dict__``."""
        return self.owner.__dict__ is not self.own


class _Entered(NamedTuple):
    """What containers held when they were entered, in the order in which `Snapshot` reads them."""

    modules: list[dict[str, Any]]
    instances: list[Any]
    views: list[Any]
    named: list[Any]
    sized: list[Any]


class Snapshot:
    """What the containers of one model, or of one replica, held at one moment.

    `copy_of` returns the copy of an owner of containers; None to leave the owner out. A look at the
    model (`is_model`) sees everything. A look at a replica leaves out what forward does not do:
    give a parameter another name, an object another class, or a module another table.

    Modules are most of a model, and torch makes most of their entries. These are left out: entries
    are read by name. Hooks are the exception, and `RemovableHandle` counts them.
    """

    def __init__(
        self,
        places: Iterable[Place],
        copy_of: Callable[[Any], Any],
        *,
        is_model: bool = False,
    ) -> None:
        self._is_model = is_model
        self._at: dict[tuple[int, str], _Container] = {}
        self._dicts: list[_Container] = []
        self._lists: list[_Container] = []
        # Read by name: modules, with a getter of their entries and one of their tables of hooks
        self._modules: list[Any] = []
        self._getters: list[itemgetter[Any]] = []
        self._hook_getters: list[itemgetter[Any]] = []
        # Read whole: the ``__dict__`` of other objects, and the items of dicts and lists
        self._instances: list[Any] = []
        self._owners: list[Any] = []  # of each ``__dict__`` of the model, for their classes
        self._views: list[Any] = []
        # Compared by their keys and by their lengths, or for being empty
        self._named: list[Any] = []
        self._sized: list[Any] = []
        self._empty: list[Any] = []
        self._no_hooks: list[Any] = []
        # What is held is what the containers held when they were entered, and no second look:
        # another thread may write the model in between
        self._last_hook = read_settled_count()
        first = _Entered([], [], [], [], [])
        for place in places:
            owner = copy_of(place.owner)
            if owner is not None:
                self._enter(_Container(place, owner), first)
        self._views += _END_OF_VALUES
        of_modules = map(_read_entries, self._getters, first.modules)
        values = chain.from_iterable(
            chain(of_modules, first.instances, first.views, _END_OF_VALUES)
        )
        counts = [*map(len, first.modules), *map(len, first.sized)]
        classes = [*map(type, self._owners)]
        self._held = [*values], counts, [*chain.from_iterable(first.named)], classes
        self._hooks = [*chain.from_iterable(map(_read_entries, self._hook_getters, first.modules))]

    def _enter(self, found: _Container, first: _Entered) -> None:
        own, before, kind = found.own, found.before, found.place.kind
        self._at[found.place.key] = found
        if not isinstance(own, dict):
            self._lists.append(found)
            is_plain = isinstance(own, LISTS)
            if is_plain and not before:
                self._empty.append(own)
            else:
                self._views.append(own)
                first.views.append(before)
            if is_plain and before:
                self._sized.append(own)
                first.sized.append(before)
            return
        self._dicts.append(found)
        if kind == "vars" and self._is_model:
            self._owners.append(found.owner)
        # The ``__dict__`` of a block's own module is a `PlainView`, whose `__getitem__` is Python
        if kind == "vars" and type(own) is dict and isinstance(found.owner, torch.nn.Module):
            self._enter_module(found)
            first.modules.append(before)
            return
        if not before:
            (self._no_hooks if kind in HOOK_TABLES else self._empty).append(own)
            return
        if kind == "vars":
            self._instances.append(found.owner)
            first.instances.append(before.values())
        else:
            self._views.append(dict.values(own))
            first.views.append(before.values())
        is_table = kind in _TABLES or kind in HOOK_TABLES
        if self._is_model or not is_table:
            self._named.append(dict.keys(own))
            first.named.append(before)
        if not is_table:
            # An entry that moves from one container to the next leaves the order of all that is
            # held. Tables need no count: what enters one comes last, after what was there
            self._sized.append(own)
            first.sized.append(before)

    def _enter_module(self, found: _Container) -> None:
        entries = found.before
        names = [name for name in entries if name not in MODULE_ENTRIES]
        if self._is_model:
            names += [name for name in _TABLES if name in entries]
            names += [name for name in HOOK_TABLES if entries.get(name)]
        hooks = sorted(HOOK_TABLES & entries.keys())
        self._modules.append(found.owner)
        self._getters.append(_getter(tuple(names) or _TABLES[:1]))
        self._hook_getters.append(_getter(tuple(hooks) or _TABLES[:1]))

    # Is it the same?

    def note(self) -> None:
        """Note the objects that are held now."""
        # Each registration of a hook takes the next number, for any module of the process. While
        # the number stays, no table can have got a hook, and the tables need no look
        self._last_hook = read_settled_count()  # before the look: a later hook needs another one
        self._held = self._read_held()
        self._hooks = self._read_hooks()

    def is_same(self) -> bool:
        """True if the containers hold the very same objects."""
        held, counts, keys, classes = self._held
        try:
            # As in `_read_held`, in place: this is asked several times per call. Each ``__dict__``
            # is read from its owner, which may have got another one
            dicts = [*map(_dict_of, self._modules)]
            of_modules = map(_read_entries, self._getters, dicts)
            of_instances = map(dict.values, map(_dict_of, self._instances))
            now = chain.from_iterable(chain(of_modules, of_instances, self._views))
            return (
                all(map(is_, now, held))
                and not any(self._empty)
                and [*map(len, dicts), *map(len, self._sized)] == counts
                and [*chain.from_iterable(self._named)] == keys
                and [*map(type, self._owners)] == classes
                and (RemovableHandle.next_id == self._last_hook or self._has_same_hooks())
            )
        except (KeyError, RuntimeError):
            # An attribute is missing, or another thread writes a container at this moment
            return False

    def _read_held(self) -> tuple[list[Any], list[int], list[Any], list[type]]:
        """Return the objects that are held now, and what else `is_same` compares."""
        dicts = [*map(_dict_of, self._modules)]
        of_modules = map(_read_entries, self._getters, dicts)
        of_instances = map(dict.values, map(_dict_of, self._instances))
        now = chain.from_iterable(chain(of_modules, of_instances, self._views))
        counts = [*map(len, dicts), *map(len, self._sized)]
        keys = [*chain.from_iterable(self._named)]
        return [*now], counts, keys, [*map(type, self._owners)]

    def _has_same_hooks(self) -> bool:
        """Look at all tables of hooks: some module of the process has got a hook."""
        number = read_settled_count()  # before the look, as in `note`
        if any(self._no_hooks) or not all(map(is_, self._read_hooks(), self._hooks)):
            return False
        self._last_hook = number
        return True

    def _read_hooks(self) -> list[Any]:
        tables = map(_read_entries, self._hook_getters, map(_dict_of, self._modules))
        return [*chain.from_iterable(tables)]

    # What changed?

    def read_changes(self) -> tuple[list[Change], Any]:
        """Return the entries that differ from those that must be held, and a mark for `accept`.

        The mark is read before, so a write of another thread in between is another change. None if
        an attribute is missing, or another thread writes at this moment: such changes cannot be
        accepted.
        """
        try:
            mark = self._read_held()
        except (KeyError, RuntimeError):
            mark = None
        return self.changes(), mark

    def changes(self) -> list[Change]:
        """Return the entries that differ from those that must be held.

        A replaced ``__dict__`` is an entry.
        """
        owned = [each for each in self._dicts if each.place.kind == "vars"]
        others = [each for each in owned if each.has_other_dict()]
        found = [Change(each.place, "__dict__", each.own, vars(each.owner)) for each in others]
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

    def accept(self, changes: Iterable[Change], mark: Any) -> None:
        """Accept entries of dicts, with the mark that came with them."""
        for place, key, _, now in changes:
            self._at[place.key].before[key] = now
        self._held = mark

    def _find_changed(self) -> list[_Container]:
        """Return the containers that hold other objects.

        In C loops too: many models set an attribute at each step of a training loop.
        """
        dicts = self._dicts
        lengths = [len(each.before) for each in dicts]
        lengths_now = [dict.__len__(each.own) for each in dicts]
        is_other_length = [*map(ne, lengths_now, lengths)]
        found = [*compress(dicts, is_other_length)]
        rest = [*compress(dicts, map(not_, is_other_length))]
        lengths = [len(each.before) for each in rest]
        for read in (dict.values, dict.keys):
            # A list of each first, which is one step: other threads may write the model
            now = chain.from_iterable([[*read(each.own)] for each in rest])
            before = chain.from_iterable([read(each.before) for each in rest])
            holders = chain.from_iterable(map(repeat, rest, lengths))
            found += compress(holders, map(is_not, now, before))
        for each in self._lists:
            now_held = read_items(each.own)
            same_length = len(now_held) == len(each.before)
            if not (same_length and all(map(is_, now_held, each.before))):
                found.append(each)
        return [*dict.fromkeys(found)]

    # The containers of a replica

    def restore(self) -> None:
        """Put back what must be held."""
        for each in self._dicts:
            if each.place.kind == "vars" and each.has_other_dict():
                object.__setattr__(each.owner, "__dict__", each.own)
        for each in self._find_changed():
            own, before = each.own, each.before
            if isinstance(own, dict):
                # Around the methods of a subclass, which may refuse or convert entries
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
        return self._at[place.key].own

    def has(self, place: Place, key: Any) -> bool:
        """True if the container at a place is a dict that must hold the key."""
        found = self._at.get(place.key)
        return found is not None and isinstance(found.own, dict) and key in found.before

    def put(self, place: Place, key: Any, value: Any) -> None:
        """Set an entry that exists, and accept it once `note` is called."""
        for write in self.writers_of(place, key):
            write(value)

    def writers_of(self, place: Place, key: Any) -> list[Callable[[Any], None]]:
        """Return the functions that set and accept an entry that exists, for as long as this lives.

        They are partials of C functions: many entries are written without a call of Python code.
        """
        found = self._at.get(place.key)
        if found is None:  # of an object that all lanes use, so it has the model's own entry
            return []
        set_own = dict.__setitem__ if isinstance(found.own, dict) else setitem
        return [partial(set_own, found.own, key), partial(setitem, found.before, key)]

    def read_plain(self, left_out: set[Any]) -> PlainPart:
        """Return what each copy of the model must hold too, without the places of these keys."""
        plain = PlainPart([], [], [], set())
        rules: dict[type, bool] = {}  # not a cache of the process: it would keep classes alive
        for key, each in self._at.items():
            cls = type(each.owner)
            kind = key[1]
            held = each.before
            if cls not in rules:
                rules[cls] = has_own_rules(cls)
            if rules[cls] or key in left_out:
                continue
            is_view = kind == "vars" and hasattr(each.own, "names_of_stubs")
            if is_view or (kind == "vars" and COMPILED_CALL in held):
                # Copies get neither the stubs of a block nor compiled code
                names = {COMPILED_CALL, *(each.own.names_of_stubs() if is_view else ())}
                held = {name: value for name, value in held.items() if name not in names}
                plain.partial.add(key)
            elif cls not in _IN_ORDER and (kind == "items" or type(each.own) not in _DICTS):
                continue
            plain.keys.append(key)
            plain.held.append(held)
            if kind in HOOK_TABLES and held:
                plain.hooks.append((key, [*held]))
        return plain

    def adopt(self, plain: PlainPart, copy_of: Callable[[int, Any], Any]) -> Any:
        """Set numbers, flags, and texts of a new replica to those of the model.

        `copy_of` takes the id of a part of the model, and the part, and returns its copy, or the
        part if lanes share it.

        Return the key of a place that holds something else; None if there is none. While
        `copy.deepcopy` ran, another thread may have registered a hook, or set an attribute, and
        taken that back before the model was looked at again: no look at the model shows that. And a
        loop over a dict that gets and loses an entry may leave out others.
        """
        at = self._at
        for key, hooks in plain.hooks:
            if key in at and [*at[key].before] != hooks:
                return key
        is_changed = False
        for key, held in zip(plain.keys, plain.held, strict=True):
            mine = at.get(key)
            if mine is None:  # of an object that all lanes use
                continue
            before = mine.before
            if key in plain.partial:
                before = {name: before.get(name, ABSENT) for name in held}
            if len(before) != len(held):
                return key
            is_dict = isinstance(held, dict)
            values = held.values() if is_dict else held
            expected = [*map(copy_of, map(id, values), values)]
            if all(map(is_, before.values() if is_dict else before, expected)):
                continue
            if not is_dict or before.keys() != held.keys():
                return key
            for name, value in zip(held, expected, strict=True):
                if before[name] is value:
                    continue
                if type(value) not in SIMPLE or type(before[name]) not in SIMPLE:
                    return key
                dict.__setitem__(mine.own, name, value)
                mine.before[name] = value
                is_changed = True
        if is_changed:
            self.note()
        return None

    def clear(self) -> None:
        """Empty the modules and the plain containers, so that cycles among them keep nothing alive.

        `copy.deepcopy` has made these. It may have got any other object from a cache or a registry,
        which has it still, so instances of other classes are left to the garbage collector.
        """
        for each in self._at.values():
            if isinstance(each.owner, torch.nn.Module) or type(each.owner) in ALWAYS_NEW:
                each.own.clear()


def was_disturbed(error: Exception, snapshot: Snapshot | None, copies: int) -> bool:
    """True if a copy may have failed because another thread changed the model meanwhile.

    `snapshot` is that of the model before the copy, and `copies` how many were tried.
    """
    if snapshot is not None and not snapshot.is_same():
        return True
    # A change may also have come and gone. Python's error about a dict that changes under a loop is
    # a plain RuntimeError. Two more copies are enough: so many changes leave a trace
    cause = error.__cause__ or error
    return type(cause) is RuntimeError and copies <= _MOST_UNCHANGED


class PlainPart(NamedTuple):
    """What a model and its copies hold alike: all but the parts whose classes copy themselves.

    Attributes:
        keys: Those of the places.
        held: What the container at each place held.
        hooks: The numbers of the hooks in each table that has any.
        partial: The keys of places of which copies may hold more.
    """

    keys: list[tuple[int, str]]
    held: list[Any]
    hooks: list[tuple[tuple[int, str], list[Any]]]
    partial: set[tuple[int, str]]


class Edition:
    """Facts about a model that hold until its structure or a training flag changes.

    Attributes:
        survey: The walk over the target.
        trains: True if a module is in training mode.
        is_quiet: True if forward is code of listed classes of torch.nn alone, which write nothing.
        writes_statistics: True if forward is code of such classes, and of batch norms in training
            mode, which write their statistics in place and nothing else.
        probed: Plans of cut calls that have run. The first call of each is watched more closely.
        is_checked: True once a whole call is watched for writes through ``.data``.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.probed: set[Any] = set()
        self.is_checked = False
        self.trains = any(module.training for module in survey.modules)
        self.is_quiet = survey.is_quiet()
        self.writes_statistics = self.trains and survey.writes_statistics_alone()


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
        lanes: One replica per lane; empty if calls must run plainly, or a refresh is needed first.
        away: The copies of parameters on other devices than the model's.
        home: The device of the model; None if it has no tensors.
        params: The parameters that have versions.
        everything, buffers: The doubts when the refresh began.
        renews_always: True if forward may write buffers without a new version, so that each call
            must refresh.
        generation: How often a refresh has found the model changed.
    """

    __slots__ = (
        *("away", "buffers", "edition", "everything", "generation", "home", "lanes", "params"),
        *("renews_always", "snapshot", "survey", "_devices", "_doubts", "_first", "_sources"),
        *("_sources_then", "_streams", "_tracked", "_versions"),
    )

    def __init__(
        self,
        edition: Edition,
        snapshot: Snapshot,
        doubts: Doubts,
        asked: tuple[object, object],
        *,
        devices: Iterable[torch.device] = (),
        lanes: Sequence[CopyT] = (),
        away: ParameterCopies = NO_COPIES,
        sources: Sequence[torch.Tensor] | None = None,
        versions: Sequence[int] | None = None,
        renews_always: bool = False,
        generation: int = 0,
    ) -> None:
        """Note the state of now.

        `asked` are the doubts when the refresh began, `sources` the tensors of which copies exist
        elsewhere: by default, those of `away`. `versions` are those of `read_versions` before the
        lanes got their copies: a write that came meanwhile makes the state an old one.
        """
        survey = edition.survey
        tensors = [*survey.params, *survey.tensors]
        self.edition = edition
        self.survey = survey
        self.snapshot = snapshot
        self.lanes = lanes
        self.away = away
        self._doubts = doubts
        self.everything, self.buffers = asked
        self.renews_always = renews_always
        self.generation = generation
        self.home = home_of_survey(survey)
        self._first = next((tensor for tensor in tensors if tensor.device == self.home), None)
        self.params: list[torch.Tensor] = []
        if not survey.is_lazy:
            self.params = [tensor for tensor in survey.params if not tensor.is_inference()]
        # The model's buffers and the lanes' own: forward may write either in a call
        self._tracked = [*survey.versioned]
        if not survey.is_lazy:  # a tensor without a shape has no version either
            self._tracked += chain.from_iterable(replica.versioned for replica in lanes)
        self._versions = [*map(version_of, self._tracked)]
        if versions is not None:
            self._versions[: len(versions)] = versions
        self._sources = away.originals if sources is None else sources
        self._sources_then = away.sources_then if sources is None else read_sources(sources)
        self._devices = frozenset(devices)
        self._streams = self._read_streams() if lanes else {}

    def is_current(self) -> bool:
        """True if the replicas are what a call of this moment needs."""
        return (
            self._doubts.everything is self.everything
            and self._doubts.buffers is self.buffers
            and not self.renews_always
            and self.snapshot.is_same()
            and [*map(version_of, self._tracked)] == self._versions
            and True not in map(_requires_grad, self._tracked)
            and True not in map(_is_dirty, self.lanes)
            and (self._first is None or self._first.device == self.home)
            # Without lanes elsewhere, the rest is two looks at empty containers
            and (not self._sources or self.has_same_sources())
            and (not self._streams or self._streams == self._read_streams())
        )

    # What a refresh reads, to find out how much must be done

    def must_rebuild(self) -> bool:
        """True if everything must be made again.

        That is on demand, for a model that moved, or for buffers that learn now.
        """
        has_moved = self._first is not None and self._first.device != self.home
        learns = True in map(_requires_grad, self.survey.tensors)
        is_asked = self._doubts.everything is not self.everything
        return not self.lanes or is_asked or has_moved or learns or self.have_sources_moved()

    def must_renew_tensors(self) -> bool:
        """True if a tensor that lanes have copies of was written, perhaps unseen."""
        is_unsure = self.renews_always or self._doubts.buffers is not self.buffers
        return is_unsure or [*map(version_of, self._tracked)] != self._versions

    def has_written_tensors(self) -> bool:
        """True if one of the model's own tensors besides parameters was written."""
        versions = read_versions(self.survey)
        return versions != self._versions[: len(versions)]

    def has_same_sources(self) -> bool:
        """True if copies elsewhere are those that a call of this moment needs.

        With gradients, copies are part of the graph of one call, so each call needs others.
        """
        with_graph = torch.is_grad_enabled() and (self.away.is_linked or self.away.must_link())
        return not with_graph and not self.have_sources_changed()

    def have_sources_changed(self) -> bool:
        """True if a tensor with copies elsewhere was written, moved, frozen, or unfrozen."""
        return read_sources(self._sources) != self._sources_then

    def have_sources_moved(self) -> bool:
        """True if such a tensor has other memory, or another dtype."""
        return bool(self._sources) and read_memory(self._sources) != self._sources_then[-1]

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


def home_of_survey(survey: Survey) -> torch.device | None:
    """Return the device of a target; without a module, that of the first tensor that it holds."""
    home = home_of_target(survey.target)
    tensors = chain(survey.params, survey.tensors)
    return next((tensor.device for tensor in tensors), None) if home is None else home


def home_of_target(target: Any) -> torch.device | None:
    """Return the device of the first parameter or buffer of a module; None without one."""
    module = target.__self__ if isinstance(target, types.MethodType) else target
    first = first_tensor(module) if isinstance(module, torch.nn.Module) else None
    return None if first is None else first.device
