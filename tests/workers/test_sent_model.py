"""The model in the workers: what can be sent, what travels again at which change, and what a call
may write into it.
"""

from __future__ import annotations

import copy
import errno
import os
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import SessionError, UnsendableError, parallel
from tests.helpers.calling import Stateful
from tests.helpers.pools import OnlyHere, outputs_of, processes
from tests.helpers.same import assert_same


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.dropout = nn.Dropout(1.0)
        self.config = {"scales": [1.0, {"last": 2.0}], "table": torch.ones(4)}
        self.register_buffer("rows", torch.zeros(2, 4))
        self.register_buffer("row", self.rows[1])

    def forward(self, x):
        if not self.training:
            self.row.fill_(3)
        first, deep = self.config["scales"]
        y = self.dropout(self.tied(self.linear(x))) * first * deep["last"]
        return (
            y + self.config["table"] + self.rows[1],
            self.tied.weight is self.linear.weight,
            self.linear.weight,
        )


class Where(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        x, hook = self.inner(x)
        return x, (hook, os.getpid())


def with_lock():
    layer = nn.ReLU()
    layer.lock = threading.Lock()
    return nn.Sequential(nn.ReLU(), layer)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), "model"),
        (with_lock, r"model\[1\]\.lock"),
    ],
    ids=["script", "lock"],
)
def test_model_that_cannot_be_sent(make, path):
    """The error names the part by its path, and `build` as the cure."""
    with processes(make()) as p, pytest.raises(UnsendableError, match=rf"{path}\b.*build"):
        p(torch.randn(9, 4))


def test_model_that_cannot_be_unpickled():
    """No call runs with the model as it was before."""
    model, x = nn.Linear(2, 2), torch.ones(9, 2)
    with processes(model) as p:
        p(x)
        model.weight.mul_(2)
        model.part = OnlyHere()
        for _ in range(3):
            with pytest.raises(LookupError, match="not at home"):
                p(x)
        del model.part
        assert_close(p(x), x @ model.weight.T + model.bias)


def test_prepare_holds_a_list_of_layers():
    """Lanes in threads refuse it, and each worker has its own copy."""
    layers = [nn.Linear(2, 2)]
    with torch.no_grad(), processes(nn.Identity()) as p:
        assert_close(
            [*p.map([torch.ones(3, 2)], prepare=lambda x: layers[0](x))],
            [layers[0](torch.ones(3, 2))],
        )


def test_generators_are_refused():
    """The state of a generator in the model, `prepare`, or the arguments would
    stay in the worker.
    """
    model, generator = nn.Identity(), torch.Generator()
    model.generator = generator
    with (
        processes(model) as p,
        pytest.raises(SessionError, match=r"the model uses a random generator"),
    ):
        p(torch.zeros(9, 2))
    with (
        processes(nn.Identity()) as p,
        pytest.raises(SessionError, match=r"prepare uses a random generator"),
    ):
        list(
            p.map([torch.zeros(9, 2)], prepare=lambda x: x + torch.rand(9, 2, generator=generator))
        )
    with (
        processes(lambda x, g: x) as p,
        pytest.raises(SessionError, match=r"an argument is a random generator"),
    ):
        p(torch.zeros(9, 2), torch.Generator())


CHANGES = {
    "in place": lambda model: model.linear.weight.mul_(2),
    "in inference mode": lambda model: torch.inference_mode()(model.linear.weight.mul_)(2),
    "plain tensor": lambda model: model.config["table"].add_(1),
    "load_state_dict": lambda model: model.load_state_dict(Configured().state_dict()),
    "data": lambda model: setattr(model.linear.weight, "data", torch.randn(4, 4)),
    "train": lambda model: model.train(),
    "attribute deep inside": lambda model: model.config["scales"][1].update(last=7.0),
    "attribute of a layer": lambda model: setattr(model.dropout, "p", 0.0),
    "hook": lambda model: model.linear.register_forward_hook(
        lambda module, args, output: output + 5
    ),
    "dtype": lambda model: model.double(),
    "new layer": lambda model: setattr(model, "linear", nn.Linear(4, 4, dtype=torch.float64)),
}


@pytest.mark.filterwarnings("ignore:the model wrote 'row':UserWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_change_is_in_the_next_call(whole):
    """Tied weights stay tied, and a view of a buffer shares its memory."""
    model = Configured().eval()
    with processes(model, out_dims=(0, None, None)) as p:
        for name, change in CHANGES.items():
            change(model)
            x = torch.randn(9, 4, dtype=model.linear.weight.dtype)
            for _ in range(2):
                output = p.submit(x).result() if whole else model(x)
                assert_same((name, output), (name, copy.deepcopy(model)(x)))


def test_writes_without_a_version():
    """Fused optimizers and batch norm write tensors in C++ and leave the versions of these tensors
    alone.
    """
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(9, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model[1].num_batches_tracked = None
    with processes(model) as p:
        for _ in range(2):
            assert_same(outputs_of(p, model, x), [copy.deepcopy(model)(x)] * 3)
            with torch.enable_grad():
                plain = model.train()[1](model[0](x))
                plain.square().sum().backward()
            optimizer.step()
            model.eval()


def test_the_model_travels_if_changed():
    """A write into `data` is seen after `refresh`."""
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(7, 4)
    with processes(model) as p:
        for _ in range(3):
            model(x)
        assert p.stats().copied_bytes == 0
        model[0].weight.mul_(2)
        model(x)
        # The model is sent whole
        assert p.stats().copied_bytes == model[0].weight.nbytes + model[0].bias.nbytes
        model[0].weight.data.zero_()
        p.refresh()
        assert_same(outputs_of(p, model, x), [model[0].bias.expand(7, 3).clone()] * 3)


@pytest.mark.filterwarnings('ignore:the model wrote "state:UserWarning')
def test_attributes_do_not_leak():
    """Each call starts from the attributes of the model, with one warning."""

    def run(model, x):
        model.state["calls"] += 1
        return model.linear(x), model.state["calls"]

    model, x = Stateful(run, linear=nn.Linear(4, 4), state={"calls": 0}), torch.randn(8, 4)
    expected = model.linear(x), 1
    with processes(model, out_dims=(0, None)) as p:
        with pytest.warns(UserWarning, match="the model wrote .*calls"):
            model(x)
        for _ in range(2):
            assert_same(outputs_of(p, model, x), [expected] * 3)
    assert model.state == {"calls": 0}


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_training_mode_is_followed():
    """A cut call that writes buffers in training mode is refused.

    Otherwise, buffers stay as they were.
    """
    model, x = nn.BatchNorm1d(3), torch.randn(13, 3)
    before = copy.deepcopy(model.state_dict())
    with processes(model) as p:
        for _ in range(2):
            with pytest.raises(SessionError, match=r"in training mode.*model\.eval\(\)"):
                p(x)
            p.submit(x).result()
        model.eval()
        assert_close(p(x), copy.deepcopy(model)(x))
    assert_close(model.state_dict(), before)


def test_hooks_run_as_in_the_plain_call():
    """Hooks of the model run in this process on the whole batch, and hooks of a submodule next to
    its forward.
    """
    model, x = Where(), torch.randn(8, 4)
    model.inner.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.inner.register_forward_hook(lambda module, args, output: (output * 3, os.getpid()))
    model.register_forward_hook(lambda module, args, output: (output, len(args[0]), os.getpid()))
    with processes(model, out_dims=(0, None), join="list") as p:
        parts, rows, pid = model(x)
        ((output, whole_pids), whole_rows, whole_pid) = p.submit(x).result()[0]
    assert_close(output, (x + 1) * 3)
    assert (rows, pid, whole_rows) == (8, os.getpid(), 8)
    assert {*whole_pids} == {whole_pid} != {os.getpid()}
    for _, (hook, forward) in parts:
        assert hook == forward != os.getpid()


# -- functions and classes


def scaled_by(namespace):
    """Return a module of a class that reads a global of that namespace."""
    source = "class Scaled(Module):\n    def forward(self, x):\n        return x * SCALE\n"
    exec(source, namespace)
    return namespace["Scaled"]()


def test_closures_are_current():
    """A variable of a hook's closure, a global of the script, and a container that a function
    reads.
    """
    offset, table, x = 1.0, {"offset": 1.0}, torch.ones(9, 2)
    script = {"__name__": "__main__", "Module": nn.Module, "SCALE": 1.0}
    model = nn.Sequential(scaled_by(script), nn.Identity())
    model[1].register_forward_hook(lambda module, args, output: output + offset)
    with processes(model) as p, processes(lambda x: x + table["offset"]) as q:
        for number in range(1, 4):
            offset, script["SCALE"], table["offset"] = 10.0 * number, float(number), 5.0 * number
            assert_same(outputs_of(p, model, x), [x * number + 10 * number] * 3)
            assert_same(outputs_of(q, q, x), [x + 5 * number] * 3)


def test_functions_are_current():

    class Scaled(nn.Module):
        def forward(self, x, by=1):
            return x * by

    model, x = Scaled(), torch.ones(9, 1)
    with processes(model) as p:
        assert_close(p(x), x)
        Scaled.forward.__defaults__ = (2,)
        assert_close(p(x), x * 2)
        Scaled.forward = lambda self, x: x * 3
        assert_close(p(x), x * 3)


class LoadedLate(nn.Module):
    """Cannot be loaded at the first attempt."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __setstate__(self, state):
        super().__setstate__(state)
        attempt = self.folder / "attempt"
        if not attempt.exists():
            attempt.touch()
            raise OSError(errno.EMFILE, "no descriptor is left")

    def forward(self, x):
        return x


def twice(x):
    return 2 * x


def test_prepare_of_calls_that_fail(tmp_path):
    """A worker that cannot load its model keeps `prepare`, for the messages after it."""
    model, x = LoadedLate(tmp_path), torch.ones(1)
    with parallel(model, ["cpu"], workers="process") as p:
        failed, *others = p.map([x] * 4, prepare=twice, chunksize=1, return_exceptions=True)
    assert isinstance(failed, OSError)
    assert others == [2 * x] * 3


def test_model_of_calls_that_cannot_be_sent():
    """A worker that got a new model, but not its calls, gets the model of a stream again."""
    model, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    nn.init.ones_(model.weight)
    with parallel(model, ["cpu"], workers="process") as p:
        outputs = p.map([x] * 9, buffersize=1, chunksize=1)
        assert next(outputs) == 1
        p._session.lanes.wait(p._session.lanes.is_idle)
        wire = p._session.lanes.all[0].worker._wire
        send = wire.send

        def send_models(word, *args):
            if word == "calls":
                raise OSError(errno.EMFILE, "no descriptor is left")
            return send(word, *args)

        nn.init.zeros_(model.weight)
        wire.send = send_models
        with pytest.raises(OSError, match="no descriptor"):
            p.submit(x).result()
        wire.send = send
        assert [*map(float, outputs)] == [1] * 8
