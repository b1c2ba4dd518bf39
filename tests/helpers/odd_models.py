"""Row-wise models that keep modules, tensors, or state in unusual places. Each once had a wrong output in lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.fuzz.models import Box, build, linear

__all__ = ["BEHIND", "CASES", "MODELS", "check", "quiet"]

PLAIN = ("plain",)
SPECS = {
    "hook of the module": ("reads_hook", PLAIN),
    "lists": ("in_list", PLAIN, ("in_tuple", PLAIN), ("in_dicts", PLAIN), ("in_deque", PLAIN)),
    "partial": ("in_partial", PLAIN),
    "dicts of dicts": ("attributes",),
    "child with parent": ("child_of_listed_parent", PLAIN),
    "equal modules": ("twins",),
    "objects": ("in_slots", ("in_namespace", PLAIN), ("in_set", PLAIN)),
    "closures": ("in_closure", PLAIN),
    "buffer with gradients": ("buffers",),
    "norm in a list": ("in_list", PLAIN, ("eval_norm",)),
    "scratch": ("in_list", ("scratch",), ("written_buffer",)),
}
"""Models of the fuzzer."""


class Extractor(nn.Module):
    """Collects outputs with hooks that write into a separate object, like timm's feature extractors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(), nn.Tanh(), linear()).double()
        self.box = Box({})
        for name, module in self.body.named_children():
            module.register_forward_hook(functools.partial(_take, self.box, name))

    def forward(self, x):
        self.body(x)
        found, self.box.items = self.box.items, {}
        return found


def _take(box, name, module, args, output):
    box.items[name] = output


class ZeroGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear().double()

    def forward(self, x):
        if getattr(self, "_is_replica", False):
            self.zero_grad()
        return self.a(x)


def _built(spec) -> nn.Module:
    return build(spec, ("rows",), 0, torch.get_default_device()).model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(_built, spec) for name, spec in SPECS.items()},
    "extractor": Extractor,
    "zero_grad": ZeroGrad,
}


def _parameters_written(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9).add_(0.01 * step)


def _memory_replaced(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1


def _frozen_and_unfrozen(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_((index + step) % 2 == 0)


def _dicts_replaced(model: nn.Module, step: int) -> None:
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        module._parameters = {name: nn.Parameter(old.detach() * 0.5) for name, old in module._parameters.items()}
        module.__dict__ = dict(vars(module))


def _deep_modes(model: nn.Module, step: int) -> None:
    for module in list(model.modules())[1:]:
        module.train(step % 2 == 0)


CASES = [
    pytest.param(_parameters_written, True, id="parameters written through .data"),
    pytest.param(_memory_replaced, True, id="memory replaced"),
    pytest.param(_frozen_and_unfrozen, True, id="frozen and unfrozen"),
    pytest.param(_dicts_replaced, True, id="dicts replaced"),
    pytest.param(_deep_modes, True, id="modes deep inside"),
    pytest.param(_parameters_written, False, id="parameters written, no grad"),
    pytest.param(_dicts_replaced, False, id="dicts replaced, no grad"),
]


class Caller:
    def __init__(self, model) -> None:
        self.model = model

    def __call__(self, x):
        return self.model(x)


BEHIND = [
    pytest.param(lambda model: model.forward, id="method"),
    pytest.param(lambda model: lambda x: model(x), id="closure"),
    pytest.param(lambda model: functools.partial(nn.Module.__call__, model), id="partial"),
    pytest.param(Caller, id="object"),
]
"""Callables with a model in them."""

quiet = pytest.mark.filterwarnings(
    "ignore:the model wrote:UserWarning",
    "ignore:Calling .zero_grad:UserWarning",
    "ignore:The .grad attribute:UserWarning",
)


def check(make, event, opened, rows: int, *, grad: bool, calls: int = 3) -> None:
    """Compare several calls of a model in a block with calls of a second one. Apply `event` to both after each call."""
    torch.manual_seed(rows)
    model = make()
    torch.manual_seed(rows)
    plain = make()
    with torch.set_grad_enabled(grad), opened(model) as p:
        for step in range(calls):
            x = torch.randn(rows, 4, dtype=torch.float64)
            output, expected = model(x), plain(x.to(next(plain.parameters()).device))
            torch.testing.assert_close(output, expected)
            if grad and any(parameter.requires_grad for parameter in model.parameters()):
                _backward(output)
                _backward(expected)
            pairs = zip(_requiring_gradients(model), _requiring_gradients(plain), strict=True)
            for (name, mine), (_, theirs) in pairs:
                torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
            event(model, step)
            event(plain, step)
            if not grad:
                p.refresh()


def _backward(output) -> None:
    values = output.values() if isinstance(output, dict) else [output]
    sum(value.square().sum() for value in values).backward()


def _requiring_gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if buffer.requires_grad)]
