"""Arguments are borrowed: what forward does to them reaches the caller's own objects.

The plain call writes into the caller's objects, and so does a cut call.

A lane gets new containers, parts of objects with rules, and copies of tensors from other devices.
When they are made, `lend` notes each of them, with its contents. After forward,
`Borrowed.join_changes` compares them with the notes, and joins new values like outputs. After all
joins, `Borrowed.enter` puts the joined values into the caller's objects: a refused call leaves the
arguments alone. Calls of plain tensors have nothing to note.

::

    caller's batch = {"x": X}         lane 0: {"x": X[:5]}  ──► {"x": X[:5], "y": Y0}  ─┐
    batch = {"x": X, "y": Y}  ◄── join ── lane 1: {"x": X[5:]}  ──► {"x": X[5:], "y": Y1}  ─┘

`lent_containers.py` compares and changes single containers. `given_arguments.py` takes the same
steps for arguments in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch

from parawrap._private_names import version_of
from parawrap.engine.columns import list_values
from parawrap.engine.flat_call import address_in_call, is_plain_value
from parawrap.engine.join_rules import JoinMode, JoinRules, ReturnedArgument, is_tree
from parawrap.engine.lent_containers import (
    Contents,
    EntriesAfter,
    New,
    Old,
    Path,
    Sources,
    are_same_objects,
    enter_entries,
    follow_path,
    read_attributes,
    read_entries,
    replace_parts,
    walk_containers,
)
from parawrap.engine.rules.object_state import list_state
from parawrap.engine.rules.registry import (
    count_rows,
    find_rules,
    list_contents,
    place_leaf,
    splitter_of,
    update_argument,
)
from parawrap.engine.rules.transformers_caches import WITHOUT_CACHE, is_cache
from parawrap.errors import GatherError, ShardError
from parawrap.tree import UNDECLARED, WholeLeaf, entry_at

WRITTEN_WHOLE = (
    "the model wrote in place into a tensor that every lane gets whole, so each lane wrote once. "
    "Pass one copy per row, cut the tensor with in_dims, or use an out-of-place operation"
)
# Stands for unchanged parts of arguments in outputs that only an error is about: as one object in
# all lanes, they are joined
_OF_ARGUMENT = ReturnedArgument(None)


class Join(Protocol):
    """Joins the values that the lanes put under one key of a container of the caller."""

    def __call__(self, values: Sequence[Any], place: Path | None, key: Any, /) -> Any:
        """Return the one value for the caller.

        `place` is the path of the container in the output; None if it is not returned.

        Raises:
            GatherError: If the values cannot be joined.
        """
        ...


def rules_of_entries(rules: JoinRules, place: Path | None = None, key: Any = None) -> JoinRules:
    """Return the rules for the values that lanes put under `key` of a container.

    `rules` are those for outputs. If the output returns the container, at the path `place`, the
    options for that path and key hold. Otherwise, options that name places of the output say
    nothing about the arguments.
    """

    def read_option(option: Any, missing: Any) -> Any:
        if place is None:
            return missing if is_tree(option) else option
        for step in (*place, key):
            option = entry_at(option, step, missing)
        return option

    out_dims = read_option(rules.out_dims, UNDECLARED)
    reduce = read_option(rules.reduce, None)
    pad_value = read_option(rules.pad_value, None)
    # Never "list": the plain call leaves one value in the entry, not one per lane
    mode: JoinMode = "pad" if rules.join == "pad" else "cat"
    # An error may name an option only if one entry of it holds for outputs and arguments
    names_places = any(map(is_tree, (rules.out_dims, rules.reduce, rules.pad_value)))
    hold_for_all = place is None and not names_places and not rules.as_torch
    options: Literal["whole", "none"] = "whole" if hold_for_all else "none"
    return JoinRules(rules.dim, out_dims, reduce, mode, pad_value, rules.as_torch, options)


# Before forward


class Moved(NamedTuple):
    """A tensor that a lane has a copy of on another device.

    Attributes:
        leaf: The index of the leaf.
        part: The part of the argument.
        copied: The lane's copy.
        version: The version of the copy before the call.
        node: The copy's node of autograd before the call. A write that autograd records gives the
            copy another one.
    """

    leaf: int
    part: torch.Tensor
    copied: torch.Tensor
    version: int
    node: torch.autograd.graph.Node | None


class Versioned(NamedTuple):
    """The value of an attribute, and its version if it is a tensor; 0 for any other value."""

    value: Any
    version: int


class Loan(NamedTuple):
    """The copies that one lane has of a call's arguments, with their contents before the call.

    Nobody writes it, so all calls may share its empty defaults.

    Attributes:
        leaves: The lane's leaves.
        containers: The contents of each container, in the order of the paths.
        moved: The tensors that came from another device.
        objects: The contents of each object with rules, by the index of its leaf.
        attributes: The attributes of each object with rules by name, by the index of its leaf.
        shared: The state of each object that all lanes use, by the index of its leaf.
    """

    leaves: Sequence[Any] = ()
    containers: Sequence[Contents] = ()
    moved: Sequence[Moved] = ()
    objects: Mapping[int, Sequence[Any]] = {}
    attributes: Mapping[int, dict[str, Versioned]] = {}
    shared: Mapping[int, Sequence[Any]] = {}

    def is_unchanged(self) -> bool:
        """True if forward has changed no container and no object."""
        for before in self.containers:
            if not before.is_unchanged():
                return False
        for index, held in self.objects.items():
            if not are_same_objects(list_contents(self.leaves[index]), held):
                return False
        for index, held in self.shared.items():
            if not are_same_objects(list_state(self.leaves[index], find_rules), held):
                return False
        return True


NOTHING = Loan()
"""The loan of a call that has nothing to note."""


def lend(
    call: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any] = (),
    parts: Sequence[Any] = (),
    objects: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> Loan:
    """Note what a lane gets, before forward runs.

    Args:
        call: The arguments of the lane.
        paths: The paths to their containers.
        leaves: Their leaves.
        parts: The leaves before they were moved to the device of the lane.
        objects: The indices of the objects with rules that the lane has a part or a copy of.
        shared: The indices of the objects that all lanes use.
    """
    moved: list[Moved] = []
    has_moved = not all(map(is_, leaves, parts))
    if has_moved:
        for index, (part, copied) in enumerate(zip(parts, leaves, strict=True)):
            is_moved = copied is not part and isinstance(part, torch.Tensor)
            # An inference tensor has no version that shows a write
            if is_moved and not copied.is_inference():
                moved.append(Moved(index, part, copied, version_of(copied), copied.grad_fn))
    containers = [Contents.read(follow_path(call, path)) for path in paths]
    contents: dict[int, Sequence[Any]] = {}
    attributes: dict[int, dict[str, Versioned]] = {}
    for index in objects:
        contents[index] = list_contents(leaves[index])
        attributes[index] = _read_versions(leaves[index])
    states: dict[int, Sequence[Any]] = {}
    for index in shared:
        states[index] = list_state(leaves[index], find_rules)
    return Loan(leaves, containers, moved, contents, attributes, states)


def _read_versions(value: Any) -> dict[str, Versioned]:
    """Return the attributes of an object by name."""
    found: dict[str, Versioned] = {}
    for name, part in read_attributes(value).items():
        has_version = isinstance(part, torch.Tensor) and not part.is_inference()
        found[name] = Versioned(part, version_of(part) if has_version else 0)
    return found


def replace_new_entries(loan: Loan, replace: Callable[[Any], Any]) -> None:
    """Replace the values that forward has put into the containers of a loan.

    A whole call that needs no copies lends the caller's own containers, so they are written.
    """
    for before in loan.containers:
        after = read_entries(before)
        if after is None:
            continue
        container = before.container
        for key, source in after.items.items():
            if isinstance(source, New):
                value = replace(source.value)
                if value is not source.value:
                    container[key] = value
        for name, source in after.attributes.items():
            if isinstance(source, New):
                value = replace(source.value)
                if value is not source.value:
                    object.__setattr__(container, name, value)  # also of a frozen dataclass


# After forward


class Borrowed:
    """The arguments of one call, and what its lanes have of them.

    The thread that makes the call uses it, after all lanes have ended.

    Args:
        call: The caller's own arguments.
        paths: The paths to their containers.
        values: Their leaves.
        loans: What each lane has of them.
        whole: The indices of the objects with rules that each of several lanes has whole.
        sizes: The row counts of the shards.
        name: Returns the address of a leaf, for errors.
    """

    def __init__(
        self,
        call: Any,
        paths: Sequence[Path],
        values: Sequence[Any],
        loans: Sequence[Loan],
        whole: Collection[int],
        sizes: Sequence[int],
        name: Callable[[int], str],
    ) -> None:
        self._call = call
        self._paths = paths
        self._values = values
        self._loans = loans
        self._whole = whole
        self._sizes = [*sizes]
        self._name = name
        # By the path of a container, or the index of a leaf
        self._marks: dict[Path | int, ReturnedArgument] = {}
        # By lane, and then by the id of a copy: the path or the index of its argument
        self._arguments: dict[int, dict[int, Path | int]] = {}
        # The paths in the output of containers that it returns, by their paths in the call
        self._places_in_output: dict[Path, Path] = {}
        # Joined values that forward made, by the ids of the values of all lanes
        self._joined: dict[tuple[int, ...], Any] = {}
        # The caller's containers and objects, each with its change, for `enter`
        self._changed_containers: list[tuple[Any, EntriesAfter]] = []
        self._changed_objects: list[tuple[Any, Any]] = []

    def join_changes(
        self,
        join: Join,
        device: torch.device | None,
        outputs: Sequence[Any],
        join_outputs: Callable[[Sequence[Any]], object],
    ) -> None:
        """Join what forward did to the copies. The caller's own objects are not written yet.

        Args:
            join: Joins the values of one entry.
            device: The device of the joined objects; None leaves their parts where they are.
            outputs: The outputs of the lanes. Options for their places hold for the entries of a
                container that they return.
            join_outputs: Joins outputs, or refuses them.

        Raises:
            ShardError: If a change cannot be joined, or lanes wrote an object that all of them use.
            GatherError: If `join_outputs` refuses the outputs, for an entry that they return.
        """
        if all(loan.is_unchanged() for loan in self._loans):
            return
        self._refuse_written_whole()
        self._find_places_in_output(outputs[0])
        try:
            self._changed_containers = self._join_containers(join)
        except ShardError:
            if self._places_in_output:
                # Refused as an output instead: that error names all places, and the options with
                # their keys. The joined value is dropped
                join_outputs([*map(self._show_new_entries, outputs, self._loans)])
            raise
        self._changed_objects = self._join_objects(device)

    def enter(self) -> None:
        """Write the joined changes into the caller's own objects."""
        # An interrupt between two objects leaves the rest as it was, as in the plain call
        for container, after in self._changed_containers:
            enter_entries(container, after)
        for value, joined in self._changed_objects:
            update_argument(value, joined)

    # Arguments in the output

    def mark_returned(self, output: Any, lane: int) -> Any:
        """Return an output with marks in the places of the lane's copies of arguments."""
        arguments = self._arguments.get(lane)
        if arguments is None:
            # Made once per lane: this function is called for each new entry of a container too
            arguments = self._arguments[lane] = {}
            loan = self._loans[lane]
            for path, before in zip(self._paths, loan.containers, strict=True):
                arguments[id(before.container)] = path
            # Numbers and texts are left out: lanes make equal ones, which may be the same object
            for index, leaf in enumerate(loan.leaves):
                if isinstance(leaf, torch.Tensor) or index in loan.objects:
                    arguments[id(leaf)] = index

        def find_mark(node: Any) -> ReturnedArgument | None:
            place = arguments.get(id(node))
            return None if place is None else self._mark(place)

        return replace_parts(output, find_mark)

    def _mark(self, place: Path | int) -> ReturnedArgument:
        """Return the mark of an argument, one for all lanes."""
        if place not in self._marks:
            parts: Sequence[Any] = ()
            if isinstance(place, int):
                leaf = self._values[place]
                argument = leaf.value if isinstance(leaf, WholeLeaf) else leaf
                if isinstance(argument, torch.Tensor):
                    parts = [loan.leaves[place] for loan in self._loans]
            else:
                argument = follow_path(self._call, place)
            self._marks[place] = ReturnedArgument(argument, parts)
        return self._marks[place]

    def resolve(self, output: Any) -> Any:
        """Return a joined output with the caller's own arguments in the places of their marks."""
        if not self._marks:
            return output

        def find_argument(node: Any) -> Any:
            return node.argument if type(node) is ReturnedArgument else None

        return replace_parts(output, find_argument)

    def _find_places_in_output(self, output: Any) -> None:
        """Note the path to each container that lane 0 returns; of several paths, the first one."""
        paths: dict[int, Path] = {}
        for path, before in zip(self._paths, self._loans[0].containers, strict=True):
            paths[id(before.container)] = path
        for place, node in walk_containers(output):
            if id(node) in paths:
                self._places_in_output.setdefault(paths[id(node)], place)

    def _show_new_entries(self, output: Any, loan: Loan) -> Any:
        """Return the output of a lane with only new entries in the containers of arguments.

        Other entries are replaced by an object that all lanes have, and that is joined.
        """
        lent = {id(before.container): before for before in loan.containers}

        def show(node: Any) -> Any:
            before = lent.get(id(node))
            if before is None:
                return None
            after = read_entries(before)
            sources = {} if after is None else after.items | after.attributes
            now = Contents.read(node)
            entries = now.items_by_key() | now.attributes
            shown: dict[Any, Any] = {}
            for key, value in entries.items():
                # A container that forward has not changed may hold a container that it has changed
                is_shown = isinstance(sources.get(key), New) or id(value) in lent
                shown[key] = replace_parts(value, show) if is_shown else _OF_ARGUMENT
            return [*shown.values()] if isinstance(now.items, list) else shown

        return replace_parts(output, show)

    # Changed containers

    def _refuse_written_whole(self) -> None:
        """Refuse changes of objects that every lane has whole: the caller's, or copies of them."""
        compared: set[int] = set()  # of shared objects, which are the same one in several lanes
        for loan in self._loans:
            whole = [index for index in loan.objects if index in self._whole]
            written = [index for index in whole if _is_object_changed(loan, index)]
            for index in loan.shared.keys() - compared:
                compared.add(index)
                now = list_state(loan.leaves[index], find_rules)
                if not are_same_objects(now, loan.shared[index]):
                    written.append(index)
            for index in written:
                value = loan.leaves[index]
                msg = (
                    f"forward writes {self._name(index)}, a {type(value).__name__} that every lane "
                    "gets whole, so each lane wrote once. Return what it writes, or use "
                    "register_split for its class"
                )
                raise ShardError(msg)

    def _join_containers(self, join: Join) -> list[tuple[Any, EntriesAfter]]:
        """Return each container of the caller that changes, with its entries after the call."""
        joined: list[tuple[Any, EntriesAfter]] = []
        done: set[int] = set()  # of the caller's containers, by their ids
        for number, path in enumerate(self._paths):
            of_lanes = [read_entries(loan.containers[number]) for loan in self._loans]
            changed = [after for after in of_lanes if after is not None]
            if not changed:
                continue
            own = follow_path(self._call, path)
            place = address_in_call(path)
            if id(own) in done:
                # Each lane has two copies of it, and forward may have changed them differently
                _refuse(place, own, "it is at two places of the call, where each lane has two")
            done.add(id(own))
            have_all_changed = len(changed) == len(of_lanes)
            if not have_all_changed or not all(map(changed[0].is_alike, changed)):
                _refuse(place, own, "the lanes changed it differently")
            items = [after.items for after in changed]
            attributes = [after.attributes for after in changed]
            joined_entries = changed[0]._replace(
                items=self._join_entries(items, join, path, own),
                attributes=self._join_entries(attributes, join, path, own),
            )
            joined.append((own, joined_entries))
        return joined

    def _join_entries(
        self, of_lanes: Sequence[dict[Any, Any]], join: Join, path: Path, own: Any
    ) -> Sources:
        """Return the entries of one container, joined from those of the lanes.

        `own` is the container of the caller, and `path` leads to it.
        """
        joined: Sources = {}
        refused: dict[str, GatherError] = {}
        for key, first in of_lanes[0].items():
            if isinstance(first, Old):
                joined[key] = first
                continue
            column = [entries[key].value for entries in of_lanes]
            try:
                value = self._join_new(column, join, self._places_in_output.get(path), key)
            except GatherError as error:
                place = address_in_call((*path, key))
                refused[place] = error
            else:
                joined[key] = New(value)
        if len(refused) == 1:
            place, only = refused.popitem()
            _refuse(place, own, only.message)
        if refused:
            # Their messages are left out: each may name an option, which would hold for all entries
            _refuse(" and ".join(refused), own, "they cannot be joined")
        return joined

    def _join_new(self, column: Sequence[Any], join: Join, place: Path | None, key: Any) -> Any:
        """Return the caller's value for the values that the lanes put under one key.

        `place` is the path of the container in the output; None if it is not returned.
        """
        # An object under two keys stays one object. The lanes' containers keep the values alive, so
        # no other value has their ids
        ids = tuple(map(id, column))
        # Equal numbers under two keys may be one object by chance, and each key has its own options
        may_be_one_by_chance = all(map(is_plain_value, column))
        if ids not in self._joined or may_be_one_by_chance:
            # An entry may be an argument too, or hold one
            values = [self.mark_returned(value, lane) for lane, value in enumerate(column)]
            self._joined[ids] = self.resolve(join(values, place, key))
        return self._joined[ids]

    # Changed objects with rules

    def _join_objects(self, device: torch.device | None) -> list[tuple[Any, Any]]:
        """Return each object with rules that lanes changed, with the joined state of its parts."""
        joined_objects: list[tuple[Any, Any]] = []
        for index in self._loans[0].objects:
            if index in self._whole:  # not changed, or the call would have been refused
                continue
            if not any(_is_object_changed(loan, index) for loan in self._loans):
                continue
            parts = [loan.leaves[index] for loan in self._loans]
            if device is not None:
                # `place_leaf` takes a leaf, and returns the value in it
                parts = [place_leaf(WholeLeaf(part), device) for part in parts]
            value = self._values[index].value
            joined = self._join_parts(index, value, parts)
            if joined is not value:
                self._keep_attributes(index, value, joined)
                joined_objects.append((value, joined))
        return joined_objects

    def _join_parts(self, index: int, value: Any, parts: Sequence[Any]) -> Any:
        """Return the joined object, or refuse the parts with the address of the argument."""
        if len(parts) == 1:
            return parts[0]
        self._refuse_new_rows(index, parts)
        try:
            return splitter_of(value).join(parts)
        except (GatherError, ShardError) as error:
            msg = (
                f"{self._name(index)} was changed differently by the lanes: {error}. Make "
                "every lane add the same length, return the value instead of writing it, or "
                "leave the argument out, so that each lane makes its own"
            )
            if is_cache(value):
                msg += f". {WITHOUT_CACHE}"
            raise GatherError(msg) from error

    def _refuse_new_rows(self, index: int, parts: Sequence[Any]) -> None:
        """Refuse parts of an object to which the lanes have added rows, or which have lost rows.

        Each lane does so at the end of its part, and so in the middle of the caller's object.
        """
        if splitter_of(parts[0]).may_be_empty:
            return  # a cache may get its first rows in the call, and its rules compare them
        rows = [*map(count_rows, parts)]
        if rows != self._sizes:
            msg = (
                f"forward changes the number of rows of {self._name(index)}: the lanes had "
                f"{list_values(self._sizes)} rows, and left {list_values(rows)}. Return the rows "
                "instead, or change their number after the call"
            )
            raise ShardError(msg)

    def _keep_attributes(self, index: int, value: Any, joined: Any) -> None:
        """Give a joined object the caller's own tensors for the attributes that no lane has set.

        The rules of the class have joined these to new tensors, though no lane changed them.
        """
        # Rules with an `update` find unchanged entries themselves
        if splitter_of(value).update is not None:
            return
        own = read_attributes(value)
        for name, now in read_attributes(joined).items():
            before = own.get(name)
            is_new_tensor = isinstance(before, torch.Tensor) and now is not before
            if is_new_tensor and not self._has_lane_set(index, name):
                object.__setattr__(joined, name, before)

    def _has_lane_set(self, index: int, name: str) -> bool:
        """True if a lane has set or deleted an attribute of an object, or written into it."""
        for loan in self._loans:
            before = loan.attributes[index].get(name)
            now = _read_versions(loan.leaves[index]).get(name)
            if before is None or now is None:
                return True
            if now.value is not before.value or now.version != before.version:
                return True
        return False


def _is_object_changed(loan: Loan, index: int) -> bool:
    """True if forward has changed the lane's part of an object with rules."""
    return not are_same_objects(list_contents(loan.leaves[index]), loan.objects[index])


def _refuse(place: str, container: Any, why: str) -> NoReturn:
    msg = (
        f"forward writes {place} into a {type(container).__name__} of the caller, and each lane "
        f"wrote its own: {why}. Return it instead of writing it, so that out_dims and reduce say "
        "how outputs are joined"
    )
    raise ShardError(msg)
