"""What forward writes: parameters and layers are refused, buffers have rules of their own, and the rest is put back."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel

TWO = ["cpu"] * 2
CALLS = pytest.mark.parametrize(
    "call",
    [lambda p, x: p(x), lambda p, x: p.submit(x).result(), lambda p, x: next(iter(p.map([x])))],
    ids=["call", "submit", "map"],
)


class Writing(nn.Linear):
    """A layer that changes its own state in each call."""

    def __init__(self, write):
        super().__init__(4, 4)
        self.first, self.table, self.queue = True, {"k": 1.0}, [1.0]
        self.write = write
        self.register_forward_pre_hook(lambda *_: None)

    def forward(self, x):
        state = float(hasattr(self, "first")) + len(self.table) + sum(self.queue) + len(self._forward_pre_hooks)
        self.write(self)
        return super().forward(x) + state


def deletes(model):
    del model.first


def sets(model):
    model.last = 3


def pops(model):
    model.table.pop("k")


def adds_an_item(model):
    model.table["x"] = torch.ones(1)


def empties(model):
    model.queue = []


def clears(model):
    model.queue.clear()


def appends(model):
    model.queue.append(2.0)


def drops_its_hook(model):
    model._forward_pre_hooks.clear()


def registers_a_buffer(model):
    model.register_buffer("made", torch.ones(2))


@CALLS
@pytest.mark.parametrize(
    ("write", "named"),
    [
        (deletes, "'first'"),
        (sets, "'last'"),
        (pops, r"table\['k'\]"),
        (adds_an_item, r"table\['x'\]"),
        (empties, "'queue'"),
        (clears, "'queue'"),
        (appends, "'queue'"),
        (drops_its_hook, "_forward_pre_hooks"),
        (registers_a_buffer, "'made'"),
    ],
)
def test_what_forward_changes_is_put_back_with_one_warning(write, named, call):
    """Each call starts from the state of the model. The block warns once and names the place, at its end at the latest."""
    model, x = Writing(write), torch.randn(7, 4)
    want = copy.deepcopy(model)(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), parallel(model, TWO) as p:
            for _ in range(4):
                assert_close(call(p, x), want)
    (warning,) = caught
    assert re.search(rf"the model wrote .*{named}.* during a call", str(warning.message))


@pytest.mark.parametrize(
    "write",
    [lambda model, x: model.held[0].copy_(x[0]), lambda model, x: model.rows[: len(x)].add_(x)],
    ids=["item", "rows"],
)
@pytest.mark.parametrize("mode", [True, False])
def test_a_tensor_that_differs_between_lanes_is_refused(mode, write):
    """The lanes have different rows, so a tensor that is not a buffer is refused, in both modes and at every call."""
    model, x = Caching(write).train(mode), torch.randn(7, 4)
    model.held, model.rows = [torch.zeros(4)], torch.zeros(9, 4)
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(2):
            with pytest.raises(ReplicaError, match=r"the tensor '(held\[0\]|rows)' was written during a call"):
                model(x)
            assert not model.held[0].any()
            assert not model.rows.any()


class Growing(nn.Linear):
    """Makes a layer or a parameter in each call in which `grows` is set."""

    grows = False

    def __init__(self, make):
        super().__init__(4, 4)
        self.layers, self.make = [], make

    def forward(self, x):
        if Growing.grows:
            self.make(self)
        return super().forward(x)


@CALLS
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: setattr(model, "head", nn.Linear(4, 4)), "head"),
        (lambda model: setattr(model, "scale", nn.Parameter(torch.ones(4))), "scale"),
        (lambda model: model.layers.append(nn.Linear(4, 4)), "layers"),
    ],
    ids=["layer", "parameter", "item"],
)
def test_layers_that_forward_makes_are_refused_at_every_call(make, name, call, monkeypatch):
    """Not only the first call of its kind is checked. The replica stays usable."""
    model, x = Growing(make), torch.randn(7, 4)
    with torch.no_grad(), parallel(model, TWO) as p:
        want = call(p, x)
        for _ in range(2):
            monkeypatch.setattr(Growing, "grows", True)
            with pytest.raises(ReplicaError, match=rf"makes '{name}' in forward"):
                call(p, x)
            monkeypatch.setattr(Growing, "grows", False)
            assert_close(call(p, x), want)


class Returning(nn.Linear):
    """Fills a dict of its own and returns it."""

    def __init__(self):
        super().__init__(4, 4)
        self.outputs = {}

    def forward(self, x):
        self.outputs["y"] = super().forward(x)
        return self.outputs


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
@CALLS
def test_containers_that_forward_fills_and_returns_keep_their_items(call):
    """The model's dict is emptied again, and the output is the caller's."""
    model, x = Returning(), torch.randn(7, 4)
    with torch.no_grad(), parallel(model, TWO) as p:
        outputs = [call(p, x) for _ in range(3)]
    for output in outputs:
        assert_close(output["y"], nn.Linear.forward(model, x))
    assert not model.outputs


class Caching(nn.Module):
    """Keeps a tensor in a buffer."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.write = write

    def forward(self, x):
        self.write(self, x)
        return x + 0


def keeps_rows(model, x):
    model.kept = x.mean(0)


def counts(model, x):
    model.kept.add_(1)


@pytest.mark.parametrize("write", [keeps_rows, lambda model, x: model.kept.copy_(x[0])], ids=["replaced", "in place"])
def test_a_buffer_that_differs_between_lanes_is_refused_in_evaluation_mode(write):
    """Each lane has its own rows. The model keeps its buffer, and in training mode it gets that of lane 0."""
    model, x = Caching(write).eval(), torch.randn(7, 4)
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(2):
            with pytest.raises(ReplicaError, match="the buffer 'kept' was written during a call in evaluation mode"):
                model(x)
            assert not model.kept.any()
        model.train()(x)
        assert model.kept.any()


def test_a_buffer_that_is_equal_in_all_lanes_goes_to_the_model():
    """A count of calls is the same in every lane."""
    model = Caching(counts).eval()
    with torch.no_grad(), parallel(model, TWO):
        for calls in (1.0, 2.0, 3.0):
            model(torch.randn(7, 4))
            assert_close(model.kept, torch.full((4,), calls))


def test_a_buffer_of_a_failed_call_is_not_compared():
    """The error of the lane is raised."""

    def fails(model, x):
        model.kept = x.mean(0)
        if len(x) == 3:
            raise KeyError("mine")

    model = Caching(fails).eval()
    with torch.no_grad(), parallel(model, ["cpu"] * 3), pytest.raises(KeyError, match="mine"):
        model(torch.randn(9, 4)[:7])


@CALLS
@pytest.mark.parametrize("mode", [True, False])
def test_a_buffer_may_get_another_shape_through_data(mode, call):
    """The model gets the buffer of lane 0, and later calls start from it."""

    def grows(model, x):
        model.kept.data = torch.cat([model.kept, torch.ones(1)])

    model = Caching(grows).train(mode)
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        call(p, torch.randn(7, 4))
        model(torch.randn(7, 4))
    assert len(model.kept) >= 5


def test_the_handle_of_a_hook_that_captures_the_model_is_copied():
    """A model that keeps the handle of a hook which is a closure over the model runs in lanes."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = 2
            self.handle = self.layer.register_forward_hook(lambda module, args, output: output * self.scale)

        def forward(self, x):
            return self.layer(x)

    model, x = Hooked(), torch.ones(9, 4)
    plain = model(x)
    with parallel(model, ["cpu", "cpu"]):
        torch.testing.assert_close(model(x), plain)
        model.scale = 3
        torch.testing.assert_close(model(x), plain * 1.5)
