"""Exceptions in lanes keep their type, gain a note, and leave the block usable. Refusals name value, place, and cure."""

from __future__ import annotations

import re
import traceback

import pytest
import torch
from torch import nn

from parawrap import DeviceListError, DeviceUnavailableError, GatherError, ReplicaError, ShardError, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Fails(nn.Module):
    """Raises for shards that hold one of the values."""

    def __init__(self, values, make=lambda value: ValueError(f"row {value}")):
        super().__init__()
        self.values, self.make = values, make
        type(self).ran = []  # on the class, because a replica has its own attributes
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        for value in x.flatten().int().tolist():
            self.ran.append(value)
            if value in self.values:
                raise self.make(value)  # the user's line
        return self.linear(x)


def rows(count):
    return torch.arange(float(count))[:, None]


@pytest.mark.parametrize("in_turns", [True, False], ids=["in turns", "at the same time"])
@pytest.mark.parametrize("bad", [0, 1])
def test_the_error_of_a_lane(bad, in_turns):
    """A note names the lane, and the traceback reaches the user's line. In turns, later lanes do not start."""
    error = ValueError("mine")
    error.__cause__ = cause = KeyError("why")
    model = Fails({bad}, lambda value: error)
    with torch.set_grad_enabled(in_turns), parallel(model, THREE, out_dims=0) as p, pytest.raises(ValueError) as caught:
        p(rows(3))
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__notes__ == [f"in lane {bad} on cpu, shard {bad} of 3: 1 of 3 rows"]
    assert "the user's line" in traceback.extract_tb(error.__traceback__)[-1].line
    assert sorted(model.ran) == [*range(bad + 1 if in_turns else 3)]


def test_errors_of_several_lanes():
    """The first lane's exception is raised, and notes name the others."""
    model = Fails({1, 2})
    with torch.no_grad(), parallel(model, THREE, out_dims=0), pytest.raises(ValueError, match="row 1") as caught:
        model(rows(3))
    assert caught.value.__notes__ == [
        "in lane 1 on cpu, shard 1 of 3: 1 of 3 rows",
        "also in lane 2 on cpu, shard 2 of 3: ValueError: row 2",
    ]


def source_that_fails():
    yield torch.ones(2, 1)
    raise ValueError("disk")  # the user's line


SOURCES = {
    "model": (lambda: [rows(1), rows(2)], ["in lane 0 on cpu", "in batch 0 of the stream, counted from 0"]),
    "source": (source_that_fails, ["while batch 1 of the stream was read, counted from 0"]),
}


@pytest.mark.parametrize("options", [{}, {"ordered": False, "return_exceptions": True}], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_errors_of_a_stream(name, options):
    """Notes name the lane and the batch. The traceback has at most one line of parawrap before the user's line."""
    source, notes = SOURCES[name]
    with torch.no_grad(), parallel(Fails({0} if name == "model" else set()), ["cpu"]) as p:
        try:
            error = next(each for each in p.map(source(), **options) if isinstance(each, ValueError))
        except ValueError as raised:
            error = raised
    frames = traceback.extract_tb(error.__traceback__)
    assert len([frame for frame in frames if re.search(r"/parawrap/|concurrent/futures", frame.filename)]) <= 1
    assert "the user's line" in frames[-1].line
    assert [note.partition(":")[0] for note in error.__notes__] == notes


def test_stop_iteration_ends_no_stream():
    """It becomes a RuntimeError at its batch's position."""
    outputs = []
    with parallel(lambda x: next(iter(())) if x[0] == 3 else x, TWO) as p, pytest.raises(RuntimeError, match="Stop"):
        outputs.extend(output.item() for output in p.map(torch.arange(6.0).split(1)))
    assert outputs == [0, 1, 2]


def test_type_errors_name_batch_forms():
    """A list is one argument, and a dict is keyword arguments."""
    batch = [torch.ones(2), torch.ones(2)]
    with parallel(lambda x, y: y + 1, TWO) as p:
        for wrong, cure in ((batch, "prepare=tuple"), ({"a": batch}, "prepare=lambda batch: (batch,)")):
            with pytest.raises(TypeError) as caught:
                list(p.map([wrong]))
            assert cure in caught.value.__notes__[-1]
        assert next(p.map([batch], prepare=tuple)).tolist() == [2, 2]


class Net(nn.Linear):
    def generate(self, x):
        return self(x)


@pytest.mark.parametrize("devices", [[], 0, True, 1.5, [None], ["cpu:x"]], ids=str)
def test_values_that_are_no_devices(devices):
    with pytest.raises(DeviceListError):
        parallel(Net(4, 3), devices)


@pytest.mark.parametrize(("devices", "says"), [(["nonsense"], "nonsense"), (["cpu", "cpu:1"], r'\["cpu", "cpu"\]')])
def test_absent_devices(devices, says):
    with pytest.raises(DeviceUnavailableError, match=says):
        parallel(Net(4, 3), devices)
    with pytest.raises(DeviceUnavailableError):
        parallel(Net(4, 3), TWO, output_device=devices[-1])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize(("devices", "lanes"), [(["cpu:0", torch.device("cpu", 0)], 2), (3, 3), (None, 1), ("auto", 1)])
def test_devices_of_cpu_lanes(devices, lanes):
    """A number counts lanes. Without an accelerator, the default is one lane: the plain call."""
    block = parallel(Net(4, 3), devices)
    assert block.devices == (torch.device("cpu"),) * lanes


OPTIONS = [
    *(({"methods": each}, ShardError, "methods") for each in ("forward", (), ("nothing",))),
    *(({"in_dims": each}, ShardError, "in_dims") for each in ({"input": 1.5}, {"input": True}, 0)),
    ({"in_dims": {"y": 0}}, ShardError, r"'y'.*Net.*\binput\b"),
    ({"in_dims": {"input": {"x": "rows"}}}, ShardError, r"in_dims\['input'\]=\{'x': 'rows'\} is not supported"),
    *(({"dim": each}, ShardError, f"dim={each!r}: give the dim that") for each in ("0", True)),
    *(({"unit": each}, ShardError, re.escape(f"unit={each!r}")) for each in (0, 2.0)),
    ({"workers": "fork"}, ShardError, 'workers=\'fork\': give "thread" or "process"'),
    *(({"retries": each}, ShardError, f"retries={each!r}") for each in (-1, "1")),
    ({"join": "stack"}, GatherError, "join='stack'"),
    ({"out_dims": "rows"}, GatherError, "out_dims.*'rows'"),
    ({"out_dims": (0, {"a": 1.5})}, GatherError, "out_dims.*1.5"),
    ({"out_dims": "mean"}, GatherError, "'mean' is a value of reduce"),
    ({"reduce": "median"}, GatherError, "reduce='median'"),
    *(({"reduce": each}, GatherError, "is not supported") for each in ({"a": "median"}, ("mean", "max"), 1)),
    ({"plan": 2}, TypeError, "plan"),
]


@pytest.mark.parametrize(("options", "error", "says"), OPTIONS, ids=[str(options) for options, *_ in OPTIONS])
def test_wrong_options(options, error, says):
    """The error comes at the call of `parallel`."""
    with pytest.raises(error, match=says):
        parallel(Net(4, 3), TWO, **options)


def test_wrong_methods():
    """Several methods need a choice, and one that is not named is refused."""
    with parallel(Net(4, 3), TWO, methods=("forward", "generate")) as p:
        for use in (lambda: p.map([]), lambda: p.submit(torch.zeros(2, 4)), lambda: p(torch.zeros(2, 4))):
            with pytest.raises(ShardError, match=r"p\.method\('forward'\)"):
                use()
        with pytest.raises(ShardError, match=r"methods=\(\.\.\., 'extra_repr'\)"):
            p.method("extra_repr")
    with parallel(torch.tanh, TWO) as p, pytest.raises(ShardError, match="not a module"):
        p.method("forward")
    with pytest.raises(ShardError, match=r"methods=\('encode',\) needs a module"):
        parallel(torch.tanh, TWO, methods=("encode",))


@pytest.mark.parametrize("kind", ["meta", "distributed"])
def test_models_that_cannot_be_copied(tmp_path, kind):
    """The error names the place, and the model is unchanged."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4, device="meta" if kind == "meta" else None))
    says = r"1\.weight.*meta" if kind == "meta" else "'1'"
    if kind == "distributed":
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        model[1] = nn.parallel.DistributedDataParallel(model[1])
    try:
        with pytest.raises(ReplicaError, match=says), parallel(model, TWO):
            model(torch.randn(5, 4))
        assert "forward" not in vars(model)
    finally:
        del model
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_block_without_effect():
    """A block that is dropped without a `with`, a call, or a look at its devices is an error of the user."""
    with pytest.warns(UserWarning, match=r"parallel\(Linear, \['cpu', 'cpu'\]\) had no effect: open it with `with`"):
        parallel(torch.nn.Linear(2, 2), ["cpu"] * 2)
    parallel(torch.nn.Linear(2, 2), ["cpu"] * 2).close()
