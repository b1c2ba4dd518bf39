"""`tp_collate` and `default_collate`: collate functions that return one mini-batch per device."""

from __future__ import annotations

import functools
import itertools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec

import torch

from parawrap._public import public
from parawrap.api._containers import (
    Parts,
    check_kinds,
    collect_columns,
    is_container,
    items_of,
    plain_tuple,
    rebuild,
)
from parawrap.api._decorated import Decorated
from parawrap.engine.shard_sizes import balanced_sizes
from parawrap.errors import ShardError
from parawrap.tree import flatten, unflatten

P = ParamSpec("P")

# The batches of a DataLoader have at most two lengths: 64 entries are enough for many loaders
_sizes = functools.lru_cache(maxsize=64)(balanced_sizes)


@public
def tp_collate(ndevices: int) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Make a collate function return one part per device, in the format of ``TupleParallel``.

    The decorated function cuts the samples, in order, into ``min(ndevices, len(samples))`` parts
    and collates each part. The sizes of the parts differ by at most one, and larger parts come
    first. A short last batch gives fewer parts, none of them empty. An empty list of samples gives
    one part, collated from the empty list.

    ==============================================  ===========================================
    the function returns                            the decorated function returns
    ==============================================  ===========================================
    a tuple or list ``(x, y)``                      ``((x1, x2), (y1, y2))``
    a dict ``{"x": x}``                             ``{"x": (x1, x2)}``
    a namedtuple                                    the same namedtuple, with a tuple per field
    one value ``x``, or its list of samples itself  ``(x1, x2)``
    ==============================================  ===========================================

    Only the outermost level is transposed. A dict or namedtuple can be passed to ``TupleParallel``
    whole, and a dict also as ``model(**batch)``. A tuple is passed as ``model(*batch)``.

    The samples are the first positional argument. Methods may be decorated. A decorated function
    can be pickled if the function itself can, so it works in DataLoader workers with every start
    method.

    Args:
        ndevices: The number of devices.

    Raises:
        ShardError: If ``ndevices`` is not an int of at least 1; at the call, if the parts differ in
            structure.

    >>> import torch
    >>> @tp_collate(2)
    ... def collate(samples):
    ...     xs, ys = zip(*samples, strict=True)
    ...     return torch.tensor(xs), torch.tensor(ys)
    >>> collate([(0, 5), (1, 6), (2, 7)])
    ((tensor([0, 1]), tensor([2])), (tensor([5, 6]), tensor([7])))
    """
    _check_ndevices(ndevices, "tp_collate")

    def decorate(collate: Callable[P, Any]) -> Callable[P, Any]:
        decorated: Any = _TupleCollate(collate, ndevices)
        return decorated  # type: ignore[no-any-return]

    return decorate


@public
def default_collate(ndevices: int) -> Callable[[Sequence[Any]], Any]:
    """Return ``torch.utils.data.default_collate``, decorated by ``tp_collate(ndevices)``.

    Use it as ``DataLoader(dataset, batch_size=64, collate_fn=default_collate(2))``. It is picklable
    for DataLoader workers. It collates the whole batch and then cuts it, so the parts of a tensor
    are views of one storage, as with ``torch.chunk``.

    Args:
        ndevices: The number of devices.

    Raises:
        ShardError: If ``ndevices`` is not an int of at least 1.

    >>> default_collate(2)([1, 2, 3])
    (tensor([1, 2]), tensor([3]))
    """
    _check_ndevices(ndevices, "default_collate")
    return _DefaultCollate(ndevices)


class _DefaultCollate:
    """Collates the whole batch, then cuts it. Stateless and thread-safe.

    It collates part by part in two cases. The user has registered a collate function for a type:
    its results may not have one row per sample. Or the samples have different shapes, which may be
    equal within each part.
    """

    def __init__(self, ndevices: int) -> None:
        from torch.utils.data._utils import collate  # here, for a fast `import parawrap`

        self._ndevices = ndevices
        self._whole: Callable[[Sequence[Any]], Any] = collate.default_collate
        self._registered = collate.default_collate_fn_map
        self._of_torch = tuple(
            function
            for function in self._registered.values()
            if function.__module__ == collate.__name__
        )

    def __call__(self, samples: Sequence[Any]) -> Any:
        # Compared at each call: the user may register a function later
        if tuple(self._registered.values()) == self._of_torch:
            try:
                batch = self._whole(samples)
            except RuntimeError:
                # The samples have unequal shapes. If they differ within a part too, the collation
                # of the parts raises this error again
                pass
            else:
                return _cut_batch(batch, _sizes(len(samples), self._ndevices))
        return _collate_in_parts(self._ndevices, self._whole, samples)

    def __repr__(self) -> str:
        return f"default_collate({self._ndevices})"

    def __reduce__(self) -> tuple[type[_DefaultCollate], tuple[int]]:
        return _DefaultCollate, (self._ndevices,)


def _cut_batch(batch: Any, sizes: tuple[int, ...]) -> Any:
    """Cut a batch of torch's `default_collate` into parts, in the format of `tp_collate`."""
    has_items = is_container(batch) and not _is_strings(batch)
    if not has_items:
        return _cut_rows(batch, sizes)
    if type(batch) is list:  # torch collates tuples into a list: the usual case is fast
        return tuple([_cut_rows(item, sizes) for item in batch])
    items = {key: _cut_rows(item, sizes) for key, item in items_of(batch).items()}
    return rebuild(plain_tuple(batch), items)


def _cut_rows(value: Any, sizes: tuple[int, ...]) -> Parts:
    """Cut a nested value into parts.

    Its leaves are tensors and sequences of strings, with one row per sample.
    """
    if isinstance(value, torch.Tensor):
        return Parts(value.split_with_sizes(sizes))
    leaves, spec = flatten(value, _is_strings)
    slices_of_leaves: list[Sequence[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            slices_of_leaves.append(leaf.split_with_sizes(sizes))
        else:
            slices_of_leaves.append(_slice(leaf, sizes))
    parts = []
    # Not by `zip`: a value without leaves, such as {}, has parts too
    for index in range(len(sizes)):
        leaves_of_part = [slices[index] for slices in slices_of_leaves]
        parts.append(unflatten(spec, leaves_of_part))
    return Parts(parts)


def _is_strings(value: Any) -> bool:
    """True for a sequence of strings, one per sample. Only the first item is read."""
    if not isinstance(value, (list, tuple)) or len(value) == 0:
        return False
    return isinstance(value[0], (str, bytes))


class _TupleCollate(Decorated):
    """A decorated collate function. Stateless and thread-safe."""

    def __call__(self, samples: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _collate_in_parts(self._setting, self.__wrapped__, samples, *args, **kwargs)


def _check_ndevices(ndevices: Any, caller: str) -> None:
    is_integer = isinstance(ndevices, int) and not isinstance(ndevices, bool)
    if not is_integer or ndevices < 1:
        # Shortened: collate_fn=default_collate, without (2), passes a whole batch as `ndevices`
        value = reprlib.repr(ndevices)
        msg = (
            f"ndevices={value} is not a number of devices. Give {caller} an int of at least 1, "
            f"such as {caller}(2)"
        )
        raise ShardError(msg)


def _collate_in_parts(
    ndevices: int, collate: Callable[..., Any], samples: Any, *args: Any, **kwargs: Any
) -> Any:
    """Cut the samples, collate each part, and transpose the results, as `tp_collate` says."""
    if isinstance(samples, Mapping) or not hasattr(samples, "__len__"):
        msg = f"tp_collate cannot cut a {type(samples).__qualname__}. Give it a list: list(samples)"
        raise ShardError(msg)
    cuts = _slice(samples, _sizes(len(samples), ndevices))
    parts = [collate(cut, *args, **kwargs) for cut in cuts]
    check_kinds(parts, "part", _refuse_parts)
    first = parts[0]
    # A function may return its list of samples, such as strings, as one value
    if first is cuts[0] or not is_container(first):
        return Parts(parts)
    columns = collect_columns(parts, "part", _refuse_parts)
    items = {key: Parts(column) for key, column in columns.items()}
    return rebuild(plain_tuple(first), items)


def _refuse_parts(reason: str) -> NoReturn:
    msg = (
        f"the collate function's parts differ: {reason}. Return the same structure for any number "
        "of samples"
    )
    raise ShardError(msg)


def _slice(sequence: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Cut a sequence into slices of these sizes."""
    ends = itertools.accumulate(sizes)
    return [sequence[end - size : end] for end, size in zip(ends, sizes, strict=True)]
