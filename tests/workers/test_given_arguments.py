"""Writes of a whole call into arguments reach the caller's own.

Workers refuse writes into unknown objects.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from operator import is_
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parawrap import SessionError, ShardError
from tests.helpers.cures import options_in_error, run
from tests.helpers.pools import over
from tests.helpers.same import assert_same

pytestmark = pytest.mark.parametrize("kind", ["thread", "process"], indirect=True, scope="module")


@dataclass
class Setting:
    name: str
    rows: list


CONTAINERS = {
    "list": ([0], lambda log: log.append(1)),
    "dict": ({"old": 1}, lambda table: table.pop("old")),
    "nested": ({"inner": (["first"], 3)}, lambda nested: nested["inner"][0].append("changed")),
    "dataclass": (Setting("old", [1]), lambda setting: setattr(setting, "name", "new")),
    "tensor in a list": ([torch.zeros(1)], lambda tensors: tensors.append(torch.ones(1))),
    "order": ([3, 1, 2], lambda items: items.sort()),
    "entry of another key": ({"a": torch.zeros(1)}, lambda table: table.update(b=table.pop("a"))),
}
OBJECTS = {
    "array": (np.zeros(3), lambda array: array.fill(5)),
    "set": ({"given"}, lambda names: names.add("added")),
    "bytes": (bytearray(b"abc"), lambda raw: raw.append(1)),
    "tensor in an object": (SimpleNamespace(kept=torch.zeros(1)), lambda held: held.kept.add_(1)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_come_back(block, name):
    """Entries that forward adds, replaces, and removes are in the caller's own containers after the
    call.
    """
    value, change = CONTAINERS[name]
    given, expected = copy.deepcopy(value), copy.deepcopy(value)
    change(expected)
    block.submit(lambda value: (change(value), torch.ones(1))[1], given).result()
    assert_same(given, expected)


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_argument_that_is_returned(kind, is_cut):
    """An argument that forward returns is the caller's own object, with what forward added."""

    def forward(batch):
        batch["y"] = batch["x"] * 2
        return batch

    batch = {"x": torch.arange(8.0)[:, None]}
    with over(kind, forward, out_dims=0) as p:
        output = p(batch) if is_cut else p.submit(batch).result()
    assert output is batch
    assert_close(batch["y"], batch["x"] * 2)


def test_values_that_are_returned(kind):
    """Forward returns arguments: the caller gets these objects, from each kind of call."""
    tensors = (torch.ones(2, 3), torch.tensor(3.0))
    others = ("in German", "7", b"raw bytes", np.zeros(3), SimpleNamespace(size=2), torch.float64)
    x, values = torch.ones(9, 1), (*tensors, *others)

    def forward(x, *values):
        return x * 2, values

    with over(kind, forward, in_dims={"values": None}) as p:
        outputs = [p(x, *values), p.submit(x, *values).result(), *p.map([(x, *values)])]
    for y, returned in outputs:
        assert_close(y, x * 2)
        assert all(map(is_, returned, values))


def test_tensors_that_are_returned(kind):
    """A call of tensors alone returns its argument, cut or whole, with what forward wrote."""
    x = torch.ones(9, 1)
    with over(kind, lambda x: x.mul_(2)) as p:
        assert p(x) is x
        assert p.submit(x).result() is x
        assert next(iter(p.map([x]))) is x
    assert_close(x, torch.full((9, 1), 8.0))
    with over(kind, lambda x: x, out_dims=0, join="list") as p:
        assert_close(p(x), [*x.tensor_split(2)])


@pytest.mark.parametrize("place", ["output", "entry"])
def test_constant_in_the_code(kind, place):
    """Threads have one text. Each worker has its own, and the cures in the errors join them."""

    def write(batch):
        batch["kind"] = "scores of classes"
        return batch["x"] * 2

    def forward(batch):
        return {"y": batch["x"] * 2, "kind": "scores of classes"}

    batch, options = {"x": torch.ones(9, 1)}, {}
    if kind != "thread":
        if place == "entry":
            with pytest.raises(ShardError, match="Return it instead of writing it") as refused:
                run(over(kind, write), batch)
            assert "out_dims=" not in str(refused.value)
        options = options_in_error(lambda: run(over(kind, forward), batch))
    elif place == "entry":
        run(over(kind, write), batch)
        assert batch["kind"] == "scores of classes"
    output = run(over(kind, forward, **options), batch)
    assert_same(output, {"y": batch["x"] * 2, "kind": "scores of classes"})


@pytest.mark.parametrize("name", OBJECTS)
def test_other_arguments(block, kind, name):
    """The error says to return the value. The call after it runs."""
    value, change = OBJECTS[name]
    given, expected = copy.deepcopy(value), copy.deepcopy(value)
    refused = pytest.raises(SessionError, match=r"neither a tensor nor.*Return the new value")
    with nullcontext() if kind == "thread" else refused:
        block.submit(lambda value: (change(value), torch.ones(1))[1], given).result()
    if kind == "thread":
        change(expected)
    assert_same(given, expected)
    assert block.submit(lambda value: torch.ones(1), given).result() == 1


@pytest.mark.parametrize("is_cut", [False, True])
def test_object_of_a_local_class(kind, is_cut):
    """Plain pickle refuses such a class, as it does those of a notebook."""

    class Counter:
        seen = 0

    def count(x, counter):
        counter.seen += 1
        return x

    x, counter = torch.ones(8, 4), Counter()
    refused = pytest.raises(SessionError, match="neither a tensor nor")
    if kind == "thread":  # all lanes of a cut call use the one object
        refused = (
            pytest.raises(ShardError, match="every lane gets whole") if is_cut else nullcontext()
        )
    with over(kind, count, out_dims=0, in_dims={"counter": None}) as p, refused:
        p(x, counter) if is_cut else p.submit(x, counter).result()
    assert bool(counter.seen) == (kind == "thread")


def test_tensors_inside_arguments(block):
    """Tensors inside arguments come back wherever they are."""

    def change(x, table, setting):
        x.add_(1)
        table["kept"].mul_(3)
        setting.rows[0].sub_(1)
        return x

    x, kept, row = torch.zeros(3, 1), torch.ones(2), torch.zeros(2)
    block.submit(change, x, {"kept": kept, "label": "a"}, Setting("name", [row])).result()
    assert_close([x, kept, row], [torch.ones(3, 1), torch.full((2,), 3.0), torch.full((2,), -1.0)])


def test_views_of_one_memory(block):
    """A write into one view is seen in the other, and in the caller's memory."""

    def add(a, b):
        a += 1
        return b

    memory = torch.zeros(100)
    assert (
        block.submit(add, memory[10:60], memory[:20]).result().tolist() == [0.0] * 10 + [1.0] * 10
    )
    assert memory.sum() == memory[10:60].sum() == 50


def test_write_into_other_tensors(block, kind):
    """A worker's argument has another shape than the caller's, so a write could not come back."""
    with (
        nullcontext()
        if kind == "thread"
        else pytest.raises(SessionError, match=r"other parts.*Return the new")
    ):
        block.submit(lambda x: x.unsqueeze_(0).add_(1).sum(), torch.zeros(3)).result()


def test_write_of_a_cut_call(kind):
    """A cut call writes its rows into the caller's tensor.

    A write into a whole argument would repeat, and is refused.
    """

    def write(x, total):
        total += len(total)
        return x.mul_(2)

    x, total = torch.ones(8, 4), torch.zeros(3)
    with (
        over(kind, write, out_dims=0, in_dims={"total": None}) as p,
        pytest.raises(ShardError, match="in place"),
    ):
        p(torch.ones(8, 4), total)
    with over(kind, lambda x: x.mul_(2), out_dims=0) as p:
        assert_close(p(x), torch.full((8, 4), 2.0))
    assert_close(x, torch.full((8, 4), 2.0))
