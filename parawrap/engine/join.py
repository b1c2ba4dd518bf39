"""From the outputs of the lanes to the output of the call.

`out_dims` declares where the rows of an output lie. Without it, an output follows the rows if its
size on the row dim is the row count of its shard in every lane. The row counts of shards differ
then, so a size that does not come from the rows cannot match. Any other output is returned once if
it is the same parameter, buffer, or uncut argument in every lane, and refused otherwise: equal
values alone prove nothing, since two lanes that both count 3 are 6.

The joined output is handed over: its containers are new, and nothing here keeps it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch

from parawrap.engine.concatenate import (
    are_alike,
    are_of_one_form,
    is_number,
    list_values,
    pad,
    reduce_numbers,
    shape_of,
    write_into_one,
)
from parawrap.engine.join_errors import (
    OutputPlace,
    dims_with_rows,
    find_cures,
    is_array_column,
    is_sequence_type,
    sizes_on,
    write_message,
)
from parawrap.engine.join_rules import (
    SEQUENCES,
    Declared,
    JoinMode,
    JoinRules,
    Refusal,
    ReturnedArgument,
    is_tree,
    refuse,
    refuse_tree,
)
from parawrap.engine.rules.object_state import make_sequence
from parawrap.engine.rules.registry import count_rows, join_parts, place_leaf, registration_of
from parawrap.errors import GatherError
from parawrap.tree import (
    TENSOR,
    UNDECLARED,
    TreeSpec,
    WholeLeaf,
    address,
    flatten,
    list_attributes,
    tensors_in,
    unflatten,
)

Flat = tuple[list[Any], TreeSpec]
"""The leaves of an output, and its structure."""

Originals = Callable[[], Sequence[Callable[[Any], Any]]]
"""Returns one function per shard.

It takes a value of that lane, and returns the caller's value that it is a copy of, or None."""

_dtype_of = attrgetter("dtype")
_attributes_of = attrgetter("__dict__")

_MANY_PADDED = "more than one output must be padded, and no padding is right for every output"
_PROVES_NOTHING = "Equal values do not make it one value: two lanes that count 3 are 6"


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int] | None,
    rules: JoinRules,
    device: torch.device | None = None,
    originals: Originals | None = None,
) -> Any:
    """Return one output, on `device` (None: where the lanes left it), from the outputs of shards.

    `sizes` are the row counts of the shards. With the rules of torch, it may be None: unknown. One
    output of an uncut call is joined by the same rules.

    Raises:
        GatherError: If a place in the output cannot be joined. The message names the place.
    """
    # A call concatenates outputs of one tensor itself, so they come here only to be refused.
    is_cut = len(outputs) > 1 and sizes is not None
    if device is None and is_cut and type(outputs[0]) is not torch.Tensor:
        joined = _join_rows(outputs, tuple(sizes or ()), rules)
        if joined is not None:
            return joined
    # There is nothing to put together: values are handed over as the lanes left them.
    stays_list = rules.join == "list"
    if stays_list or (len(outputs) == 1 and rules.keep_single):
        if originals is not None:
            outputs = list(map(_with_originals, outputs, originals()))
        moved = [_move(output, device) for output in outputs]
        return moved if stays_list else moved[0]
    joining = _Join(outputs, sizes, rules, device, originals)
    try:
        return joining.join_values(outputs, rules.declared)
    except Refusal as refusal:
        raise GatherError(joining.explain(refusal)) from refusal.__cause__


def _join_rows(outputs: Sequence[Any], sizes: tuple[int, ...], rules: JoinRules) -> Any:
    """Return the joined output if it is a structure of tensors with the rows alone; else None.

    This is the usual output. It needs no path, no originals, and no look at single values.
    """
    # The larger sizes come first, so these two are equal only if all are, which proves nothing.
    if rules.needs_proof and sizes[0] == sizes[-1]:
        return None
    leaves, spec = flatten(outputs[0])
    dims = rules.row_dims(spec)
    if not dims:
        return None
    try:
        columns = zip(leaves, *map(spec.flatten_up_to, outputs[1:]), strict=True)
    except ValueError:  # another structure
        return None
    joined = []
    for dim, column in zip(dims, columns, strict=True):
        if not TENSOR.issuperset(map(type, column)):
            return None
        if any(map(_attributes_of, column)):
            return None
        # torch.cat would promote dtypes, and take the scale of the first part.
        if len(set(map(_dtype_of, column))) > 1:
            return None
        if column[0].is_quantized:
            return None
        try:
            # A list, which is faster than a generator: this runs for each output of each call.
            if tuple([part.shape[dim] for part in column]) != sizes:
                return None
            joined.append(torch.cat(column, dim))
        except (IndexError, RuntimeError):  # without that dim, nested, or of other shapes
            return None
    return unflatten(spec, joined)


def _with_originals(output: Any, find: Callable[[Any], Any]) -> Any:
    """Return an output with the caller's tensors in the places of the copies that a lane has."""
    leaves, spec = flatten(output)
    has_originals = False
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        found = find(leaf)
        if found is not None:
            leaves[index] = found
            has_originals = True
    # An output without copies needs no new containers.
    return unflatten(spec, leaves) if has_originals else output


class _Join:
    """The joining of one call.

    A column holds the values of all lanes at one place, which `path` leads to.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        sizes: Sequence[int] | None,
        rules: JoinRules,
        device: torch.device | None,
        originals: Originals | None,
    ) -> None:
        self.outputs = outputs
        self.lanes = len(outputs)
        self.rules = rules
        self.device = device
        self.originals = originals
        # Tensors that were padded without a value from the user: one at most
        self.padded = 0
        self.rows = None if sizes is None else list(sizes)
        self.path: list[Any] = []
        # True if equal sizes count as proof, to find out what unequal ones would show
        self.takes_proof = False

    def join_values(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the one value of all lanes, of any structure."""
        if TENSOR.issuperset(map(type, column)):
            return self._join_leaves(column, declared)
        # Sequences are leaves here: their lengths may differ, with one item per row.
        around = flatten(column[0], _is_sequence)
        first_leaves, spec = around
        of_lanes = [first_leaves]
        for lane, value in enumerate(column[1:], start=1):
            leaves, other = flatten(value, _is_sequence)
            if other != spec:
                refuse(
                    f"lane 0 returned {spec}, lane {lane} {other}",
                    "Return one structure from every lane",
                )
            of_lanes.append(leaves)
        columns = zip(*of_lanes, strict=True)
        declarations = declared.below(spec)
        depth = len(self.path)
        joined = []
        for path, parts, each in zip(spec.paths(), columns, declarations, strict=True):
            # A refusal leaves the path as it is: the message names the place.
            self.path += path
            joined.append(self._join_leaves(parts, each, around))
            del self.path[depth:]
        return unflatten(spec, joined)

    def _join_leaves(
        self, column: Sequence[Any], declared: Declared, around: Flat | None = None
    ) -> Any:
        first = column[0]
        are_tensors = _are_tensors(column)
        self._check_kinds(column, declared)
        if first is None:
            return None
        if type(first) in SEQUENCES:
            return self._join_sequences(column, declared, around)
        if isinstance(first, WholeLeaf):
            return self._join_registered(column, declared)
        if isinstance(first, torch.Tensor) and first.is_nested and first.layout is torch.strided:
            refuse("a nested tensor has no dim to join on")
        if declared.out_dim is None:
            self._refuse_reduced_constant(first, declared)
            return self._take_equal(column)
        if are_tensors or is_array(first):
            return self._join_arrays(column, declared)
        if is_number(first):
            return self._join_numbers(column, declared)
        return self._take_one(column)

    def _check_kinds(self, column: Sequence[Any], declared: Declared) -> None:
        """Refuse values of several kinds, and a declaration of the parts of a leaf."""
        refuse_tree("out_dims", declared.out_dim, type(column[0]))
        kinds = {type(value) for value in column}
        # Parameters next to tensors are tensors, and 1 next to 1.0 is a number.
        are_of_one_kind = len(kinds) == 1 or _are_tensors(column)
        if not are_of_one_kind and not all(map(is_number, column)):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            refuse("", "Return one type", returned=f"values of type {names}")

    def _refuse_reduced_constant(self, value: Any, declared: Declared) -> None:
        """Refuse a place that two options declare in different ways."""
        if declared.reduce is None:
            return
        if declared.names_reduce or is_number(value):
            refuse(
                "out_dims=None says that every lane returned the same value, and "
                f"reduce={declared.reduce!r} puts different values together",
                "Keep one of them",
            )

    # Tensors and arrays

    def _join_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Join tensors, or numpy arrays."""
        first = column[0]
        has_dims = first.ndim > 0
        # A reduction that names this place comes before its rows: the user knows the output.
        is_reduced = declared.names_reduce and declared.reduce is not None
        if has_dims and is_reduced:
            return self._reduce_arrays(column, declared)
        dim = self._row_dim(declared)
        takes_any_rows = declared.out_dim == "ragged" or self.lanes == 1
        if has_dims and not takes_any_rows and self._follows_rows(column, declared, dim):
            return self._concatenate(column, dim, declared)
        # A parameter that all lanes return is one value, but not if its rows were joined above.
        original = self._original(column)
        if original is not None:
            return _move(original, self.device)
        if not has_dims:
            return self._join_numbers(column, declared)
        if takes_any_rows:
            return self._concatenate(column, dim, declared)
        # `reduce` for a whole output means its numbers, unless the tensor is the whole output.
        if declared.reduce is None or self.path:
            proof = ""
            if self._are_all_equal(column):
                proof = _PROVES_NOTHING
            refuse(f"without the rows on dim {dim}", proof, returned=_describe(column))
        return self._reduce_arrays(column, declared)

    def _row_dim(self, declared: Declared) -> int:
        """Return the dim of the rows of a place, if it has rows."""
        out_dim = declared.out_dim
        return out_dim if isinstance(out_dim, int) else self.rules.dim

    def _follows_rows(self, column: Sequence[Any], declared: Declared, dim: int) -> bool:
        """True if tensors or arrays have the rows of their shards on `dim`, or no rows at all."""
        sizes = sizes_on(column, dim)
        if declared.out_dim is UNDECLARED:
            self._check_proof()
            if set(sizes) == {0}:  # joining no rows adds nothing
                return True
            return sizes == self.rows
        if sizes != self.rows:
            refuse(f"without the rows on dim {dim}", returned=_describe(column))
        return True

    def _concatenate(self, parts: Sequence[Any], dim: int, declared: Declared) -> Any:
        """Return tensors next to each other along `dim`, on the output device; or arrays."""
        first, device = parts[0], self.device
        if len(parts) == 1:
            return _move(first, device)
        if not all(-part.ndim <= dim < part.ndim for part in parts):
            refuse(f"which have no dim {dim} in common", returned=_describe(parts))
        try:
            if not isinstance(first, torch.Tensor):
                return _concatenate_arrays(parts, dim)
            self._check_tensors(parts)
            # Parts with different numbers of dims cannot be padded to one shape.
            have_same_dims = len({part.ndim for part in parts}) == 1
            pads = self.rules.join == "pad" and have_same_dims
            if pads and not are_alike(parts, dim):
                value = self._choose_padding(first.dtype, declared.pad_value)
                parts = pad(parts, dim, value)
            if device is not None and are_of_one_form(parts, dim, device):
                return write_into_one(parts, dim, device)
            moved = [_move(part, device) for part in parts]
            return torch.cat(moved, dim)
        except (IndexError, RuntimeError, ValueError) as error:
            # Shapes are compared only now: nearly all parts can be concatenated.
            if are_alike(parts, dim):
                raise
            why = f"which differ beyond dim {dim}"
            raise Refusal(why, returned=_describe(parts)) from error

    def _check_tensors(self, parts: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that torch.cat would join with a loss."""
        first = parts[0]
        if first.is_quantized:
            refuse(
                "which may have different scales",
                "Return tensor.dequantize()",
                returned="quantized tensors",
            )
        names = ", ".join(list_attributes(first))
        if names and not self.rules.as_torch:
            registration = registration_of(type(first))
            refuse(
                "which a joined tensor loses",
                "Return the attributes as outputs of their own, or "
                f"use {registration} to join them too",
                returned=f"tensors with attributes of their own ({names})",
            )
        dtypes = sorted({str(part.dtype) for part in parts})
        if len(dtypes) > 1:  # torch.cat would promote them
            refuse("", "Return one dtype", returned=f"tensors of {' and '.join(dtypes)}")

    def _choose_padding(self, dtype: torch.dtype, value: Any) -> Any:
        """Return the value to pad with."""
        refuse_tree("pad_value", value, torch.Tensor)
        is_float = dtype.is_floating_point or dtype.is_complex
        if value is not None:
            # A float takes any number; an integer or a bool may change its value.
            if not is_float and not _fits(value, dtype):
                refuse(
                    f"pad_value={value!r} is not a value of {dtype}", "Give this output another one"
                )
            return value
        # A zero is a label or a token in other outputs, so only one output of floats gets it.
        self.padded += 1
        if self.padded > 1:
            refuse(_MANY_PADDED)
        if not is_float:
            refuse(f"it holds {dtype}, and no padding is right for every output")
        return 0

    def _reduce_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Reduce tensors or arrays without rows, such as confusion matrices.

        The user names the reduction.
        """
        refuse_tree("reduce", declared.reduce, type(column[0]))
        shapes = {part.shape for part in column}
        if len(shapes) > 1:
            refuse(
                "which reduce cannot put together",
                "Leave this entry out of reduce",
                returned=_describe(column),
            )
        return self._reduce(column, declared)

    def _join_numbers(self, column: Sequence[Any], declared: Declared) -> Any:
        first = column[0]
        refuse_tree("reduce", declared.reduce, type(first))
        if self.rules.as_torch and not _are_tensors(column):
            if self.lanes == 1:
                return first
            refuse(
                "which DataParallel joins as tensors alone",
                "Return a 0-d tensor, which becomes a vector with one value per shard",
                returned=f"one {type(first).__name__} each ({list_values(column)})",
            )
        if any(shape_of(part) for part in column):
            shapes = ", ".join(str(shape_of(part)) for part in column)
            refuse("which have no dim in common", returned=f"shapes {shapes}")
        if isinstance(first, torch.Tensor) and self._may_be_rows(declared):
            advice = "Keep the dim in the model (squeeze(1) instead of squeeze())"
            if declared.out_dim is not UNDECLARED:
                advice += ", or leave out out_dims: small batches then run plainly"
            # An output with a key is named in reduce. The whole output has no key
            why = (
                "each lane had one row and returned a 0-d tensor, which is either a number or that "
                "row without its dim"
            )
            raise Refusal(why, advice, has_cure=bool(self.path))
        return self._reduce(column, declared)

    def _may_be_rows(self, declared: Declared) -> bool:
        """True if 0-d tensors may be rows of a model that squeezes a batch of one row."""
        most_rows = max(self.rows) if self.rows else 0
        if self.lanes == 1 or most_rows != 1:
            return False
        # The user who names this place, or gives a function of its values, knows it for a number.
        if declared.names_reduce or declared.reduce not in ("mean", "sum"):
            return False
        return not self._has_rows_elsewhere()

    def _has_rows_elsewhere(self) -> bool:
        """True if another output of the call has the rows: the model keeps the dim of one row."""
        # Looked at only for the last batch of a loader, which may have one row per lane.
        leaves, spec = flatten(self.outputs[0])
        of_lanes = [leaves]
        for output in self.outputs[1:]:
            leaves, other = flatten(output)
            if other != spec:
                return False
            of_lanes.append(leaves)
        columns = zip(*of_lanes, strict=True)
        declarations = self.rules.declared.below(spec)
        for column, declared in zip(columns, declarations, strict=True):
            if not _are_tensors(column):
                continue
            dim = self._row_dim(declared)
            if sizes_on(column, dim) == self.rows:
                return True
        return False

    def _reduce(self, column: Sequence[Any], declared: Declared) -> Any:
        moved = [_move(part, self.device) for part in column]
        return reduce_numbers(moved, self.rows or [], declared.reduce)

    # Lists

    def _join_sequences(
        self, column: Sequence[Any], declared: Declared, around: Flat | None
    ) -> Any:
        first = column[0]
        form = self._choose_form(column, declared, around)
        if form == "items":
            # A deque drops its oldest items, as that of the plain call would have done.
            items: list[Any] = []
            for value in column:
                items += [_move(item, self.device) for item in value]
            return make_sequence(first, items)
        if form == "one":
            return self._take_one(column)
        declarations = declared.parts(range(len(first)))
        joined = []
        for index, each in enumerate(declarations):
            # A refusal leaves the path as it is, as in `join_values`.
            self.path.append(index)
            values = [value[index] for value in column]
            joined.append(self.join_values(values, each))
            self.path.pop()
        return make_sequence(first, joined)

    def _choose_form(
        self, column: Sequence[Any], declared: Declared, around: Flat | None
    ) -> Literal["items", "one", "parts"]:
        """Return how lists are joined: their items in order, as one value, or item by item."""
        lengths = list(map(len, column))
        if isinstance(column[0], deque):
            limits = {value.maxlen for value in column}
            if len(limits) > 1:
                shown = list_values(sorted(limits, key=str))  # None is among them
                refuse("", returned=f"deques of maxlen {shown}")
        if self._are_items(column, lengths, declared, around):
            return "items"
        if len(set(lengths)) > 1:
            refuse("", returned=f"{list_values(lengths)} items")
        # A list of texts under a declared dim has one item per row. This one has not, so it may
        # only be a constant.
        has_one_dim = declared.out_dim is not None and not is_tree(declared.out_dim)
        if has_one_dim and any(map(_holds_texts, column)):
            return "one"
        return "parts"

    def _are_items(
        self,
        column: Sequence[Any],
        lengths: list[int],
        declared: Declared,
        around: Flat | None,
    ) -> bool:
        """True if lists have one item per row, or rows in any number.

        False if their items are joined one by one.
        """
        out_dim = declared.out_dim
        if is_tree(out_dim) or out_dim is None:
            return False
        if self.lanes == 1:
            return False
        if self.rules.as_torch:
            self._refuse_unclear_lists(column, lengths, around)
            return False  # torch joins lists item by item
        if isinstance(out_dim, int) and any(map(_holds_tensors, column)):
            return False  # a list of tensors, each with its rows on that dim
        if any(isinstance(item, ReturnedArgument) for value in column for item in value):
            return False  # a list with arguments, each of which is one object in all lanes
        if out_dim == "ragged":
            # A list may have any number of rows; a tuple of tensors is a structure.
            if type(column[0]) is not tuple:
                return True
            leaves, _ = flatten(column)
            return not any(map(_is_array_like, leaves))
        if out_dim is UNDECLARED:
            if any(lengths):  # empty lists are the same list, whatever the sizes
                self._check_proof()
            return lengths == self.rows
        if lengths != self.rows and any(lengths):
            refuse("", returned=f"{list_values(lengths)} items")
        return True

    def _refuse_unclear_lists(
        self, column: Sequence[Any], lengths: list[int], around: Flat | None
    ) -> None:
        """Refuse lists that may have one item per row: torch joins all lists item by item.

        The items of other lists are tensors with the rows, such as the heads of a model, or 0-d
        tensors, such as losses. `around` is the flattened output of the first lane that holds the
        list.
        """
        kind = type(column[0])
        holds_tensors = any(map(_holds_tensors, column))
        if kind is tuple and holds_tensors:  # a structure
            return
        is_empty = True
        tensors: list[list[torch.Tensor]] = []
        for value in column:
            leaves, _ = flatten(value)
            tensors.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
            # An argument is one object in all lanes, and no row
            if not all(leaf is None or isinstance(leaf, ReturnedArgument) for leaf in leaves):
                is_empty = False
        if is_empty:
            return
        if holds_tensors and self._have_rows(tensors):
            has_one_item_per_row = lengths == self.rows
            if not has_one_item_per_row or self._are_outputs(column, tensors, around):
                return
        refuse(
            "one item per row, or parts of every row",
            "Return a tuple of tensors to join its items, or use parallel(model, devices), whose "
            "unequal shards tell them apart",
            returned=f"a {kind.__name__} of {list_values(lengths)} items",
        )

    def _have_rows(self, tensors: Sequence[Sequence[torch.Tensor]]) -> bool:
        """True if the tensors of each lane have one size on the row dim, which is its row count."""
        dim = self.rules.dim
        for lane, of_lane in enumerate(tensors):
            with_dim = [each for each in of_lane if -each.ndim <= dim < each.ndim]
            sizes = {each.size(dim) for each in with_dim}
            if len(sizes) > 1:
                return False
            if sizes and self.rows is not None and sizes != {self.rows[lane]}:
                return False
        return True

    def _are_outputs(
        self,
        column: Sequence[Any],
        tensors: Sequence[Sequence[torch.Tensor]],
        around: Flat | None,
    ) -> bool:
        """True if lists as long as their shards hold outputs of every row, such as heads."""
        named: dict[Any, Any] = {}
        if around is not None:
            leaves, spec = around
            for path, leaf in zip(spec.paths(), leaves, strict=True):
                if path:
                    named[path[-1]] = leaf
        if are_auxiliary(column[0], named):
            return True
        # A vector per item may be a row, and a dict per item is one row's result as a rule.
        first = next(item for value in column for item in value if item is not None)
        if isinstance(first, Mapping):
            return False
        return all(each.ndim >= 2 for of_lane in tensors for each in of_lane)

    # Other values

    def _join_registered(self, column: Sequence[WholeLeaf], declared: Declared) -> Any:
        """Join values with registered rules. The rules count their rows."""
        values = [leaf.value for leaf in column]
        # An argument that the lanes pass on is the caller's own object.
        original = self._original(values)
        if original is not None:
            return original
        moved = values
        if self.device is not None:
            moved = [place_leaf(leaf, self.device) for leaf in column]
        if declared.out_dim is None:
            self._check_equal(column)
            return moved[0]
        if self.lanes == 1:
            return moved[0]
        takes_any_rows = declared.out_dim == "ragged"
        try:
            found = [count_rows(value) for value in values]
            if any(found) and found != self.rows and not takes_any_rows:
                kind = type(values[0])
                refuse("", returned=f"{list_values(found)} rows of a {kind.__name__}")
            return join_parts(moved)
        except GatherError as error:
            raise Refusal(error.message) from error

    def _take_one(self, column: Sequence[Any]) -> Any:
        """Return the undeclared value that all lanes returned: one object, such as a constant.

        Two lanes that both return the text "1 positive" do not mean "1 positive".
        """
        first = column[0]
        # A device says nothing about rows. Shapes, ranges, and slices may count them.
        is_one = isinstance(first, torch.device) or self._is_one_object(column)
        if self.lanes > 1 and not is_one:
            advice = ""
            if isinstance(first, (str, bytes)) and not self._are_all_equal(column):
                advice = "Return a list with one item per row"
            if not (isinstance(first, (str, bytes)) or _is_sequence(first)):
                advice = f"{registration_of(type(first))} says how to join them"
            refuse("which are not one constant object", advice, returned=_describe(column))
        return self._take_equal(column)

    def _is_one_object(self, column: Sequence[Any]) -> bool:
        """True if all lanes returned one object, and did not make it."""
        first = column[0]
        if not all(value is first for value in column):
            return False
        # CPython has one object for each text of one character, and ``("a",) * 1`` is ``("a",)``,
        # so lanes may have made a digit or a tuple of one item.
        may_be_made = False
        if isinstance(first, (str, bytes)):
            may_be_made = len(first) == 1 and first.isdigit()
        elif isinstance(first, tuple):
            may_be_made = len(first) == 1
        if not may_be_made:
            return True
        return self._original(column) is first

    def _take_equal(self, column: Sequence[Any]) -> Any:
        """Return the value that all lanes returned, compared by value."""
        original = self._original(column)
        if original is None:
            self._check_equal(column)
            original = column[0]
        return _move(original, self.device)

    def _check_equal(self, column: Sequence[Any]) -> None:
        if self._are_all_equal(column):
            return
        values = [each.value if isinstance(each, WholeLeaf) else each for each in column]
        shapes = {shape_of(value) for value in values}
        have_one_shape = len(shapes) == 1 and None not in shapes
        why = "whose values differ" if have_one_shape else "which differ"
        refuse(why, returned=_describe(values))

    def _are_all_equal(self, column: Sequence[Any]) -> bool:
        return all(_are_equal(column[0], value) for value in column[1:])

    def _check_proof(self) -> None:
        """Refuse an undeclared output of shards of equal sizes, as of NeuronCores."""
        if self.rows is None or self.lanes == 1 or self.takes_proof:
            return
        if len(set(self.rows)) == 1:
            refuse(
                f"all lanes had {self.rows[0]} rows, which does not show whether this output "
                "follows the rows"
            )

    def _original(self, parts: Sequence[Any]) -> Any:
        """Return the one value that all lanes returned, or returned their copies of; else None.

        It is a parameter, or an argument that was not cut. Another tensor that all lanes returned
        is not one value: each lane may have written its rows into it.
        """
        last = parts[-1]
        if self.originals is None:  # the arguments of the lanes are not known
            if self.lanes == 1:
                return None
            return last if all(part is last for part in parts) else None
        originals = self.originals()
        value = originals[-1](last)
        if value is None:
            return None
        for part, find in zip(parts, originals, strict=True):
            if part is not value and find(part) is not value:
                return None
        return value

    # Errors

    def explain(self, refusal: Refusal) -> str:
        """Return the message for all outputs that cannot be joined, of which this is the first."""
        rules, rows = self.rules, self.rows
        first = address("output", self.path)
        self.path.clear()
        root = self._find_places(self.outputs, rules.declared)
        refused = [place for place in root.walk() if place.refusal is not None]
        wrong = [each for each in refused if each.refusal and each.refusal.is_of_options]
        if wrong:  # what the other options mean is not known
            return f"{wrong[0].name} cannot be joined: {wrong[0].refusal}"
        trial = self
        if rules.as_torch:
            # Cures are options of a block, whose unequal shards show what follows the rows
            trial = self._with(JoinRules(rules.dim))
            trial.takes_proof = True
            root = trial._find_places(self.outputs, trial.rules.declared)
            kept = {place.path: place for place in root.leaves()}
            for place in refused:
                same = kept.get(place.path)
                if same is not None and same.refusal is None and type(place.column[0]) in SEQUENCES:
                    same.refusal = place.refusal
        for place in root.leaves():
            if place.refusal is not None and place.refusal.has_cure:
                find_cures(place, trial.rules, rows, trial._try)
        # One output of floats is padded with zeros, and several must each have a value
        padded = [place for place in root.leaves() if place.is_padded]
        named = [place for place in root.leaves() if place.names_padding and not place.is_padded]
        if len(padded) + len(named) > 1:
            for place in padded:
                place.give_padding(trial.rules.join)
                if place.refusal is None:  # alone, it would have been padded
                    place.refusal = Refusal(_MANY_PADDED, returned=_describe(place.column))
            if not rules.as_torch:
                refused = [place for place in root.walk() if place.refusal is not None]
        if not refused:  # a second look finds no place, as of a `reduce` that counts its calls
            return f"{first} cannot be joined: {refusal}"
        return write_message(refused, root, rules, rows, trial._fill)

    def _with(self, rules: JoinRules) -> _Join:
        """Return the joining of the same outputs by other rules."""
        other = _Join(self.outputs, self.rows, rules, self.device, self.originals)
        other.takes_proof = self.takes_proof
        return other

    def _find_places(
        self, column: Sequence[Any], declared: Declared, around: Flat | None = None
    ) -> OutputPlace:
        """Return all places from here on, each with its refusal."""
        place = OutputPlace(tuple(self.path), column, declared)
        depth = len(self.path)
        if around is None:
            around = flatten(column[0], _is_sequence)
        try:
            opened = self._open(place, around)
            if opened is None:
                self.padded = 0
                self._join_any(column, declared, around)
                place.is_padded = self.padded > 0
                return place
        except Refusal as refusal:
            place.refusal = refusal
            del self.path[depth:]
            return place
        steps, columns, declarations = opened
        place.is_tuple = is_sequence_type(type(column[0]))
        inside = None if type(column[0]) in SEQUENCES else around
        for step, parts, each in zip(steps, columns, declarations, strict=True):
            self.path.append(step)
            place.parts[step] = self._find_places(parts, each, inside)
            self.path.pop()
        if any(part.refusal is not None for part in place.leaves()):
            if place.is_opened:  # its parts say why
                place.refusal = None
            self._close_items(place)
        return place

    def _close_items(self, place: OutputPlace) -> None:
        """Make one place of a list with one item per row, whose items were joined one by one."""
        lengths = list(map(len, place.column)) if type(place.column[0]) is list else []
        if not lengths or lengths != self.rows:
            return
        # Outputs that stand in a list by chance as long as the shard are other outputs
        for leaf in place.leaves():
            has_rows = is_array_column(leaf.column) and dims_with_rows(leaf.column, self.rows)
            if leaf.refusal is None or has_rows:
                return
        if self._try(place, place.declared._replace(out_dim="items"), self.rules.join) is not None:
            place.parts.clear()
            place.refusal = Refusal("", returned=f"{list_values(lengths)} items")

    def _open(
        self, place: OutputPlace, around: Flat
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Declared]] | None:
        """Return the keys, the columns, and the declarations of the parts of containers.

        None for values that are joined as one.
        """
        column, declared = place.column, place.declared
        if TENSOR.issuperset(map(type, column)):
            return None
        taken_apart = [flatten(value, partial(_is_other, value)) for value in column]
        _, spec = taken_apart[0]
        if spec.is_leaf() or any(other != spec for _, other in taken_apart):
            return None
        if type(column[0]) in SEQUENCES:
            self._check_kinds(column, declared)
            try:
                if self._choose_form(column, declared, around) != "parts":
                    return None
            except Refusal as refusal:
                # One entry declares items of rows, and a tuple of entries a list of outputs
                if not self._may_be_outputs(column, declared):
                    raise
                place.is_opened = True
                place.refusal = refusal
        steps = spec.entries()
        if not steps:
            return None
        columns = [*zip(*(parts for parts, _ in taken_apart), strict=True)]
        return steps, columns, declared.parts(steps)

    def _may_be_outputs(self, column: Sequence[Any], declared: Declared) -> bool:
        """True if lists that one entry declares have the same length, and not one item per row."""
        lengths = list(map(len, column))
        is_declared = declared.out_dim is not None and declared.out_dim is not UNDECLARED
        if not is_declared or is_tree(declared.out_dim) or self.rules.as_torch:
            return False
        return len(set(lengths)) == 1 and lengths != self.rows

    def _join_any(self, column: Sequence[Any], declared: Declared, around: Flat) -> Any:
        """Join a leaf, or containers of several structures."""
        if all(flatten(value, _is_sequence)[1].is_leaf() for value in column):
            return self._join_leaves(column, declared, around)
        return self.join_values(column, declared)

    def _try(self, place: OutputPlace, declared: Declared, join: JoinMode) -> int | None:
        """Join a place with other declarations.

        Return how many tensors were padded without a value of the user; None if it is refused.
        """
        rules = self.rules
        if join != rules.join:
            rules = replace(rules, join="pad")
        trial = self._with(rules)
        trial.path = [*place.path]
        try:
            trial._join_leaves(place.column, declared)
        except Exception:  # noqa: BLE001 -- no cure, whatever the reason: the refusal is raised
            return None
        return trial.padded

    def _fill(self, place: OutputPlace) -> Any:
        """Return an entry of out_dims that says of a place what its sizes have shown."""
        declared, join = place.declared, self.rules.join
        if place.cure is not None:
            declared, join = place.cure.declared, place.cure.join
        for entry in (self.rules.dim, "items", None, "ragged"):
            if self._try(place, declared._replace(out_dim=entry), join) is not None:
                return entry
        return self.rules.dim  # of a place that nothing joins


def are_auxiliary(items: Sequence[Any], beside: Mapping[Any, Any]) -> bool:
    """True if dicts in a list repeat tensors next to the list, as the `aux_outputs` of DETR.

    They have the same keys and shapes.
    """
    for item in items:
        if not isinstance(item, Mapping) or not item:
            return False
        for key, value in item.items():
            if not _has_shape_of(beside.get(key), value):
                return False
    return True


def _has_shape_of(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape


def _are_tensors(column: Sequence[Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in column)


def _describe(column: Sequence[Any]) -> str:
    """Return the values of the lanes in words."""
    if not all(map(_is_array_like, column)):
        return list_values(column)
    return f"shapes {', '.join(str(shape_of(value)) for value in column)}"


def _is_other(value: Any, node: Any) -> bool:
    return node is not value


def _concatenate_arrays(parts: Sequence[Any], dim: int) -> Any:
    numpy = sys.modules["numpy"]
    # Only the function of `ma` keeps masks.
    library = numpy.ma if isinstance(parts[0], numpy.ma.MaskedArray) else numpy
    return library.concatenate(parts, axis=dim)


def _holds_tensors(value: Any) -> bool:
    """True if a value holds a tensor, or an object with registered rules."""
    leaves, _ = flatten(value)
    return any(isinstance(leaf, (torch.Tensor, WholeLeaf)) for leaf in leaves)


def _is_sequence(node: Any) -> bool:
    return type(node) in SEQUENCES


def _is_array_like(value: Any) -> bool:
    """True for arrays and tensors. Nested tensors raise an error for their `shape`."""
    return isinstance(value, torch.Tensor) or shape_of(value) is not None


def _holds_texts(value: Any) -> bool:
    """True for texts or other values: lanes may have any number of them.

    Arrays, numbers, and sequences are joined by their own rules.
    """
    leaves: list[Any] = []
    for item in value:
        found, _ = flatten(item, _is_sequence)
        leaves += found
    for leaf in leaves:
        if isinstance(leaf, (*SEQUENCES, WholeLeaf, ReturnedArgument)):
            return False
        if _is_array_like(leaf) or is_number(leaf):
            return False
    return any(leaf is not None for leaf in leaves)


def _move(value: Any, device: torch.device | None) -> Any:
    """Return a value on a device."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    leaves, spec = flatten(value)
    moved = []
    for leaf in leaves:
        if isinstance(leaf, WholeLeaf):
            moved.append(place_leaf(leaf, device))
        elif isinstance(leaf, torch.Tensor):
            moved.append(leaf.to(device))
        else:
            moved.append(leaf)
    return unflatten(spec, moved)


def _fits(value: Any, dtype: torch.dtype) -> bool:
    """True if a dtype has this value."""
    try:
        return bool(torch.full((), value, dtype=dtype).item() == value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return False


def is_array(value: Any) -> bool:
    """True for an array of numpy."""
    numpy = sys.modules.get("numpy")  # a script that has arrays has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _are_equal(one: Any, other: Any) -> bool:
    """Compare by value; for registered classes, by their tensors.

    Two NaNs are equal. A value that cannot be compared equals no other.
    """
    try:
        if isinstance(one, WholeLeaf):
            return _have_equal_tensors(one.value, other.value)
        if isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            other = other.to(one.device)
            if torch.equal(one, other):
                return True
            # A second look, since `equal` finds two NaNs different.
            return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        if is_array(one):
            # By value: the bytes of objects and of long texts are addresses.
            has_nan = one.dtype.kind in "fc"
            is_same = sys.modules["numpy"].array_equal(one, other, equal_nan=has_nan)
            return one.dtype == other.dtype and bool(is_same)
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        are_nan = one != one and other != other
        return bool(one == other or are_nan)
    except Exception:  # noqa: BLE001 -- `==` may be a method of the user's class
        return False


def _have_equal_tensors(one: Any, other: Any) -> bool:
    tensors, others = [*tensors_in(one)], [*tensors_in(other)]
    if not tensors:
        return bool(one == other)
    return len(tensors) == len(others) and all(map(_are_equal, tensors, others))
