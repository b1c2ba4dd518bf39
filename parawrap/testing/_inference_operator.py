"""The operator that compiled modules call. Importing this file defines it, once per process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap.testing._emulated_compiler import NAMESPACE, OPERATOR
from parawrap.testing._loaded_program import load_of
from parawrap.testing._neuron_host import serving_host

__all__ = ["LIBRARY", "infer"]


def infer(inputs: Sequence[torch.Tensor], neff: torch.Tensor, dynamic: torch.Tensor) -> list[torch.Tensor]:
    """Run one call of a compiled module. The host in use first loads the module if it was never placed.

    TorchScript converts every exception from here into a RuntimeError with the original class and message in the text. The
    vendor's runtimes also raise RuntimeError.
    """
    load = load_of(neff)
    if load is None or not load.live:
        load = serving_host().load_for_a_call(neff)
    answer: list[torch.Tensor] = load.answer(inputs, dynamic)
    return answer


LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # must stay alive: the operator goes with it
LIBRARY.define(f"{OPERATOR}(Tensor[] inputs, Tensor neff, Tensor dynamic) -> Tensor[]")
LIBRARY.impl(OPERATOR, infer, "CompositeImplicitAutograd")  # above autograd: the outputs of a core have no grad
