"""`parallel` on NeuronCores: the session of a block, with two lanes per core."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from parawrap import (
    DataParallel,
    DeviceUnavailableError,
    GatherError,
    ReplicaError,
    SessionError,
    ShapeError,
    neuron,
    parallel,
    tuple_fn,
)
from tests.helpers.neuron_doubles import counts

FREE = [0] * 4
TWO = ["nc:0", "nc:1"]


def compiled_linear(batch=1):
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).eval()
    return plain, neuron.trace(plain, torch.zeros(batch, 3))


@pytest.mark.parametrize("devices", [["nc:3", "nc:1"], "neuron"], ids=str)
def test_same_object_runs_on_the_cores(host, devices):
    """Inside the block, the compiled model takes any number of rows.

    After the block, only the compiled number.
    """
    plain, model = compiled_linear(batch=2)
    x = torch.randn(9, 3)
    model(x[:2])  # TorchScript keeps its forward in the module from the first call
    before = dict(vars(model))
    with parallel(model, devices) as p:
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(p(x), plain(x))
    assert vars(model).keys() == before.keys()
    with pytest.raises(torch.jit.Error, match="compiled for"):
        model(x)


def test_stats_name_the_cores(host):
    """There are two lanes per core, and shards are equal."""
    _, model = compiled_linear()
    with parallel(model, ["nc:1", "nc:2"]) as p:
        p(torch.zeros(8, 3))
        stats = p.stats()
    assert [lane.label for lane in stats.lanes] == ["nc:1", "nc:2", "nc:1", "nc:2"]
    assert (stats.calls, stats.plain, stats.shards) == (1, 0, (2, 2, 2, 2))
    assert "nc:1" in str(stats)
    assert repr(p) == "parallel(TopLevelTracedModule, ['nc:1', 'nc:2'])"


def test_nothing_is_left_on_the_cores(host):
    """A block that raised leaves nothing on the cores. `neuron.DataParallel` also has a test of the
    last reference.
    """
    _, model = compiled_linear()
    threads, x = set(threading.enumerate()), torch.randn(8, 3)
    with pytest.raises(KeyError), parallel(model, "neuron") as block:  # noqa: PT012
        model(x)
        assert all(counts(host, "models"))
        raise KeyError
    with pytest.raises(SessionError, match="is closed"):
        block(x)
    assert counts(host, "models") == FREE
    assert set(threading.enumerate()) <= threads


def test_untraced_model_is_refused(host):
    """A block refuses an untraced model when it is entered. Classes for torch devices name
    neuron.DataParallel.
    """
    plain, model = compiled_linear()
    for untraced in (plain, torch.jit.script(plain)):
        with pytest.raises(ReplicaError, match="was not traced"), parallel(untraced, "neuron"):
            pytest.fail("the block was entered")
        for use in (neuron.dynamic_batch, lambda model: host.place(model, 0, 1)):
            with pytest.raises(ReplicaError, match="was not traced"):
                use(untraced)
    assert "forward" not in vars(plain)
    with pytest.raises(DeviceUnavailableError, match=r"neuron\.DataParallel"):
        DataParallel(model, device_ids=["nc:0"])
    with pytest.raises(DeviceUnavailableError, match=r"neuron\.DataParallel"):
        tuple_fn(torch.tanh, parallel=True, devices=["nc:0"])((torch.zeros(1),))


def test_options_of_the_block(host):
    """Outputs without rows are refused unless `reduce` or `out_dims` declares them.

    A table is named by `in_dims`.
    """
    model = neuron.trace(
        lambda x, table: (x @ table, x.sum()), (torch.zeros(2, 3), torch.zeros(3, 5))
    )
    x, table = torch.randn(4, 3), torch.randn(3, 5)  # two cores with the compiled size
    with (
        parallel(model, TWO, in_dims={"table": None}),
        pytest.raises(GatherError, match=r"output\[1\].*reduce"),
    ):
        model(x, table)
    with parallel(model, TWO, in_dims={"table": None}, reduce="sum") as p:
        torch.testing.assert_close(p(x, table), (x @ table, x.sum()))
        torch.testing.assert_close(p.submit(x[:2], table).result(), (x[:2] @ table, x[:2].sum()))
        with pytest.raises(
            ShapeError, match=r"input 0 is \[4, 3\], but the model is compiled for \[2, 3\]"
        ):
            p.submit(x, table).result()
    with parallel(compiled_linear()[1], TWO, join="list") as p:
        assert [len(output) for output in p(torch.randn(8, 3))] == [2] * 4


def test_calls_that_run_plainly(host):
    """A call under a dispatch mode, and a call in a lane, run on a core too.

    Compiled models ignore autocast.
    """

    class Nested(nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, x):
            return self.compiled(x) if len(x) < 2 else torch.cat([self(row) for row in x.split(1)])

    plain, compiled = compiled_linear()
    x = torch.randn(8, 3)
    with torch.no_grad(), parallel(Nested(compiled), TWO) as p:
        torch.testing.assert_close(p(x), plain(x))
        with FlopCounterMode(display=False):
            torch.testing.assert_close(p(x), plain(x))
        expected = plain(x)
        with torch.autocast("cpu"):
            torch.testing.assert_close(p(x), expected)
    assert sum(counts(host, "inferences")) == 24
    host.reset_stats()
    assert counts(host, "inferences") == FREE
