"""Compile a model and example inputs into a ScriptModule with fixed shapes and dtypes, and find such modules in a model.

This file handles TorchScript and has no code for cores. It makes two traces. The inner trace is of the model, on a flat
list of tensors, and becomes bytes. The outer trace is of a module that holds these bytes and calls one operator on them.
The outer trace keeps the structure of inputs and outputs, and can be saved, loaded, and copied as any ScriptModule.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parawrap.backends.neuron import (
    ExampleCall,
    Signature,
    TensorSpec,
    buffers_kept,
    parameters_of,
    quiet_about_torchscript,
)
from parawrap.testing._closure_weights import constant_weights
from parawrap.testing._loaded_program import note_load
from parawrap.testing._program_bytes import is_neff, pack
from parawrap.tree import TreeSpec, addresses, flatten, unflatten

__all__ = ["NAMESPACE", "OPERATOR", "NeuronModule", "compile_for_cores", "compiled_in"]

NAMESPACE, OPERATOR = "parawrap_neuron", "infer"


class NeuronModule(torch.nn.Module):
    """The module of the outer trace: the bytes of a program, a flag for dynamic batching, and one operator call."""

    def __init__(self, neff: torch.Tensor, gives: TreeSpec, parameters: Sequence[inspect.Parameter]) -> None:
        super().__init__()
        self.register_buffer("neff", neff)
        self.register_buffer("dynamic", torch.zeros((), dtype=torch.bool))
        self.gives = gives
        self.forward = _with_signature(self._infer, parameters)  # lets a call pass arguments by name

    def _infer(self, *args: Any) -> Any:
        leaves, _ = flatten(args)
        operator = getattr(getattr(torch.ops, NAMESPACE), OPERATOR)
        return unflatten(self.gives, operator(leaves, self.neff, self.dynamic))


class _Flat(torch.nn.Module):
    """The module of the inner trace: the model as a function from one flat list of tensors to another."""

    def __init__(self, model: Callable[..., Any], takes: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._takes = takes

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten(self._takes, leaves)
        outputs, gives = flatten(self.model(*args, **kwargs))
        _refuse_others(outputs, addresses(gives, ("output",)), "the model returns")
        self.outputs, self.gives = outputs, gives
        return tuple(outputs)


class _Rehearsal:
    """Stands in for a loaded program during the outer trace, which needs no core."""

    live = True

    def __init__(self, signature: Signature) -> None:
        self._outputs = signature.outputs

    def answer(self, inputs: Sequence[torch.Tensor], dynamic: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype) for spec in self._outputs]


def compile_for_cores(model: Callable[..., Any], example: ExampleCall) -> torch.jit.ScriptModule:
    """Return a ScriptModule with the model's structure that only takes tensors of the examples' shapes and dtypes.

    Raises:
        TypeError: If an input or output is not a tensor, or is in a container that TorchScript does not support. Also if
            the model or a part of it is already compiled for NeuronCores.
    """
    leaves, takes = flatten(tuple(example))
    where = addresses(takes, ("args", "kwargs"))
    _refuse_others(leaves, where, "the example has")
    examples = [leaf.detach().clone() for leaf in leaves]  # the model may write into its inputs
    flat = _Flat(model, takes)
    # Cloned again, because a repeated tensor is traced as separate inputs.
    example = ExampleCall(*unflatten(takes, [leaf.detach().clone() for leaf in leaves]))
    with quiet_about_torchscript(), torch.no_grad(), constant_weights(model, example):
        with buffers_kept(model):
            script: Any = torch.jit.trace(flat, tuple(examples), check_trace=False)
        _refuse_compiled(script)
        script = torch.jit.freeze(script.eval(), optimize_numerics=False)  # the trace has already recorded train mode
        signature = Signature(_specs(examples, where), _specs(flat.outputs, addresses(flat.gives, ("output",))))
        neff = pack(script, signature)
    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in example.kwargs]
    module = NeuronModule(neff, flat.gives, named or parameters_of(model)[: len(example.args)]).eval()
    return _outer_trace(module, (*example.args, *example.kwargs.values()), signature)


def compiled_in(model: object) -> list[torch.jit.ScriptModule]:
    """Return the modules in a model, or the model itself, that this compiler made; each once."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, torch.jit.ScriptModule) and _is_compiled(module)]


def _is_compiled(script: torch.jit.ScriptModule) -> bool:
    buffers = dict(script.named_buffers(recurse=False))
    return "dynamic" in buffers and is_neff(buffers.get("neff"))


def _outer_trace(module: NeuronModule, args: tuple[Any, ...], signature: Signature) -> torch.jit.ScriptModule:
    neff = module.get_buffer("neff")
    note_load(neff, _Rehearsal(signature))
    try:
        with quiet_about_torchscript(), torch.no_grad():
            warnings.simplefilter("ignore")  # the user's model does not run here, so these warnings are not for the user
            compiled: Any = torch.jit.trace(module, args, check_trace=False, strict=False)
    except RuntimeError as error:
        containers = sorted(_containers(flatten(args)[1]) | _containers(module.gives))
        msg = (
            f"TorchScript does not support one of the containers {', '.join(containers)}. A compiled model takes and "
            "returns tuples, lists, and dicts with values of one type. Build other containers in a module around it"
        )
        raise TypeError(msg) from error
    finally:
        note_load(neff, None)
    outer: torch.jit.ScriptModule = compiled
    return outer


def _refuse_others(leaves: Sequence[Any], where: Sequence[str], who: str) -> None:
    """Raise TypeError unless all leaves are CPU tensors. `who` starts the message, as in "the model returns"."""
    if not leaves:
        msg = f"{who} no tensors, but a compiled model takes and returns at least one"
        raise TypeError(msg)
    for leaf, address in zip(leaves, where, strict=True):
        if not isinstance(leaf, torch.Tensor):
            msg = (
                f"{who} a {type(leaf).__name__} at {address}, but a compiled model takes and returns tensors in tuples, "
                "lists, and dicts. Set other arguments in a function or module around the model, and trace that"
            )
            raise TypeError(msg)
        if not leaf.is_cpu:
            msg = f"{who} a tensor on {leaf.device} at {address}, but NeuronCores take CPU tensors. Move it to the CPU"
            raise TypeError(msg)


def _refuse_compiled(script: Any) -> None:
    if script.inlined_graph.findAllNodes(f"{NAMESPACE}::{OPERATOR}"):
        msg = (
            "a part of the model is already compiled for NeuronCores, and a core cannot wait for another core. Trace the "
            "model with the original part instead"
        )
        raise TypeError(msg)


def _specs(tensors: Sequence[torch.Tensor], where: Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.of(tensor, address) for tensor, address in zip(tensors, where, strict=True))


def _containers(structure: TreeSpec) -> set[str]:
    found = set() if structure.type is None else {structure.type.__name__}
    return found.union(*map(_containers, structure.children()))


def _with_signature(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        return function(*args)

    if parameters:
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward
