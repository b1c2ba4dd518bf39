"""`OutputPlace`: one place of a refused output, its sizes, and the declaration that joins it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from parawrap.engine.columns import are_numbers, have_dims, shape_of, sizes_on
from parawrap.engine.join_rules import Declared, JoinMode, Refusal
from parawrap.tree import address

_SKIPPED_LABEL = -100  # torch's losses skip it: their `ignore_index`


class Cure(NamedTuple):
    """A declaration of one place that joins it, or that is to be tried.

    Attributes:
        declared: The entries of the place.
        join: The option `join`.
        note: What the sizes say about the place, for the error.
    """

    declared: Declared
    join: JoinMode
    note: str = ""

    @property
    def is_constant(self) -> bool:
        """True if it declares one value that is the same in every lane."""
        return self.declared.out_dim is None

    def change(self, **entries: Any) -> Cure:
        """Return the cure with other entries for the place."""
        return self._replace(declared=self.declared._replace(**entries))


class OtherDim(NamedTuple):
    """A dim with several entries per row, which is not the dim of the rows."""

    dim: int
    entries: int


@dataclass
class OutputPlace:
    """One place of an output, with the places of its parts if all lanes returned containers.

    `Trials` and `explain_refusal` enter what they find.

    Attributes:
        path: The keys that lead to the place.
        column: The value of each lane.
        rows: The row count of each shard; None if it is not known.
        declared: The declarations of the user.
        refusal: Why the place cannot be joined; None if it can, or if its parts say why.
        parts: The places of the parts of a container, by key.
        is_tuple: True if options declare the parts by position.
        cure: The declaration that joins the place.
        other: The declaration that joins it if its values have another meaning.
        is_padded: True if the place was padded without a value from the user.
        note: What the sizes say about the place.
        is_opened: True for a list that the user declares as a whole, and whose parts the cure must
            declare.
    """

    path: tuple[Any, ...]
    column: Sequence[Any]
    rows: Sequence[int] | None
    declared: Declared
    refusal: Refusal | None = None
    parts: dict[Any, OutputPlace] = field(default_factory=dict)
    is_tuple: bool = False
    cure: Cure | None = None
    other: Cure | None = None
    is_padded: bool = False
    note: str = ""
    is_opened: bool = False

    @property
    def name(self) -> str:
        """The address of the place, such as ``output["loss"]``."""
        return address("output", self.path)

    @property
    def reason(self) -> Refusal:
        """The refusal of a place that has one."""
        assert self.refusal is not None
        return self.refusal

    @property
    def holds_numbers(self) -> bool:
        """True if each lane returned a number."""
        return are_numbers(self.column)

    @property
    def holds_arrays(self) -> bool:
        """True for tensors or arrays with dims."""
        return have_dims(self.column)

    @property
    def is_proven(self) -> bool:
        """True if shards differ in size, so only a size that comes from the rows can match."""
        return len(set(self.rows or ())) > 1  # unknown sizes prove nothing

    @property
    def compares_rows(self) -> bool:
        """True if two dims have the rows of each shard, and the shards have different sizes."""
        return self.holds_arrays and self.is_proven and len(self.dims_with_rows()) > 1

    @property
    def names_padding(self) -> bool:
        """True if the cure has a value to pad with."""
        return self.cure is not None and self.cure.declared.pad_value is not None

    def dims_with_rows(self) -> list[int]:
        """Return the dims with as many entries in every part as its shard has rows."""
        if not self.rows:
            return []
        shapes = [shape_of(part) or () for part in self.column]
        dims = range(min(map(len, shapes)))
        return [dim for dim in dims if sizes_on(self.column, dim) == list(self.rows)]

    def count_per_row(self, dim: int) -> int | None:
        """Return how many entries on `dim` each row has; None if it is one, or not the same."""
        sizes = sizes_on(self.column, dim)
        # A shard without rows has no entries, whatever their number per row
        if not self.rows or not sizes or 0 in self.rows:
            return None
        count = sizes[0] // self.rows[0]
        is_same = sizes == [count * rows for rows in self.rows]
        return count if count > 1 and is_same else None

    def find_other_dim(self, row_dim: int) -> OtherDim | None:
        """Return the one dim with several entries per row, if it is not `row_dim`.

        None if another dim has the rows, or if the sizes of the shards prove nothing.
        """
        if not self.is_proven or self.dims_with_rows():
            return None
        found = []
        fewest_dims = min(len(part.shape) for part in self.column)
        for dim in range(fewest_dims):
            entries = self.count_per_row(dim)
            if entries is not None:
                found.append(OtherDim(dim, entries))
        # Of several such dims, the sizes do not say which has the rows. A negative `row_dim` counts
        # from the end
        if len(found) != 1 or found[0].dim in (row_dim, row_dim + fewest_dims):
            return None
        return found[0]

    def give_padding(self, join: JoinMode) -> None:
        """Name the value to pad this place with."""
        cure = self.cure or Cure(self.declared, join)
        self.cure = cure.change(pad_value=self.guess_padding())

    def guess_padding(self) -> Any:
        """Return a padding that the user may have to replace."""
        dtype = self.column[0].dtype
        if dtype is torch.bool:
            return False
        if dtype.is_floating_point or dtype.is_complex:
            return 0.0
        # A zero is a class in labels, and often the padding in tokens
        has_labels = bool(self.path) and "label" in str(self.path[-1])
        return _SKIPPED_LABEL if has_labels else 0

    def walk(self) -> Iterator[OutputPlace]:
        """Yield this place and all places below it."""
        yield self
        for part in self.parts.values():
            yield from part.walk()

    def leaves(self) -> Iterator[OutputPlace]:
        """Yield the places without parts, in order."""
        return (place for place in self.walk() if not place.parts)

    def refused(self) -> list[OutputPlace]:
        """Return the places that cannot be joined, at any depth."""
        return [place for place in self.walk() if place.refusal is not None]
