"""`Trials`: find each place of an output that cannot be joined, and the options that join it.

The places of a refused call are joined again, one by one, so that one error names them all. Each
declaration was tried on the outputs of the call before an error names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any, Literal

import torch

from parawrap.engine.columns import are_tensors, list_values, shape_of
from parawrap.engine.join_rules import (
    Declared,
    JoinRules,
    Refusal,
    is_tree,
)
from parawrap.engine.joiner import Flat, Joiner, is_sequence
from parawrap.engine.output_place import Cure, OutputPlace
from parawrap.tree import TENSOR, UNDECLARED, flatten


class Trials:
    """Joins single places of one call, by the rules of a joiner, or by other declarations."""

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self.rules = joiner.rules
        self.rows = joiner.rows

    def of_block(self) -> Trials:
        """Return the trials by the rules of a block, for the rules of torch."""
        joiner = self._joiner.with_rules(JoinRules(self.rules.dim))
        # The shards of a block differ in size, and show what follows the rows.
        joiner.takes_proof = True
        return Trials(joiner)

    # Places

    def find_places(self) -> OutputPlace:
        """Return the place of the whole output, with all places below it and their refusals."""
        return self._find_below(self._joiner.outputs, self.rules.declared, None)

    def _find_below(
        self, column: Sequence[Any], declared: Declared, siblings: Flat | None
    ) -> OutputPlace:
        """Return the place that the joiner stands at, with all places below it.

        `siblings` are the leaves around it, and None begins a group of siblings: for the whole
        output, and for each item of a list.
        """
        joiner = self._joiner
        place = OutputPlace(tuple(joiner.path), column, self.rows, declared)
        if siblings is None:
            siblings = flatten(column[0], is_sequence)
        joiner.siblings = siblings
        try:
            opened = self._open(place)
            if opened is None:
                joiner.padded = 0  # or the second padded place of an output would be refused
                self._join_whole(place)
                place.is_padded = joiner.padded > 0
                return place
        except Refusal as refusal:
            place.refusal = refusal
            joiner.path[:] = place.path  # the refusal may have left it further down
            return place
        is_list = is_sequence(column[0])
        place.is_tuple = is_list or isinstance(column[0], tuple)  # also a namedtuple
        below = None if is_list else siblings  # items of a list have no siblings outside it
        for step, parts, each in opened:
            joiner.path.append(step)
            place.parts[step] = self._find_below(parts, each, below)
            joiner.path.pop()
        if any(part.refusal is not None for part in place.leaves()):
            if place.is_opened:
                place.refusal = None  # the error names the parts instead
            self._close_items(place)
        return place

    def _open(self, place: OutputPlace) -> list[tuple[Any, Sequence[Any], Declared]] | None:
        """Return the key, the column, and the declarations of each part of containers.

        None for values that are joined as one.
        """
        column, declared = place.column, place.declared
        if TENSOR.issuperset(map(type, column)):
            return None
        # Only the outermost container: every node except `value` itself is a leaf.
        of_lanes = [flatten(value, partial(is_not, value)) for value in column]
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
                # One entry declares items of rows, and a tuple of entries a list of outputs
                if not self._may_be_outputs(place):
                    raise
                place.is_opened = True
                place.refusal = refusal
        steps = spec.entries()
        if not steps:
            return None
        columns = zip(*(parts for parts, _ in of_lanes), strict=True)
        return [*zip(steps, columns, declared.parts(steps), strict=True)]

    def _may_be_outputs(self, place: OutputPlace) -> bool:
        """True if lists that one entry declares have the same length, and not one item per row."""
        out_dim = place.declared.out_dim
        declares_rows = out_dim is not None and out_dim is not UNDECLARED
        is_one_entry = declares_rows and not is_tree(out_dim)
        if not is_one_entry or self.rules.as_torch:
            return False
        lengths = list(map(len, place.column))
        return len(set(lengths)) == 1 and lengths != self.rows

    def _join_whole(self, place: OutputPlace) -> None:
        """Join a leaf, or containers of several structures. Only the refusal is of interest."""
        specs = [flatten(value, is_sequence)[1] for value in place.column]
        if all(spec.is_leaf() for spec in specs):
            self._joiner.join_leaves(place.column, place.declared)
        else:
            self._joiner.join_values(place.column, place.declared)

    def _close_items(self, place: OutputPlace) -> None:
        """Make one place of a list with one item per row, if its items were joined one by one."""
        if type(place.column[0]) is not list:
            return
        lengths = list(map(len, place.column))
        if lengths != self.rows:
            return
        # The list may be as long as the shard by chance. Then its items are outputs, of which one
        # is joined already or has the rows
        for leaf in place.leaves():
            has_rows = leaf.holds_arrays and leaf.dims_with_rows()
            if leaf.refusal is None or has_rows:
                return
        items = Cure(place.declared, self.rules.join).change(out_dim="items")
        if self.join(place, items) is not None:
            # `find_cures` finds the same cure for the whole list
            place.parts.clear()
            place.refusal = Refusal("", returned=f"{list_values(lengths)} items")

    # Cures

    def join(self, place: OutputPlace, cure: Cure) -> Literal["joined", "padded"] | None:
        """Join a place with other declarations; None if it is refused.

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
        """Return an entry of out_dims that says of a place what its sizes have shown."""
        cure = place.cure or Cure(place.declared, self.rules.join)
        for entry in (self.rules.dim, "items", None, "ragged"):
            if self.join(place, cure.change(out_dim=entry)) is not None:
                return entry
        return self.rules.dim  # of a place that nothing joins

    def find_cures(self, place: OutputPlace) -> None:
        """Enter the declaration that joins a place, and that for another meaning, if there are."""
        if place.compares_rows:  # no option joins comparisons of rows
            return
        for cure in self._list_cures(place):
            result = self.join(place, cure)
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
        """Return declarations that may join a place, the most probable first."""
        if place.holds_numbers:
            return self._list_cures_of_numbers(place)
        if place.holds_arrays:
            return self._list_cures_of_arrays(place)
        rows = self._as_rows(place)
        # "ragged" last: it joins lists of any length.
        return [rows.change(out_dim="items"), self._as_constant(place), _as_ragged(rows)]

    def _list_cures_of_numbers(self, place: OutputPlace) -> list[Cure]:
        number = place.column[0]
        constant = self._as_constant(place)
        # First for floats: the mean of equal numbers is that number
        cures = [self._reduced(place, "mean")]
        if str(getattr(number, "dtype", "")).endswith("bool"):
            cures.append(self._reduced(place, torch.any))  # of equal values: that value
        # Shards of different sizes seldom count the same, and shards of one size often do
        if place.is_proven:
            cures.append(constant)
        cures.append(self._reduced(place, torch.any if isinstance(number, bool) else "sum"))
        return [*cures, self._reduced(place, "stack"), constant]

    def _list_cures_of_arrays(self, place: OutputPlace) -> list[Cure]:
        declared, dim = place.declared, self.rules.dim
        if place.find_other_dim(dim) is not None:
            return []  # torch.cat joins them, and no option
        rows = self._as_rows(place)
        cures: list[Cure] = []
        # Left out of a named reduction, it may follow the rows
        if declared.reduce is not None and declared.names_reduce:
            cures.append(rows)
        with_rows = place.dims_with_rows()
        if len(with_rows) == 1:
            (row_dim,) = with_rows
            cures.append(rows.change(out_dim=row_dim)._replace(note=f"dim {row_dim} has them"))
        constant = self._as_constant(place)
        per_row = place.count_per_row(dim)
        # With shards of one size, equal values of all lanes are rather a constant
        is_constant = not place.is_proven and self.join(place, constant) is not None
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
        # The declaration of the user comes first: only the other dims may have to be padded
        for cure in [Cure(declared, self.rules.join), *cures]:
            padded = cure._replace(join="pad")
            if declared.pad_value is None:
                padding.append(padded)
            padding.append(padded.change(pad_value=place.guess_padding()))
        return cures + padding

    def _as_rows(self, place: OutputPlace) -> Cure:
        """Return the declaration of a place without a reduction that names it."""
        cure = Cure(place.declared, self.rules.join)
        return cure.change(reduce=None) if place.declared.names_reduce else cure

    def _as_constant(self, place: OutputPlace) -> Cure:
        return Cure(place.declared, self.rules.join).change(out_dim=None, reduce=None)

    def _reduced(self, place: OutputPlace, how: Any) -> Cure:
        """Return the declaration of a place with this reduction."""
        out_dim = place.declared.out_dim
        return Cure(place.declared, self.rules.join).change(
            out_dim=self.rules.dim if out_dim is None else out_dim,
            reduce=how,
            names_reduce=bool(place.path),  # the whole output has no key to name
        )


def _as_ragged(cure: Cure) -> Cure:
    return cure.change(out_dim="ragged")
