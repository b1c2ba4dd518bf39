"""A program in the memory of cores: takes a call's tensors, refuses those that it is not compiled for, takes cores in turn.

Knows programs and cores; refuses to know which cores a program should go to. What is loaded is noted on the tensor of the
program's bytes, which lives exactly as long as its module does and is not shared by the module's copies: no table has to be
cleaned up, and a call reads one attribute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from parawrap.backends.neuron import Signature, in_chunks
from parawrap.errors import ShapeError
from parawrap.testing._cores import Core
from parawrap.testing._neff import Program

__all__ = ["Load", "Loaded", "load_of", "note_load"]

_NOTE = "_parawrap_load"


class Loaded(Protocol):
    """What answers the calls of a compiled module."""

    @property
    def live(self) -> bool: ...

    def answer(self, inputs: Sequence[torch.Tensor], dynamic: torch.Tensor) -> list[torch.Tensor]: ...


class Load:
    """One program on the cores that hold it, until it is unloaded or its module is gone. Threads may call it at once."""

    def __init__(self, program: Program, cores: Sequence[Core], *, placed: bool) -> None:
        self.program = program
        self.placed = placed
        self.cores = tuple(cores)
        self._turns = itertools.count()  # its next() is one step that no thread can interrupt

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a tensor that is copied or pickled leaves the cores behind

    @property
    def live(self) -> bool:
        return bool(self.cores)

    def unload(self) -> None:
        self.cores = ()

    def answer(self, inputs: Sequence[torch.Tensor], dynamic: torch.Tensor) -> list[torch.Tensor]:
        """The outputs for a call's tensors; in chunks of the compiled size where dynamic batching is on and needed.

        Raises:
            ShapeError: the program is not compiled for them.
        """
        if torch.is_autocast_enabled("cpu"):  # what is compiled keeps its dtypes
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
            msg = "the program was taken off its NeuronCores during the call"
            raise RuntimeError(msg)
        # Into the memory of the core while that may still run another inference, and out of it when the next one may run.
        staged = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
        outputs = cores[next(self._turns) % len(cores)].infer(self.program.run, staged)
        return [output.clone() for output in outputs]


def note_load(neff: torch.Tensor, load: Loaded | None) -> None:
    """Have `load` answer the calls of the module that has these bytes."""
    setattr(neff, _NOTE, load)


def load_of(neff: torch.Tensor) -> Any:
    """What answers the calls of the module that has these bytes; None where nothing does as yet."""
    return getattr(neff, _NOTE, None)


def _refuse_misfits(inputs: Sequence[torch.Tensor], signature: Signature, *, dynamic: bool) -> None:
    """Refuse tensors that the program does not take, unless only dim 0 differs and dynamic batching is on."""
    for tensor, spec in zip(inputs, signature.inputs, strict=True):
        if not tensor.is_cpu:
            msg = f"{spec.address} is on {tensor.device}: NeuronCores take tensors from the CPU; move it there first"
            raise ShapeError(msg)
        if tensor.dtype is not spec.dtype:
            msg = f"{spec.misfit(tensor)}: convert it with .to({spec.dtype}), or trace the model for it"
            raise ShapeError(msg)
        rows_alone = tensor.ndim == len(spec.shape) > 0 and tensor.shape[1:] == spec.shape[1:]
        if tensor.shape != spec.shape and not (rows_alone and dynamic):
            cure = "trace the model for that shape"
            if rows_alone and signature.why_fixed() is None:
                cure += ", or have it cut by parawrap.neuron.dynamic_batch(model), since only dim 0 differs"
            msg = f"{spec.misfit(tensor)}: {cure}"
            raise ShapeError(msg)
