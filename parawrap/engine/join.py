"""`join`: from the outputs of the lanes to the output of the call.

Structures of tensors with the rows are concatenated here. `Joiner` (`join_by_place.py`) joins any
other output. If it refuses a place, `explain_refusal` (`join_errors.py`) writes the error.

`out_dims` declares where the rows of an output lie. Without it, an output follows the rows if its
size on the row dim is the row count of its shard in every lane. The row counts of shards differ
then, so a size that does not come from the rows cannot match. Any other output is returned once if
it is the same parameter, buffer, or uncut argument in every lane, and refused otherwise: equal
values alone prove nothing. If two lanes count 3 rows each, the plain call counts 6.

The joined output is handed over: its containers are new, and nothing here keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from parawrap.engine.join_by_place import Joiner, Originals, move
from parawrap.engine.join_errors import explain_refusal
from parawrap.engine.join_rules import JoinRules, Refusal
from parawrap.errors import GatherError
from parawrap.tree import TENSOR, flatten, unflatten

_dtype_of = attrgetter("dtype")
_attributes_of = attrgetter("__dict__")


def join(
    outputs: Sequence[Any],
    sizes: Sequence[int] | None,
    rules: JoinRules,
    device: torch.device | None = None,
    originals: Originals | None = None,
) -> Any:
    """Return one output from the outputs of shards, or from the one output of an uncut call.

    Args:
        outputs: The output of each shard.
        sizes: The row counts of the shards; None if the caller, such as `gather`, does not know
            them. Then the rules are those of torch.
        rules: The options for joining.
        device: The device of the joined output; None leaves tensors where the lanes left them.
        originals: Returns a function per shard, from a value of the lane to the caller's value that
            it is a copy of, or None; None in place of all if the copies are not known.

    Raises:
        GatherError: If a place in the output cannot be joined. The message names the place.
    """
    # A call concatenates outputs that are one tensor itself. Others of them need a `Joiner`
    are_structures = len(outputs) > 1 and type(outputs[0]) is not torch.Tensor
    if are_structures and device is None and sizes is not None:
        joined = _join_rows(outputs, tuple(sizes), rules)
        if joined is not None:
            return joined
    # Without anything to put together, outputs are returned as the lanes left them
    returns_list = rules.join == "list"
    keeps_single = len(outputs) == 1 and rules.keep_single
    if returns_list or keeps_single:
        if originals is not None:
            outputs = list(map(_with_originals, outputs, originals()))
        moved = [move(output, device) for output in outputs]
        return moved if returns_list else moved[0]
    joiner = Joiner(outputs, sizes, rules, device, originals)
    try:
        return joiner.join_values(outputs, rules.declared)
    except Refusal as refusal:
        raise GatherError(explain_refusal(joiner, refusal)) from refusal.__cause__


def _join_rows(outputs: Sequence[Any], sizes: tuple[int, ...], rules: JoinRules) -> Any:
    """Return the joined output if all its leaves are tensors with the rows, as usual; else None.

    Such an output needs no path, no originals, and no look at single values.
    """
    # The larger sizes come first, so these two are equal only if all are: that proves nothing
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
        if any(map(_attributes_of, column)):  # torch.cat drops them
            return None
        if len(set(map(_dtype_of, column))) > 1:  # torch.cat promotes them
            return None
        if column[0].is_quantized:  # torch.cat takes the scale of the first part for all
            return None
        try:
            # From a list, which is faster than a generator: this runs for each output of each call
            if tuple([part.shape[dim] for part in column]) != sizes:
                return None
            joined.append(torch.cat(column, dim))
        except (IndexError, RuntimeError):  # no such dim, a nested tensor, or different shapes
            return None
    return unflatten(spec, joined)


def _with_originals(output: Any, find: Callable[[Any], Any]) -> Any:
    """Return the output of a lane with the caller's tensors in the places of the lane's copies.

    ``find(copy)`` returns the caller's tensor, and None for any other tensor.
    """
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
