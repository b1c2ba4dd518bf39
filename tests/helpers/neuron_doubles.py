"""Doubles of the vendor's packages, and small models for them.

A double has only names that the vendor documents, records each call in order with its arguments,
and compiles models as the emulated runtime does. It is as strict as the vendor's pages allow: the
placement context is per process, and dynamic batching raises the vendor's type of error.

torch_neuron leaves models with few operators on the CPU, so each model has several.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parawrap import neuron
from parawrap.errors import ShapeError
from parawrap.neuroncores import _vendor_runtimes
from parawrap.testing import NeuronHost


class Double:
    """A double of one package.

    With `experimental`, its placement functions are in the ``experimental`` module.

    A call is recorded as its name and arguments. "torch.jit.load" is recorded if it loads onto
    chosen cores.
    """

    def __init__(self, name: str, host: NeuronHost, *, experimental: bool) -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []
        self._host = host
        self._cores: tuple[int, int] | None = None
        self._place = f"{name}.experimental" if experimental else name
        self._load = torch.jit.load
        placement = {"neuron_cores_context": self._neuron_cores_context}
        members: dict[str, object] = {"trace": self._trace}
        if name == "torch_neuronx":
            members["dynamic_batch"] = self._dynamic_batch
        members |= {"experimental": SimpleNamespace(**placement)} if experimental else placement
        self.package = ModuleType(name)
        self.package.__spec__ = ModuleSpec(name, loader=None)
        vars(self.package).update(members)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Import the double under the vendor's name, and let torch.jit.load use the chosen cores,
        as the vendor's does.
        """
        monkeypatch.setitem(sys.modules, self.name, self.package)
        # Its models are of the emulated compiler
        monkeypatch.setattr(_vendor_runtimes, "find_programs", lambda part: [])
        monkeypatch.setattr(torch.jit, "load", self._loaded)

    def _trace(
        self, model: Callable[..., Any], example_inputs: Any, **options: Any
    ) -> torch.jit.ScriptModule:
        self.calls.append((f"{self.name}.trace", model, example_inputs, options))
        compiled = self._host.trace(model, example_inputs, **options)
        if options.get("dynamic_batch_size"):
            self._host.dynamic_batch(compiled)
        return compiled

    @contextmanager
    def _neuron_cores_context(self, start_nc: int = -1, nc_count: int = -1) -> Iterator[None]:
        """Raise ValueError for an invalid number of cores, as documented."""
        assert self._cores is None, (
            "two threads entered the context, which is documented as not thread-safe"
        )
        self.calls.append((f"{self._place}.neuron_cores_context", start_nc, nc_count))
        if not 0 < nc_count <= self._host.core_count() - start_nc:
            raise ValueError(f"invalid number of NeuronCores: {nc_count}")
        self._cores = start_nc, nc_count
        try:
            yield
        finally:
            self._cores = None
            self.calls.append(("left",))

    def _loaded(self, file: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if self._cores is not None:
            self.calls.append(("torch.jit.load",))
        return self._load(file, *args, **kwargs)

    def _dynamic_batch(self, neuron_script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        self.calls.append((f"{self.name}.dynamic_batch", neuron_script))
        assert isinstance(neuron_script, torch.jit.ScriptModule), (
            "documented only for the models that trace returns"
        )
        try:
            self._host.dynamic_batch(neuron_script)
        except ShapeError as error:
            raise ValueError(*error.args) from None
        return neuron_script


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def rows(count: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, count * 6).reshape(count, 6)


class Doubling(nn.Module):
    """Two tensors in, two tensors out.

    Its small whole numbers are exact in every floating-point format.
    """

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x + 1, x + y + y


def numbers(count: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a call of `Doubling`. All rows differ."""
    return torch.arange(2.0 * count).reshape(count, 2), -torch.arange(2.0 * count).reshape(count, 2)


class Around(nn.Module):
    """A module with compiled parts behind an ordinary linear layer."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(6, 6)
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.before(x)
        return [part(x) for part in self.parts]


def saved_and_loaded(compiled: nn.Module) -> nn.Module:
    """Return a model after a way through a file."""
    file = io.BytesIO()
    neuron.save(compiled, file)
    return neuron.load(io.BytesIO(file.getvalue()))


def counts(host: NeuronHost, what: str) -> list[int]:
    """Return the "inferences", "loads", or "models" of each core."""
    return [getattr(core, what) for core in host.stats()]


def assert_equal(output: Any, expected: Any) -> None:
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
