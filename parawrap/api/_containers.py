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
from parawrap.displays import spell_count


class Parts(tuple[Any, ...]):
    """The parts of one argument of a `TupleParallel`, as `tp_collate` marks them.

    Users may treat it as a tuple. The class shows that a tuple holds parts, and not arguments.
    """

    __slots__ = ()


# For `tree_map` of torch: the parts as a list, without further facts, and back
register_pytree_node(Parts, lambda parts: (list(parts), None), lambda parts, _: Parts(parts))


def transpose_rows(rows: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> Any:
    """Return a container like the first row, with a tuple of the rows' items in each place.

    There is at least one row. Messages refer to a row by `noun`, and `refuse` raises them.
    """
    columns = collect_columns(rows, noun, refuse)
    return rebuild(plain_tuple(rows[0]), columns)


def is_container(value: Any) -> bool:
    """True for tuples, lists, and mappings.

    A PackedSequence is a namedtuple, but counts as a single value.
    """
    return isinstance(value, (tuple, list, Mapping)) and not isinstance(value, PackedSequence)


def is_list_per_row(value: Any) -> bool:
    """True for a list with one item per row, such as texts or dicts of boxes.

    No item is a tensor, a list, or a tuple.
    """
    if type(value) is not list:
        return False
    return not any(isinstance(item, (torch.Tensor, list, tuple)) for item in value)


def items_of(container: Any) -> dict[Any, Any]:
    """Return the items by key or position. The result may be the container: do not change it."""
    if type(container) is dict:
        return container
    if isinstance(container, Mapping):
        return dict(container.items())
    return dict(enumerate(container))


def plain_tuple(container: Any) -> Any:
    """Return a list as a tuple, and any other container as it is."""
    return tuple(container) if isinstance(container, list) else container


def rebuild(like: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the type of ``like`` with new items in the same places.

    The caller hands `items` over: for a dict, it is the result.
    """
    if type(like) is dict:
        return items
    if optree.is_namedtuple_instance(like):
        return like._make(items.values())
    if isinstance(like, tuple):
        return tuple(items.values())
    # A shallow copy of another mapping would share its items with `like`, which may be the user's.
    # The constructor of such a class takes the items, as that of MappingProxyType
    copies_items = isinstance(like, (list, dict)) or hasattr(type(like), "__copy__")
    if not copies_items or not isinstance(like, (list, MutableMapping)):
        return type(like)(items)
    # A copy: a subclass may carry more than its items
    clone: Any = copy.copy(like)
    # A dict that gives its items as attributes is its own __dict__, and so must the copy be
    if getattr(like, "__dict__", None) is like:
        clone.__dict__ = clone
    for key, item in items.items():
        clone[key] = item
    return clone


def check_kinds(values: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> None:
    """Call ``refuse`` with a message if the values are of several kinds. It raises."""
    for position, value in enumerate(values):
        if container_kind(value) is not container_kind(values[0]):
            kind, first_kind = describe_type(value), describe_type(values[0])
            refuse(f"{noun} {position} is {kind}, {noun} 0 is {first_kind}")


def container_kind(value: Any) -> type:
    """Return the kind of a value, as a class.

    Lists and tuples are of kind tuple, and mappings of kind dict. Each class of namedtuples is a
    kind of its own, and so are tensors and None. All other values are of kind object.
    """
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
    tables = list(map(items_of, rows))
    first = tables[0]
    for position, table in enumerate(tables):
        if table.keys() == first.keys():
            continue
        if isinstance(rows[position], Mapping):
            has = f"the keys {list(table)}"
            first_has = f"{list(first)}"
        else:
            has = spell_count(len(table), "item")
            first_has = f"{len(first)}"
        refuse(f"{noun} {position} has {has}, {noun} 0 has {first_has}")
    return {key: tuple([table[key] for table in tables]) for key in first}
