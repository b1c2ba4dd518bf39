"""The sizes of shards: how many rows each lane gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

Sizes = Callable[[int, int], tuple[int, ...]]
"""From rows and lanes to the sizes of the shards."""

# Rows per part: one row next to two would be half the work, and batch norm refuses one row.
_MOST_WITH_FEWER_PARTS = 2
# An eighth: lanes usually differ by as much.
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
    cannot match all of them. Balanced sizes that differ stay. Of equal sizes, the first gets one
    row more and the last one row less. With one or two rows per part, one part fewer is used, so
    that no shard has one row next to shards of two: 4 rows on 2 lanes stay whole.

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
    """Return the rule of a parallel block, in units of `unit` rows.

    A block uses fewer parts where one row would stand next to shards of two: in training, a batch
    norm refuses one row, and the last batch of a loader may have any size. Where every shard has
    one row, as 2 rows on 2 lanes, the sizes stay.

    >>> sizes = sizes_of_block(1, are_uneven=False)
    >>> sizes(3, 2), sizes(5, 3), sizes(7, 4), sizes(2, 2)
    ((3,), (3, 2), (3, 2, 2), (1, 1))
    """
    sizes = uneven_sizes if are_uneven else balanced_sizes
    # A unit of several rows is never a single row.
    return sizes if unit > 1 else partial(_avoid_single_row, sizes)


def _avoid_single_row(sizes: Sizes, rows: int, parts: int) -> tuple[int, ...]:
    found = sizes(rows, parts)
    # The larger come first, so a single row is last
    while found[-1] == 1 and found[0] > 1:
        found = sizes(rows, len(found) - 1)
    return found


def sizes_in_units(rows: int, parts: int, unit: int) -> tuple[int, ...]:
    """Return sizes that are multiples of `unit`, except the last, as balanced as units allow.

    They add up to `rows`.

    For models that compute `unit` rows at a time, however few they are given. No size is zero,
    unless `rows` is.

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
    """Return a warning for a shard that is much larger than `largest`, its size in a balanced cut.

    It names what balances the cut if all outputs have their rows on `dim`.
    """
    if sizes[0] <= _UNEVEN_BEYOND * largest:
        return None
    does = "runs whole" if len(sizes) == 1 else f"has a shard of {sizes[0]} rows"
    return (
        f"a call of {sum(sizes)} rows on {lanes} lanes {does}, because the sizes of shards must "
        f"differ to show which outputs follow the rows. If all outputs have their rows on dim "
        f"{dim}, declare it with out_dims={dim}: the largest shard has {largest} of them then"
    )
