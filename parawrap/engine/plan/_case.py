"""One kind of call, which is measured and chosen for on its own; and what a plan's records are filed under."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parawrap.backends.cpu import usable_cores
from parawrap.shards import CALL_ROOTS, FlatCall
from parawrap.tree import addresses

__all__ = ["Case", "machine", "structure_of"]

_ADDRESS_IN_MEMORY = re.compile(r"0x[0-9a-f]+")


class Case(NamedTuple):
    """Calls that are alike: one way into the target, inputs of one structure, as many rows and elements to within twofold.

    Attributes:
        method: the method that is called; "" is the target as a whole.
        inputs: the tensors of the call: where, dtype and dimensions.
        rows: the most rows of such a call; the fewest are one more than half of it.
        elements: the same for the elements of all tensors in the call.
        grad: whether gradients are recorded.
        training: whether the module is in train mode.
    """

    method: str
    inputs: str
    rows: int
    elements: int
    grad: bool
    training: bool

    @classmethod
    def of(cls, method: str | None, flat: FlatCall, rows: int, elements: int, *, training: bool) -> Case:
        """The case that a call belongs to."""
        tensors = [
            f"{where} {str(leaf.dtype).removeprefix('torch.')} {leaf.ndim}-d"
            for where, leaf in zip(addresses(flat.spec, CALL_ROOTS), flat.leaves, strict=True)
            if isinstance(leaf, torch.Tensor)
        ]
        grad = torch.is_grad_enabled()
        return cls(method or "", ", ".join(tensors), _bucket(rows), _bucket(elements), grad, training)

    def __str__(self) -> str:
        rows = f"{self.rows // 2 + 1} to {self.rows} rows" if self.rows > 1 else "a row at most"
        modes = ["with gradients"] * self.grad + ["in train mode"] * self.training
        return "; ".join([f"{self.method or 'call'}({self.inputs})", rows, f"up to {self.elements:,} elements", *modes])


def _bucket(count: int) -> int:
    """The power of two that is no less.

    >>> [_bucket(count) for count in (0, 1, 2, 3, 4, 5, 64, 65)]
    [0, 1, 2, 4, 4, 8, 64, 128]
    """
    return 1 << (count - 1).bit_length() if count else 0


def machine() -> dict[str, Any]:
    """What a measurement holds for: the processor, and how many cores and threads there are."""
    return {"cpu": _processor(), "cores": usable_cores(), "threads": torch.get_num_threads()}


@functools.cache
def _processor() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        described = ""
    named = re.search(r"^model name\s*:\s*(.+)$", described, re.MULTILINE)
    return f"{platform.machine()} {named[1] if named else platform.processor()}".strip()


def structure_of(target: Any) -> str:
    """What tells a target: of a module a digest of its tree, its classes and its tensors' shapes; else a name."""
    if not isinstance(target, torch.nn.Module):
        return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__qualname__)}"
    tensors: Sequence[tuple[str, torch.Tensor]] = [*target.named_parameters(), *target.named_buffers()]
    lines = [_ADDRESS_IN_MEMORY.sub("", repr(target)), *(f"{name} {_form(tensor)}" for name, tensor in tensors)]
    return f"{type(target).__name__} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def _form(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return f"{tensor.dtype} without a shape"
    return f"{tensor.dtype} {tuple(tensor.shape)}"
