"""`gather_rows`: collect the results for all rows of a dataset from the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from parawrap.errors import GatherError
from parawrap.functional._collectives import check_equal, gather_objects, is_whole, require_group
from parawrap.functional._rank_samplers import RankSampler
from parawrap.tree import WholeLeaf, addresses, flatten, replace_nodes, unflatten

T = TypeVar("T")

_CPU = torch.device("cpu")


class _RankRows(NamedTuple):
    """The rows of one rank, as the ranks exchange them.

    A column is a tensor or a list of the tree, with one entry per row.

    Attributes:
        indices: The index of each row in the dataset.
        places: The address of each column in the tree.
        columns: The columns, on the CPU.
    """

    indices: list[int]
    places: list[str]
    columns: list[Any]

    def describe_columns(self) -> str | None:
        """Describe the rows of all columns; None without rows, which may have any form."""
        if not self.indices:
            return None
        return ", ".join(map(_describe, self.places, self.columns))


def gather_rows(tree: T, sampler: Sampler[Any] | DataLoader[Any] | None) -> T:
    """Return the results for the whole dataset, in its order, from the results of all ranks.

    If a padding sampler gives a row to two ranks, the value of the lower rank counts. Rows
    travel through ``torch.distributed.all_gather_object``, which pickles them.

    Args:
        tree: This rank's results: a tensor with the rows on dim 0, a list with one item per row, or
            a tuple, dict, or dataclass of these. An item of a list is any value that can be
            pickled. The rows are in the order of this rank's sampler. A rank without rows gives
            empty tensors and lists, of any dtype and shape.
        sampler: The sampler that gave this rank its rows: from `get_dataset_sampler`, torch's
            DistributedSampler, or a loader from `shard_loader`. Call `gather_rows` before the
            loader's next epoch begins. With None, which `get_dataset_sampler` returns for one rank,
            the result is `tree`.

    Returns:
        The structure of `tree`, on every rank. Tensors are on the device of this rank's tensors,
        and have no autograd graph.

    Raises:
        GatherError: If the row count of a tensor or list differs from that of the sampler, ranks
            differ in structure, rows of a tensor differ in dtype or shape, or a row is missing on
            all ranks.
        TypeError: If a value is neither a dense tensor nor a list, or `sampler` does not show the
            rows of the other ranks.
        PlatformError: If there are several ranks, but ``ipc_groups=None`` forms no process group.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def squares():
        ...     loader = DataLoader(torch.arange(5), batch_size=2)
        ...     loader = functional.shard_loader(loader, pad=False)
        ...     outputs = torch.cat([batch**2 for batch in loader])
        ...     return functional.gather_rows(outputs, loader).tolist()
        >>> squares()
        RankResults([0, 1, 4, 9, 16], [0, 1, 4, 9, 16])
    """
    ranks = require_group("gather_rows")
    if sampler is None and ranks == 1:
        return tree
    # If a rank raises here, the others wait in the exchange until the launch ends them
    indices, length = _find_indices(sampler, ranks)
    leaves, spec = flatten(replace_nodes(tree, _is_list, WholeLeaf))  # a list is one column
    places = addresses(spec, "tree")
    columns = []
    for leaf, place in zip(leaves, places, strict=True):
        columns.append(_check_column(leaf, place, len(indices)))
    own = _RankRows(indices, places, [_move(column, _CPU) for column in columns])
    of_ranks = gather_objects(own)
    # From here on, no rank waits for another one, so a rank may raise alone
    structures = [", ".join(each.places) for each in of_ranks]
    check_equal("gather_rows", structures, "Give all ranks the same structure.")
    all_indices = [index for each in of_ranks for index in each.indices]
    order = _find_order(all_indices, length)
    check_equal(
        "gather_rows",
        [each.describe_columns() for each in of_ranks],
        "If rows differ in shape, give a list with one item per row, such as list(tensor).",
    )
    # Columns without rows may have another form, so they count only if no rank has rows
    with_rows = [each for each in of_ranks if each.indices] or [own]
    gathered = []
    for number, column in enumerate(columns):
        parts = [each.columns[number] for each in with_rows]
        gathered.append(_put_in_order(parts, order, _device_of(column)))
    return unflatten(spec, gathered)  # type: ignore[no-any-return]


# --- the order of rows ---


def _find_indices(sampler: Any, ranks: int) -> tuple[list[int], int]:
    """Return the dataset indices of this rank's rows, and the length of the dataset.

    Raises:
        TypeError: If the sampler does not show the rows of the other ranks.
    """
    if isinstance(sampler, DataLoader):
        loader: DataLoader[Any] = sampler
        sampler = loader.sampler
        # A DataLoader that was made with ``batch_sampler=`` has no batch size, and its sampler does
        # not choose the rows: the error below names its batch sampler. `shard_loader` replaces both
        # samplers of such a loader
        has_own_batches = loader.batch_size is None and loader.batch_sampler is not None
        if has_own_batches and not isinstance(sampler, RankSampler):
            sampler = loader.batch_sampler
    if isinstance(sampler, DistributedSampler):
        # To iterate a RankSampler would begin its next epoch. `rows` are those of the last one
        rows = sampler.rows() if isinstance(sampler, RankSampler) else sampler
        return list(rows), len(sampler.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler and ranks == 1:
        return list(sampler), len(sampler)
    msg = (
        f"gather_rows cannot know which rows a {type(sampler).__qualname__} gave to the {ranks} "
        "rank(s). Pass a loader from functional.shard_loader, or a sampler from "
        "functional.get_dataset_sampler."
    )
    raise TypeError(msg)


def _find_order(indices: Iterable[int], length: int) -> list[int]:
    """Return the position of each row of the dataset among the rows of all ranks.

    Of a row that several ranks have, the first counts.

    Raises:
        GatherError: If a row is missing, or is not in the dataset.
    """
    first: dict[int, int] = {}
    for position, index in enumerate(indices):
        first.setdefault(index, position)
    known = first.keys() & range(length)
    missing = length - len(known)
    unknown = len(first) - len(known)
    if missing or unknown:
        msg = (
            f"gather_rows: {missing} row(s) of the dataset are missing on all ranks, and "
            f"{unknown} row(s) are not in this rank's dataset. Give all ranks one dataset, a "
            "sampler with drop_last=False, and the same number of epochs."
        )
        raise GatherError(msg)
    return [first[index] for index in range(length)]


# --- columns ---


def _check_column(leaf: Any, place: str, rows: int) -> Any:
    """Return the column of a leaf.

    Raises:
        TypeError: If it is neither a dense tensor nor a list.
        GatherError: If it has another number of rows.
    """
    column = leaf.value if isinstance(leaf, WholeLeaf) else leaf
    kind = type(column).__qualname__
    if not (_is_list(column) or _has_rows(column)):
        msg = (
            f"{place} is a {kind}. gather_rows takes dense tensors with rows on dim 0, and lists "
            "with one item per row"
        )
        raise TypeError(msg)
    if len(column) != rows:
        msg = (
            f"{place} is a {kind} of {len(column)} row(s), but the sampler gave this rank {rows}. "
            "Give the results of one whole epoch, from a loader with drop_last=False: one list "
            "item per row, the outputs of batches concatenated, and several columns as a tuple "
            "or dict."
        )
        raise GatherError(msg)
    return column


def _is_list(value: object) -> bool:
    """True for a list, but not of a subclass, which may have more than its items."""
    return type(value) is list


def _has_rows(value: object) -> bool:
    """True for a dense tensor with rows on dim 0."""
    return isinstance(value, Tensor) and is_whole(value) and value.dim() > 0


def _move(column: Any, device: torch.device) -> Any:
    """Return a column with its tensors on a device, without their graphs."""
    return replace_nodes(column, torch.is_tensor, lambda tensor: tensor.detach().to(device))


def _device_of(column: Any) -> torch.device:
    """Return the device of the first tensor in a column; the CPU without one."""
    leaves, _ = flatten(column)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            return leaf.device
    return _CPU


def _describe(place: str, column: Any) -> str:
    """Describe the rows of a column. The items of a list may differ, so they are not described."""
    if isinstance(column, Tensor):
        return f"{place} with rows of {column.dtype} and shape {tuple(column.shape[1:])}"
    return f"a list {place}"


def _put_in_order(parts: list[Any], order: list[int], device: torch.device) -> Any:
    """Return the rows of one column of all ranks in the order of the dataset, on a device."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[order].to(device)
    items = [*chain(*parts)]
    return _move([items[position] for position in order], device)
