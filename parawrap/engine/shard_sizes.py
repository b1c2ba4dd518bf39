"""The sizes of shards: how many rows each lane gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

Sizes = Callable[[int, int], tuple[int, ...]]
"""Takes the numbers of rows and of lanes, and returns the sizes of the shards."""

# With up to so many rows per part, fewer parts are used: one row next to two would be half the
# work, and batch norm refuses one row
_MOST_WITH_FEWER_PARTS = 2
# How much larger than in a balanced cut the first shard may be without a warning. An eighth: the
# speed of lanes usually differs by as much
_UNEVEN_BEYOND = 1.125


def balanced_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and differ by at most one, the larger first.

    None of them is zero, unless `rows` is.

    >>> balanced_sizes(10, 4), balanced_sizes(2, 4), balanced_sizes(0, 4)
    ((3, 3, 2, 2), (1, 1), (0,))
    """
    if rows == 0:
        return (0,)
    if rows <= parts:
        return (1,) * rows
    size, larger = divmod(rows, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


def uneven_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows` and are not all equal, the larger first; or one size.

    Sizes that differ show which outputs follow the rows: a size that does not come from the rows
    cannot match all of them. If balanced sizes differ, they are returned. If they are equal, the
    first gets one row more, and the last one row less. With one or two rows per part, one part
    fewer is used, so that no shard has one row next to shards of two: 4 rows on 2 lanes stay whole.

    >>> uneven_sizes(11, 2), uneven_sizes(16, 2), uneven_sizes(8, 4)
    ((6, 5), (9, 7), (3, 3, 2))
    >>> uneven_sizes(6, 3), uneven_sizes(4, 2), uneven_sizes(1, 2)
    ((4, 2), (4,), (1,))
    """
    sizes = balanced_sizes(rows, parts)
    size = sizes[0]
    are_equal = sizes[-1] == size  # the larger come first
    if len(sizes) == 1 or not are_equal:
        return sizes
    if size > _MOST_WITH_FEWER_PARTS:
        return (size + 1, *sizes[1:-1], size - 1)
    return uneven_sizes(rows, len(sizes) - 1)


def sizes_of_block(unit: int, *, are_uneven: bool) -> Sizes:
    """Return the rule of a parallel block, in units of `unit` rows: it takes and returns units.

    A block uses fewer parts where one row would be next to shards of two: in training, a batch norm
    refuses one row, and the last batch of a loader may have any size. If every shard has one row,
    as with 2 rows on 2 lanes, the sizes stay.

    >>> sizes = sizes_of_block(1, are_uneven=False)
    >>> sizes(3, 2), sizes(5, 3), sizes(7, 4), sizes(2, 2)
    ((3,), (3, 2), (3, 2, 2), (1, 1))
    """
    sizes = uneven_sizes if are_uneven else balanced_sizes
    # A unit of several rows is never a single row
    return sizes if unit > 1 else partial(_avoid_single_row, sizes)


def _avoid_single_row(sizes: Sizes, rows: int, parts: int) -> tuple[int, ...]:
    """Return sizes without a single row next to more rows: with fewer parts than `parts`."""
    found = sizes(rows, parts)
    # The larger come first, so a single row is last
    while found[-1] == 1 and found[0] > 1:
        found = sizes(rows, len(found) - 1)
    return found


def sizes_in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Return sizes that add up to `rows`, and are multiples of `unit` except for the last one.

    In units, they are balanced. They are for models that compute `unit` rows at a time, however few
    they are given. No size is zero, unless `rows` is.

    >>> sizes_in_units(10, 4, 2), sizes_in_units(7, 2, 2), sizes_in_units(1, 4, 8)
    ((4, 2, 2, 2), (4, 3), (1,))
    >>> sizes_in_units(0, 4, 2)
    (0,)
    """
    units = ceil(rows / unit)
    *full, last = (unit * count for count in balanced_sizes(units, parts))
    missing = units * unit - rows  # rows of the last unit
    return (*full, last - missing)


def hint_of_sizes(sizes: Sequence[int], largest: int, lanes: int, dim: int) -> str | None:
    """Return a warning if the first shard is much larger than `largest`, its balanced size.

    The warning names the option that balances the cut if all outputs have their rows on `dim`.
    """
    first = sizes[0]
    if first <= _UNEVEN_BEYOND * largest:
        return None
    result = "runs whole" if len(sizes) == 1 else f"has a shard of {first} rows"
    return (
        f"a call of {sum(sizes)} rows on {lanes} lanes {result}, because the sizes of shards must "
        f"differ to show which outputs follow the rows. If all outputs have their rows on dim "
        f"{dim}, declare it with out_dims={dim}: the largest shard has {largest} of them then"
    )
