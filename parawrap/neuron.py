"""NeuronCores: the vendor's names on the vendor's runtimes, and on emulated cores wherever there are none.

The lines that run here are the lines that run on inf2 and trn1. PARAWRAP_NEURON_RUNTIME names the runtime (torch_neuronx,
torch_neuron or host, which emulates cores on the CPU); without it, the first of the vendor's that is installed is taken,
and else host, with a warning.

>>> import torch
>>> from parawrap import neuron, testing
>>> with testing.neuron_host(cores=4):
...     model = neuron.trace(torch.nn.Linear(8, 4).eval(), torch.zeros(2, 8))
...     net = neuron.DataParallel(model, device_ids=["nc:0", "nc:1", "nc:3"])
...     net(torch.randn(7, 8)).shape
torch.Size([7, 4])
"""

from __future__ import annotations

import os
from typing import IO, Any

import torch

from parawrap.backends.neuron import NeuronCore, quiet_about_torchscript, runtime
from parawrap.faces.neuron import DataParallel

__all__ = ["DataParallel", "NeuronCore", "core_count", "dynamic_batch", "load", "save", "trace"]


def core_count() -> int:
    """How many NeuronCores are allocated to this process.

    The emulated runtime has 2, unless NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES says otherwise.

    Raises:
        DeviceUnavailableError: the runtime that is asked for is not there, or the cores cannot be counted.
        DeviceListError: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES is malformed.

    Example:
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host(cores=8):
        ...     neuron.core_count()
        8
    """
    return runtime().core_count()


def trace(model: Any, example_inputs: Any, **compiler: Any) -> torch.jit.ScriptModule:
    """Compile a module or function for NeuronCores: torch_neuronx.trace, torch_neuron.trace, or the emulated runtime's.

    What it returns takes tensors of the shapes and dtypes of the examples, and no others; `save` keeps it.

    Args:
        model: a module or function that ``torch.jit.trace`` takes; in eval mode, as a rule.
        example_inputs: a tensor, or a tuple with one entry an argument; an entry may nest tuples, lists and dicts.
        compiler: options of the vendor's trace, ``compiler_args=...`` say. The emulated runtime ignores them.

    Raises:
        DeviceUnavailableError: the runtime that is asked for is not there.
        TypeError: emulated: the model takes or gives something else than tensors in tuples, lists and dicts.
        Exception: whatever the vendor's compiler or the model itself raises.

    Example:
        >>> import torch
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host():
        ...     model = neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3))
        ...     model(torch.tensor([[-1.0, 0.0, 1.0]]))
        tensor([[0., 0., 1.]])
    """
    return runtime().trace(model, example_inputs, **compiler)


def dynamic_batch(model: torch.nn.Module) -> torch.nn.Module:
    """A compiled model that takes any number of rows on dim 0, in chunks of the compiled size; as torch_neuronx's.

    `DataParallel` and `parallel` do this by themselves. How a short last chunk is run: docs/neuron.md.

    Args:
        model: what `trace` returned, or a module that holds such models.

    Returns:
        `model` itself, changed in place, where the runtime can do that; else a module around it.

    Raises:
        ReplicaError: it was not traced for NeuronCores.
        ShapeError: an input or output has no batch dimension, or not the others' size there.

    Example:
        >>> import torch
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host():
        ...     model = neuron.dynamic_batch(neuron.trace(torch.nn.ReLU(), torch.zeros(4, 3)))
        ...     model(torch.ones(7, 3)).shape
        torch.Size([7, 3])
    """
    return runtime().dynamic_batch(model)


def load(file: str | os.PathLike[str] | IO[bytes]) -> torch.jit.ScriptModule:
    """``torch.jit.load`` of a compiled model, once the runtime that it needs is imported.

    Args:
        file: a path, or a file that is open for reading bytes.

    Returns:
        The model, loaded onto a core by the runtime's own choice; `DataParallel` and `parallel` say onto which.

    Raises:
        DeviceUnavailableError: the runtime that is asked for is not there.

    Example:
        >>> import io, torch
        >>> from parawrap import neuron, testing
        >>> file = io.BytesIO()
        >>> with testing.neuron_host():
        ...     neuron.save(neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3)), file)
        ...     model = neuron.load(io.BytesIO(file.getvalue()))
        ...     model(torch.ones(1, 3))
        tensor([[1., 1., 1.]])
    """
    runtime()
    with quiet_about_torchscript():
        model: torch.jit.ScriptModule = torch.jit.load(file)
    return model


def save(model: torch.jit.ScriptModule, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """``torch.jit.save`` of a compiled model, weights and all.

    Args:
        model: what `trace` returned.
        file: a path, or a file that is open for writing bytes.

    Example:
        >>> import io, torch
        >>> from parawrap import neuron, testing
        >>> file = io.BytesIO()
        >>> with testing.neuron_host():
        ...     neuron.save(neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3)), file)
        >>> len(file.getvalue()) > 0
        True
    """
    with quiet_about_torchscript():
        torch.jit.save(model, file)
