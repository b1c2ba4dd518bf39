"""The operator that a compiled module consists of. It is defined when this file is imported, once for the process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap.testing._compiler import NAMESPACE, OPERATOR
from parawrap.testing._loads import load_of
from parawrap.testing._neuron_host import serving_host

__all__ = ["LIBRARY", "infer"]


def infer(inputs: Sequence[torch.Tensor], neff: torch.Tensor, dynamic: torch.Tensor) -> list[torch.Tensor]:
    """One call of a compiled module. What was never placed is loaded now, by the host that serves the process.

    TorchScript makes a RuntimeError of whatever is raised in here, with its class and message in the text, which is what a
    vendor's runtime raises as well.
    """
    load = load_of(neff)
    if load is None or not load.live:
        load = serving_host().load_for_a_call(neff)
    answer: list[torch.Tensor] = load.answer(inputs, dynamic)
    return answer


LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # the operator is gone when this is
LIBRARY.define(f"{OPERATOR}(Tensor[] inputs, Tensor neff, Tensor dynamic) -> Tensor[]")
LIBRARY.impl(OPERATOR, infer, "CompositeImplicitAutograd")  # above autograd: what a core gives has no grad
