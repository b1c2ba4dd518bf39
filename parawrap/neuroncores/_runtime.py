"""The interface of NeuronCore runtimes, of the vendor's and of the double."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from parawrap.neuroncores._compiled_parts import copy_around, find_compiled
from parawrap.neuroncores._example_call import quiet_about_torchscript
from parawrap.neuroncores._signature import Signature

__all__ = ["NeuronRuntime"]


class NeuronRuntime(ABC):
    """Runs compiled models on NeuronCores. Thread-safe; one instance lives as long as the process.

    Cores are numbered from zero within the process. The runtime runs one inference at a time on each core. Several threads
    may call a placed model at once.
    """

    name: str
    """The value of PARAWRAP_NEURON_RUNTIME that selects this runtime."""

    @abstractmethod
    def core_count(self) -> int:
        """Return the number of NeuronCores allocated to this process.

        Raises:
            DeviceUnavailableError: If the number cannot be determined. The message says how to set it.
            DeviceListError: If NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES is malformed.
        """

    @abstractmethod
    def trace(
        self, model: Any, example_inputs: Any = None, *, example_kwarg_inputs: Any = None, **compiler: Any
    ) -> torch.jit.ScriptModule:
        """Compile a module or function for the shapes and dtypes of the examples: a tensor or tuple, or a dict by name.

        `compiler` holds options of the runtime's compiler.

        Raises:
            TypeError: If both or neither kind of examples are given, or a dict is given by position.
            DeviceUnavailableError: If the runtime cannot trace inputs by name.
        """

    @abstractmethod
    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the inputs and outputs that the model was compiled for; None if the runtime does not report them."""

    @abstractmethod
    def _load(
        self, parts: Sequence[torch.jit.ScriptModule], files: Sequence[io.BytesIO], start: int, count: int
    ) -> list[torch.nn.Module]:
        """Load compiled models onto the cores ``start .. start + count - 1`` from files that hold them."""

    @abstractmethod
    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        """Enable dynamic batching of a compiled model.

        Raises:
            ShapeError: If the model cannot take other batch sizes. The message says why.
        """

    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """Return a copy of a compiled model, loaded onto the cores ``start .. start + count - 1`` in one call.

        The copy uses the cores in turn, one call each. The model itself does not change. If `model` is an ordinary module
        that contains compiled models, the copy shares the parameters and buffers around them. The cores' memory is free
        again when the last reference to the copy goes: the vendor documents no other way.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores, or a module around that part cannot be copied.
            DeviceUnavailableError, ValueError: If the process does not have these cores.
            RuntimeError: If the runtime cannot load the model, for instance because a core is out of memory.
        """
        parts = find_compiled(model)
        loaded = self._load(parts, [_save(part) for part in parts], start, count)
        return copy_around(model, {id(part): copied for part, copied in zip(parts, loaded, strict=True)})

    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Let a model take batches of any size on dim 0, in place, and return it.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores.
            ShapeError: If a part cannot take other batch sizes. The message says why.
        """
        parts = find_compiled(model)
        for signature in self._signatures(parts):
            signature.refuse_fixed()
        for part in parts:
            self._make_dynamic(part)
        return model

    def _signatures(self, parts: Sequence[torch.jit.ScriptModule]) -> list[Signature]:
        """Return the known signatures of the compiled models in these parts."""
        return [signature for part in parts if (signature := self.signature(part)) is not None]


def _save(part: torch.jit.ScriptModule) -> io.BytesIO:
    file = io.BytesIO()
    with quiet_about_torchscript():
        torch.jit.save(part, file)
    file.seek(0)
    return file
