"""The runtime that emulates NeuronCores on the CPU: which programs lie on which cores, and who serves the process."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from parawrap.backends.neuron import NeuronRuntime, Signature, copy_around, cores_given, not_traced, runtime, using
from parawrap.errors import DeviceUnavailableError
from parawrap.testing._compiler import compile_for_cores, compiled_in
from parawrap.testing._cores import Core, CoreStats
from parawrap.testing._loads import Load, load_of, note_load
from parawrap.testing._neff import Program, signature_of

__all__ = ["NeuronHost", "neuron_host", "serving_host"]

_DEFAULT_CORES = 2
# Half of an Inferentia2 chip, which has 32 GiB for two NeuronCores:
# https://awsdocs-neuron.readthedocs-hosted.com, "Inferentia2 Architecture".
_MEMORY_BYTES = 16 << 30

_hosts: weakref.WeakSet[NeuronHost] = weakref.WeakSet()


class NeuronHost(NeuronRuntime):
    """NeuronCores that are emulated on the CPU. Lives as long as somebody refers to it; any number of threads may use it.

    A program belongs to the host that loaded it: the one that placed it, or, for a model that was never placed, the one
    that serves the process (`parawrap.backends.neuron.using`) when it is first called. It stays there until its module is
    gone, `unplace` gives it back or `unload_all` takes everything off the cores.

    What `trace` gives is a ScriptModule: `torch.jit.save`, `torch.jit.load` and `copy.deepcopy` work; where it was placed
    is neither saved nor copied, whether it takes batches of any size is. Its calls raise RuntimeError, with the class and
    message of what is wrong in the text, since TorchScript turns every exception into one; so does a vendor's runtime.

    Args:
        cores: how many there are; None is what NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES says, else 2.
        memory_bytes: what the programs on one core may take together. A program takes the bytes of its compiled form, the
            buffer ``neff`` with the weights inside, on each core that it is loaded on.
        latency_s: how many seconds an inference takes at least.

    Raises:
        ValueError: no cores, no memory, or a negative latency.

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
            msg = f"{given}: give at least 1 core, 1 byte and 0 seconds"
            raise ValueError(msg)
        self._given = cores
        self._memory_bytes = memory_bytes
        self._latency_s = latency_s
        self._made: list[Core] = []
        # What is alive here is what takes memory: nothing has to be given back for a module that is garbage.
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()
        self._loading = threading.Lock()
        _hosts.add(self)

    def core_count(self) -> int:
        return self._given or cores_given() or _DEFAULT_CORES

    def trace(self, model: Callable[..., Any], example_inputs: Any, **compiler: Any) -> torch.jit.ScriptModule:
        """A ScriptModule for the shapes and dtypes of the examples; its signature names the inputs ``args[0]`` and so on.

        A module that trains is traced as it trains. Tracing leaves its buffers as they are; each inference starts from
        them, and what it writes into them is gone with it. A function may close over modules: their weights become
        constants. What `torch.jit.trace` warns of reaches the caller.

        Args:
            model: a module or function of tensors, and of tuples, lists and dicts of tensors; so is what it returns.
            example_inputs: its positional arguments as a tuple, or the only one; shapes are fixed to theirs.
            compiler: a vendor's options, which have no effect here: the line that is written on a laptop is deployed.

        Raises:
            TypeError: something among the inputs or outputs is no tensor, not on the CPU, or in another container; or a
                part of the model is compiled already.
        """
        return compile_for_cores(model, example_inputs)

    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """A copy of a compiled model, or of a module with compiled ones in it, on the cores ``start .. start + count - 1``.

        Raises:
            ReplicaError: nothing in the model was compiled for NeuronCores.
            ValueError: `start` is negative or `count` is less than 1.
            DeviceUnavailableError: there are not that many cores.
            RuntimeError: it does not fit into the memory of one of them; then it is loaded on none.
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
        """The model itself; it, and what is saved or copied of it, now takes batches of any size on dim 0.

        Raises:
            ReplicaError: nothing in it was compiled for NeuronCores.
            ShapeError: it is not eligible; the message says why.
        """
        _refuse_uncompiled(model)
        found = compiled_in(model)
        for compiled in found:
            signature_of(_neff_of(compiled)).refuse_fixed()
        with torch.inference_mode():  # a model that was loaded in this mode can be written to in no other
            for compiled in found:
                compiled.dynamic.fill_(value=True)
        return model

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Of what `trace` gave, also after it was saved or copied; None for a module around it."""
        found = compiled_in(model)
        return signature_of(_neff_of(model)) if any(compiled is model for compiled in found) else None

    def stats(self) -> tuple[CoreStats, ...]:
        """What each core did and holds, in the order of the cores."""
        with self._loading:
            return tuple(CoreStats(core.inferences, core.busy_s, core.loads, self._in_use(core)) for core in self._cores())

    def reset_stats(self) -> None:
        """Count from zero again. What is loaded stays loaded."""
        with self._loading:
            for core in self._cores():
                core.reset_counters()

    def unload_all(self) -> None:
        """Take every program off the cores. Placed copies are of no use then; other models are loaded anew when called."""
        with self._loading:
            for load in list(self._loads):
                load.unload()

    def load_for_a_call(self, neff: torch.Tensor) -> Load:
        """Load a program that was never placed onto the core with the least in its memory; once, whoever calls it."""
        with self._loading:
            load: Load | None = load_of(neff)
            if load is not None and load.live:
                return load
            if load is not None and load.placed:
                msg = "this copy was taken off its NeuronCores (unplace, or the end of its host): place the model again"
                raise RuntimeError(msg)
            return self._load([neff], [min(self._cores(), key=self._in_use)], placed=False)[0]

    def after_fork(self) -> None:
        """In a forked child: whichever thread was loading did not come along."""
        self._loading = threading.Lock()

    def _load(self, neffs: Sequence[torch.Tensor], cores: Sequence[Core], *, placed: bool) -> list[Load]:
        """Load programs onto each of the cores: all of them, or none."""
        programs = [Program(neff) for neff in neffs]
        needed = sum(program.nbytes for program in programs)
        for core in cores:
            free = self._memory_bytes - self._in_use(core)
            if needed > free:
                msg = (
                    f"Could not load the model status=4 message=Allocation Failure: it takes {needed} bytes on {core}, "
                    f"which has {free} of {self._memory_bytes} free; unload another model, or place it on other cores"
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
        """The cores that there are now, made when they are first needed."""
        count = self.core_count()
        self._made += [Core(index, self._latency_s) for index in range(len(self._made), count)]
        return self._made[:count]

    def _in_use(self, core: Core) -> int:
        return sum(load.program.nbytes for load in self._loads if core in load.cores)

    def _refuse_other_cores(self, start: int, count: int) -> None:
        if start < 0 or count < 1:
            msg = f"start={start}, count={count}: cores are counted from zero, and a model is placed on at least one"
            raise ValueError(msg)
        there = self.core_count()
        if start + count > there:
            msg = (
                f"start={start}, count={count} ends at nc:{start + count - 1}, and this process has {there} cores, counted "
                "from nc:0: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES allocates more to it"
            )
            raise DeviceUnavailableError(msg)


@contextmanager
def neuron_host(
    cores: int | None = _DEFAULT_CORES, *, memory_bytes: int = _MEMORY_BYTES, latency_s: float = 0.0
) -> Iterator[NeuronHost]:
    """Have emulated NeuronCores serve the process inside the block. At its end everything is taken off them.

    The arguments are those of :class:`NeuronHost`.

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
    """The host that serves the process.

    Raises:
        DeviceUnavailableError: a vendor's runtime does, which cannot run what was compiled for emulated cores.
    """
    serving = runtime()
    if not isinstance(serving, NeuronHost):
        msg = (
            f"the model is compiled for emulated NeuronCores, and {serving.name} serves this process: trace it again for "
            "the cores that it has, or set PARAWRAP_NEURON_RUNTIME=host"
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
