"""A double of the vendor's runtime, for machines without NeuronCores: models run on the CPU.

A compiled model is a traced module that checks its inputs. A call of a copy on a core also takes
the lock of the core, and at least the latency of an inference. Nothing imitates the vendor's files,
memory, or operators.

There are two traces. The inner one is of the model, on a flat list of tensors. The outer one
restores the structure of inputs and outputs. Between them is a script, because a trace has no
conditions. TorchScript reads annotations such as ``List[Tensor]``, but no postponed ones, so this
file does not import ``annotations``.
"""

import copy
import inspect
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, List

import torch
from torch import Tensor

from parawrap.backends import EMULATED_CORES, read_core_numbers
from parawrap.errors import DeviceUnavailableError, ShapeError
from parawrap.neuroncores._runtime import (
    NeuronRuntime,
    Signature,
    copy_for_trial,
    inspect_parameters,
    not_traced,
    quiet_about_torchscript,
    read_examples,
    save_to_memory,
)
from parawrap.tree import TreeSpec, flatten, unflatten


class _EmulatedProgram(torch.nn.Module):
    """A model from a list of tensors to a list of tensors of fixed shapes and dtypes.

    A call without dynamic batching is one inference.

    Attributes:
        function: The model.
        inputs: Tensors of the shapes and dtypes that the model is compiled for.
        outputs: Tensors of the shapes and dtypes that it then returns.
        dtypes: The dtypes of `inputs` as text, for messages.
        dynamic: True with dynamic batching. A call may then have any number of rows: the last
            inference is filled up with rows of the batch, never with zeros. Their outputs are
            dropped.
    """

    inputs: List[Tensor]
    outputs: List[Tensor]
    dtypes: List[str]
    dynamic: bool

    def __init__(self, function: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        # A file of the compiled model must not hold the examples
        self.inputs = list(map(_without_data, inputs))
        self.outputs = list(map(_without_data, outputs))
        self.dtypes = [str(tensor.dtype) for tensor in inputs]
        self.dynamic = False

    def forward(self, tensors: List[Tensor]) -> List[Tensor]:
        self.check(tensors)
        if tensors[0].size() == self.inputs[0].size():
            return self.infer(tensors)
        rows, compiled_rows = tensors[0].size(0), self.inputs[0].size(0)
        if rows == 0:
            return [output[:0].clone() for output in self.outputs]
        parts: List[List[Tensor]] = []
        for start in range(0, rows, compiled_rows):
            # Places after the last row hold the first rows again
            chunk = torch.arange(start, start + compiled_rows) % rows
            parts.append(self.infer([tensor.index_select(0, chunk) for tensor in tensors]))
        return [torch.cat([part[i] for part in parts])[:rows] for i in range(len(self.outputs))]

    def infer(self, tensors: List[Tensor]) -> List[Tensor]:
        # Clones: a core gets a copy of its inputs, and cannot write the caller's
        outputs: List[Tensor] = self.function(
            [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        )
        return outputs

    def check(self, tensors: List[Tensor]) -> None:
        for i, (tensor, spec) in enumerate(zip(tensors, self.inputs)):
            has_shape = tensor.size() == spec.size()
            if self.dynamic and tensor.dim() == spec.dim():
                has_rows_of_first = tensor.size(0) == tensors[0].size(0)
                has_shape = has_rows_of_first and tensor.size()[1:] == spec.size()[1:]
            fits = has_shape and tensor.dtype == spec.dtype and tensor.is_cpu
            if not fits:
                # TorchScript raises torch.jit.Error for any error. `_OnCores` makes a ShapeError of
                # one with this text
                msg = (
                    f"ShapeError: input {i} is {tensor.size()}, but the model is compiled for "
                    f"{spec.size()}, as a CPU tensor of {self.dtypes[i]}. Convert it, or trace "
                    "the model for it. With dynamic batching, dim 0 may differ, if it is the "
                    "same in all inputs"
                )
                raise RuntimeError(msg)


class _Flat(torch.nn.Module):
    """The model as a module from a list of tensors to a list of tensors.

    A call sets these attributes, for the trace around this one:

    Attributes:
        outputs: The outputs of the model.
        gives: Their structure.
    """

    def __init__(self, model: Callable[..., Any], takes: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._takes = takes

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = unflatten(self._takes, tensors)
        # The clones are part of the graph: each inference starts from the buffers as they were at
        # the trace
        for module in self.modules():
            # A list, because `setattr` changes the dict that `named_buffers` iterates over
            for name, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, name, buffer.clone())
        self.outputs, self.gives = flatten(self.model(*args, **kwargs))
        _refuse_others(self.outputs, "the model returns")
        # Clones: an output may be an input or a parameter, which the caller must not get
        return [output.clone() for output in self.outputs]


class _Compiled(torch.nn.Module):
    """A program with the structure of the model's inputs and outputs, and its parameter names."""

    def __init__(
        self,
        program: torch.jit.ScriptModule,
        gives: TreeSpec,
        parameters: Sequence[inspect.Parameter],
    ) -> None:
        super().__init__()
        self.program = program

        # A function of this object, since each program has a signature of its own
        def forward(*args: Any) -> Any:
            return unflatten(gives, program(flatten(args)[0]))

        if parameters:  # lets a call pass arguments by name
            forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _compile(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.jit.ScriptModule:
    """Return a ScriptModule that only takes tensors of the examples' shapes and dtypes.

    Either `args` or `kwargs` is empty. `kwargs` is in the order of the parameters, which is that of
    the program's inputs.
    """
    inputs, takes = flatten((args, kwargs))
    _refuse_others(inputs, "the example has")
    flat = _Flat(copy_for_trial(model), takes)
    # Outside of inference mode: the program keeps the clones below
    with quiet_about_torchscript(), torch.inference_mode(mode=False), torch.no_grad():
        program = _compile_program(flat, inputs)
        if kwargs:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter(name, kind) for name in kwargs]
        else:
            parameters = inspect_parameters(model)[: len(args)]
        compiled = _Compiled(program, flat.gives, parameters).eval()
        args, kwargs = unflatten(takes, [tensor.clone() for tensor in inputs])
        return _trace_module(compiled, (*args, *kwargs.values()))


def _compile_program(flat: _Flat, inputs: Sequence[Tensor]) -> torch.jit.ScriptModule:
    """Return the program of a model. It shares no memory with the model."""
    # Clones: the model may write into its inputs, which are the user's examples
    traced = _trace_module(flat, ([tensor.clone() for tensor in inputs],))
    # `freeze` takes modules in eval mode only. The graph keeps the mode of the model at the trace
    frozen: Any = torch.jit.freeze(traced.eval(), optimize_numerics=False)
    function = torch.jit.load(save_to_memory(frozen))  # with memory of its own
    return torch.jit.script(_EmulatedProgram(function, inputs, flat.outputs))


def _trace_module(module: torch.nn.Module, args: tuple[Any, ...]) -> torch.jit.ScriptModule:
    """Return the graph of one call of a module."""
    # The check of a trace would run the model again, and refuse random numbers. A strict trace
    # would refuse lists and dicts
    traced: Any = torch.jit.trace(module, args, check_trace=False, strict=False)
    script: torch.jit.ScriptModule = traced
    return script


def find_programs(model: torch.nn.Module) -> list[Any]:
    """Return the programs for emulated cores in a model."""
    scripts = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    # TorchScript keeps the name of a class, and no class
    return [script for script in scripts if script.original_name == _EmulatedProgram.__name__]


def _refuse_others(leaves: Sequence[Any], who: str) -> None:
    """Raise TypeError unless all leaves are CPU tensors.

    `who` starts the message, as in "the model returns".
    """
    others = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            others.append(type(leaf).__name__)
        elif not leaf.is_cpu:
            others.append(f"a tensor on {leaf.device}")
    if others or not leaves:
        msg = (
            f"{who} {', '.join(others) or 'no tensors'}, but a compiled model takes and returns "
            "CPU tensors in tuples, lists, and dicts. Set other arguments in a function or module "
            "around the model, and trace that"
        )
        raise TypeError(msg)


def _without_data(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape and dtype that holds one element."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Counters of one emulated core since the last reset, and the models on it.

    Attributes:
        inferences: the number of inferences that the core ran.
        loads: the number of compiled models that were loaded onto it.
        models: the number of compiled models that are on it now.
    """

    inferences: int
    loads: int
    models: int


class _Core:
    """One emulated core. Thread-safe.

    It runs one inference at a time, which takes at least `latency_s`.

    Attributes:
        inferences: The number of inferences since the last reset.
        loads: The number of models that were loaded onto it since the last reset.
        models: The models that are on it now. Weak: a model leaves with its last reference.
    """

    def __init__(self, latency_s: float) -> None:
        self.inferences = 0
        self.loads = 0
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._latency_s = latency_s
        # Held for a whole inference. It guards `inferences` too
        self._lock = threading.Lock()

    def run(self, compiled: Callable[..., Any], args: Any, kwargs: Any, inferences: int) -> Any:
        """Wait until the core is free, and call a model that takes this number of inferences."""
        with self._lock:
            start = time.perf_counter()
            output = compiled(*args, **kwargs)
            self.inferences += inferences
            remaining = start + inferences * self._latency_s - time.perf_counter()
            if remaining > 0:  # a sleep of 0 s takes 50 us
                time.sleep(remaining)
            return output


class _OnCores(torch.nn.Module):
    """A compiled model on some cores, which it uses in turn. Thread-safe."""

    def __init__(self, compiled: torch.jit.ScriptModule, cores: Sequence[_Core]) -> None:
        super().__init__()
        self.compiled = compiled
        self._cores = cores
        shape = find_programs(compiled)[0].inputs[0].shape
        self._rows = shape[0] if shape else 0
        # Without the interpreter lock, two threads may get the same number from `next`. One of them
        # then waits for the lock of the core
        self._turns = itertools.count()
        for core in cores:
            core.loads += 1
            core.models.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        core = self._cores[next(self._turns) % len(self._cores)]
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        rows = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
        # More than one if dynamic batching cuts the rows
        inferences = math.ceil(rows / self._rows) if self._rows else 1
        try:
            with torch.autocast("cpu", enabled=False):  # a compiled model keeps its dtypes
                return core.run(self.compiled, args, kwargs, inferences)
        except torch.jit.Error as error:
            # See `_EmulatedProgram.check`
            _, is_misfit, message = str(error).rpartition("ShapeError: ")
            if is_misfit:
                raise ShapeError(message.strip()) from None
            raise


class NeuronHost(NeuronRuntime):
    """NeuronCores that are emulated on the CPU.

    Thread-safe; the host lives as long as a reference to it.

    `trace` returns a ScriptModule, so `torch.jit.save`, `torch.jit.load`, and `copy.deepcopy` work.
    They keep the signature and dynamic batching. A model that is called without being placed runs
    at once, on no core, and raises torch.jit.Error for tensors that it is not compiled for; a
    placed model raises ShapeError.

    Args:
        cores: the number of cores. None means the number in NEURON_RT_VISIBLE_CORES or
            NEURON_RT_NUM_CORES, or 2 if neither is set.
        latency_s: the minimum duration of an inference on a core, in seconds.

    Raises:
        ValueError: If `cores` is less than 1, or `latency_s` is negative.

    Example:
        >>> import torch
        >>> from parawrap.testing import NeuronHost
        >>> host = NeuronHost(cores=4)
        >>> compiled = host.trace(torch.nn.Linear(3, 2), torch.ones(8, 3))
        >>> placed = host.place(compiled, start=1, count=2)
        >>> [placed(torch.ones(8, 3)).shape for _ in range(3)]
        [torch.Size([8, 2]), torch.Size([8, 2]), torch.Size([8, 2])]
        >>> [core.inferences for core in host.stats()]
        [0, 2, 1, 0]
    """

    name = "host"

    def __init__(self, cores: int | None = None, *, latency_s: float = 0.0) -> None:
        if (cores is not None and cores < 1) or latency_s < 0:
            msg = f"cores={cores}, latency_s={latency_s}: give at least 1 core and 0 seconds"
            raise ValueError(msg)
        self._given = cores
        self._latency_s = latency_s
        self._made: list[_Core] = []
        # Two threads that load their first models at the same time must get the same cores
        self._making = threading.Lock()

    def core_count(self) -> int:
        if self._given is not None:
            return self._given
        allocated = read_core_numbers()
        return EMULATED_CORES if allocated is None else len(allocated)

    def trace(
        self,
        model: Callable[..., Any],
        example_inputs: Any = None,
        *,
        example_kwarg_inputs: Any = None,
        **compiler: Any,
    ) -> torch.jit.ScriptModule:
        """Compile a model, as `parawrap.neuron.trace` does.

        The options of a vendor's compiler are ignored.

        A module in train mode is traced in train mode. Tracing does not change its buffers. Each
        inference starts from these buffers, and its writes to them do not persist. Warnings and
        errors of `torch.jit.trace` reach the caller.
        """
        return _compile(model, *read_examples(model, example_inputs, example_kwarg_inputs))

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the signature of a compiled model, also after saving or copying.

        None for a module around a compiled model.
        """
        is_compiled = isinstance(model, (torch.jit.ScriptModule, _OnCores))
        programs = find_programs(model) if is_compiled else []
        if not programs:
            return None
        program, *_ = programs
        return Signature.of(program.inputs, program.outputs)

    def stats(self) -> tuple[CoreStats, ...]:
        """Return the counters of each core, in the order of the cores.

        Each has `inferences` and `loads` since the last reset, and `models`, the number of compiled
        models on the core now.
        """
        cores = self._cores()
        return tuple(CoreStats(core.inferences, core.loads, len(core.models)) for core in cores)

    def reset_stats(self) -> None:
        """Set the counters to zero. Models stay on their cores."""
        for core in self._cores():
            core.inferences = 0
            core.loads = 0

    def load(
        self, parts: Sequence[torch.jit.ScriptModule], start: int, count: int
    ) -> list[torch.nn.Module]:
        for part in parts:
            if not find_programs(part):
                raise not_traced(part)
        cores = self._cores()
        if start < 0 or count < 1 or start + count > len(cores):
            msg = (
                f"start={start}, count={count}: this process has {len(cores)} cores, counted from "
                "nc:0. Set NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES to allocate more cores"
            )
            raise DeviceUnavailableError(msg)
        return [_OnCores(copy.deepcopy(part), cores[start : start + count]) for part in parts]

    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        programs = find_programs(part)
        if not programs:
            raise not_traced(part)
        programs[0].dynamic = True

    def _cores(self) -> list[_Core]:
        """Return the cores that the process has now. They are created on first use."""
        with self._making:
            # The environment may allocate another number of cores than at the last call. A core
            # that was made keeps its models
            count = self.core_count()
            for _ in range(len(self._made), count):
                self._made.append(_Core(self._latency_s))
            return self._made[:count]
