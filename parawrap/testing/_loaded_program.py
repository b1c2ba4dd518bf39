"""Programs in the memory of cores. A load checks the tensors of each call, and uses its cores in turn.

This file does not choose the cores of a program. A load is stored as an attribute of the tensor that holds the program's
bytes. That tensor lives as long as its module, and a copied module has its own. So no table needs cleaning up, and a call
reads one attribute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from parawrap.backends.neuron import Signature, in_chunks
from parawrap.errors import ShapeError
from parawrap.testing._emulated_cores import Core
from parawrap.testing._program_bytes import Program

__all__ = ["Load", "Loaded", "load_of", "note_load"]

_NOTE = "_parawrap_load"


class Loaded(Protocol):
    """The interface that runs the calls of a compiled module."""

    @property
    def live(self) -> bool: ...

    def answer(self, inputs: Sequence[torch.Tensor], dynamic: torch.Tensor) -> list[torch.Tensor]: ...


class Load:
    """One program and the cores that hold it, until it is unloaded or its module is freed. Thread-safe."""

    def __init__(self, program: Program, cores: Sequence[Core], *, placed: bool) -> None:
        self.program = program
        self.placed = placed
        self.cores = tuple(cores)
        self._turns = itertools.count()  # its next() is atomic

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled tensor is not loaded on any core

    @property
    def live(self) -> bool:
        return bool(self.cores)

    def unload(self) -> None:
        self.cores = ()

    def answer(self, inputs: Sequence[torch.Tensor], dynamic: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs for the tensors of a call. Dynamic batching cuts other batch sizes into chunks.

        Raises:
            ShapeError: If the program is not compiled for these tensors.
        """
        if torch.is_autocast_enabled("cpu"):  # a compiled program keeps its dtypes
            with torch.autocast("cpu", enabled=False):
                return self.answer(inputs, dynamic)
        with torch.no_grad():
            if self.program.takes(inputs):
                return self._infer(inputs)
            _refuse_misfits(inputs, self.program.signature, dynamic=bool(dynamic))
            return in_chunks(self._infer, inputs, self.program.signature)

    def _infer(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        cores = self.cores
        if not cores:
            msg = "the program was unloaded from its NeuronCores during the call"
            raise RuntimeError(msg)
        # Copies to and from the core's memory happen outside `infer`, so another inference can run at the same time.
        staged = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
        outputs = cores[next(self._turns) % len(cores)].infer(self.program.run, staged)
        return [output.clone() for output in outputs]


def note_load(neff: torch.Tensor, load: Loaded | None) -> None:
    """Use `load` for the calls of the module that holds these bytes."""
    setattr(neff, _NOTE, load)


def load_of(neff: torch.Tensor) -> Any:
    """Return the load that runs the calls of the module that holds these bytes; None if it is not loaded."""
    return getattr(neff, _NOTE, None)


def _refuse_misfits(inputs: Sequence[torch.Tensor], signature: Signature, *, dynamic: bool) -> None:
    """Raise ShapeError for tensors that the program does not take, unless only dim 0 differs and dynamic batching is on."""
    for tensor, spec in zip(inputs, signature.inputs, strict=True):
        if not tensor.is_cpu:
            msg = f"{spec.address} is on {tensor.device}, but NeuronCores take CPU tensors. Move it to the CPU first"
            raise ShapeError(msg)
        if tensor.dtype is not spec.dtype:
            msg = f"{spec.misfit(tensor)}. Convert it with .to({spec.dtype}), or trace the model for this dtype"
            raise ShapeError(msg)
        only_rows = tensor.ndim == len(spec.shape) > 0 and tensor.shape[1:] == spec.shape[1:]
        if tensor.shape != spec.shape and not (only_rows and dynamic):
            advice = "Trace the model for this shape"
            if only_rows and signature.why_fixed() is None:
                advice += ", or call parawrap.neuron.dynamic_batch(model), because only dim 0 differs"
            msg = f"{spec.misfit(tensor)}. {advice}"
            raise ShapeError(msg)
