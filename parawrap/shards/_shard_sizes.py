"""How many rows each shard of a call gets."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Sizes", "balance", "equal", "in_units", "uneven"]

Sizes = Callable[[int, int], tuple[int, ...]]
"""From rows and lanes to the sizes of the shards."""

_MOST_WITH_FEWER_PARTS = 2  # rows per part: one row next to two would be half the work, and batch norm refuses one row


def balance(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and differ by at most one, the larger first; none of them is zero.

    >>> balance(10, 4), balance(2, 4), balance(0, 4)
    ((3, 3, 2, 2), (1, 1), (0,))
    """
    if rows <= parts:
        return (1,) * rows or (0,)
    size, larger = divmod(rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def uneven(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and are not all equal, the larger first; or one size.

    Sizes that differ show which outputs follow the rows: a size that does not come from the rows cannot match all of them.
    Balanced sizes that differ stay. Of equal sizes, the first gets one row more and the last one row less. With one or two
    rows per part, one part fewer is used, so that no shard has one row next to shards of two: 4 rows on 2 lanes stay whole.

    >>> uneven(11, 2), uneven(16, 2), uneven(8, 4), uneven(6, 3), uneven(4, 2), uneven(1, 2)
    ((6, 5), (9, 7), (3, 3, 2), (4, 2), (4,), (1,))
    """
    sizes = balance(rows, parts)
    size = sizes[0]
    if len(sizes) == 1 or sizes[-1] != size:
        return sizes
    if size > _MOST_WITH_FEWER_PARTS:
        return (size + 1, *sizes[1:-1], size - 1)
    return uneven(rows, len(sizes) - 1)


def equal(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`: all equal, except the last, which is the rest.

    For devices that compile each new size: a call has two sizes at most.

    >>> equal(10, 4), equal(2, 4), equal(16, 4), equal(0, 4)
    ((3, 3, 3, 1), (1, 1), (4, 4, 4, 4), (0,))
    """
    size = max(1, -(-rows // parts))
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest or not rows else ())


def in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`, multiples of `unit` except the last, as balanced as units allow.

    For models that compute `unit` rows at a time, however few they are given. No size is zero, unless `rows` is.

    >>> in_units(10, 4, 2), in_units(7, 2, 2), in_units(1, 4, 8), in_units(0, 4, 2)
    ((4, 2, 2, 2), (4, 3), (1,), (0,))
    """
    units = -(-rows // unit)
    *full, last = (unit * count for count in balance(units, parts))
    return (*full, last - (units * unit - rows))
