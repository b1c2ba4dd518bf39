"""Cut and join the caches of transformers: a cache holds layers, a layer holds tensors, and some caches hold caches.

The package is not imported: its classes are recognized by the names of their bases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from parawrap.engine.rules.splitter import Splitter, refuse_split, refuse_to_join, same, spans

_CACHES = "transformers.cache_utils"
# The tensors of a cache that have rows, by attribute, and the dim that the rows lie on.
_ROW_DIMS = {"keys": 0, "values": 0, "conv_states": 0, "recurrent_states": 0, "indexer_keys": 0, "indexer_position_ids": 1}
_CONTAINERS = (dict, list, tuple)
_PLAIN = (type(None), bool, int, float, str, type, torch.dtype, torch.device)


def cache_rules(cls: type) -> Splitter | None:
    """Return the rules of a class of caches; None for any other class."""
    is_cache = any((base.__module__, base.__qualname__) == (_CACHES, "Cache") for base in cls.__mro__)
    return Splitter(_split_cache, _join_caches, _cache_rows, _cache_to, _update_cache) if is_cache else None


def _cache_rows(cache: Any) -> int:
    """Return the rows of a cache; 0 if it is empty."""
    found: set[int] = set()

    def count(owner: Any, name: str, values: list[Any]) -> None:
        dim = _row_dim(owner, name, values[0])
        found.update(() if dim is None else (values[0].size(dim),))

    _rebuilt(count, cache, "", [cache])
    if len(found) > 1:
        refuse_split(cache, f"its layers have different row counts: {sorted(found)}")
    return next(iter(found), 0)


def _split_cache(cache: Any, sizes: Sequence[int]) -> list[Any]:
    """Return one cache per size. An empty cache gives empty caches."""
    return [_rebuilt(partial(_cut, start, end - start), cache, "", [cache]) for start, end in spans(sizes)]


def _join_caches(parts: Sequence[Any]) -> Any:
    return _rebuilt(_join_values, parts[0], "", list(parts))


def _cache_to(cache: Any, device: torch.device) -> Any:
    """Return a copy on a device, also for the tensors that its layers create later."""

    def move(owner: Any, name: str, values: list[Any]) -> Any:
        moved = values[0].to(device) if isinstance(values[0], torch.Tensor) else values[0]
        return device if isinstance(moved, torch.device) else moved

    return _rebuilt(move, cache, "", [cache])


def _update_cache(old: Any, new: Any, *, in_place: bool = False) -> Any:
    """Put the state of `new` into `old`. Caches, layers, lists, and dictionaries of `old` stay the same objects."""
    if type(old) is not type(new):
        return new
    if _is_state(old.__class__):
        _update_cache(vars(old), vars(new), in_place=_is_static(old))
    elif isinstance(old, dict):
        items = {key: _update_cache(old.get(key), value, in_place=in_place) for key, value in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, list):
        old[:] = [*map(_update_cache, old, new), *new[len(old) :]]
    elif in_place and isinstance(old, torch.Tensor) and old.shape == new.shape:
        old.copy_(new)  # compiled models and CUDA graphs hold the addresses of a static layer's tensors
    else:
        return new
    return old


def _rebuilt(change: Callable[[Any, str, list[Any]], Any], owner: Any, name: str, values: list[Any]) -> Any:
    """Return a copy of caches of the same structure. `change` makes each attribute from the attributes in `values`."""
    first, insides = values[0], [_inside(value) for value in values]
    if any(type(value) is not type(first) for value in values) or any(each.keys() != insides[0].keys() for each in insides):
        refuse_to_join(owner, f"their {name or 'types'} differ in structure")
    is_state = _is_state(first.__class__)
    if not is_state and type(first) not in _CONTAINERS:
        return change(owner, name, values)
    items = {}
    for key in insides[0]:
        inner = [each[key] for each in insides]
        items[key] = _rebuilt(change, first, key, inner) if is_state else _rebuilt(change, owner, name, inner)
    if not is_state:
        return items if isinstance(first, dict) else type(first)(items.values())
    copied = object.__new__(type(first))
    vars(copied).update(items)
    return copied


def _inside(value: Any) -> dict[Any, Any]:
    """Return the attributes of a cache or a layer, or the items of a container."""
    if _is_state(value.__class__):
        _refuse_unknown_layout(value)
        return dict(vars(value))
    if type(value) not in _CONTAINERS:
        return {}
    return value if isinstance(value, dict) else dict(enumerate(value))


@lru_cache(maxsize=1024)
def _is_state(cls: type) -> bool:
    """True for the class of a cache, or of one layer of a cache."""
    return any(base.__module__ == _CACHES for base in cls.__mro__)


def _is_static(layer: object) -> bool:
    """True if the layer writes to its tensors in-place."""
    return hasattr(layer, "max_cache_len")


def _refuse_unknown_layout(state: Any) -> None:
    """Refuse a class that selects rows by its own methods: transformers' methods select them on the dims above."""
    methods = (getattr(state, name, None) for name in ("reorder_cache", "batch_select_indices"))
    if hasattr(state, "_quantized_keys"):
        refuse_split(state, "its rows are quantized with common scales")
    if any(method is not None and method.__module__ != _CACHES for method in methods):
        refuse_split(state, "it selects rows by its own method, so they may lie on any dim")


def _row_dim(owner: object, name: str, value: object) -> int | None:
    """Return the dim that the rows of an attribute lie on; None if it is the same for all rows."""
    if not isinstance(value, torch.Tensor):
        return None if isinstance(value, _PLAIN) else refuse_split(owner, f"its {name} is of type {type(value).__name__}")
    if value.ndim == 0 or value.shape == (0,):  # a position, or a layer that is initialized and has no rows yet
        return None
    return _ROW_DIMS[name] if name in _ROW_DIMS else refuse_split(owner, f"the rows of its {name} may lie on any dim")


def _cut(start: int, size: int, owner: Any, name: str, values: list[Any]) -> Any:
    """Return `size` rows of an attribute. Tensors that a model writes to in-place are copied."""
    (value,), dim = values, _row_dim(owner, name, values[0])
    if not isinstance(value, torch.Tensor):
        return size if name == "batch_size" and isinstance(value, int) else value
    part = value if dim is None else value.narrow(dim, start, size)
    return part.clone() if dim is None or _is_static(owner) or name in ("conv_states", "recurrent_states") else part


def _join_values(owner: Any, name: str, values: list[Any]) -> Any:
    dims = {_row_dim(owner, name, value) for value in values}
    if name == "batch_size" and isinstance(values[0], int):
        return sum(values)
    if dims == {None}:
        if all(same(values[0], value) for value in values):
            return values[0]
        refuse_to_join(owner, f"{name} is {' and '.join(map(str, values))}")
    shapes = [tuple(value.shape) for value in values]
    dim = _ROW_DIMS[name]
    if None in dims or len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        refuse_to_join(owner, f"the shapes of {name} are {' and '.join(map(str, shapes))}")
    return torch.cat(values, dim)
