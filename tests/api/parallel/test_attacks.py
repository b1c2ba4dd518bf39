"""Uses of a model that are easy to get wrong in lanes: what forward writes, what it shares, and what changes beside it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from parawrap import parallel
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.calling import Stateful
from tests.helpers.processes import run_script
from tests.helpers.waiting import PATIENCE_S, eventually

TWO = ["cpu"] * 2
put_back = pytest.mark.filterwarnings("ignore::UserWarning")


def writing(write):
    """Return a model that saves one buffer for backward, and calls `write`."""
    buffers = {"scale": torch.randn(4), "steps": torch.zeros(())}
    run = lambda self, x: (write(self), (x * self.weight * self.scale).tanh())[1]  # noqa: E731
    return Stateful(run, buffers, weight=nn.Parameter(torch.randn(4)))


DISCRIMINATORS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "in place": lambda: writing(lambda self: self.steps.add_(1)),
    "assigned": lambda: writing(lambda self: setattr(self, "scale", self.scale.clone())),
}


@put_back
@pytest.mark.parametrize("name", DISCRIMINATORS)
def test_two_forwards_one_backward(name):
    """As in a GAN. Each lane computes as a copy of the model does, and the model keeps what lane 0 writes in place."""
    model = DISCRIMINATORS[name]().double()
    copies, xs = [copy.deepcopy(model) for _ in TWO], torch.randn(2, 8, 4, dtype=torch.float64, requires_grad=True)
    expected = [torch.cat([each(part) for each, part in zip(copies, x.split(4), strict=True)]) for x in xs]
    (gradient,) = torch.autograd.grad(expected[0].square().sum() * expected[1].sin().sum(), xs)
    with parallel(model, TWO, out_dims=0):
        first, second = model(xs[0]), model(xs[1])
        with torch.no_grad():
            model(xs[0])
            copies[0](xs[0][:4])
        assert_close([first, second], expected)
        assert_close(torch.autograd.grad(first.square().sum() * second.sin().sum(), xs), (gradient,))
    assert_close(dict(model.state_dict()), dict(copies[0].state_dict()))


@put_back
@torch.no_grad()
def test_hooks_of_all_modules():
    """A hook of all modules writes to a model that by itself writes nothing."""
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    model[0].register_buffer("calls", torch.zeros(()))

    def write(module, args, output):
        for buffer in module.buffers(recurse=False):
            buffer.add_(1)

    hook = register_module_forward_hook(write)
    try:
        with parallel(model, TWO, out_dims=0) as p:
            assert_close([model(torch.ones(8, 4)) for _ in range(2)], [model[0](torch.ones(8, 4)) for _ in range(2)])
            assert p.stats().shards == (4, 4)
    finally:
        hook.remove()
    assert model[0].calls == 2, "of the two plain calls of the layer"


WHOLE = {
    "map": lambda p, xs: list(p.map(xs)),
    "submit": lambda p, xs: [future.result(PATIENCE_S) for future in [p.submit(x) for x in xs]],
}


@put_back
@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("grad", [True, False])
def test_streams_give_nothing_back(way, grad):
    """Not even in training mode, in whichever lane a batch runs. Each batch starts from the buffers of the model."""

    class Counting(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + self.num_batches_tracked

    model = Counting(4)
    before, xs = copy.deepcopy(model.state_dict()), [*torch.randn(12, 5, 4)]
    with torch.set_grad_enabled(grad), parallel(model, TWO) as p:
        outputs = WHOLE[way](p, xs)
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert_close(outputs, [Counting(4)(x) for x in xs])


class Swapping(nn.Linear):
    """Computes with the signs of its weight, which it swaps in for the time of the call."""

    def forward(self, x):
        whole = self.weight.data
        self.weight.data = whole.sign()
        y = super().forward(x)
        self.weight.data = whole
        return y


class Overwriting(nn.Linear):
    def forward(self, x):
        whole = self.sign()
        y = super().forward(x)
        self.weight.data.copy_(whole)
        return y

    def sign(self):
        whole = self.weight.data.clone()
        self.weight.data.sign_()
        return whole


@pytest.mark.parametrize("cls", [Swapping, Overwriting])
def test_data_swapped_in_forward(cls):
    """Lanes share weights, so they take turns, and so do the batches of a stream."""
    model, x = cls(200, 200, bias=False), torch.randn(64, 200)
    weight, expected = model.weight.detach().clone(), x @ model.weight.detach().sign().T
    with torch.no_grad(), parallel(model, TWO, out_dims=0) as p:
        outputs = [model(x) for _ in range(20)]
        whole = list(p.map([x] * 40))
        assert p.stats().shards == (32, 32)
    assert_close([*outputs, *whole], [expected] * 60)
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_max_norm(cls, grad):
    """Their forward shrinks rows of the shared weight, as a plain call does."""
    model, ids = cls(50, 64, max_norm=1.0), torch.randint(0, 50, (64, 3))
    plain = copy.deepcopy(model)
    with torch.set_grad_enabled(grad), parallel(model, TWO, out_dims=0) as p:
        expected = plain(ids)
        for _ in range(10):
            assert_close(model(ids), expected)
            assert_close(list(p.map([ids] * 4)), [expected] * 4)
            with torch.no_grad():
                model.weight.copy_(plain.weight * 3)
        assert p.stats().shards == (32, 32)
        assert_close(model(ids), expected)
    assert_close(model.weight[ids], plain.weight[ids])


@torch.no_grad()
def test_variables_bound_anew():
    """A number and a module of a function's closure."""
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


@put_back
@torch.no_grad()
def test_writes_without_a_version():
    """The function batch_norm writes its buffers without a new version."""
    run = lambda self, x: functional.batch_norm(x, self.mean, self.var, training=self.learns)  # noqa: E731
    model, x = Stateful(run, {"mean": torch.zeros(4), "var": torch.ones(4)}), torch.randn(8, 4)
    with parallel(model, TWO, out_dims=0):
        for _ in range(3):
            model.learns = True
            model(x * 3 + 1)
            model.learns = False
            assert_close(model(x), functional.batch_norm(x, model.mean, model.var))


def note_a_loss(self, x):
    self.aux = (x * self.weight).mean()
    return x * self.weight


@pytest.mark.parametrize("is_buffer", [True, False])
def test_losses_kept_by_forward(is_buffer):
    """A tensor with a gradient is put back as any other, with a warning, and is never one lane's."""
    weight, old = nn.Parameter(torch.randn(4)), torch.zeros(())
    model = Stateful(note_a_loss, {"aux": old} if is_buffer else None, weight=weight)
    model.aux = old

    def use():
        with parallel(model, TWO, out_dims=0):
            model(torch.ones(8, 4)).sum().backward()

    (message,) = warnings_of(use)
    assert "aux" in message
    assert model.aux is old
    assert_close(model.weight.grad, torch.full((4,), 8.0))


@pytest.mark.parametrize("rows", [1, 8], ids=["plain", "cut"])
def test_calls_from_a_helper_thread(tmp_path, rows):
    """A plain call of the model waits for a thread that calls the model."""
    script = f"""
        import threading, torch
        from parawrap import parallel
        class Helped(torch.nn.Linear):
            def forward(self, x):
                if (x == 7).all():
                    x, found = torch.ones({rows}, 4), []
                    helper = threading.Thread(target=lambda: found.append(self(x)), daemon=True)
                    helper.start()
                    helper.join()
                    return found[0][:1]
                return super().forward(x)
        model = Helped(4, 2)
        plain = model(torch.full((1, 4), 7.0))
        with parallel(model, ["cpu"] * 2, out_dims=0):
            print(torch.allclose(model(torch.full((1, 4), 7.0)), plain))
    """
    assert run_script(tmp_path, script, patience_s=40) == "True\n"


def test_blocks_dropped_open():
    """The model can be freed, and the lanes end."""
    before, model = {*threading.enumerate()}, nn.Linear(4, 4)
    alive, p = weakref.ref(model), parallel(model, TWO, out_dims=0).__enter__()
    with torch.no_grad():
        model(torch.ones(8, 4))
        p.submit(torch.ones(8, 4)).result(PATIENCE_S)
    del model, p
    eventually(lambda: gc.collect() is None or alive() is None, "the end of the model")
    eventually(lambda: {*threading.enumerate()} <= before, "the end of the lanes")


def test_changes_under_a_stream():
    """It shows no attribute that is set before it ends."""
    model, outputs = Stateful(lambda self, x: x + self.add, add=10.0), []
    with torch.no_grad(), parallel(model, TWO) as p:
        for output in p.map([torch.ones(2, 1)] * 40):
            outputs.append(output[0].item())
            model.add = 20.0
        assert outputs == [11.0] * 40
        assert p.submit(torch.ones(2, 1)).result(PATIENCE_S)[0].item() == 21
