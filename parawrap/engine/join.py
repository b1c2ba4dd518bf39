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
from operator import attrgetter
from typing import Any

import torch

from parawrap.engine.concatenate import (
    are_alike,
    are_of_one_form,
    is_number,
    list_values,
    pad,
    reduce_numbers,
    shape_of,
    shapes_of,
    write_into_one,
)
from parawrap.engine.join_rules import (
    CURE,
    JOIN_LIST,
    SAME,
    SEQUENCES,
    Declared,
    JoinRules,
    Refusal,
    Returned,
    is_tree,
    refuse,
    refuse_tree,
)
from parawrap.engine.rules.object_state import make_sequence
from parawrap.engine.rules.registry import count_rows, join_parts, place_leaf, registration_of
from parawrap.errors import GatherError
from parawrap.tree import (
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

_TENSOR = frozenset({torch.Tensor})
_dtype_of = attrgetter("dtype")
_attributes_of = attrgetter("__dict__")

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
        place = address("output", joining.path)
        msg = f"{place} cannot be joined: {refusal}"
        if rules.as_torch:
            msg += ". out_dims and join are options of parallel(model, devices)"
        raise GatherError(msg) from refusal.__cause__


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
        if not _TENSOR.issuperset(map(type, column)):
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

    def join_values(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the one value of all lanes, of any structure."""
        if _TENSOR.issuperset(map(type, column)):
            return self._join_leaves(column, declared)
        # Sequences are leaves here: their lengths may differ, with one item per row.
        first = flatten(column[0], _is_sequence)
        spec = first[1]
        of_lanes = [first[0]]
        for lane, value in enumerate(column[1:], start=1):
            leaves, other = flatten(value, _is_sequence)
            if other != spec:
                refuse(f"lane 0 returned {spec}, lane {lane} {other}. {JOIN_LIST}")
            of_lanes.append(leaves)
        columns = zip(*of_lanes, strict=True)
        declarations = declared.below(spec)
        depth = len(self.path)
        joined = []
        for path, parts, each in zip(spec.paths(), columns, declarations, strict=True):
            # A refusal leaves the path as it is: the message names the place.
            self.path += path
            joined.append(self._join_leaves(parts, each, first))
            del self.path[depth:]
        return unflatten(spec, joined)

    def _join_leaves(
        self, column: Sequence[Any], declared: Declared, around: Flat | None = None
    ) -> Any:
        first = column[0]
        refuse_tree("out_dims", declared.out_dim, type(first))
        are_tensors = _are_tensors(column)
        kinds = {type(value) for value in column}
        # Parameters next to tensors are tensors, and 1 next to 1.0 is a number.
        are_of_one_kind = len(kinds) == 1 or are_tensors
        if not are_of_one_kind and not all(map(is_number, column)):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            refuse(f"the lanes returned values of type {names}. {CURE}")
        if first is None:
            return None
        if type(first) in SEQUENCES:
            return self._join_sequences(column, declared, around)
        if isinstance(first, WholeLeaf):
            return self._join_registered(column, declared)
        if isinstance(first, torch.Tensor) and first.is_nested and first.layout is torch.strided:
            refuse(f"a nested tensor has no dim to join on. {JOIN_LIST}")
        if declared.out_dim is None:
            self._refuse_reduced_constant(first, declared)
            return self._take_equal(column)
        if are_tensors or is_array(first):
            return self._join_arrays(column, declared)
        if is_number(first):
            return self._join_numbers(column, declared)
        return self._take_one(column)

    def _refuse_reduced_constant(self, value: Any, declared: Declared) -> None:
        """Refuse a place that two options declare in different ways."""
        if declared.reduce is None:
            return
        if declared.names_reduce or is_number(value):
            refuse(
                "out_dims=None says that every lane returned the same value, and "
                f"reduce={declared.reduce!r} puts different values together. Keep one of them: a "
                "dict or a tuple in reduce leaves values out, and out_dims=0 leaves numbers to "
                "reduce"
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
            refuse(f"{self._say(column)}, without the rows on dim {dim}. {_PROVES_NOTHING}. {CURE}")
        return self._reduce_arrays(column, declared)

    def _row_dim(self, declared: Declared) -> int:
        """Return the dim of the rows of a place, if it has rows."""
        out_dim = declared.out_dim
        return out_dim if isinstance(out_dim, int) else self.rules.dim

    def _follows_rows(self, column: Sequence[Any], declared: Declared, dim: int) -> bool:
        """True if tensors or arrays have the rows of their shards on `dim`, or no rows at all."""
        sizes = _sizes_on(column, dim)
        if declared.out_dim is UNDECLARED:
            self._check_proof()
            if set(sizes) == {0}:  # joining no rows adds nothing
                return True
            return sizes == self.rows
        if sizes != self.rows:
            refuse(f"{self._say(column)}, without the rows on dim {dim}. {CURE}")
        return True

    def _concatenate(self, parts: Sequence[Any], dim: int, declared: Declared) -> Any:
        """Return tensors next to each other along `dim`, on the output device; or arrays."""
        first, device = parts[0], self.device
        if len(parts) == 1:
            return _move(first, device)
        if not all(-part.ndim <= dim < part.ndim for part in parts):
            refuse(f"the shapes {shapes_of(parts)} have no dim {dim} in common. {CURE}")
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
            msg = (
                f"the shapes {shapes_of(parts)} differ beyond dim {dim}. "
                f'join="pad" pads them to the longest. {CURE}'
            )
            raise Refusal(msg) from error

    def _check_tensors(self, parts: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that torch.cat would join with a loss."""
        first = parts[0]
        if first.is_quantized:
            refuse(
                "the lanes returned quantized tensors, which may have different scales. "
                "Return tensor.dequantize()"
            )
        names = ", ".join(list_attributes(first))
        if names and not self.rules.as_torch:
            registration = registration_of(type(first))
            refuse(
                f"the lanes returned tensors with attributes of their own ({names}), "
                "which a joined tensor loses. Return the attributes as outputs of their own, or "
                f"use {registration} to join them too"
            )
        dtypes = sorted({str(part.dtype) for part in parts})
        if len(dtypes) > 1:  # torch.cat would promote them
            refuse(f"the lanes returned tensors of {' and '.join(dtypes)}. {CURE}")

    def _choose_padding(self, dtype: torch.dtype, value: Any) -> Any:
        """Return the value to pad with."""
        refuse_tree("pad_value", value, torch.Tensor)
        is_float = dtype.is_floating_point or dtype.is_complex
        if value is not None:
            # A float takes any number; an integer or a bool may change its value.
            if not is_float and not _fits(value, dtype):
                refuse(
                    f"pad_value={value!r} is not a value of {dtype}. Give this output another one"
                )
            return value
        # A zero is a label or a token in other outputs, so only one output of floats gets it.
        self.padded += 1
        if self.padded > 1 or not is_float:
            why = f"it holds {dtype}"
            if self.padded > 1:
                why = "more than one output must be padded"
            refuse(
                f"{why}, and no padding is right for every output. Give pad_value: one number for "
                "all, or a dict or tuple like the output, such as "
                'pad_value={"logits": 0.0, "mask": False, "labels": -100}'
            )
        return 0

    def _reduce_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Reduce tensors or arrays without rows, such as confusion matrices.

        The user names the reduction.
        """
        refuse_tree("reduce", declared.reduce, type(column[0]))
        shapes = {part.shape for part in column}
        if len(shapes) > 1:
            why = "which reduce cannot put together. Leave this entry out of reduce"
            refuse(f"{self._say(column)}, {why}")
        return self._reduce(column, declared)

    def _join_numbers(self, column: Sequence[Any], declared: Declared) -> Any:
        first = column[0]
        refuse_tree("reduce", declared.reduce, type(first))
        if self.rules.as_torch and not _are_tensors(column):
            if self.lanes == 1:
                return first
            refuse(
                f"{self._say(column)}. {_PROVES_NOTHING}. Return a 0-d tensor, which becomes a "
                "vector with one value per shard, or use "
                f'parallel(model, devices, reduce="sum"), or {SAME}'
            )
        if any(shape_of(part) for part in column):
            refuse(f"the shapes {_say_shapes(column)} have no dim in common. {CURE}")
        if isinstance(first, torch.Tensor) and self._may_be_rows(declared):
            refuse(
                "each lane had one row and returned a 0-d tensor, which is either a number or that "
                "row without its dim. Keep the dim in the model (squeeze(1) instead of squeeze()). "
                "Or name a number in reduce, such as "
                f'reduce={{"loss": {declared.reduce!r}}}, or leave out out_dims: small batches '
                f"then run plainly. {CURE}"
            )
        return self._reduce(column, declared)

    def _may_be_rows(self, declared: Declared) -> bool:
        """True if 0-d tensors may be rows of a model that squeezes a batch of one row."""
        if self.lanes == 1 or max(self.rows or [0]) != 1:
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
            if _sizes_on(column, dim) == self.rows:
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
        lengths = list(map(len, column))
        if isinstance(first, deque):
            limits = {value.maxlen for value in column}
            if len(limits) > 1:
                shown = list_values(sorted(limits, key=str))  # None is among them
                refuse(f"the lanes returned deques of maxlen {shown}")
        if self._are_items(column, lengths, declared, around):
            # A deque drops its oldest items, as that of the plain call would have done.
            items: list[Any] = []
            for value in column:
                items += [_move(item, self.device) for item in value]
            return make_sequence(first, items)
        if len(set(lengths)) > 1:
            refuse(f"{self._say(lengths)} items. {CURE}")
        # A list of texts under a declared dim has one item per row. This one has not, so it may
        # only be a constant.
        has_one_dim = declared.out_dim is not None and not is_tree(declared.out_dim)
        if has_one_dim and any(map(_holds_texts, column)):
            return self._take_one(column)
        declarations = declared.parts(range(lengths[0]))
        joined = []
        for index, each in enumerate(declarations):
            # A refusal leaves the path as it is, as in `join_values`.
            self.path.append(index)
            values = [value[index] for value in column]
            joined.append(self.join_values(values, each))
            self.path.pop()
        return make_sequence(first, joined)

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
        if any(isinstance(item, Returned) for value in column for item in value):
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
            refuse(f"{self._say(lengths)} items. {CURE}")
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
            if not all(leaf is None or isinstance(leaf, Returned) for leaf in leaves):
                is_empty = False
        if is_empty:
            return
        if holds_tensors and self._have_rows(tensors):
            has_one_item_per_row = lengths == self.rows
            if not has_one_item_per_row or self._are_outputs(column, tensors, around):
                return
        refuse(
            f"the lanes returned a {kind.__name__} of {list_values(lengths)} items: one "
            "item per row, or parts of every row. Use parallel(model, devices): its unequal shards "
            'show the difference, and out_dims="items" declares one item per row. Return a tuple '
            "of tensors to join its items"
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
                refuse(f"{self._say(found)} rows of a {kind.__name__}. {CURE}")
            return join_parts(moved)
        except GatherError as error:
            msg = f"{error}. {JOIN_LIST}"
            raise Refusal(msg) from error

    def _take_one(self, column: Sequence[Any]) -> Any:
        """Return the undeclared value that all lanes returned: one object, such as a constant.

        Two lanes that both return the text "1 positive" do not mean "1 positive".
        """
        first = column[0]
        # A device says nothing about rows. Shapes, ranges, and slices may count them.
        is_one = isinstance(first, torch.device) or self._is_one_object(column)
        if self.lanes > 1 and not is_one:
            constant = "unless it is one object, such as a constant"
            why = f"{self._say(column)}. {_PROVES_NOTHING}, {constant}. {CURE}"
            is_plain = isinstance(first, (str, bytes)) or _is_sequence(first)
            if not is_plain:
                why += f". {registration_of(type(first))} says how to join them"
            refuse(why)
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
        first = column[0]
        if all(_are_equal(first, value) for value in column[1:]):
            return
        values = [each.value if isinstance(each, WholeLeaf) else each for each in column]
        refuse(f"{self._say(values)}, which differ. {CURE}")

    def _check_proof(self) -> None:
        """Refuse an undeclared output of shards of equal sizes, as of NeuronCores."""
        if self.rows is None or self.lanes == 1:
            return
        if len(set(self.rows)) == 1:
            refuse(
                f"all lanes had {self.rows[0]} rows, which does not show whether this output "
                f"follows the rows. {CURE}"
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

    def _say(self, column: Sequence[Any]) -> str:
        """Return the rows and the values of the lanes, for an error."""
        lanes = "the lanes"
        if self.rows is not None:
            lanes = f"the lanes had {list_values(self.rows)} rows and"
        if all(map(_is_array_like, column)):
            return f"{lanes} returned shapes {_say_shapes(column)}"
        return f"{lanes} returned {list_values(column)}"


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


def _sizes_on(column: Sequence[Any], dim: int) -> list[int]:
    """Return the size of each part on a dim; an empty list if a part does not have the dim."""
    try:
        return [part.shape[dim] for part in column]
    except IndexError:
        return []


def _say_shapes(column: Sequence[Any]) -> str:
    return ", ".join(str(shape_of(value)) for value in column)


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
        if isinstance(leaf, (*SEQUENCES, WholeLeaf, Returned)):
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
