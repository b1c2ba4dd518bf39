"""Find the rules of a value that is cut and joined as a whole, and apply them.

The user has registered the rules, or they are built in, or they are those of plain sequences.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils import rnn

from parawrap._public import public
from parawrap.backends import record_use
from parawrap.engine.rules.geometric_graphs import graph_rules
from parawrap.engine.rules.object_state import list_state, make_sequence, mark_version, put_state
from parawrap.engine.rules.splitter import Splitter, refuse_split, refuse_to_join, spans
from parawrap.engine.rules.tensordicts import tensordict_rules
from parawrap.engine.rules.transformers_caches import cache_rules
from parawrap.errors import GatherError, ShardError
from parawrap.tree import WholeLeaf, keep_whole, keep_whole_if, tensors_in

# Classes that the user registered, and classes with built-in rules that a call has met. Entries are
# never removed, and each is added in one step, so no lock is needed
_splitters: dict[type, Splitter] = {}
_PLAIN_CONTAINERS = frozenset({dict, list, tuple, set, deque, torch.Tensor})


@public
def register_split(
    cls: type,
    *,
    split: Callable[[Any, Sequence[int]], Sequence[Any]],
    join: Callable[[Sequence[Any]], Any],
    rows: Callable[[Any], int] = len,
) -> None:
    """Cut and join the instances of your own class, wherever they lie in a call or an output.

    The rules hold for the whole process, from now on.

    If forward changes an argument of the class, `join` puts the changed parts together, and the
    argument gets the items and attributes of the result.

    Args:
        cls: The class. Its instances are no longer opened, even if they are containers.
        split: ``split(value, sizes)`` returns one part per size, with that many rows, in order.
        join: ``join(parts)`` puts parts together, in order. Outputs of the class are joined by it.
        rows: ``rows(value)`` counts the rows; `len` by default.

    Raises:
        ShardError: At a call, if `split` returns a different number of parts than it was given
            sizes.

    Example:
        >>> import torch
        >>> from parawrap import parallel, register_split
        >>> class Words:
        ...     def __init__(self, items): self.items = list(items)
        ...     def __len__(self): return len(self.items)
        >>> def split(words, sizes):
        ...     items = iter(words.items)
        ...     return [Words(next(items) for _ in range(size)) for size in sizes]
        >>> def join(parts):
        ...     return Words(word for part in parts for word in part.items)
        >>> register_split(Words, split=split, join=join)
        >>> with parallel(lambda x, words: (x + 1, words), ["cpu", "cpu"]) as p:
        ...     y, words = p(torch.zeros(5), Words(["a", "b", "c", "d", "e"]))
        >>> y.tolist(), words.items
        ([1.0, 1.0, 1.0, 1.0, 1.0], ['a', 'b', 'c', 'd', 'e'])
    """
    # First: another thread may meet the class as soon as it is kept whole
    _splitters[cls] = Splitter(split, join, rows)
    keep_whole(cls)


def registration_of(cls: type) -> str:
    """Return the call that registers a class, for an error."""
    if cls is torch.Tensor:
        return "a class of your own with register_split"
    # A class without a length needs a function that counts its rows.
    rows = "" if hasattr(cls, "__len__") else ", rows=..."
    return f"register_split({cls.__name__}, split=..., join=...{rows})"


def splitter_of(value: object) -> Splitter:
    """Return the rules of a value that is kept whole; without any, those of a plain sequence."""
    return _splitters.get(type(value), _SEQUENCE)


def place_leaf(leaf: WholeLeaf, device: torch.device) -> Any:
    """Return the value of a leaf that is kept whole, with its tensors on `device`.

    It is the value itself, or a copy that belongs to the caller of this function.
    """
    value, rules = leaf.value, splitter_of(leaf.value)
    devices = {tensor.device for tensor in tensors_in(value)}
    if devices == {device}:
        return value
    # A cache without tensors is copied: its layers create tensors on the device that they note
    if not devices and not rules.may_be_empty:
        return value
    # The copy may run on another stream than the work that made the tensors
    record_use([leaf])
    if rules.to is not None:
        return rules.to(value, device)
    return value.to(device) if hasattr(value, "to") else value


def join_parts(parts: Sequence[Any]) -> Any:
    """Return the parts that the lanes returned, joined by the rules of their class.

    Raises:
        GatherError: If they cannot be joined.
    """
    kinds = {type(part) for part in parts}
    if len(kinds) > 1:
        names = sorted(kind.__name__ for kind in kinds)
        refuse_to_join(parts[0], f"they are {' and '.join(names)}")
    try:
        return splitter_of(parts[0]).join(parts)
    except ShardError as error:  # a built-in rule does not know the layout of the parts
        raise GatherError(str(error)) from error


def count_rows(part: Any) -> int:
    """Return the rows of a part that a lane returned.

    Raises:
        GatherError: If they cannot be counted.
    """
    try:
        return splitter_of(part).rows(part)
    except ShardError as error:
        raise GatherError(str(error)) from error


def list_contents(value: Any) -> list[Any]:
    """Return what a value with rules holds: keys, entries, and marks of writes into its tensors.

    Compare two lists of one value by their length and by ``is``. They are the same if nothing was
    set, replaced, deleted, or written in place in between. Writes into inference tensors are not
    seen, except in caches, where such a tensor always counts as written.
    """
    rules = splitter_of(value)
    if rules.contents is not None:
        return rules.contents(value)
    return list_state(value, find_rules)


def update_argument(value: Any, joined: Any) -> None:
    """Put the state of the joined parts of an argument into the caller's object.

    The object stays the same one. Entries that `joined` lacks are removed. Tensors with equal
    values and without a graph stay, since joined tensors are new objects in any case. `value` is
    borrowed from the caller; `joined` is used up.

    Raises:
        GatherError: If the object cannot take the state. The message says to return it.
    """
    if joined is value:
        return
    rules = splitter_of(value)
    if rules.update is None:
        put_state(value, joined, find_rules)
    else:
        rules.update(value, joined)


def find_rules(value: object) -> Splitter | None:
    """Return the rules of a value inside another one; None if its class has none."""
    cls = type(value)
    # Most values are of these classes, which the rules of packages need not look at
    if cls in _PLAIN_CONTAINERS:
        return None
    if cls not in _splitters:
        _enter_builtin_rules(cls)
    return _splitters.get(cls)


def _enter_builtin_rules(cls: type) -> bool:
    """Enter the built-in rules of a class, if it has some, and return True; False if not."""
    rules = cache_rules(cls) or tensordict_rules(cls) or graph_rules(cls)
    # Two threads that meet the class at the same time store equal rules
    if rules is not None:
        _splitters[cls] = rules
    return rules is not None


# Plain sequences, which `in_dims` cuts by item

_SEQUENCES = (list, tuple, deque)


def _split_sequence(value: Any, sizes: Sequence[int]) -> list[Any]:
    parts: list[Any] = []
    for start, end in spans(sizes):
        if isinstance(value, deque):  # a deque has no slices
            parts.append(make_sequence(value, itertools.islice(value, start, end)))
        else:
            parts.append(value[start:end])  # the slice of a subclass may be a plain list
    return parts


def _join_sequences(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], _SEQUENCES):
        refuse_to_join(parts[0], "it is neither a list, a tuple, nor a deque")
    return make_sequence(parts[0], itertools.chain.from_iterable(parts))


def _update_sequence(value: Any, joined: Any) -> None:
    if isinstance(value, list) and type(joined) is list:  # as `_split_sequence` may have made it
        joined = make_sequence(value, joined)
    put_state(value, joined, find_rules)


def _sequence_to(value: Any, device: torch.device) -> Any:
    moved: list[Any] = []
    for item in value:
        is_tensor = isinstance(item, torch.Tensor)
        moved.append(item.to(device) if is_tensor else item)
    return make_sequence(value, moved)


def _list_items(value: Any) -> list[Any]:
    """Return the items, without what they hold, since the lanes have the caller's own items."""
    if type(value) not in _SEQUENCES:
        return list_state(value, find_rules)
    marks = [mark_version(item) for item in value if isinstance(item, torch.Tensor)]
    return [*value, *marks]


_SEQUENCE = Splitter(
    _split_sequence, _join_sequences, len, _sequence_to, _update_sequence, _list_items
)

# Packed sequences

_STEPS = "its rows lie in the order of time steps"


def _split_packed(value: Any, sizes: Sequence[int]) -> list[Any]:
    refuse_split(value, f"{_STEPS}. Pass padded rows and their lengths, and pack them in forward")


def _join_packed(parts: Sequence[Any]) -> Any:
    cure = "Return rnn.pad_packed_sequence(value, batch_first=True)"
    refuse_to_join(parts[0], f"{_STEPS}. {cure}")


def _packed_rows(value: Any) -> int:
    return int(value.batch_sizes[0])


keep_whole(rnn.PackedSequence)
_splitters[rnn.PackedSequence] = Splitter(_split_packed, _join_packed, _packed_rows)
# `flatten` then calls it for each new class, and so before a value of the class is a `WholeLeaf`
keep_whole_if(_enter_builtin_rules)
