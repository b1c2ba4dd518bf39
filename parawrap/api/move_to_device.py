"""Move nested values and the attributes of objects to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap._public import public
from parawrap.tree import replace_nodes

T = TypeVar("T")


@public
def recursive_to(val: Any, device: Any, **kwargs: Any) -> Any:
    """Move a nested value to a device with ``.to(device, **kwargs)``.

    The function recurses into lists, tuples, namedtuples, mappings, and dataclasses. It returns new
    containers, or `val` itself if all values are on the device already.
    A value with a ``.to`` method is moved by that method, even if the value is a container, such as
    a PackedSequence. Other values are returned unchanged.

    Args:
        val: The value.
        device: The first argument of each ``.to``.
        kwargs: Options for each ``.to``, such as ``non_blocking=True``.

    Raises:
        TypeError: If a ``.to`` method returns None. The message names its class.

    >>> recursive_to({"x": torch.zeros(2), "name": "a"}, torch.float64)
    {'x': tensor([0., 0.], dtype=torch.float64), 'name': 'a'}
    """
    return _call_on_leaves(val, {"to": (device,)}, kwargs)


@public
def recursive_cuda(val: Any, device: Any = None, **kwargs: Any) -> Any:
    """Move a nested value to a CUDA device, like `recursive_to`.

    Each value is moved by its ``.cuda(device, **kwargs)`` method, or by its ``.to`` method if it
    has no ``.cuda``. Other values are returned unchanged.

    Args:
        val: The value.
        device: The CUDA device; by default the current one.
        kwargs: Options for each ``.cuda`` or ``.to``, such as ``non_blocking=True``.

    Raises:
        TypeError: If a ``.cuda`` or ``.to`` method returns None. The message names its class.

    >>> recursive_cuda([1, "a"])  # neither has .cuda or .to
    [1, 'a']
    """
    if device is None and torch.cuda.is_available():
        device = torch.cuda.current_device()
    methods: dict[str, tuple[Any, ...]] = {"cuda": (device,), "to": (device,)}
    # Without CUDA, each method is called with its defaults, and raises torch's own error
    if device is None:
        methods = {"cuda": (), "to": ("cuda",)}
    return _call_on_leaves(val, methods, kwargs)


@public
def cuda_attrs(obj: T, *args: Any, **kwargs: Any) -> T:
    """Move every attribute of an object in place with `recursive_cuda`, and return the object.

    Attributes in ``__slots__`` are included. If moving an attribute raises, no attribute changes.

    >>> from types import SimpleNamespace
    >>> cuda_attrs(SimpleNamespace(n=3))
    namespace(n=3)
    """
    return _replace_attrs(obj, lambda value: recursive_cuda(value, *args, **kwargs))


@public
class Batch:
    """Base class for your own batches, with ``.cuda``, ``.to``, and ``.pin_memory`` methods.

    Each method changes every attribute in place and returns self. `recursive_cuda` therefore moves
    a `Batch`, and a DataLoader with ``pin_memory=True`` pins it. A `Batch` is only as thread-safe
    as its attributes.

    >>> class Pair(Batch):
    ...     def __init__(self, x, y):
    ...         self.x, self.y = x, y
    >>> Pair(torch.zeros(2), [torch.ones(2)]).to(torch.int64).y
    [tensor([1, 1])]
    """

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """Move every attribute with `recursive_cuda`, and return self."""
        return cuda_attrs(self, *args, **kwargs)

    def to(self, device: Any, **kwargs: Any) -> Self:
        """Move every attribute with `recursive_to`, and return self."""
        return _replace_attrs(self, partial(recursive_to, device=device, **kwargs))

    def pin_memory(self) -> Self:
        """Pin every attribute, and every nested value, that has a ``.pin_memory`` method.

        Return self.
        """
        pin = partial(_call_on_leaves, methods={"pin_memory": ()}, kwargs={})
        return _replace_attrs(self, pin)


def on_lane(value: Any, device: torch.device) -> Any:
    """Move a nested value to the device of a lane, like `recursive_to`.

    A copy to the CPU blocks until it is complete. Other copies are queued on the device.
    """
    # The host might read a queued copy to the CPU too early
    options = {} if device.type == "cpu" else {"non_blocking": True}
    # The `.to` of other classes may not have the option
    takers = (torch.Tensor, PackedSequence, Batch)
    return _call_on_leaves(value, {"to": (device,)}, options, takers)


def _call_on_leaves(
    value: Any,
    methods: Mapping[str, tuple[Any, ...]],
    kwargs: Mapping[str, Any],
    takers: type | tuple[type, ...] = object,
) -> Any:
    """Replace each node that has one of several methods by the result of the method.

    Args:
        value: The nested value.
        methods: The arguments of each method by its name. The first one that a node has is called.
        kwargs: Options of the methods.
        takers: The classes with methods that take the options. Other methods are called without.

    Raises:
        TypeError: If a method returns None.
    """

    def methods_of(node: Any) -> list[str]:
        return [name for name in methods if _has_method(node, name)]

    def call(leaf: Any) -> Any:
        name, *_ = methods_of(leaf)
        options = kwargs if isinstance(leaf, takers) else {}
        moved = getattr(leaf, name)(*methods[name], **options)
        if moved is None:
            cls = type(leaf).__qualname__
            msg = (
                f"{cls}.{name}() returned None. End it with `return self`, or return the moved "
                f"{cls}"
            )
            raise TypeError(msg)
        return moved

    return replace_nodes(value, lambda node: bool(methods_of(node)), call)


def _has_method(value: Any, name: str) -> bool:
    """True if ``value.name`` is callable. False for classes, which hold no value to move."""
    return not isinstance(value, type) and callable(getattr(value, name, None))


def _replace_attrs(obj: T, replacement: Callable[[Any], Any]) -> T:
    """Replace each attribute in place, and return the object."""
    # All values are made before the first one is set: an error then leaves the object as it was
    replaced = {name: replacement(value) for name, value in _attrs(obj).items()}
    for name, value in replaced.items():
        setattr(obj, name, value)
    return obj


def _attrs(obj: object) -> dict[str, Any]:
    """Return the attributes in the __dict__ and in the __slots__ of an object."""
    state: Any = object.__getstate__(obj)  # Python's default: also if the class has its own
    if not isinstance(state, tuple):  # the __dict__ alone, or None without attributes
        # A copy, because the caller iterates it while methods of the values may set attributes
        return dict(state or {})
    in_dict, in_slots = state
    return {**(in_dict or {}), **in_slots}
