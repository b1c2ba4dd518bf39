"""`Tuplewise`: apply an operation to every item of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from parawrap._public import public


@public
class Tuplewise:
    """A sequence that forwards attribute access, indexing, and calls to each of its items.

    Each operation returns a new `Tuplewise` of the results. It equals the list of the results.
    Setting an attribute sets it on each item. A call passes the same arguments to each item.
    ``iter`` and ``len`` apply to the sequence itself: ``list(t)[1]`` is the second item. Names of
    the form ``__x__`` are not forwarded.

    A `Tuplewise` is thread-safe, picklable, and copyable if its items are.

    Args:
        seq: The items. They are read at once, and kept in their order.

    >>> Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4]
    True
    >>> Tuplewise(["a", "b"]).upper()
    Tuplewise(['A', 'B'])
    """

    # With two underscores, no attribute of an item has this name: Python stores _Tuplewise__seq
    __slots__ = ("__seq",)
    __hash__ = None  # type: ignore[assignment]  # it equals a list, and lists are not hashable
    __seq: tuple[Any, ...]

    def __init__(self, seq: Iterable[Any]) -> None:
        # Not by `setattr`, which `__setattr__` below forwards to the items
        object.__setattr__(self, "_Tuplewise__seq", tuple(seq))

    def __getattr__(self, name: str) -> Tuplewise:
        # copy and pickle look up special names, also before `__init__` has set the slot. An empty
        # slot comes here as well, and must not be looked up on items that do not exist
        is_protocol = name.startswith("__") and name.endswith("__")
        if is_protocol or name == "_Tuplewise__seq":
            raise AttributeError(name)
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
        return type(self)(map(operation, self.__seq))
