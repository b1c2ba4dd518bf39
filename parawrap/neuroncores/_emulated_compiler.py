"""Compile a model for fixed shapes and dtypes, as TorchScript that runs on the CPU and checks the shapes of each call.

There are two traces. The inner one is of the model, on a flat list of tensors. The outer one restores the structure of
inputs and outputs. Between them is a script, because a trace has no conditions. TorchScript reads annotations such as
``List[Tensor]`` alone, so this file does not postpone them.
"""

import inspect
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any, List

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parawrap.neuroncores._example_call import (
    ExampleCall,
    copy_for_trial,
    inspect_parameters,
    own_tensors,
    quiet_about_torchscript,
)
from parawrap.neuroncores._signature import Signature, TensorSpec
from parawrap.tree import TreeSpec, addresses, flatten, unflatten

__all__ = ["compile_for_cores", "find_programs"]


class _EmulatedProgram(torch.nn.Module):
    """A model from a list of tensors to a list of tensors, for fixed shapes and dtypes, as TorchScript.

    `inputs` and `outputs` have the shapes and dtypes that the model is compiled for, and `takes` and `gives` their
    addresses. With `dynamic`, a call may have any number of rows: each inference gets the compiled number, and the last one
    is filled up with rows of the batch, never with zeros. Outputs of these rows are dropped.
    """

    inputs: List[Tensor]
    outputs: List[Tensor]
    takes: List[str]
    gives: List[str]
    dtypes: List[str]
    dynamic: bool

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        super().__init__()
        self.function = function
        self.inputs, self.takes = [_example_of(spec) for spec in signature.inputs], [s.address for s in signature.inputs]
        self.outputs, self.gives = [_example_of(spec) for spec in signature.outputs], [s.address for s in signature.outputs]
        self.dtypes = [str(spec.dtype) for spec in signature.inputs]
        self.dynamic = False

    def forward(self, tensors: List[Tensor]) -> List[Tensor]:
        if self.fits(tensors):
            return self.infer([t.detach().clone(memory_format=torch.contiguous_format) for t in tensors])
        self.check(tensors)
        rows, batch = tensors[0].size(0), self.inputs[0].size(0)
        if rows == 0:
            return [output[:0].clone() for output in self.outputs]
        parts: List[List[Tensor]] = []
        for start in range(0, rows, batch):
            chunk = torch.arange(start, start + batch) % rows
            parts.append(self.infer([tensor.detach().index_select(0, chunk) for tensor in tensors]))
        return [torch.cat([part[i] for part in parts])[:rows] for i in range(len(self.outputs))]

    def fits(self, tensors: List[Tensor]) -> bool:
        for tensor, spec in zip(tensors, self.inputs):
            if tensor.size() != spec.size() or tensor.dtype != spec.dtype or not tensor.is_cpu:
                return False
        return True

    def infer(self, tensors: List[Tensor]) -> List[Tensor]:
        outputs: List[Tensor] = self.function(tensors)
        return [output.to(spec.dtype, copy=True) for output, spec in zip(outputs, self.outputs)]

    def check(self, tensors: List[Tensor]) -> None:
        for i, (tensor, spec, address) in enumerate(zip(tensors, self.inputs, self.takes)):
            if tensor.device != spec.device:
                msg = f"ShapeError: {address} is on {tensor.device}, but NeuronCores take CPU tensors. Move it to the CPU"
                raise RuntimeError(msg)
            if tensor.dtype != spec.dtype:
                msg = f"ShapeError: {address} is not of {self.dtypes[i]}. Convert it, or trace the model for its dtype"
                raise RuntimeError(msg)
            only_rows = tensor.dim() == spec.dim() and tensor.dim() > 0 and tensor.size()[1:] == spec.size()[1:]
            if tensor.size() != spec.size() and not (only_rows and self.dynamic):
                msg = (
                    f"ShapeError: {address} is {tensor.size()}, but the model is compiled for {spec.size()}. Trace it for "
                    "this shape. If only dim 0 differs, parawrap.neuron.dynamic_batch(model) may allow it"
                )
                raise RuntimeError(msg)
            if self.dynamic and tensor.size(0) != tensors[0].size(0):
                msg = f"ShapeError: {address} has {tensor.size(0)} rows, but {self.takes[0]} has {tensors[0].size(0)}"
                raise RuntimeError(msg)


class _Flat(torch.nn.Module):
    """The model as a module from a list of tensors to a list of tensors."""

    def __init__(self, model: Callable[..., Any], takes: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._takes = takes

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = unflatten(self._takes, tensors)
        with own_tensors(self.model):
            outputs, self.gives = flatten(self.model(*args, **kwargs))
        _refuse_others(outputs, addresses(self.gives, ("output",)), "the model returns")
        self.outputs = outputs
        return [output.view_as(output) for output in outputs]  # an operator, so that weights among them become constants


class _Compiled(torch.nn.Module):
    """A program with the structure of the model's inputs and outputs, and the names of its parameters."""

    def __init__(self, program: torch.jit.ScriptModule, gives: TreeSpec, parameters: Sequence[inspect.Parameter]) -> None:
        super().__init__()
        self.program = program
        self.gives = gives
        self.forward = _with_signature(self._run, parameters)  # lets a call pass arguments by name

    def _run(self, *args: Any) -> Any:
        return unflatten(self.gives, self.program(flatten(args)[0]))


class _ConstantWeights(TorchFunctionMode):
    """Give operators the data of weights that a function closes over: constants must not require gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = flatten((args, kwargs or {}))
        constants = [leaf.data if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        args, kwargs = unflatten(spec, constants)
        return func(*args, **kwargs)


def compile_for_cores(model: Callable[..., Any], example: ExampleCall) -> torch.jit.ScriptModule:
    """Return a ScriptModule with the model's structure that only takes tensors of the examples' shapes and dtypes.

    Raises:
        TypeError: If an input or output is not a tensor, or is in a container that TorchScript does not support. Also if
            the model or a part of it is already compiled for NeuronCores.
    """
    if find_programs(model):
        msg = (
            "a part of the model is already compiled for NeuronCores, and a core cannot wait for another core. Trace the "
            "model with the original part instead"
        )
        raise TypeError(msg)
    inputs, takes = flatten(tuple(example))
    _refuse_others(inputs, addresses(takes, ("args", "kwargs")), "the example has")
    flat = _Flat(copy_for_trial(model), takes)
    with quiet_about_torchscript(), torch.inference_mode(mode=False), torch.no_grad():
        try:
            function = _trace_constant(flat, inputs)
        except ValueError as error:
            if "parameter sharing" not in str(error):
                raise
            msg = "two names of a module hold one buffer, and TorchScript does not support that. Give each name a clone()"
            raise TypeError(msg) from error
        except RuntimeError as error:
            if "requires grad" not in str(error):
                raise
            with _ConstantWeights():  # only if it must be: warnings of the trace then name a line of the mode
                function = _trace_constant(flat, inputs)
        program = torch.jit.script(_EmulatedProgram(function, Signature.of(inputs, takes, flat.outputs, flat.gives)))
        named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in example.kwargs]
        whole = _Compiled(program, flat.gives, named or inspect_parameters(model)[: len(example.args)]).eval()
        args, kwargs = unflatten(takes, [tensor.clone() for tensor in inputs])
        return _restore_structure(whole, (*args, *kwargs.values()))


def find_programs(model: object) -> list[Any]:
    """Return the programs of the emulated compiler in a model."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [
        module
        for module in modules
        if isinstance(module, torch.jit.ScriptModule) and module.original_name == _EmulatedProgram.__name__
    ]


def _trace_constant(flat: _Flat, inputs: Sequence[Tensor]) -> Any:
    """Trace the model with its weights as constants. The result went through a file: it shares no memory with the model."""
    traced: Any = torch.jit.trace(flat, ([tensor.clone() for tensor in inputs],), check_trace=False, strict=False)
    file = io.BytesIO()
    torch.jit.save(torch.jit.freeze(traced.eval(), optimize_numerics=False), file)  # the trace recorded train mode
    file.seek(0)
    return torch.jit.load(file)


def _restore_structure(whole: _Compiled, args: tuple[Any, ...]) -> torch.jit.ScriptModule:
    """Trace the module around a program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's model does not run here, so these warnings are not for the user
            compiled: Any = torch.jit.trace(whole, args, check_trace=False, strict=False)
    except RuntimeError as error:
        containers = sorted(_containers(flatten(args)[1]) | _containers(whole.gives))
        msg = (
            f"TorchScript does not support one of the containers {', '.join(containers)}. A compiled model takes and "
            "returns tuples, lists, and dicts with values of one type. Build other containers in a module around it"
        )
        raise TypeError(msg) from error
    outer: torch.jit.ScriptModule = compiled
    return outer


def _refuse_others(leaves: Sequence[Any], where: Sequence[str], who: str) -> None:
    """Raise TypeError unless all leaves are CPU tensors. `who` starts the message, as in "the model returns"."""
    if not leaves:
        msg = f"{who} no tensors, but a compiled model takes and returns at least one"
        raise TypeError(msg)
    for leaf, address in zip(leaves, where, strict=True):
        if not isinstance(leaf, Tensor):
            msg = (
                f"{who} a {type(leaf).__name__} at {address}, but a compiled model takes and returns tensors in tuples, "
                "lists, and dicts. Set other arguments in a function or module around the model, and trace that"
            )
            raise TypeError(msg)
        if not leaf.is_cpu:
            msg = f"{who} a tensor on {leaf.device} at {address}, but NeuronCores take CPU tensors. Move it to the CPU"
            raise TypeError(msg)


def _example_of(spec: TensorSpec) -> Tensor:
    """Return a tensor with this shape and dtype that holds one element."""
    return torch.zeros((), dtype=spec.dtype).expand(spec.shape)


def _containers(structure: TreeSpec) -> set[str]:
    found = set() if structure.type is None else {structure.type.__name__}
    return found.union(*map(_containers, structure.children()))


def _with_signature(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        return function(*args)

    if parameters:
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward
