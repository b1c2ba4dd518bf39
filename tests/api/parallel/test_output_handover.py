"""Outputs are handed over: no later call writes them, and closing a block ends
nothing of others.
"""

from __future__ import annotations

import copy
import functools
import gc
import typing
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import GatherError, ReplicaError, parallel
from tests.helpers.calling import Stateful
from tests.helpers.same import assert_same

TWO = ["cpu"] * 2
BATCHES = [torch.full((3, 2), float(i)) for i in range(8)]
put_back = pytest.mark.filterwarnings("ignore:the model wrote")


@dataclass
class Found:
    y: typing.Any = None
    more: dict = field(default_factory=dict)


class Holder:
    """An object of a class that parawrap does not know."""

    def __init__(self, table):
        self.table = table


def own_dict(model, x):
    model.found["y"] = x * 2
    return model.found


def own_list(model, x):
    model.items[:] = [x * 2, x]
    return model.items


def own_dataclass(model, x):
    model.data.y, model.data.more["z"] = x * 2, x
    return model.data


def own_inside(model, x):
    model.found["y"] = x * 2
    return (x, {"deep": [model.found]})


def own_buffer(model, x):
    model.table.copy_(x)
    return model.table


def view_of_buffer(model, x):
    model.table.copy_(x)
    return {"rows": model.table[:2], "first": model.table.view(-1)[0]}


def own_array(model, x):
    model.array[:] = x.numpy()
    return {"array": model.array}


def own_object(model, x):
    model.holder.table["y"] = x * 2
    return {"holder": model.holder}


def new_object_around(model, x):
    model.found["y"] = x * 2
    return {"holder": Holder(model.found)}


OUTPUTS = {each.__name__: each for each in (
    own_dict, own_list, own_dataclass, own_inside, own_buffer, view_of_buffer, own_array,
    own_object, new_object_around,
)}  # fmt: skip


def values(output):
    """Return an output with the contents of objects in their places."""
    if isinstance(output, Holder):
        return values(output.table)
    if isinstance(output, dict):
        return {key: values(part) for key, part in output.items()}
    return output


def stateful(run):
    return Stateful(
        run,
        {"table": torch.zeros(3, 2)},
        found={},
        items=[],
        data=Found(),
        array=np.zeros((3, 2)),
        holder=Holder({}),
    )


@put_back
@torch.no_grad()
@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_kept_outputs_of_streams(name, workers):
    """The outputs of `map` and `submit` stay as they are if the caller keeps all until the last
    batch has run, and the block is closed.
    """
    plain = stateful(OUTPUTS[name]).eval()
    expected = [copy.deepcopy(values(plain(x))) for x in BATCHES]
    with parallel(stateful(OUTPUTS[name]).eval(), TWO, workers=workers) as p:
        outputs = [*p.map(BATCHES)]
        futures = [p.submit(x) for x in BATCHES]
        outputs += [future.result() for future in futures]
    assert_same([values(output) for output in outputs], expected * 2)


@put_back
@torch.no_grad()
def test_kept_outputs_of_cut_calls():
    """An output that the caller keeps is not written by later calls, also one that is the same in
    all lanes.
    """

    def forward(model, x):
        model.table.add_(1)
        model.found["y"] = x * 2
        return model.found, model.table

    model = stateful(forward).eval()
    with parallel(model, TWO, out_dims=({"y": 0}, None)):
        outputs = [model(x) for x in (torch.zeros(9, 2), torch.ones(9, 2))]
    assert_same([found["y"] for found, _ in outputs], [torch.zeros(9, 2), torch.full((9, 2), 2.0)])
    assert_same([table for _, table in outputs], [torch.ones(3, 2)] * 2)


@put_back
@torch.no_grad()
def test_items_of_all_lanes():
    """The items of a joined list are copies too, whichever lane has made them."""

    def forward(model, batch):
        if batch["x"].any():
            model.table.add_(1)
            model.found["y"] = 1
        items = [(model.table, model.found, Holder(model.found)) for _ in batch["x"]]
        batch["items"] = [*items]
        return items

    model = Stateful(forward, {"table": torch.zeros(2)}, found={"y": 0}).eval()
    with parallel(model, TWO):
        outputs = []
        for x in (torch.zeros(5, 2), torch.ones(5, 2)):
            outputs += [model(batch := {"x": x}), batch["items"]]
    for items, value in zip(outputs, (0, 0, 1, 1), strict=True):
        found = [(table.tolist(), found, values(holder)) for table, found, holder in items]
        assert found == [([value] * 2, {"y": value}, {"y": value})] * 5


@put_back
@torch.no_grad()
def test_views_in_objects():
    """An object with a view of a buffer stays as it is when a later call writes the buffer."""

    def forward(model, x):
        if x.any():
            model.table.add_(1)
        return Holder(model.table.view(-1))

    with parallel(Stateful(forward, {"table": torch.zeros(2, 2)}).eval(), ["cpu"]) as p:
        outputs = [p.submit(x).result() for x in (torch.zeros(2), torch.ones(2))]
    assert [output.table.tolist() for output in outputs] == [[0] * 4, [1] * 4]


@torch.no_grad()
def test_parts_of_the_model_are_its_own():
    """A parameter is the model's own object, a buffer is copied, and a layer is refused."""
    weight = nn.Parameter(torch.ones(2))
    model = Stateful(
        lambda self, x: (self.weight, self.table, x), {"table": torch.ones(2)}, weight=weight
    )
    with parallel(model.eval(), TWO) as p:
        for found, table, _ in (model(torch.ones(9, 2)), p.submit(torch.ones(9, 2)).result()):
            assert found is weight
            assert_close(table, model.table)
            assert table is not model.table
    layered = Stateful(lambda self, x: (x, self.layer), {}, layer=nn.Linear(2, 2))
    with parallel(layered, TWO) as p, pytest.raises(GatherError, match="a Linear"):
        p.submit(torch.ones(9, 2)).result()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["function", "partial", "method", "object"])
def test_outputs_that_compute_later(kind):
    """Outputs that compute later call a layer of the lane after the block is closed."""

    class Later:
        def __init__(self, layer, x):
            self.layer, self.x = layer, x

        def __call__(self):
            return self.layer(self.x)

    def forward(model, x):
        made = {
            "function": lambda: lambda: model.layer(x),
            "partial": lambda: functools.partial(model.layer, x),
            "method": lambda: Later(model.layer, x).__call__,
            "object": lambda: Later(model.layer, x),
        }
        return made[kind]()

    model = Stateful(forward, {}, layer=nn.Linear(2, 2))
    with parallel(model, TWO) as p:
        outputs = [*p.map(BATCHES)]
    del p
    gc.collect()
    assert_close([output() for output in outputs], [model.layer(x) for x in BATCHES])


# What belongs to the process


class Flyweight:
    """One object per name: a copy is the object itself, or the one of the registry."""

    known: typing.ClassVar[dict] = {}

    def __new__(cls, name):
        if name not in cls.known:
            cls.known[name] = made = super().__new__(cls)
            made.name, made.table = name, {"rows": torch.ones(2)}
        return cls.known[name]

    def __reduce__(self):
        return Flyweight, (f"copy of {self.name.removeprefix('copy of ')}",)


class ReturnsItself(Holder):
    def __deepcopy__(self, memo):
        return self


@torch.no_grad()
def test_objects_of_the_process_stay_whole():
    """Types in the cache of typing, flyweights, and an object whose copy is itself stay as they
    are: no block removes their attributes, and no call writes them.
    """
    itself = ReturnsItself({"rows": torch.ones(2)})
    optional = typing.Optional.__getitem__
    held = {"own": itself, "kind": optional(torch.Tensor), "fly": Flyweight("a")}
    model = Stateful(lambda self, x: x + self.own.table["rows"], {}, **held)
    # Typing keeps the last 128 in a cache
    others = [optional(type(f"T{i}", (), {})) for i in range(200)]
    for _ in range(2):
        with parallel(model.eval(), TWO, out_dims=0) as p:
            assert_close(model(torch.ones(9, 2)), torch.full((9, 2), 2.0))
            itself.table["rows"] = torch.ones(2)
            assert_close([*p.map(BATCHES[:2])], [x + 1 for x in BATCHES[:2]])
    assert optional(torch.Tensor).__args__ == (torch.Tensor, type(None))
    assert len(others) == 200
    assert [each.table["rows"].tolist() for each in Flyweight.known.values()] == [[1, 1]] * len(
        Flyweight.known
    )
    assert itself.table["rows"].tolist() == [1, 1]


def test_a_module_that_lanes_would_share():
    """A module whose `__deepcopy__` returns one module for all lanes is refused."""

    class Cached(nn.Linear):
        copies: typing.ClassVar[dict] = {}

        def __deepcopy__(self, memo):
            memo[id(self)] = made = self.copies.setdefault(0, nn.Linear(2, 2))
            made.weight, made.bias = self.weight, self.bias
            return made

    with (
        parallel(nn.Sequential(Cached(2, 2)), TWO, out_dims=0) as p,
        pytest.raises(ReplicaError, match="one module"),
    ):
        p(torch.ones(9, 2))
