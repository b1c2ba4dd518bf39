"""`collect`: the outputs of layers inside a model, as outputs of a call."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from parawrap._public import public
from parawrap.errors import GatherError, ShardError
from parawrap.tree import replace_nodes


@public
def collect(model: torch.nn.Module, layers: Iterable[str]) -> torch.nn.Module:
    """Return a module that returns the outputs of layers of `model`, in the order of the rows.

    In a parallel block, a hook that stores outputs in a dictionary of the caller keeps the outputs
    of one lane only. The module that `collect` returns registers its hooks for each call and
    returns copies of the outputs, so that the block joins them.

    Args:
        model: The model. It keeps its parameters and hooks.
        layers: The names of submodules, as in ``model.get_submodule(name)``. Each must run once per
            call.

    Returns:
        A module with the arguments of `model`. It returns a dict from names to outputs.

    Raises:
        ShardError: If `layers` is a single text, or the model has no submodule of a name.
        GatherError: At the call, if a layer does not run, or runs more than once.

    Example:
        >>> import torch
        >>> from parawrap import collect, parallel
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU())
        >>> features = collect(model, ["1"])
        >>> with torch.no_grad(), parallel(features, ["cpu", "cpu"]):
        ...     outputs = features(torch.randn(5, 3))
        >>> outputs["1"].shape
        torch.Size([5, 8])
    """
    if isinstance(layers, str):
        msg = f"layers={layers!r} is one name. Give a sequence of names: [{layers!r}]"
        raise ShardError(msg)
    layers = tuple(layers)  # read once: it may be an iterator
    # With duplicates, because a layer that is used under two names may be given by each
    known = dict(model.named_modules(remove_duplicate=False))
    for name in layers:
        if name not in known:
            msg = (
                f"{type(model).__name__} has no submodule {name!r}. model.named_modules() lists "
                "the names"
            )
            raise ShardError(msg)
    return _Collected(model, layers)


class _Collected(torch.nn.Module):
    """A module that runs the model, and returns outputs of its layers.

    Outside of a block, one thread calls it at a time: a hook sees the calls of all threads.
    """

    def __init__(self, model: torch.nn.Module, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.training = model.training  # `train()` would set the flags of all layers too

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        outputs: dict[str, list[Any]] = {name: [] for name in self.layers}  # by run of the layer
        hooks = []
        try:
            for name, kept in outputs.items():
                layer = self.model.get_submodule(name)
                hooks.append(layer.register_forward_hook(partial(_keep_copy, kept)))
            self.model(*args, **kwargs)
        finally:  # also after Ctrl-C between two hooks
            for hook in hooks:
                hook.remove()
        for name, kept in outputs.items():
            if len(kept) != 1:
                msg = (
                    f"the layer {name!r} ran {len(kept)} times in one call. Name layers that run "
                    "once"
                )
                raise GatherError(msg)
        return {name: output for name, (output,) in outputs.items()}


def _keep_copy(outputs: list[Any], _module: torch.nn.Module, _args: Any, output: Any) -> None:
    """Keep a copy of an output: a later layer may write it in place, as ReLU(inplace=True) does."""
    copied = replace_nodes(output, lambda node: isinstance(node, torch.Tensor), torch.clone)
    outputs.append(copied)
