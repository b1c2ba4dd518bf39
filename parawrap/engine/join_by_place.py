"""`Joiner`: join the values of all lanes, one place of the output after another.

`join` comes here with outputs that it cannot concatenate at once. Each place has its own
declaration, and is joined by the kind of its values: tensors and arrays, numbers, lists, registered
objects, or one value that all lanes returned. A place that cannot be joined raises a `Refusal`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch

from parawrap.engine.columns import (
    are_all_equal,
    are_auxiliary,
    are_numbers,
    are_tensors,
    describe_column,
    is_array,
    is_array_like,
    is_number,
    list_values,
    shape_of,
    sizes_on,
)
from parawrap.engine.concatenate import (
    are_alike,
    are_of_one_form,
    concatenate_arrays,
    fits,
    pad,
    reduce_numbers,
    write_into_one,
)
from parawrap.engine.join_rules import (
    SEQUENCES,
    Declared,
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
    flatten,
    is_dense,
    list_attributes,
    unflatten,
)

Siblings = tuple[list[Any], TreeSpec]
"""The leaves around a place, and their structure."""

Originals = Callable[[], Sequence[Callable[[Any], Any]]]
"""Returns one function per part of the call.

That takes a value of the lane, and returns the caller's value that it is a copy of, or None."""

MANY_PADDED = "more than one output must be padded, and no padding is right for every output"
_PROVES_NOTHING = (
    "Equal values do not make it one value: if two lanes count 3 rows each, the plain call counts 6"
)


class Joiner:
    """Joins the outputs of one call. It stands at one place of the output at a time.

    One thread uses it, for one call.

    Attributes:
        outputs: The output of each lane.
        lanes: The number of outputs.
        rules: The options for joining.
        device: The device of the joined output; None if it stays where the lanes left it.
        originals: Finds the caller's value of a copy; None if the copies are not known.
        rows: The row count of each shard; None if it is not known.
        path: The keys that lead to the place. After a refusal, it leads to the refused place.
        siblings: The leaves around the place in the output of the first lane, and their structure.
        padded: The number of tensors that were padded without a value from the user. A second one
            is refused.
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
        self.rows = None if sizes is None else list(sizes)
        self.path: list[Any] = []
        self.siblings: Siblings | None = None
        self.padded = 0

    def with_rules(self, rules: JoinRules) -> Joiner:
        """Return a joiner of the same outputs by other rules."""
        return Joiner(self.outputs, self.rows, rules, self.device, self.originals)

    def join_values(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the joined value of a column of any structure."""
        if TENSOR.issuperset(map(type, column)):
            return self.join_leaves(column, declared)
        # Sequences are leaves here: with one item per row, those of lanes differ in length
        siblings = flatten(column[0], is_sequence)
        first_leaves, spec = siblings
        of_lanes = [first_leaves]
        for lane, value in enumerate(column[1:], start=1):
            leaves, other = flatten(value, is_sequence)
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
            self.path += path
            # For each leaf again: if one is a list, joining its items has set other siblings
            self.siblings = siblings
            joined.append(self.join_leaves(parts, each))
            del self.path[depth:]
        return unflatten(spec, joined)

    def join_leaves(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the joined value of a column of leaves, or of lists."""
        column = _replace_unequal_marks(column)
        first = column[0]
        self.check_kinds(column, declared)
        if first is None:
            return None
        if type(first) in SEQUENCES:
            return self._join_sequences(column, declared)
        if isinstance(first, WholeLeaf):
            return self._join_registered(column, declared)
        is_nested = isinstance(first, torch.Tensor) and first.is_nested
        if is_nested and first.layout is torch.strided:  # one of the jagged layout has a shape
            refuse("a nested tensor has no dim to join on")
        if declared.out_dim is None:
            self._refuse_reduced_constant(first, declared)
            return self._take_equal(column)
        if are_tensors(column) or is_array(first):
            return self._join_arrays(column, declared)
        if is_number(first):
            return self._join_numbers(column, declared)
        return self._take_one(column)

    def check_kinds(self, column: Sequence[Any], declared: Declared) -> None:
        """Refuse a column of several types, and a tree of out_dims for leaves."""
        refuse_tree("out_dims", declared.out_dim, type(column[0]))
        kinds = {type(value) for value in column}
        # A parameter and a tensor can be joined, and so can 1 and 1.0
        if len(kinds) == 1 or are_tensors(column) or are_numbers(column):
            return
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        refuse("", "Return one type", returned=f"values of type {names}")

    def _refuse_reduced_constant(self, value: Any, declared: Declared) -> None:
        """Refuse a place for which out_dims has None, and reduce has a reduction."""
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
        """Join tensors or numpy arrays: the first way below that fits the column."""
        first = column[0]
        has_dims = first.ndim > 0
        # A reduction that names this place comes before its rows: the user knows the output
        names_reduction = declared.names_reduce and declared.reduce is not None
        if has_dims and names_reduction:
            return self._reduce_arrays(column, declared)
        dim = self._row_dim(declared)
        takes_any_rows = declared.out_dim == "ragged" or self.lanes == 1
        if has_dims and not takes_any_rows and self._follows_rows(column, declared, dim):
            return self._concatenate(column, dim, declared)
        # A parameter or a whole argument that all lanes return is one value
        original = self._original(column)
        if original is not None:
            return move(original, self.device)
        if not has_dims:
            return self._join_numbers(column, declared)
        if takes_any_rows:
            return self._concatenate(column, dim, declared)
        # `reduce` for a whole output is for its numbers, unless the tensor is the whole output
        is_whole_output = not self.path
        if declared.reduce is None or not is_whole_output:
            advice = _PROVES_NOTHING if are_all_equal(column) else ""
            refuse(f"without the rows on dim {dim}", advice, returned=describe_column(column))
        return self._reduce_arrays(column, declared)

    def _row_dim(self, declared: Declared) -> int:
        """Return the dim that the rows of a place lie on, if it has rows."""
        out_dim = declared.out_dim
        return out_dim if isinstance(out_dim, int) else self.rules.dim

    def _follows_rows(self, column: Sequence[Any], declared: Declared, dim: int) -> bool:
        """True if tensors or arrays have the rows of their shards on `dim`, or zero rows each.

        Sizes that do not fit a declared dim are refused.
        """
        sizes = sizes_on(column, dim)
        if declared.out_dim is UNDECLARED:
            self._check_proof()
            are_empty = set(sizes) == {0}  # concatenating them adds nothing, whatever they mean
            return are_empty or sizes == self.rows
        if sizes != self.rows:
            refuse(f"without the rows on dim {dim}", returned=describe_column(column))
        return True

    def _concatenate(self, parts: Sequence[Any], dim: int, declared: Declared) -> Any:
        """Concatenate tensors along `dim` on the output device, or numpy arrays."""
        first, device = parts[0], self.device
        if len(parts) == 1:
            return move(first, device)
        if not all(-part.ndim <= dim < part.ndim for part in parts):
            refuse(f"which have no dim {dim} in common", returned=describe_column(parts))
        try:
            if not isinstance(first, torch.Tensor):
                return concatenate_arrays(parts, dim)
            self._check_tensors(parts)
            # Parts with different numbers of dims cannot be padded to one shape
            have_same_dims = len({part.ndim for part in parts}) == 1
            may_pad = self.rules.join == "pad" and have_same_dims
            if may_pad and not are_alike(parts, dim):
                value = self._choose_padding(first.dtype, declared.pad_value)
                parts = pad(parts, dim, value)
            if device is not None and are_of_one_form(parts, dim, device):
                return write_into_one(parts, dim, device)
            moved = [move(part, device) for part in parts]
            return torch.cat(moved, dim)
        except (IndexError, RuntimeError, ValueError) as error:
            # Parts are compared only after a failure: nearly all of them can be concatenated
            if isinstance(first, torch.Tensor) and not is_dense(first):
                kind = "nested tensors" if first.is_nested else f"tensors of layout {first.layout}"
                why, advice = "which torch cannot concatenate", "Return dense tensors"
                raise Refusal(why, advice, returned=kind) from error
            if are_alike(parts, dim):
                raise
            why = f"which differ beyond dim {dim}"
            raise Refusal(why, returned=describe_column(parts)) from error

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
        """Return the value to pad with; `value` is that of the user, or None."""
        refuse_tree("pad_value", value, torch.Tensor)
        is_float = dtype.is_floating_point or dtype.is_complex
        if value is not None:
            # Every number is a value of a float dtype, but not of an integer dtype or bool
            if is_float or fits(value, dtype):
                return value
            refuse(f"pad_value={value!r} is not a value of {dtype}", "Give this output another one")
        # A zero may be a label or a token in other outputs, so only one output of floats gets it
        self.padded += 1
        if self.padded > 1:
            refuse(MANY_PADDED)
        if not is_float:
            refuse(f"it holds {dtype}, and no padding is right for every output")
        return 0

    def _reduce_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Reduce tensors or arrays without rows, such as confusion matrices, elementwise."""
        refuse_tree("reduce", declared.reduce, type(column[0]))
        if len({part.shape for part in column}) > 1:
            refuse(
                "which reduce cannot put together",
                "Leave this entry out of reduce",
                returned=describe_column(column),
            )
        return self._reduce(column, declared)

    def _join_numbers(self, column: Sequence[Any], declared: Declared) -> Any:
        """Reduce 0-d tensors, or numbers of Python or numpy, by the reduction of the user."""
        first = column[0]
        refuse_tree("reduce", declared.reduce, type(first))
        if self.rules.as_torch and not are_tensors(column):
            if self.lanes == 1:
                return first
            refuse(
                "which DataParallel joins as tensors alone",
                "Return a 0-d tensor, which becomes a vector with one value per shard",
                returned=f"one {type(first).__name__} each ({list_values(column)})",
            )
        if any(map(shape_of, column)):  # a tensor with dims in another lane than the first
            refuse("which have no dim in common", returned=describe_column(column))
        if isinstance(first, torch.Tensor) and self._may_be_rows(declared):
            advice = "Keep the dim in the model (squeeze(1) instead of squeeze())"
            if declared.out_dim is not UNDECLARED:
                advice += ", or leave out out_dims: small batches then run plainly"
            why = (
                "each lane had one row and returned a 0-d tensor, which is either a number or that "
                "row without its dim"
            )
            # In `reduce`, a key names an output as numbers. The whole output has no key
            raise Refusal(why, advice, has_cure=bool(self.path))
        return self._reduce(column, declared)

    def _may_be_rows(self, declared: Declared) -> bool:
        """True if 0-d tensors may be rows of a model that squeezes a batch of one row."""
        had_one_row = max(self.rows or [0]) == 1
        if self.lanes == 1 or not had_one_row:
            return False
        # If the user names this place, or gives a function of its values, the values are numbers
        if declared.names_reduce or declared.reduce not in ("mean", "sum"):
            return False
        return not self._has_rows_elsewhere()

    def _has_rows_elsewhere(self) -> bool:
        """True if another output of the call has the rows: the model keeps the dim of one row."""
        leaves, spec = flatten(self.outputs[0])
        try:
            columns = zip(leaves, *map(spec.flatten_up_to, self.outputs[1:]), strict=True)
        except ValueError:  # another structure
            return False
        declarations = self.rules.declared.below(spec)
        for column, declared in zip(columns, declarations, strict=True):
            if not are_tensors(column):
                continue
            dim = self._row_dim(declared)
            if sizes_on(column, dim) == self.rows:
                return True
        return False

    def _reduce(self, column: Sequence[Any], declared: Declared) -> Any:
        moved = [move(part, self.device) for part in column]
        return reduce_numbers(moved, self.rows or [], declared.reduce)

    # Lists

    def _join_sequences(self, column: Sequence[Any], declared: Declared) -> Any:
        """Join lists, tuples, or deques."""
        first = column[0]
        form = self.choose_form(column, declared)
        if form == "items":
            # A bounded deque drops its oldest items, as the deque of the plain call would have done
            items: list[Any] = []
            for value in column:
                items += [move(item, self.device) for item in value]
            return make_sequence(first, items)
        if form == "one":
            return self._take_one(column)
        declarations = declared.parts(range(len(first)))
        joined = []
        for index, each in enumerate(declarations):
            self.path.append(index)
            values = [value[index] for value in column]
            joined.append(self.join_values(values, each))
            self.path.pop()
        return make_sequence(first, joined)

    def choose_form(
        self, column: Sequence[Any], declared: Declared
    ) -> Literal["items", "one", "parts"]:
        """Return how lists are joined: their items in order, as one value, or item by item."""
        lengths = list(map(len, column))
        if isinstance(column[0], deque):
            limits = {value.maxlen for value in column}
            if len(limits) > 1:
                shown = list_values(sorted(limits, key=str))  # as texts, since one may be None
                refuse("", returned=f"deques of maxlen {shown}")
        if self._are_items(column, lengths, declared):
            return "items"
        if len(set(lengths)) > 1:
            refuse("", returned=f"{list_values(lengths)} items")
        # Under one entry other than None, a list of texts has one item per row, or is a constant
        has_one_entry = declared.out_dim is not None and not is_tree(declared.out_dim)
        if has_one_entry and any(map(_holds_texts, column)):
            return "one"
        return "parts"

    def _are_items(self, column: Sequence[Any], lengths: list[int], declared: Declared) -> bool:
        """True if the items of lists are rows, in the order of the lanes."""
        out_dim = declared.out_dim
        if self.lanes == 1 or out_dim is None or is_tree(out_dim):
            return False
        if self.rules.as_torch:
            self._refuse_unclear_lists(column)
            return False  # torch joins lists item by item
        if isinstance(out_dim, int) and any(map(_holds_tensors, column)):
            return False  # a list of tensors, each with its rows on that dim
        if any(isinstance(item, ReturnedArgument) for item in chain(*column)):
            return False  # an argument is one object in all lanes, and not a row
        if out_dim == "ragged":
            # A list may have any number of rows. A tuple of tensors is a structure of outputs
            if type(column[0]) is not tuple:
                return True
            leaves, _ = flatten(column)
            return not any(map(is_array_like, leaves))
        if out_dim is UNDECLARED:
            if any(lengths):  # empty lists need no proof: joining them adds nothing
                self._check_proof()
            return lengths == self.rows
        if lengths != self.rows and any(lengths):
            refuse("", returned=f"{list_values(lengths)} items")
        return True

    def _refuse_unclear_lists(self, column: Sequence[Any]) -> None:
        """Refuse lists that may have one item per row, since torch joins all lists item by item.

        Other lists hold tensors with the rows, such as the heads of a model. The number of items
        decides nothing: it is the row count of some batches by chance.
        """
        kind = type(column[0])
        holds_tensors = any(map(_holds_tensors, column))
        if kind is tuple and holds_tensors:  # a structure of outputs
            return
        of_lanes = [flatten(value)[0] for value in column]
        # An argument is one object in all lanes, and not a row
        if all(leaf is None or isinstance(leaf, ReturnedArgument) for leaf in chain(*of_lanes)):
            return
        tensors = [[*filter(torch.is_tensor, leaves)] for leaves in of_lanes]
        if holds_tensors and self._have_rows(tensors) and self._are_outputs(column, tensors):
            return
        lengths = [len(value) for value in column]
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
        self, column: Sequence[Any], tensors: Sequence[Sequence[torch.Tensor]]
    ) -> bool:
        """True if lists of tensors with the rows hold outputs of every row, such as heads."""
        siblings: dict[Any, Any] = {}
        if self.siblings is not None:
            leaves, spec = self.siblings
            for path, leaf in zip(spec.paths(), leaves, strict=True):
                if path:  # the whole output has no key
                    siblings[path[-1]] = leaf
        if are_auxiliary(column[0], siblings):
            return True
        # A dict per item is usually the result of one row, and a vector per item may be a row. Its
        # entries may be as many as the rows by chance
        first = next(item for item in chain(*column) if item is not None)  # a list holds a tensor
        if isinstance(first, Mapping):
            return False
        return all(each.ndim >= 2 for each in chain(*tensors))

    # Other values

    def _join_registered(self, column: Sequence[WholeLeaf], declared: Declared) -> Any:
        """Join values of registered classes, or of classes with built-in rules."""
        values = [leaf.value for leaf in column]
        # An argument that all lanes return is the caller's own object
        original = self._original(values)
        if original is not None:
            return original
        moved = values
        if self.device is not None:
            moved = [place_leaf(leaf, self.device) for leaf in column]
        if declared.out_dim is None:
            self._check_equal(column)
        if declared.out_dim is None or self.lanes == 1:
            return moved[0]
        try:
            found = [count_rows(value) for value in values]
            has_other_rows = any(found) and found != self.rows  # joining empty values adds nothing
            if has_other_rows and declared.out_dim != "ragged":
                kind = type(values[0])
                refuse("", returned=f"{list_values(found)} rows of a {kind.__name__}")
            return join_parts(moved)
        except GatherError as error:
            raise Refusal(error.message) from error

    def _take_one(self, column: Sequence[Any]) -> Any:
        """Return the one object that all lanes returned, such as a constant. Refuse equal ones.

        Two lanes that both return the text "1 positive" do not mean "1 positive".
        """
        first = column[0]
        # Equal devices are one value. Equal shapes, ranges, and slices may count the rows of lanes
        is_one = isinstance(first, torch.device) or self._is_one_object(column)
        if self.lanes > 1 and not is_one:
            if isinstance(first, (str, bytes)):
                advice = "" if are_all_equal(column) else "Return a list with one item per row"
            elif is_sequence(first):
                advice = ""
            else:
                advice = f"{registration_of(type(first))} says how to join them"
            refuse("which are not one constant object", advice, returned=describe_column(column))
        return self._take_equal(column)

    def _is_one_object(self, column: Sequence[Any]) -> bool:
        """True if all lanes returned one object that no lane can have made."""
        first = column[0]
        if not all(value is first for value in column):
            return False
        # CPython has one object for each text of one character, and ``("a",) * 1`` is ``("a",)``.
        # So lanes that made a digit or a tuple of one item have one object too
        is_digit = isinstance(first, (str, bytes)) and first.isdigit()
        may_be_made = is_digit or isinstance(first, tuple)
        if may_be_made and len(first) == 1:
            return self._original(column) is first
        return True

    def _take_equal(self, column: Sequence[Any]) -> Any:
        """Return one value of equal ones, and the caller's own if the lanes have copies of it."""
        original = self._original(column)
        if original is None:
            self._check_equal(column)
            original = column[0]
        return move(original, self.device)

    def _check_equal(self, column: Sequence[Any]) -> None:
        if are_all_equal(column):
            return
        values = [each.value if isinstance(each, WholeLeaf) else each for each in column]
        shapes = {shape_of(value) for value in values}
        have_one_shape = len(shapes) == 1 and None not in shapes
        why = "whose values differ" if have_one_shape else "which differ"
        refuse(why, returned=describe_column(values))

    def _check_proof(self) -> None:
        """Refuse an undeclared output of shards of one size, as on NeuronCores."""
        if self.lanes == 1 or self.rows is None or self.rules.assumes_proof:
            return
        if len(set(self.rows)) == 1:
            refuse(
                f"all lanes had {self.rows[0]} rows, which does not show whether this output "
                "follows the rows"
            )

    def _original(self, parts: Sequence[Any]) -> Any:
        """Return the parameter or uncut argument that all lanes returned, or copies of it; or None.

        Another tensor that all lanes returned is not one value: each lane may have written its rows
        into it.
        """
        # The first lanes may have the original itself, for which their functions return None
        last = parts[-1]
        if self.originals is None:  # the arguments of the lanes are not known
            is_shared = self.lanes > 1 and all(part is last for part in parts)
            return last if is_shared else None
        find_of_lanes = self.originals()
        find_of_last = find_of_lanes[-1]
        value = find_of_last(last)
        if value is None:
            return None
        for part, find in zip(parts, find_of_lanes, strict=True):
            if part is not value and find(part) is not value:
                return None
        return value


def _replace_unequal_marks(column: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a tensor in place of its marks, unless all lanes returned one mark.

    A lane may return its argument, and another lane a new tensor: ``x.nan_to_num() if ... else x``.
    """
    are_marks = [isinstance(value, ReturnedArgument) for value in column]
    if not any(are_marks) or all(value is column[0] for value in column):
        return column
    replaced = [*column]
    for lane, is_mark in enumerate(are_marks):
        if is_mark and column[lane].parts:
            replaced[lane] = column[lane].parts[lane]
    return replaced


def _holds_tensors(value: Any) -> bool:
    """True if a value holds a tensor, or an object with registered rules."""
    leaves, _ = flatten(value)
    return any(isinstance(leaf, (torch.Tensor, WholeLeaf)) for leaf in leaves)


def is_sequence(node: Any) -> bool:
    """True for a list, a tuple, or a deque."""
    return type(node) in SEQUENCES


def _holds_texts(value: Any) -> bool:
    """True for a list of texts, or of other values that no rule joins item by item.

    Such rules join arrays, numbers, sequences, and registered objects.
    """
    leaves = [leaf for item in value for leaf in flatten(item, is_sequence)[0]]
    for leaf in leaves:
        if isinstance(leaf, (*SEQUENCES, WholeLeaf, ReturnedArgument)):
            return False
        if is_array_like(leaf) or is_number(leaf):
            return False
    return any(leaf is not None for leaf in leaves)


def move(value: Any, device: torch.device | None) -> Any:
    """Return a value with its tensors on a device; None leaves them where they are."""
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
