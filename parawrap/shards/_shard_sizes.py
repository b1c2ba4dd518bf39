"""How many rows each shard of a call gets."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Sizes", "balanced", "equal", "in_units", "telling"]

Sizes = Callable[[int, int], tuple[int, ...]]
"""From rows and lanes to the sizes of the shards."""

_SMALLEST_SPLIT = 4


def balanced(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and differ by at most one, the larger first; none of them is zero.

    >>> balanced(10, 4), balanced(2, 4), balanced(0, 4)
    ((3, 3, 2, 2), (1, 1), (0,))
    """
    if rows <= parts:
        return (1,) * rows or (0,)
    size, larger = divmod(rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def telling(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes with at least two different row counts, so that one call shows the outputs that follow the rows.

    Balanced sizes stay as they are if they differ. Of equal sizes, the last is split in two, so there may be `parts + 1`
    sizes and no lane gets more rows than in a balanced call. A split leaves at least two rows on each side, because
    BatchNorm refuses a single row in training. Shares too small to split are uneven instead. Two lanes with one or two
    rows each offer neither: the single size that is returned is the whole call.

    >>> telling(11, 2), telling(16, 2), telling(6, 2), telling(8, 4), telling(4, 4), telling(4, 2)
    ((6, 5), (8, 4, 4), (4, 2), (4, 2, 2), (2, 1, 1), (4,))
    """
    sizes = balanced(rows, parts)
    size = sizes[0]
    if len(set(sizes)) > 1 or len(sizes) == 1:
        return sizes
    if size >= _SMALLEST_SPLIT:
        return (*sizes[:-1], size - size // 2, size // 2)
    if size == 3:
        return (4, *sizes[1:-1], 2)
    return (2 * size, *sizes[2:])


def equal(rows: int, parts: int, size: int = 0) -> tuple[int, ...]:
    """Return sizes that add up to `rows`: each of them `size`, or more if that is too few rows, and the last the rest.

    For devices that compile each new size: `size` is what the parts of earlier calls had. A call with other rows then
    brings at most one new size, unless it has more rows than any before.

    >>> equal(10, 4), equal(7, 4, 3), equal(2, 4, 3), equal(16, 4, 3), equal(0, 4, 3)
    ((3, 3, 3, 1), (3, 3, 1), (2,), (4, 4, 4, 4), (0,))
    """
    size = max(size, -(-rows // parts))
    if rows <= size:
        return (rows,)
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest else ())


def in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`, multiples of `unit` except the last, as balanced as units allow.

    For models that compute `unit` rows at a time, however few they are given. No size is zero, unless `rows` is.

    >>> in_units(10, 4, 2), in_units(7, 2, 2), in_units(1, 4, 8), in_units(0, 4, 2)
    ((4, 2, 2, 2), (4, 3), (1,), (0,))
    """
    units = -(-rows // unit)
    *full, last = (unit * count for count in balanced(units, parts))
    return (*full, last - (units * unit - rows))
