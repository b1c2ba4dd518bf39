"""Compare a joined output with the plain one, up to rounding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from parawrap.errors import VerifyError
from parawrap.tree import Opaque, addresses, flatten, mismatch

__all__ = ["check_equal"]

_USUAL_CAUSE = (
    "The usual cause is a model that does not treat rows independently: BatchNorm in train mode, an operation across "
    "rows (a softmax or a sort over the batch), or dropout, which draws other numbers in each lane"
)


def check_equal(parallel: Any, plain: Any) -> None:
    """Compare leaf by leaf, within torch.testing's tolerances for the dtype.

    Raises:
        VerifyError: If a leaf differs. The message has its address and the greatest differences.
    """
    leaves, spec = flatten(parallel)
    plain_leaves, plain_spec = flatten(plain)
    differ = mismatch([spec, plain_spec], "output")
    if differ is not None:
        place, (ours, theirs) = differ
        msg = f"{place} is {ours} from the lanes and {theirs} from the plain call. {_USUAL_CAUSE}"
        raise VerifyError(msg)
    for index, (ours, theirs) in enumerate(zip(leaves, plain_leaves, strict=True)):
        difference = _difference(ours, theirs)
        if difference is not None:
            msg = f"{addresses(spec, ('output',))[index]} differs from the plain call: {difference}. {_USUAL_CAUSE}"
            raise VerifyError(msg)


def _difference(ours: Any, theirs: Any) -> str | None:
    ours, theirs = (_tensors_in(value) for value in (ours, theirs))
    if isinstance(ours, list) and isinstance(theirs, list):
        return next(filter(None, map(_difference, ours, theirs)), None)
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return _tensor_difference(ours.detach(), theirs.detach().to(ours.device))
    if isinstance(ours, float) and isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-8) or (math.isnan(ours) and math.isnan(theirs))
        return None if same else f"{ours} against {theirs}"
    if isinstance(ours, (bool, int, str, bytes)) and ours != theirs:
        return f"{ours!r} against {theirs!r}"
    return None  # equality of other objects says little: a lock, a time, an object that each call makes


def _tensors_in(value: Any) -> Any:
    """Return a packed sequence as the list of its tensors, and other values as they are."""
    if isinstance(value, Opaque) and isinstance(value.value, PackedSequence):
        return list(pad_packed_sequence(value.value))
    return value


def _tensor_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} against {theirs.dtype}"
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError:
        wide = torch.complex128 if ours.is_complex() else torch.float64
        gap = (ours.to("cpu", wide) - theirs.to("cpu", wide)).abs()
        relative = gap / theirs.to("cpu", wide).abs().clamp_min(torch.finfo(torch.float32).tiny)
        return f"max abs {gap.max().item():.3g}, max rel {relative.max().item():.3g}"
    return None
