"""Cut and join TensorDicts, lazy stacks, and tensorclass instances. The tensordict package is not imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parawrap.engine.rules.splitter import Splitter, refuse_split, refuse_to_join, same


def tensordict_rules(cls: type) -> Splitter | None:
    """Return the rules of a class of TensorDicts; None for any other class. A TensorDictParams is a module."""
    # The attribute is absent while another thread imports the package.
    is_tensordict = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    if is_tensordict is None or not is_tensordict(cls) or issubclass(cls, torch.nn.Module):
        return None
    return Splitter(_split_tensordict, _join_tensordicts, _tensordict_rows, _tensordict_to)


def _tensordict_rows(value: Any) -> int:
    if type(value).__name__ == "PersistentTensorDict":
        refuse_split(value, "it lies in a file; call to_tensordict() first")
    if not value.batch_size:
        refuse_split(value, "its batch_size is empty; set batch_size=[rows]")
    return int(value.batch_size[0])


def _split_tensordict(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut on batch dim 0. `copy` gives each part its own nested values; `split` shares those of lazy stacks."""
    _tensordict_rows(value)
    parts = [part.copy() for part in value.split(list(sizes), 0)]
    return [part.lock_() for part in parts] if value.is_locked else parts


def _join_tensordicts(parts: Sequence[Any]) -> Any:
    for name, values in _entries_without_rows(parts):
        if not all(same(values[0], value) for value in values):
            refuse_to_join(parts[0], f"{name} has no rows, and its values differ")
    try:
        joined: Any = torch.cat(list(parts), 0)
    except (KeyError, RuntimeError) as error:
        refuse_to_join(parts[0], str(error))
    return joined.lock_() if parts[0].is_locked else joined


def _entries_without_rows(parts: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the entries that `torch.cat` takes from the first part without reading the others."""
    if hasattr(parts[0], "stack_dim"):  # a lazy stack; on dim 0 each row has its own entries
        for inner in zip(*(part.tensordicts for part in parts), strict=True) if parts[0].stack_dim else ():
            yield from _entries_without_rows(inner)
        return
    for name in parts[0].keys():  # noqa: SIM118 -- iteration over a TensorDict yields rows
        values = [part.get(name, None) for part in parts]
        if any(type(value).__name__ in ("MetaData", "UnbatchedTensor") for value in values):
            yield name, [getattr(value, "data", None) for value in values]
        elif all(hasattr(value, "batch_size") and hasattr(value, "keys") for value in values):
            yield from _entries_without_rows(values)


def _tensordict_to(value: Any, device: torch.device) -> Any:
    """Return a copy on a device. A TensorDict without a device stays without one."""
    moved = value.to(device)
    return moved if value.device is not None else moved.clear_device_()
