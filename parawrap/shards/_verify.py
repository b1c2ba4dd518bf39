"""Whether a joined output equals the plain one, up to rounding."""

from __future__ import annotations

from typing import Any

import torch

from parawrap.errors import VerifyError
from parawrap.tree import addresses, flatten, mismatch

__all__ = ["check_equal"]

_USUAL_CAUSE = (
    "The usual cause is a model that does not treat rows independently: BatchNorm in train mode, an operation across "
    "rows (a softmax or a sort over the batch), or dropout, which draws other numbers in each lane"
)


def check_equal(parallel: Any, plain: Any) -> None:
    """Compare leaf by leaf, within torch.testing's tolerances for the dtype.

    Raises:
        VerifyError: with the leaf's address and the greatest absolute and relative difference.
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
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return None  # what is no tensor was equal in every lane, and may differ from run to run (a time, an id)
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    theirs = theirs.detach().to(ours.device)
    ours = ours.detach()
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError:
        gap = (ours.double() - theirs.double()).abs() if not ours.is_complex() else (ours - theirs).abs()
        relative = (gap / theirs.abs().clamp_min(torch.finfo(torch.float32).tiny)).max()
        return f"max abs {gap.max().item():.3g}, max rel {relative.item():.3g}"
    return None
