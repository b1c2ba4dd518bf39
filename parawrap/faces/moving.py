"""Nested values and attributes, moved to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch

from parawrap.tree import replace_nodes

__all__ = ["Batch", "cuda_attrs", "recursive_cuda", "recursive_to"]

T = TypeVar("T")


def recursive_to(val: Any, device: Any, **kwargs: Any) -> Any:
    """Move ``val`` with ``.to(device, **kwargs)``, recursing lists, tuples, namedtuples and mappings.

    A value that has a callable ``.to`` moves itself, also if it is a container (PackedSequence does); any other value
    comes back as it is. Containers are rebuilt, not changed. ``kwargs`` such as ``non_blocking`` go to every ``.to``.

    Raises:
        TypeError: a ``.to`` that returned None; the message names its class.

    >>> recursive_to({"x": torch.zeros(2), "name": "a"}, torch.float64)
    {'x': tensor([0., 0.], dtype=torch.float64), 'name': 'a'}
    """
    return _call_on_leaves(val, {"to": (device,)}, kwargs)


def recursive_cuda(val: Any, device: Any = None, **kwargs: Any) -> Any:
    """Move ``val`` with ``.cuda(device, **kwargs)``, else ``.to(device, **kwargs)``, else hand it back as it is.

    Recurses as :func:`recursive_to` does. ``device`` None is the current CUDA device.

    Raises:
        TypeError: a ``.cuda`` or ``.to`` that returned None; the message names its class.

    >>> recursive_cuda([1, "a"])  # neither has .cuda or .to
    [1, 'a']
    """
    if device is None and torch.cuda.is_available():
        device = torch.cuda.current_device()
    methods = {"cuda": (), "to": ("cuda",)} if device is None else {"cuda": (device,), "to": (device,)}
    return _call_on_leaves(val, methods, kwargs)


def cuda_attrs(obj: T, *args: Any, **kwargs: Any) -> T:
    """Move every attribute of ``obj`` in place with ``recursive_cuda(value, *args, **kwargs)``; return ``obj``.

    If one of them cannot be moved, none is replaced. Attributes in ``__slots__`` count.

    >>> from types import SimpleNamespace
    >>> cuda_attrs(SimpleNamespace(n=3))
    namespace(n=3)
    """
    return _replace_attrs(obj, lambda value: recursive_cuda(value, *args, **kwargs))


class Batch:
    """A base for your own batches: ``.cuda``, ``.to`` and ``.pin_memory`` treat every attribute in place, return self.

    Hence ``recursive_cuda`` moves it, and a DataLoader with ``pin_memory=True`` pins it. Lives as long as your batch
    does; no more thread-safe than its attributes.

    >>> class Pair(Batch):
    ...     def __init__(self, x, y):
    ...         self.x, self.y = x, y
    >>> Pair(torch.zeros(2), [torch.ones(2)]).to(torch.int64).y
    [tensor([1, 1])]
    """

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """Move every attribute with :func:`recursive_cuda`; return self."""
        return cuda_attrs(self, *args, **kwargs)

    def to(self, device: Any, **kwargs: Any) -> Self:
        """Move every attribute with :func:`recursive_to`; return self."""
        return _replace_attrs(self, lambda value: recursive_to(value, device, **kwargs))

    def pin_memory(self) -> Self:
        """Pin every attribute that has a ``.pin_memory`` of its own, recursing; return self."""
        return _replace_attrs(self, lambda value: _call_on_leaves(value, {"pin_memory": ()}, {}))


def _call_on_leaves(value: Any, methods: Mapping[str, tuple[Any, ...]], kwargs: Mapping[str, Any]) -> Any:
    """Replace each leaf by the result of the first of ``methods`` (name -> arguments) that it has."""

    def moves(node: Any) -> bool:
        return any(_has_method(node, name) for name in methods)

    def call(leaf: Any) -> Any:
        name = next(name for name in methods if _has_method(leaf, name))
        return _not_none(getattr(leaf, name)(*methods[name], **kwargs), leaf, name)

    return replace_nodes(value, moves, call)


def _has_method(value: Any, name: str) -> bool:
    """Whether ``value.name`` can be called; a namedtuple's field called "to" cannot, a class has no value to move."""
    return not isinstance(value, type) and callable(getattr(value, name, None))


def _not_none(result: T | None, value: Any, name: str) -> T:
    if result is None:
        cls = type(value).__qualname__
        msg = f"{cls}.{name}() returned None: end it with `return self`, or return the moved {cls}"
        raise TypeError(msg)
    return result


def _replace_attrs(obj: T, replacement: Callable[[Any], Any]) -> T:
    replaced = {name: replacement(value) for name, value in _attrs(obj).items()}
    for name, value in replaced.items():
        setattr(obj, name, value)
    return obj


def _attrs(obj: object) -> dict[str, Any]:
    state: Any = object.__getstate__(obj)  # the attributes, or a pair of those in __dict__ and those in __slots__
    pair = state if isinstance(state, tuple) else (state,)
    return {name: value for attrs in pair for name, value in (attrs or {}).items()}
