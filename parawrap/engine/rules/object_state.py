"""The state of an object of any class: its items, attributes, and slots.

A call borrows its arguments. If forward changes the parts that the lanes have, the caller's object
gets their joined state. It stays the same object, as after the plain call.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from parawrap._private_names import version_of
from parawrap.engine.rules.splitter import Splitter, refuse_update
from parawrap.tree import ABSENT, PLAIN, names_of_slots

FindRules = Callable[[object], Splitter | None]
"""Returns the rules of a value; None if its class has no rules of its own."""

# These are listed, and what they hold is not: plain values hold nothing, code does not change, and
# the weights of a module belong to the model
_NOT_SEARCHED = (
    *PLAIN,
    range,
    type,
    torch.nn.Module,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)
# Values that cannot change. An equal value, which a lane may have made, replaces nothing
_COMPARED_BY_VALUE = (*PLAIN, range, torch.Size, torch.dtype)


# Sequences


def make_sequence(like: Any, items: Iterable[Any]) -> Any:
    """Return a sequence of these items with the class, `maxlen`, and attributes of another one."""
    kind = type(like)
    if kind is deque:
        return deque(items, like.maxlen)
    if kind is list or kind is range:  # not every sequence of numbers is a range
        return list(items)
    if isinstance(like, tuple):
        # Not by the constructor: that of a namedtuple takes one argument per field
        return tuple.__new__(kind, items)
    # Not by the constructor: that of a user's class may take other arguments
    made = copy.copy(like)
    base: Any = list if isinstance(like, list) else deque
    base.clear(made)
    base.extend(made, items)
    return made


# List a state


def list_state(value: object, find_rules: FindRules | None = None) -> list[Any]:
    """Return what a value holds, at any depth: keys, items, attributes, versions of tensors.

    A value inside it that `find_rules` has rules for is listed by these. Two lists of one value
    hold the same objects if nothing was set, replaced, or deleted in between. Each list keeps its
    objects alive, so no new object has the address of an old one.
    """
    found: list[Any] = []
    seen: set[int] = set()  # of the objects in `found`
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        found.append(each)
        if isinstance(each, _NOT_SEARCHED) or id(each) in seen:
            continue
        seen.add(id(each))
        rules = None
        # Not for the value itself: its own rules may be what calls this function
        if find_rules is not None and each is not value:
            rules = find_rules(each)
        if rules is not None and rules.contents is not None:
            found += rules.contents(each)
            continue
        if isinstance(each, torch.Tensor):
            found.append(mark_version(each))
        waiting += _stored_items(each)
        waiting += _attributes(each)
    return found


def mark_version(tensor: torch.Tensor) -> str | None:
    """Return a text that changes with each write in place; None for an inference tensor."""
    if tensor.is_inference():
        return None
    # Equal interned texts are one object while a list holds one of them, so ``is`` compares them
    return sys.intern(f"version {version_of(tensor)}")


def _dict_class_of(value: dict[Any, Any]) -> Any:
    """Return the class whose methods read and write a dict in its order.

    An OrderedDict keeps its order in links, which the methods of dict neither read nor write.
    """
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _stored_items(value: Any) -> Iterator[Any]:
    """Yield the keys and items of a container, as it stores them."""
    # By the methods of the base class: those of a subclass may make new objects
    if isinstance(value, dict):
        base = _dict_class_of(value)
        yield from base.keys(value)
        yield from base.values(value)
    elif isinstance(value, list):
        yield from list.__iter__(value)
    elif isinstance(value, tuple):
        yield from tuple.__iter__(value)
    elif isinstance(value, deque):
        yield from deque.__iter__(value)
    elif isinstance(value, (set, frozenset)):
        yield from value


def _attributes(value: object) -> Iterator[Any]:
    """Yield the names and values of the attributes of an object."""
    attributes = getattr(value, "__dict__", {})
    yield from dict.keys(attributes)
    yield from dict.values(attributes)
    for name in names_of_slots(type(value)):
        yield name
        yield getattr(value, name, None)


# Compare, and put


def is_unchanged(old: Any, new: Any) -> bool:
    """True if `new` need not replace `old`: it is the same object, or has the same value.

    Joined tensors are new objects, also those that no lane changed.
    """
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, _COMPARED_BY_VALUE):
        return bool(old == new)
    if not isinstance(old, torch.Tensor):
        return False
    if old.layout is not torch.strided or old.is_nested:
        return False
    if old.dtype != new.dtype or old.shape != new.shape or old.device != new.device:
        return False
    # A tensor with a graph may have other gradients than an equal tensor
    has_graph = old.requires_grad or new.requires_grad
    if has_graph and torch.is_grad_enabled():
        return False
    return torch.equal(old, new)


def put_state(value: Any, joined: Any, find_rules: FindRules) -> None:
    """Put the items, attributes, and slots of a joined value into the caller's object.

    Unchanged items and attributes stay. Dicts and lists inside the object stay the same objects.

    Raises:
        GatherError: If the object cannot take them.
    """
    if is_unchanged(value, joined):
        return
    if type(value) is not type(joined):
        refuse_update(value, f"its joined parts are a {type(joined).__name__}")
    takes_items = _put_items(value, joined, find_rules)
    slots = names_of_slots(type(value))
    has_attributes = hasattr(value, "__dict__")
    if not (takes_items or slots or has_attributes):
        refuse_update(value, "an object of this class cannot be changed")
    for name in slots:
        # Set by `object`, since a frozen class refuses its own `__setattr__`
        new = getattr(joined, name, ABSENT)
        if new is not ABSENT:
            merged = _merge(getattr(value, name, ABSENT), new, find_rules)
            object.__setattr__(value, name, merged)
        elif hasattr(value, name):
            object.__delattr__(value, name)
    if has_attributes:
        _put_attributes(vars(value), vars(joined), find_rules)


def _put_attributes(old: dict[str, Any], new: dict[str, Any], find_rules: FindRules) -> None:
    """Give an object the attributes of another one."""
    # Without `clear`, so that another thread never misses an attribute that stays
    deleted = [name for name in old if name not in new]
    for name in deleted:
        del old[name]
    for name, attribute in new.items():
        old[name] = _merge(old.get(name, ABSENT), attribute, find_rules)


def _put_items(value: Any, joined: Any, find_rules: FindRules) -> bool:
    """Put the items of a container, and return True; False if the value cannot take items.

    An immutable container with other items is refused.
    """
    # By the methods of the base class: outputs of transformers refuse some of their own
    if isinstance(value, dict):
        _put_dict(value, joined, find_rules)
    elif isinstance(value, list):
        added = max(len(joined) - len(value), 0)
        old_items = [*list.__iter__(value), *[ABSENT] * added]
        # Without `strict`: if the joined list is shorter, the last items of the caller's list go
        pairs = zip(old_items, list.__iter__(joined), strict=False)
        merged = [_merge(old, new, find_rules) for old, new in pairs]
        # One step: another thread sees the old items or the new ones
        list.__setitem__(value, slice(None), merged)
    elif isinstance(value, deque):
        if value.maxlen != joined.maxlen:
            refuse_update(value, f"its joined parts have maxlen={joined.maxlen}")
        # In two steps: for a moment, another thread may see it empty. So for a set below
        items = list(joined)
        deque.clear(value)
        deque.extend(value, items)
    elif isinstance(value, set):
        items = list(joined)
        set.clear(value)
        set.update(value, items)
    elif isinstance(value, torch.Tensor):
        _put_tensor(value, joined)
    elif isinstance(value, (tuple, frozenset, str, bytes)):
        has_same_length = len(value) == len(joined)
        if not has_same_length or not all(map(is_unchanged, value, joined)):
            refuse_update(value, "its items cannot be replaced")
        return False
    else:
        return False
    return True


def _put_dict(old: dict[Any, Any], new: dict[Any, Any], find_rules: FindRules) -> None:
    """Give a dict the entries and the order of another one."""
    base = _dict_class_of(old)
    entries: dict[Any, Any] = {}
    for key, entry in base.items(new):
        entries[key] = _merge(dict.get(old, key, ABSENT), entry, find_rules)
    # All entries are set again, in the order of `new`. Another thread may miss one for a moment
    base.clear(old)
    for key, entry in entries.items():
        base.__setitem__(old, key, entry)


def _put_tensor(value: torch.Tensor, joined: torch.Tensor) -> None:
    """Write the joined rows into a tensor of a registered class."""
    if value.shape != joined.shape:
        refuse_update(value, f"its joined parts have the shape {tuple(joined.shape)}")
    try:
        value.copy_(joined)
    except RuntimeError as error:  # a leaf with gradients
        refuse_update(value, f"torch refuses the write: {error}")


def _merge(old: Any, new: Any, find_rules: FindRules) -> Any:
    """Return the entry for the place of `old`: `old` itself if it can take the state of `new`."""
    if old is ABSENT:
        return new
    if is_unchanged(old, new):
        return old
    if type(old) is not type(new):
        return new
    rules = find_rules(old)
    if rules is not None and rules.update is not None:
        rules.update(old, new)
        return old
    if type(old) in (dict, OrderedDict, list):
        put_state(old, new, find_rules)
        return old
    return new
