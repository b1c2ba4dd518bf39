"""Read and rebuild containers: tuples, lists, namedtuples, and mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import NoneType
from typing import Any, NoReturn

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap._private_names import register_pytree_node


class Parts(tuple[Any, ...]):
    """The parts of one argument of a `TupleParallel`, as a collate function returns them.

    It is a tuple in all respects.
    """

    __slots__ = ()


register_pytree_node(Parts, lambda parts: (list(parts), None), lambda parts, _: Parts(parts))


def transpose_rows(rows: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> Any:
    """Transpose rows, at least one. Messages refer to a row by `noun`; `refuse` raises them."""
    return rebuild(plain_tuple(rows[0]), collect_columns(rows, noun, refuse))


def is_container(value: Any) -> bool:
    """True for tuples, lists, and mappings.

    A PackedSequence is a namedtuple, but counts as a single value.
    """
    return isinstance(value, (tuple, list, Mapping)) and not isinstance(value, PackedSequence)


def is_list_per_row(value: Any) -> bool:
    """True for a list with one item per row, such as texts or dicts of boxes.

    No item is a tensor, a list, or a tuple.
    """
    return type(value) is list and not any(
        isinstance(item, (torch.Tensor, list, tuple)) for item in value
    )


def items_of(container: Any) -> dict[Any, Any]:
    """Return the items by key or position."""
    if type(container) is dict:
        return container
    if isinstance(container, Mapping):
        return dict(container.items())
    return dict(enumerate(container))


def plain_tuple(container: Any) -> Any:
    """Return a list as a tuple, and any other container as it is."""
    return tuple(container) if isinstance(container, list) else container


def rebuild(like: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the type of ``like`` with new items in the same places."""
    if type(like) is dict:
        return items
    if optree.is_namedtuple_instance(like):
        return like._make(items.values())
    if isinstance(like, tuple):
        return tuple(items.values())
    # A mapping without __setitem__, such as MappingProxyType: its constructor takes the items
    if not isinstance(like, (list, MutableMapping)):
        return type(like)(items)
    # A copy: a subclass may carry more than its items
    clone: Any = copy.copy(like)
    # A dict that gives its items as attributes is its own __dict__. So must be the copy
    if getattr(like, "__dict__", None) is like:
        clone.__dict__ = clone
    for key, item in items.items():
        clone[key] = item
    return clone


def check_kinds(values: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> None:
    """Call ``refuse`` with a message unless all values are of one kind, such as tensors."""
    for position, value in enumerate(values):
        if container_kind(value) is not container_kind(values[0]):
            kind, first_kind = describe_type(value), describe_type(values[0])
            refuse(f"{noun} {position} is {kind}, {noun} 0 is {first_kind}")


def container_kind(value: Any) -> type:
    """Return the kind of a value. Lists and tuples are of one kind, and so are all mappings."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if value is None:
        return NoneType
    if not is_container(value):
        return object
    if optree.is_namedtuple_instance(value):
        return type(value)
    return dict if isinstance(value, Mapping) else tuple


def describe_type(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__qualname__}"


def collect_columns(
    rows: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]
) -> dict[Any, tuple[Any, ...]]:
    """Return the items of all rows by key or position.

    Call ``refuse`` if the rows differ in kind, keys, or length.
    """
    check_kinds(rows, noun, refuse)
    tables = [items_of(row) for row in rows]
    first = tables[0]
    for position, table in enumerate(tables):
        if table.keys() == first.keys():
            continue
        if isinstance(rows[position], Mapping):
            has, first_has = f"the keys {list(table)}", f"{list(first)}"
        else:
            has = f"{len(table)} item{'' if len(table) == 1 else 's'}"
            first_has = f"{len(first)}"
        refuse(f"{noun} {position} has {has}, {noun} 0 has {first_has}")
    return {key: tuple(table[key] for table in tables) for key in first}
