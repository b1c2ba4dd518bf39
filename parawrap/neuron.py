"""AWS NeuronCores: the API of torch_neuronx, on NeuronCores or on cores that parawrap emulates.

The same code runs on inf2 and trn1, and on any other machine with emulated cores. On trn2 and trn3
with the newer torch_neuronx, NeuronCores are torch devices: use `parawrap.parallel` with
``"neuron:0"`` instead. The environment variable PARAWRAP_NEURON_RUNTIME names the runtime:
torch_neuronx, torch_neuron, or host, which emulates cores on the CPU. By default parawrap uses the
vendor's runtime that is installed, torch_neuronx first. Without either, it uses host and warns.

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

from parawrap.api.neuron_data_parallel import DataParallel
from parawrap.backends import backend_of, neuron_is_device
from parawrap.neuroncores import NeuronCore, quiet_about_torchscript, runtime

__all__ = ["DataParallel", "NeuronCore", "core_count", "dynamic_batch", "load", "save", "trace"]


def core_count() -> int:
    """Return the number of NeuronCores that are allocated to this process.

    If NeuronCores are torch devices, it is the number of these devices. The emulated runtime has 2
    cores, unless NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES sets another number.

    Raises:
        DeviceUnavailableError: If the runtime is not installed, or the cores cannot be counted.
        DeviceListError: If NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES is malformed.

    Example:
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host(cores=8):
        ...     neuron.core_count()
        8
    """
    if neuron_is_device():
        return backend_of("neuron").count()
    return runtime().core_count()


def trace(
    func: Any, example_inputs: Any = None, *, example_kwarg_inputs: Any = None, **compiler: Any
) -> torch.jit.ScriptModule:
    """Compile a module or function for NeuronCores, with the ``trace`` function of the runtime.

    The compiled model accepts only tensors with the shapes and dtypes of the examples. `save`
    writes it to a file.

    With `example_kwarg_inputs`, the compiled model has these inputs and no others. Pass them by
    name.

    Args:
        func: A module or function that ``torch.jit.trace`` accepts, usually in eval mode.
        example_inputs: A tensor, or a tuple with one entry per argument. An entry may nest tuples,
            lists, and dicts.
        example_kwarg_inputs: A dict with one entry per keyword argument, instead of
            `example_inputs`.
        compiler: Options of the vendor's trace, such as ``compiler_args``. The emulated runtime
            ignores them.

    Raises:
        DeviceUnavailableError: If the runtime is not installed.
        TypeError: If both `example_inputs` and `example_kwarg_inputs` are given, if
            `example_inputs` is a dict, or if the runtime's trace has no `example_kwarg_inputs`. On
            emulated cores, if an input or output holds values other than tensors in tuples, lists,
            and dicts.
        Exception: Any error of the vendor's compiler or of the model.

    Example:
        >>> import torch
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host():
        ...     model = neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3))
        ...     model(torch.tensor([[-1.0, 0.0, 1.0]]))
        tensor([[0., 0., 1.]])
        >>> def masked(x, mask):
        ...     return x * mask
        >>> with testing.neuron_host():
        ...     inputs = {"x": torch.zeros(1, 2), "mask": torch.ones(1, 2)}
        ...     model = neuron.trace(masked, example_kwarg_inputs=inputs)
        ...     model(mask=torch.tensor([[1.0, 0.0]]), x=torch.tensor([[3.0, 4.0]]))
        tensor([[3., 0.]])
    """
    return runtime().trace(
        func, example_inputs, example_kwarg_inputs=example_kwarg_inputs, **compiler
    )


def dynamic_batch(model: torch.nn.Module) -> torch.nn.Module:
    """Make a compiled model accept any number of rows, like ``torch_neuronx.dynamic_batch``.

    The model processes the rows in chunks of the compiled size. `DataParallel` and `parallel` call
    this function themselves. The guide "Run a model on NeuronCores" explains how a short last chunk
    runs.

    Args:
        model: A model from `trace`, or a module that contains such models.

    Returns:
        `model`, changed in place.

    Raises:
        ReplicaError: If `model` was not traced for NeuronCores.
        ShapeError: If an input or output has no dim 0, or its size on dim 0 differs from that of
            the others.

    Example:
        >>> import torch
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host():
        ...     model = neuron.trace(torch.nn.ReLU(), torch.zeros(4, 3))
        ...     neuron.dynamic_batch(model)(torch.ones(7, 3)).shape
        torch.Size([7, 3])
    """
    return runtime().dynamic_batch(model)


def load(file: str | os.PathLike[str] | IO[bytes]) -> torch.jit.ScriptModule:
    """Load a compiled model from a file with ``torch.jit.load``, after importing the runtime.

    Args:
        file: A path, or a file that is open for reading bytes.

    Returns:
        The model. The runtime chooses its core; use `DataParallel` or `parallel` to choose cores
        yourself.

    Raises:
        DeviceUnavailableError: If the runtime is not installed.
        OSError, RuntimeError: If torch cannot read the file.

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
    runtime()  # its import registers the operators that the file refers to
    with quiet_about_torchscript():
        model: torch.jit.ScriptModule = torch.jit.load(file)
    return model


def save(model: torch.jit.ScriptModule, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Save a compiled model and its weights to a file with ``torch.jit.save``.

    Args:
        model: A model from `trace`.
        file: A path, or a file that is open for writing bytes.

    Raises:
        OSError, RuntimeError: If torch cannot write the file.

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
