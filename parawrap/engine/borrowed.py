"""Arguments are borrowed: what forward does to them reaches the caller's own objects.

The plain call writes into them, and so does a cut call.

A lane gets other containers, parts of objects with rules, and copies of tensors from other
devices. `lend` notes each of them when it is made, with its contents. After forward,
`Borrowed.join_changes` compares them, and joins what is new like an output. `Borrowed.enter` puts
it into the caller's object, once all joins are done: a refused call leaves the arguments alone.
Calls of plain tensors have nothing to note.

::

    caller's batch = {"x": X}         lane 0: {"x": X[:5]}  ──► {"x": X[:5], "y": Y0}  ─┐
    batch = {"x": X, "y": Y}  ◄── join ── lane 1: {"x": X[5:]}  ──► {"x": X[5:], "y": Y1}  ─┘

`lent_containers.py` compares and changes single containers. `given.py` takes the same steps for
arguments in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch

from parawrap._private_names import version_of
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
    contents_of,
    find_rules,
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
# Stands for unchanged parts of arguments in an error about outputs: one object in all lanes
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
    """Return the rules for what forward puts into an argument, from the rules for outputs.

    If the output returns the container at `place`, the options for its places hold for the entry
    `key`. Otherwise, options that name places of the output say nothing about the arguments.
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
    # Not "list": the plain call leaves one value in the entry, not one per lane
    mode: JoinMode = "pad" if rules.join == "pad" else "cat"
    # An error names options only where they hold for the entry as it is
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


class Loan(NamedTuple):
    """The copies that one lane has of a call's arguments, with their contents before the call.

    Attributes:
        leaves: The lane's leaves.
        containers: The contents of each container, in the order of the paths.
        moved: The tensors that came from another device.
        objects: The contents of each object with rules, by the index of its leaf.
        attributes: The attributes of these objects by name, each with its version if it is a
            tensor; by the same index.
        shared: The state of each object that all lanes use, by the index of its leaf.
    """

    leaves: Sequence[Any] = ()
    containers: Sequence[Contents] = ()
    moved: Sequence[Moved] = ()
    objects: Mapping[int, Sequence[Any]] = {}
    attributes: Mapping[int, dict[str, tuple[Any, int]]] = {}
    shared: Mapping[int, Sequence[Any]] = {}

    def is_unchanged(self) -> bool:
        """True if forward has changed no container and no object."""
        for before in self.containers:
            if not before.is_unchanged():
                return False
        for index, held in self.objects.items():
            if not are_same_objects(contents_of(self.leaves[index]), held):
                return False
        for index, held in self.shared.items():
            if not are_same_objects(_read_shared(self.leaves[index]), held):
                return False
        return True


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
    `parts` are the leaves before they were moved. `objects` are the indices of leaves with rules,
    `shared` those of objects that all lanes use.
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
    attributes: dict[int, dict[str, tuple[Any, int]]] = {}
    for index in objects:
        contents[index] = contents_of(leaves[index])
        attributes[index] = _read_versions(leaves[index])
    states: dict[int, Sequence[Any]] = {}
    for index in shared:
        states[index] = _read_shared(leaves[index])
    return Loan(leaves, containers, moved, contents, attributes, states)


def _read_versions(value: Any) -> dict[str, tuple[Any, int]]:
    """Return the attributes of an object, each with its version if it is a tensor."""
    found: dict[str, tuple[Any, int]] = {}
    for name, part in read_attributes(value).items():
        version = 0
        if isinstance(part, torch.Tensor) and not part.is_inference():
            version = version_of(part)
        found[name] = part, version
    return found


def _read_shared(value: Any) -> list[Any]:
    """Return what an object of any class holds, at any depth."""
    return list_state(value, find_rules)


def replace_new_entries(loan: Loan, replace: Callable[[Any], Any]) -> None:
    """Replace the values that forward has put into the caller's own containers.

    A whole call that needs no copies lends the containers themselves.
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
                    object.__setattr__(container, name, value)


# After forward


class Borrowed:
    """The arguments of one call, and what its lanes have of them.

    `call` are the caller's own arguments, with containers at `paths`; `values` are the leaves,
    `whole` the indices of the objects with rules that each of several lanes has whole, and `name`
    returns the address of a leaf for errors.
    """

    def __init__(
        self,
        call: Any,
        paths: Sequence[Path],
        values: Sequence[Any],
        loans: Sequence[Loan],
        whole: Collection[int],
        name: Callable[[int], str],
    ) -> None:
        self._call = call
        self._paths = paths
        self._values = values
        self._loans = loans
        self._whole = whole
        self._name = name
        # By the argument: the path of a container, or the index of a leaf
        self._marks: dict[Path | int, ReturnedArgument] = {}
        # By lane: from the id of a copy to its argument
        self._arguments: dict[int, dict[int, Path | int]] = {}
        # From the path of a container in the call to its path in the output, if it is returned
        self._places_in_output: dict[Path, Path] = {}
        # Values that forward made, joined: by the ids of the values of all lanes
        self._joined: dict[tuple[int, ...], Any] = {}
        # Found by `join_changes`, written by `enter`
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

        Parts of objects return to `device`; None leaves them where they are. `outputs` are those of
        the lanes: options for their places hold for the entries of a container that they return.

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
                # Its error names all places of the output, and the options with their keys
                join_outputs([*map(self._show_new_entries, outputs, self._loans)])
            raise
        self._changed_objects = self._join_objects(device)

    def enter(self) -> None:
        """Bring what forward did to the caller's own objects."""
        # An interrupt between two of them leaves the rest as it was, as in the plain call
        for container, after in self._changed_containers:
            enter_entries(container, after)
        for value, joined in self._changed_objects:
            update_argument(value, joined)

    # Arguments in the output

    def mark_returned(self, output: Any, lane: int) -> Any:
        """Return an output with marks in the places of the lane's copies of arguments."""
        arguments = self._arguments.get(lane)
        if arguments is None:
            # Once per lane, since each new entry of a container is marked too
            arguments = self._arguments[lane] = {}
            loan = self._loans[lane]
            for path, before in zip(self._paths, loan.containers, strict=True):
                arguments[id(before.container)] = path
            # Numbers and texts are left out: lanes make equal ones, which may be the same object
            for index, leaf in enumerate(loan.leaves):
                has_rules = index in loan.objects
                if isinstance(leaf, torch.Tensor) or has_rules:
                    arguments[id(leaf)] = index

        def find_mark(node: Any) -> ReturnedArgument | None:
            place = arguments.get(id(node))
            return None if place is None else self._mark(place)

        return replace_parts(output, find_mark)

    def _mark(self, place: Path | int) -> ReturnedArgument:
        """Return the mark of an argument, one for all lanes."""
        if place not in self._marks:
            if isinstance(place, int):
                leaf = self._values[place]
                argument = leaf.value if isinstance(leaf, WholeLeaf) else leaf
            else:
                argument = follow_path(self._call, place)
            self._marks[place] = ReturnedArgument(argument)
        return self._marks[place]

    def resolve(self, output: Any) -> Any:
        """Return a joined output with the caller's own arguments in the places of their marks."""
        if not self._marks:
            return output
        return replace_parts(
            output, lambda node: node.argument if type(node) is ReturnedArgument else None
        )

    def _find_places_in_output(self, output: Any) -> None:
        """Note where the output of a lane has its containers: the first place of each."""
        paths: dict[int, Path] = {}
        for path, before in zip(self._paths, self._loans[0].containers, strict=True):
            paths[id(before.container)] = path
        for place, node in walk_containers(output):
            if id(node) in paths:
                self._places_in_output.setdefault(paths[id(node)], place)

    def _show_new_entries(self, output: Any, loan: Loan) -> Any:
        """Return the output of a lane with the entries that forward wrote into its arguments.

        All other parts of arguments are one object, which is joined.
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
                # A container that forward has not changed may hold one that it has
                is_shown = isinstance(sources.get(key), New) or id(value) in lent
                shown[key] = replace_parts(value, show) if is_shown else _OF_ARGUMENT
            return [*shown.values()] if isinstance(now.items, list) else shown

        return replace_parts(output, show)

    # Changed containers

    def _refuse_written_whole(self) -> None:
        """Refuse changes of objects that every lane has whole: the caller's, or a copy of it."""
        compared: set[int] = set()  # lanes on the object's own device have the same object
        for loan in self._loans:
            written = [index for index in loan.objects if index in self._whole]
            written = [index for index in written if _is_object_changed(loan, index)]
            for index in loan.shared.keys() - compared:
                compared.add(index)
                if not are_same_objects(_read_shared(loan.leaves[index]), loan.shared[index]):
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
                # `flatten` made two containers of it, and forward may have changed each in its way
                _refuse(place, own, "it is at two places of the call, where each lane has two")
            done.add(id(own))
            have_all_changed = len(changed) == len(of_lanes)
            if not have_all_changed or not all(map(changed[0].is_alike, changed)):
                _refuse(place, own, "the lanes changed it differently")
            items = [after.items for after in changed]
            attributes = [after.attributes for after in changed]
            after = changed[0]._replace(
                items=self._join_entries(items, join, path, own),
                attributes=self._join_entries(attributes, join, path, own),
            )
            joined.append((own, after))
        return joined

    def _join_entries(
        self, of_lanes: Sequence[dict[Any, Any]], join: Join, path: Path, own: Any
    ) -> Sources:
        """Return the entries of one container, joined from those of the lanes.

        The container of the caller is `own`, at this path of the call.
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
            # Each message may name an option for its own entry, which would hold for all of them
            _refuse(" and ".join(refused), own, "they cannot be joined")
        return joined

    def _join_new(self, column: Sequence[Any], join: Join, place: Path | None, key: Any) -> Any:
        """Return the caller's value for the values that the lanes put under one key."""
        # One value under two names stays one object. The lanes' containers keep the values alive,
        # so no other value has their ids
        ids = tuple(map(id, column))
        # Two equal numbers may be one object, and each has the options of its key
        may_be_equal_by_chance = all(map(is_plain_value, column))
        if ids not in self._joined or may_be_equal_by_chance:
            # An entry may be an argument too, or hold one
            values = [self.mark_returned(value, lane) for lane, value in enumerate(column)]
            self._joined[ids] = self.resolve(join(values, place, key))
        return self._joined[ids]

    # Changed objects with rules

    def _join_objects(self, device: torch.device | None) -> list[tuple[Any, Any]]:
        """Return each object with rules that lanes changed, with the joined state of its parts."""
        joined_objects: list[tuple[Any, Any]] = []
        for index in self._loans[0].objects:
            if index in self._whole:  # unchanged: a write was refused
                continue
            if not any(_is_object_changed(loan, index) for loan in self._loans):
                continue
            parts = [loan.leaves[index] for loan in self._loans]
            if device is not None:
                # It takes a leaf, and returns the value in it
                parts = [place_leaf(WholeLeaf(part), device) for part in parts]
            value = self._values[index].value
            joined = self._join_parts(index, value, parts)
            if joined is not value:
                self._keep_attributes(index, value, joined)
                joined_objects.append((value, joined))
        return joined_objects

    def _join_parts(self, index: int, value: Any, parts: Sequence[Any]) -> Any:
        """Return the parts of an object in one, with the address of the argument in errors."""
        if len(parts) == 1:
            return parts[0]
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

    def _keep_attributes(self, index: int, value: Any, joined: Any) -> None:
        """Give a joined object the caller's own tensors for the attributes that no lane has set.

        Joined tensors are new ones in any case.
        """
        # Rules with an `update` compare the entries themselves
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
            value_before, version_before = before
            value, version = now
            if value is not value_before or version != version_before:
                return True
        return False


def _is_object_changed(loan: Loan, index: int) -> bool:
    """True if forward has changed the lane's part of an object with rules."""
    return not are_same_objects(contents_of(loan.leaves[index]), loan.objects[index])


def _refuse(place: str, container: Any, why: str) -> NoReturn:
    msg = (
        f"forward writes {place} into a {type(container).__name__} of the caller, and each lane "
        f"wrote its own: {why}. Return it instead of writing it, so that out_dims and reduce say "
        "how outputs are joined"
    )
    raise ShardError(msg)
