"""A generator of models that treat rows independently, by construction.

A model is described by a `Spec`, a nested tuple of a name and the specs of its parts. `build` makes the same model from
the same spec and seed each time, so the oracle is a second build: a deep copy would share closures and weak references.
Every block maps (rows, WIDTH) to (rows, WIDTH), in float64.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH = 4
Spec = tuple[Any, ...]
Pair = namedtuple("Pair", "first second")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Wrapped(nn.Module):
    """A layer of torch for inputs of another form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.made()

    def made(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.run(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Plain(Wrapped):
    made = staticmethod(linear)


class Norm(Wrapped):
    def made(self):
        return nn.LayerNorm(WIDTH)


class Lookup(Wrapped):
    def made(self):
        return nn.Embedding(7, WIDTH)

    def run(self, x):
        return self.layer((x.detach().sum(1) * 2).round().long().clamp(-3, 3) + 3)


class Conv(Wrapped):
    def made(self):
        return nn.Conv1d(1, 1, 3, padding=1)

    def run(self, x):
        return self.layer(x.unsqueeze(1)).squeeze(1)


class Recurrent(Wrapped):
    def made(self):
        return nn.GRU(2, 2, batch_first=True)

    def run(self, x):
        return self.layer(x.unflatten(1, (2, 2)))[0].flatten(1)


class Attention(Wrapped):
    def made(self):
        return nn.MultiheadAttention(2, 1, batch_first=True)

    def run(self, x):
        steps = x.unflatten(1, (2, 2))
        return self.layer(steps, steps, steps, need_weights=False)[0].flatten(1)


class EvalNorm(nn.BatchNorm1d):
    """Batch norm that stays in eval mode; in train mode it mixes rows."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.running_mean.normal_()
        super().train(False)

    def train(self, mode: bool = True):
        return super().train(False)


class OldWeightNorm(Wrapped):
    def made(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.utils.weight_norm(linear())


class NewWeightNorm(Wrapped):
    def made(self):
        return parametrizations.weight_norm(linear())


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Parametrized(Wrapped):
    def made(self):
        layer = linear()
        parametrize.register_parametrization(layer, "weight", Doubled())
        return layer


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x):
        return torch.tanh(self.second(self.first(x)))


class Named(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.second = self.first

    def forward(self, x):
        return torch.tanh(self.second(self.first(x)))


class Box:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


class SlottedBox:
    __slots__ = ("__weakref__", "items")

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Attributes(nn.Module):
    """Plain attributes: numbers, tensors, tensors in lists and in dicts of dicts, one that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.25
        self.plain = torch.randn(WIDTH)
        self.items = [torch.randn(WIDTH), torch.randn(WIDTH)]
        self.table = {"outer": {"inner": torch.randn(WIDTH), "number": 0.5}}
        self.learns = torch.randn(WIDTH, requires_grad=True)

    def forward(self, x):
        inner = self.table["outer"]
        shift = self.items[0] * self.items[1] + inner["inner"] * inner["number"]
        return torch.tanh(x * self.factor * self.learns + self.plain + shift)

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that learn nothing, for writes in place."""
        return [self.plain, *self.items, self.table["outer"]["inner"]]

    def replace(self, random: Random) -> None:
        """Replace one attribute, item, or value of the nested dict."""
        place = random.randrange(5)
        if place == 0:
            self.factor = random.choice([0.5, 0.75, 1.5])
        elif place == 1:
            self.plain = torch.randn(WIDTH)
        elif place == 2:
            self.items[random.randrange(2)] = torch.randn(WIDTH)
        elif place == 3:
            self.table["outer"]["inner"] = torch.randn(WIDTH)
        else:
            self.table["outer"] = {"inner": torch.randn(WIDTH), "number": 0.25}


class Boxed(nn.Module):
    """Tensors in plain objects, in slots, and in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Box([torch.randn(WIDTH)])
        self.slot = SlottedBox([torch.randn(WIDTH)])
        self.space = types.SimpleNamespace(factor=torch.randn(WIDTH), number=0.5)

    def forward(self, x):
        shift = self.box.items[0] + self.slot.items[0]
        return torch.tanh(x * self.space.factor * self.space.number + shift)

    def replace(self, random: Random) -> None:
        """Replace one tensor, or one object."""
        new = torch.randn(WIDTH)
        place = random.randrange(4)
        if place == 0:
            self.box.items = [new]
        elif place == 1:
            self.slot.items[0] = new
        elif place == 2:
            self.space.factor, self.space.number = new, 1
        else:
            self.slot = SlottedBox([new])

    def held(self) -> list[torch.Tensor]:
        """Return the tensors, for writes in place."""
        return [self.box.items[0], self.slot.items[0], self.space.factor]


class Enclosed(nn.Module):
    """Tensors in a closure and in a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.enclose(torch.randn(WIDTH))
        self.scaled = functools.partial(torch.mul, torch.randn(WIDTH))

    def enclose(self, shift: torch.Tensor) -> None:
        """Keep a tensor in a closure."""

        def put(value):
            nonlocal shift
            shift = value

        self.read, self.put = lambda: shift, put

    def forward(self, x):
        return torch.tanh(self.scaled(x) + self.read())

    def replace(self, random: Random) -> None:
        """Replace the content of the closure, or the partial."""
        if random.random() < 0.5:
            self.put(torch.randn(WIDTH))
        else:
            self.scaled = functools.partial(torch.mul, torch.randn(WIDTH))

    def held(self) -> list[torch.Tensor]:
        """Return the tensors, for writes in place."""
        return [self.read(), self.scaled.args[0]]


KEEPERS = Attributes | Boxed | Enclosed
"""The blocks that keep tensors in places of Python."""


class Buffers(nn.Module):
    """A buffer that requires grad, one that is not persistent, a plain one, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("learns", torch.randn(WIDTH, requires_grad=True))
        self.register_buffer("passing", torch.randn(WIDTH), persistent=False)
        self.register_buffer("plain", torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x * self.learns + self.passing * self.frozen + self.plain)


class Mode(nn.Module):
    """Another number in train mode."""

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
    """A buffer that forward writes in place, and reads in the same call. Its rows are the rows of the call."""

    scratch = ("room",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(40, WIDTH))

    def forward(self, x):
        self.room[: len(x)].copy_(x.detach())
        return torch.tanh(x + self.room[: len(x)])


class Counter(nn.Module):
    """A buffer that counts calls, as `num_batches_tracked` does. Nothing reads it."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.seen.add_(1)
        return torch.tanh(x)


class ZeroGrad(nn.Module):
    """Forward calls `zero_grad`. In lanes this has no effect, so the oracle leaves it out."""

    def __init__(self, *, is_oracle: bool) -> None:
        super().__init__()
        self.layer = linear()
        self.is_oracle = is_oracle

    def forward(self, x):
        if not self.is_oracle:
            self.zero_grad()
        return torch.tanh(self.layer(x))


class Equal(nn.Module):
    """Instances are equal, and have other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def __eq__(self, other: object) -> bool:
        return type(other) is Equal

    def __hash__(self) -> int:
        return 1

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Twins(nn.Module):
    """Two modules that are equal and not identical."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Equal(), Equal()

    def forward(self, x):
        return self.second(self.first(x))


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "norm": Norm,
    "lookup": Lookup,
    "conv": Conv,
    "recurrent": Recurrent,
    "attention": Attention,
    "eval_norm": EvalNorm,
    "old_weight_norm": OldWeightNorm,
    "new_weight_norm": NewWeightNorm,
    "parametrized": Parametrized,
    "tied": Tied,
    "named": Named,
    "attributes": Attributes,
    "boxed": Boxed,
    "enclosed": Enclosed,
    "buffers": Buffers,
    "mode": Mode,
    "scratch": Scratch,
    "written_buffer": WrittenBuffer,
    "twins": Twins,
}
SPECIAL_LEAVES = ("counter", "zero_grad")
# The names that appear twice find the most faults.
LEAF_NAMES = (*LEAVES, *SPECIAL_LEAVES, "scratch", "scratch", "scratch", "mode", "attributes", "boxed", "buffers", "twins")


class Holder(nn.Module):
    """A module that keeps its parts somewhere, and applies them in order."""

    least, most = 1, 3

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.hold(list(parts))

    def hold(self, parts: list[nn.Module]) -> None:
        self.items = parts

    def parts(self) -> Iterable[nn.Module]:
        return self.items

    def swap(self, index: int, part: nn.Module) -> None:
        """Replace one part."""
        parts = list(self.parts())
        parts[index % len(parts)] = part
        self.hold(parts)

    def grow(self, part: nn.Module) -> None:
        """Add a part, if the holder takes more than one."""
        if self.most > 1:
            self.hold([*self.parts(), part])

    def forward(self, x):
        for part in self.parts():
            x = x + part(x)
        return x


class InSequential(Holder):
    def hold(self, parts):
        self.items = nn.Sequential(*parts)


class InModuleDict(Holder):
    def hold(self, parts):
        self.items = nn.ModuleDict({f"part{index}": part for index, part in enumerate(parts)})

    def parts(self):
        return self.items.values()


class InList(Holder):
    def grow(self, part):
        self.items.append(part)

    def swap(self, index, part):
        self.items[index % len(self.items)] = part


class InTuple(Holder):
    def hold(self, parts):
        self.items = (tuple(parts), "more")

    def parts(self):
        return self.items[0]


class InDict(Holder):
    def grow(self, part):
        self.items["new"] = part

    def hold(self, parts):
        self.items = dict(enumerate(parts))

    def parts(self):
        return self.items.values()

    def swap(self, index, part):
        self.items[index % len(self.items)] = part


class InDicts(Holder):
    def hold(self, parts):
        self.items = {index: {"part": part} for index, part in enumerate(parts)}

    def parts(self):
        return [inner["part"] for inner in self.items.values()]

    def swap(self, index, part):
        self.items[index % len(self.items)]["part"] = part


class InDeque(Holder):
    def grow(self, part):
        self.items.append(part)

    def hold(self, parts):
        self.items = deque(parts, maxlen=9)


class InSet(Holder):
    def hold(self, parts):
        for rank, part in enumerate(parts):
            part.rank = rank
        self.items = set(parts)

    def parts(self):
        return sorted(self.items, key=lambda part: part.rank)


class InObject(Holder):
    make: Callable[[list[nn.Module]], Any] = Box

    def hold(self, parts):
        self.box = type(self).make(parts)

    def parts(self):
        return self.box.items

    def swap(self, index, part):
        if index:
            self.box.items[index % len(self.box.items)] = part
        else:
            self.box.items = [part, *self.box.items[1:]]

    def grow(self, part):
        self.box.items.append(part)


class InSlots(InObject):
    make = SlottedBox


def _namespace(items: list[nn.Module]) -> types.SimpleNamespace:
    return types.SimpleNamespace(items=items)


class InNamespace(InObject):
    make = staticmethod(_namespace)


class InClosure(Holder):
    most = 1

    def hold(self, parts):
        (part,) = parts
        self.step = lambda x: part(x)
        self.read = lambda: part

    def parts(self):
        return [self.read()]

    def forward(self, x):
        return x + self.step(x)


class InDefault(InClosure):
    def hold(self, parts):
        self.step = lambda x, part=parts[0]: part(x)
        self.read = lambda part=parts[0]: part


class InPartial(Holder):
    most = 1
    scratch = ("h",)

    def hold(self, parts):
        self.step = functools.partial(self._run, parts[0])

    def _run(self, part, x):
        self.h = part(x)
        return self.h

    def parts(self):
        return [self.step.args[0]]

    def forward(self, x):
        return x + self.step(x) + self.h


class InMethod(Holder):
    """A bound method of the part, and one of the holder, kept as attributes."""

    most = 1
    scratch = ("h",)

    def hold(self, parts):
        self.step = parts[0].forward
        self.note = self._note

    def _note(self, x):
        self.h = x
        return x

    def parts(self):
        return [self.step.__self__]

    def forward(self, x):
        return x + self.note(self.step(x)) + self.h


class ByWeakReference(Holder):
    most = 1

    def hold(self, parts):
        self.part = parts[0]
        self.reference = weakref.ref(parts[0])

    def parts(self):
        return [self.reference()]


class Reader(nn.Module):
    """Reads the state of its parent, which it knows by a weak reference or by a list."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent = parent

    def forward(self, x):
        parent = self.parent[0] if isinstance(self.parent, list) else self.parent()
        return x * parent.factor + parent.h


class ChildOfWeakParent(Holder):
    most = 1
    scratch = ("h",)

    def hold(self, parts):
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.h = None
        self.part = parts[0]
        self.reader = Reader(self.reference())

    def reference(self):
        return weakref.ref(self)

    def parts(self):
        return [self.part]

    def forward(self, x):
        self.h = self.part(x)
        return torch.tanh(self.reader(x))


class ChildOfListedParent(ChildOfWeakParent):
    def reference(self):
        return [self]


class InCheckpoint(Holder):
    use_reentrant = False

    def hold(self, parts):
        self.items = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.items:
            must_be_plain = self.use_reentrant and not (x.requires_grad and torch.is_grad_enabled())
            x = x + (part(x) if must_be_plain else checkpoint(part, x, use_reentrant=self.use_reentrant))
        return x


class InReentrantCheckpoint(InCheckpoint):
    use_reentrant = True


class Keeper:
    """An object that keeps the output that its hook gets."""

    def __init__(self) -> None:
        self.last = None

    def keep(self, module, args, output):
        self.last = output


class ReadsHook(Holder):
    """Reads what a hook on the part has left in this module."""

    most = 1
    scratch = ("h",)

    def hold(self, parts):
        self.part, self.h = parts[0], None
        self.part.register_forward_hook(self.note)

    def parts(self):
        return [self.part]

    def note(self, module, args, output):
        self.h = output

    def forward(self, x):
        return x + self.part(x) + self.h


class ReadsKeeper(ReadsHook):
    scratch = ("keeper",)

    def hold(self, parts):
        self.part, self.keeper = parts[0], Keeper()
        self.part.register_forward_hook(self.keeper.keep)

    def forward(self, x):
        return x + self.part(x) + self.keeper.last


class ReadsDict(ReadsHook):
    scratch = ("seen",)

    def hold(self, parts):
        self.part, self.seen = parts[0], {}
        seen = self.seen

        def note(module, args, output):
            seen["output"] = output

        self.part.register_forward_hook(note)

    def forward(self, x):
        return x + self.part(x) + self.seen["output"]


class ChangedByHooks(ReadsHook):
    """Hooks before and after the part that change its input and its output."""

    scratch = ()

    def hold(self, parts):
        self.part = parts[0]
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.part.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.part.register_forward_pre_hook(self.shifted, with_kwargs=True)
        self.part.register_forward_hook(lambda module, args, kwargs, output: output * 0.75, with_kwargs=True)

    def shifted(self, module, args, kwargs):
        return (args[0] + self.shift,), kwargs

    def forward(self, x):
        return x + self.part(x)


HOLDERS: dict[str, type[Holder]] = {
    "in_sequential": InSequential,
    "in_module_dict": InModuleDict,
    "in_list": InList,
    "in_tuple": InTuple,
    "in_dict": InDict,
    "in_dicts": InDicts,
    "in_deque": InDeque,
    "in_set": InSet,
    "in_object": InObject,
    "in_slots": InSlots,
    "in_namespace": InNamespace,
    "in_closure": InClosure,
    "in_default": InDefault,
    "in_partial": InPartial,
    "in_method": InMethod,
    "by_weak_reference": ByWeakReference,
    "child_of_weak_parent": ChildOfWeakParent,
    "child_of_listed_parent": ChildOfListedParent,
    "in_checkpoint": InCheckpoint,
    "in_reentrant_checkpoint": InReentrantCheckpoint,
    "reads_hook": ReadsHook,
    "reads_keeper": ReadsKeeper,
    "reads_dict": ReadsDict,
    "changed_by_hooks": ChangedByHooks,
}


def drawn_block(random: Random, depth: int) -> Spec:
    """Draw the spec of one block."""
    if depth == 0 or random.random() < 0.3:
        return (random.choice(LEAF_NAMES),)
    name = random.choice(list(HOLDERS))
    count = random.randint(HOLDERS[name].least, HOLDERS[name].most)
    return (name, *(drawn_block(random, depth - 1) for _ in range(count)))


def drawn_body(random: Random) -> Spec:
    """Draw the spec of a sequence of blocks."""
    return ("in_sequential", *(drawn_block(random, 2) for _ in range(random.randint(1, 3))))


class RowWise(nn.Module):
    """A whole model: it sums the rows of its inputs, applies a block, and makes the outputs that its spec names."""

    def __init__(self, body: nn.Module, outputs: Spec, table: int) -> None:
        super().__init__()
        self.body = body
        self.outputs = outputs
        self.shift = 0.5
        self.given = nn.Parameter(torch.randn(table))
        self.register_buffer("kept", torch.randn(table))

    def forward(self, x, scale=None, flags=None):
        hidden = self.body(summed(x))
        if flags == "fail":
            msg = "the model fails"
            raise KeyError(msg)
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
    "cube": lambda model, hidden: hidden.unsqueeze(2) * hidden.unsqueeze(1),
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
    """Draw the spec of an output."""
    if depth == 0 or random.random() < 0.4:
        return (random.choice(("rows", "rows", "half", "vector", *LEAF_OUTPUTS)),)
    return (random.choice(list(OUTPUT_TREES)), *(drawn_output(random, depth - 1) for _ in range(random.randint(1, 3))))


def summed(x: Any) -> torch.Tensor:
    """Return the sum of all tensors in nested values, with shape (rows, WIDTH)."""
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, list) and all(isinstance(item, torch.Tensor) and item.ndim == 1 for item in x):
        return torch.stack(x)
    parts = [summed(part) for part in (x.values() if isinstance(x, dict) else x) if not isinstance(part, int | None | str)]
    wide = [part.double() if part.ndim == 2 else part.double().unsqueeze(1) for part in parts]
    return functools.reduce(torch.add, wide)


class Built:
    """A model, its blocks in the order of their making, and the hooks that changes registered."""

    def __init__(self, *, is_oracle: bool) -> None:
        self.is_oracle = is_oracle
        self.blocks: list[nn.Module] = []
        self.handles: list[Any] = []
        self.model: RowWise

    def block(self, spec: Spec, *, is_recomputed: bool = False) -> nn.Module:
        """Make a block."""
        name, *parts = spec
        if name == "counter":
            made: nn.Module = Counter(counts=not is_recomputed)
        elif name == "zero_grad":
            made = ZeroGrad(is_oracle=self.is_oracle or is_recomputed)
        elif name in LEAVES:
            made = LEAVES[name]()
        else:
            recomputes = is_recomputed or "checkpoint" in name
            made = HOLDERS[name]([self.block(part, is_recomputed=recomputes) for part in parts])
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
            held = module.held() if isinstance(module, KEEPERS) else []
            yield from ((f"{type(module).__name__}[{index}].held()[{which}]", tensor) for which, tensor in enumerate(held))
            for own in (module._parameters, module._buffers, vars(module)):
                for name, value in own.items():
                    is_computed = own is vars(module) and name == "weight"  # by the old weight norm, at each call
                    if isinstance(value, torch.Tensor) and not is_computed and name not in getattr(module, "scratch", ()):
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


def build(spec: Spec, outputs: Spec, table: int, seed: int, device: torch.device, *, is_oracle: bool) -> Built:
    """Make a model. The same arguments make the same weights."""
    torch.manual_seed(seed)
    built = Built(is_oracle=is_oracle)
    with float64_on(device):
        built.model = RowWise(built.block(spec), outputs, table)
    return built
