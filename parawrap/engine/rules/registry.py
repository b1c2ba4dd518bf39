"""The rules of a value that is cut and joined as a whole: registered by the user, built in, or those of plain sequences."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.nn.utils import rnn

from parawrap._public import public
from parawrap.backends import record_use
from parawrap.engine.rules.geometric_graphs import graph_rules
from parawrap.engine.rules.splitter import Splitter, refuse_split, refuse_to_join, spans
from parawrap.engine.rules.tensordicts import tensordict_rules
from parawrap.engine.rules.transformers_caches import cache_rules
from parawrap.tree import WholeLeaf, keep_whole, keep_whole_if, tensors_in

_splitters: dict[type, Splitter] = {}


@public
def register_split(
    cls: type,
    *,
    split: Callable[[Any, Sequence[int]], Sequence[Any]],
    join: Callable[[Sequence[Any]], Any],
    rows: Callable[[Any], int] = len,
) -> None:
    """Cut and join the instances of your own class, wherever they lie in a call or an output.

    Args:
        cls: The class. Its instances are no longer opened, even if they are containers.
        split: ``split(value, sizes)`` returns one part per size, with that many rows, in order.
        join: ``join(parts)`` puts parts together, in order. Outputs of the class are joined by it.
        rows: ``rows(value)`` counts the rows; `len` by default.

    Raises:
        ShardError: At a call, if `split` returns a different number of parts than it was given sizes.

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
        ...     y, words = p(torch.zeros(3), Words(["a", "b", "c"]))
        >>> y.tolist(), words.items
        ([1.0, 1.0, 1.0], ['a', 'b', 'c'])
    """
    keep_whole(cls)
    _splitters[cls] = Splitter(split, join, rows)


def registration_of(cls: type) -> str:
    """Return the call that registers a class, for an error. A class without a length needs a function that counts rows."""
    if cls is torch.Tensor:
        return "a class of your own with register_split"
    rows = "" if hasattr(cls, "__len__") else ", rows=..."
    return f"register_split({cls.__name__}, split=..., join=...{rows})"


def splitter_of(value: object) -> Splitter:
    """Return the rules of a value that is kept whole: the registered rules, or the rules of plain sequences."""
    return _splitters.get(type(value), _SEQUENCE)


def place_leaf(leaf: WholeLeaf, device: torch.device) -> Any:
    """Return the value of a leaf that is kept whole, with its tensors on `device`."""
    value, rules = leaf.value, splitter_of(leaf.value)
    if all(tensor.device == device for tensor in tensors_in(value)):
        return value
    record_use([leaf])
    if rules.to is not None:
        return rules.to(value, device)
    return value.to(device) if hasattr(value, "to") else value


def _has_builtin_rules(cls: type) -> bool:
    rules = cache_rules(cls) or tensordict_rules(cls) or graph_rules(cls)
    if rules is not None:
        _splitters[cls] = rules
    return rules is not None


def _split_sequence(value: Any, sizes: Sequence[int]) -> list[Any]:
    if isinstance(value, deque):
        return [deque(itertools.islice(value, start, end)) for start, end in spans(sizes)]
    return [value[start:end] for start, end in spans(sizes)]


def _sequence_to(value: Any, device: torch.device) -> Any:
    return type(value)(item.to(device) if isinstance(item, torch.Tensor) else item for item in value)


_SEQUENCE = Splitter(_split_sequence, lambda parts: reduce(operator.add, parts), len, _sequence_to)
_STEPS = "its rows lie in the order of time steps"
keep_whole(rnn.PackedSequence)
_splitters[rnn.PackedSequence] = Splitter(
    lambda value, _sizes: refuse_split(value, f"{_STEPS}. Pass padded rows and their lengths, and pack them in forward"),
    lambda parts: refuse_to_join(parts[0], f"{_STEPS}. Return rnn.pad_packed_sequence(value, batch_first=True)"),
    lambda value: int(value.batch_sizes[0]),
)
keep_whole_if(_has_builtin_rules)
