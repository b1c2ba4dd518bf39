"""`Trials`: find each place of an output that cannot be joined, and the options that join it.

The places of a refused call are joined again, one by one, so that one error names them all. An
error names a declaration only after it has joined the outputs of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from parawrap.engine.columns import are_tensors, list_values, shape_of
from parawrap.engine.join_by_place import Joiner, Siblings, is_sequence
from parawrap.engine.join_rules import Declared, JoinRules, Refusal, is_tree
from parawrap.engine.output_place import Cure, OutputPlace
from parawrap.tree import TENSOR, UNDECLARED, flatten, flatten_once


class _Part(NamedTuple):
    """One part of the containers in a column: its key, its column, and its declarations."""

    key: Any
    column: Sequence[Any]
    declared: Declared


class Trials:
    """Joins single places of one call, by the rules of a joiner, or by other declarations.

    Attributes:
        rules: The rules of the joiner.
        rows: The row count of each shard; None if it is not known.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self.rules = joiner.rules
        self.rows = joiner.rows

    def of_block(self) -> Trials:
        """Return trials of the same outputs by the rules of a parallel block without options."""
        # The shards of a block differ in size, which shows what follows the rows
        rules = JoinRules(self.rules.dim, assumes_proof=True)
        return Trials(self._joiner.with_rules(rules))

    # Places

    def find_places(self) -> OutputPlace:
        """Return the place of the whole output, with all places below it and their refusals."""
        return self._find_below(self._joiner.outputs, self.rules.declared, None)

    def _find_below(
        self, column: Sequence[Any], declared: Declared, siblings: Siblings | None
    ) -> OutputPlace:
        """Return the place that the joiner stands at, with all places below it.

        `siblings` are the leaves around the place. They are None for the whole output and for each
        item of a list, which begin a group of siblings.
        """
        joiner = self._joiner
        place = OutputPlace(tuple(joiner.path), column, self.rows, declared)
        if siblings is None:
            siblings = flatten(column[0], is_sequence)
        joiner.siblings = siblings
        try:
            parts = self._open(place)
            if parts is None:
                joiner.padded = 0  # so that the second padded place of an output is not refused
                self._join_whole(place)
                place.is_padded = joiner.padded > 0
                return place
        except Refusal as refusal:
            place.refusal = refusal
            joiner.path[:] = place.path  # a refusal leaves the path of the refused part
            return place
        is_list = is_sequence(column[0])
        place.is_tuple = is_list or isinstance(column[0], tuple)  # also a namedtuple
        below = None if is_list else siblings  # items of a list have no siblings outside it
        for part in parts:
            joiner.path.append(part.key)
            place.parts[part.key] = self._find_below(part.column, part.declared, below)
            joiner.path.pop()
        if any(leaf.refusal is not None for leaf in place.leaves()):
            if place.is_opened:
                place.refusal = None  # the error names the parts instead
            self._close_items(place)
        return place

    def _open(self, place: OutputPlace) -> list[_Part] | None:
        """Return the parts of the containers at a place; None if their values are joined as one.

        If a list is refused, and its items may be outputs, it notes both in the place.
        """
        column, declared = place.column, place.declared
        if TENSOR.issuperset(map(type, column)):
            return None
        of_lanes = [flatten_once(value) for value in column]
        specs = [spec for _, spec in of_lanes]
        spec = specs[0]
        if spec.is_leaf() or any(other != spec for other in specs):
            return None
        if is_sequence(column[0]):
            self._joiner.check_kinds(column, declared)
            try:
                if self._joiner.choose_form(column, declared) != "parts":
                    return None
            except Refusal as refusal:
                # The one entry declares one item per row. A tuple of entries may join the items
                if not self._may_be_outputs(place):
                    raise
                place.is_opened = True
                place.refusal = refusal
        keys = spec.entries()
        if not keys:
            return None
        columns = zip(*(parts for parts, _ in of_lanes), strict=True)
        return [*map(_Part, keys, columns, declared.parts(keys))]

    def _may_be_outputs(self, place: OutputPlace) -> bool:
        """True if lists under one entry of out_dims have one length, which is not that of rows."""
        out_dim = place.declared.out_dim
        declares_rows = out_dim is not None and out_dim is not UNDECLARED
        is_one_entry = declares_rows and not is_tree(out_dim)
        if not is_one_entry or self.rules.as_torch:
            return False
        lengths = list(map(len, place.column))
        return len(set(lengths)) == 1 and lengths != self.rows

    def _join_whole(self, place: OutputPlace) -> None:
        """Join a column of leaves, or of containers of several structures, to see if it is refused.

        The joined value is dropped.
        """
        specs = [flatten(value, is_sequence)[1] for value in place.column]
        if all(spec.is_leaf() for spec in specs):
            self._joiner.join_leaves(place.column, place.declared)
        else:
            self._joiner.join_values(place.column, place.declared)

    def _close_items(self, place: OutputPlace) -> None:
        """Refuse a list as one place if its items were refused one by one, and may be rows."""
        if type(place.column[0]) is not list:
            return
        lengths = list(map(len, place.column))
        if lengths != self.rows:
            return
        # If an item can be joined or has the rows, the items are outputs, and the list is as long
        # as the shard by chance
        for leaf in place.leaves():
            has_rows = leaf.holds_arrays and leaf.dims_with_rows()
            if leaf.refusal is None or has_rows:
                return
        items = self._as_declared(place).change(out_dim="items")
        if self.try_cure(place, items) is not None:
            # Later, `find_cures` finds the same cure for the whole list
            place.parts.clear()
            place.refusal = Refusal("", returned=f"{list_values(lengths)} items")

    # Cures

    def try_cure(self, place: OutputPlace, cure: Cure) -> Literal["joined", "padded"] | None:
        """Join a place by a cure, and return how; None if the cure does not join it.

        "padded" says that a tensor was padded without a value from the user.
        """
        joiner = self._joiner.with_rules(replace(self.rules, join=cure.join))
        joiner.path = [*place.path]
        try:
            joiner.join_leaves(place.column, cure.declared)
        except Exception:  # noqa: BLE001 -- no cure, whatever the reason: the refusal is raised
            return None
        return "padded" if joiner.padded else "joined"

    def entry_of(self, place: OutputPlace) -> Any:
        """Return an entry of out_dims that says what the sizes of a place have shown."""
        cure = place.cure or self._as_declared(place)
        for entry in (self.rules.dim, "items", None, "ragged"):
            if self.try_cure(place, cure.change(out_dim=entry)) is not None:
                return entry
        return self.rules.dim  # no entry joins the place, so any will do

    def find_cures(self, place: OutputPlace) -> None:
        """Enter the first cure that joins a place, and the first one for another meaning."""
        if place.compares_rows:  # no option joins comparisons of rows
            return
        for cure in self._list_cures(place):
            result = self.try_cure(place, cure)
            if result is None:
                continue
            if place.cure is None:
                place.cure = cure
                place.is_padded = result == "padded"
                place.note = cure.note
            elif cure.is_constant != place.cure.is_constant:
                place.other = cure
                return

    def _list_cures(self, place: OutputPlace) -> Sequence[Cure]:
        """Return cures that may join a place, the most probable first."""
        if place.holds_numbers:
            return self._list_cures_of_numbers(place)
        if place.holds_arrays:
            return self._list_cures_of_arrays(place)
        rows = self._as_rows(place)
        # "ragged" comes last, since it joins lists of any length
        return [rows.change(out_dim="items"), self._as_constant(place), _as_ragged(rows)]

    def _list_cures_of_numbers(self, place: OutputPlace) -> list[Cure]:
        number = place.column[0]
        constant = self._as_constant(place)
        # The mean comes first, and joins floats alone: that of equal floats is the float
        cures = [self._reduced(place, "mean")]
        has_bool_dtype = str(getattr(number, "dtype", "")).endswith("bool")  # of torch or numpy
        if has_bool_dtype:
            cures.append(self._reduced(place, torch.any))  # of equal values, it is the value
        # Equal integers are rather a constant if the shards differ in size, and else counts
        if place.is_proven:
            cures.append(constant)
        cures.append(self._reduced(place, torch.any if isinstance(number, bool) else "sum"))
        return [*cures, self._reduced(place, "stack"), constant]

    def _list_cures_of_arrays(self, place: OutputPlace) -> list[Cure]:
        declared, dim = place.declared, self.rules.dim
        if place.find_other_dim(dim) is not None:
            return []  # no option joins them; the error names torch.cat
        rows = self._as_rows(place)
        cures: list[Cure] = []
        # Without the reduction that names it, the place may follow the rows
        if declared.reduce is not None and declared.names_reduce:
            cures.append(rows)
        with_rows = place.dims_with_rows()
        if len(with_rows) == 1:
            (row_dim,) = with_rows
            cures.append(rows.change(out_dim=row_dim)._replace(note=f"dim {row_dim} has them"))
        constant = self._as_constant(place)
        per_row = place.count_per_row(dim)
        # If the shards are of one size, equal values of all lanes are rather a constant
        is_constant = not place.is_proven and self.try_cure(place, constant) is not None
        if per_row is not None and not is_constant:
            note = f"{per_row} rows per row of the batch"
            cures.append(_as_ragged(rows)._replace(note=note))
        if len({shape_of(part) for part in place.column}) == 1:
            cures += [constant, self._reduced(place, "sum"), self._reduced(place, "stack")]
        elif per_row is None:
            cures.append(_as_ragged(rows))
        if self.rules.join == "list" or not are_tensors(place.column):
            return cures
        padding = []
        # The declaration of the user comes first: perhaps only the other dims must be padded
        for cure in [self._as_declared(place), *cures]:
            padded = cure._replace(join="pad")
            if declared.pad_value is None:
                padding.append(padded)
            padding.append(padded.change(pad_value=place.guess_padding()))
        return cures + padding

    def _as_rows(self, place: OutputPlace) -> Cure:
        """Return the declaration of a place without a reduction that names it."""
        cure = self._as_declared(place)
        return cure.change(reduce=None) if place.declared.names_reduce else cure

    def _as_constant(self, place: OutputPlace) -> Cure:
        """Return the declaration of a place as one value that is the same in every lane."""
        return self._as_declared(place).change(out_dim=None, reduce=None)

    def _as_declared(self, place: OutputPlace) -> Cure:
        """Return the declaration of the user, as a cure to change."""
        return Cure(place.declared, self.rules.join)

    def _reduced(self, place: OutputPlace, how: Any) -> Cure:
        """Return the declaration of a place with this reduction."""
        out_dim = place.declared.out_dim
        return self._as_declared(place).change(
            out_dim=self.rules.dim if out_dim is None else out_dim,
            reduce=how,
            names_reduce=bool(place.path),  # the whole output has no key to name
        )


def _as_ragged(cure: Cure) -> Cure:
    """Return a cure that joins rows in order, whatever their number."""
    return cure.change(out_dim="ragged")
