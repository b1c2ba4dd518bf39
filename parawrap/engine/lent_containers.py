"""Containers among the arguments: find what forward changed in a lane's copy, and repeat it.

`Contents.read` notes what a copy holds before forward. `read_entries` finds what it holds after
forward: each entry is an old one, under the same key or another, or a new value. After all joins,
`enter_entries` makes the same change in the caller's own container.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple

import torch

from parawrap.engine.flat_call import is_plain_value
from parawrap.tree import (
    ABSENT,
    Attribute,
    TreeSpec,
    flatten_once,
    is_kept_whole,
    names_of_slots,
    unflatten,
)

# Instances of these very classes have no attributes, so none are read. A subclass may have some
_WITHOUT_ATTRIBUTES = frozenset({dict, list, deque, OrderedDict, defaultdict})
_MOST_STRUCTURES = 1024  # of calls; as many as a cutter keeps plans

Path = tuple[Any, ...]
"""The keys that lead from (args, kwargs), or from an output, to a container."""


# Where containers are


@lru_cache(_MOST_STRUCTURES)
def paths_of_containers(spec: TreeSpec) -> tuple[Path, ...]:
    """Return the paths to the containers that forward may change, in calls of one structure.

    Tuples and objects with rules are left out. So is the dict of the keyword arguments, which each
    call makes.
    """
    found: list[Path] = []
    waiting: list[tuple[Path, TreeSpec]] = [((), spec)]
    while waiting:
        path, node = waiting.pop()
        if node.type is None or is_kept_whole(node.type):  # a leaf has no type
            continue
        # Shorter paths lead to the pair (args, kwargs), to args, and to kwargs
        is_in_arguments = len(path) >= 2
        if is_in_arguments and not issubclass(node.type, tuple):
            found.append(path)
        for step, child in zip(node.entries(), node.children(), strict=True):
            waiting.append(((*path, step), child))
    return tuple(found)


def follow_path(call: Any, path: Path) -> Any:
    """Return the part of a call that a path leads to."""
    part = call
    for step in path:
        part = getattr(part, step) if isinstance(step, Attribute) else part[step]
    return part


def walk_containers(value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the containers of an output, with the path to each."""
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, torch.Tensor) or is_kept_whole(type(node)):
            continue
        parts, spec = flatten_once(node)
        if spec.is_leaf():
            continue
        yield path, node
        for step, part in zip(spec.entries(), parts, strict=True):
            waiting.append(((*path, step), part))


def replace_parts(
    value: Any,
    find: Callable[[Any], Any],
    must_copy: Callable[[Any], bool] | None = None,
) -> Any:
    """Return a value with ``find(part)`` in the place of each part for which that is not None.

    `find` is called with the value itself, and with the containers and leaves in it. A container
    without a replaced part stays the same object, unless ``must_copy(container)`` is True.
    """
    found = find(value)
    if found is not None:
        return found
    if isinstance(value, torch.Tensor) or is_kept_whole(type(value)):
        return value
    parts, spec = flatten_once(value)
    if spec.is_leaf():
        return value
    made = [replace_parts(part, find, must_copy) for part in parts]
    has_same_parts = all(map(is_, made, parts))
    if has_same_parts and (must_copy is None or not must_copy(value)):
        return value
    return unflatten(spec, made)


# Before forward


class Contents(NamedTuple):
    """A container and the objects in it at one moment.

    Attributes:
        container: The container itself.
        items: A shallow copy of its items: a list, or a dict by key.
        attributes: Its attributes and slots, by name.
    """

    container: Any
    items: Any
    attributes: dict[str, Any]

    @classmethod
    def read(cls, container: Any) -> Contents:
        """Return what a container holds now."""
        if isinstance(container, (list, deque)):
            items: Any = [*container]
        elif isinstance(container, dict):
            # By the method of dict: that of a subclass may make new values
            items = dict(dict.items(container))
        elif isinstance(container, Mapping):
            items = {key: container[key] for key in container}
        else:
            items = {}
        if type(container) in _WITHOUT_ATTRIBUTES:
            return cls(container, items, {})
        return cls(container, items, read_attributes(container))

    def is_unchanged(self) -> bool:
        """True if the container holds the same objects under the same keys."""
        # No copy of a plain container: every call compares all of its containers
        if type(self.container) in _WITHOUT_ATTRIBUTES:
            return are_same_objects(self.container, self.items)
        now = Contents.read(self.container)
        has_same_items = are_same_objects(now.items, self.items)
        return has_same_items and are_same_objects(now.attributes, self.attributes)

    def items_by_key(self) -> dict[Any, Any]:
        """Return the items by key, those of a list by index."""
        if isinstance(self.items, list):
            return dict(enumerate(self.items))
        return dict(self.items)


def read_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes and slots of an object, without the items of a mapping."""
    own = getattr(value, "__dict__", {})
    # The attributes of a namespace with `self.__dict__ = self` are its items
    found = {} if own is value else dict(own)
    if isinstance(value, Mapping) and not isinstance(value, dict):
        found.pop("data", None)  # the items of a UserDict
    for name in names_of_slots(type(value)):
        part = getattr(value, name, ABSENT)
        if part is not ABSENT:
            found[name] = part
    return found


def are_same_objects(one: Any, other: Any) -> bool:
    """True if two lists, or two dicts, hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if not isinstance(one, dict):
        return all(map(is_, one, other))
    return all(map(is_, one.values(), other.values())) and [*one] == [*other]


# After forward


class Old(NamedTuple):
    """The entry that a container had under this key before the call."""

    key: Any


class New(NamedTuple):
    """A value that forward put into a container."""

    value: Any


Source = Old | New
"""Where an entry of a container comes from."""

Sources = dict[Any, Source]
"""The sources of all entries, by key; those of a list by index."""


class EntriesAfter(NamedTuple):
    """The entries of a container after the call.

    Attributes:
        items: The sources of the items, in their order.
        removed: The keys of the items that forward has removed.
        attributes: The sources of the attributes.
        removed_attributes: The names of the attributes that forward has removed.
        length: The number of items before the call. In a list, those after it were appended.
    """

    items: Sources
    removed: Sequence[Any]
    attributes: Sources
    removed_attributes: Sequence[str]
    length: int

    def is_alike(self, other: EntriesAfter) -> bool:
        """True if two lanes changed their copies in the same way, up to the new values."""
        # Not `removed`: before the call, both copies had the keys of the caller's container
        has_same_items = _have_same_sources(self.items, other.items)
        return has_same_items and _have_same_sources(self.attributes, other.attributes)

    def replace_new(self, replace: Callable[[Any], Any]) -> EntriesAfter:
        """Return the same entries, with ``replace(value)`` for each new value."""
        items = _replace_new_sources(self.items, replace)
        attributes = _replace_new_sources(self.attributes, replace)
        return self._replace(items=items, attributes=attributes)


def _have_same_sources(one: Sources, other: Sources) -> bool:
    # As lists: the order of the keys counts too
    if [*one] != [*other]:
        return False
    for key, source in one.items():
        # The classes are compared first: as tuples, `Old(1)` and `New(1)` are equal
        if type(source) is not type(other[key]):
            return False
        # Two new values are never compared: they are joined
        if isinstance(source, Old) and source != other[key]:
            return False
    return True


def _replace_new_sources(sources: Sources, replace: Callable[[Any], Any]) -> Sources:
    replaced = dict(sources)
    for key, source in sources.items():
        if isinstance(source, New):
            replaced[key] = New(replace(source.value))
    return replaced


def read_entries(before: Contents) -> EntriesAfter | None:
    """Return the entries of a container after the call; None if it has not changed."""
    if before.is_unchanged():
        return None
    now = Contents.read(before.container)
    old_items, items = before.items_by_key(), now.items_by_key()
    old_attributes, attributes = before.attributes, now.attributes
    return EntriesAfter(
        items=_find_sources(items, old_items),
        removed=[key for key in old_items if key not in items],
        attributes=_find_sources(attributes, old_attributes),
        removed_attributes=[name for name in old_attributes if name not in attributes],
        length=len(old_items),
    )


def _find_sources(now: dict[Any, Any], before: dict[Any, Any]) -> Sources:
    """Return where each entry comes from.

    An object that was under another key before is an old entry too: the caller's own object moves.
    """
    old_keys: dict[int, Any] = {}  # by the ids of the objects in `before`, which keeps them alive
    for key, value in before.items():
        # Equal numbers and texts may be one object, which does not show that an entry has moved
        if not is_plain_value(value):
            old_keys[id(value)] = key
    found: Sources = {}
    for key, value in now.items():
        if before.get(key, ABSENT) is value:
            found[key] = Old(key)
        elif id(value) in old_keys:
            found[key] = Old(old_keys[id(value)])
        else:
            found[key] = New(value)
    return found


# In the caller's container


def enter_entries(container: Any, after: EntriesAfter) -> None:
    """Give a container of the caller the entries that it has after the call.

    Only what forward has changed is written, since other calls may write the same container
    meanwhile. Each write of an entry of a dict or a list is one step, so no lock is needed.
    """
    if isinstance(container, (list, deque)):
        _enter_items(container, after)
    elif isinstance(container, Mapping):
        _enter_mapping(container, after)
    if after.attributes or after.removed_attributes:
        _enter_attributes(container, after)


def _enter_items(container: Any, after: EntriesAfter) -> None:
    """Give a list or a deque of the caller the items that it has after the call."""
    sources = [*after.items.values()]
    old, rest = sources[: after.length], sources[after.length :]
    keeps_all = len(old) == after.length and all(map(_stays, old, range(after.length)))
    added = [source.value for source in rest if isinstance(source, New)]
    has_only_appended = keeps_all and len(added) == len(rest)
    if has_only_appended:
        # One step, which reads no item: items that other calls append or remove meanwhile stay so
        container.extend(added)
        return
    own = [*container]
    values = [_value_of(source, own) for source in sources]
    container.clear()
    container.extend(values)


def _enter_mapping(container: Any, after: EntriesAfter) -> None:
    """Give a mapping of the caller the items that it has after the call."""
    # All values are read before the first write: it may replace one that moves to another key
    values = {key: _value_of(source, container) for key, source in after.items.items()}
    for key in after.removed:
        if key in container:
            del container[key]
    for key, value in values.items():
        if not _stays(after.items[key], key):
            container[key] = value


def _enter_attributes(container: Any, after: EntriesAfter) -> None:
    """Give a container of the caller the attributes that it has after the call."""
    now = read_attributes(container)
    values = {name: _value_of(source, now) for name, source in after.attributes.items()}
    for name in after.removed_attributes:
        if name in now:
            object.__delattr__(container, name)
    for name, value in values.items():
        # A ModelOutput sets an attribute for each of its items, so it may have this one already
        is_set_already = now.get(name, ABSENT) is value
        if not _stays(after.attributes[name], name) and not is_set_already:
            object.__setattr__(container, name, value)  # also of a frozen dataclass


def _stays(source: Source, key: Any) -> bool:
    """True if the entry under a key is the one from before the call."""
    return isinstance(source, Old) and bool(source.key == key)


def _value_of(source: Source, own: Any) -> Any:
    """Return the value of an entry; an old one is read from `own`, the caller's entries."""
    return source.value if isinstance(source, New) else own[source.key]
