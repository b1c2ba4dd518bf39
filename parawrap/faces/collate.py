"""Collate functions that give a DataLoader's batch in tuple form, one part per device.

This layer knows lists of samples and how to cut them. It refuses to know devices: ``ndevices`` is only a number.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, cast

import torch
import wrapt

from parawrap.errors import ShardError
from parawrap.faces._containers import check_kinds, is_container, items_of, plain_tuple, rebuilt, transposed
from parawrap.faces._decorated import is_global, own_class, sent_by_cloudpickle
from parawrap.shards import balanced

__all__ = ["default_collate", "tp_collate"]

P = ParamSpec("P")

_sizes = functools.lru_cache(maxsize=64)(balanced)  # a DataLoader knows two lengths: of a batch, and of the last one


def tp_collate(ndevices: int) -> Callable[[Callable[P, object]], Callable[P, Any]]:
    """Make a collate function (samples -> batch) return one part per device, as ``TupleParallel`` takes them.

    The samples are cut into ``min(ndevices, len(samples))`` parts in their order, whose sizes differ by at most one,
    the larger first, and each part is collated. A short last batch thus gives fewer parts, never an empty one; no
    samples at all give one part, the function's answer to the empty list.

    ===============================================  ==================================================
    the function returns                             the decorated function returns
    ===============================================  ==================================================
    a tuple or list ``(x, y)``                       ``((x1, x2), (y1, y2))``
    a dict ``{"x": x}``                               ``{"x": (x1, x2)}``
    a namedtuple                                     that namedtuple of tuples
    one value ``x``, or its list of samples itself   ``(x1, x2)``
    ===============================================  ==================================================

    Only the outermost level is turned around. Methods may be decorated too. What pickles undecorated also pickles
    decorated, so DataLoader workers of every start method take it.

    Raises:
        ShardError: ``ndevices`` is no int of at least 1; or, when called, parts of unequal structure.

    >>> import torch
    >>> @tp_collate(2)
    ... def collate(samples):
    ...     xs, ys = zip(*samples, strict=True)
    ...     return torch.tensor(xs), torch.tensor(ys)
    >>> collate([(0, 5), (1, 6), (2, 7)])
    ((tensor([0, 1]), tensor([2])), (tensor([5, 6]), tensor([7])))
    """
    _check_ndevices(ndevices, "tp_collate")

    def decorate(collate: Callable[P, object]) -> Callable[P, Any]:
        _check_collate(collate)
        return cast("Callable[P, Any]", _TupleCollate(collate, ndevices))

    return decorate


def default_collate(ndevices: int) -> Callable[[Sequence[Any]], Any]:
    """What ``tp_collate(ndevices)`` makes of ``torch.utils.data.default_collate``; pickles for DataLoader workers.

    ``DataLoader(dataset, batch_size=64, collate_fn=default_collate(2))``. The whole batch is collated at once and then
    cut, so the parts of a tensor are views of one storage, as those of ``chunk`` are.

    Raises:
        ShardError: ``ndevices`` is no int of at least 1.

    >>> default_collate(2)([1, 2, 3])
    (tensor([1, 2]), tensor([3]))
    """
    _check_ndevices(ndevices, "default_collate")
    return _DefaultCollate(ndevices)


class _DefaultCollate:
    """Collates all samples and then cuts; lives as long as the DataLoader, keeps no state, and so is thread-safe.

    Part by part it collates only where cutting the whole might give something else: where the user registered a collate
    function for a type (what it returns need not have a row per sample), and where samples of unequal shapes may yet be
    equal within each part.
    """

    def __init__(self, ndevices: int) -> None:
        from torch.utils.data._utils import collate as torchs  # for import time

        self._ndevices = ndevices
        self._whole: Callable[[Sequence[Any]], Any] = torchs.default_collate
        self._registered = torchs.default_collate_fn_map
        self._torchs_own = tuple(each for each in self._registered.values() if each.__module__ == torchs.__name__)

    def __call__(self, samples: Sequence[Any]) -> Any:
        if tuple(self._registered.values()) == self._torchs_own:
            try:
                batch = self._whole(samples)
            except RuntimeError:  # samples of unequal shapes
                pass
            else:
                return _cut_batch(batch, _sizes(len(samples), self._ndevices))
        return _collate_in_parts(self._ndevices, self._whole, None, (samples,), {})

    def __repr__(self) -> str:
        return f"default_collate({self._ndevices})"

    def __reduce__(self) -> tuple[type[_DefaultCollate], tuple[int]]:
        return _DefaultCollate, (self._ndevices,)


def _cut_batch(batch: Any, sizes: tuple[int, ...]) -> Any:
    if isinstance(batch, torch.Tensor) or _is_texts(batch) or not is_container(batch):
        return _cut_rows(batch, sizes)
    if type(batch) is list:  # what torch makes of samples that are tuples: the usual case, so without ado
        return tuple([_cut_rows(item, sizes) for item in batch])
    return rebuilt(plain_tuple(batch), {key: _cut_rows(item, sizes) for key, item in items_of(batch).items()})


def _cut_rows(value: Any, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """The parts of a nested value whose leaves, tensors and sequences of texts, have a row per sample."""
    if isinstance(value, torch.Tensor):
        return tuple(value.split_with_sizes(sizes))
    if _is_texts(value):
        return tuple(_sliced(value, sizes))
    cut = {key: _cut_rows(item, sizes) for key, item in items_of(value).items()}
    return tuple(rebuilt(value, {key: parts[i] for key, parts in cut.items()}) for i in range(len(sizes)))


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], (str, bytes))


class _BoundTupleCollate(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """A decorated method, bound; made anew by each attribute access, as bound methods are."""

    __class__ = own_class  # pyright: ignore[reportIncompatibleMethodOverride]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return getattr, (self._owner(), self.__name__)

    def __copy__(self) -> _BoundTupleCollate:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(self._owner(), memo), self.__name__)

    def _owner(self) -> Any:
        """The instance or class that the method is bound to, else the class that holds it."""
        bound_to = getattr(self.__wrapped__, "__self__", None)
        return self._self_owner if bound_to is None else bound_to


class _TupleCollate(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """The decorated collate function; lives as long as the function, keeps no state, and so is thread-safe."""

    __class__ = own_class  # pyright: ignore[reportIncompatibleMethodOverride]
    __bound_function_wrapper__ = _BoundTupleCollate

    def __init__(self, collate: Callable[..., object], ndevices: int) -> None:
        super().__init__(collate, functools.partial(_collate_in_parts, ndevices))
        self._self_ndevices = ndevices

    def __reduce_ex__(self, protocol: object) -> str | tuple[Any, ...]:
        return self.__qualname__ if is_global(self) else _reduced_by_value(self)

    def __copy__(self) -> _TupleCollate:
        return _TupleCollate(self.__wrapped__, self._self_ndevices)

    def __deepcopy__(self, memo: dict[int, Any]) -> _TupleCollate:
        return _TupleCollate(copy.deepcopy(self.__wrapped__, memo), self._self_ndevices)


def _reduced_by_value(collate: _TupleCollate) -> tuple[Any, ...]:
    return _TupleCollate, (collate.__wrapped__, collate._self_ndevices)


sent_by_cloudpickle(_TupleCollate, _reduced_by_value)


def _check_ndevices(ndevices: object, face: str) -> None:
    if callable(ndevices):
        name = getattr(ndevices, "__qualname__", repr(ndevices))
        msg = f"{face} was given {name} where the number of devices belongs: write {face}(2), with parentheses"
        raise ShardError(msg)
    if not isinstance(ndevices, int) or isinstance(ndevices, bool) or ndevices < 1:
        value = reprlib.repr(ndevices)  # short: collate_fn=default_collate, without (2), gives it a whole batch
        msg = f"ndevices={value} is not a number of devices: give {face} an int of at least 1, e.g. len(device_ids)"
        raise ShardError(msg)


def _check_collate(collate: object) -> None:
    if not callable(collate) and not isinstance(collate, classmethod):
        msg = f"tp_collate decorates a collate function, not {collate!r}: give it a callable"
        raise ShardError(msg)


def _collate_in_parts(
    ndevices: int, collate: Callable[..., Any], _instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The body of the decorated function, with the parameters that wrapt calls it with after ``ndevices``."""
    samples, args, kwargs = _taken_out(collate, args, kwargs)
    cuts = _cut(samples, ndevices)
    parts = tuple(collate(cut, *args, **kwargs) for cut in cuts)
    is_single = parts[0] is cuts[0] or not is_container(parts[0])  # a list of texts collates to that very list
    check_kinds(parts, "part", _refuse_parts)
    return parts if is_single else transposed(parts, "part", _refuse_parts)


def _refuse_parts(reason: str) -> NoReturn:
    msg = f"the collate function's parts disagree: {reason}; return the same structure whatever the number of samples"
    raise ShardError(msg)


def _taken_out(
    collate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The samples, then the arguments beside them; the samples are the first parameter, by position or by name."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(inspect.signature(collate).parameters), "")
    if name not in kwargs:
        collate(**kwargs)  # raises Python's own TypeError about the missing argument
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


def _cut(samples: Any, ndevices: int) -> list[Any]:
    if isinstance(samples, Mapping) or not hasattr(samples, "__len__"):
        msg = f"tp_collate cuts a list of samples, not a {type(samples).__qualname__}: give list(samples)"
        raise ShardError(msg)
    return _sliced(samples, _sizes(len(samples), ndevices))


def _sliced(sequence: Any, sizes: tuple[int, ...]) -> list[Any]:
    ends = itertools.accumulate(sizes)
    return [sequence[end - size : end] for end, size in zip(ends, sizes, strict=True)]
