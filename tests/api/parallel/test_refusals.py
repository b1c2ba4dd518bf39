"""Options and models that `parallel` refuses before a lane runs, with the value, the place, and the cure."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from parawrap import DeviceListError, DeviceUnavailableError, GatherError, Parallel, ReplicaError, ShardError, parallel

TWO = ["cpu"] * 2
ON_THE_CPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


class Net(nn.Linear):
    def generate(self, x):
        return self(x)


@pytest.mark.parametrize("devices", [[], (), 0, -1, True, 1.5, [None], [1.5], ["cpu:x"]], ids=str)
def test_values_that_are_no_devices(devices):
    with pytest.raises(DeviceListError) as caught:
        parallel(Net(4, 3), devices)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (["cuda:7"], "cuda"),
        (["nonsense"], "nonsense"),
        (["cpu", "cpu:1"], r'\["cpu", "cpu"\]'),
        (["cpu", "cuda:0"], "cuda"),
    ],
)
def test_absent_devices(devices, says):
    with pytest.raises((DeviceListError, DeviceUnavailableError), match=says):
        parallel(Net(4, 3), devices)
    with pytest.raises(DeviceUnavailableError):
        parallel(Net(4, 3), TWO, output_device=devices[-1])


@ON_THE_CPU
@pytest.mark.parametrize(("devices", "lanes"), [(["cpu:0", torch.device("cpu", 0)], 2), (3, 3), (None, 1), ("auto", 1)])
def test_devices_of_cpu_lanes(devices, lanes):
    """A number counts lanes. Without an accelerator, the default is one lane: the plain call."""
    block = parallel(Net(4, 3), devices)
    assert block.devices == (torch.device("cpu"),) * lanes
    assert type(block) is Parallel is parallel
    assert len(parallel(Net(4, 3), "cpu").devices) >= 1


OPTIONS = [
    *(({"methods": each}, ShardError, "methods") for each in ("forward", (), ("nothing",), ("in_features",))),
    *(({"in_dims": each}, ShardError, "in_dims") for each in ({"input": 1.5}, {"input": True}, 0, ("input",))),
    ({"in_dims": {"y": 0}}, ShardError, r"'y'.*Net.*\binput\b"),
    ({"in_dims": {"input": {"x": "rows"}}}, ShardError, r"in_dims\['input'\]=\{'x': 'rows'\} is not supported"),
    *(({"dim": each}, ShardError, f"dim={each!r}: give the dim that") for each in ("0", True, 1.5, None)),
    *(({"unit": each}, ShardError, re.escape(f"unit={each!r}")) for each in (0, True, 2.0, None)),
    ({"workers": "fork"}, ShardError, 'workers=\'fork\': give "thread" or "process"'),
    *(({"retries": each}, ShardError, f"retries={each!r}") for each in (-1, True, "1")),
    ({"join": "stack"}, GatherError, "join='stack'"),
    ({"out_dims": "rows"}, GatherError, "out_dims.*'rows'"),
    ({"out_dims": True}, GatherError, "out_dims.*True"),
    ({"out_dims": (0, {"a": 1.5})}, GatherError, "out_dims.*1.5"),
    ({"out_dims": "mean"}, GatherError, "'mean' is a value of reduce"),
    ({"reduce": "median"}, GatherError, "reduce='median'"),
    *(({"reduce": each}, GatherError, "is not supported") for each in ({"a": "median"}, ("mean", "max"), 1)),
    ({"plan": 2}, TypeError, "plan"),
]


@pytest.mark.parametrize(("options", "error", "says"), OPTIONS, ids=[str(options) for options, *_ in OPTIONS])
def test_wrong_options(options, error, says):
    """The error names the value at the call of `parallel`."""
    with pytest.raises(error, match=says):
        parallel(Net(4, 3), TWO, **options)
    with pytest.raises(ShardError, match="target=3 is not callable"):
        parallel(3, TWO)


def test_wrong_methods():
    """Several methods need a choice, and one that is not named is refused."""
    with parallel(Net(4, 3), TWO, methods=("forward", "generate")) as p:
        for use in (lambda: p.map([]), lambda: p.submit(torch.zeros(2, 4)), lambda: p(torch.zeros(2, 4))):
            with pytest.raises(ShardError, match=r"p\.method\('forward'\)"):
                use()
        with pytest.raises(ShardError, match=r"methods=\(\.\.\., 'extra_repr'\)"):
            p.method("extra_repr")
    with pytest.raises(ShardError, match="the target is a builtin_function_or_method"):
        parallel(torch.tanh, TWO, methods=("generate",))
    with parallel(torch.tanh, TWO) as p, pytest.raises(ShardError, match="not a module"):
        p.method("forward")


def on_meta(tmp_path):
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))


def wholly_on_meta(tmp_path):
    return on_meta(tmp_path).to("meta")


def with_iterator(tmp_path):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    model[1].layers = iter([model[0]])
    return model


def distributed(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return nn.Sequential(nn.ReLU(), nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (on_meta, r"1\.weight.*meta"),
        (wholly_on_meta, r"0\.weight.*meta"),
        (with_iterator, r"1\.layers is an iterator"),
        (distributed, "'1'"),
    ],
    ids=["meta", "all meta", "iterator", "distributed"],
)
def test_models_that_cannot_be_copied(tmp_path, make, says):
    """The error names the place, and the model is unchanged."""
    model = make(tmp_path)
    try:
        with pytest.raises(ReplicaError, match=says), parallel(model, TWO):
            model(torch.randn(5, 4))
        assert "forward" not in vars(model)
    finally:
        del model
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
