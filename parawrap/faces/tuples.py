"""Values in tuple form, one part per device: join them, transpose them, move them.

This layer knows tuples, lists, namedtuples and mappings of tensors. It refuses to know modules, lanes and plans:
nothing here runs anything. The public names are those of the library tuple_parallel, which this succeeds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from types import NoneType
from typing import Any, NoReturn, Self, TypeVar

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from parawrap.errors import GatherError, ShardError

__all__ = ["Batch", "Tuplewise", "cat", "cuda_attrs", "recursive_cuda", "recursive_to", "transpose"]

T = TypeVar("T")

_NAMESPACE = "parawrap"  # the optree namespace in which the rest of the package registers types


# -- joining and transposing -------------------------------------------------------------------------------------------


def cat(returns: Any, dim: int = 0) -> Any:
    """Join what ``TupleParallel`` or ``tuple_fn`` returned: ``TupleParallel(model, devices, reduction=cat)``.

    =========================================================  ======================================
    ``returns``                                                the result
    =========================================================  ======================================
    ``(x1, x2)``, tensors: ``forward`` returned a tensor       ``x``, joined along ``dim``
    0-d tensors: it returned a loss                            a vector with an entry per part
    ``((x1, x2), (y1, y2))``: it returned a tuple or list      ``(x, y)``
    ``({"x": x1}, {"x": x2})``: it returned a dict             ``{"x": x}``
    a dict or namedtuple of tuples, as ``tp_collate`` has it   that dict or namedtuple of joined values
    =========================================================  ======================================

    Deeper levels follow the same rule per position or key. Every joined tensor lies on the device of its first part.
    None stays None; any other value that is no tensor cannot be joined and stays a tuple of its parts.

    Raises:
        GatherError: parts of unequal structure, or tensors whose shapes differ elsewhere than on ``dim``.

    >>> cat(((torch.zeros(3, 4), torch.zeros(2, 4)), (torch.tensor(1.0), torch.tensor(2.0))))[1]
    tensor([1., 2.])
    """
    if not _is_transposed(returns):
        return _joined(tuple(returns), dim, "output")
    items = items_of(returns)
    _check_part_counts(items)
    return rebuilt(plain_tuple(returns), _joined_items(items, dim, "output"))


def transpose(rows: Iterable[Any]) -> Any:
    """Turn rows into columns: what ``zip(*rows)`` does, but without dropping anything.

    Rows of tuples or lists give a tuple of tuples, rows of one namedtuple class that namedtuple of tuples, rows of
    dicts a dict of tuples (a Mapping subclass keeps its type where it can). No rows give an empty tuple.

    Raises:
        ShardError: rows of unequal lengths, keys or kinds; the message names both rows.

    >>> transpose([(1, 2), (3, 4), (5, 6)])
    ((1, 3, 5), (2, 4, 6))
    >>> transpose([{"x": 1}, {"x": 2}])
    {'x': (1, 2)}
    """
    rows = tuple(rows)
    for position, row in enumerate(rows):
        if not is_container(row):
            _refuse_row(f"row {position} is {_described(row)}: give every row as a tuple, a list or a dict")
    return transposed(rows, "row", _refuse_row) if rows else ()


def transposed(rows: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> Any:
    """``transpose`` for at least one container, with the caller's ``noun`` for a row and way to raise."""
    columns = _columns(rows, noun, refuse)
    return rebuilt(plain_tuple(rows[0]), columns)


def is_container(value: Any) -> bool:
    """Whether ``value`` has positions or keys of its own; a PackedSequence, though a namedtuple, is a single value."""
    return isinstance(value, (tuple, list, Mapping)) and not isinstance(value, PackedSequence)


def items_of(container: Any) -> dict[Any, Any]:
    """Key or position -> item."""
    if type(container) is dict:
        return container
    return dict(container.items() if isinstance(container, Mapping) else enumerate(container))


def plain_tuple(container: Any) -> Any:
    """What a container becomes when it is turned around: a list becomes a tuple, any other keeps its type."""
    return tuple(container) if isinstance(container, list) else container


def rebuilt(like: Any, items: dict[Any, Any]) -> Any:
    """A container of the type of ``like`` that holds ``items``, whose keys or positions are those of ``like``."""
    if type(like) is dict:
        return items
    if optree.is_namedtuple_instance(like):
        return like._make(items.values())
    if isinstance(like, tuple):
        return tuple(items.values())
    if isinstance(like, (MutableSequence, MutableMapping)):
        clone = copy.copy(like)  # a subclass may carry more than its items
        for key, item in items.items():
            clone[key] = item
        return clone
    make: Callable[[Any], Any] = type(like)
    content = items if isinstance(like, Mapping) else list(items.values())
    try:
        return make(content)
    except TypeError:  # not made from its items
        return content


def check_kinds(values: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> None:
    """Call ``refuse`` with a message unless all values are of one kind: tensors, sequences, dicts, one namedtuple..."""
    for position, value in enumerate(values):
        if _kind(value) is not _kind(values[0]):
            refuse(f"{noun} {position} is {_described(value)}, {noun} 0 is {_described(values[0])}")


def _refuse_row(reason: str) -> NoReturn:
    msg = f"cannot transpose: {reason}"
    raise ShardError(msg)


def _kind(value: Any) -> type:
    """What must agree between parts: lists and tuples are alike, and so are all mappings."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if value is None:
        return NoneType
    if not is_container(value):
        return object
    if optree.is_namedtuple_instance(value):
        return type(value)
    return dict if isinstance(value, Mapping) else tuple


def _described(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__qualname__}"


def _columns(rows: Sequence[Any], noun: str, refuse: Callable[[str], NoReturn]) -> dict[Any, tuple[Any, ...]]:
    """Position or key -> that item of every row, after checking that all rows have the same ones."""
    check_kinds(rows, noun, refuse)
    tables = [items_of(row) for row in rows]
    for position, table in enumerate(tables):
        if table.keys() != tables[0].keys():
            has, first_has = _extents(rows[position], rows[0])
            refuse(f"{noun} {position} has {has}, {noun} 0 has {first_has}")
    return {key: tuple(table[key] for table in tables) for key in tables[0]}


def _extents(row: Any, first: Any) -> tuple[str, str]:
    if isinstance(row, Mapping):
        return f"the keys {list(row)}", f"{list(first)}"
    return f"{len(row)} item{'' if len(row) == 1 else 's'}", f"{len(first)}"


def _is_transposed(returns: Any) -> bool:
    """Whether the outermost level is the positions or keys of one output, not the parts of it."""
    if isinstance(returns, Mapping) or optree.is_namedtuple_instance(returns):
        return True
    return len(returns) > 0 and _kind(returns[0]) is tuple


def _check_part_counts(items: dict[Any, Any]) -> None:
    for key, parts in items.items():
        if _kind(parts) is not tuple:
            msg = f"cannot join output[{key!r}]: it is {_described(parts)}, not the tuple of its parts"
            raise GatherError(msg)
    counts = {key: len(parts) for key, parts in items.items()}
    if len(set(counts.values())) > 1:
        msg = f"cannot join outputs of unequal numbers of parts: {counts}: return one part per device for each of them"
        raise GatherError(msg)


def _joined_items(items: dict[Any, Any], dim: int, place: str) -> dict[Any, Any]:
    return {key: _joined(tuple(parts), dim, f"{place}[{key!r}]") for key, parts in items.items()}


def _joined(parts: tuple[Any, ...], dim: int, place: str) -> Any:
    def refuse(reason: str) -> NoReturn:
        msg = f"cannot join {place}: {reason}; return the same structure on every device"
        raise GatherError(msg)

    if not parts:
        refuse("it has no parts")
    check_kinds(parts, "part", refuse)
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return _joined_tensors(parts, dim, place)
    if is_container(first):
        return rebuilt(first, _joined_items(_columns(parts, "part", refuse), dim, place))
    return None if first is None else parts


def _joined_tensors(parts: tuple[torch.Tensor, ...], dim: int, place: str) -> torch.Tensor:
    if len({_shape_beside(part, dim) for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        msg = f"cannot join {place}: shapes {shapes} differ elsewhere than on dim {dim}: pad them, or do not join"
        raise GatherError(msg)
    here = [part.to(parts[0].device) for part in parts]
    if here[0].dim() == 0:
        return torch.stack(here)
    if not -here[0].dim() <= dim < here[0].dim():
        msg = f"cannot join {place}: shape {tuple(here[0].shape)} has no dim {dim}: give a dim that it has"
        raise GatherError(msg)
    return torch.cat(here, dim)


def _shape_beside(tensor: torch.Tensor, dim: int) -> tuple[int | None, ...]:
    """The shape with ``dim`` blanked out, so that equality means that the tensors can be joined on it."""
    joined = dim % max(tensor.dim(), 1)
    return tuple(None if position == joined else size for position, size in enumerate(tensor.shape))


# -- the same thing to each item ---------------------------------------------------------------------------------------


class Tuplewise:
    """A sequence whose attributes, items and calls are those of each of its items; sugar for a list comprehension.

    The result of each is a Tuplewise again, and equals the list of results. Setting an attribute sets it on each item;
    a call hands the same arguments to each. ``iter`` and ``len`` are the sequence's own: ``list(t)[1]`` is the second
    item. An item's exception keeps its type and gains a note that says which item it was. Names of the form ``__x__``
    are never forwarded. As thread-safe as the items are; pickles and copies if they do.

    >>> Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4]
    True
    >>> Tuplewise(["a", "b"]).upper()
    Tuplewise(['A', 'B'])
    """

    __slots__ = ("__seq",)
    __hash__ = None  # type: ignore[assignment]  # equal to a list, so as unhashable as one
    __seq: tuple[Any, ...]

    def __init__(self, seq: Iterable[Any]) -> None:
        object.__setattr__(self, "_Tuplewise__seq", tuple(seq))

    def __getattr__(self, name: str) -> Tuplewise:
        if (name.startswith("__") and name.endswith("__")) or name == "_Tuplewise__seq":
            raise AttributeError(name)  # copy and pickle ask for these, also before there are items
        return self.__each(lambda item: getattr(item, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self.__each(lambda item: setattr(item, name, value))

    def __getitem__(self, key: Any) -> Tuplewise:
        return self.__each(lambda item: item[key])

    def __call__(self, *args: Any, **kwargs: Any) -> Tuplewise:
        return self.__each(lambda item: item(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__seq)

    def __len__(self) -> int:
        return len(self.__seq)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (list, tuple, Tuplewise)):
            return list(self) == list(other)
        return NotImplemented

    def __repr__(self) -> str:
        return f"Tuplewise({list(self)!r})"

    def __reduce__(self) -> tuple[type[Tuplewise], tuple[tuple[Any, ...]]]:
        return type(self), (self.__seq,)

    def __each(self, operation: Callable[[Any], Any]) -> Tuplewise:
        return type(self)(self.__applied(operation))

    def __applied(self, operation: Callable[[Any], Any]) -> Iterator[Any]:
        for position, item in enumerate(self.__seq):
            try:
                yield operation(item)
            except Exception as error:
                error.add_note(f"in item {position} of a Tuplewise of {len(self)}")
                raise


# -- moving ------------------------------------------------------------------------------------------------------------


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

    def call(leaf: Any) -> Any:
        for name, args in methods.items():
            if _has_method(leaf, name):
                return _not_none(getattr(leaf, name)(*args, **kwargs), leaf, name)
        if isinstance(leaf, (list, Mapping)):  # a subclass that optree does not know
            return rebuilt(leaf, {key: _call_on_leaves(item, methods, kwargs) for key, item in items_of(leaf).items()})
        return leaf

    def is_leaf(node: Any) -> bool:
        return any(_has_method(node, name) for name in methods)

    return optree.tree_map(call, value, is_leaf=is_leaf, namespace=_NAMESPACE)


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
