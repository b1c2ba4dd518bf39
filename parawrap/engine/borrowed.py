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
from parawrap.engine.flat_call import CALL_ROOTS, is_plain_value
from parawrap.engine.join_rules import JoinRules, ReturnedArgument, is_tree
from parawrap.engine.rules.object_state import list_state
from parawrap.engine.rules.registry import (
    contents_of,
    find_rules,
    place_leaf,
    splitter_of,
    update_argument,
)
from parawrap.engine.rules.transformers_caches import WITHOUT_CACHE, is_cache
from parawrap.errors import GatherError, ShardError
from parawrap.tree import (
    ABSENT,
    UNDECLARED,
    Attribute,
    TreeSpec,
    WholeLeaf,
    address,
    flatten,
    is_kept_whole,
    names_of_slots,
    unflatten,
)

WRITTEN_WHOLE = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. "
    "Pass one copy per row, cut the tensor with in_dims, or use an out-of-place operation"
)
_WITHOUT_ATTRIBUTES = frozenset({dict, list, deque, OrderedDict, defaultdict})
_MOST_STRUCTURES = 1024  # of calls; as many as a cutter keeps plans
_OF_ARGUMENT = ReturnedArgument(None)

Path = tuple[Any, ...]
"""The keys that lead from (args, kwargs) to a container."""

Join = Callable[[Sequence[Any], "Path | None", Any], Any]
"""Takes the values that the lanes put at one place, and returns the one value for the caller.

It also takes the place of the container in the output, or None, and the key. Raises GatherError.
"""


def rules_of_entries(rules: JoinRules, place: Path | None = None, key: Any = None) -> JoinRules:
    """Return the rules for what forward puts into an argument, from the rules for outputs.

    If the output returns the container at `place`, the options for its places hold for the entry
    `key`. Otherwise, options that name places of the output say nothing about the arguments.
    """

    def below(option: Any, missing: Any) -> Any:
        if place is None:
            return missing if is_tree(option) else option
        for step in (*place, key):
            if isinstance(option, dict):
                option = option.get(step, missing)
            elif isinstance(option, tuple):
                has_step = isinstance(step, int) and step < len(option)
                option = option[step] if has_step else missing
        return option

    # An error names options only where they hold for the entry as it is
    given = (rules.out_dims, rules.reduce, rules.pad_value)
    are_for_all = place is None and not any(map(is_tree, given)) and not rules.as_torch
    return JoinRules(
        rules.dim,
        below(rules.out_dims, UNDECLARED),
        below(rules.reduce, None),
        "pad" if rules.join == "pad" else "cat",
        below(rules.pad_value, None),
        rules.as_torch,
        "whole" if are_for_all else "none",
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
        value = getattr(container, name, ABSENT)
        if value is not ABSENT:
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
        attributes: Those of the objects with their versions, by the index of the leaf.
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
        {index: _read_versions(leaves[index]) for index in objects},
        leaves,
        {index: (leaves[index], _read_shared(leaves[index])) for index in shared},
    )


def _read_versions(value: Any) -> dict[str, tuple[Any, int]]:
    """Return the attributes of an object, each with its version if it is a tensor."""
    found: dict[str, tuple[Any, int]] = {}
    for name, part in _read_attributes(value).items():
        has_version = isinstance(part, torch.Tensor) and not part.is_inference()
        found[name] = part, version_of(part) if has_version else 0
    return found


def _read_shared(value: Any) -> list[Any]:
    """Return what an object of any class holds, at any depth."""
    return list_state(value, find_rules)


# After forward


class Old(NamedTuple):
    """The entry that a container had under this key before the call."""

    key: Any


class New(NamedTuple):
    """A value that forward put into a container."""

    value: Any


class EntriesAfter(NamedTuple):
    """The entries of a container after the call.

    Attributes:
        items: An `Old` or a `New` for each item, as a list or by key.
        removed: The keys of the items that forward has removed.
        attributes: An `Old` or a `New` for each attribute.
        removed_attributes: The names of the attributes that forward has removed.
        length: The number of items before the call.
    """

    items: Any
    removed: Sequence[Any]
    attributes: dict[str, Any]
    removed_attributes: Sequence[str]
    length: int


def _read_entries(container: Any, before: Contents) -> EntriesAfter | None:
    """Return the entries of a container after the call; None if it has not changed."""
    if before.is_of(container):
        return None
    now = Contents.read(container)
    removed: list[Any] = []
    if isinstance(before.items, dict):
        removed = [key for key in before.items if key not in now.items]
    return EntriesAfter(
        _find_sources(now.items, before.items),
        removed,
        _find_sources(now.attributes, before.attributes),
        [name for name in before.attributes if name not in now.attributes],
        len(before.items),
    )


def _find_sources(now: Any, before: Any) -> Any:
    """Return where each entry comes from.

    A value that is still under its key comes from there, and a value that was under another key
    from that one, so that a moved entry is the caller's own object.
    """
    keys: dict[int, Any] = {}
    for key, value in _entries(before):
        # Equal numbers and texts may be one object, and say nothing about where they come from
        if not is_plain_value(value):
            keys[id(value)] = key
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
        return items[key] if key < len(items) else ABSENT
    return items.get(key, ABSENT)


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
        self._marks: dict[tuple[bool, int], ReturnedArgument] = {}
        self._changed: list[tuple[Any, EntriesAfter]] = []
        self._joined: dict[tuple[int, ...], Any] = {}
        self._outputs: dict[int, Path] = {}  # by the number of a container, its place in the output
        self._updates: list[tuple[Any, Any]] = []

    def join_changes(
        self,
        join: Join,
        device: torch.device | None,
        outputs: Sequence[Any],
        join_outputs: Callable[[Sequence[Any]], object],
    ) -> None:
        """Join what forward did to the copies. The caller's own objects are not written yet.

        Parts of objects return to `device`; None leaves them where they are. `outputs` are those of
        the lanes: options for their places hold for the entries of a container that they return.

        Raises:
            ShardError: If a change cannot be joined, or lanes wrote an object that all of them use.
            GatherError: If `join_outputs` refuses the outputs, for an entry that they return.
        """
        if all(loan.is_unchanged() for loan in self._loans):
            return
        self._refuse_shared()
        numbers = {id(each): number for number, (each, _) in enumerate(self._loans[0].containers)}
        for path, node in _walk(outputs[0]):
            if id(node) in numbers:
                self._outputs.setdefault(numbers[id(node)], path)
        try:
            self._changed = [*self._join_containers(join)]
        except ShardError:
            if self._outputs:
                # Its error names all places of the output, and the options with their keys
                join_outputs([*map(self._show_new_entries, outputs, self._loans)])
            raise
        self._updates = [*self._join_objects(device)]

    def enter(self) -> None:
        """Bring what forward did to the caller's own objects."""
        for container, after in self._changed:
            _enter(container, after)
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

    def _show_new_entries(self, output: Any, loan: Loan) -> Any:
        """Return the output of a lane with the entries that forward wrote into its arguments.

        All other parts of arguments are one object, which is joined.
        """
        by_id = {id(container): (container, before) for container, before in loan.containers}

        def show(node: Any) -> Any:
            if id(node) not in by_id:
                return None
            container, before = by_id[id(node)]
            after = _read_entries(container, before)
            if after is None:
                return _OF_ARGUMENT
            now = Contents.read(container)
            held = dict(_entries(now.items)) | now.attributes
            shown: dict[Any, Any] = {}
            for key, source in (*_entries(after.items), *after.attributes.items()):
                if isinstance(source, New) or id(held[key]) in by_id:
                    shown[key] = _replace(held[key], show)
                else:
                    shown[key] = _OF_ARGUMENT
            return [*shown.values()] if isinstance(after.items, list) else shown

        return _replace(output, show)

    def resolve(self, output: Any) -> Any:
        """Return a joined output with the caller's own containers in the places of their marks."""
        if not self._marks:
            return output
        return _replace(
            output, lambda node: node.argument if type(node) is ReturnedArgument else None
        )

    def _mark(self, place: tuple[bool, int] | None) -> ReturnedArgument | None:
        if place is None:
            return None
        if place not in self._marks:
            is_container, number = place
            if is_container:
                argument = _follow(self._call, self._paths[number])
            else:
                argument = self._values[number]
                argument = argument.value if isinstance(argument, WholeLeaf) else argument
            self._marks[place] = ReturnedArgument(argument)
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

    def _join_containers(self, join: Join) -> Iterator[tuple[Any, EntriesAfter]]:
        """Yield each container of the caller that changes, and what it will hold."""
        columns = zip(*(loan.containers for loan in self._loans), strict=True)
        done: set[int] = set()
        for number, column in enumerate(columns):
            found = [_read_entries(container, before) for container, before in column]
            changed = [each for each in found if each is not None]
            if not changed:
                continue
            path = self._paths[number]
            own = _follow(self._call, path)
            place = address(CALL_ROOTS[path[0]], path[1:])
            if id(own) in done:
                _refuse(place, own, "it is at two places of the call, where each lane has two")
            done.add(id(own))
            is_alike = all(_is_alike(each, changed[0]) for each in changed)
            if len(changed) < len(found) or not is_alike:
                _refuse(place, own, "the lanes changed it differently")
            items = [each.items for each in changed]
            attributes = [each.attributes for each in changed]
            yield (
                own,
                changed[0]._replace(
                    items=self._join_entries(items, join, place, number),
                    attributes=self._join_entries(attributes, join, place, number),
                ),
            )

    def _join_entries(self, columns: Sequence[Any], join: Join, place: str, number: int) -> Any:
        """Return the entries of one container, joined from those of the lanes."""
        joined: dict[Any, Old | New] = {}
        refused: dict[str, GatherError] = {}
        own = _follow(self._call, self._paths[number])
        for key, first in _entries(columns[0]):
            if isinstance(first, Old):
                joined[key] = first
                continue
            column = [each[key].value for each in columns]
            ids = tuple(map(id, column))  # of values that the lanes' containers keep alive
            # Two equal numbers may be one object, and each has the options of its own key
            if ids not in self._joined or all(map(is_plain_value, column)):
                # An entry may be an argument too, or hold one
                values = [self.mark_returned(value, lane) for lane, value in enumerate(column)]
                try:
                    self._joined[ids] = self.resolve(join(values, self._outputs.get(number), key))
                except GatherError as error:
                    refused[address(place, [key])] = error
                    continue
            # One value under two names stays one object
            joined[key] = New(self._joined[ids])
        if len(refused) == 1:
            ((entry, only),) = refused.items()
            _refuse(entry, own, only.message)
        if refused:
            # An option for all of them need not be right for each
            _refuse(" and ".join(refused), own, "they cannot be joined")
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
                if is_cache(value):
                    msg += f". {WITHOUT_CACHE}"
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
            part, before = loan.objects[index][0], loan.attributes[index].get(name)
            now = _read_versions(part).get(name)
            if before is None or now is None:
                return True
            (value, version), (value_before, version_before) = now, before
            if value is not value_before or version != version_before:
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


def _enter(container: Any, after: EntriesAfter) -> None:
    """Give a container of the caller the entries that it has after the call.

    Only what forward has changed is written: other calls may write the same container meanwhile,
    and each step on a list or a dict is one step for all threads.
    """
    if isinstance(container, (list, deque)):
        _enter_items(container, after)
    elif isinstance(container, Mapping):
        writable: Any = container
        values = {key: _value_of(source, container) for key, source in after.items.items()}
        for key in after.removed:
            if key in writable:
                del writable[key]
        for key, value in values.items():
            if not _stays(after.items[key], key):
                writable[key] = value
    if not (after.attributes or after.removed_attributes):
        return
    now = _read_attributes(container)  # a new item may be an attribute already
    attributes = {name: _value_of(source, now) for name, source in after.attributes.items()}
    for name in after.removed_attributes:
        if name in now:
            object.__delattr__(container, name)
    for name, value in attributes.items():
        if not _stays(after.attributes[name], name) and now.get(name, ABSENT) is not value:
            object.__setattr__(container, name, value)  # also of a frozen dataclass


def _enter_items(container: Any, after: EntriesAfter) -> None:
    """Give a list or a deque of the caller the items that it has after the call."""
    kept, added = after.items[: after.length], after.items[after.length :]
    is_longer = len(kept) == after.length and all(map(_stays, kept, range(after.length)))
    if is_longer and all(isinstance(source, New) for source in added):
        container.extend([source.value for source in added])
        return
    own = [*container]
    items = [_value_of(source, own) for source in after.items]
    container.clear()
    container.extend(items)


def _stays(source: Old | New, key: Any) -> bool:
    """True if the entry under a key is the one from before the call."""
    return isinstance(source, Old) and bool(source.key == key)


def _value_of(source: Old | New, own: Any) -> Any:
    """Return the value of an entry. Old ones are the caller's own."""
    return source.value if isinstance(source, New) else own[source.key]


def _walk(value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the containers of an output, with the path to each."""
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, torch.Tensor) or is_kept_whole(type(node)):
            continue
        parts, spec = _flatten_once(node)
        if spec.is_leaf():
            continue
        yield path, node
        waiting += [((*path, step), part) for step, part in zip(spec.entries(), parts, strict=True)]


def _flatten_once(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the parts of one node, and its structure, which says their order."""
    return flatten(value, lambda node: node is not value)


def _replace(value: Any, find: Callable[[Any], Any]) -> Any:
    """Return a value with other nodes and leaves, where `find` returns one.

    A container without another part stays the same object.
    """
    found = find(value)
    if found is not None:
        return found
    if isinstance(value, torch.Tensor) or is_kept_whole(type(value)):
        return value
    # The order of the parts of a dict is not that of its items
    parts, spec = _flatten_once(value)
    if spec.is_leaf():
        return value
    made = [_replace(part, find) for part in parts]
    return value if all(map(is_, made, parts)) else unflatten(spec, made)


def _refuse(place: str, container: Any, why: str) -> NoReturn:
    msg = (
        f"forward writes {place} into a {type(container).__name__} of the caller, and each lane "
        f"wrote its own: {why}. Return it instead of writing it, so that out_dims and reduce say "
        "how outputs are joined"
    )
    raise ShardError(msg)


# Calls in another process


class SentBack:
    """The place of an argument in what travels: the kind of argument, and its number."""

    __slots__ = ("kind", "number")

    def __init__(self, kind: str, number: int) -> None:
        self.kind = kind
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
    mark = _find_marks(loan)

    def mark_source(source: Old | New) -> Old | New:
        return New(_replace(source.value, mark)) if isinstance(source, New) else source

    containers: list[EntriesAfter | None] = []
    for container, before in loan.containers:
        after = _read_entries(container, before)
        if after is not None:
            items = after.items
            is_list = isinstance(items, list)
            found = {key: mark_source(source) for key, source in _entries(items)}
            attributes = {name: mark_source(source) for name, source in after.attributes.items()}
            sources = [*found.values()] if is_list else found
            after = after._replace(items=sources, attributes=attributes)
        containers.append(after)
    objects = []
    for part, held in loan.objects.values():
        objects.append(None if _are_same(contents_of(part), held) else part)
    return Changes(containers, objects)


def _find_marks(loan: Loan) -> Callable[[Any], SentBack | None]:
    """Return a function from an argument of the lane to its mark."""
    marks: dict[int, SentBack] = {}
    for number, leaf in enumerate(loan.leaves):
        if isinstance(leaf, torch.Tensor):
            marks[id(leaf)] = SentBack("leaf", number)
    for number, (container, _) in enumerate(loan.containers):
        marks[id(container)] = SentBack("container", number)
    for number, (part, _) in enumerate(loan.objects.values()):
        marks[id(part)] = SentBack("object", number)
    return lambda node: marks.get(id(node))


def mark_arguments(output: Any, loan: Loan) -> Any:
    """Return an output with marks for arguments, which must not travel as other objects."""
    if not (loan.containers or loan.objects):
        return output
    return _replace(output, _find_marks(loan))


class Given:
    """The arguments of a call that another process runs, as they are when it is sent."""

    def __init__(self, call: Any) -> None:
        self.leaves, spec = flatten(call)
        self.objects = [leaf.value for leaf in self.leaves if isinstance(leaf, WholeLeaf)]
        self.containers = [_follow(call, path) for path in paths_of_containers(spec)]

    def replay(self, changes: Changes) -> None:
        """Do to the arguments what forward did to copies of them.

        Raises:
            ValueError: If they have another structure than the copies.
            KeyError: If an entry is missing here.
        """
        containers = [*zip(self.containers, changes.containers, strict=True)]
        objects = [*zip(self.objects, changes.objects, strict=True)]
        for container, after in containers:
            if after is not None:
                items = {key: self._resolve_source(each) for key, each in _entries(after.items)}
                names = after.attributes.items()
                attributes = {name: self._resolve_source(each) for name, each in names}
                sources = [*items.values()] if isinstance(after.items, list) else items
                _enter(container, after._replace(items=sources, attributes=attributes))
        for value, part in objects:
            if part is not None:
                update_argument(value, part)

    def resolve(self, output: Any) -> Any:
        """Return an output with the arguments in the places of their marks."""
        return _replace(output, self._find)

    def _resolve_source(self, source: Old | New) -> Old | New:
        return New(self.resolve(source.value)) if isinstance(source, New) else source

    def _find(self, node: Any) -> Any:
        if type(node) is not SentBack:
            return None
        kinds = {"container": self.containers, "object": self.objects, "leaf": self.leaves}
        return kinds[node.kind][node.number]
