"""Arguments are borrowed: what forward does to them reaches the caller's own objects.

The plain call writes into them, and so does a cut call.

A lane gets containers of its own, parts of objects with rules, and copies of tensors from other
devices. Each is noted when it is made (`lend`), next to what it held. After forward,
`Borrowed.join_changes` compares them, and joins what is new like an output. `Borrowed.enter` puts
it into the caller's object, once all joins are done: a refused call leaves the arguments alone.
Calls of plain tensors have nothing to note.

::

    caller's batch = {"x": X}         lane 0: {"x": X[:5]}  ──► {"x": X[:5], "y": Y0}  ─┐
    batch = {"x": X, "y": Y}  ◄── join ── lane 1: {"x": X[5:]}  ──► {"x": X[5:], "y": Y1}  ─┘

A worker notes its copies in the same way. It sends `read_changes` back, and `Given.replay` makes
the same changes in the process of the caller.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap._private_names import version_of
from parawrap.engine.flat_call import CALL_ROOTS
from parawrap.engine.join_rules import JoinRules, Returned, is_tree
from parawrap.engine.rules.registry import contents_of, place_leaf, splitter_of, update_argument
from parawrap.errors import GatherError, ShardError
from parawrap.tree import (
    UNDECLARED,
    Attribute,
    TreeSpec,
    WholeLeaf,
    address,
    flatten,
    is_kept_whole,
    names_of_slots,
    parts_below,
    unflatten,
)

WRITTEN_WHOLE = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. "
    "Pass one copy per row, cut the tensor with in_dims, or use an out-of-place operation"
)
_WITHOUT_ATTRIBUTES = frozenset({dict, list, deque, OrderedDict, defaultdict})
_MOST_STRUCTURES = 1024  # of calls; as many as a cutter keeps plans
_ABSENT: Any = object()

Path = tuple[Any, ...]
"""The keys that lead from (args, kwargs) to a container."""

Join = Callable[[Sequence[Any]], Any]
"""Takes the values that the lanes put at one place, and returns the one value for the caller.
Raises GatherError."""


def rules_of_entries(rules: JoinRules) -> JoinRules:
    """Return the rules for what forward puts into arguments, from the rules for outputs.

    Options that name places of the output say nothing about places in the arguments.
    """
    return JoinRules(
        rules.dim,
        UNDECLARED if is_tree(rules.out_dims) else rules.out_dims,
        None if is_tree(rules.reduce) else rules.reduce,
        "pad" if rules.join == "pad" else "cat",
        None if is_tree(rules.pad_value) else rules.pad_value,
        rules.as_torch,
    )


# Containers


class Contents(NamedTuple):
    """What a container holds, in a shallow copy: a list, or a dict by key; and its attributes."""

    items: Any
    attributes: dict[str, Any]

    @classmethod
    def read(cls, container: Any) -> Contents:
        """Return what a container holds now."""
        if isinstance(container, (list, deque)):
            items: Any = [*container]
        elif isinstance(container, dict):
            items = dict(dict.items(container))
        elif isinstance(container, Mapping):
            items = {key: container[key] for key in container}
        else:
            items = {}
        is_plain = type(container) in _WITHOUT_ATTRIBUTES
        return cls(items, {} if is_plain else _read_attributes(container))

    def is_of(self, container: Any) -> bool:
        """True if a container holds the same objects under the same keys."""
        if type(container) in _WITHOUT_ATTRIBUTES:  # compared in place
            return _are_same(container, self.items)
        now = Contents.read(container)
        return _are_same(now.items, self.items) and _are_same(now.attributes, self.attributes)


def _read_attributes(container: Any) -> dict[str, Any]:
    own = getattr(container, "__dict__", None)
    found = {} if own is None or own is container else dict(own)
    if isinstance(container, Mapping) and not isinstance(container, dict):
        found.pop("data", None)  # the items of a UserDict
    for name in names_of_slots(type(container)):
        value = getattr(container, name, _ABSENT)
        if value is not _ABSENT:
            found[name] = value
    return found


def _are_same(one: Any, other: Any) -> bool:
    """True if two lists, or two dicts, hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if not isinstance(one, dict):
        return all(map(is_, one, other))
    return all(map(is_, one.values(), other.values())) and [*one] == [*other]


@lru_cache(_MOST_STRUCTURES)
def paths_of_containers(spec: TreeSpec) -> tuple[Path, ...]:
    """Return the paths to the containers that forward may change, in calls of one structure.

    The tuple and the dict of the arguments themselves end with any call, and objects with rules of
    their own are no containers.
    """
    found: list[Path] = []
    waiting: list[tuple[Path, TreeSpec]] = [((), spec)]
    while waiting:
        path, node = waiting.pop()
        if node.is_leaf() or node.type is None or is_kept_whole(node.type):
            continue
        if len(path) > 1 and not issubclass(node.type, tuple):
            found.append(path)
        steps = zip(node.entries(), node.children(), strict=True)
        waiting += [((*path, step), child) for step, child in steps]
    return tuple(found)


def _follow(call: Any, path: Path) -> Any:
    """Return the part of a call that a path leads to."""
    for step in path:
        call = getattr(call, step) if isinstance(step, Attribute) else call[step]
    return call


# Before forward


class Moved(NamedTuple):
    """A tensor that a lane has a copy of on another device.

    Attributes:
        leaf: The index of the leaf.
        part: The part of the argument.
        copied: The lane's copy.
        version: The version of the copy before the call.
    """

    leaf: int
    part: torch.Tensor
    copied: torch.Tensor
    version: int


class Loan(NamedTuple):
    """The copies that one lane has of a call's arguments, as they were before the call.

    Attributes:
        containers: Each container, and what it held, in the order of the paths.
        objects: By the index of a leaf, the part of an object with rules, and what it held.
        moved: The tensors that came from another device.
        attributes: Those of the objects, by the index of the leaf.
        leaves: The lane's leaves.
        shared: By the index of a leaf, an object that all lanes use, and what it held.
    """

    containers: Sequence[tuple[Any, Contents]] = ()
    objects: Mapping[int, tuple[Any, Sequence[Any]]] = {}
    moved: Sequence[Moved] = ()
    attributes: Mapping[int, dict[str, Any]] = {}
    leaves: Sequence[Any] = ()
    shared: Mapping[int, tuple[Any, Sequence[Any]]] = {}

    def is_unchanged(self) -> bool:
        """True if forward has changed no container and no object."""
        for container, before in self.containers:
            if not before.is_of(container):
                return False
        for part, held in self.objects.values():
            if not _are_same(contents_of(part), held):
                return False
        return all(_are_same(_read_shared(each), held) for each, held in self.shared.values())


NOTHING = Loan()


def lend(
    call: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any] = (),
    parts: Sequence[Any] = (),
    objects: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> Loan:
    """Note what a lane gets, before forward runs.

    `call` are the arguments of the lane, with containers at `paths` and with these `leaves`;
    `parts` are the leaves before they were moved. `objects` are the indices of leaves with rules of
    their own, `shared` those of objects that all lanes use.
    """
    moved: list[Moved] = []
    if not all(map(is_, leaves, parts)):
        for index, (part, copied) in enumerate(zip(parts, leaves, strict=True)):
            is_moved = copied is not part and isinstance(part, torch.Tensor)
            if is_moved and not copied.is_inference():
                moved.append(Moved(index, part, copied, version_of(copied)))
    containers = [_follow(call, path) for path in paths]
    return Loan(
        [(each, Contents.read(each)) for each in containers],
        {index: (leaves[index], contents_of(leaves[index])) for index in objects},
        moved,
        {index: _read_attributes(leaves[index]) for index in objects},
        leaves,
        {index: (leaves[index], _read_shared(leaves[index])) for index in shared},
    )


def _read_shared(value: Any) -> list[Any]:
    """Return what an object of any class holds, in a shallow copy."""
    if parts_below(value) is not None:
        return contents_of(value)
    items, attributes = Contents.read(value)
    values = items.values() if isinstance(items, dict) else items
    return [*values, *attributes, *attributes.values()]


# After forward


class Old(NamedTuple):
    """The entry that a container had under this key before the call."""

    key: Any


class New(NamedTuple):
    """A value that forward put into a container."""

    value: Any


class EntriesAfter(NamedTuple):
    """The entries of a container after the call: an `Old` or a `New` for each of them."""

    items: Any
    attributes: dict[str, Any]


def _read_entries(container: Any, before: Contents) -> EntriesAfter | None:
    """Return the entries of a container after the call; None if it has not changed."""
    if before.is_of(container):
        return None
    now = Contents.read(container)
    items = _find_sources(now.items, before.items)
    return EntriesAfter(items, _find_sources(now.attributes, before.attributes))


def _find_sources(now: Any, before: Any) -> Any:
    """Return where each entry comes from.

    A value that is still under its key comes from there, and a value that was under another key
    from that one, so that a moved entry is the caller's own object.
    """
    keys = {id(value): key for key, value in _entries(before)}
    found: dict[Any, Old | New] = {}
    for key, value in _entries(now):
        if _get(before, key) is value:
            found[key] = Old(key)
        elif id(value) in keys:
            found[key] = Old(keys[id(value)])
        else:
            found[key] = New(value)
    return [*found.values()] if isinstance(now, list) else found


def _entries(items: Any) -> Any:
    return enumerate(items) if isinstance(items, list) else items.items()


def _get(items: Any, key: Any) -> Any:
    if isinstance(items, list):
        return items[key] if key < len(items) else _ABSENT
    return items.get(key, _ABSENT)


def replace_new_entries(loan: Loan, replace: Callable[[Any], Any]) -> None:
    """Replace what forward has put into the caller's own containers, which it got as they are."""
    for container, before in loan.containers:
        after = _read_entries(container, before)
        if after is None:
            continue
        for key, source in _entries(after.items):
            if isinstance(source, New) and (value := replace(source.value)) is not source.value:
                container[key] = value
        for name, source in after.attributes.items():
            if isinstance(source, New) and (value := replace(source.value)) is not source.value:
                object.__setattr__(container, name, value)


class Borrowed:
    """The arguments of one call, and what its lanes have of them.

    `call` are the caller's own arguments, with containers at `paths`; `values` are the leaves, and
    `name` returns the address of a leaf for errors.
    """

    def __init__(
        self,
        call: Any,
        paths: Sequence[Path],
        values: Sequence[Any],
        loans: Sequence[Loan],
        name: Callable[[int], str],
    ) -> None:
        self._call = call
        self._paths = paths
        self._values = values
        self._loans = loans
        self._name = name
        # By the kind and the number of an argument: True for containers, False for leaves
        self._marks: dict[tuple[bool, int], Returned] = {}
        self._changed: list[tuple[Any, Contents, EntriesAfter]] = []
        self._updates: list[tuple[Any, Any]] = []

    def join_changes(self, join: Join, device: torch.device | None) -> None:
        """Join what forward did to the copies. The caller's own objects are not written yet.

        Parts of objects return to `device`; None leaves them where they are.

        Raises:
            ShardError: If a change cannot be joined, or lanes wrote an object that all of them use.
        """
        if all(loan.is_unchanged() for loan in self._loans):
            return
        self._refuse_shared()
        self._changed = [*self._join_containers(join)]
        self._updates = [*self._join_objects(device)]

    def enter(self) -> None:
        """Bring what forward did to the caller's own objects."""
        for container, before, after in self._changed:
            _enter(container, before, after)
        for value, joined in self._updates:
            update_argument(value, joined)

    def mark_returned(self, output: Any, lane: int) -> Any:
        """Return an output with marks in the places of the lane's copies of arguments."""
        loan = self._loans[lane]
        places = {id(each): (True, number) for number, (each, _) in enumerate(loan.containers)}
        # Numbers and texts are left out: lanes make equal ones, which may be the same object
        for at, leaf in enumerate(loan.leaves):
            if isinstance(leaf, torch.Tensor) or at in loan.objects:
                places[id(leaf)] = False, at
        return _replace(output, lambda node: self._mark(places.get(id(node))))

    def resolve(self, output: Any) -> Any:
        """Return a joined output with the caller's own containers in the places of their marks."""
        if not self._marks:
            return output
        return _replace(output, lambda node: node.argument if type(node) is Returned else None)

    def _mark(self, place: tuple[bool, int] | None) -> Returned | None:
        if place is None:
            return None
        if place not in self._marks:
            is_container, number = place
            if is_container:
                argument = _follow(self._call, self._paths[number])
            else:
                argument = self._values[number]
                argument = argument.value if isinstance(argument, WholeLeaf) else argument
            self._marks[place] = Returned(argument)
        return self._marks[place]

    def _refuse_shared(self) -> None:
        for index, (value, before) in self._loans[0].shared.items():
            if not _are_same(_read_shared(value), before):
                msg = (
                    f"forward writes {self._name(index)}, a {type(value).__name__} that every lane "
                    "gets whole, so each lane wrote once. Return what it writes, or use "
                    "register_split for its class"
                )
                raise ShardError(msg)

    def _join_containers(self, join: Join) -> Iterator[tuple[Any, Contents, EntriesAfter]]:
        """Yield each container of the caller that changes, what it holds, and what it will hold."""
        columns = zip(*(loan.containers for loan in self._loans), strict=True)
        for path, column in zip(self._paths, columns, strict=True):
            found = [_read_entries(container, before) for container, before in column]
            changed = [each for each in found if each is not None]
            if not changed:
                continue
            own = _follow(self._call, path)
            place = address(CALL_ROOTS[path[0]], path[1:])
            if len(changed) < len(found) or not all(
                _is_alike(each, changed[0]) for each in changed
            ):
                _refuse(place, own, "the lanes changed it differently")
            items = self._join_entries([each.items for each in changed], join, place, own)
            attributes = [each.attributes for each in changed]
            joined = self._join_entries(attributes, join, place, own)
            yield own, Contents.read(own), EntriesAfter(items, joined)

    def _join_entries(self, columns: Sequence[Any], join: Join, place: str, own: Any) -> Any:
        """Return the entries of one container, joined from those of the lanes."""
        joined: dict[Any, Old | New] = {}
        for key, first in _entries(columns[0]):
            if isinstance(first, Old):
                joined[key] = first
                continue
            # An entry may be an argument too, or hold one
            values = [
                self.mark_returned(column[key].value, lane) for lane, column in enumerate(columns)
            ]
            try:
                joined[key] = New(self.resolve(join(values)))
            except GatherError as error:
                _refuse(address(place, [key]), own, str(error))
        return [*joined.values()] if isinstance(columns[0], list) else joined

    def _join_objects(self, device: torch.device | None) -> Iterator[tuple[Any, Any]]:
        """Yield each object with rules that lanes changed, and the joined state of its parts."""
        for index in self._loans[0].objects:
            found = [loan.objects[index] for loan in self._loans]
            if all(_are_same(contents_of(part), before) for part, before in found):
                continue
            parts, value = [part for part, _ in found], self._values[index].value
            if device is not None:
                parts = [place_leaf(WholeLeaf(part), device) for part in parts]
            try:
                joined = splitter_of(value).join(parts) if len(parts) > 1 else parts[0]
            except (GatherError, ShardError) as error:
                msg = (
                    f"{self._name(index)} was changed differently by the lanes: {error}. Make "
                    "every lane add the same length, return the value instead of writing it, or "
                    "leave the argument out, so that each lane makes its own"
                )
                raise GatherError(msg) from error
            if joined is not value:
                self._keep_attributes(index, joined)
                yield value, joined

    def _keep_attributes(self, index: int, joined: Any) -> None:
        """Give a joined object the caller's own tensors for the attributes that no lane has set.

        Joined tensors are new ones in any case. Built-in rules compare entries themselves.
        """
        value = self._values[index].value
        if splitter_of(value).update is not None:
            return
        own = _read_attributes(value)
        for name, now in _read_attributes(joined).items():
            is_other = isinstance(own.get(name), torch.Tensor) and now is not own[name]
            if is_other and not self._has_lane_set(index, name):
                object.__setattr__(joined, name, own[name])

    def _has_lane_set(self, index: int, name: str) -> bool:
        for loan in self._loans:
            before = loan.attributes[index].get(name, _ABSENT)
            if _read_attributes(loan.objects[index][0]).get(name, _ABSENT) is not before:
                return True
        return False


def _is_alike(one: EntriesAfter, other: EntriesAfter) -> bool:
    """True if two lanes changed their copies of a container in the same way."""
    return _are_alike(one.items, other.items) and _are_alike(one.attributes, other.attributes)


def _are_alike(one: Any, other: Any) -> bool:
    if len(one) != len(other) or (isinstance(one, dict) and [*one] != [*other]):
        return False
    pairs = zip(_values(one), _values(other), strict=True)
    return all(type(a) is type(b) and (isinstance(a, New) or a == b) for a, b in pairs)


def _values(items: Any) -> Any:
    return items if isinstance(items, list) else items.values()


def _enter(container: Any, before: Contents, after: EntriesAfter) -> None:
    """Give a container of the caller the entries that it has after the call.

    Entries that stay are not touched: another thread may read them.
    """
    items = {key: _value_of(source, before.items) for key, source in _entries(after.items)}
    if isinstance(container, (list, deque)):
        if not _are_same([*items.values()], before.items):
            container.clear()
            container.extend(items.values())
    elif isinstance(container, Mapping):
        writable: Any = container
        for key in before.items:
            if key not in items:
                del writable[key]
        for key, value in items.items():
            if _get(before.items, key) is not value:
                writable[key] = value
    names = {*before.attributes, *after.attributes}
    now = _read_attributes(container) if names else {}  # a new item may be an attribute already
    for name in before.attributes:
        if name not in after.attributes and name in now:
            object.__delattr__(container, name)
    for name, source in after.attributes.items():
        value = _value_of(source, before.attributes)
        if now.get(name, _ABSENT) is not value:
            object.__setattr__(container, name, value)  # also of a frozen dataclass


def _value_of(source: Old | New, before: Any) -> Any:
    return source.value if isinstance(source, New) else before[source.key]


def _replace(value: Any, find: Callable[[Any], Any]) -> Any:
    """Return a value with other nodes and leaves, where `find` returns one.

    A container without another part stays the same object.
    """
    found = find(value)
    if found is not None:
        return found
    if isinstance(value, torch.Tensor) or is_kept_whole(type(value)):
        return value
    parts = parts_below(value)
    if parts is None:
        return value
    made = [_replace(part, find) for part in parts]
    if all(map(is_, made, parts)):
        return value
    return unflatten(flatten(value, lambda node: node is not value)[1], made)


def _refuse(place: str, container: Any, why: str) -> NoReturn:
    msg = (
        f"forward writes {place} into a {type(container).__name__} of the caller, and each lane "
        f"wrote its own: {why}. Return it instead of writing it, so that out_dims and reduce say "
        "how outputs are joined"
    )
    raise ShardError(msg)


# Calls in another process


class SentBack:
    """The place of an argument in an output that travels: its number among those of its kind."""

    __slots__ = ("is_container", "number")

    def __init__(self, is_container: bool, number: int) -> None:
        self.is_container = is_container
        self.number = number


class Changes(NamedTuple):
    """What forward did to copies of arguments: one entry each, in order; None for no change.

    Attributes:
        containers: The entries of each container.
        objects: Each object with rules, as it is after the call.
    """

    containers: Sequence[EntriesAfter | None]
    objects: Sequence[Any]


def read_changes(loan: Loan) -> Changes | None:
    """Return what forward did to the copies of a loan, for `Given.replay`; None for nothing."""
    if loan.is_unchanged():
        return None
    containers = [_read_entries(container, before) for container, before in loan.containers]
    objects = [
        None if _are_same(contents_of(part), before) else part
        for part, before in loan.objects.values()
    ]
    return Changes(containers, objects)


def mark_arguments(output: Any, loan: Loan) -> Any:
    """Return an output with marks for arguments, which must not travel as other objects."""
    if type(output) is torch.Tensor or not (loan.containers or loan.objects):
        return output
    containers = [container for container, _ in loan.containers]
    objects = [part for part, _ in loan.objects.values()]
    marks = {id(each): SentBack(True, number) for number, each in enumerate(containers)}
    marks |= {id(each): SentBack(False, number) for number, each in enumerate(objects)}
    return _replace(output, lambda node: marks.get(id(node)))


class Given:
    """The arguments of a call that another process runs, as they are in this one."""

    def __init__(self, call: Any) -> None:
        self.leaves, spec = flatten(call)
        self.objects = [leaf.value for leaf in self.leaves if isinstance(leaf, WholeLeaf)]
        self.containers = [_follow(call, path) for path in paths_of_containers(spec)]

    def replay(self, changes: Changes) -> None:
        """Do to the arguments what forward did to copies of them.

        Raises:
            ValueError: If they have another structure than the copies.
        """
        containers = [*zip(self.containers, changes.containers, strict=True)]
        objects = [*zip(self.objects, changes.objects, strict=True)]
        for container, after in containers:
            if after is not None:
                _enter(container, Contents.read(container), after)
        for value, part in objects:
            if part is not None:
                update_argument(value, part)

    def resolve(self, output: Any) -> Any:
        """Return an output with the arguments in the places of their marks."""

        def find(node: Any) -> Any:
            if type(node) is not SentBack:
                return None
            return (self.containers if node.is_container else self.objects)[node.number]

        return _replace(output, find)
