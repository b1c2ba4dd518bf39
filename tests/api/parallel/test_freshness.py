"""Replicas follow every change of the model.

What forward writes is put back with one warning, kept, or refused.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from tests.fuzz.models import SlottedBox
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.calling import Stateful
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.filterwarnings(
    "ignore:a model in eval mode is called with gradients:UserWarning"
)
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Net(nn.Module):
    """Has one of each thing that tests change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(1.0)
        self.tail = nn.Sequential(nn.Tanh(), nn.Softplus())
        self.register_buffer("shift", torch.arange(4.0))
        self.table, self.other, self.bonus = torch.ones(4), torch.ones(4), 1.0
        self.options, self.space, exponent = {"factor": 1.0}, SimpleNamespace(offset=0.0), 1.0
        self.power = lambda x: x**exponent
        self.heads, self.tail.off = (
            nn.ModuleDict({"old": nn.Identity(), "new": nn.Softsign()}),
            True,
        )

    def forward(self, x):
        y = self.dropout(self.linear(x)) * self.options.get("factor", 5.0) + self.shift
        y = self.heads["old"](y) + hasattr(self.tail, "on")
        return (
            self.power(self.tail(y) * self.table * self.other)
            + self.space.offset
            + getattr(self, "bonus", 0)
        )


CHANGES = {
    "new weight": lambda model: setattr(model.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "edited weight": lambda model: torch.no_grad()(model.linear.weight.mul_)(3),
    "load": lambda model: model.load_state_dict(Net().state_dict(), assign=True),
    "edited buffer": lambda model: model.shift.add_(1),
    "equal buffer, then edited": lambda model: (
        setattr(model, "shift", model.shift.clone()),
        model(torch.ones(7, 4)),
        model.shift.add_(1),
    ),
    "resized buffer": lambda model: setattr(model, "shift", torch.ones(1)),
    "item of a dict": lambda model: model.options.update(factor=3.0),
    "key of a dict": lambda model: model.options.update(other=model.options.pop("factor")),
    "names of submodules": lambda model: model.heads.update(
        {"new": model.heads.pop("old"), "old": model.heads.pop("new")}
    ),
    "name of an attribute": lambda model: (
        setattr(model.tail, "on", True),
        delattr(model.tail, "off"),
    ),
    "attribute of an object": lambda model: setattr(model.space, "offset", 3.0),
    "variable of a function": lambda model: setattr(
        model.power.__closure__[0], "cell_contents", 2.0
    ),
    "order": lambda model: model.tail._modules.update({"0": model.tail._modules.pop("0")}),
    "class": lambda model: setattr(model.tail[0], "__class__", nn.Sigmoid),
    "two tensors that become one": lambda model: vars(model).update(
        dict.fromkeys(("table", "other"), torch.ones(4) * 3)
    ),
    "deleted attribute": lambda model: delattr(model, "bonus"),
    "edited tensor": lambda model: model.table.mul_(3),
    "submodule": lambda model: setattr(model, "linear", nn.Linear(4, 4, bias=False)),
    "patch": lambda model: setattr(
        model.linear, "forward", lambda x: x * model.linear.weight.sum()
    ),
    "hook": lambda model: model.linear.register_forward_hook(lambda module, args, out: out + 100),
    "parametrization": lambda model: nn.utils.parametrize.register_parametrization(
        model.linear, "weight", nn.Tanh()
    ),
    "float64": lambda model: model.double(),
    "mode": lambda model: model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_lane_follows_a_change(change):
    """Calls, gradients, `submit`, and `map` are those of the changed model."""
    model, x = Net().eval(), torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        p.submit(x).result(PATIENCE_S)
        CHANGES[change](model)
        x = x.double() if change == "float64" else x
        inside = model(x)
        if inside.requires_grad:
            inside.sum().backward()
        whole = [p.submit(x).result(PATIENCE_S), *p.map([x] * 3)]
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    plain = model(x)
    if plain.requires_grad:
        plain.sum().backward()
    assert_close([inside, *whole], [plain] * 5)
    assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def test_replicas_are_made_once():
    """Lanes on the model's device copy no parameter."""
    model, x = Net().eval(), torch.randn(7, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, THREE) as p:
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
        assert (p.stats().refreshes, p.stats().copied_bytes) == (0, 0)


def test_refresh_copies_again():
    """`refresh` copies the model again after changes that cannot be seen."""
    model, x = nn.BatchNorm1d(4).eval(), torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        model.running_mean.data.add_(1)
        p.refresh()
        assert_close(
            model(x),
            nn.functional.batch_norm(
                x, model.running_mean, model.running_var, model.weight, model.bias
            ),
        )


WAYS = {
    "call": lambda p, x: [p(x) for _ in range(3)],
    "map": lambda p, x: list(p.map([x] * 6)),
    "submit": lambda p, x: [p.submit(x).result(PATIENCE_S) for _ in range(4)],
}


class Writes(nn.Linear):
    """Changes its own state in each forward, in the way that `write` does.

    Each forward must find the first state.
    """

    def __init__(self, write):
        super().__init__(3, 3)
        self.write, self.table, self.slotted = write, {"a": 1}, SlottedBox("first")
        self.steps, self.recent, self.kinds, self.space = (
            ["first", "word"],
            deque([1, 2]),
            {"a"},
            SimpleNamespace(count=0),
        )
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", torch.ones(2))
        self.layer = layer = nn.ReLU()

        def put(value):
            nonlocal layer
            layer = value

        self.put, self.read = put, lambda: layer

    def forward(self, x):
        assert self.state() == FIRST_STATE
        self.write(self)
        return x + 1

    def state(self):
        held = (
            hasattr(self, "new"),
            self.out_features,
            self.table,
            getattr(self.slotted, "items", None),
            self.space.count,
        )
        more = self.in_features, self.steps, [*self.recent], self.kinds, self.read() is self.layer
        return *held, *more, self.mean.item(), self.scale.tolist()


FIRST_STATE = (False, 3, {"a": 1}, "first", 0, 3, ["first", "word"], [1, 2], {"a"}, True, 0, [1, 1])
WRITES = {
    "new": lambda self: setattr(self, "new", 1),
    "out_features": lambda self: delattr(self, "out_features"),
    "table['c']": lambda self: self.table.update(c=3),
    "'table'": lambda self: setattr(self, "table", {}),
    "slotted": lambda self: delattr(self.slotted, "items"),
    "steps": lambda self: self.steps.__setitem__(1, "other"),
    "recent": lambda self: self.recent.append(3),
    "kinds": lambda self: self.kinds.add("b"),
    "space": lambda self: setattr(self.space, "count", 1),
    "mean": lambda self: self.mean.add_(1),
    "scale": lambda self: setattr(self, "scale", torch.zeros(2)),
    "captures 'layer'": lambda self: self.put(None),
    "__dict__": lambda self: object.__setattr__(self, "__dict__", vars(self) | {"in_features": 7}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "places", [*([name] for name in WRITES), ["new", "steps", "mean", "scale"]], ids="-".join
)
def test_writes_are_put_back(places, way):
    """In evaluation, each call starts from the model's state, and the model keeps it.

    One warning names all places.
    """
    model, x = (
        Writes(lambda self: [WRITES[place](self) for place in places]).eval(),
        torch.zeros(9, 3),
    )
    before = {name: id(value) for name, value in vars(model).items()}

    def use():
        with torch.no_grad(), parallel(model, TWO) as p:
            assert all(torch.equal(output, x + 1) for output in WAYS[way](p, x))

    (message,) = warnings_of(use)
    assert model.state() == FIRST_STATE
    assert {name: id(value) for name, value in vars(model).items()} == before
    assert message.startswith("the model wrote ")
    assert [place for place in places if place not in message] == []
    assert "these writes do not come back to the model" in message


@torch.no_grad()
def test_a_cut_call_warns_itself():
    """The warning about writes points at the call that wrote, and not at a later one."""
    model = Writes(lambda self: WRITES["new"](self)).eval()
    with parallel(model, TWO), pytest.warns(UserWarning, match="the model wrote 'new'"):
        model(torch.zeros(9, 3))


@torch.no_grad()
def test_variables_bound_again():
    """Calls follow a number and a module of a function's closure that are bound again."""
    layer, factor = nn.Linear(4, 4), 1.0

    def run(x):
        return layer(x) * factor

    x = torch.randn(8, 4)
    with parallel(run, TWO, out_dims=0) as p:
        assert_close(p(x), run(x))
        factor = 5.0
        assert_close([p(x), *p.map([x] * 3)], [run(x)] * 4)
        layer = nn.Linear(4, 2)
        assert_close([p(x), *p.map([x] * 3)], [run(x)] * 4)


@torch.no_grad()
def test_forward_of_the_class(monkeypatch):
    class Model(nn.Linear):
        def forward(self, x):
            return x

    model, x = Model(4, 4), torch.ones(8, 4)
    with parallel(model, TWO, out_dims=0) as p:
        model(x)
        monkeypatch.setattr(Model, "forward", lambda self, x: x * 2)
        assert torch.equal(model(x), x * 2)
        assert torch.equal(model(x[:1]), x[:1] * 2), "a plain call"
        assert all(torch.equal(output, x * 2) for output in p.map([x] * 3))


VIEW_CHANGES = {
    "step": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
    "data": lambda model: model.weight.data.mul_(10),
    "in place": lambda model: (model.weight.mul_(3), model.table.mul_(3)),
}


@torch.no_grad()
@pytest.mark.parametrize("change", VIEW_CHANGES)
def test_views_of_own_tensors(change):
    """An attribute that is a view of a parameter, or of a buffer, stays one in each lane."""
    weight, table, x = nn.Parameter(torch.randn(2, 4)), torch.randn(2, 4), torch.randn(8, 4)
    model = Stateful(lambda self, x: x * self.row + self.part, {"table": table}, weight=weight)
    weight.grad = torch.ones(2, 4)
    model.row, model.part = model.weight.detach()[0], model.table[1]
    with parallel(model, TWO, out_dims=0) as p:
        model(x)
        VIEW_CHANGES[change](model)
        expected = x * model.weight[0] + model.table[1]
        assert_close([model(x), *p.map([x] * 3)], [expected] * 4)


def test_changes_under_a_stream():
    """A stream computes with the attributes of its start, also if one is set before it ends."""
    model, outputs = Stateful(lambda self, x: x + self.add, add=10.0), []
    with torch.no_grad(), parallel(model, TWO) as p:
        for output in p.map([torch.ones(2, 1)] * 40):
            outputs.append(output[0].item())
            model.add = 20.0
        assert outputs == [11.0] * 40
        assert p.submit(torch.ones(2, 1)).result(PATIENCE_S)[0].item() == 21
