"""What forward writes: put back with one warning, given back from lane 0 in training mode, in
turns, or refused.
"""

from __future__ import annotations

import copy
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from parawrap import ReplicaError, parallel, tuple_fn
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.calling import Stateful
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
put_back = pytest.mark.filterwarnings("ignore::UserWarning")


def stateful(run):
    buffers = {"mean": torch.zeros(()), "table": torch.ones(2)}
    return Stateful(run, buffers, count=0, norm=nn.BatchNorm1d(2))


UNEQUAL = {
    "in place": lambda self, x: self.table.add_(x[0]),
    "assigned": lambda self, x: setattr(self, "table", x[0]),
    "an entry per row": lambda self, x: setattr(self, "table", x.clone()),
}


@torch.no_grad()
@pytest.mark.parametrize("write", UNEQUAL)
def test_eval_refuses_row_caches(write):
    """A cache with one entry per row is refused at every call. The model keeps its buffer, and
    later calls that write none are right.
    """
    writes, x = [True], torch.arange(14.0).view(7, 2)
    model = stateful(lambda self, x: (writes and UNEQUAL[write](self, x), x + self.table)[1]).eval()
    with parallel(model, TWO, out_dims=0):
        for _ in range(2):
            with pytest.raises(ReplicaError, match="table"):
                model(x)
            assert torch.equal(model.table, torch.ones(2))
        writes.clear()
        assert torch.equal(model(x), x + 1)


@put_back
@torch.no_grad()
@pytest.mark.parametrize("answer", ["__len__", "__bool__"])
def test_targets_that_are_false(answer):
    """An object around listed layers is watched, also if it says that it is empty or false."""

    def call(self, x):
        self.calls += 1
        return self.net(x) + self.calls

    empty = {"__len__": lambda _: 0, "__bool__": lambda _: False}[answer]
    counter = type("Counter", (), {"__call__": call, answer: empty})()
    counter.net, counter.calls = nn.Identity(), 0
    with parallel(counter, TWO, out_dims=0) as p:
        for _ in range(3):
            assert torch.equal(p(torch.zeros(4)), torch.ones(4))


@put_back
@torch.no_grad()
@pytest.mark.parametrize("answer", ["__len__", "__bool__"])
@pytest.mark.parametrize("kind", [dict, list])
def test_containers_that_are_false(kind, answer):
    """An entry shows in a container that says that it is empty: that of forward is put back, and
    lanes get that of the caller.
    """
    empty = {"__len__": lambda _: 0, "__bool__": lambda _: False}[answer]
    entries = type("Entries", (kind,), {answer: empty})()

    def add(found):
        found.update({len([*found]): 1}) if kind is dict else found.append(1)

    def run(self, x):
        add(self.entries)
        return x + len([*self.entries])

    model = Stateful(run, {}, entries=entries).eval()
    with parallel(model, TWO, out_dims=0):
        for count in (1, 2):
            for _ in range(2):
                assert torch.equal(model(torch.zeros(4)), torch.full((4,), float(count)))
            add(entries)


@pytest.mark.parametrize("grad", [True, False])
def test_training_keeps_lane_0(grad):
    """In training mode, the writes of lane 0 into buffers reach the model, in place and without a
    warning. The next call starts from them in every lane.
    """

    def run(self, x):
        y = self.norm(x) * self.weight + self.mean
        self.mean.mul_(0.5).add_(x.detach().mean())
        return y

    model = stateful(run)
    model.weight = nn.Parameter(torch.ones(2))
    plain, mean = copy.deepcopy(model), model.mean
    with torch.set_grad_enabled(grad), parallel(model, TWO, out_dims=0):
        for _ in range(3):
            x = torch.randn(8, 2)
            expected = torch.cat([copy.deepcopy(plain)(part) for part in x.split(4)])
            assert_close(model(x), expected)
            plain(x[:4])
            assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert model.mean is mean


def test_training_puts_back_others():
    """In training mode, buffers that forward assigns, and attributes, are put back, though all
    lanes wrote the same.

    A loss is as any other tensor.
    """

    def run(self, x):
        self.count += len(x)
        self.table = torch.full((2,), float(self.count))
        self.loss = (x * self.weight).mean()
        return self.norm(x) + self.table + 0 * self.loss

    model = stateful(run)
    model.weight = nn.Parameter(torch.ones(2))
    table, loss = model.table, torch.zeros(())
    model.loss = loss

    def use():
        with parallel(model, TWO, out_dims=0):
            for _ in range(2):
                model(torch.randn(8, 2)).sum().backward()

    (message,) = warnings_of(use)
    assert [name for name in ("count", "table", "loss") if name not in message] == []
    assert (model.table is table, model.loss is loss) == (True, True)
    assert (model.count, table.tolist()) == (0, [1, 1])
    assert model.norm.num_batches_tracked == 2, "another module's writes in place come back"


@torch.no_grad()
@pytest.mark.parametrize("before", [torch.ones(2), torch.zeros(()), [0]], ids=repr)
def test_values_replaced_by_empty_containers(before):
    """They are put back with a warning. A tensor of several elements is neither true nor false."""
    model = Stateful(lambda self, x: (setattr(self, "kept", []), x)[1], {}, kept=before).eval()

    def use():
        with parallel(model, TWO, out_dims=0):
            model(torch.ones(8, 2))

    (message,) = warnings_of(use)
    assert "'kept'" in message
    assert model.kept is before


def average(self, x):
    self.total += x.sum()
    self.rows += len(x)
    return x - self.total / self.rows


def average_of_held(self, x):
    self.total.add_(x.sum())
    self.held.deep.rows += len(x)
    return x - self.total / self.held.deep.rows


@torch.no_grad()
def test_training_refuses_halves():
    """A module writes a buffer in place and an attribute.

    The cure is to make the attribute a buffer.
    """
    layer, x = Stateful(average, {"total": torch.zeros(())}, rows=0), torch.arange(8.0)[:, None]
    with parallel(model := nn.Sequential(layer), TWO, out_dims=0):
        for _ in range(2):
            with pytest.raises(ReplicaError, match=r"rows.*buffer"):
                model(x)
    assert (layer.total, layer.rows) == (0, 0)
    # The attribute may be that of an object in the module
    held = types.SimpleNamespace(deep=types.SimpleNamespace(rows=0))
    layer = Stateful(average_of_held, {"total": torch.zeros(())}, held=held)
    with (
        parallel(model := nn.Sequential(layer), TWO, out_dims=0),
        pytest.raises(ReplicaError, match=r"held\.deep\.rows.*buffer"),
    ):
        model(x)
    assert (layer.total, held.deep.rows) == (0, 0)
    layer = Stateful(average, {"total": torch.zeros(()), "rows": torch.zeros(())})
    with parallel(model := nn.Sequential(layer), TWO, out_dims=0):
        for calls in (1, 2):
            model(x)
            assert (layer.total, layer.rows) == (6 * calls, 4 * calls)


def rope(self, x):
    """A buffer and a number belong together, as in models with dynamic rotary embeddings."""
    length = x.shape[1]
    if length > self.longest:
        self.longest, self.scale = length, torch.full((1,), 4.0 / length)
    elif length < 4 < self.longest:
        self.longest, self.scale = 4, torch.ones(1)
    return x.sum(1) * self.scale


@put_back
@torch.no_grad()
@pytest.mark.parametrize("train", [False, True])
def test_rope_tables_stay_whole(train):
    model = Stateful(rope, {"scale": torch.ones(1)}, longest=4).train(train)
    xs = [torch.ones(6, length) for length in (3, 40, 3, 40, 3)]
    expected = [x.sum(1) if x.shape[1] < 4 else torch.full((6,), 4.0) for x in xs]
    with parallel(model, TWO, out_dims=0) as p:
        assert_close([model(x) for x in xs], expected)
        assert_close(list(p.map(xs)), expected)
    assert (model.longest, model.scale) == (4, 1)
    assert_close([model(x) for x in xs], expected)


def test_activations_for_backward():
    """A forward hook keeps the input on its layer for a backward hook, as K-FAC and per-sample
    gradients do.
    """
    model, found = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), []
    x = torch.randn(8, 2, requires_grad=True)
    for index in (0, 2):
        model[index].register_forward_hook(
            lambda module, args, out: setattr(module, "activations", args[0].detach())
        )
        model[index].register_full_backward_hook(
            lambda module, into, out: found.append((module.in_features, module.activations, out[0]))
        )

    def per_sample():
        found.clear()
        model.zero_grad()
        (model(x) * x[:, :1].detach()).sum().backward()
        rows = {
            width: [a[..., None] * g[:, None] for size, a, g in found if size == width]
            for width in (2, 3)
        }
        return [torch.cat(each).sum(0).T for each in rows.values()], model[0].weight.grad

    plain = per_sample()
    assert_close(plain[0][0], plain[1])

    def use():
        with parallel(model, TWO, out_dims=0):
            for _ in range(3):
                assert_close(per_sample(), plain)
                assert len(found) == 4

    (message,) = warnings_of(use)
    assert "activations" in message


class Slow:
    """Keeps its batch on itself while it works, as tokenizers and feature extractors do."""

    def __call__(self, batch):
        self.x = batch * 2
        time.sleep(0.002)
        return self.x


class SlowModel(nn.Module, Slow):
    """The same as a model."""

    forward = Slow.__call__
    __call__ = nn.Module.__call__

    def prepare(self, batch):
        return Slow.__call__(self, batch)


@put_back
@torch.no_grad()
@pytest.mark.parametrize("kind", ["object", "its method", "method of the model"])
def test_lanes_copy_prepare(kind):
    """A method of the model is the replica's."""
    model = SlowModel()
    prepare = {
        "object": Slow(),
        "its method": Slow().__call__,
        "method of the model": model.prepare,
    }[kind]
    with parallel(model, TWO) as p:
        outputs = list(p.map([torch.full((1,), float(i)) for i in range(60)], prepare=prepare))
    assert [output.item() for output in outputs] == [4.0 * i for i in range(60)]
    assert "x" not in vars(model)


@put_back
@torch.no_grad()
@pytest.mark.parametrize("make", [Slow, SlowModel])
def test_tuple_fn_copies_functions(make):
    run, parts = tuple_fn(make(), parallel=True, devices=TWO), (torch.ones(1), torch.ones(1) * 2)
    assert [[out.item() for out in run(parts)] for _ in range(30)] == [[2.0, 4.0]] * 30


@put_back
@torch.no_grad()
def test_plain_calls_take_turns_over_workers():
    """Plain calls of several threads take turns, also next to a stream."""
    model, start = SlowModel(), threading.Barrier(4)

    @torch.no_grad()
    def call(index):
        start.wait(PATIENCE_S)
        return [model(torch.full((1, 1), float(index))).item() for _ in range(10)]

    with parallel(model, TWO, workers="process") as p, ThreadPoolExecutor(4) as threads:
        found = threads.map(call, range(4))
        whole = [
            output.item() for output in p.map([torch.full((1, 1), float(i)) for i in range(20)])
        ]
        assert list(found) == [[2.0 * index] * 10 for index in range(4)]
    assert whole == [2.0 * i for i in range(20)]


class Attached(nn.Module):
    """A module like a LightningModule: it refers to its trainer, and its copies do not."""

    def __init__(self, trainer):
        super().__init__()
        self.layer, self.trainer = nn.Linear(4, 2), trainer

    def forward(self, x):
        return self.layer(x)

    def __getstate__(self):
        return {**vars(self), "trainer": None}


def test_what_copies_leave_out_is_not_copied():
    """`__getstate__` replaces an attribute by None. Its value could not be copied."""
    model, rows = Attached(iter("batches")), torch.randn(6, 4)
    plain = model(rows)
    with parallel(model, ["cpu"] * 2, out_dims=0):
        assert torch.equal(model(rows), plain)


@torch.no_grad()
def test_methods_among_defaults():
    """A hook has a method of a layer as a default. In each lane, it is that of the lane's layer."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), set()

    def note(module, args, output, run=model[0].forward):
        seen.add(id(run.__self__))

    model[1].register_forward_hook(note)
    with parallel(model, TWO, out_dims=0):
        model(torch.ones(8, 4))
        assert len(seen - {id(model[0])}) == 2


@torch.no_grad()
def test_weak_proxies_are_shared():
    """Lanes share a weak proxy of an object that is no module. Weak references to modules are
    refused.
    """

    class Config:
        scale = 2

    config = Config()
    model = Stateful(lambda self, x: x * self.config.scale, config=weakref.proxy(config))
    with parallel(model, TWO, out_dims=0):
        assert_close(model(torch.ones(4, 2)), torch.full((4, 2), 2.0))
        config.scale = 3
        assert_close(model(torch.ones(4, 2)), torch.full((4, 2), 3.0))


class Rebuilt(nn.Module):
    """A module whose ``__deepcopy__`` makes one of its modules anew, as feature graphs of
    torchvision do.
    """

    def __init__(self, layer):
        super().__init__()
        self.between = nn.Module()
        self.between.layer = layer

    def forward(self, x):
        return self.between.layer(x)

    def __deepcopy__(self, memo):
        made = memo[id(self)] = Rebuilt(copy.deepcopy(self.between.layer, memo))
        return made.train(self.training)


def test_a_deepcopy_may_make_bare_modules():
    model, rows = Rebuilt(nn.Linear(4, 2)), torch.randn(6, 4)
    plain = model(rows)
    with parallel(model, ["cpu"] * 2, out_dims=0):
        model(rows).sum().backward()
        assert torch.allclose(model(rows), plain)
    assert torch.allclose(model.between.layer.bias.grad, torch.full((2,), 6.0))


def writing(write):
    """Return a model that saves one buffer for backward, and calls `write`."""
    buffers = {"scale": torch.randn(4), "steps": torch.zeros(())}
    run = lambda self, x: (write(self), (x * self.weight * self.scale).tanh())[1]  # noqa: E731
    return Stateful(run, buffers, weight=nn.Parameter(torch.randn(4)))


DISCRIMINATORS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)
    ),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "in place": lambda: writing(lambda self: self.steps.add_(1)),
    "assigned": lambda: writing(lambda self: setattr(self, "scale", self.scale.clone())),
}


@put_back
@pytest.mark.parametrize("name", DISCRIMINATORS)
def test_two_forwards_one_backward(name):
    """Two forwards precede one backward, as in a GAN. Each lane computes as a copy of the model
    does, and the model keeps what lane 0 writes in place.
    """
    model = DISCRIMINATORS[name]().double()
    copies, xs = (
        [copy.deepcopy(model) for _ in TWO],
        torch.randn(2, 8, 4, dtype=torch.float64, requires_grad=True),
    )
    expected = [
        torch.cat([each(part) for each, part in zip(copies, x.split(4), strict=True)]) for x in xs
    ]
    (gradient,) = torch.autograd.grad(expected[0].square().sum() * expected[1].sin().sum(), xs)
    with parallel(model, TWO, out_dims=0):
        first, second = model(xs[0]), model(xs[1])
        with torch.no_grad():
            model(xs[0])
            copies[0](xs[0][:4])
        assert_close([first, second], expected)
        assert_close(
            torch.autograd.grad(first.square().sum() * second.sin().sum(), xs), (gradient,)
        )
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
            assert_close(
                [model(torch.ones(8, 4)) for _ in range(2)],
                [model[0](torch.ones(8, 4)) for _ in range(2)],
            )
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
    """Streams leave the model as it was, also in training mode, in whichever lane a batch runs.
    Each batch starts from the buffers of the model.
    """

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
        whole = self.weight.data.clone()
        self.weight.data.sign_()
        y = super().forward(x)
        self.weight.data.copy_(whole)
        return y


@pytest.mark.parametrize(("training", "seen"), [(True, [1, 2, 3]), (False, [1, 1, 1])])
def test_buffers_written_through_data(training, seen):
    """Writes through .data of buffers follow the rules of other writes, although torch counts no
    version.
    """

    def count(model, x):
        model.calls.data += 1
        return x + model.calls

    model = Stateful(count, {"calls": torch.tensor(0)}).train(training)
    with torch.no_grad(), parallel(model, TWO) as p:
        assert_close(
            [p(torch.zeros(5)) for _ in range(3)],
            [torch.full((5,), float(count)) for count in seen],
        )
    assert model.calls == (3 if training else 0)


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
    """The forward of an embedding with max_norm shrinks rows of the shared weight, as a plain call
    does.
    """
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
