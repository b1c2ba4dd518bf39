"""A generator of models that treat rows independently, by construction.

A model is described by a `Spec`, a nested tuple of a name and the specs of its parts. `build` makes
the same model from the same spec and seed each time, so the oracle is a second build: a deep copy
would share closures. Every block maps (rows, WIDTH) to (rows, WIDTH), in float64.
"""

from __future__ import annotations

import functools
import types
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4
Spec = tuple[Any, ...]
Pair = namedtuple("Pair", "first second")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# Layers of torch: how to make one, and how to call it with rows.
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "plain": (linear, lambda layer, x: layer(x)),
    "norm": (lambda: nn.LayerNorm(WIDTH), lambda layer, x: layer(x)),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), lambda layer, x: layer(x)),
    "lookup": (
        lambda: nn.Embedding(7, WIDTH),
        lambda layer, x: layer(3 + x.detach().sum(1).round().long().clamp(-3, 3)),
    ),
    "conv": (
        lambda: nn.Conv1d(1, 1, 3, padding=1),
        lambda layer, x: layer(x.unsqueeze(1)).squeeze(1),
    ),
    "recurrent": (
        lambda: nn.GRU(2, 2, batch_first=True),
        lambda layer, x: layer(x.unflatten(1, (2, 2)))[0].flatten(1),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        lambda layer, x: layer(*[x.unflatten(1, (2, 2))] * 3, need_weights=False)[0].flatten(1),
    ),
}


class Layer(nn.Module):
    """A layer of torch. It is called by name, so that the block can be pickled."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, LAYERS[name][0]()

    def forward(self, x):
        return torch.tanh(LAYERS[self.name][1](self.layer, x))


class EvalNorm(nn.BatchNorm1d):
    """Batch norm that stays in eval mode; in train mode it mixes rows."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.running_mean.normal_()
        super().train(False)

    def train(self, mode: bool = True):
        return super().train(False)


class Box:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


class SlottedBox:
    __slots__ = ("__weakref__", "items")

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Keeper(nn.Module):
    """A block that keeps tensors in places of Python: how to read and how to replace the tensor of
    each place.
    """

    places: tuple[tuple[Callable[[Any], torch.Tensor], Callable[[Any, torch.Tensor], Any]], ...]

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.25
        self.learns = torch.randn(WIDTH, requires_grad=True)

    def forward(self, x):
        return torch.tanh(x * self.factor * self.learns + sum(self.held()))

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that learn nothing, for writes in place."""
        return [read(self) for read, _ in self.places]

    def replace(self, random: Random) -> None:
        """Replace the tensor of one place, or the number."""
        if random.random() < 0.2:
            self.factor = random.choice([0.5, 0.75, 1.5])
        else:
            random.choice(self.places)[1](self, torch.randn(WIDTH))


class Attributes(Keeper):
    """Attributes, items of lists and of dicts of dicts, and plain objects."""

    places = (
        (lambda block: block.plain, lambda block, new: setattr(block, "plain", new)),
        (lambda block: block.items[1], lambda block, new: block.items.__setitem__(1, new)),
        (
            lambda block: block.table["outer"]["inner"],
            lambda block, new: block.table["outer"].update(inner=new),
        ),
        (
            lambda block: block.table["other"]["inner"],
            lambda block, new: block.table.update(other={"inner": new}),
        ),
        (lambda block: block.box.items[0], lambda block, new: setattr(block.box, "items", [new])),
        (
            lambda block: block.slot.items[0],
            lambda block, new: setattr(block, "slot", SlottedBox([new])),
        ),
        (lambda block: block.space.shift, lambda block, new: setattr(block.space, "shift", new)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.items = torch.randn(WIDTH), ["a string", torch.randn(WIDTH)]
        self.table = {
            "outer": {"inner": torch.randn(WIDTH)},
            "other": {"inner": torch.randn(WIDTH)},
        }
        self.box, self.slot = Box([torch.randn(WIDTH)]), SlottedBox([torch.randn(WIDTH)])
        self.space = types.SimpleNamespace(shift=torch.randn(WIDTH))


class Enclosed(Keeper):
    """Tensors in a closure and in a partial."""

    places = (
        (lambda block: block.read(), lambda block, new: block.put(new)),
        (lambda block: block.scaled.args[0], lambda block, new: block.scale_with(new)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.scale_with(torch.randn(WIDTH))
        shift = torch.randn(WIDTH)

        def put(value):
            nonlocal shift
            shift = value

        self.read, self.put = lambda: shift, put

    def scale_with(self, factor: torch.Tensor) -> None:
        self.scaled = functools.partial(torch.mul, factor)

    def forward(self, x):
        return torch.tanh(self.scaled(x) * self.factor * self.learns + self.read())


class Buffers(nn.Module):
    """A buffer that requires grad, one that is not persistent, a plain one, and
    a frozen parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("learns", torch.randn(WIDTH, requires_grad=True))
        self.register_buffer("passing", torch.randn(WIDTH), persistent=False)
        self.register_buffer("plain", torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x * self.learns + self.passing * self.frozen + self.plain)


class Mode(nn.Module):
    def forward(self, x):
        return torch.tanh(x * 2) if self.training else torch.tanh(x)


class Scratch(nn.Module):
    """State that forward writes, and reads in the same call."""

    scratch = ("h", "kept")

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.h = None
        self.kept = []

    def forward(self, x):
        self.h = self.layer(x)
        self.kept.clear()
        self.kept.append(x)
        return torch.tanh(self.h + self.kept[0])


class WrittenBuffer(nn.Module):
    """A buffer that forward writes in place, and reads in the same call.

    Its rows are the rows of the call.
    """

    scratch = ("room",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(40, WIDTH))

    def forward(self, x):
        self.room[: len(x)].copy_(x.detach())
        return torch.tanh(x + self.room[: len(x)])


class Counter(nn.Module):
    """A buffer that counts calls, as `num_batches_tracked` does. Nothing reads it."""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.seen.add_(1)
        return torch.tanh(x)


class Equal(nn.Linear):
    """Instances are equal, and have other weights."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Equal

    def __hash__(self) -> int:
        return 1


class Twins(nn.Module):
    """Two modules that are equal and not identical."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Equal(WIDTH, WIDTH), Equal(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))


LEAVES: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Layer, name) for name in LAYERS},
    "eval_norm": EvalNorm,
    "attributes": Attributes,
    "enclosed": Enclosed,
    "buffers": Buffers,
    "mode": Mode,
    "scratch": Scratch,
    "written_buffer": WrittenBuffer,
    "counter": Counter,
    "twins": Twins,
}
_FINDING_MOST = (
    "scratch",
    "scratch",
    "scratch",
    "mode",
    "attributes",
    "attributes",
    "buffers",
    "twins",
)
LEAF_NAMES = (*LEAVES, *_FINDING_MOST)


class Holder(nn.Module):
    """A module that keeps its parts somewhere, and applies them in order."""

    most = 3

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.hold(list(parts))

    def hold(self, parts: list[nn.Module]) -> None:
        self.items = parts

    def parts(self) -> Iterable[nn.Module]:
        return self.items

    def swap(self, index: int, part: nn.Module) -> None:
        """Replace one part: in place in a list, else in a new container."""
        parts = self.parts() if isinstance(self.parts(), list) else list(self.parts())
        parts[index % len(parts)] = part
        if parts is not self.parts():
            self.hold(parts)

    def grow(self, part: nn.Module) -> None:
        """Add a part, if the holder takes more than one."""
        if self.most > 1:
            self.hold([*self.parts(), part])

    def forward(self, x):
        for part in self.parts():
            x = x + part(x)
        return x


class InContainer(Holder):
    """Keeps its parts in a container of one name."""

    name: str

    def hold(self, parts):
        self.container = CONTAINERS[self.name][0](parts)

    def parts(self):
        return CONTAINERS[self.name][1](self.container)

    def swap(self, index, part):
        if isinstance(self.container, dict):
            self.container[index % len(self.container)]["part"] = part
        else:
            super().swap(index, part)


# Containers: how to make one, and how to read its parts.
CONTAINERS: dict[
    str, tuple[Callable[[list[nn.Module]], Any], Callable[[Any], Iterable[nn.Module]]]
] = {
    "in_sequential": (lambda parts: nn.Sequential(*parts), lambda held: held),
    "in_list": (lambda parts: parts, lambda held: held),
    "in_tuple": (lambda parts: (tuple(parts), "more"), lambda held: held[0]),
    "in_dicts": (
        lambda parts: {index: {"part": part} for index, part in enumerate(parts)},
        lambda held: [inner["part"] for inner in held.values()],
    ),
    "in_deque": (lambda parts: deque(parts, maxlen=9), lambda held: held),
    "in_set": (
        lambda parts: {_ranked(part, rank) for rank, part in enumerate(parts)},
        lambda held: sorted(held, key=lambda part: part.rank),
    ),
    "in_slots": (SlottedBox, lambda held: held.items),
    "in_namespace": (lambda parts: types.SimpleNamespace(items=parts), lambda held: held.items),
}


def _ranked(part: nn.Module, rank: int) -> nn.Module:
    part.rank = rank
    return part


class InClosure(Holder):
    """The part is captured by a closure, and by the default argument of a lambda."""

    most = 1

    def hold(self, parts):
        (part,) = parts
        self.step = lambda x: part(x)
        self.read = lambda part=part: part

    def parts(self):
        return [self.read()]

    def forward(self, x):
        return x + self.step(x) + self.read()(x)


class InPartial(Holder):
    most = 1
    scratch = ("h",)

    def hold(self, parts):
        self.step = functools.partial(self._run, parts[0])

    def _run(self, part, x):
        self.h = part(x)
        return self.h

    def parts(self):
        return (self.step.args[0],)

    def forward(self, x):
        return x + self.step(x) + self.h


class Reader(nn.Module):
    """Reads the state of its parent, which it keeps in a list."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parents = [parent]

    def forward(self, x):
        (parent,) = self.parents
        return x * parent.factor + parent.h


class ChildOfListedParent(Holder):
    most = 1
    scratch = ("h",)

    def hold(self, parts):
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.h = None
        self.part = parts[0]
        self.reader = Reader(self)

    def parts(self):
        return (self.part,)

    def forward(self, x):
        self.h = self.part(x)
        return torch.tanh(self.reader(x))


class InCheckpoint(Holder):
    def hold(self, parts):
        self.items = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.items:
            x = x + checkpoint(part, x, use_reentrant=False)
        return x


class ReadsHook(Holder):
    """Reads what hooks on the part have left in this module and in another object."""

    most = 1
    scratch = ("h", "box")

    def hold(self, parts):
        self.part, self.h, self.box = parts[0], None, Box([])
        self.part.register_forward_hook(self.note)
        self.part.register_forward_hook(functools.partial(_keep, self.box))

    def parts(self):
        return (self.part,)

    def note(self, module, args, output):
        self.h = output

    def forward(self, x):
        return x + self.part(x) + self.h + self.box.items


def _keep(box: Box, module: nn.Module, args: Any, output: Any) -> None:
    box.items = output


HOLDERS: dict[str, type[Holder]] = {
    **{name: type(name, (InContainer,), {"name": name}) for name in CONTAINERS},
    "in_closure": InClosure,
    "in_partial": InPartial,
    "child_of_listed_parent": ChildOfListedParent,
    "in_checkpoint": InCheckpoint,
    "reads_hook": ReadsHook,
}


def drawn_block(random: Random, depth: int) -> Spec:
    if depth == 0 or random.random() < 0.3:
        return (random.choice(LEAF_NAMES),)
    name = random.choice(list(HOLDERS))
    count = random.randint(1, HOLDERS[name].most)
    return (name, *(drawn_block(random, depth - 1) for _ in range(count)))


def drawn_body(random: Random) -> Spec:
    return ("in_sequential", *(drawn_block(random, 2) for _ in range(random.randint(1, 3))))


class RowWise(nn.Module):
    """A whole model: it sums the rows of its inputs, applies a block, and makes the outputs that
    its spec names.
    """

    def __init__(self, body: nn.Module, outputs: Spec) -> None:
        super().__init__()
        self.body = body
        self.outputs = outputs
        self.shift = 0.5
        self.given = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(3))

    def forward(self, x, scale=None, flags=None):
        hidden = self.body(summed(x))
        if flags == "fail":
            raise KeyError("the model fails")
        if isinstance(scale, float | torch.Tensor):
            hidden = hidden * scale
        return self._output(self.outputs, hidden + self.shift)

    def _output(self, spec: Spec, hidden: torch.Tensor) -> Any:
        name, *parts = spec
        if name in LEAF_OUTPUTS:
            return LEAF_OUTPUTS[name](self, hidden)
        return OUTPUT_TREES[name]([self._output(part, hidden) for part in parts])


LEAF_OUTPUTS: dict[str, Callable[[RowWise, torch.Tensor], Any]] = {
    "rows": lambda model, hidden: hidden,
    "half": lambda model, hidden: hidden[:, :2] * 2,
    "vector": lambda model, hidden: hidden.sum(1),
    "index": lambda model, hidden: hidden.detach().argmax(1),
    "parameter": lambda model, hidden: model.given,
    "buffer": lambda model, hidden: model.kept,
    "table": lambda model, hidden: model.given * 2,
    "none": lambda model, hidden: None,
    "string": lambda model, hidden: "a string",
}
OUTPUT_TREES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda parts: {f"key{index}": part for index, part in enumerate(parts)},
    "pair": lambda parts: Pair(parts[0], parts[-1]),
}


def drawn_output(random: Random, depth: int = 2) -> Spec:
    if depth == 0 or random.random() < 0.4:
        return (random.choice(("rows", "rows", "half", "vector", *LEAF_OUTPUTS)),)
    name = random.choice(list(OUTPUT_TREES))
    parts = [drawn_output(random, depth - 1) for _ in range(random.randint(1, 3))]
    return (name, parts[0], parts[-1]) if name == "pair" else (name, *parts)


def summed(x: Any) -> torch.Tensor:
    """Return the sum of all tensors in nested values, with shape (rows, WIDTH)."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, list) and all(isinstance(item, torch.Tensor) and item.ndim == 1 for item in x):
        return torch.stack(x)
    parts = [
        summed(part)
        for part in (x.values() if isinstance(x, dict) else x)
        if not isinstance(part, int | None | str)
    ]
    wide = [part.double() if part.ndim == 2 else part.double().unsqueeze(1) for part in parts]
    return functools.reduce(torch.add, wide)


class Built:
    """A model, its blocks in the order of their making, and the hooks that changes registered."""

    def __init__(self) -> None:
        self.blocks: list[nn.Module] = []
        self.handles: list[Any] = []
        self.model: RowWise

    def block(self, spec: Spec) -> nn.Module:
        """Make a block.

        Counters in a checkpoint do not count, because the lanes' second calls of it do not come
        back.
        """
        name, *parts = spec
        first = len(self.blocks)
        made = (
            LEAVES[name]()
            if name in LEAVES
            else HOLDERS[name]([self.block(part) for part in parts])
        )
        for block in self.blocks[first:] if isinstance(made, InCheckpoint) else ():
            block.counts = False
        self.blocks.append(made)
        return made

    def modules(self) -> list[nn.Module]:
        """Return every module once, by identity, those in plain containers too."""
        found: dict[int, nn.Module] = {}
        waiting: list[nn.Module] = [self.model, *self.blocks]
        while waiting:
            module = waiting.pop(0)
            if id(module) not in found:
                found[id(module)] = module
                waiting += [child for child in module._modules.values() if child is not None]
        return list(found.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor that the modules hold, with a name for messages."""
        for index, module in enumerate(self.modules()):
            held = module.held() if isinstance(module, Keeper) else []
            yield from (
                (f"{type(module).__name__}[{index}].held()[{which}]", tensor)
                for which, tensor in enumerate(held)
            )
            for own in (module._parameters, module._buffers, vars(module)):
                for name, value in own.items():
                    if isinstance(value, torch.Tensor) and name not in getattr(
                        module, "scratch", ()
                    ):
                        yield f"{type(module).__name__}[{index}].{name}", value


@contextmanager
def float64_on(device: torch.device) -> Iterator[None]:
    """Make new tensors float64 and on that device inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def build(spec: Spec, outputs: Spec, seed: int, device: torch.device) -> Built:
    """Make a model. The same arguments make the same weights."""
    torch.manual_seed(seed)
    built = Built()
    with float64_on(device):
        built.model = RowWise(built.block(spec), outputs)
    return built
