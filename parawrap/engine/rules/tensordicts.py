"""Cut and join TensorDicts, lazy stacks, and tensorclass instances.

The tensordict package is not imported: a script that uses it has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parawrap.engine.rules.object_state import is_unchanged, mark_version
from parawrap.engine.rules.splitter import (
    Splitter,
    are_equal,
    refuse_split,
    refuse_to_join,
    refuse_update,
)

# Classes of entries with one value for all rows. `torch.cat` takes that of the first part
_WITHOUT_ROWS = ("MetaData", "UnbatchedTensor")


def tensordict_rules(cls: type) -> Splitter | None:
    """Return the rules of a class of TensorDicts; None for any other class."""
    # The attribute is absent while another thread imports the package
    is_tensordict = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    if is_tensordict is None or not is_tensordict(cls):
        return None
    if issubclass(cls, torch.nn.Module):  # TensorDictParams
        return None
    return Splitter(
        _split_tensordict,
        _join_tensordicts,
        _tensordict_rows,
        _tensordict_to,
        _update_tensordict,
        _list_entries,
    )


def _tensordict_rows(value: Any) -> int:
    """Return the size of batch dim 0. Refuse a value without it, or in a file."""
    if type(value).__name__ == "PersistentTensorDict":
        refuse_split(value, "it lies in a file; call to_tensordict() first")
    if not value.batch_size:
        refuse_split(value, "its batch_size is empty; set batch_size=[rows]")
    return int(value.batch_size[0])


def _split_tensordict(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut on batch dim 0."""
    _tensordict_rows(value)  # refuses what cannot be cut
    # `split` shares the nested values of lazy stacks, and `copy` gives each part its own
    parts = [part.copy() for part in value.split(list(sizes), 0)]
    if value.is_locked:  # a copy is not
        parts = [part.lock_() for part in parts]
    return parts


def _join_tensordicts(parts: Sequence[Any]) -> Any:
    for name, values in _entries_without_rows(parts):
        if not all(are_equal(values[0], value) for value in values):
            refuse_to_join(parts[0], f"{name} has no rows, and its values differ")
    try:
        joined: Any = torch.cat(list(parts), 0)
    except (KeyError, RuntimeError) as error:
        refuse_to_join(parts[0], str(error))
    names = getattr(parts[0], "names", ())
    if any(names):  # torch.cat drops the names of the dims
        joined.names = names
    return joined.lock_() if parts[0].is_locked else joined


def _entries_without_rows(parts: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the entries that `torch.cat` takes from the first part without reading the others."""
    first = parts[0]
    if _is_lazy_stack(first):
        if first.stack_dim == 0:  # each row has its own entries
            return
        stacks = [part.tensordicts for part in parts]
        for inner in zip(*stacks, strict=True):
            yield from _entries_without_rows(inner)
        return
    for name in first.keys():  # noqa: SIM118 -- iteration over a TensorDict yields rows
        values = [part.get(name, None) for part in parts]
        if any(type(value).__name__ in _WITHOUT_ROWS for value in values):
            yield name, [getattr(value, "data", None) for value in values]
            continue
        are_nested = all(
            hasattr(value, "batch_size") and hasattr(value, "keys") for value in values
        )
        if are_nested:
            yield from _entries_without_rows(values)


def _tensordict_to(value: Any, device: torch.device) -> Any:
    """Return a copy on a device. The copy of a TensorDict without a device has none either."""
    # Blocking, so that the next stream that reads the copy need not wait for this one
    moved = value.to(device, non_blocking=False)
    return moved if value.device is not None else moved.clear_device_()


# Changes by forward


def _list_entries(value: Any) -> list[Any]:
    """Return the keys and entries, also of nested TensorDicts and lazy stacks."""
    # A lazy stack makes a new tensor each time an entry is read, so its rows are read instead
    found: list[Any] = [value]
    if _is_lazy_stack(value):
        for row in value.tensordicts:
            found += _list_entries(row)
        return found
    for name in value.keys():  # noqa: SIM118 -- iteration over a TensorDict yields rows
        entry = value.get(name, None)
        found += [name, entry]
        if isinstance(entry, torch.Tensor):
            found.append(mark_version(entry))
        elif _is_nested(entry):
            found += _list_entries(entry)
    if not _is_nested(value):  # wraps a number, a text, or another value
        found.append(getattr(value, "data", None))
    return found


def _update_tensordict(old: Any, new: Any) -> None:
    """Put the entries of joined parts into the argument, which the caller owns and may lock."""
    if old.batch_size[:1] != new.batch_size[:1]:
        refuse_update(
            old, f"its joined parts have {new.batch_size[0]} rows, not {old.batch_size[0]}"
        )
    was_locked = old.is_locked
    must_lock = was_locked or new.is_locked  # forward may have locked it
    try:
        if was_locked:
            old.unlock_()
        _put_entries(old, new)
    except (KeyError, RuntimeError) as error:
        refuse_update(old, f"tensordict refuses the change: {error}")
    finally:  # also after Ctrl-C
        if must_lock and not old.is_locked:
            old.lock_()


def _put_entries(old: Any, new: Any) -> None:
    """Give a TensorDict the entries of another one. Unchanged entries stay."""
    if _is_lazy_stack(old):
        is_alike = _is_lazy_stack(new) and old.stack_dim == new.stack_dim
        if not is_alike or len(old.tensordicts) != len(new.tensordicts):
            refuse_update(old, "it is a lazy stack, and its joined parts are stacked otherwise")
        for row, joined_row in zip(old.tensordicts, new.tensordicts, strict=True):
            _put_entries(row, joined_row)
        return
    for name in set(old.keys()) - set(new.keys()):
        old.del_(name)
    for name in new.keys():  # noqa: SIM118 -- iteration over a TensorDict yields rows
        before, after = old.get(name, None), new.get(name)
        are_nested = type(before) is type(after) and _is_nested(after)
        if are_nested and before.batch_size == after.batch_size:
            _update_tensordict(before, after)  # `before` stays the caller's object
        elif not is_unchanged(before, after):
            old.set(name, after)


def _is_lazy_stack(value: Any) -> bool:
    # By an attribute, since the name of the class differs between versions of tensordict
    return hasattr(value, "stack_dim")


def _is_nested(value: Any) -> bool:
    """True for a TensorDict; False for one that wraps another value, such as a number."""
    tensordict = sys.modules["tensordict"]
    return bool(tensordict.is_tensor_collection(value) and not tensordict.is_non_tensor(value))
