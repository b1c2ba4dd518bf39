"""Row-wise models that keep modules, tensors, or state in unusual places. Each once had a wrong output in lanes."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

__all__ = ["BEHIND", "CASES", "MODELS", "check", "quiet"]

WRITES = "the model wrote"  # start of the warning about attributes that lanes write and lose


def linear(out_features: int = 4) -> nn.Linear:
    return nn.Linear(4, out_features, dtype=torch.float64)


class HookOfTheModule(nn.Module):
    """Has a hook that is a bound method of the model and stores a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.a.register_forward_hook(self.keep)
        self.h: Tensor | None = None

    def keep(self, module, args, output):
        self.h = output

    def forward(self, x):
        self.a(x)
        return self.b(self.h)


class Listed(nn.Module):
    """Calls its submodules through plain lists, tuples, dicts, and deques."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.steps = [self.a, (self.b,), {"c": self.c}, deque([self.d])]

    def forward(self, x):
        a, (b,), table, queue = self.steps
        return queue[0](table["c"](b(a(x).tanh())))


class PartialForward(nn.Module):
    """Has a `forward` attribute that is a partial of a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.forward = functools.partial(self._forward, 2.0)

    def _forward(self, factor, x):
        self.scaled = x * factor
        return self.a(self.scaled)


class DictsOfDicts(nn.Module):
    """Reads and writes tensors in nested dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.held = {"x": {"shift": torch.ones(4, dtype=torch.float64)}, "list": [{}]}

    def forward(self, x):
        self.held["list"][0]["x"] = x
        return self.a(self.held["list"][0]["x"]) + self.held["x"]["shift"]


class ChildWithParent(nn.Module):
    """Has a child that holds its parent in a list, with a hook that reads the parent's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.child = linear()
        self.child.parent = [self]
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.child.register_forward_hook(self.scaled)

    def scaled(self, module, args, output):
        return output * module.parent[0].scale

    def forward(self, x):
        return self.child(x)


class Extractor(nn.Module):
    """Collects outputs with hooks of a separate object, like timm's feature extractors."""

    class Taken:
        """Holds outputs by name."""

        def __init__(self) -> None:
            self.outputs: dict[str, Tensor] = {}

        def take(self, name, module, args, output):
            self.outputs[name] = output

        def given(self):
            found, self.outputs = self.outputs, {}
            return found

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(), nn.Tanh(), linear())
        self.taken = self.Taken()
        for name, module in self.body.named_children():
            module.register_forward_hook(functools.partial(self.taken.take, name))

    def forward(self, x):
        self.body(x)
        return self.taken.given()


class Equal(nn.Linear):
    """A layer that is equal to every other layer of its class."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 7


class Slotted:
    """Holds a module in a slot."""

    __slots__ = ("__weakref__", "held")

    def __init__(self, held):
        self.held = held


class Objects(nn.Module):
    """Keeps modules in slots, namespaces, weak references, and sets, and state in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.slotted = Slotted(self.a)
        self.space = types.SimpleNamespace(module=self.b, h=None)
        self.weak = weakref.ref(self.c)
        self.chosen = {self.d}

    def forward(self, x):
        self.space.h = self.slotted.held(x)
        (last,) = self.chosen
        return last(self.weak()(self.space.module(self.space.h)))

    def plain_copy(self):
        other = Objects()
        other.load_state_dict(self.state_dict())
        return other.train(self.training).to(self.a.weight.device)


class Closures(nn.Module):
    """Calls submodules through closures, default arguments, and lambdas."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        a, steps = self.a, [self.b]
        self.first = lambda x: a(x)
        self.second = lambda x: steps[0](x)
        self.third = lambda x, module=self.c: module(x)

    def forward(self, x):
        return self.third(self.second(self.first(x)))

    def plain_copy(self):
        other = Closures()
        other.load_state_dict(self.state_dict())
        return other.train(self.training).to(self.a.weight.device)


class ZeroGrad(nn.Module):
    """Calls zero_grad in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()

    def forward(self, x):
        if getattr(self, "_is_replica", False):
            self.zero_grad()
        return self.a(x)


class BufferWithGradients(nn.Module):
    """Has a buffer that requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.register_buffer("scale", torch.rand(4, dtype=torch.float64, requires_grad=True))

    def forward(self, x):
        return self.a(x) * self.scale


class NormInAList(nn.Module):
    """Calls a norm in eval mode through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = linear(), nn.BatchNorm1d(4, dtype=torch.float64)
        self.steps = [self.a, self.norm]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Scratch(nn.Module):
    """Writes a buffer in place, and a plain tensor with the same values in every lane, and reads both in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.register_buffer("kept", torch.zeros(64, 4, dtype=torch.float64))
        self.plain = torch.zeros(64, 4, dtype=torch.float64)

    def forward(self, x):
        y = self.a(x)
        self.kept[: len(x)] = y.detach()
        self.plain.fill_(3)
        return y + self.kept[: len(x)] * 2 + self.plain[: len(x)]

    def _apply(self, fn, recurse=True):
        self.plain = fn(self.plain)
        return super()._apply(fn, recurse)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hook of the module": HookOfTheModule,
    "lists": Listed,
    "partial": PartialForward,
    "dicts of dicts": DictsOfDicts,
    "child with parent": ChildWithParent,
    "extractor": Extractor,
    "equal modules": lambda: nn.Sequential(Equal(), Equal()),
    "objects": Objects,
    "closures": Closures,
    "zero_grad": ZeroGrad,
    "buffer with gradients": BufferWithGradients,
    "norm in a list": NormInAList,
    "scratch": Scratch,
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
        if not isinstance(module, nn.BatchNorm1d):
            module.train(step % 2 == 0)


EVENTS: dict[str, Callable[[nn.Module, int], None]] = {
    "nothing": lambda model, step: None,
    "parameters written through .data": _parameters_written,
    "memory replaced": _memory_replaced,
    "frozen and unfrozen": _frozen_and_unfrozen,
    "dicts replaced": _dicts_replaced,
    "modes deep inside": _deep_modes,
}


class Caller:
    """Calls a model that it holds."""

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


_WITHOUT_GRAD = ("nothing", "parameters written through .data", "dicts replaced")
CASES = [
    *(pytest.param(event, True, id=name) for name, event in EVENTS.items()),
    *(pytest.param(EVENTS[name], False, id=f"{name}, no grad") for name in _WITHOUT_GRAD),
]


def check(make, event, opened, rows: int, *, grad: bool, calls: int = 3) -> None:
    """Compare several calls of a model in a block with calls of a plain copy. Apply `event` to both after each call."""
    torch.manual_seed(rows)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    plain = model.plain_copy() if hasattr(model, "plain_copy") else copy.deepcopy(model)
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
