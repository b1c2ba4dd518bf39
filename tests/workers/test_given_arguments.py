"""Writes of a whole call into its arguments reach the caller's own objects, as after a plain call."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from parawrap import SessionError, ShardError
from tests.helpers.pools import over
from tests.helpers.same import assert_same

pytestmark = pytest.mark.parametrize("kind", ["thread", "process"], indirect=True, scope="module")


@dataclass
class Setting:
    name: str
    rows: list


class Trimmed(Setting):
    """Leaves its rows out when it is pickled, so that a worker has other objects."""

    def __getstate__(self):
        return {"name": self.name, "rows": [torch.zeros(1)]}


class Rearranged(Setting):
    """Has its three leaves in other places after it was pickled."""

    def __getstate__(self):
        return {"name": [torch.zeros(1), torch.zeros(1)], "rows": [torch.zeros(1)]}


def test_every_kind_of_argument(block):
    def change(x, log, table, nested, array, names, raw, setting, trimmed):
        log.append(len(x))
        table["new"] = x + 1
        del table["old"]
        nested["inner"][0].append("changed")
        nested["new"] = [{"log": log}]
        setting.name = trimmed.name
        setting.rows.append(2)
        array[1] = 5
        names.add("added")
        raw[0] = 9
        return x.add_(1)

    def arguments():
        return {
            "x": torch.zeros(3, 1),
            "log": [0],
            "table": {"old": 1, "kept": torch.ones(2)},
            "nested": {"inner": (["first"], 3)},
            "array": np.zeros(3),
            "names": {"given"},
            "raw": bytearray(b"abc"),
            "setting": Setting("old", [1]),
            "trimmed": Trimmed("new", [["kept"], 2]),
        }

    expected, given = arguments(), arguments()
    inner, kept, rows = given["nested"]["inner"][0], given["table"]["kept"], given["setting"].rows
    assert_same(block.submit(change, **given).result(), change(**expected))
    assert_same(given, expected)
    assert given["nested"]["inner"][0] is inner
    assert given["table"]["kept"] is kept
    assert given["setting"].rows is rows
    assert given["nested"]["new"][0]["log"] is given["log"]


def test_views_of_one_memory(block):
    """A write into one view is seen in the other, and in the caller's memory."""

    def add(a, b):
        a += 1
        return b

    memory = torch.zeros(100)
    assert block.submit(add, memory[10:60], memory[:20]).result().tolist() == [0.0] * 10 + [1.0] * 10
    assert memory.sum() == memory[10:60].sum() == 50


def test_change_of_a_shape(block, kind):
    """A tensor that shares no memory gets the shape. For others, workers say what to do."""

    def change(x):
        return x.unsqueeze_(0).add_(1).sum()

    x, view = torch.zeros(3), torch.zeros(6)[::2]
    block.submit(change, x).result()
    assert_close(x, torch.ones(1, 3))
    if kind == "process":
        with pytest.raises(SessionError, match=r"shape of an argument in place, from \(3,\) to \(1, 3\)"):
            block.submit(change, view).result()


@pytest.mark.parametrize("cls", [Trimmed, Rearranged])
def test_write_into_a_trimmed_argument(block, kind, cls):
    """The caller's has other parts than the worker's, or as many in other places."""
    trimmed = cls("first", [torch.zeros(1), torch.zeros(1)])
    with nullcontext() if kind == "thread" else pytest.raises(SessionError, match="other parts in a worker"):
        block.submit(lambda setting: setting.rows[0].add_(1).sum(), trimmed).result()
    assert [each.item() for each in trimmed.rows] == [kind == "thread", 0]


def test_write_of_a_cut_call(kind):
    """A cut call writes its rows into the caller's tensor. A write into a whole argument would repeat, and is refused."""

    def write(x, total):
        total += len(total)
        return x.mul_(2)

    x, total = torch.ones(8, 4), torch.zeros(3)
    with over(kind, write, out_dims=0, in_dims={"total": None}) as p, pytest.raises(ShardError, match="in place"):
        p(torch.ones(8, 4), total)
    with over(kind, lambda x: x.mul_(2), out_dims=0) as p:
        assert_close(p(x), torch.full((8, 4), 2.0))
    assert_close(x, torch.full((8, 4), 2.0))
