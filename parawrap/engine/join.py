"""From the outputs of the lanes to the output of the call.

`out_dims` declares where the rows of an output lie. Without it, an output follows the rows if its size on the row dim is
the row count of its shard in every lane. The row counts of shards differ then, so a size that does not come from the rows
cannot match. Any other output is returned once if it is the same parameter, buffer, or uncut argument in every lane, and
refused otherwise: equal values alone prove nothing, since two lanes that both count 3 are 6.
"""

from __future__ import annotations

import sys
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
    is_tree,
    refuse,
    refuse_tree,
)
from parawrap.engine.rules.registry import place_leaf, registration_of, splitter_of
from parawrap.errors import GatherError
from parawrap.tree import UNDECLARED, TreeSpec, WholeLeaf, address, flatten, list_attributes, tensors_in, unflatten

Flat = tuple[list[Any], TreeSpec]
"""The leaves of an output, and its structure."""

Originals = Callable[[], Sequence[Callable[[Any], Any]]]
"""Returns one function per shard: from a value of that lane to the caller's value that it is a copy of, or None."""

_TENSOR = frozenset({torch.Tensor})
_dtype_of = attrgetter("dtype")
_attributes_of = attrgetter("__dict__")
_BY_VALUE = (range, slice, torch.Size, torch.device)
"""Values that lanes make anew, and that say nothing about rows unless they differ."""

_PROVES_NOTHING = "Equal values do not make it one value: two lanes that count 3 are 6"


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
    if device is None and len(outputs) > 1 and sizes is not None and type(outputs[0]) is not torch.Tensor:
        joined = _join_rows(outputs, tuple(sizes), rules)
        if joined is not None:
            return joined
    if rules.join == "list" or (len(outputs) == 1 and rules.keep_single):
        if originals is not None:
            outputs = list(map(with_originals, outputs, originals()))
        moved = [_move(output, device) for output in outputs]
        return moved if rules.join == "list" else moved[0]
    joining = _Join(len(outputs), sizes, rules, device, originals)
    try:
        return joining.join_values(outputs, rules.declared)
    except Refusal as refusal:
        options = ". out_dims and join are options of parallel(model, devices)" if rules.as_torch else ""
        msg = f"{address('output', joining.path)} cannot be joined: {refusal}{options}"
        raise GatherError(msg) from refusal.__cause__


def _join_rows(outputs: Sequence[Any], sizes: tuple[int, ...], rules: JoinRules) -> Any:
    """Return the joined output if it is a structure of tensors with the rows alone; else None."""
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
        try:
            is_plain = _TENSOR.issuperset(map(type, column)) and not any(map(_attributes_of, column))
            has_rows = is_plain and tuple([part.shape[dim] for part in column]) == sizes
            if not has_rows or len(set(map(_dtype_of, column))) > 1 or column[0].is_quantized:
                return None
            joined.append(torch.cat(column, dim))
        except (IndexError, RuntimeError):  # without that dim, nested, or of other shapes
            return None
    return unflatten(spec, joined)


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
    """The joining of one call. A column holds the values of all lanes at one place, which `path` leads to."""

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
        self.path: list[Any] = []

    def join_values(self, column: Sequence[Any], declared: Declared) -> Any:
        """Return the one value of all lanes, of any structure."""
        if _TENSOR.issuperset(map(type, column)):
            return self._join_leaves(column, declared)
        flat = [flatten(value, _is_sequence) for value in column]
        spec = flat[0][1]
        for lane, (_, other) in enumerate(flat):
            if other != spec:
                refuse(f"lane 0 returned {spec}, lane {lane} {other}. {JOIN_LIST}")
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        joined = []
        for path, parts, each in zip(spec.paths(), columns, declared.below(spec), strict=True):
            self.path += path
            joined.append(self._join_leaves(parts, each, flat[0]))
            del self.path[len(self.path) - len(path) :]
        return unflatten(spec, joined)

    def _join_leaves(self, column: Sequence[Any], declared: Declared, around: Flat | None = None) -> Any:
        first = column[0]
        refuse_tree("out_dims", declared.out_dim, type(first))
        are_tensors = all(isinstance(value, torch.Tensor) for value in column)
        if not are_tensors and len(set(map(type, column))) > 1 and not all(map(is_number, column)):
            kinds = " and ".join(sorted({type(value).__name__ for value in column}))
            refuse(f"the lanes returned values of type {kinds}. {CURE}")
        if first is None:
            return None
        if type(first) in SEQUENCES:
            return self._join_sequences(column, declared, around)
        if isinstance(first, WholeLeaf):
            return self._join_registered(column, declared)
        if isinstance(first, torch.Tensor) and first.is_nested and first.layout is torch.strided:
            refuse(f"a nested tensor has no dim to join on. {JOIN_LIST}")
        if declared.out_dim is None:
            if declared.reduce is not None and (declared.names_reduce or is_number(first)):
                refuse(
                    f"out_dims=None says that every lane returned the same value, and reduce={declared.reduce!r} puts "
                    "different values together. Keep one of them: a dict or a tuple in reduce leaves values out, and "
                    "out_dims=0 leaves numbers to reduce"
                )
            return self._take_equal(column)
        if are_tensors or is_array(first):
            return self._join_arrays(column, declared)
        return self._join_numbers(column, declared) if is_number(first) else self._take_one(column)

    # Tensors and arrays

    def _join_arrays(self, column: Sequence[Any], declared: Declared) -> Any:
        """Join tensors, or numpy arrays."""
        first = column[0]
        if first.ndim and declared.names_reduce and declared.reduce is not None:
            return self._reduce_arrays(column, declared)
        dim = declared.out_dim if isinstance(declared.out_dim, int) else self.rules.dim
        takes_any_rows = declared.out_dim == "ragged" or self.lanes == 1
        if first.ndim and not takes_any_rows and self._follows_rows(column, declared, dim):
            return self._concatenate(column, dim, declared)
        original = self._original(column)
        if original is not None:
            return _move(original, self.device)
        if not first.ndim:
            return self._join_numbers(column, declared)
        if takes_any_rows:
            return self._concatenate(column, dim, declared)
        if declared.reduce is None or self.path:
            refuse(f"{self._say(column)}, without the rows on dim {dim}. {_PROVES_NOTHING}. {CURE}")
        return self._reduce_arrays(column, declared)

    def _follows_rows(self, column: Sequence[Any], declared: Declared, dim: int) -> bool:
        """True if tensors or arrays have the rows of their shards on `dim`, or no rows at all."""
        try:
            sizes = [part.shape[dim] for part in column]
        except IndexError:  # a part without that dim
            sizes = []
        if declared.out_dim is UNDECLARED:
            self._check_proof()
            return sizes == self.rows or set(sizes) == {0}  # joining no rows adds nothing
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
                numpy = sys.modules["numpy"]
                library = numpy.ma if isinstance(first, numpy.ma.MaskedArray) else numpy  # which keeps the masks
                return library.concatenate(parts, axis=dim)
            if first.is_quantized:
                refuse("the lanes returned quantized tensors, which may have different scales. Return tensor.dequantize()")
            if (names := list_attributes(first)) and not self.rules.as_torch:
                refuse(
                    f"the lanes returned tensors with attributes of their own ({', '.join(names)}), which a joined tensor "
                    "loses. Return the attributes as outputs of their own, or use "
                    f"{registration_of(type(first))} to join them too"
                )
            if len(set(map(_dtype_of, parts))) > 1:  # torch.cat would promote them
                refuse(f"the lanes returned tensors of {' and '.join(sorted({str(part.dtype) for part in parts}))}. {CURE}")
            if self.rules.join == "pad" and not are_alike(parts, dim) and len({part.ndim for part in parts}) == 1:
                parts = pad(parts, dim, self._choose_padding(first.dtype, declared.pad_value))
            if device is not None and are_of_one_form(parts, dim, device):
                return write_into_one(parts, dim, device)
            return torch.cat([_move(part, device) for part in parts], dim)
        except (IndexError, RuntimeError, ValueError) as error:
            if are_alike(parts, dim):
                raise
            msg = f'the shapes {shapes_of(parts)} differ beyond dim {dim}. join="pad" pads them to the longest. {CURE}'
            raise Refusal(msg) from error

    def _choose_padding(self, dtype: torch.dtype, value: Any) -> Any:
        """Return the value to pad with. Without one from the user, only one tensor of floating-point numbers is padded."""
        refuse_tree("pad_value", value, torch.Tensor)
        is_float = dtype.is_floating_point or dtype.is_complex
        if value is not None:
            if not (is_float or _fits(value, dtype)):
                refuse(f"pad_value={value!r} is not a value of {dtype}. Give this output another one")
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
        refuse_tree("reduce", declared.reduce, type(column[0]))
        if len({part.shape for part in column}) > 1:
            refuse(f"{self._say(column)}, which reduce cannot put together. Leave this entry out of reduce")
        return reduce_numbers([_move(part, self.device) for part in column], self.rows or [], declared.reduce)

    def _join_numbers(self, column: Sequence[Any], declared: Declared) -> Any:
        refuse_tree("reduce", declared.reduce, type(column[0]))
        is_tensor = isinstance(column[0], torch.Tensor)
        if self.rules.as_torch and not all(isinstance(part, torch.Tensor) for part in column):
            if self.lanes == 1:
                return column[0]
            refuse(
                f"{self._say(column)}. {_PROVES_NOTHING}. Return a 0-d tensor, which becomes a vector with one value per "
                f'shard, or use parallel(model, devices, reduce="sum"), or {SAME}'
            )
        if any(getattr(part, "ndim", 0) for part in column):
            refuse(f"the shapes {shapes_of(column)} have no dim in common. {CURE}")
        if is_tensor and self.lanes > 1 and max(self.rows or [0]) == 1 and declared.reduce in ("mean", "sum"):
            refuse(
                "each lane had one row and returned a 0-d tensor, which is either a number or that row without its dim. "
                f"Keep the dim in the model (squeeze(1) instead of squeeze()). {CURE}"
            )
        return reduce_numbers([_move(part, self.device) for part in column], self.rows or [], declared.reduce)

    # Lists

    def _join_sequences(self, column: Sequence[Any], declared: Declared, around: Flat | None) -> Any:
        kind, lengths = type(column[0]), list(map(len, column))
        if self._are_items(column, lengths, declared, around):
            return kind([_move(item, self.device) for value in column for item in value])
        if len(set(lengths)) > 1:
            refuse(f"{self._say(lengths)} items. {CURE}")
        if declared.out_dim is not None and not is_tree(declared.out_dim) and any(map(_holds_texts, column)):
            return self._take_one(column)
        joined = []
        for index, each in enumerate(declared.parts(range(lengths[0]))):
            self.path.append(index)
            joined.append(self.join_values([value[index] for value in column], each))
            self.path.pop()
        return kind(joined)

    def _are_items(self, column: Sequence[Any], lengths: list[int], declared: Declared, around: Flat | None) -> bool:
        """True if lists have one item per row, or rows in any number; False if their items are joined one by one."""
        out_dim = declared.out_dim
        if is_tree(out_dim) or out_dim is None or self.lanes == 1:
            return False
        if self.rules.as_torch:
            self._refuse_unclear_lists(column, lengths, around)
            return False  # torch joins lists item by item
        if isinstance(out_dim, int) and any(map(_holds_tensors, column)):
            return False  # a list of tensors, each with its rows on that dim
        if out_dim == "ragged":
            return type(column[0]) is not tuple or not any(map(_has_shape, flatten(column)[0]))
        if out_dim is UNDECLARED:
            if any(lengths):
                self._check_proof()
            return lengths == self.rows
        if lengths != self.rows and any(lengths):
            refuse(f"{self._say(lengths)} items. {CURE}")
        return True

    def _refuse_unclear_lists(self, column: Sequence[Any], lengths: list[int], around: Flat | None) -> None:
        """Refuse lists that may have one item per row: torch.nn.DataParallel joins all lists item by item.

        The items of other lists are tensors with the rows, such as the heads of a model, or 0-d tensors, such as losses.
        `around` is the flattened output of the first lane that holds the list.
        """
        leaves = [flatten(value)[0] for value in column]
        found = [[leaf for leaf in each if isinstance(leaf, torch.Tensor)] for each in leaves]
        holds_tensors, dim = any(map(_holds_tensors, column)), self.rules.dim
        if all(leaf is None for each in leaves for leaf in each) or (type(column[0]) is tuple and holds_tensors):
            return  # nothing, or a structure
        counts = [{leaf.size(dim) for leaf in each if -leaf.ndim <= dim < leaf.ndim} for each in found]
        has_rows = holds_tensors and all(len(each) <= 1 for each in counts)
        if self.rows is not None:
            has_rows = has_rows and all(each <= {rows} for each, rows in zip(counts, self.rows, strict=True))
            if has_rows and lengths == self.rows:
                item = next(item for value in column for item in value if item is not None)
                has_few_dims = any(leaf.ndim < 2 for each in found for leaf in each)
                beside = zip(around[1].paths(), around[0], strict=True) if around else ()
                has_rows = are_auxiliary(column[0], {path[-1]: leaf for path, leaf in beside if path}) or not (
                    has_few_dims or isinstance(item, Mapping)
                )
        if not has_rows:
            refuse(
                f"the lanes returned a {type(column[0]).__name__} of {list_values(lengths)} items: one item per row, or "
                "parts of every row. Use parallel(model, devices): its unequal shards show the difference, and "
                'out_dims="items" declares one item per row. Return a tuple of tensors to join its items'
            )

    # Other values

    def _join_registered(self, column: Sequence[WholeLeaf], declared: Declared) -> Any:
        """Join values with registered rules. The rules count their rows."""
        values = [leaf.value for leaf in column]
        original = self._original(values)
        if original is not None:
            return original
        moved = [leaf.value if self.device is None else place_leaf(leaf, self.device) for leaf in column]
        if declared.out_dim is None:
            self._check_equal(column)
            return moved[0]
        if self.lanes == 1:
            return moved[0]
        rules = splitter_of(values[0])
        found = [rules.rows(value) for value in values]
        if any(found) and found != self.rows and declared.out_dim != "ragged":
            refuse(f"{self._say(found)} rows of a {type(values[0]).__name__}. {CURE}")
        try:
            return rules.join(moved)
        except GatherError as error:
            msg = f"{error}. {JOIN_LIST}"
            raise Refusal(msg) from error

    def _take_one(self, column: Sequence[Any]) -> Any:
        """Return the undeclared value that all lanes returned: one object, such as a constant.

        Two lanes that both return the text "1 positive" do not mean "1 positive". CPython has one object for each text of
        one character, and ``("a",) * 1`` is ``("a",)``, so a digit or a tuple of one item may be made by lanes.
        """
        first = column[0]
        may_be_made = isinstance(first, (str, bytes)) and len(first) == 1 and first.isdigit()
        may_be_made = may_be_made or (isinstance(first, tuple) and len(first) == 1)
        is_one = all(value is first for value in column) and (not may_be_made or self._original(column) is first)
        if self.lanes > 1 and not is_one and not isinstance(first, _BY_VALUE):
            is_plain = isinstance(first, (str, bytes)) or _is_sequence(first)
            rules = "" if is_plain else f". {registration_of(type(first))} says how to join them"
            refuse(f"{self._say(column)}. {_PROVES_NOTHING}, unless it is one object, such as a constant. {CURE}{rules}")
        return self._take_equal(column)

    def _take_equal(self, column: Sequence[Any]) -> Any:
        """Return the value that all lanes returned, compared by value."""
        original = self._original(column)
        if original is None:
            self._check_equal(column)
            original = column[0]
        return _move(original, self.device)

    def _check_equal(self, column: Sequence[Any]) -> None:
        if not all(_are_equal(column[0], value) for value in column[1:]):
            values = [getattr(value, "value", value) for value in column]
            refuse(f"{self._say(values)}, which differ. {CURE}")

    def _check_proof(self) -> None:
        """Refuse an undeclared output of shards of equal sizes, as of NeuronCores."""
        if self.rows is not None and len(set(self.rows)) == 1 < self.lanes:
            refuse(f"all lanes had {self.rows[0]} rows, which does not show whether this output follows the rows. {CURE}")

    def _original(self, parts: Sequence[Any]) -> Any:
        """Return the one value that all lanes returned, or returned their copies of: a parameter, or an uncut argument.

        Another tensor that all lanes returned is not one value: each lane may have written its rows into it.
        """
        last = parts[-1]
        if self.originals is None:  # the arguments of the lanes are not known
            return last if self.lanes > 1 and all(part is last for part in parts) else None
        originals = self.originals()
        same = originals[-1](last)
        if same is None:
            return None
        finds = zip(parts, originals, strict=True)
        return same if all(part is same or find(part) is same for part, find in finds) else None

    def _say(self, column: Sequence[Any]) -> str:
        lanes = "the lanes" if self.rows is None else f"the lanes had {list_values(self.rows)} rows and"
        shown = f"shapes {shapes_of(column)}" if hasattr(column[0], "shape") else list_values(column)
        return f"{lanes} returned {shown}"


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


def _has_shape(value: Any) -> bool:
    """True for tensors, also nested ones, whose `shape` raises; and for arrays."""
    return isinstance(value, torch.Tensor) or hasattr(value, "shape")


def _holds_texts(value: Any) -> bool:
    """True for texts or other values, of which lanes may have any number: without arrays, numbers, and sequences."""
    leaves = [leaf for item in value for leaf in flatten(item, _is_sequence)[0]]
    is_plain = not any(isinstance(leaf, (*SEQUENCES, WholeLeaf)) or _has_shape(leaf) or is_number(leaf) for leaf in leaves)
    return is_plain and any(leaf is not None for leaf in leaves)


def _move(value: Any, device: torch.device | None) -> Any:
    """Return a value on a device."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    leaves, spec = flatten(value)
    moved = [place_leaf(leaf, device) if isinstance(leaf, WholeLeaf) else leaf for leaf in leaves]
    return unflatten(spec, [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in moved])


def _fits(value: Any, dtype: torch.dtype) -> bool:
    """True if a dtype has this value."""
    try:
        return bool(torch.full((), value, dtype=dtype).item() == value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return False


def is_array(value: Any) -> bool:
    """True for an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _are_equal(one: Any, other: Any) -> bool:
    """Equality by value; for registered classes, of their tensors. Two NaNs are equal; what cannot be compared is not."""
    try:
        if isinstance(one, WholeLeaf):
            tensors, others = [*tensors_in(one.value)], [*tensors_in(other.value)]
            if not tensors:
                return bool(one.value == other.value)
            return len(tensors) == len(others) and all(map(_are_equal, tensors, others))
        if isinstance(one, torch.Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            other = other.to(one.device)
            return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        if is_array(one):  # by value: the bytes of objects and of long texts are addresses
            array_equal, has_nan = sys.modules["numpy"].array_equal, one.dtype.kind in "fc"
            return one.dtype == other.dtype and bool(array_equal(one, other, equal_nan=has_nan))
        return one is other or (type(one) is type(other) and bool(one == other or (one != one and other != other)))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
