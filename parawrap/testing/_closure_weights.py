"""Trace plain functions that close over weights: the compiler treats these weights as constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from parawrap.backends.neuron import ExampleCall
from parawrap.tree import flatten

__all__ = ["constant_weights"]


@contextmanager
def constant_weights(model: Callable[..., Any], example: ExampleCall) -> Iterator[None]:
    """Clear `requires_grad` of the weights that a plain function closes over, inside the block.

    TorchScript accepts such weights as constants only if they do not require gradients. A separate run finds the weights,
    because watching the traced run would change the lines that its warnings point at.
    """
    weights: dict[int, torch.Tensor] = {}
    if not isinstance(model, torch.nn.Module):
        with _Watching(weights):
            model(*example.args, **example.kwargs)
    for weight in weights.values():
        weight.requires_grad = False
    try:
        yield
    finally:
        for weight in weights.values():
            weight.requires_grad = True


class _Watching(TorchFunctionMode):
    """Record each leaf tensor that requires a gradient and that an operation takes."""

    def __init__(self, weights: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in flatten((args, kwargs))[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad:
                self._weights[id(leaf)] = leaf
        return func(*args, **(kwargs or {}))
