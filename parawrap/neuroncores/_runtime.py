"""The base of NeuronCore runtimes, and the shapes that a model was compiled for."""

from __future__ import annotations

import copy
import inspect
import io
import threading
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from parawrap.errors import ReplicaError, ShapeError

# Warning filters are per process. If two threads left catch_warnings blocks in another order than
# they entered them, a filter would stay forever. Reentrant: one such block may lie in another
_filtering = threading.RLock()


class Signature(NamedTuple):
    """The shapes that a model was compiled for, in the order of `parawrap.tree.flatten`."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, inputs: Iterable[Any], outputs: Iterable[Any]) -> Signature:
        """Return the signature of a call with these leaves, without values other than tensors."""
        return cls(_shapes_of(inputs), _shapes_of(outputs))

    @property
    def most_dims(self) -> int:
        """The largest number of dims of an input."""
        return max(map(len, self.inputs), default=0)

    def rows(self, dim: int) -> int | None:
        """Return the compiled number of rows on `dim`; None if the inputs disagree on it."""
        sizes = {shape[dim] for shape in self.inputs if -len(shape) <= dim < len(shape)}
        if len(sizes) > 1:
            sizes.discard(1)  # an input with one row goes with each row of the others
        return sizes.pop() if len(sizes) == 1 else None

    def why_fixed(self) -> str | None:
        """Return why the model takes only batches of the compiled size; None if it takes all."""
        if not self.inputs:
            return "it takes no tensors"
        for kind, shapes in (("input", self.inputs), ("output", self.outputs)):
            for number, shape in enumerate(shapes):
                if not shape:
                    return f"{kind} {number} has no batch dimension: its compiled shape is ()"
                if shape[0] == 0:
                    return f"{kind} {number} is compiled for 0 rows"
                first_rows = self.inputs[0][0]  # the first look was at input 0, which has dims
                if shape[0] != first_rows:
                    return (
                        f"input 0 is compiled for {first_rows} rows on dim 0, and {kind} {number} "
                        f"for {shape[0]}"
                    )
        return None


def _shapes_of(leaves: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tuple(tuple(tensor.shape) for tensor in tensors)


class NeuronRuntime(ABC):
    """Runs compiled models on NeuronCores. Thread-safe; one instance lives as long as the process.

    Cores are numbered from zero within the process. Several threads may call a model on a core: the
    runtime runs one inference at a time on each core.
    """

    name: str
    """The value of PARAWRAP_NEURON_RUNTIME that selects this runtime."""

    @abstractmethod
    def core_count(self) -> int:
        """Return the number of NeuronCores of this process. For errors see `neuron.core_count`."""

    @abstractmethod
    def trace(
        self,
        model: Any,
        example_inputs: Any = None,
        *,
        example_kwarg_inputs: Any = None,
        **compiler: Any,
    ) -> torch.jit.ScriptModule:
        """Compile a module or function for the examples, as `parawrap.neuron.trace` does."""

    @abstractmethod
    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the shapes that the model was compiled for; None if they are not known."""

    @abstractmethod
    def load(
        self, parts: Sequence[torch.jit.ScriptModule], start: int, count: int
    ) -> list[torch.nn.Module]:
        """Return copies of models on the cores ``start .. start + count - 1``, loaded in one call.

        Each call of a copy uses the next of these cores. The memory of the cores is freed with the
        last reference to the copy: the vendor documents no other way.

        Raises:
            DeviceUnavailableError, ValueError: If the process does not have these cores.
            RuntimeError: If the runtime cannot load a model, for instance because a core is out of
                memory.
        """

    @abstractmethod
    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        """Enable dynamic batching of a compiled model.

        Raises:
            ShapeError: If the model cannot take other batch sizes. The message says why.
        """

    def place(self, model: torch.jit.ScriptModule, start: int, count: int) -> torch.nn.Module:
        """Return a copy of a model, loaded onto the cores ``start .. start + count - 1``."""
        return self.load([model], start, count)[0]

    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Let a model take batches of any size on dim 0, in place, and return it.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores. The vendor's functions
                ignore such a module.
            ShapeError: If a part cannot take other batch sizes. The message says why.
        """
        parts = dict.fromkeys(_find_compiled(model))  # each once
        if not parts:
            raise not_traced(model)
        # All parts are checked before the first one changes
        for part in parts:
            signature = self.signature(part)
            why = None if signature is None else signature.why_fixed()
            if why is not None:
                raise no_dynamic_batching(why)
        for part in parts:
            self._make_dynamic(part)
        return model


def not_traced(model: object) -> ReplicaError:
    """Return the error for a model that has no part compiled for NeuronCores."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
    return ReplicaError(
        f"{name} was not traced for NeuronCores. Call "
        "parawrap.neuron.trace(model, example_inputs) first"
    )


def no_dynamic_batching(why: object) -> ShapeError:
    """Return the error for a model that cannot use dynamic batching."""
    return ShapeError(f"this model cannot use dynamic batching: {why}")


def save_to_memory(part: torch.jit.ScriptModule) -> io.BytesIO:
    """Return a file in memory that holds a compiled model."""
    file = io.BytesIO()
    with quiet_about_torchscript():
        torch.jit.save(part, file)
    file.seek(0)
    return file


def _find_compiled(module: torch.nn.Module) -> list[torch.jit.ScriptModule]:
    """Return the outermost ScriptModules in a module, which may be the module itself."""
    if isinstance(module, torch.jit.ScriptModule):
        return [module]
    return [part for child in module.children() for part in _find_compiled(child)]


# --- the example call of a trace ---


def read_examples(
    function: Callable[..., Any], example_inputs: Any, example_kwarg_inputs: Any
) -> tuple[tuple[Any, ...], OrderedDict[str, Any]]:
    """Return the arguments of the call that a trace records: positional ones or keywords.

    As in torch.jit.trace, a tuple or list holds all arguments, and any other value is the only one.
    Keyword arguments are in the order of the function's parameters, and `flatten` keeps the order
    of an OrderedDict. So the leaves have the order of a positional call.

    Raises:
        TypeError: If both are given, or a dict is given by position.
    """
    if example_inputs is not None and example_kwarg_inputs is not None:
        msg = "trace got both example_inputs and example_kwarg_inputs. Give one of them"
        raise TypeError(msg)
    if isinstance(example_inputs, Mapping):
        msg = (
            f"example_inputs is a {type(example_inputs).__name__}. To trace inputs by name, use "
            "example_kwarg_inputs=. If forward takes one dict, give a tuple that holds it: "
            "(inputs,)"
        )
        raise TypeError(msg)
    if example_kwarg_inputs is None:
        if isinstance(example_inputs, (tuple, list)):
            return tuple(example_inputs), OrderedDict()
        return (example_inputs,), OrderedDict()
    parameters = inspect_parameters(function)
    names = [each.name for each in parameters if each.name in example_kwarg_inputs]
    # Names that only **kwargs takes come last, in the given order
    names += [name for name in example_kwarg_inputs if name not in names]
    return (), OrderedDict((name, example_kwarg_inputs[name]) for name in names)


def inspect_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a module or function; an empty list if Python cannot read them."""
    # The call of a module takes any arguments; those of `forward` have names
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return []
    return list(signature.parameters.values())


def copy_for_trial(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a module that shares its parameters: a trial call changes no state."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    # deepcopy takes the objects in this dict as copies that it has made
    copied = {id(parameter): parameter for parameter in parameters}
    return copy.deepcopy(model, copied)


@contextmanager
def quiet_about_torchscript() -> Iterator[None]:
    """Hide the warning that torch.jit is deprecated, which the vendor's compilers use.

    One thread at a time runs inside such a block.
    """
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)")
        yield
