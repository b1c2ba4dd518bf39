"""The runtime that emulates NeuronCores on the CPU: it keeps track of the programs on each core."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from parawrap.backends.neuron import (
    ExampleCall,
    NeuronRuntime,
    Signature,
    copy_around,
    cores_given,
    not_traced,
    runtime,
    using,
)
from parawrap.errors import DeviceUnavailableError
from parawrap.testing._emulated_compiler import compile_for_cores, compiled_in
from parawrap.testing._emulated_cores import Core, CoreStats
from parawrap.testing._loaded_program import Load, load_of, note_load
from parawrap.testing._program_bytes import Program, signature_of

__all__ = ["NeuronHost", "neuron_host", "serving_host"]

_DEFAULT_CORES = 2
# Half of an Inferentia2 chip, which has 32 GiB for two NeuronCores:
# https://awsdocs-neuron.readthedocs-hosted.com, "Inferentia2 Architecture".
_MEMORY_BYTES = 16 << 30

_hosts: weakref.WeakSet[NeuronHost] = weakref.WeakSet()


class NeuronHost(NeuronRuntime):
    """NeuronCores that are emulated on the CPU. Thread-safe; the host lives as long as a reference to it.

    A program belongs to the host that loaded it. `place` loads a program; a model that was never placed is loaded at its
    first call, by the host that is in use in the process (`parawrap.backends.neuron.using`). The program stays loaded
    until its module is freed, or until `unplace` or `unload_all` unloads it.

    `trace` returns a ScriptModule, so `torch.jit.save`, `torch.jit.load`, and `copy.deepcopy` work. They keep the setting
    of dynamic batching, but not the placement. Calls of the ScriptModule raise RuntimeError with the class and message of
    the original error in the text, because TorchScript converts every exception. The vendor's runtimes do the same.

    Args:
        cores: the number of cores. None means the number in NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES, or 2 if
            neither is set.
        memory_bytes: the memory of each core. On each of its cores, a program takes the size of its buffer ``neff``,
            which holds the compiled code and the weights.
        latency_s: the minimum duration of an inference, in seconds.

    Raises:
        ValueError: If `cores` or `memory_bytes` is less than 1, or `latency_s` is negative.

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

    def __init__(self, cores: int | None = None, *, memory_bytes: int = _MEMORY_BYTES, latency_s: float = 0.0) -> None:
        if (cores is not None and cores < 1) or memory_bytes < 1 or latency_s < 0:
            given = f"cores={cores}, memory_bytes={memory_bytes}, latency_s={latency_s}"
            msg = f"{given}: give at least 1 core, 1 byte, and 0 seconds"
            raise ValueError(msg)
        self._given = cores
        self._memory_bytes = memory_bytes
        self._latency_s = latency_s
        self._made: list[Core] = []
        # Live loads take memory. When a module is freed, its load leaves this set, which frees the memory.
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()
        self._loading = threading.Lock()
        _hosts.add(self)

    def core_count(self) -> int:
        return self._given or cores_given() or _DEFAULT_CORES

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

    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """Copy a model that is compiled, or has compiled parts, onto the cores ``start .. start + count - 1``.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores.
            ValueError: If `start` is negative or `count` is less than 1.
            DeviceUnavailableError: If the process does not have these cores.
            RuntimeError: If the copy does not fit into the memory of one core. It is then loaded on none of them.
        """
        _refuse_uncompiled(model)
        self._refuse_other_cores(start, count)
        placed = copy_around(model, {id(compiled): copy.deepcopy(compiled) for compiled in compiled_in(model)})
        neffs = [_neff_of(compiled) for compiled in compiled_in(placed)]
        with self._loading:
            self._load(neffs, self._cores()[start : start + count], placed=True)
        return placed

    def unplace(self, placed: torch.nn.Module) -> None:
        for compiled in compiled_in(placed):
            load = load_of(_neff_of(compiled))
            if load is not None:
                load.unload()

    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Enable batches of any size on dim 0, in place, and return the model. Saved files and copies keep the setting.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores.
            ShapeError: If the model cannot take other batch sizes. The message says why.
        """
        _refuse_uncompiled(model)
        found = compiled_in(model)
        for compiled in found:
            signature_of(_neff_of(compiled)).refuse_fixed()
        with torch.inference_mode():  # a model loaded in inference mode can only be written to in inference mode
            for compiled in found:
                compiled.dynamic.fill_(value=True)
        return model

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the signature of a compiled model, also after saving or copying; None for a module around one."""
        found = compiled_in(model)
        return signature_of(_neff_of(model)) if any(compiled is model for compiled in found) else None

    def stats(self) -> tuple[CoreStats, ...]:
        """Return the counters and memory use of each core, in the order of the cores."""
        with self._loading:
            return tuple(CoreStats(core.inferences, core.busy_s, core.loads, self._in_use(core)) for core in self._cores())

    def reset_stats(self) -> None:
        """Set the counters to zero. Loaded programs stay loaded."""
        with self._loading:
            for core in self._cores():
                core.reset_counters()

    def unload_all(self) -> None:
        """Unload every program. Placed copies then raise an error; other models are loaded again at their next call."""
        with self._loading:
            for load in list(self._loads):
                load.unload()

    def load_for_a_call(self, neff: torch.Tensor) -> Load:
        """Load a program that was never placed onto the core with the lowest memory use, unless it is already loaded.

        Raises:
            RuntimeError: If the program was placed and then unloaded, or does not fit into the core's memory.
        """
        with self._loading:
            load: Load | None = load_of(neff)
            if load is not None and load.live:
                return load
            if load is not None and load.placed:
                msg = "this copy was unloaded from its NeuronCores, by unplace or by its host. Place the model again"
                raise RuntimeError(msg)
            return self._load([neff], [min(self._cores(), key=self._in_use)], placed=False)[0]

    def after_fork(self) -> None:
        """Renew the lock in a forked child: a thread that held it does not exist there."""
        self._loading = threading.Lock()

    def _load(self, neffs: Sequence[torch.Tensor], cores: Sequence[Core], *, placed: bool) -> list[Load]:
        """Load all programs onto each of the cores, or none of them."""
        programs = [Program(neff) for neff in neffs]
        needed = sum(program.nbytes for program in programs)
        for core in cores:
            free = self._memory_bytes - self._in_use(core)
            if needed > free:
                msg = (
                    f"Could not load the model status=4 message=Allocation Failure: it takes {needed} bytes on {core}, "
                    f"which has {free} of {self._memory_bytes} bytes free. Unload another model, or use other cores"
                )
                raise RuntimeError(msg)
        loads = [Load(program, cores, placed=placed) for program in programs]
        for neff, load in zip(neffs, loads, strict=True):
            note_load(neff, load)
            self._loads.add(load)
        for core in cores:
            core.loads += len(loads)
        return loads

    def _cores(self) -> list[Core]:
        """Return the cores that the process has now. They are created on first use."""
        count = self.core_count()
        self._made += [Core(index, self._latency_s) for index in range(len(self._made), count)]
        return self._made[:count]

    def _in_use(self, core: Core) -> int:
        return sum(load.program.nbytes for load in self._loads if core in load.cores)

    def _refuse_other_cores(self, start: int, count: int) -> None:
        if start < 0 or count < 1:
            msg = f"start={start}, count={count}: start must be at least 0, and count at least 1"
            raise ValueError(msg)
        total = self.core_count()
        if start + count > total:
            msg = (
                f"start={start}, count={count} ends at nc:{start + count - 1}, but this process has {total} cores, counted "
                "from nc:0. Set NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES to allocate more cores"
            )
            raise DeviceUnavailableError(msg)


@contextmanager
def neuron_host(
    cores: int | None = _DEFAULT_CORES, *, memory_bytes: int = _MEMORY_BYTES, latency_s: float = 0.0
) -> Iterator[NeuronHost]:
    """Use emulated NeuronCores in the whole process inside the block. All programs are unloaded at its end.

    The arguments are the same as for :class:`NeuronHost`.

    >>> import torch
    >>> from parawrap.testing import neuron_host
    >>> with neuron_host(cores=2) as host:
    ...     compiled = host.trace(torch.nn.ReLU(), torch.ones(4, 3))
    ...     y = compiled(-torch.ones(4, 3))
    ...     [core.inferences for core in host.stats()]
    [1, 0]
    """
    host = NeuronHost(cores, memory_bytes=memory_bytes, latency_s=latency_s)
    with using(host):
        try:
            yield host
        finally:
            host.unload_all()


def serving_host() -> NeuronHost:
    """Return the host that is in use in the process.

    Raises:
        DeviceUnavailableError: If a vendor's runtime is in use, which cannot run models for emulated cores.
    """
    serving = runtime()
    if not isinstance(serving, NeuronHost):
        msg = (
            f"the model is compiled for emulated NeuronCores, but this process uses the runtime {serving.name}. Trace the "
            "model again with that runtime, or set PARAWRAP_NEURON_RUNTIME=host"
        )
        raise DeviceUnavailableError(msg)
    return serving


def _neff_of(compiled: Any) -> torch.Tensor:
    neff: torch.Tensor = compiled.neff
    return neff


def _refuse_uncompiled(model: torch.nn.Module) -> None:
    if not compiled_in(model):
        raise not_traced(model)


def _after_fork() -> None:
    for host in list(_hosts):
        host.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
