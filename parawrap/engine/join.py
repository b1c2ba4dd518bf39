"""From the outputs of the lanes to the output of the call.

`out_dims` declares where the rows of an output lie. Without it, an output follows the rows if its size on the row dim is
the row count of its shard in every lane. The row counts of shards differ then, so a size that does not come from the rows
cannot match. Any other output is returned once if it is the same parameter, buffer, or uncut argument in every lane, and
refused otherwise: equal values alone prove nothing, since two lanes that both count 3 are 6.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch

from parawrap.engine.concatenate import (
    are_of_one_form,
    concatenate_arrays,
    is_number,
    list_values,
    other_sizes,
    pad,
    reduce_numbers,
    shapes_of,
    why_no_cat,
    write_into_one,
)
from parawrap.engine.join_rules import CURE, JOIN_LIST, SAME, SEQUENCES, Declared, JoinRules, Refusal, is_tree, refuse
from parawrap.engine.rules.registry import place_leaf, registration_of, splitter_of
from parawrap.errors import GatherError
from parawrap.tree import (
    UNDECLARED,
    TreeSpec,
    WholeLeaf,
    addresses,
    flatten,
    list_attributes,
    mismatch,
    tensors_in,
    unflatten,
)

Flat = tuple[list[Any], TreeSpec]
"""The leaves of an output, and its structure."""

Originals = Callable[[], Sequence[Callable[[Any], Any]]]
"""Returns one function per shard: from a value of that lane to the caller's value that it is a copy of, or None."""

_TENSOR = frozenset({torch.Tensor})
_dtype_of = attrgetter("dtype")
_attributes_of = attrgetter("__dict__")
_BY_VALUE = (range, slice, torch.Size, torch.device)
"""Values that lanes make anew, and that say nothing about rows unless they differ."""


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int] | None,
    rules: JoinRules,
    device: torch.device | None = None,
    originals: Originals | None = None,
) -> Any:
    """Return one output, on `device` (None: where the lanes left it), from the outputs of shards of those sizes.

    With the rules of torch, `sizes` may be None: unknown.

    Raises:
        GatherError: If a place in the output cannot be joined. The message names the place.
    """
    if device is None and len(outputs) > 1 and rules.join == "cat" and sizes is not None and not rules.as_torch:
        joined = _join_rows(outputs, tuple(sizes), rules)
        if joined is not None:
            return joined
    if rules.join == "list" or (len(outputs) == 1 and rules.keep_single):
        if originals is not None:
            outputs = list(map(with_originals, outputs, originals()))
        moved = [output if device is None else _move(output, device) for output in outputs]
        return moved if rules.join == "list" else moved[0]
    try:
        return _Join(len(outputs), sizes, rules, device, originals).join_values(outputs, rules.declared)
    except Refusal as refusal:
        place = "output" + "".join(reversed(refusal.steps))
        msg = f"{place} cannot be joined: {refusal}"
        if SAME in msg and len(refusal.steps) == 1 and place.endswith('"]'):
            key = refusal.steps[0][1:-1]
            mean = "" if "has no " in msg else f'reduce={{{key}: "mean"}} or '
            msg += f". For this key alone, write {mean}out_dims={{{key}: None}}"
        if rules.as_torch and ("out_dims" in msg or "join=" in msg):
            msg += ". out_dims and join are options of parallel(model, devices)"
        raise GatherError(msg) from refusal.__cause__


def _join_rows(outputs: Sequence[Any], sizes: tuple[int, ...], rules: JoinRules) -> Any:
    """Return the joined output if it is a tensor with the rows, or a structure of such tensors alone; else None."""
    if rules.needs_proof and sizes[0] == sizes[-1]:
        return None
    if _TENSOR.issuperset(map(type, outputs)):
        dim = rules.dim if rules.out_dims is UNDECLARED else rules.out_dims
        return _cat_rows(outputs, dim, sizes) if isinstance(dim, int) else None
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
        found = _cat_rows(column, dim, sizes)
        if found is None:
            return None
        joined.append(found)
    return unflatten(spec, joined)


def _cat_rows(parts: Sequence[torch.Tensor], dim: int, sizes: tuple[int, ...]) -> torch.Tensor | None:
    """Return tensors next to each other if they have the rows of their shards; None if they need a second look."""
    try:
        follows = tuple([part.shape[dim] for part in parts]) == sizes and not any(map(_attributes_of, parts))
        if follows and len(set(map(_dtype_of, parts))) == 1 and not parts[0].is_quantized:
            return torch.cat(list(parts), dim)
    except (IndexError, RuntimeError):  # without that dim, nested, or of other shapes
        pass
    return None


def with_originals(output: Any, find: Callable[[Any], Any]) -> Any:
    """Return an output with the caller's values in the places of the copies that a lane has of them."""
    if type(output) is torch.Tensor:
        value = find(output)
        return output if value is None else value
    leaves, spec = flatten(output)
    module = next((leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)), None)
    if module is not None:
        msg = (
            f"the output holds a {type(module).__name__}, which is a lane's copy of a layer and ends with the block. "
            "Return its tensors instead"
        )
        raise GatherError(msg)
    found = [find(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    if all(value is None for value in found):
        return output
    return unflatten(spec, [leaf if value is None else value for leaf, value in zip(leaves, found, strict=True)])


class _Join:
    """The joining of one call. A column holds the values of all lanes at one place."""

    def __init__(
        self,
        lanes: int,
        sizes: Sequence[int] | None,
        rules: JoinRules,
        device: torch.device | None,
        originals: Originals | None,
    ) -> None:
        self.lanes = lanes
        self.rules = rules
        self.device = device
        self.originals = originals
        self.padded = 0  # tensors, without a value from the user
        self.rows = None if sizes is None else list(sizes)

    def join_values(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the one value of all lanes, of any structure."""
        if _TENSOR.issuperset(map(type, column)) and not declared.is_tree:
            return self._join_arrays(column, declared)
        flat = [flatten(value, _is_sequence) for value in column]
        spec = flat[0][1]
        if any(other != spec for _, other in flat[1:]):
            _refuse_structures([other for _, other in flat])
        if spec.is_leaf():
            return self._join_leaves([leaves[0] for leaves, _ in flat], declared)
        children = declared.below(spec)
        around = flat[0]
        joined = []
        for index, parts in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            try:
                joined.append(self._join_leaves(parts, children[index], around))
            except Refusal as refusal:
                refusal.steps.append(addresses(spec, ("",))[index])
                raise
        return unflatten(spec, joined)

    def _join_leaves(self, column: Sequence[Any], declared: Declared, around: Flat | None = None) -> Any:
        first = column[0]
        if declared.is_tree and (not declared.is_of_sequence or type(first) not in SEQUENCES):
            kind = type(declared.out_dim).__name__
            refuse(f"out_dims declares a {kind} here, and the lanes returned a {type(first).__name__}")
        if all(isinstance(value, torch.Tensor) for value in column):
            return self._join_arrays(column, declared)
        if any(type(value) is not type(first) for value in column) and not all(map(is_number, column)):
            kinds = " and ".join(sorted({type(value).__name__ for value in column}))
            refuse(f"the lanes returned values of type {kinds}. {CURE}")
        if first is None:
            return None
        if type(first) in SEQUENCES:
            return self._join_sequences(column, declared, around)
        if isinstance(first, WholeLeaf):
            return self._join_registered(column, declared)
        if is_number(first):
            return self._join_numbers(column, declared)
        if _is_array(first):
            return self._join_arrays(column, declared)
        return self._take_one(column, declared)

    # Tensors and arrays

    def _join_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Join tensors, or numpy arrays."""
        first = column[0]
        if declared.names_reduce and declared.reduce is not None and first.ndim and not self.rules.as_torch:
            return self._reduce_arrays(column, declared)
        if isinstance(first, torch.Tensor) and first.is_nested and first.layout is torch.strided:
            refuse(f"a nested tensor has no dim to join on. {JOIN_LIST}")
        dim = self._row_dim(column, declared) if first.ndim else None
        if dim is not None and not self._takes_any_rows(declared):
            return self._concatenate(column, dim, declared)
        original = self._original(column)
        if original is not None:
            return _on(original, self.device)
        if first.ndim == 0:
            return self._join_numbers(column, declared)
        if dim is not None:
            return self._concatenate(column, dim, declared)
        has_reduce = declared.reduce is not None and not self.rules.as_torch
        if has_reduce and declared.is_whole and declared.out_dim is UNDECLARED:
            return self._reduce_arrays(column, declared)
        return self._take_declared_equal(column, declared)

    def _concatenate(self, parts: Sequence[Any], dim: int, declared: Declared) -> Any:
        """Return tensors next to each other along `dim`, on the output device; or arrays."""
        if not isinstance(parts[0], torch.Tensor):
            return concatenate_arrays(parts, dim)
        if len(parts) > 1 and parts[0].is_quantized:
            refuse("the lanes returned quantized tensors, which may have different scales. Return tensor.dequantize()")
        names = list_attributes(parts[0])
        if names and len(parts) > 1 and not self.rules.as_torch:
            kind = type(parts[0])
            rules = "a class of your own with register_split" if kind is torch.Tensor else registration_of(kind)
            refuse(
                f"the lanes returned tensors with attributes of their own ({', '.join(names)}), which a joined tensor "
                f"loses. Return the attributes as outputs of their own, or use {rules} to join them too"
            )
        if len(set(map(_dtype_of, parts))) > 1:  # torch.cat would promote them
            refuse(f"the lanes returned tensors of {' and '.join(sorted({str(part.dtype) for part in parts}))}. {CURE}")
        if self.rules.join == "pad" and len({other_sizes(part.shape, dim) for part in parts}) > 1:
            if len({part.ndim for part in parts}) > 1:
                refuse(why_no_cat(parts, dim))
            parts = pad(parts, dim, self._choose_padding(parts, declared.pad_value))
        device = self.device
        if device is not None and are_of_one_form(parts, dim, device):
            return write_into_one(parts, dim, device)
        try:
            parts = [_on(part, device) for part in parts]
            return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
        except (IndexError, RuntimeError) as error:
            raise Refusal(why_no_cat(parts, dim)) from error

    def _choose_padding(self, parts: Sequence[torch.Tensor], value: Any) -> Any:
        """Return the value to pad with. Without one from the user, only one tensor of floating-point numbers is padded."""
        dtype = parts[0].dtype
        is_float = dtype.is_floating_point or dtype.is_complex
        if is_tree(value):
            refuse(f"pad_value declares a {type(value).__name__} here, and the lanes returned a Tensor")
        if value is not UNDECLARED and value is not None:
            if not is_float and value != int(value.real):
                refuse(f"pad_value={value!r} is not a value of {dtype}. Give this output a whole number")
            return value
        self.padded += 1
        if self.padded > 1 or not is_float:
            why = "more than one output must be padded" if self.padded > 1 else f"it holds {dtype}"
            refuse(
                f"{why}, and no padding is right for every output. Give pad_value: one number for all, or a dict or tuple "
                'like the output, such as pad_value={"logits": 0.0, "mask": False, "labels": -100}'
            )
        return 0

    def _reduce_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Reduce tensors or arrays without rows, such as confusion matrices. The user names the reduction."""
        if not isinstance(column[0], torch.Tensor) and declared.reduce != "sum":
            refuse('an array can only be reduced by "sum". Return torch.from_numpy(...) of it for other reductions')
        _refuse_reduced_and_equal(declared)
        if self.lanes > 1 and len({part.shape for part in column}) > 1:
            refuse(f"{self._what_lanes_did(column)}, which reduce cannot put together. Leave this entry out of reduce")
        return reduce_numbers([_on(part, self.device) for part in column], self.rows or [], declared.reduce)

    def _row_dim(self, column: Sequence[Any], declared: Declared) -> int | None:
        """Return the dim to concatenate tensors or arrays on; None if they do not follow the rows."""
        if declared.out_dim is None:
            return None
        dim = declared.out_dim if isinstance(declared.out_dim, int) else self.rules.dim
        if self._takes_any_rows(declared):
            return dim
        try:
            sizes = [part.shape[dim] for part in column]
        except IndexError:  # a part without that dim
            sizes = None
        if declared.out_dim is UNDECLARED:
            self._check_proof()
            follows = sizes is not None and (sizes == self.rows or not any(sizes))  # joining no rows adds nothing
            return dim if follows else None
        if sizes != self.rows:
            refuse(f"{self._what_lanes_did(column)}, without the rows on dim {dim}. {CURE}")
        return dim

    def _takes_any_rows(self, declared: Declared) -> bool:
        """True if tensors are joined whatever their row counts."""
        return declared.out_dim == "ragged" or self.rules.as_torch or self.lanes == 1

    def _take_declared_equal(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the one value that `out_dims` declares to be equal in all lanes."""
        if declared.out_dim is not None:
            refuse(
                f"{self._what_lanes_did(column)}, without the rows on dim {self.rules.dim}. Equal values do not make it "
                'one value: two lanes that count 3 are 6. If it sums over rows, name it in reduce: reduce="sum", or '
                f'reduce={{"key": "sum"}} for one of several outputs. {CURE}'
            )
        return self._take_equal(column)

    def _take_one(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the value that all lanes returned: one object, such as a constant, or declared to be equal.

        Two lanes that both return the text "1 positive" do not mean "1 positive". CPython has one object for each text of
        one character, and ``("a",) * 1`` is ``("a",)``, so a digit or a tuple of one item may be made by lanes.
        """
        first = column[0]
        may_be_made = isinstance(first, (str, bytes)) and len(first) == 1 and first.isdigit()
        may_be_made = may_be_made or (isinstance(first, tuple) and len(first) == 1)
        is_one = all(value is first for value in column) and (not may_be_made or self._original(column) is first)
        if declared.out_dim is not None and not is_one and not isinstance(first, _BY_VALUE) and self.lanes > 1:
            is_plain = isinstance(first, (str, bytes)) or _is_sequence(first)
            rules = "" if is_plain else f". {registration_of(type(first))} says how to join them"
            refuse(
                f"{self._lanes_had()} returned {list_values(column)}. Equal values do not make it one value, unless it is "
                f'one object, such as a constant: two lanes that return "1 positive" mean "2 positive". {CURE}{rules}'
            )
        return self._take_equal(column)

    def _take_equal(self, column: Sequence[Any]) -> Any:
        """Return the value that all lanes returned, compared by value."""
        first = column[0]
        if not all(_equal_values(value, first) for value in column[1:]):
            shown = f"shapes {shapes_of(column)}" if hasattr(first, "shape") else f"values {list_values(column)}"
            cure = CURE
            if not hasattr(first, "shape") and not isinstance(first, str | bytes) and not is_number(first):
                cure = f"{registration_of(type(first))} says how to join them. {JOIN_LIST}"
            refuse(f"{self._lanes_had()} returned different values, of {shown}. {cure}")
        return _on(first, self.device)

    # Lists

    def _join_sequences(self, column: Sequence[Any], declared: Declared, around: Flat | None) -> Any:
        kind = type(column[0])
        if self._are_items(column, declared, around):
            return kind([_move(item, self.device) for value in column for item in value])
        lengths = list(map(len, column))
        if len(set(lengths)) > 1:
            refuse(f"{self._lanes_had()} returned {list_values(lengths)} items. {CURE}")
        is_open = declared.out_dim is not None and not declared.is_of_sequence and not self.rules.as_torch
        if is_open and self.lanes > 1 and any(map(_holds_texts, column)):
            return self._take_one(column, declared)
        joined = []
        for index, (parts, below) in enumerate(zip(zip(*column, strict=True), declared.items(lengths[0]), strict=True)):
            try:
                joined.append(self.join_values(parts, below))
            except Refusal as refusal:
                refusal.steps.append(f"[{index}]")
                raise
        return kind(joined)

    def _are_items(self, column: Sequence[Any], declared: Declared, around: Flat | None) -> bool:
        """True if lists have one item per row, or rows in any number; False if their items are joined one by one."""
        out_dim = declared.out_dim
        if declared.is_of_sequence or out_dim is None or self.lanes == 1:
            return False
        if self.rules.as_torch:
            _refuse_unclear_lists(column, self.rows, around)
            return False  # torch joins lists item by item
        if out_dim == "ragged":
            return True
        if isinstance(out_dim, int) and any(map(_holds_tensors, column)):
            return False  # a list of tensors, each with its rows on that dim
        lengths = list(map(len, column))
        if out_dim is UNDECLARED:
            if any(lengths):
                self._check_proof()
            return lengths == self.rows
        if lengths != self.rows and any(lengths):
            refuse(f"{self._lanes_had()} returned {list_values(lengths)} items. {CURE}")
        return True

    # Other values

    def _join_registered(self, column: Sequence[WholeLeaf], declared: Declared) -> Any:
        """Join values with registered rules. The rules count their rows."""
        values = [leaf.value for leaf in column]
        original = self._original(values)
        if original is not None:
            return original
        moved = [leaf.value if self.device is None else place_leaf(leaf, self.device) for leaf in column]
        if declared.out_dim is None:
            return self._take_equal_registered(moved)
        if self.lanes == 1:
            return moved[0]
        rules = splitter_of(values[0])
        found = [rules.rows(value) for value in values]
        if any(found) and found != self.rows and declared.out_dim != "ragged" and not self.rules.as_torch:
            name = type(values[0]).__name__
            refuse(f"the lanes had {self._list_rows()} rows and returned a {name} of {list_values(found)}. {CURE}")
        try:
            return rules.join(moved)
        except GatherError as error:
            msg = f"{error}. {JOIN_LIST}"
            raise Refusal(msg) from error

    def _take_equal_registered(self, values: Sequence[Any]) -> Any:
        """Return the one value that `out_dims` declares to be equal in all lanes. Its tensors are compared."""
        first, *others = ([*tensors_in(value)] for value in values)
        for other in others:
            if len(other) != len(first) or not all(map(_equal_values, other, first)):
                refuse(f"{self._lanes_had()} returned values of type {type(values[0]).__name__} that differ. {CURE}")
        return values[0]

    def _join_numbers(self, column: Sequence[Any], declared: Declared) -> Any:
        if declared.out_dim is None:
            _refuse_reduced_and_equal(declared)
            return self._take_equal(column)
        if self.rules.as_torch and not all(isinstance(part, torch.Tensor) for part in column):
            if self.lanes == 1:
                return column[0]
            refuse(
                f"each lane returned one {type(column[0]).__name__} ({list_values(column)}), and equal numbers do not make "
                "it one number: two lanes that both count 3 are 6. Return a 0-d tensor, which becomes a vector with one "
                f'value per shard, or use parallel(model, devices, reduce="sum"), or {SAME}'
            )
        if any(isinstance(part, torch.Tensor) and part.ndim for part in column):
            refuse(f"the shapes {shapes_of(column)} have no dim in common. {CURE}")
        if isinstance(declared.reduce, (list, tuple, Mapping)):
            kind = type(declared.reduce).__name__
            refuse(f"reduce declares a {kind} here, and the lanes returned a {type(column[0]).__name__}")
        if self._may_be_squeezed(column, declared):
            refuse(
                "each lane had one row and returned a 0-d tensor, which is either a number or that row without its dim. "
                f"Keep the dim in the model (squeeze(1) instead of squeeze()). {CURE}"
            )
        return reduce_numbers([_on(part, self.device) for part in column], self.rows or [], declared.reduce)

    def _may_be_squeezed(self, column: Sequence[Any], declared: Declared) -> bool:
        """True if 0-d tensors may be the one row of each shard, squeezed."""
        may_be_wrong = self.lanes > 1 and not self.rules.as_torch and declared.reduce in ("mean", "sum")
        return may_be_wrong and max(self.rows or [0]) == 1 and isinstance(column[0], torch.Tensor)

    def _check_proof(self) -> None:
        """Refuse an undeclared output of shards of equal sizes, where each new size would be compiled."""
        if self.rows is not None and len(set(self.rows)) == 1 < self.lanes:
            refuse(f"all lanes had {self.rows[0]} rows, which does not show whether this output follows the rows. {CURE}")

    def _original(self, parts: Sequence[Any]) -> Any:
        """Return the one value that all lanes returned, or returned their copies of: a parameter, or an uncut argument.

        Another tensor that all lanes returned is not one value: each lane may have written its rows into it.
        """
        last = parts[-1]
        is_one = all(part is last for part in parts)
        if self.originals is None:  # the arguments of the lanes are not known
            return last if is_one and self.lanes > 1 else None
        originals = self.originals()
        same = originals[-1](last)
        if same is None:
            return None
        finds = zip(parts, originals, strict=True)
        return same if all(part is same or find(part) is same for part, find in finds) else None

    def _what_lanes_did(self, column: Sequence[Any]) -> str:
        return f"{self._lanes_had()} returned shapes {shapes_of(column)}"

    def _lanes_had(self) -> str:
        return "the lanes" if self.rows is None else f"the lanes had {self._list_rows()} rows and"

    def _list_rows(self) -> str:
        return list_values(self.rows or [])


def _refuse_reduced_and_equal(declared: Declared) -> None:
    """Refuse to reduce a value that is also declared to be the same in every lane."""
    if declared.out_dim is None and declared.reduce is not None:
        refuse(
            f"out_dims=None says that every lane returned the same value, and reduce={declared.reduce!r} puts different "
            "values together. Keep one of them: a dict or a tuple in reduce leaves values out, and out_dims=0 leaves "
            "numbers to reduce"
        )


def _refuse_unclear_lists(column: Sequence[Any], sizes: Sequence[int] | None, around: Flat | None) -> None:
    """Refuse lists that may have one item per row: torch.nn.DataParallel joins all lists item by item.

    The items of other lists are tensors with the rows, such as the heads of a model, or 0-d tensors, such as losses.
    `sizes` are the rows of the lanes. `around` is the flattened output of the first lane that holds the list.
    """
    if all(leaf is None for value in column for leaf in flatten(value)[0]):
        return  # also empty lists
    if type(column[0]) is tuple and any(map(_holds_tensors, column)):
        return  # a structure
    found = [[leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)] for value in column]
    counts = [{leaf.shape[0] for leaf in tensors if leaf.ndim} for tensors in found]
    has_rows = any(map(_holds_tensors, column)) and all(len(each) <= 1 for each in counts)
    if sizes is not None:
        has_rows = has_rows and all(each <= {rows} for each, rows in zip(counts, sizes, strict=True))
        if has_rows and list(map(len, column)) == list(sizes):
            item = next(item for value in column for item in value if item is not None)
            has_few_dims = any(leaf.ndim < 2 for tensors in found for leaf in tensors)
            beside = (
                {} if around is None else {path[-1]: leaf for path, leaf in zip(around[1].paths(), around[0], strict=True)}
            )
            has_rows = are_auxiliary(column[0], beside) or not (has_few_dims or isinstance(item, Mapping))
    if not has_rows:
        refuse(
            f"the lanes returned a {type(column[0]).__name__} of {list_values(list(map(len, column)))} items: one item per "
            "row, or parts of every row. Use parallel(model, devices): its unequal shards show the difference, and "
            'out_dims="items" declares one item per row. Return a tuple of tensors to join its items'
        )


def are_auxiliary(items: Sequence[Any], beside: Mapping[Any, Any]) -> bool:
    """True if dicts in a list repeat tensors next to the list: the same keys and shapes, as the `aux_outputs` of DETR."""
    return all(
        isinstance(item, Mapping) and item and all(_has_shape_of(beside.get(key), value) for key, value in item.items())
        for item in items
    )


def _has_shape_of(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape


def _holds_tensors(value: Any) -> bool:
    """True if a value holds a tensor, or a value with rules of its own."""
    return any(isinstance(leaf, (torch.Tensor, WholeLeaf)) for leaf in flatten(value)[0])


def _is_sequence(node: Any) -> bool:
    return type(node) in SEQUENCES


def _holds_texts(value: Any) -> bool:
    """True for a sequence of texts or other values, of which lanes may have any number: without arrays and numbers."""
    leaves = [leaf for item in value for leaf in flatten(item, _is_sequence)[0]]
    if any(
        _is_sequence(leaf) or isinstance(leaf, WholeLeaf) or hasattr(leaf, "shape") or is_number(leaf) for leaf in leaves
    ):
        return False
    return any(leaf is not None for leaf in leaves)


def _move(output: Any, device: torch.device | None) -> Any:
    """A whole value on a device."""
    if device is None:
        return output
    if isinstance(output, torch.Tensor):
        return _on(output, device)
    leaves, spec = flatten(output)
    return unflatten(
        spec, [place_leaf(leaf, device) if isinstance(leaf, WholeLeaf) else _on(leaf, device) for leaf in leaves]
    )


def _on(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, torch.Tensor) else value


def _refuse_structures(specs: Sequence[TreeSpec]) -> NoReturn:
    found = mismatch(specs, "")
    assert found is not None, "specs that differ have a place where they differ"
    place, shapes = found
    # Shapes that read alike differ in the order of keys, a default factory, or two classes of one name.
    lane = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), 1)
    refusal = Refusal(f"lane 0 returned {shapes[0]}, lane {lane} {shapes[lane]}. {JOIN_LIST}")
    refusal.steps.append(place)
    raise refusal


def _is_array(value: Any) -> bool:
    """True for an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _equal_values(one: Any, other: Any) -> bool:
    """Equality by value. Two NaNs are equal; values that cannot be compared are not."""
    if one is other:
        return True
    try:
        if isinstance(one, torch.Tensor):
            return _equal_tensors(one.detach(), other.detach())
        if _is_array(one):
            numpy = sys.modules["numpy"]
            return one.dtype == other.dtype and bool(numpy.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
            return True
        return type(one) is type(other) and bool(one == other)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    if torch.equal(one, other):
        return True
    is_inexact = one.is_floating_point() or one.is_complex()
    return is_inexact and bool(((one == other) | (one.isnan() & other.isnan())).all())
