"""Cut and join the caches of transformers.

A cache holds layers, a layer holds tensors, and some caches hold caches. The package is not
imported: its classes are recognized by the names of their bases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch

from parawrap.engine.rules.object_state import list_state
from parawrap.engine.rules.splitter import Splitter, are_equal, refuse_split, refuse_to_join, spans

Change = Callable[[Any, str, list[Any]], Any]
"""Returns one attribute for those of several caches: ``change(owner, name, values)``.

`owner` is the cache or layer of the first cache that has the attribute."""

WITHOUT_CACHE = "use_cache=False in the call lets a model of transformers return no cache"
_CACHES = "transformers.cache_utils"
# The dim of the rows of each tensor that has rows, by the name of its attribute
_ROW_DIMS = {
    "keys": 0,
    "values": 0,
    "conv_states": 0,
    "recurrent_states": 0,
    "indexer_keys": 0,
    "indexer_position_ids": 1,
}
_WRITTEN_IN_PLACE = ("conv_states", "recurrent_states")  # also in layers that are not static
_CONTAINERS = (dict, list, tuple)
# Classes of the settings of a cache, which are the same for all rows. A cache with an attribute of
# any other class is refused
_SETTINGS = (type(None), bool, int, float, str, type, torch.dtype, torch.device)


def is_cache(value: object) -> bool:
    """True for a cache of transformers, also of a class without rules."""
    cls = type(value)
    is_from_transformers = cls.__module__.startswith("transformers.")
    return cache_rules(cls) is not None or (is_from_transformers and "Cache" in cls.__name__)


def cache_rules(cls: type) -> Splitter | None:
    """Return the rules of a class of caches; None for any other class."""
    for base in cls.__mro__:
        if (base.__module__, base.__qualname__) == (_CACHES, "Cache"):
            return _RULES
    return None


def _cache_rows(cache: Any) -> int:
    """Return the rows of a cache; 0 if it is empty."""
    found: set[int] = set()

    def count(owner: Any, name: str, values: list[Any]) -> None:
        (value,) = values
        dim = _row_dim(owner, name, value)
        if dim is not None:
            found.add(value.size(dim))

    # The copy is dropped: `count` returns None for each attribute
    _rebuild(count, cache, "", [cache])
    if len(found) > 1:
        _refuse_to_cut(cache, f"its layers have different row counts: {sorted(found)}")
    return next(iter(found), 0)


def _refuse_to_cut(state: object, why: str) -> NoReturn:
    """Refuse to cut a cache, or a layer of one."""
    refuse_split(state, why, ", or pass no cache and use_cache=False")


def _split_cache(cache: Any, sizes: Sequence[int]) -> list[Any]:
    """Return one cache per size. An empty cache gives empty caches."""
    parts: list[Any] = []
    for start, end in spans(sizes):
        cut = partial(_cut, start, end - start)
        parts.append(_rebuild(cut, cache, "", [cache]))
    return parts


def _join_caches(parts: Sequence[Any]) -> Any:
    return _rebuild(_join_values, parts[0], "", list(parts))


def _cache_to(cache: Any, device: torch.device) -> Any:
    """Return a copy on a device, whose layers create their tensors there too."""

    def move(owner: Any, name: str, values: list[Any]) -> Any:
        (value,) = values
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, torch.device):
            return device  # layers create their tensors there
        return value

    return _rebuild(move, cache, "", [cache])


# Changes by forward


def _list_cache(cache: Any) -> list[Any]:
    """Return the attributes of a cache and of its layers."""
    # Without rules for the values in it: the rules of a cache are also for the caches inside it
    found = list_state(cache)
    # Inference tensors have no versions, so those that layers write in place count as written
    for each in found[:]:
        if not _is_state(each.__class__):
            continue
        for name, value in vars(each).items():
            if not isinstance(value, torch.Tensor) or not value.is_inference():
                continue
            if _writes_in_place(each, name, value):
                found.append(object())  # the next list has another object here
    return found


def _update_cache(old: Any, new: Any, *, in_place: bool = False) -> Any:
    """Put the state of `new` into `old`, and return the value for the place of `old`.

    That is `old` for a cache, a layer, a list, or a dict: these stay the same objects. With
    `in_place`, it is `old` for a tensor too, if the shape has not changed.
    """
    if type(old) is not type(new):
        return new
    if _is_state(old.__class__):
        _update_cache(vars(old), vars(new), in_place=_is_static(old))
    elif isinstance(old, dict):
        items: dict[Any, Any] = {}
        for key, value in new.items():
            items[key] = _update_cache(old.get(key), value, in_place=in_place)
        # Emptied first, for the order of the entries in `new`
        old.clear()
        old.update(items)
    elif isinstance(old, list):
        updated = map(_update_cache, old, new)
        added = new[len(old) :]
        old[:] = [*updated, *added]
    elif in_place and isinstance(old, torch.Tensor) and old.shape == new.shape:
        # Compiled models and CUDA graphs hold the addresses of a static layer's tensors
        old.copy_(new)
    else:
        return new
    return old


# The structure of caches


def _rebuild(change: Change, owner: Any, name: str, values: list[Any]) -> Any:
    """Return a copy of caches of one structure, with the attributes that `change` returns.

    `values` are the caches, or the values of one attribute `name` of theirs; `owner` is the cache
    or layer that has it.
    """
    first = values[0]
    kind = type(first)
    insides = [_inside(value) for value in values]
    keys = insides[0].keys()
    for value, inside in zip(values, insides, strict=True):
        if type(value) is not kind or inside.keys() != keys:
            refuse_to_join(owner, f"their {name or 'types'} differ in structure")
    if _is_state(first.__class__):
        # Not by the constructor, which takes other arguments in each class and version
        copied = object.__new__(kind)
        attributes = vars(copied)
        for key in keys:
            inner = [inside[key] for inside in insides]
            attributes[key] = _rebuild(change, first, key, inner)
        return copied
    if kind not in _CONTAINERS:
        return change(owner, name, values)
    items: dict[Any, Any] = {}
    for key in keys:
        # `change` gets the name of the attribute that holds the container, for each of its items
        inner = [inside[key] for inside in insides]
        items[key] = _rebuild(change, owner, name, inner)
    return items if kind is dict else kind(items.values())


def _inside(value: Any) -> dict[Any, Any]:
    """Return the attributes of a cache or a layer, or the items of a container, by key.

    A value of any other class has none.
    """
    if _is_state(value.__class__):
        _refuse_unknown_layout(value)
        return dict(vars(value))
    if type(value) not in _CONTAINERS:
        return {}
    if isinstance(value, dict):
        return value
    return dict(enumerate(value))


# Callers pass `__class__`, since mypy refuses ``type(value)`` as a key. More classes than a process
# has; each entry keeps its class alive
@lru_cache(maxsize=1024)
def _is_state(cls: type) -> bool:
    """True for the class of a cache, or of one layer of a cache."""
    return any(base.__module__ == _CACHES for base in cls.__mro__)


def _is_static(layer: object) -> bool:
    """True if a layer writes to its tensors in place, which have room for a maximal length."""
    return hasattr(layer, "max_cache_len")


def _writes_in_place(owner: object, name: str, value: torch.Tensor) -> bool:
    """True for a tensor that a model may write in place, such as a position."""
    return value.ndim == 0 or _is_static(owner) or name in _WRITTEN_IN_PLACE


def _refuse_unknown_layout(state: Any) -> None:
    """Refuse a cache or layer whose rows may lie on other dims than `_ROW_DIMS` says.

    The methods of transformers select rows on these dims, and those of other classes on any.
    """
    if hasattr(state, "_quantized_keys"):
        _refuse_to_cut(state, "its rows are quantized with common scales")
    for name in ("reorder_cache", "batch_select_indices"):
        method = getattr(state, name, None)
        if method is not None and method.__module__ != _CACHES:
            _refuse_to_cut(state, "it selects rows by its own method, so they may lie on any dim")


def _row_dim(owner: object, name: str, value: object) -> int | None:
    """Return the dim that the rows of an attribute lie on; None if it is the same for all rows."""
    if isinstance(value, _SETTINGS):
        return None
    if not isinstance(value, torch.Tensor):
        _refuse_to_cut(owner, f"its {name} is of type {type(value).__name__}")
    if value.ndim == 0 or value.shape == (0,):
        return None  # a position, or a tensor of a layer without rows
    if name not in _ROW_DIMS:
        _refuse_to_cut(owner, f"the rows of its {name} may lie on any dim")
    return _ROW_DIMS[name]


def _cut(start: int, size: int, owner: Any, name: str, values: list[Any]) -> Any:
    """Return `size` rows of an attribute."""
    (value,) = values
    dim = _row_dim(owner, name, value)
    if not isinstance(value, torch.Tensor):
        is_row_count = name == "batch_size" and isinstance(value, int)
        return size if is_row_count else value
    # A clone if a lane may write in place: the caller's cache gets the writes of lanes after the
    # call, by `_update_cache`
    if dim is None:  # a position, or an empty tensor, which is small
        return value.clone()
    part = value.narrow(dim, start, size)
    if _writes_in_place(owner, name, value):
        return part.clone()
    return part  # a view, which a layer replaces by a longer tensor


def _join_values(owner: Any, name: str, values: list[Any]) -> Any:
    """Return one attribute from those of the lanes' caches."""
    dims = {_row_dim(owner, name, value) for value in values}
    first = values[0]
    if name == "batch_size" and isinstance(first, int):
        return sum(values)
    if dims == {None}:
        if not all(are_equal(first, value) for value in values):
            shown = " and ".join(map(str, values))
            refuse_to_join(owner, f"{name} is {shown}")
        return first
    shapes = [tuple(value.shape) for value in values]
    dim = _ROW_DIMS[name]
    others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    is_empty_in_some = None in dims  # the layer has rows in some lanes, and none in others
    if is_empty_in_some or len(others) > 1:
        shown = " and ".join(map(str, shapes))
        refuse_to_join(owner, f"the shapes of {name} are {shown}")
    return torch.cat(values, dim)


_RULES = Splitter(
    _split_cache,
    _join_caches,
    _cache_rows,
    _cache_to,
    _update_cache,
    _list_cache,
    may_be_empty=True,
)
