"""A double of the vendor's runtime for machines without NeuronCores: compiled models run on the CPU.

A compiled model is a traced module that checks shapes. A placed model also takes the lock of a core, and at least the
latency of an inference. Nothing imitates the vendor's files, memory, or operators.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parawrap.errors import DeviceUnavailableError, ShapeError
from parawrap.neuroncores._choose_runtime import using
from parawrap.neuroncores._compiled_parts import not_traced
from parawrap.neuroncores._emulated_compiler import compile_for_cores, find_programs
from parawrap.neuroncores._example_call import ExampleCall, quiet_about_torchscript
from parawrap.neuroncores._neuron_cores import EMULATED_CORES, read_core_numbers
from parawrap.neuroncores._runtime import NeuronRuntime
from parawrap.neuroncores._signature import Signature, TensorSpec
from parawrap.tree import flatten

__all__ = ["CoreStats", "NeuronHost", "neuron_host"]


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


class NeuronHost(NeuronRuntime):
    """NeuronCores that are emulated on the CPU. Thread-safe; the host lives as long as a reference to it.

    `trace` returns a ScriptModule, so `torch.jit.save`, `torch.jit.load`, and `copy.deepcopy` work. They keep the signature
    and dynamic batching. A model that is called without being placed runs at once, on no core, and raises torch.jit.Error
    for tensors that it is not compiled for; a placed model raises ShapeError.

    Args:
        cores: the number of cores. None means the number in NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES, or 2 if
            neither is set.
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
        self._making = threading.Lock()

    def core_count(self) -> int:
        return self._given or len(read_core_numbers() or range(EMULATED_CORES))

    def trace(
        self, model: Callable[..., Any], example_inputs: Any = None, *, example_kwarg_inputs: Any = None, **compiler: Any
    ) -> torch.jit.ScriptModule:
        """Compile a model for the shapes and dtypes of the examples. The signature names the inputs ``args[0]`` and so on.

        A module in train mode is traced in train mode. Tracing does not change its buffers. Each inference starts from
        these buffers, and its writes to them do not persist. A function may close over modules; their weights become
        constants. Warnings of `torch.jit.trace` reach the caller.

        Args:
            model: a module or function that takes and returns tensors, or tuples, lists, and dicts of tensors.
            example_inputs: its positional arguments as a tuple, or its only argument. Their shapes are fixed.
            example_kwarg_inputs: its keyword arguments, instead of `example_inputs`. A positional call of the compiled
                model takes these, and no others, in the order of the model's parameters.
            compiler: options of a vendor's compiler. They are ignored here, so code for NeuronCores runs unchanged.

        Raises:
            TypeError: If an input or output is not a tensor, is not on the CPU, or is in another container. Also if a part
                of the model is already compiled, if both or neither kind of examples are given, or if a dict is given by
                position.
        """
        return compile_for_cores(model, ExampleCall.of(model, example_inputs, example_kwarg_inputs))

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the signature of a compiled model, also after saving or copying; None for a module around one."""
        compiled = model.compiled if isinstance(model, _OnCores) else model
        program: Any = getattr(compiled, "program", None) if find_programs(compiled) else None
        return None if program is None else _signature_of(program)

    def stats(self) -> tuple[CoreStats, ...]:
        """Return the counters of each core, in the order of the cores.

        Each has `inferences` and `loads` since the last reset, and `models`, the number of compiled models on the core now.
        """
        return tuple(CoreStats(core.inferences, core.loads, len(core.models)) for core in self._cores())

    def reset_stats(self) -> None:
        """Set the counters to zero. Models stay on their cores."""
        for core in self._cores():
            core.inferences = core.loads = 0

    def _load(
        self, parts: Sequence[torch.jit.ScriptModule], files: Sequence[io.BytesIO], start: int, count: int
    ) -> list[torch.nn.Module]:
        if not any(map(find_programs, parts)):
            raise not_traced(parts[0])
        total = self.core_count()
        if start < 0 or count < 1 or start + count > total:
            msg = (
                f"start={start}, count={count}: this process has {total} cores, counted from nc:0. Set "
                "NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES to allocate more cores"
            )
            raise DeviceUnavailableError(msg)
        cores = self._cores()[start : start + count]
        with quiet_about_torchscript():
            loaded = [torch.jit.load(file) for file in files]
        return [_OnCores(part, cores) if find_programs(part) else part for part in loaded]

    def _signatures(self, parts: Sequence[torch.jit.ScriptModule]) -> list[Signature]:
        """Return the signatures of all programs, also of those within other TorchScript."""
        programs = [program for part in parts for program in find_programs(part)]
        if not programs:
            raise not_traced(parts[0])
        return list(map(_signature_of, programs))

    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        for program in find_programs(part):
            program.dynamic = True

    def _cores(self) -> list[_Core]:
        """Return the cores that the process has now. They are created on first use."""
        with self._making:
            count = self.core_count()
            self._made += [_Core(self._latency_s) for _ in range(len(self._made), count)]
            return self._made[:count]


def _signature_of(program: Any) -> Signature:
    inputs, outputs = zip(program.inputs, program.takes, strict=True), zip(program.outputs, program.gives, strict=True)
    return Signature(tuple(itertools.starmap(TensorSpec.of, inputs)), tuple(itertools.starmap(TensorSpec.of, outputs)))


@contextmanager
def neuron_host(cores: int | None = EMULATED_CORES, *, latency_s: float = 0.0) -> Iterator[NeuronHost]:
    """Use emulated NeuronCores in the whole process inside the block.

    The arguments are the same as for :class:`NeuronHost`.

    >>> import torch
    >>> from parawrap import neuron
    >>> from parawrap.testing import neuron_host
    >>> with neuron_host(cores=2) as host:
    ...     net = neuron.DataParallel(neuron.trace(torch.nn.ReLU(), torch.ones(4, 3)))
    ...     y = net(-torch.ones(8, 3))
    ...     net.close()
    ...     [core.inferences for core in host.stats()]
    [1, 1]
    """
    host = NeuronHost(cores, latency_s=latency_s)
    with using(host):
        yield host


class _Core:
    """One core. It runs one inference at a time, takes at least `latency_s` for each, and counts them."""

    def __init__(self, latency_s: float) -> None:
        self.inferences = 0
        self.loads = 0
        self.models: weakref.WeakSet[_OnCores] = weakref.WeakSet()
        self._latency_s = latency_s
        self._free_at = 0.0  # the time at which the last inference ends
        self._lock = threading.Lock()
        self._process = os.getpid()

    def run(self, compiled: Callable[..., Any], args: Any, kwargs: Any, inferences: int) -> Any:
        """Wait until the core is free, and call a compiled model that takes this number of inferences."""
        if self._process != os.getpid():  # the thread that holds the lock may not exist in a forked child
            self._lock, self._process = threading.Lock(), os.getpid()
        arrived = time.perf_counter()
        with self._lock:
            start = max(arrived, self._free_at)  # a real core starts pending work before this thread wakes up
            try:
                return compiled(*args, **kwargs)
            finally:
                now = time.perf_counter()
                self._free_at = max(now, start + inferences * self._latency_s)
                self.inferences += inferences
                if self._free_at > now:
                    time.sleep(self._free_at - now)


class _OnCores(torch.nn.Module):
    """A compiled model on some cores, which it uses in turn. Thread-safe."""

    def __init__(self, compiled: torch.jit.ScriptModule, cores: Sequence[_Core]) -> None:
        super().__init__()
        self.compiled = compiled
        self._cores = cores
        inputs: list[Tensor] = find_programs(compiled)[0].inputs
        self._rows = inputs[0].shape[0] if inputs[0].ndim else 0
        self._turns = itertools.count()  # its next() is atomic
        for core in cores:
            core.loads += 1
            core.models.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        core = self._cores[next(self._turns) % len(self._cores)]
        inferences = self._inferences(args, kwargs)
        try:
            if torch.is_autocast_enabled("cpu"):  # a compiled model keeps its dtypes
                with torch.autocast("cpu", enabled=False):
                    return core.run(self.compiled, args, kwargs, inferences)
            return core.run(self.compiled, args, kwargs, inferences)
        except torch.jit.Error as error:
            _, is_misfit, message = str(error).rpartition("ShapeError: ")
            if is_misfit:
                raise ShapeError(message.strip()) from None
            raise

    def _inferences(self, args: Any, kwargs: Any) -> int:
        """Return the number of inferences that a call takes: several if dynamic batching cuts its rows."""
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(first, Tensor):
            first = next((leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)), None)
        return -(-first.shape[0] // self._rows) if first is not None and first.ndim and self._rows else 1
