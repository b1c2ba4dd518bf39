"""From a model and example inputs to a ScriptModule that is fixed to their shapes and dtypes, and back to its parts.

Knows TorchScript; refuses to know cores. There are two traces. The inner one is of the model, on a flat list of tensors; it
becomes bytes. The outer one is of a module that has these bytes and calls one operator on them; it keeps the structure of
the inputs and outputs, and can be saved, loaded and copied as any ScriptModule.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parawrap.backends.neuron import Signature, TensorSpec, arguments_of, buffers_kept, quiet_about_torchscript
from parawrap.testing._constants import constant_weights
from parawrap.testing._loads import note_load
from parawrap.testing._neff import is_neff, pack
from parawrap.tree import TreeSpec, addresses, flatten, unflatten

__all__ = ["NAMESPACE", "OPERATOR", "NeuronModule", "compile_for_cores", "compiled_in"]

NAMESPACE, OPERATOR = "parawrap_neuron", "infer"


class NeuronModule(torch.nn.Module):
    """What the outer trace is of: a program's bytes, whether batches of any size are cut for it, and one call."""

    def __init__(self, neff: torch.Tensor, gives: TreeSpec, parameters: Sequence[inspect.Parameter]) -> None:
        super().__init__()
        self.register_buffer("neff", neff)
        self.register_buffer("dynamic", torch.zeros((), dtype=torch.bool))
        self.gives = gives
        self.forward = _with_signature(self._infer, parameters)  # so that a call may name the arguments

    def _infer(self, *args: Any) -> Any:
        leaves, _ = flatten(args)
        operator = getattr(getattr(torch.ops, NAMESPACE), OPERATOR)
        return unflatten(self.gives, operator(leaves, self.neff, self.dynamic))


class _Flat(torch.nn.Module):
    """What the inner trace is of: the model as a function of a flat list of tensors to another one."""

    def __init__(self, model: Callable[..., Any], takes: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._takes = takes

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, gives = flatten(self.model(*unflatten(self._takes, leaves)))
        _refuse_others(outputs, addresses(gives, ("output",)), "the model gives")
        self.outputs, self.gives = outputs, gives
        return tuple(outputs)


class _Rehearsal:
    """Stands in for a loaded program while the outer trace is made, for which no core is needed."""

    live = True

    def __init__(self, signature: Signature) -> None:
        self._outputs = signature.outputs

    def answer(self, inputs: Sequence[torch.Tensor], dynamic: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype) for spec in self._outputs]


def compile_for_cores(model: Callable[..., Any], example_inputs: Any) -> torch.jit.ScriptModule:
    """A ScriptModule of the model's structure that takes tensors of the shapes and dtypes of the examples, and no others.

    Raises:
        TypeError: something among the inputs or outputs is no tensor, or in a container that TorchScript does not know; or
            the model, or a part of it, is compiled for NeuronCores already.
    """
    args = arguments_of(example_inputs)
    leaves, takes = flatten(args)
    where = addresses(takes, ("args",))
    _refuse_others(leaves, where, "example_inputs has")
    examples = [leaf.detach().clone() for leaf in leaves]  # the model may write into its inputs
    flat = _Flat(model, takes)
    args = unflatten(takes, [leaf.detach().clone() for leaf in leaves])  # a tensor that is there twice is traced as two
    with quiet_about_torchscript(), torch.no_grad(), constant_weights(model, args):
        with buffers_kept(model):
            script: Any = torch.jit.trace(flat, tuple(examples), check_trace=False)
        _refuse_compiled(script)
        script = torch.jit.freeze(script.eval(), optimize_numerics=False)  # what trains was traced as it trains
        signature = Signature(_specs(examples, where), _specs(flat.outputs, addresses(flat.gives, ("output",))))
        neff = pack(script, signature)
    module = NeuronModule(neff, flat.gives, _parameters(model, len(args))).eval()
    return _outer_trace(module, args, signature)


def compiled_in(model: object) -> list[torch.jit.ScriptModule]:
    """The modules in a model, or the model itself, that were compiled here; each once."""
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
            warnings.simplefilter("ignore")  # no model runs here: what torch warns of is what its own errors print
            compiled: Any = torch.jit.trace(module, args, check_trace=False, strict=False)
    except RuntimeError as error:
        containers = sorted(_containers(flatten(args)[1]) | _containers(module.gives))
        msg = (
            f"the model takes or gives what TorchScript has no type for, among {', '.join(containers)}: it knows tuples, "
            "lists, and dicts with values of one kind; build the rest in a module around the compiled one"
        )
        raise TypeError(msg) from error
    finally:
        note_load(neff, None)
    outer: torch.jit.ScriptModule = compiled
    return outer


def _refuse_others(leaves: Sequence[Any], where: Sequence[str], who: str) -> None:
    if not leaves:
        msg = f"{who} no tensors: a compiled model takes and gives at least one"
        raise TypeError(msg)
    for leaf, address in zip(leaves, where, strict=True):
        if not isinstance(leaf, torch.Tensor):
            msg = (
                f"{who} a {type(leaf).__name__} at {address}: a compiled model takes and gives tensors, in tuples, lists "
                "and dicts; fix the rest in a function or module around it, and trace that"
            )
            raise TypeError(msg)
        if not leaf.is_cpu:
            msg = f"{who} a tensor on {leaf.device} at {address}: NeuronCores take tensors from the CPU, so move it there"
            raise TypeError(msg)


def _refuse_compiled(script: Any) -> None:
    if script.inlined_graph.findAllNodes(f"{NAMESPACE}::{OPERATOR}"):
        msg = (
            "the model has a part that is compiled for NeuronCores already, and a core cannot wait for a core: trace the "
            "model that this part was made from"
        )
        raise TypeError(msg)


def _specs(tensors: Sequence[torch.Tensor], where: Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.of(tensor, address) for tensor, address in zip(tensors, where, strict=True))


def _containers(structure: TreeSpec) -> set[str]:
    found = set() if structure.type is None else {structure.type.__name__}
    return found.union(*map(_containers, structure.children()))


def _parameters(model: Callable[..., Any], count: int) -> list[inspect.Parameter]:
    """The first parameters of the model, as many as there are arguments; none where they cannot be told."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return []
    return list(signature.parameters.values())[:count]


def _with_signature(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        return function(*args)

    if parameters:
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward
