"""Targets that own, borrow, and hand over: the source of `forward`, the arguments, and the model.

A case names lines of source. `source_of` writes the target, so that parawrap reads the code that a
user would have written: it looks for names such as ``backward`` and ``data`` there.
Rows stay independent. Whether a step is done depends on the width of the batch, never on its
values or its rows: a lane sees other rows than the plain call.
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from parawrap import register_split
from tests.fuzz.models import WIDTH, float64_on

WIDE = WIDTH + 2
"""The width of batches for which steps that are not always done are done."""


class Named(dict):
    """A subclass of dict."""


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    z: torch.Tensor
    y: Any = None
    inner: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    y: Any = None
    more: Any = None


class Box:
    """An object that parawrap cuts and joins by the functions registered below."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        tensors = [each for each in vars(self).values() if isinstance(each, torch.Tensor)]
        return len(tensors[0]) if tensors else 0

    def to(self, device: torch.device) -> Box:
        moved = Box(**vars(self))
        for name, each in vars(self).items():
            setattr(moved, name, each.to(device) if isinstance(each, torch.Tensor) else each)
        return moved


def _split_box(box: Box, sizes: Sequence[int]) -> list[Box]:
    parts = [Box() for _ in sizes]
    for name, value in vars(box).items():
        is_tensor = isinstance(value, torch.Tensor)
        column = value.split(list(sizes)) if is_tensor else [value] * len(sizes)
        for part, each in zip(parts, column, strict=True):
            setattr(part, name, each)
    return parts


def _join_boxes(parts: Sequence[Box]) -> Box:
    joined = Box(**vars(parts[0]))
    for name, value in vars(parts[0]).items():
        if isinstance(value, torch.Tensor):
            setattr(joined, name, torch.cat([getattr(part, name) for part in parts]))
    return joined


register_split(Box, split=_split_box, join=_join_boxes)


# Objects of the process, which a model holds and deepcopy does not copy


class Registry:
    """Deepcopy returns the registry itself. Nothing reads its tensor."""

    def __init__(self) -> None:
        self.number, self.names, self.tensor = 0.5, {"a": [1, 2]}, torch.ones(3)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Cached(Registry):
    """Deepcopy returns another object, always the same one."""

    def __deepcopy__(self, memo: Any) -> Any:
        return COPY


class Flyweight(Registry):
    """Deepcopy and pickle find it by its name in this Python module."""

    __deepcopy__ = None  # type: ignore[assignment]  # deepcopy then calls __reduce_ex__

    def __reduce__(self) -> str:
        return "FLYWEIGHT"


COPY, FLYWEIGHT = Cached(), Flyweight()


def _renewed(value: Registry) -> Registry:
    """Return an object of the process as it was at first, so that no case harms the next one."""
    vars(value).clear()
    type(value).__init__(value)
    return value


SHARED: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "typing": lambda: typing.Optional[type("Kind", (), {})],  # noqa: UP045  # new in each case
    "registry": Registry,
    "cached": lambda: _renewed(COPY) and Cached(),
    "flyweight": lambda: _renewed(FLYWEIGHT),
}


class Own(NamedTuple):
    """A container that the model owns: how it is made, emptied, filled, and read by forward."""

    make: Callable[[], Any]
    clear: str
    fill: str
    read: str = "self.found"


OWN = {
    "dict": Own(dict, "self.found.clear()", 'self.found["y"] = y'),
    "list": Own(list, "self.found.clear()", "self.found.append(y)"),
    "nested": Own(lambda: {"in": {}}, 'self.found["in"].clear()', 'self.found["in"]["y"] = [y]'),
    "ordered": Own(OrderedDict, "self.found.clear()", 'self.found["y"] = y'),
    "deque": Own(lambda: deque(maxlen=2), "self.found.clear()", "self.found.extend([y, y * 2])"),
    "dataclass": Own(Result, "self.found.y = None", "self.found.y = y"),
    "registered": Own(Box, "vars(self.found).clear()", "self.found.y = y"),
    "in_object": Own(Result, "self.found.more = {}", 'self.found.more["y"] = y', "self.found.more"),
    "attribute": Own(lambda: None, "self.found = None", "self.found = {'y': y}"),
}


class Model(nn.Module):
    """What forward of every case uses. Each case is a subclass, or a function over an instance."""

    def __init__(self, own: str, shared: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.given = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("seen", torch.zeros(()))  # written in place
        self.register_buffer("tick", torch.zeros(()))  # assigned
        self.register_buffer("room", torch.zeros(40, WIDTH))  # written in place, with rows
        self.factor, self.shifts = 1.25, {"shift": torch.randn(WIDTH)}
        self.last: Any = None
        self.found = OWN[own].make()
        self.shared = SHARED[shared]()


# Arguments, and what forward does to them. {} stands for a value.


class Form(NamedTuple):
    """A class of argument: how to make it and to read two tensors, and what may be done to it."""

    make: Callable[..., Any]
    x: str
    z: str
    adds: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    inner: str = "batch"


_DICT = ('batch["x"]', 'batch["z"]')
_DICT_ADDS = (
    'batch["y"] = {}',
    'batch["x"] = {}',
    "batch.update(new={})",
    'batch.setdefault("set", {})',
)
_DICT_CHANGES = ('batch.pop("z", None)', 'batch["twin"] = z')

FORMS = {
    "tensor": Form(lambda x, z: x, "batch", "batch[:, :1] * 2"),
    "dict": Form(lambda x, z: {"x": x, "z": z}, *_DICT, _DICT_ADDS, _DICT_CHANGES),
    "ordered": Form(lambda x, z: OrderedDict(x=x, z=z), *_DICT, _DICT_ADDS, _DICT_CHANGES),
    "subclass": Form(lambda x, z: Named(x=x, z=z), *_DICT, _DICT_ADDS, _DICT_CHANGES),
    "twice": Form(lambda x, z: {"x": x, "z": x}, *_DICT, _DICT_ADDS, _DICT_CHANGES),
    "list": Form(
        lambda x, z: [x, z],
        "batch[0]",
        "batch[1]",
        ("batch.append({})", "batch.insert(0, {})", "batch[1] = {}", "batch.extend([{}, z])"),
        ("batch.pop()", "del batch[0]", "batch.append(x)"),
    ),
    "deque": Form(
        lambda x, z: deque([x, z], maxlen=3),
        "batch[0]",
        "batch[1]",
        ("batch.append({})", "batch.appendleft({})", "batch[0] = {}"),
        ("batch.popleft()", "batch.append(x)"),
    ),
    "nested": Form(
        lambda x, z: {"in": {"x": x}, "items": [z, {"w": z}]},
        'batch["in"]["x"]',
        'batch["items"][0]',
        (
            'batch["in"]["y"] = {}',
            'batch["items"].append({})',
            'batch["in"] = {{"x": {}}}',
            'batch["new"] = {{"deep": [{}]}}',
        ),
        ('batch["in"].clear()', 'batch["again"] = batch["in"]', 'del batch["items"][0]'),
        'batch["in"]',
    ),
    "nested_list": Form(
        lambda x, z: [x, [z, {}]],
        "batch[0]",
        "batch[1][0]",
        ("batch[1].append({})", 'batch[1][1]["y"] = {}', "batch[0] = {}", "batch.append([{}])"),
        ("batch[1][1].clear()", "batch.append(batch[1])"),
        "batch[1]",
    ),
    "dataclass": Form(
        Batch,
        "batch.x",
        "batch.z",
        ("batch.y = {}", "batch.x = {}", 'batch.inner["y"] = {}', "batch.extra = {}"),
        ("batch.z = None", "batch.y = z"),
        "batch.inner",
    ),
    "registered": Form(
        lambda x, z: Box(x=x, z=z),
        "batch.x",
        "batch.z",
        ("batch.y = {}", "batch.x = {}"),
        ("del batch.z", "batch.twin = z"),
    ),
}

AUX = {
    "missing": Form(lambda batch, whole: None, "", ""),
    "list": Form(lambda batch, whole: [], "", "", ("aux.append({})", "aux.insert(0, {})")),
    "dict": Form(lambda batch, whole: {}, "", "", ('aux["y"] = {}', 'aux["more"] = {{"a": [{}]}}')),
    "whole": Form(lambda batch, whole: whole, "", "", (), ("aux.add_(1)",)),
    "zero_dim": Form(lambda batch, whole: whole[0].clone(), "", "", (), ("aux.mul_(2)",)),
    "same": Form(lambda batch, whole: batch, "", ""),
}

WRITES_TENSORS = ("z.add_(1)", "z.mul_(2)", "z[:, :2] = 0", "z.copy_(y)", EARLY := "x.mul_(2)")
"""Writes in place. All but one come after the layer, whose backward pass needs x as it was."""

WRITES_WHOLE = ("aux.add_(1)", "aux.mul_(2)")

VALUES = {
    "rows": "y",
    "half": "y[:, :2]",
    "vector": "y.sum(1)",
    "input": "x",
    "text": '"ready"',
    "none": "None",
    "pair": '(y, {"twice": y * 2})',
    "parameter": "self.given",
    "buffer": "self.kept",
    "own": "<own>",
    "result": "Result(y)",
    "loss": "y.mean()",
    "number": "float(y.detach().mean().nan_to_num())",
    "made_text": 'f"{len(x)} rows"',
}
VALUES_OF_ROWS = ("rows", "half", "vector", "input")

OUTPUTS = {
    **VALUES,
    "batch": "batch",
    "aux": "aux",
    "inner": "<inner>",
    "holding": '{"own": <own>, "list": [<own>, y]}',
    "box": "Box(y=y)",
    "buffer_view": "self.kept[:2]",
    "table": "self.given * 2",
    "seen": "self.seen",
}

# What forward does besides, by the name of the step.
STEPS = {
    "fill": "<fill>",
    "last": "self.last = y",
    "seen": "self.seen.add_(1)",
    "tick": "self.tick = self.tick + 1",
    "room": """
        self.room[: len(x)] = y.detach()
        y = y + self.room[: len(x)].sum(1, keepdim=True)
    """,
    "moment": """
        self.given.data.mul_(2)
        y = y + self.given.detach().sum()
        self.given.data.div_(2)
    """,
    "for_good": "self.given.data.mul_(1.5)",
    "for_good_in_place": """
        with torch.no_grad():
            self.given.mul_(1.5)
    """,
    "input_grad": """
        with torch.enable_grad():
            leaf = x[:, :4].detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layer(leaf).square().sum(), leaf)
        y = y + slope
    """,
    "weight_grad": """
        norms = []
        with torch.enable_grad():
            for row in x[:, :4].detach():
                self.zero_grad()
                self.layer(row).square().sum().backward()
                norms.append(self.layer.weight.grad.norm())
        self.zero_grad()
        y = y + torch.stack(norms).unsqueeze(1)
    """,
}


class Step(NamedTuple):
    """A line of forward, or the name of a step, and the value that it adds."""

    line: str
    value: str = ""
    only_wide: bool = False

    @property
    def adds_to_list(self) -> bool:
        words = ("append", "insert", "extend", "[{}]", "[0] = ", "[1] = ")
        return any(word in self.line for word in words)


def source_of(case: Any) -> str:
    """Return the source of a case's target."""
    early = [step for step in case.steps if step.line == EARLY]
    late = [step for step in case.steps if step.line != EARLY]
    own, form = OWN[case.own], FORMS[case.form]
    outputs = ", ".join(_expression(case, name) for name in case.outputs)
    lines = [
        f"x, z = {form.x}, {form.z}",
        own.clear,
        *(_source_of_step(case, step) for step in early),
        "y = torch.tanh(self.layer(x[:, :4]) + z.sum(1, keepdim=True))",
        'y = y * self.factor + self.shifts["shift"]',
        "y = y + aux" if case.aux in ("whole", "zero_dim") else "",
        "y = y * self.shared.number" if case.shared not in ("none", "typing") else "",
        *(_source_of_step(case, step) for step in late),
        f"return {outputs}" if len(case.outputs) == 1 else f"return ({outputs})",
    ]
    body = textwrap.indent("\n".join(filter(None, lines)), "        ")
    if case.target == "function":
        return f"def step_of(self):\n    def step(batch, aux=None):\n{body}\n    return step\n"
    name = "forward" if case.target == "module" else "step"
    return f"class Target(Model):\n    def {name}(self, batch, aux=None):\n{body}\n"


def _source_of_step(case: Any, step: Step) -> str:
    text = textwrap.dedent(STEPS.get(step.line, step.line)).strip()
    if step.value:
        text = text.format(_expression(case, step.value))
    text = text.replace("<fill>", OWN[case.own].fill)
    guard = f"if x.shape[1] > {WIDTH}:\n"
    return guard + textwrap.indent(text, "    ") if step.only_wide else text


def _expression(case: Any, name: str) -> str:
    text = OUTPUTS[name].replace("<own>", OWN[case.own].read)
    return text.replace("<inner>", FORMS[case.form].inner)


class Target:
    """The model of a case and what is called. The same case makes the same weights."""

    def __init__(self, case: Any, home: torch.device) -> None:
        torch.manual_seed(case.seed)
        space: dict[str, Any] = {"__name__": "tests.fuzz.a_case", "torch": torch}
        space |= {"Model": Model, "Result": Result, "Box": Box}
        exec(source_of(case), space)  # the source that this file writes
        with float64_on(home):
            self.model: Any = space.get("Target", Model)(case.own, case.shared)
        self.model.train(case.training)
        made = {"module": lambda: self.model, "method": lambda: self.model.step}
        made["function"] = lambda: space["step_of"](self.model)
        self.called: Any = made[case.target]()
        self.forward: Any = None  # before it was wrapped


class Arguments:
    """The arguments of one call, and what they were before it."""

    def __init__(self, case: Any, rows: int, seed: int, *, wide: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (rows, WIDE if wide else WIDTH), (rows, WIDTH), (WIDTH,)
        drawn = [
            torch.randn(size, generator=generator, dtype=torch.float64).to(case.home)
            for size in sizes  # on the CPU first: devices draw other numbers
        ]
        self.leaves = [each.requires_grad_(case.input_grad) for each in drawn[:2]]
        x, z = [leaf.clone() for leaf in self.leaves]  # torch forbids writes to leaves
        self.batch = FORMS[case.form].make(x, z)
        self.aux = AUX[case.aux].make(self.batch, drawn[2])
        self.args = (self.batch,) if case.aux == "missing" else (self.batch, self.aux)
        self.tensors = [x, z, self.aux] if isinstance(self.aux, torch.Tensor) else [x, z]
