"""Subclasses of DataParallel, written as packages write subclasses of torch's class, work with the import changed."""

from __future__ import annotations

import copy
import threading
from itertools import chain

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ShardError, parallel_apply, scatter_kwargs
from tests.helpers.calling import Calls
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
VERBS = ["scatter", "replicate", "parallel_apply", "gather"]
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def assert_trains_like(net, plain, x):
    """Compare outputs, and weights after steps of an optimizer, with those of the plain model."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, plain)]
    for _ in range(3):
        outputs = []
        for each, optimizer in zip((net, plain), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(each(x))
            outputs[-1].square().sum().backward()
            optimizer.step()
        assert_close(*outputs)
    assert_close([*net.parameters()], [*plain.parameters()])


def passing(verb):
    """Return a subclass whose verb calls the parent's."""
    return type("Passing", (DataParallel,), {verb: lambda self, *args: getattr(DataParallel, verb)(self, *args)})


@pytest.mark.parametrize("on_instance", [False, True], ids=["class", "instance"])
def test_overridden_verbs_are_used(on_instance):
    """Each call uses the four verbs in order, of a subclass or set on an instance."""
    called = []

    def recording(verb):
        def run(*args):
            called.append(verb)
            return getattr(DataParallel, verb)(*args)

        return run

    kind = DataParallel if on_instance else type("Mine", (DataParallel,), {verb: recording(verb) for verb in VERBS})
    net = kind(nn.Linear(4, 2), TWO)
    if on_instance:
        for verb in VERBS:
            setattr(net, verb, recording(verb).__get__(net))
    x = torch.randn(5, 4)
    assert_close(net(x), net.module(x))
    assert called == VERBS


class Apart(DataParallel):
    """Does not join outputs."""

    def gather(self, outputs, output_device):
        return outputs


class Criterion(DataParallel):
    """Takes outputs that are still apart, cuts the targets, and runs a replica of the loss in a thread per device."""

    def forward(self, inputs, *targets, **kwargs):
        targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        losses = [None] * len(inputs)

        def work(i):
            losses[i] = replicas[i](inputs[i], *targets[i], **kwargs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return torch.stack(losses).mean()


@pytest.mark.parametrize("devices", [TWO, THREE], ids=len)
def test_loss_in_each_lane(devices):
    model = mlp()
    plain = copy.deepcopy(model)
    net, criterion = Apart(model, devices), Criterion(nn.CrossEntropyLoss(), devices)
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    for _ in range(2):
        model.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    assert_close(loss, expected)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class SharedNorm(nn.Module):
    """Normalizes by the mean of all devices; a callback connects its replicas."""

    board = None
    number = None

    def connect(self, board, number):
        self.board, self.number = board, number

    def forward(self, x):
        if self.board is None:
            return x - x.mean(0)
        sums, barrier = self.board
        sums[self.number] = x.sum(0), len(x)
        barrier.wait(PATIENCE_S)
        total = sum(part for part, _ in sums.values()) / sum(count for _, count in sums.values())
        barrier.wait(PATIENCE_S)
        return x - total


class Connected(DataParallel):
    """Connects the replicas of each module after they are made."""

    def replicate(self, module, device_ids):
        replicas = super().replicate(module, device_ids)
        board = {}, threading.Barrier(len(replicas))
        for number, replica in enumerate(replicas):
            for each in replica.modules():
                if hasattr(each, "connect"):
                    each.connect(board, number)
        return replicas

    def parallel_apply(self, replicas, inputs, kwargs):
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])


@pytest.mark.parametrize("devices", [TWO, THREE], ids=len)
def test_callbacks_connect_replicas(devices):
    """Synchronized norms see the whole batch."""
    model = nn.Sequential(nn.Linear(4, 3), SharedNorm())
    assert_trains_like(Connected(model, devices), copy.deepcopy(model), torch.randn(7, 4))
    assert model[1].board is None


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.tensor(10.0))
        self.number, self.seen = None, 0

    def forward(self, x):
        self.seen += len(x)
        return x * 0 + self.offset + 100 * self.number


class Marked(DataParallel):
    """Gives each replica an attribute, and a tensor in place of a buffer, and reads replicas after the call."""

    def replicate(self, module, device_ids):
        self.replicas = super().replicate(module, device_ids)
        for number, replica in enumerate(self.replicas):
            replica.number = number
            replica.offset = module.offset + number
        return self.replicas


def test_replicas_can_be_marked():
    """What `replicate` sets on replicas is used; what their forward sets can be read; the module keeps its values."""
    model = Offset()
    net = Marked(model, TWO)
    for _ in range(3):
        assert net(torch.zeros(3)).tolist() == [10, 10, 111]
        assert [replica.seen for replica in net.replicas] == [2, 1]
    assert (model.offset.item(), model.number, model.seen) == (10, None, 0)


class Persistent(DataParallel):
    """Makes replicas once and uses them in all calls."""

    kept = ()

    def replicate(self, module, device_ids):
        self.kept = self.kept or super().replicate(module, device_ids)
        return self.kept[: len(device_ids)]


@pytest.mark.parametrize("make", [mlp, lambda: nn.LazyLinear(2)], ids=["mlp", "lazy"])
def test_subclass_may_keep_replicas(make):
    """Kept replicas follow the optimizer, and their gradients reach the module."""
    model = make()
    net = Persistent(model, TWO)
    x = torch.randn(6, 4)
    net(x)  # the first call gives a lazy layer its shape
    assert_trains_like(net, copy.deepcopy(model), x)


@pytest.mark.parametrize("verb", ["replicate", "parallel_apply"])
def test_buffers_and_draws(verb):
    """The statistics of the first shard reach the module, and lanes draw in order, also after a call in eval mode."""
    model = nn.BatchNorm1d(4)
    first, x = copy.deepcopy(model), torch.randn(9, 4)
    net = passing(verb)(model, TWO)
    for _ in range(2):
        net(x)
        first(x[:5])
    assert_close(dict(model.state_dict()), dict(first.state_dict()))
    net = passing(verb)(nn.Dropout(0.5), TWO)
    x = torch.ones(16, 16, requires_grad=True)
    net.eval()
    net(x)
    net.train()
    torch.manual_seed(0)
    expected = torch.cat([nn.functional.dropout(part) for part in x.split(8)])
    for _ in range(3):
        torch.manual_seed(0)
        assert torch.equal(net(x), expected)


class Graph:
    """A graph: a tensor of nodes, of any number."""

    def __init__(self, nodes):
        self.nodes = nodes

    @classmethod
    def of(cls, graphs):
        return cls(torch.cat([graph.nodes for graph in graphs]))


class ListOfGraphs(DataParallel):
    """Takes a list of graphs, with its own scatter of two arguments, as PyTorch Geometric's class does."""

    def forward(self, graphs):
        if not self.device_ids or len(self.device_ids) == 1:
            return self.module(Graph.of(graphs))
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            assert tensor.device == self.src_device_obj
        inputs = self.scatter(graphs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

    def scatter(self, graphs, device_ids):
        size = -(-len(graphs) // len(device_ids))
        return [Graph.of(graphs[i : i + size]) for i in range(0, len(graphs), size)]


@pytest.mark.parametrize("devices", [None, ["cpu"], TWO, THREE], ids=str)
def test_list_of_graphs(devices):
    """Nodes keep their order, also with fewer graphs than devices."""
    net = ListOfGraphs(Calls(lambda graph: graph.nodes * 2), devices)
    for count in (5, 2, 1):
        graphs = [Graph(torch.randn(nodes, 4)) for nodes in range(1, count + 1)]
        assert_close(net(graphs), net.module(Graph.of(graphs)))


class Container:
    """A batch that is a list of chunks, one per device."""

    def __init__(self, chunks):
        self.chunks = chunks


class Unpacking(DataParallel):
    """Unpacks containers in `scatter`, also on the CPU as device -1, as mmcv's class does."""

    def forward(self, *inputs, **kwargs):
        if not self.device_ids:
            inputs, kwargs = self.scatter(inputs, kwargs, [-1])
            return self.module(*inputs[0], **kwargs[0])
        return super().forward(*inputs, **kwargs)

    def scatter(self, inputs, kwargs, device_ids):
        if any(isinstance(value, Container) for value in inputs):
            chunks = zip(*(value.chunks for value in inputs), strict=True)
            return tuple(chunks), tuple(dict(kwargs) for _ in inputs[0].chunks)
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)


@no_accelerator
@pytest.mark.parametrize("devices", [None, ["cpu"], TWO], ids=str)
def test_containers_are_unpacked(devices):
    x = torch.randn(5, 4)
    net = Unpacking(nn.Linear(4, 2), device_ids=devices)
    assert_close(net(Container([x[:2], x[2:]] if devices == TWO else [x])), net.module(x))
    assert_close(net(x), net.module(x))


class Lists(DataParallel):
    """Cuts lists of images with their names, and leaves other calls to the base class."""

    def scatter(self, inputs, kwargs, device_ids):
        if not inputs or not isinstance(inputs[0], list):
            return super().scatter(inputs, kwargs, device_ids)
        size = -(-len(inputs[0]) // len(device_ids))
        starts = range(0, len(inputs[0]), size)
        _, kwargs = super().scatter((), kwargs, device_ids[: len(starts)])  # one entry per device, as in torch
        return [tuple(value[i : i + size] for value in inputs) for i in starts], kwargs

    def gather(self, outputs, output_device):
        if type(outputs[0]) is not list:
            return super().gather(outputs, output_device)
        return [item for output in outputs for item in output]


def test_lists_of_images():
    def detect(images, names=None, *, scale=1):
        if isinstance(images, torch.Tensor):
            return images + scale
        return [{"size": image.shape, "name": name * scale} for image, name in zip(images, names, strict=True)]

    net = Lists(Calls(detect), TWO)
    images = [torch.zeros(3, size) for size in (4, 2, 7, 5, 1)]
    assert net(images, list("abcde"), scale=2) == detect(images, list("abcde"), scale=2)
    assert net(torch.zeros(5)).tolist() == [1] * 5
    assert net(images=torch.zeros(3)).tolist() == [1] * 3


def test_scatter_may_return_nothing():
    """For a call without arguments, the module runs once, as in torch."""

    class Empty(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return (), ()

    assert Empty(Calls(lambda: torch.ones(2)), TWO)().tolist() == [1, 1]


@pytest.mark.parametrize(("parts", "kwargs", "found"), [(1, 2, "1 inputs"), (3, 3, "3 inputs")])
def test_other_part_counts_are_refused(parts, kwargs, found):
    class Wrong(DataParallel):
        def scatter(self, inputs, _, device_ids):
            return [(inputs[0],)] * parts, [{}] * kwargs

    with pytest.raises(ShardError, match=found):
        Wrong(nn.Linear(4, 2), TWO)(torch.zeros(4, 4))


class Encoders(DataParallel):
    """Runs another method of the replicas, and itself on each device."""

    def encode(self, *inputs, **kwargs):
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply([replica.encode for replica in replicas], inputs, kwargs)
        return self.gather(outputs, self.output_device)

    def evaluate(self, inputs):
        replicas = self.replicate(self, self.device_ids[: len(inputs)])
        return self.parallel_apply(replicas, [(x.unsqueeze(0),) for x in inputs], [{}] * len(inputs))


@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE], ids=len)
def test_other_methods_in_the_lanes(devices):
    class Encoder(nn.Linear):
        def encode(self, x, scale=1.0):
            return self(x).tanh() * scale

    net = Encoders(Encoder(4, 2), devices)
    x = torch.randn(7, 4)
    for _ in range(2):
        assert_close(net.encode(x, scale=2.0), net.module.encode(x, scale=2.0))
        assert_close(net(x), net.module(x))
        rows = x[: len(devices)]
        assert_close(torch.cat(net.evaluate(rows)), net.module(rows))


@no_accelerator
@pytest.mark.parametrize("device_ids", [None, range(2), [0]], ids=str)
def test_verbs_without_devices(device_ids):
    """On a machine without accelerators, a subclass may call the methods with devices that it names itself."""
    net = DataParallel(nn.Linear(4, 2), device_ids)
    x = torch.randn(4, 4)
    inputs, kwargs = net.scatter((x,), None, [-1, "cpu"])
    outputs = net.parallel_apply(net.replicate(net.module, TWO), inputs, kwargs)
    assert_close(net.gather(outputs, -1), net.module(x))
