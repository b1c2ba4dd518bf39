"""From the outputs of the lanes to the output of the call.

Each place in the output has one of four kinds. ROWS: the rows lie on a dim, and are concatenated. ITEMS: a list with one
item per row. SAME: one value for all lanes. RAGGED: rows in order, whatever their number. `out_dims` declares the kind.
Without it, the call itself must show it: shards of different sizes, or what such a call of the same kind has shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NoReturn, cast

import torch

from parawrap.errors import GatherError
from parawrap.shards._equal_values import equal_values, is_array
from parawrap.shards._output_options import CURE, LEARN, JoinRules, Refusal, declared_below, refuse
from parawrap.shards._reduce_numbers import is_number, listed, reduced
from parawrap.shards._register_split import placed, splitter_of
from parawrap.tree import Opaque, TreeSpec, addresses, flatten, flatten_outside_sequences, mismatch, unflatten

__all__ = ["Evidence", "Originals", "join", "with_originals"]

Originals = Callable[[], Sequence[Callable[[Any], Any]]]
"""Returns one function per shard: from a value of that lane to the caller's value that it is a copy of, or None."""

Place = tuple[Any, ...]
"""The way to a place in an output: structures and indices."""

_ROWS, _SAME, _ITEMS, _RAGGED, _FIXED = "rows", "same", "items", "ragged", "fixed"
_NUMBER = "number"
_UNKNOWN = -1
_TENSOR = frozenset({torch.Tensor})
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


class Evidence:
    """The evidence of the calls of one kind: the kind of each place in the output.

    It is `complete` after a call with shards of different sizes was joined.
    """

    __slots__ = ("complete", "places")

    def __init__(self) -> None:
        self.complete = False
        self.places: dict[Place, str] = {}

    def forget(self) -> None:
        """Learn again from the next call."""
        self.complete, self.places = False, {}


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int] | None,
    rules: JoinRules,
    device: torch.device | None = None,
    originals: Originals | None = None,
    evidence: Evidence | None = None,
    witness: tuple[Any, int] | None = None,
) -> Any:
    """Return one output, on `device` (None: where the lanes left it), from the outputs of shards of those sizes.

    With the rules of torch, `sizes` may be None: unknown. `witness` is the output of a whole call with its row count: it is
    evidence for shards of equal sizes.

    Raises:
        GatherError: If a place in the output cannot be joined, or nothing shows how. The message names the place.
    """
    if rules.join == "list" or (len(outputs) == 1 and rules.keep_single):
        if originals is not None:
            outputs = list(map(with_originals, outputs, originals()))
        moved = [output if device is None else _moved(output, device) for output in outputs]
        return moved if rules.join == "list" else moved[0]
    call = _Join(len(outputs), sizes, rules, device, originals, evidence or Evidence())
    try:
        return call.joined(outputs, witness)
    except Refusal as refusal:
        if evidence is not None:
            evidence.forget()
        place = "output" + "".join(reversed(refusal.steps))
        msg = f"{place} cannot be joined: {refusal}"
        if rules.as_torch and ("out_dims" in msg or "join=" in msg):
            msg += ". out_dims and join are options of parallel(model, devices)"
        raise GatherError(msg) from refusal.__cause__


def with_originals(output: Any, find: Callable[[Any], Any]) -> Any:
    """Return an output with the caller's values in the places of the copies that a lane has of them."""
    if type(output) is torch.Tensor:
        value = find(output)
        return output if value is None else value
    leaves, spec = flatten(output)
    found = [find(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    if all(value is None for value in found):
        return output
    return unflatten(spec, [leaf if value is None else value for leaf, value in zip(leaves, found, strict=True)])


class _Join:
    """The joining of one call. A column holds the values of all lanes at one place, the witness last if there is one."""

    def __init__(
        self,
        lanes: int,
        sizes: Sequence[int] | None,
        rules: JoinRules,
        device: torch.device | None,
        originals: Originals | None,
        evidence: Evidence,
    ) -> None:
        self.lanes = lanes
        self.rules = rules
        self.device = device
        self.originals = originals
        self.evidence = evidence
        self.rows = [_UNKNOWN] * lanes if sizes is None else list(sizes)
        self.places: dict[Place, str] = {}

    def joined(self, outputs: Sequence[Any], witness: tuple[Any, int] | None) -> Any:
        """Join the outputs, and note what they showed."""
        column, evidence = list(outputs), self.evidence
        if witness is not None:
            column.append(witness[0])
            self.rows.append(witness[1])
        self.tells = len(set(self.rows)) > 1
        value = self._value(column, (), self.rules.out_dims)
        if self.tells:
            evidence.places = {**evidence.places, **self.places}
            evidence.complete = True
        return value

    def _value(self, column: Sequence[Any], place: Place, declared: Any) -> Any:
        if _TENSOR.issuperset(map(type, column)) and not isinstance(declared, (list, tuple, Mapping)):
            return self._tensor(cast("Sequence[torch.Tensor]", column), place, declared)
        flat = [flatten_outside_sequences(value) for value in column]
        spec = flat[0][1]
        if any(other != spec for _, other in flat[1:]):
            _refuse_structures([other for _, other in flat])
        if spec.is_leaf():
            return self._leaf([leaves[0] for leaves, _ in flat], place, declared)
        children = declared_below(declared, spec)
        joined = []
        for index, parts in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            try:
                joined.append(self._leaf(parts, (*place, spec, index), children[index]))
            except Refusal as refusal:
                refusal.steps.append(addresses(spec, ("",))[index])
                raise
        return unflatten(spec, joined)

    def _leaf(self, column: Sequence[Any], place: Place, declared: Any) -> Any:
        first = column[0]
        if isinstance(declared, Mapping) or (isinstance(declared, (list, tuple)) and type(first) not in (list, tuple)):
            refuse(f"out_dims declares a {type(declared).__name__} here, and the lanes returned a {type(first).__name__}")
        if all(isinstance(value, torch.Tensor) for value in column):
            return self._tensor(column, place, declared)
        if any(type(value) is not type(first) for value in column) and not all(map(is_number, column)):
            kinds = " and ".join(sorted({type(value).__name__ for value in column}))
            refuse(f"the lanes returned values of type {kinds}. {CURE}")
        if first is None:
            return None
        if type(first) in (list, tuple):
            return self._sequence(column, place, declared)
        if isinstance(first, Opaque):
            return self._whole(column, declared)
        if is_number(first):
            return self._number(column, declared)
        if is_array(first):
            return self._array(column, place, declared)
        return self._same(column, place, declared)

    # Tensors and arrays

    def _tensor(self, column: Sequence[torch.Tensor], place: Place, declared: Any) -> Any:
        if column[0].is_nested and column[0].layout is torch.strided:
            refuse('a nested tensor has no dim to join on. join="list" returns the outputs of the lanes as they are')
        kind, dim = (_SAME, 0) if column[0].ndim == 0 else self._kind(column, place, declared)
        if kind == _ROWS:
            return self._concatenated(column, dim)
        original = self._original(column[: self.lanes])
        if original is not None:
            return _on(original, self.device)
        if column[0].ndim == 0:
            self._check_number(place, declared)
            return self._number(column, declared)
        return self._same(column, place, declared) if kind == _SAME else self._concatenated(column, dim)

    def _check_number(self, place: Place, declared: Any) -> None:
        """Refuse a 0-d tensor that may be the one row of its shard, squeezed."""
        if declared is None or self.lanes == 1 or self.rules.as_torch or self.rules.reduce not in ("mean", "sum"):
            return
        if declared is LEARN and self.tells:
            self.places[place] = _NUMBER
        known = self.evidence.places.get(place, _NUMBER if max(self.rows) > 1 else None)
        if known != _NUMBER:
            refuse(
                "each lane had one row and returned a 0-d tensor, which is either a number or that row without its dim. "
                f"Keep the dim in the model (squeeze(1) instead of squeeze()). {CURE}"
            )

    def _array(self, column: Sequence[Any], place: Place, declared: Any) -> Any:
        kind, dim = self._kind(column, place, declared)
        if kind == _SAME:
            return self._same(column, place, declared)
        numpy = sys.modules["numpy"]
        if len({_other_dims(part.shape, dim) for part in column}) > 1:
            refuse(_why_no_cat(column, dim))
        return numpy.concatenate(column[: self.lanes], axis=dim)

    def _concatenated(self, column: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        parts = list(column[: self.lanes])
        if self.rules.join == "pad":
            parts = _padded(parts, dim, self.rules.pad_value)
        elif len(parts) < len(column) and _other_dims(column[-1].shape, dim) != _other_dims(parts[0].shape, dim):
            refuse(_why_no_cat(column, dim))
        if len(set(map(_dtype_of, parts))) > 1:  # torch.cat would promote them
            refuse(f"the lanes returned tensors of {' and '.join(sorted({str(part.dtype) for part in parts}))}. {CURE}")
        if self.device is not None and _are_of_one_form(parts, dim, self.device):
            return _written_into_one(parts, dim, self.device)
        try:
            parts = parts if self.device is None else [part.to(self.device) for part in parts]
            return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        except (IndexError, RuntimeError) as error:
            raise Refusal(_why_no_cat(parts, dim)) from error

    # Lists

    def _sequence(self, column: Sequence[Any], place: Place, declared: Any) -> Any:
        lengths = [len(value) for value in column]
        kind = self._kind_of_sequence(column, lengths, place, declared)
        if kind in (_ITEMS, _RAGGED):
            items = [_moved(item, self.device) for value in column[: self.lanes] for item in value]
            return type(column[0])(items)
        if len(set(lengths)) > 1:
            refuse(f"the lanes had {self._listed_rows()} rows and returned {listed(lengths)} items. {CURE}")
        below = declared if isinstance(declared, (list, tuple)) else [declared] * lengths[0]
        if len(below) != lengths[0]:
            refuse(f"out_dims declares {len(below)} items, and the output has {lengths[0]} here")
        joined = []
        for index, parts in enumerate(zip(*column, strict=True)):
            try:
                joined.append(self._value(parts, (*place, index), below[index]))
            except Refusal as refusal:
                refusal.steps.append(f"[{index}]")
                raise
        return type(column[0])(joined)

    def _kind_of_sequence(self, column: Sequence[Any], lengths: list[int], place: Place, declared: Any) -> str:
        follows = lengths == self.rows
        if isinstance(declared, (list, tuple)) or self.lanes == 1:
            return _FIXED
        if self.rules.as_torch:
            return self._kind_as_torch(column, follows=follows)
        if declared is LEARN and not any(lengths):
            kind = self.evidence.places.get(place, _FIXED)  # empty in every lane: it shows nothing, and needs no proof
        elif declared is LEARN:
            kind = self._learned(place, _ITEMS if follows else _FIXED)
        elif isinstance(declared, int) and not _holds_only_values(column):
            return _FIXED  # a list of tensors, each with its rows on that dim
        else:
            kind = {None: _FIXED, _RAGGED: _RAGGED}.get(declared, _ITEMS)
        if kind == _ITEMS and not follows and any(lengths):
            refuse(f"the lanes had {self._listed_rows()} rows and returned {listed(lengths)} items. {CURE}")
        return kind

    def _kind_as_torch(self, column: Sequence[Any], *, follows: bool) -> str:
        """Return the kind of a list by torch's rules, which join lists of tensors item by item and refuse all others.

        Others are joined here if they have one item per row. A tuple of lists is a structure if each list has one.
        """
        if not any(map(len, column)) or not _holds_only_values(column):
            return _FIXED
        if all(item is None for value in column for item in value):
            return _FIXED  # torch returns such a list once
        kinds = (list,) if type(column[0]) is tuple else (list, tuple)  # a tuple of tuples has one item per row
        columns_follow = all(
            type(item) in kinds and len(item) == rows
            for value, rows in zip(column, self.rows, strict=True)
            for item in value
        )
        if columns_follow and (type(column[0]) is tuple or not follows):
            return _FIXED
        if follows and not columns_follow:
            return _ITEMS
        what = type(column[0]).__name__
        returned = f"returned a {what} of {listed(list(map(len, column)))} items without tensors"
        if columns_follow:
            why = f"had {self._listed_rows()} rows, and both the {what} and each list in it follow. Return a tensor"
        elif _UNKNOWN in self.rows:
            why = f"{returned}, and gather alone has no row counts to compare with. Return a tensor"
        else:
            why = f"had {self._listed_rows()} rows and {returned}. Return a tensor, or a list with one item per row"
        msg = f"the lanes {why}"
        raise Refusal(msg)

    # Values that are not cut

    def _whole(self, column: Sequence[Opaque], declared: Any) -> Any:
        """Join values with registered rules. The rules count their rows."""
        values = [leaf.value for leaf in column[: self.lanes]]
        original = self._original(values)
        if original is not None:
            return original
        moved = [leaf.value if self.device is None else placed(leaf, self.device) for leaf in column[: self.lanes]]
        if len(moved) == 1 or declared is None:
            return moved[0]
        rules = splitter_of(values[0])
        found = [rules.rows(value) for value in values]
        if any(found) and found != self.rows[: self.lanes] and declared != _RAGGED and not self.rules.as_torch:
            name = type(values[0]).__name__
            refuse(f"the lanes had {self._listed_rows()} rows and returned a {name} of {listed(found)}. {CURE}")
        try:
            return rules.join(moved)
        except GatherError as error:
            msg = f'{error}. join="list" returns the outputs of the lanes as they are'
            raise Refusal(msg) from error

    def _number(self, column: Sequence[Any], declared: Any) -> Any:
        parts = column[: self.lanes]
        if declared is None:
            return self._same(column, (), None)
        if self.rules.as_torch and not all(isinstance(part, torch.Tensor) for part in parts):
            if self.lanes == 1:
                return parts[0]
            refuse(
                f"each lane returned one {type(parts[0]).__name__} ({listed(parts)}), and equal numbers do not make it one "
                "number: two lanes that both count 3 are 6. Return a 0-d tensor, which becomes a vector with one value per "
                'shard, or use parallel(model, devices, reduce="sum")'
            )
        if any(isinstance(part, torch.Tensor) and part.ndim for part in parts):
            refuse(f"the shapes {_shapes(parts)} have no dim in common. {CURE}")
        return reduced([_on(part, self.device) for part in parts], self.rows[: self.lanes], self.rules.reduce)

    def _same(self, column: Sequence[Any], place: Place, declared: Any) -> Any:
        """Return the one value that all lanes returned, by value. What is learned must hold for the witness too."""
        first = column[0]
        if declared is not LEARN or self.rules.as_torch:
            column = column[: self.lanes]
        elif self.lanes > 1:
            self._learned(place, _SAME)
            may_have_rows = isinstance(first, torch.Tensor) or is_array(first)
            if may_have_rows and not self._is_one_value(column):
                refuse(
                    f"the lanes had {self._listed_rows()} rows and returned shapes {_shapes(column)}, without the rows on "
                    f"dim {self.rules.dim}. Equal values do not make it one value: two lanes that count 3 are 6. {CURE}"
                )
        if not all(equal_values(value, first) for value in column[1:]):
            shown = _shapes(column) if hasattr(first, "shape") else listed(column)
            what = "shapes" if hasattr(first, "shape") else "values"
            refuse(
                f"the lanes had {self._listed_rows()} rows and returned different values, of {what} {shown}, in which the "
                f"rows do not lie on dim {self.rules.dim}. {CURE}"
            )
        return _on(first, self.device)

    def _is_one_value(self, column: Sequence[Any]) -> bool:
        """True if tensors or arrays are one object, or have no rows in any lane, so that joining them adds nothing."""
        dim = self.rules.dim
        if all(value is column[0] for value in column[: self.lanes]):
            return True
        return all(-len(value.shape) <= dim < len(value.shape) and value.shape[dim] == 0 for value in column)

    # The kind of a place

    def _kind(self, column: Sequence[Any], place: Place, declared: Any) -> tuple[str, int]:
        """The kind of a place with tensors or arrays, and its dim. Rows are checked against the sizes."""
        dim = declared if isinstance(declared, int) else self.rules.dim
        if declared is None:
            return _SAME, dim
        if declared == _RAGGED or self.rules.as_torch or self.lanes == 1:
            return _RAGGED, dim
        try:
            extents = list(map(itemgetter(dim), map(_shape_of, column)))
        except IndexError:  # a part without that dim
            extents = None
        if declared is LEARN:
            is_empty = extents is not None and not any(extents)
            kind = self._learned(place, _ROWS if extents == self.rows else _SAME, is_empty=is_empty)
            if kind == _SAME:
                return _SAME, dim
        if extents != self.rows:
            refuse(
                f"the lanes had {self._listed_rows()} rows and returned shapes {_shapes(column)}, without the rows on dim "
                f"{dim}. {CURE}"
            )
        return _ROWS, dim

    def _learned(self, place: Place, shown: str, *, is_empty: bool = False) -> str:
        """The kind of a place: known from earlier calls, or shown by shards of different sizes.

        An output that is empty in every lane shows nothing.
        """
        known = self.evidence.places.get(place)
        if known is None and not self.tells:
            self._refuse_unproved()
        if not is_empty:
            self.places[place] = known or shown
        return known or shown

    def _refuse_unproved(self) -> NoReturn:
        refuse(
            f"all lanes had {self.rows[0]} rows, and no earlier call of this kind had shards of different sizes that show "
            f"whether this output follows the rows. {CURE}"
        )

    def _original(self, parts: Sequence[Any]) -> Any:
        """The one value that all lanes returned, or returned their copies of: a parameter, say, or a cache."""
        last = parts[-1]
        if all(part is last for part in parts):
            return last if self.lanes > 1 else None
        originals = () if self.originals is None else self.originals()
        same = originals[-1](last) if originals else None
        if same is None:
            return None
        finds = zip(parts, originals, strict=True)
        return same if all(part is same or find(part) is same for part, find in finds) else None

    def _listed_rows(self) -> str:
        return listed(self.rows)


def _holds_only_values(column: Sequence[Any]) -> bool:
    return not any(isinstance(leaf, (torch.Tensor, Opaque)) for value in column for leaf in flatten(value)[0])


def _other_dims(shape: Sequence[int], dim: int) -> Place:
    sizes = list(shape)
    if -len(sizes) <= dim < len(sizes):
        del sizes[dim]
    return tuple(sizes)


def _why_no_cat(parts: Sequence[Any], dim: int) -> str:
    if len({len(part.shape) for part in parts}) > 1 or not -len(parts[0].shape) <= dim < len(parts[0].shape):
        return f"the shapes {_shapes(parts)} have no dim {dim} in common. {CURE}"
    if len({_other_dims(part.shape, dim) for part in parts}) == 1:
        return f"torch.cat refused outputs of shape {_shapes(parts)}. {CURE}"
    return f'the shapes {_shapes(parts)} differ beyond dim {dim}. join="pad" pads them to the longest. {CURE}'


def _padded(parts: Sequence[torch.Tensor], dim: int, value: float) -> list[torch.Tensor]:
    """Pad every dim except `dim` at its end, to the longest part."""
    if len({part.ndim for part in parts}) > 1:
        refuse(_why_no_cat(parts, dim))
    dim %= parts[0].ndim
    longest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if each == dim else longest[each] - part.shape[each] for each in range(part.ndim)]
        ends = [pad for size in reversed(missing) for pad in (0, size)]
        padded.append(torch.nn.functional.pad(part, ends, value=value) if any(missing) else part)
    return padded


def _are_of_one_form(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> bool:
    """True if parts from elsewhere can be written into one tensor: their rows alone differ, and no graph records it."""
    first = parts[0]
    if len(parts) == 1 or all(part.device == device for part in parts):
        return False
    return all(
        type(part) is torch.Tensor
        and not (part.requires_grad and torch.is_grad_enabled())
        and part.is_contiguous()
        and part.dtype == first.dtype
        and _other_dims(part.shape, dim) == _other_dims(first.shape, dim)
        for part in parts
    )


def _written_into_one(parts: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """The parts next to each other on the device, each copied once, straight to its place."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=parts[0].dtype, device=device)
    for place, part in zip(joined.split(sizes, dim), parts, strict=True):
        place.copy_(part, non_blocking=device.type != "cpu")
    return joined


def _moved(output: Any, device: torch.device | None) -> Any:
    """A whole value on a device."""
    if device is None:
        return output
    if isinstance(output, torch.Tensor):
        return _on(output, device)
    leaves, spec = flatten(output)
    return unflatten(spec, [placed(leaf, device) if isinstance(leaf, Opaque) else _on(leaf, device) for leaf in leaves])


def _on(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, torch.Tensor) else value


def _refuse_structures(specs: Sequence[TreeSpec]) -> NoReturn:
    found = mismatch(specs, "")
    assert found is not None, "specs that differ have a place where they differ"
    place, shapes = found
    # Shapes that read alike differ in the order of keys, a default factory, or two classes of one name.
    lane = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), 1)
    refusal = Refusal(
        f'lane 0 returned {shapes[0]}, lane {lane} {shapes[lane]}. join="list" returns the outputs of the lanes as they are'
    )
    refusal.steps.append(place)
    raise refusal


def _shapes(parts: Sequence[Any]) -> str:
    return ", ".join(str(tuple(part.shape)) for part in parts)
