"""`gather_rows`: collect the results for all rows of a dataset from the ranks that evaluated them."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from parawrap.errors import GatherError
from parawrap.functional._collectives import exchange, exchange_texts, require_group, text_of, to_bytes
from parawrap.functional._rank_samplers import ContiguousShare, EachEpoch, OrderedShare
from parawrap.functional._shard_loader import share_of
from parawrap.tree import Opaque, addresses, flatten, replace_nodes, unflatten

__all__ = ["gather_rows"]

T = TypeVar("T")

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_EMPTY = "an empty list"
_STRINGS = "strings"
_ITEMS = "an item of a list: "  # followed by its structure
_PLAIN = (str, bool, int, float)


class _Column(NamedTuple):
    """One leaf of a rank's tree as bytes.

    Attributes:
        kind: "strings", "an empty list", the type or dtype of numbers, or the structure of items. The same on every rank
            that has rows.
        shape: The shape of one row; empty for items, which may differ in shape.
        data: The bytes of all rows; for strings, their lengths and then their text; for items, as `_column_of_items` says.
    """

    kind: str
    shape: list[int]
    data: Tensor


def gather_rows(tree: T, sampler: Sampler[Any] | DataLoader[Any] | None) -> T:
    """Return the rows of the whole dataset in its order, each row once, from the rows of all ranks.

    A padding sampler gives some rows to two ranks. The values of the lower rank count then. Rows are not pickled.

    Args:
        tree: This rank's results: a tensor with the rows on dim 0, a list with one item per row, or a tuple, dict, or
            dataclass of these. An item of a list is a string, a number, or a tensor of any length; or a dict, tuple, or
            list of these. The rows are in the order of this rank's sampler. A rank without rows gives empty tensors and
            lists, of any dtype and shape.
        sampler: The sampler that gave this rank its rows: from `get_dataset_sampler`, torch's DistributedSampler, or a
            loader from `shard_loader`. Call `gather_rows` before the loader's next epoch begins. With None, which
            `get_dataset_sampler` returns for one rank, the result is `tree`.

    Returns:
        The structure of `tree`, on every rank. Tensors are on the device of this rank's tensors, and have no autograd
        graph.

    Raises:
        GatherError: If the row count of a tensor or list differs from that of the sampler, rows or ranks differ in
            structure or dtype, rows of a tensor differ in shape, or a row is missing on all ranks.
        TypeError: If a value is neither a dense tensor, a string, nor a number, or `sampler` does not show the rows of the
            other ranks.
        PlatformError: If there are several ranks, but ``ipc_groups=None`` forms no process group.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def squares():
        ...     loader = functional.shard_loader(DataLoader(torch.arange(5), batch_size=2), pad=False)
        ...     return functional.gather_rows(torch.cat([batch**2 for batch in loader]), loader).tolist()
        >>> squares()
        RankResults([0, 1, 4, 9, 16], [0, 1, 4, 9, 16])
    """
    ranks = require_group("gather_rows")
    if sampler is None and ranks == 1:
        return tree
    indices, whole = _indices(sampler, ranks)
    leaves, spec = flatten(replace_nodes(tree, _is_list_of_rows, Opaque))
    places = addresses(spec, ("tree",))
    columns = [_column(leaf, place, len(indices)) for leaf, place in zip(leaves, places, strict=True)]
    reports = _reports(len(indices), places, columns, ranks)
    order = _order(
        _gathered(torch.tensor(indices, dtype=torch.int64, device="cpu"), [each["rows"] for each in reports]), whole
    )
    found = []
    for i, (leaf, place, column) in enumerate(zip(leaves, places, columns, strict=True)):
        kind, shape = _agreed_kind(reports, i, place)
        parts = _gathered(column.data, [each["columns"][i][2] for each in reports])
        rows = [
            _decoded(part, report["rows"], kind, shape, _device_of(leaf))
            for part, report in zip(parts, reports, strict=True)
        ]
        found.append(_in_order(rows, order, leaf))
    return unflatten(spec, found)  # type: ignore[no-any-return]


def _gathered(data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [data] if len(sizes) == 1 else exchange(data, sizes)


# --- the order of rows ---


def _indices(sampler: Any, ranks: int) -> tuple[list[int], Iterable[int]]:
    """Return the dataset indices of this rank's rows, and the sorted indices of all rows."""
    share = share_of(sampler) if isinstance(sampler, DataLoader) else sampler
    share = share.share if isinstance(share, EachEpoch) else share
    if isinstance(share, DistributedSampler):
        return list(share), range(len(share.dataset))  # type: ignore[arg-type]
    if isinstance(share, ContiguousShare):
        return list(share), share.whole
    if isinstance(share, OrderedShare):
        return _flat(share), sorted(set(_flat(share.order)))
    if type(share) is SequentialSampler and ranks == 1:
        return list(share), range(len(share))
    msg = (
        f"gather_rows cannot know which rows a {type(share).__qualname__} gave to the {ranks} rank(s). "
        "Pass a loader from functional.shard_loader, or a sampler from functional.get_dataset_sampler."
    )
    raise TypeError(msg)


def _flat(items: Iterable[Any]) -> list[int]:
    """Flatten items that are indices or batches of indices."""
    found: list[int] = []
    for item in items:
        try:
            found += [operator.index(index) for index in (item if isinstance(item, (list, tuple)) else (item,))]
        except TypeError:
            msg = f"gather_rows orders rows by index, but the sampler gave {item!r}. Use a dataset with integer indices."
            raise TypeError(msg) from None
    return found


def _order(parts: list[Tensor], whole: Iterable[int]) -> list[int]:
    """Return the position of each row of the dataset in the concatenation of all ranks' rows."""
    indices = torch.cat(parts)
    places = torch.argsort(indices, stable=True)
    ordered = indices[places]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    found, wanted = ordered[first].tolist(), list(whole)
    if found == wanted:
        return places[first].tolist()
    missing = sorted(set(wanted) - set(found))
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        msg = (
            f"gather_rows: {len(missing)} row(s) of the dataset are missing on all ranks: {some}. "
            "Use a sampler with drop_last=False, and the same number of epochs on every rank."
        )
        raise GatherError(msg)
    extra = min(set(found) - set(wanted))
    msg = f"gather_rows: another rank has row {extra}, which this rank's sampler never gives. Give all ranks one dataset."
    raise GatherError(msg)


# --- the bytes of rows ---


def _is_list_of_rows(value: Any) -> bool:
    """True for a list, which has one item per row, and for a plain tuple of strings or numbers."""
    return type(value) is list or (type(value) is tuple and all(isinstance(item, _PLAIN) for item in value))


def _column(leaf: Any, place: str, rows: int) -> _Column:
    """Return a leaf as bytes."""
    value = leaf.value if isinstance(leaf, Opaque) else leaf
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, _PLAIN) for item in value) or not value:
            _check_rows(len(value), rows, place)
            return _column_of_values(value, place)
        if len(value) != rows:
            msg = (
                f"{place} is a list of {len(value)} item(s), but the sampler gave this rank {rows} row(s), and a list has "
                "one item per row. Give several columns as a tuple or dict, and concatenate the outputs of batches."
            )
            raise GatherError(msg)
        return _column_of_items(value, place)
    value = _dense(value, place)
    if value.dim() == 0:
        msg = (
            f"{place} is a tensor without dims. Give a list with one tensor per row, or stack them; "
            "functional.reduce_metrics takes single numbers."
        )
        raise GatherError(msg)
    _check_rows(len(value), rows, place)
    return _Column(str(value.dtype), list(value.shape[1:]), _bytes_of(value))


def _dense(value: Any, place: str) -> Tensor:
    """Return the value if it is a dense tensor.

    Raises:
        TypeError: If it is not.
    """
    if (
        not isinstance(value, Tensor)
        or hasattr(value, "full_tensor")
        or value.is_nested
        or value.layout is not torch.strided
    ):
        what = f"a tensor of {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__qualname__}"
        msg = f"{place} is {what}. gather_rows takes dense tensors, and lists with one item per row."
        raise TypeError(msg)
    return value


def _bytes_of(value: Tensor) -> Tensor:
    dense = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return dense.reshape(-1).view(torch.uint8)


def _check_rows(found: int, rows: int, place: str) -> None:
    if found != rows:
        msg = (
            f"{place} has {found} row(s), but the sampler gave this rank {rows} row(s). "
            "Give the results of one whole epoch, in the sampler's order, from a loader with drop_last=False."
        )
        raise GatherError(msg)


def _column_of_items(items: Sequence[Any], place: str) -> _Column:
    """Return items as bytes: the length of a JSON text, the text, and the elements of the tensors that it describes."""
    tensors: list[Tensor] = []
    described, kinds = [], []
    for i, item in enumerate(items):
        description, kind = _described(item, f"{place}[{i}]", tensors)
        described.append(description)
        kinds.append(kind)
        if kind != kinds[0]:
            msg = f"{place}[0] is {kinds[0]}, but {place}[{i}] is {kind}. Give all rows the same structure and dtype."
            raise GatherError(msg)
    text = to_bytes(json.dumps(described))
    length = torch.tensor([text.numel()], dtype=torch.int64, device="cpu")
    return _Column(_ITEMS + kinds[0], [], torch.cat([length.view(torch.uint8), text, *map(_bytes_of, tensors)]))


def _described(item: Any, place: str, tensors: list[Tensor]) -> tuple[list[Any], str]:
    """Return what JSON can say about a part of an item, and its kind. Append its tensors to a list.

    A list may have any length and content, so its kind is only "list".
    """
    if item is None or type(item) in _PLAIN:
        return ["value", item], type(item).__qualname__
    if type(item) is dict and all(type(key) is str for key in item):
        parts = {key: _described(part, f"{place}[{key!r}]", tensors) for key, part in item.items()}
        kinds = ", ".join(f"{key!r}: {kind}" for key, (_, kind) in sorted(parts.items()))
        return ["dict", {key: description for key, (description, _) in parts.items()}], f"{{{kinds}}}"
    if type(item) in (list, tuple):
        found = [_described(part, f"{place}[{i}]", tensors) for i, part in enumerate(item)]
        kind = "list" if type(item) is list else f"({', '.join(kind for _, kind in found)})"
        return [type(item).__qualname__, [description for description, _ in found]], kind
    tensor = _dense(item, place)
    tensors.append(tensor)
    return ["tensor", str(tensor.dtype), list(tensor.shape)], f"{tensor.dtype} with {tensor.dim()} dim(s)"


def _items(data: Tensor, device: torch.device) -> list[Any]:
    """Return the items from the bytes of `_column_of_items`."""
    start = 8 + int(data[:8].clone().view(torch.int64))
    position = start

    def item_of(description: list[Any]) -> Any:
        nonlocal position
        match description:
            case ["dict", parts]:
                return {key: item_of(part) for key, part in parts.items()}
            case ["list", parts]:
                return [item_of(part) for part in parts]
            case ["tuple", parts]:
                return tuple(item_of(part) for part in parts)
            case ["tensor", dtype, shape]:
                size = math.prod(shape) * _dtype(dtype).itemsize
                part = data[position : position + size].clone().view(_dtype(dtype)).reshape(shape)
                position += size
                return part.to(device)
        return description[1]

    return [item_of(description) for description in json.loads(text_of(data[8:start].contiguous()))]


def _column_of_values(items: Sequence[Any], place: str) -> _Column:
    """Return strings or numbers as bytes."""
    kinds = {type(item) for item in items}
    if not kinds:
        return _Column(_EMPTY, [], torch.empty(0, dtype=torch.uint8, device="cpu"))
    if kinds == {str}:
        encoded = [to_bytes(item) for item in items]
        lengths = torch.tensor([each.numel() for each in encoded], dtype=torch.int64, device="cpu")
        return _Column(_STRINGS, [], torch.cat([lengths.view(torch.uint8), *encoded]))
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind not in _NUMBERS:
        names = ", ".join(sorted(each.__qualname__ for each in kinds))
        msg = f"{place} is a list of {names}. Give all rows the same type: str, bool, int, or float."
        raise TypeError(msg)
    if kind is int and not all(-(2**63) <= item < 2**63 for item in items):
        msg = f"{place} has an integer of more than 64 bits. Give strings or floats."
        raise TypeError(msg)
    numbers = torch.tensor(items, dtype=_NUMBERS[kind], device="cpu")
    return _Column(kind.__qualname__, [], numbers.view(torch.uint8))


def _reports(rows: int, places: list[str], columns: list[_Column], ranks: int) -> list[Any]:
    """Return every rank's number of rows, and the kind, shape, and size of each column."""
    mine = {
        "rows": rows,
        "places": places,
        "columns": [(column.kind, column.shape, column.data.numel()) for column in columns],
    }
    text = json.dumps(mine)
    reports = [json.loads(each) for each in (exchange_texts(text) if ranks > 1 else [text])]
    for rank, report in enumerate(reports):
        if report["places"] != reports[0]["places"]:
            first, other = (", ".join(each["places"]) or "nothing" for each in (reports[0], report))
            msg = f"gather_rows: rank 0 has {first}, but rank {rank} has {other}. Give all ranks the same structure."
            raise GatherError(msg)
    return reports


def _agreed_kind(reports: list[Any], i: int, place: str) -> tuple[str, list[int]]:
    """Return the kind and the row shape of a column, which all ranks with rows share."""
    own = [(rank, report["columns"][i][:2]) for rank, report in enumerate(reports) if report["rows"]]
    if not own:
        return tuple(reports[0]["columns"][i][:2])
    first, (kind, shape) = own[0]
    for rank, other in own:
        if other != [kind, shape]:
            msg = (
                f"{place}: a row is {_named(kind, shape)} on rank {first}, but {_named(*other)} on rank {rank}. "
                "Give all ranks the same structure, dtype, and shape; give rows of different lengths as a list of tensors."
            )
            raise GatherError(msg)
    return kind, shape


def _named(kind: str, shape: list[int]) -> str:
    return f"{kind} {tuple(shape)}" if kind.startswith("torch.") else kind


def _decoded(data: Tensor, rows: int, kind: str, shape: list[int], device: torch.device) -> Any:
    """Return a rank's rows of one column as a tensor or a list."""
    if kind == _EMPTY:
        return []
    if kind.startswith(_ITEMS):
        return _items(data, device) if rows else []
    if kind == _STRINGS:
        lengths = data[: 8 * rows].clone().view(torch.int64).tolist()
        return [text_of(part.contiguous()) for part in data[8 * rows :].split(lengths)] if rows else []
    dtype = _dtype(kind)
    numbers = data.clone().view(dtype) if rows else torch.empty(0, dtype=dtype, device="cpu")
    return numbers.reshape(rows, *shape) if kind.startswith("torch.") else numbers.tolist()


def _dtype(kind: str) -> torch.dtype:
    named = {each.__qualname__: dtype for each, dtype in _NUMBERS.items()}
    return named[kind] if kind in named else getattr(torch, kind.removeprefix("torch."))


def _device_of(leaf: Any) -> torch.device:
    """Return the device of the first tensor in a list; the CPU without one."""
    parts = flatten(leaf.value)[0] if isinstance(leaf, Opaque) else []
    return next((part.device for part in parts if isinstance(part, Tensor)), torch.device("cpu"))


def _in_order(rows: list[Any], order: list[int], leaf: Any) -> Any:
    """Return all ranks' rows in the order of the dataset, as a value like `leaf`."""
    if isinstance(rows[0], Tensor):
        found = torch.cat(rows)[order]
        return found.to(leaf.device) if isinstance(leaf, Tensor) else found
    items = [item for part in rows for item in part]
    items = [items[i] for i in order]
    return tuple(items) if isinstance(leaf, Opaque) and isinstance(leaf.value, tuple) else items
