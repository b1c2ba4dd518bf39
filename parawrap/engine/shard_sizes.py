"""The sizes of shards: how many rows each lane gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Sizes = Callable[[int, int], tuple[int, ...]]
"""From rows and lanes to the sizes of the shards."""

_MOST_WITH_FEWER_PARTS = 2  # rows per part: one row next to two would be half the work, and batch norm refuses one row
_UNEVEN_BEYOND = 1.125  # an eighth: lanes usually differ by as much


def balanced_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and differ by at most one, the larger first; none of them is zero.

    >>> balanced_sizes(10, 4), balanced_sizes(2, 4), balanced_sizes(0, 4)
    ((3, 3, 2, 2), (1, 1), (0,))
    """
    if rows <= parts:
        return (1,) * rows or (0,)
    size, larger = divmod(rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def uneven_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and are not all equal, the larger first; or one size.

    Sizes that differ show which outputs follow the rows: a size that does not come from the rows cannot match all of them.
    Balanced sizes that differ stay. Of equal sizes, the first gets one row more and the last one row less. With one or two
    rows per part, one part fewer is used, so that no shard has one row next to shards of two: 4 rows on 2 lanes stay whole.

    >>> uneven_sizes(11, 2), uneven_sizes(16, 2), uneven_sizes(8, 4)
    ((6, 5), (9, 7), (3, 3, 2))
    >>> uneven_sizes(6, 3), uneven_sizes(4, 2), uneven_sizes(1, 2)
    ((4, 2), (4,), (1,))
    """
    sizes = balanced_sizes(rows, parts)
    size = sizes[0]
    if len(sizes) == 1 or sizes[-1] != size:
        return sizes
    if size > _MOST_WITH_FEWER_PARTS:
        return (size + 1, *sizes[1:-1], size - 1)
    return uneven_sizes(rows, len(sizes) - 1)


def sizes_in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`, multiples of `unit` except the last, as balanced as units allow.

    For models that compute `unit` rows at a time, however few they are given. No size is zero, unless `rows` is.

    >>> sizes_in_units(10, 4, 2), sizes_in_units(7, 2, 2), sizes_in_units(1, 4, 8), sizes_in_units(0, 4, 2)
    ((4, 2, 2, 2), (4, 3), (1,), (0,))
    """
    units = -(-rows // unit)
    *full, last = (unit * count for count in balanced_sizes(units, parts))
    return (*full, last - (units * unit - rows))


def hint_of_sizes(sizes: Sequence[int], largest: int, lanes: int, dim: int) -> str | None:
    """Return a warning for a shard that is much larger than `largest`, its size in a balanced cut.

    It names what balances the cut if all outputs have their rows on `dim`.
    """
    if sizes[0] <= _UNEVEN_BEYOND * largest:
        return None
    does = "runs whole" if len(sizes) == 1 else f"has a shard of {sizes[0]} rows"
    return (
        f"a call of {sum(sizes)} rows on {lanes} lanes {does}, because the sizes of shards must differ to show which "
        f"outputs follow the rows. With out_dims={dim}, the largest shard has {largest} of them"
    )
