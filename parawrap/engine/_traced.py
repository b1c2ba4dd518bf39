"""Traces of a module: the same operators without the interpreter, and so without its lock."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.jit import TracerWarning  # type: ignore[attr-defined]
from torch.nn.modules import module as modules

from parawrap.engine._entry import Entry
from parawrap.replicas import module_tree
from parawrap.shards import check_equal
from parawrap.tree import flatten, flatten_call

__all__ = ["Traces"]

_MOST_TRACES = 64
_OF_TRACE = 3  # torch's executor takes two to specialise


class Traces:
    """One trace for each shape of a call of one module's forward; lanes may run one at the same time.

    A trace has the parameters themselves. What else of the module changes it does not see: `forget` it then.
    """

    def __init__(self) -> None:
        self._access = threading.RLock()  # the module may call itself while it is traced
        self._found: dict[Any, Callable[..., Any] | None] = {}
        self._hooks: Sequence[Mapping[int, Any]] = ()  # where those of the module come to lie
        self._generation = 0

    def of_generation(self, generation: int) -> None:
        """What follows is about the module as it is then: traces of what it was before are forgotten."""
        if generation != self._generation:
            self._generation = generation
            self.forget()

    def forget(self) -> None:
        """The module changed."""
        with self._access:
            self._found.clear()
            self._hooks = ()

    def of(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """The trace for calls of exactly these shapes; None while the module has hooks, which no trace runs."""
        return self._found.get(_key(entry, args, kwargs)) if self._found and not any(self._hooks) else None

    def has(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it was tried to trace calls of these shapes, or too many others were traced for this to be one more."""
        return len(self._found) >= _MOST_TRACES or _key(entry, args, kwargs) in self._found

    def make(self, entry: Entry, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Trace the module for calls of these shapes, where that can be; how often it was run for that.

        Control flow that depends on values cannot be traced, as far as torch notices; nor can what has hooks, draws at
        random, or returns something else when it is traced.
        """
        runs, trace = 0, None
        with self._access:
            self._hooks = _hooks(module)
            if entry.method in (None, "forward") and not any(self._hooks) and not _has_scripts(module):
                runs, trace = _traced(module, args, kwargs)
            self._found[_key(entry, args, kwargs)] = trace
        return runs


def _key(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = flatten_call(args, kwargs)
    forms = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    casts = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None  # they are part of a trace
    return spec, forms, casts


def _traced(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, Callable[..., Any] | None]:
    """How often the module was run, and the trace, where it does the same."""
    state = torch.random.get_rng_state()
    runs, output = 0, None
    try:
        with warnings.catch_warnings(record=True) as told:  # as errors they would end the tracer, in C++
            warnings.simplefilter("always")
            runs += 1
            expected = module(*args, **kwargs)
            runs += 1
            trace: Any = torch.jit.trace(module, args or None, example_kwarg_inputs=kwargs or None, check_trace=False)
            for _ in range(_OF_TRACE):
                runs += 1
                output = trace(*args, **kwargs)
        same = flatten(output)[1] == flatten(expected)[1] and not any(each.category is TracerWarning for each in told)
        check_equal(output, expected)
    except Exception:  # noqa: BLE001 - whatever a module does when it is traced: it is run as it is, then
        return runs, None
    finally:
        drew = not torch.equal(state, torch.random.get_rng_state())
        torch.random.set_rng_state(state)  # the user's numbers are what they would have been
    return runs, trace if same and not drew else None


def _hooks(module: torch.nn.Module) -> list[Mapping[int, Any]]:
    of_parts = [hooks for part, _ in module_tree(module) for hooks in (part._forward_hooks, part._forward_pre_hooks)]
    return [modules._global_forward_hooks, modules._global_forward_pre_hooks, *of_parts]


def _has_scripts(module: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.jit.ScriptModule) for part, _ in module_tree(module))
