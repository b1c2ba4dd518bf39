"""Return what a call wrote into its arguments: the worker finds it, and the caller's own objects get it.

Both processes walk the arguments in the same order before the call, and name an object by its position in that walk. The
walk enters only containers that pickle restores exactly.
"""

from __future__ import annotations

import copyreg
import dataclasses
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import torch

from parawrap.errors import SessionError
from parawrap.tree import TreeSpec, addresses, flatten_call

__all__ = ["Changed", "Contents", "Given", "GivenArguments", "Written", "find_written"]

_PLAIN = (list, tuple, dict, deque)
_EXACT = frozenset({*_PLAIN, OrderedDict, defaultdict, Counter})
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_TENSOR = frozenset({torch.Tensor})

Written = tuple[int, int, list[str], Any]
"""A leaf that a call wrote in place: the position of its argument, its own in there, and the addresses of all leaves there.

The leaves of an argument may be others than the caller's, because pickle changed it.
"""


class Given:
    """Stands for an object that the call was given: its position in the walk."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class Changed(NamedTuple):
    """A container that a call changed: its position, and its new values under the keys of a dict or names of attributes."""

    position: int
    keys: list[Any] | None
    values: list[Any]


class Contents:
    """The contents of the containers among the arguments of a call, in the worker, before the call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._objects = _walk(args, kwargs)
        mutable = [(position, each) for position, each in enumerate(self._objects) if _is_filled(each)]
        self._before = [(position, *_read_items(each)) for position, each in mutable]

    def find_changes(self) -> list[Changed]:
        """Return the containers that hold other objects now, or in another order."""
        positions = {id(each): position for position, each in enumerate(self._objects) if type(each) not in _ATOMS}
        changed = []
        for position, keys, values in self._before:
            now_keys, now = _read_items(self._objects[position])
            if not (_are_same(now_keys or [], keys or []) and _are_same(now, values)):
                changed.append(Changed(position, now_keys, [_encode(each, positions) for each in now]))
        return changed


class GivenArguments:
    """The arguments of a call, in the caller's process, as they were when it was sent."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        call = tuple(args), dict(kwargs)
        self._leaves, self._spec = flatten_call(*call)
        self._objects = _walk(*call)

    def take(self, written: Sequence[Written], changed: Iterable[Changed]) -> None:
        """Write into the caller's objects what the call wrote into those of the worker.

        Raises:
            SessionError: If the call changed the shape of an argument in place, and the caller's cannot have it, or if it
                wrote into an argument that has other leaves in the worker.
        """
        arguments = _split_leaves(self._leaves, self._spec) if written else []
        places = _addresses_of(self._spec) if written else []
        for argument, leaf, places_there, value in written:
            if places[argument] != places_there:
                msg = (
                    "the model wrote into an argument that has other parts in a worker, because its class changes them "
                    "when it is pickled. Return the new value from the call instead"
                )
                raise SessionError(msg)
            _write(arguments[argument][leaf], value)
        filled = [(self._objects[each.position], each.keys, [*map(self._decode, each.values)]) for each in changed]
        for container, keys, values in filled:
            _fill(container, keys, values)

    def _decode(self, value: Any) -> Any:
        if isinstance(value, Given):
            return self._objects[value.position]
        return _rebuild(value, self._decode)


def find_written(leaves: Sequence[Any], spec: TreeSpec, is_written: Sequence[bool]) -> tuple[Written, ...]:
    """Return the written leaves of a flattened call."""
    if not any(is_written):
        return ()
    places = _addresses_of(spec)
    arguments = _split_leaves(zip(leaves, is_written, strict=True), spec)
    return tuple(
        (argument, position, places[argument], leaf)
        for argument, pairs in enumerate(arguments)
        for position, (leaf, was_written) in enumerate(pairs)
        if was_written
    )


def _addresses_of(spec: TreeSpec) -> list[list[str]]:
    """Return the addresses of the leaves of each argument of a flattened call."""
    return _split_leaves(addresses(spec, ("args", "kwargs")), spec)


def _split_leaves(leaves: Iterable[Any], spec: TreeSpec) -> list[list[Any]]:
    """Return the values that stand for the leaves of a flattened call, by argument."""
    left = iter(leaves)
    return [[*islice(left, argument.num_leaves)] for part in spec.children() for argument in part.children()]


def _walk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the objects in arguments, and in their containers. Each container is entered once."""
    found: list[Any] = []
    if _TENSOR.issuperset(map(type, args)) and _TENSOR.issuperset(map(type, kwargs.values())):
        return found
    entered: set[int] = set()
    waiting: list[Any] = [*kwargs.values(), *args]
    while waiting:
        value = waiting.pop()
        found.append(value)
        if id(value) not in entered and _is_entered(value):
            entered.add(id(value))
            waiting += [value.data] if isinstance(value, UserDict | UserList) else _read_items(value)[1]
    return found


def _is_entered(value: Any) -> bool:
    """True for a container that a worker gets with the same items in the same order."""
    kind = type(value)
    if kind in _EXACT:
        return True
    is_container = isinstance(value, list | tuple | dict | UserDict | UserList)
    has_attributes = dataclasses.is_dataclass(kind) and hasattr(value, "__dict__")
    return (is_container or has_attributes) and _is_plainly_pickled(kind)


def _is_plainly_pickled(kind: type) -> bool:
    """True for a class that pickle handles with the methods of `object`: its instances keep all items and attributes."""
    methods = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return kind not in copyreg.dispatch_table and all(
        getattr(kind, name, None) is getattr(object, name, None) for name in methods
    )


def _is_filled(value: Any) -> bool:
    """True for a container whose items a call may change, and `_fill` sets."""
    return not isinstance(value, tuple | UserDict | UserList) and _is_entered(value)


def _read_items(container: Any) -> tuple[list[Any] | None, list[Any]]:
    """Return the keys of a dict or the names of the attributes of a dataclass, if it is one, and the values."""
    if isinstance(container, list | tuple | deque):
        return None, [*container]
    items = container if isinstance(container, dict) else vars(container)
    return [*items], [*items.values()]


def _fill(container: Any, keys: list[Any] | None, values: list[Any]) -> None:
    if isinstance(container, list | deque):
        container.clear()
        container.extend(values)
        return
    items = container if isinstance(container, dict) else vars(container)
    kind: Any = OrderedDict if isinstance(items, OrderedDict) else dict  # a Counter adds in `update`
    kind.clear(items)
    for key, value in zip(keys or (), values, strict=True):
        kind.__setitem__(items, key, value)


def _are_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _encode(value: Any, positions: Mapping[int, int]) -> Any:
    """Return a value with stand-ins for what was given, also in new containers."""
    position = positions.get(id(value))
    if position is not None:
        return Given(position)
    return _rebuild(value, lambda each: _encode(each, positions))


def _rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a container of Python with its items replaced, or any other value as it is."""
    if type(value) not in _PLAIN:
        return value
    if isinstance(value, dict):
        return {key: replace(each) for key, each in value.items()}
    return type(value)(map(replace, value))


def _write(leaf: Any, value: Any) -> None:
    if isinstance(leaf, set):
        leaf.clear()
        leaf.update(value)
        return
    if isinstance(leaf, bytearray | array):
        leaf[:] = value
        return
    if leaf.shape != value.shape and not _give_shape(leaf, value):
        msg = (
            f"the model changed the shape of an argument in place, from {tuple(leaf.shape)} to {tuple(value.shape)}, which "
            "a worker cannot do to the caller's. Return the new value from the call instead"
        )
        raise SessionError(msg)
    if isinstance(leaf, torch.Tensor):
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.copy_(value)
    else:
        leaf[...] = value


def _give_shape(leaf: Any, value: Any) -> bool:
    """Give a tensor with its own memory another shape, as the call did. Return False if that is impossible."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_contiguous() or leaf.untyped_storage().nbytes() != leaf.nbytes:
        return False
    try:
        with torch.inference_mode(leaf.is_inference()), torch.no_grad():
            leaf.resize_(value.shape)
    except RuntimeError:  # its memory belongs to numpy, for instance
        return False
    return True
