"""The example call of a trace, and the conditions that it runs under."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

# Warning filters are per process. If two threads leave catch_warnings blocks in the wrong order, one filter stays forever.
_filtering = threading.RLock()


class ExampleCall(NamedTuple):
    """The arguments of the call that a trace records: either positional arguments or keyword arguments.

    Keyword arguments are in the order of the function's parameters, so flattening gives the same order as for a positional
    call. A plain dict would be flattened in the order of its keys.
    """

    args: tuple[Any, ...]
    kwargs: OrderedDict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], example_inputs: Any, example_kwarg_inputs: Any) -> ExampleCall:
        """Read example inputs as torch.jit.trace does: a tuple or list holds all arguments; any other value is one.

        Raises:
            TypeError: If both or neither are given, or a dict is given by position.
        """
        if (example_inputs is None) == (example_kwarg_inputs is None):
            given = "neither" if example_inputs is None else "both"
            msg = f"trace got {given} of example_inputs and example_kwarg_inputs. Give one of them"
            raise TypeError(msg)
        if isinstance(example_inputs, Mapping):
            msg = (
                f"example_inputs is a {type(example_inputs).__name__}. To trace inputs by name, use "
                "example_kwarg_inputs=. If forward takes one dict, give a tuple that holds it: (inputs,)"
            )
            raise TypeError(msg)
        if example_kwarg_inputs is None:
            return cls(
                tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,), OrderedDict()
            )
        if not isinstance(example_kwarg_inputs, Mapping):
            msg = f"example_kwarg_inputs is a {type(example_kwarg_inputs).__name__}. Give a dict of inputs by name"
            raise TypeError(msg)
        place = {parameter.name: index for index, parameter in enumerate(inspect_parameters(function))}
        return cls((), OrderedDict(sorted(example_kwarg_inputs.items(), key=lambda item: place.get(item[0], len(place)))))


def inspect_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a module or function; an empty list if Python cannot inspect its signature."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):
        return []
    return list(signature.parameters.values())


def copy_for_trial(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a module that shares its parameters, so that a trial call leaves the state of the module as it is.

    Functions, and modules that cannot be copied, are returned as they are.
    """
    if not isinstance(model, torch.nn.Module):
        return model
    try:
        return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    except Exception:  # noqa: BLE001 (any attribute may refuse, in any way)
        return model


@contextmanager
def quiet_about_torchscript() -> Iterator[None]:
    """Hide the warning that torch.jit is deprecated: the vendor's compilers still return a ScriptModule.

    Only one thread at a time runs inside this block.
    """
    with _filtering, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)")
        yield
