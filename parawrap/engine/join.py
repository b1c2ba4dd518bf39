"""From the outputs of the lanes to the output of the call.

`out_dims` declares where the rows of an output lie. Without it, an output follows the rows if its
size on the row dim is the row count of its shard in every lane. The row counts of shards differ
then, so a size that does not come from the rows cannot match. Any other output is returned once if
it is the same parameter, buffer, or uncut argument in every lane, and refused otherwise: equal
values alone prove nothing, since two lanes that both count 3 are 6.

The joined output is handed over: its containers are new, and nothing here keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from parawrap.engine.join_errors import explain_refusal
from parawrap.engine.join_rules import JoinRules, Refusal
from parawrap.engine.joiner import Joiner, Originals, move
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
    """Return one output, on `device` (None: where the lanes left it), from the outputs of shards.

    `sizes` are the row counts of the shards. With the rules of torch, it may be None: unknown. One
    output of an uncut call is joined by the same rules.

    Raises:
        GatherError: If a place in the output cannot be joined. The message names the place.
    """
    # A call concatenates outputs of one tensor itself, so they come here only to be refused.
    are_structures = len(outputs) > 1 and type(outputs[0]) is not torch.Tensor
    if are_structures and device is None and sizes is not None:
        joined = _join_rows(outputs, tuple(sizes), rules)
        if joined is not None:
            return joined
    # There is nothing to put together: values are handed over as the lanes left them.
    stays_list = rules.join == "list"
    if stays_list or (len(outputs) == 1 and rules.keep_single):
        if originals is not None:
            find_of_lanes = originals()
            outputs = list(map(_with_originals, outputs, find_of_lanes))
        moved = [move(output, device) for output in outputs]
        return moved if stays_list else moved[0]
    joiner = Joiner(outputs, sizes, rules, device, originals)
    try:
        return joiner.join_values(outputs, rules.declared)
    except Refusal as refusal:
        raise GatherError(explain_refusal(joiner, refusal)) from refusal.__cause__


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
        if any(map(_attributes_of, column)):  # which torch.cat would drop
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
    """Return an output with the caller's tensors in the places of the copies that a lane has.

    `find` returns the caller's tensor of a copy, or None.
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
