"""Subclasses of DataParallel, written as packages write subclasses of torch's class, work with the import changed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from itertools import chain

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, ShardError, data_parallel, gather, parallel_apply, replicate, scatter, scatter_kwargs

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
scalars = pytest.mark.filterwarnings("ignore:the module returned 0-d tensors")


def assert_same_step(net, plain, x):
    """Assert that outputs and gradients of two calls equal those of the plain model."""
    for _ in range(2):
        plain.zero_grad()
        net.zero_grad()
        output, expected = net(x), plain(x)
        assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


# -- Outputs stay apart, and the loss runs on each device ------------------------------------------------------------------


class Apart(DataParallel):
    """Does not join outputs."""

    def gather(self, outputs, output_device):
        return outputs


class Criterion(DataParallel):
    """Takes outputs that are still apart, cuts the targets, and runs a replica of the loss in a thread per device."""

    def forward(self, inputs, *targets, **kwargs):
        if not self.device_ids:
            return self.module(inputs, *targets, **kwargs)
        targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            return self.module(inputs[0], *targets[0], **kwargs[0])
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        losses = [None] * len(inputs)

        def work(i):
            losses[i] = replicas[i](inputs[i], *targets[i], **kwargs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return torch.stack(losses).mean()


@pytest.mark.parametrize("devices", [TWO, THREE, ["cpu"]], ids=len)
def test_a_loss_in_each_lane(devices):
    """A model with outputs that stay apart, and a loss that takes them, train like the plain model."""
    model = mlp()
    plain = copy.deepcopy(model)
    net, criterion = Apart(model, devices), Criterion(nn.CrossEntropyLoss(), devices)
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    for _ in range(2):
        outputs = net(x) if len(devices) > 1 else [net(x)]
        loss = criterion(outputs, y)
        assert_close(loss, nn.functional.cross_entropy(plain(x), y))
        model.zero_grad()
        loss.backward()
    plain.zero_grad()
    nn.functional.cross_entropy(plain(x), y).backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# -- Replicas are changed before they run ----------------------------------------------------------------------------------


class SharedNorm(nn.Module):
    """Normalizes by the mean of all devices; a callback connects its replicas."""

    def __init__(self):
        super().__init__()
        self.number = None
        self.board = None

    def connect(self, board, number):
        self.board, self.number = board, number

    def forward(self, x):
        if self.board is None:
            return x - x.mean(0)
        sums, barrier = self.board
        sums[self.number] = x.sum(0), len(x)
        barrier.wait(20)
        total = sum(part for part, _ in sums.values()) / sum(count for _, count in sums.values())
        barrier.wait(20)
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
def test_replicas_may_be_connected_by_callbacks(devices):
    """Replicas run with the attributes that `replicate` sets: synchronised norms see the whole batch."""
    model = nn.Sequential(nn.Linear(4, 3), SharedNorm())
    net = Connected(model, devices)
    assert_same_step(net, copy.deepcopy(model), torch.randn(7, 4))
    assert model[1].board is None


class Marked(DataParallel):
    """Gives each replica an attribute, and a tensor in place of a buffer."""

    def replicate(self, module, device_ids):
        replicas = super().replicate(module, device_ids)
        for number, replica in enumerate(replicas):
            replica.number = number
            replica.offset = module.offset + number
        return replicas


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.tensor(10.0))
        self.number = None

    def forward(self, x):
        return x * 0 + self.offset + 100 * self.number


def test_attributes_that_replicate_sets_reach_the_call():
    """Values and buffers that an overridden `replicate` sets on replicas are used, in every call."""
    model = Offset()
    net = Marked(model, TWO)
    for _ in range(3):
        assert net(torch.zeros(3)).tolist() == [10, 10, 111]
    assert (model.offset.item(), model.number) == (10, None)


class Watched(DataParallel):
    """Keeps the replicas of a call, and reads them afterwards."""

    def forward(self, *inputs, **kwargs):
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        self.replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(self.replicas, inputs, kwargs), self.output_device)


def test_replicas_can_be_read_after_the_call():
    """Each call has its own replicas, with the values that their forward set."""

    class Counting(nn.Linear):
        seen = 0

        def forward(self, x):
            self.seen += len(x)
            return super().forward(x)

    net = Watched(Counting(4, 2), TWO)
    x = torch.randn(5, 4)
    net(x)
    first = list(net.replicas)
    net(x)
    assert [replica.seen for replica in (*first, *net.replicas)] == [3, 2, 3, 2]
    assert net.module.seen == 0


class Persistent(DataParallel):
    """Makes replicas once and uses them in all calls."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = []

    def replicate(self, module, device_ids):
        if not self.kept:
            self.kept.extend(super().replicate(module, device_ids))
        return self.kept[: len(device_ids)]


def test_a_subclass_may_keep_replicas():
    """Kept replicas on the module's device follow the optimizer, and their gradients reach the module."""
    model = mlp()
    net, plain = Persistent(model, TWO), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    x = torch.randn(6, 4)
    for _ in range(3):
        for each, optimizer in zip((net, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("verb", ["replicate", "parallel_apply"])
def test_batch_norm_with_an_overridden_verb(verb):
    """The statistics of the first shard reach the module, as without the override."""
    mine = type("Mine", (DataParallel,), {verb: lambda self, *args: getattr(DataParallel, verb)(self, *args)})
    model = nn.BatchNorm1d(4)
    first = copy.deepcopy(model)
    net = mine(model, TWO)
    x = torch.randn(9, 4)
    for _ in range(2):
        net(x)
        first(x[:5])
    assert_close(dict(model.state_dict()), dict(first.state_dict()))


@pytest.mark.parametrize("verb", ["replicate", "parallel_apply"])
def test_dropout_with_an_overridden_verb(verb):
    """With gradients, lanes that share a generator draw in lane order, also after a call in eval mode."""
    mine = type("Mine", (DataParallel,), {verb: lambda self, *args: getattr(DataParallel, verb)(self, *args)})
    net = mine(nn.Dropout(0.5), TWO)
    x = torch.ones(16, 16, requires_grad=True)
    net.eval()
    net(x)
    net.train()
    torch.manual_seed(0)
    expected = torch.cat([nn.functional.dropout(part) for part in x.split(8)])
    for _ in range(3):
        torch.manual_seed(0)
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("verb", ["scatter", "replicate", "parallel_apply", "gather"])
def test_a_verb_may_be_replaced_on_an_instance(verb):
    """A function that is set on an instance is used instead of the method."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    method, called = getattr(net, verb), []

    def replaced(*args):
        called.append(verb)
        return method(*args)

    setattr(net, verb, replaced)
    x = torch.randn(5, 4)
    assert_close(net(x), net.module(x))
    assert called == [verb]


# -- Calls are cut in other ways -------------------------------------------------------------------------------------------


class Balanced(DataParallel):
    """Gives the first device fewer rows. Its parallel_apply takes other arguments than torch's."""

    def __init__(self, rows_of_first, *args, **kwargs):
        self.rows_of_first = rows_of_first
        super().__init__(*args, **kwargs)

    def forward(self, *inputs, **kwargs):
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        device_ids = self.device_ids if self.rows_of_first else self.device_ids[1:]
        inputs, kwargs = self.scatter(inputs, kwargs, device_ids)
        replicas = self.replicate(self.module, self.device_ids)
        if not self.rows_of_first:
            replicas = replicas[1:]
        outputs = self.parallel_apply(replicas, device_ids, inputs, kwargs)
        return self.gather(outputs, self.output_device)

    def parallel_apply(self, replicas, device_ids, inputs, kwargs):
        return parallel_apply(replicas, inputs, kwargs, device_ids)

    def scatter(self, inputs, kwargs, device_ids):
        if len(device_ids) < len(self.device_ids):
            return super().scatter(inputs, kwargs, device_ids)
        rest = inputs[0].size(self.dim) - self.rows_of_first
        sizes = [self.rows_of_first, rest // 2, rest - rest // 2]
        return list(zip(*(value.split(sizes) for value in inputs), strict=True)), [dict(kwargs) for _ in sizes]


@pytest.mark.parametrize("rows_of_first", [0, 1, 4])
def test_a_first_device_with_fewer_rows(rows_of_first):
    """A subclass that balances the rows by hand has the plain outputs and gradients."""
    model = mlp()
    assert_same_step(Balanced(rows_of_first, model, THREE), copy.deepcopy(model), torch.randn(8, 4))


class Graph:
    """A graph: a tensor of nodes, of any number."""

    def __init__(self, nodes):
        self.nodes = nodes

    @classmethod
    def of(cls, graphs):
        return cls(torch.cat([graph.nodes for graph in graphs]))

    def to(self, device):
        return Graph(self.nodes.to(device))


class ListOfGraphs(DataParallel):
    """Takes a list of graphs, with its own scatter of two arguments, as PyTorch Geometric's class does."""

    def forward(self, graphs):
        if not self.device_ids or len(self.device_ids) == 1:
            return self.module(Graph.of(graphs))
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            assert tensor.device == self.src_device_obj
        inputs = self.scatter(graphs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, None)
        return self.gather(outputs, self.output_device)

    def scatter(self, graphs, device_ids):
        size = -(-len(graphs) // len(device_ids))
        parts = [graphs[i : i + size] for i in range(0, len(graphs), size)]
        return [Graph.of(part).to(device) for part, device in zip(parts, device_ids, strict=False)]


class NodeModel(nn.Linear):
    def forward(self, graph):
        return super().forward(graph.nodes)


@pytest.mark.parametrize("devices", [None, ["cpu"], TWO, THREE], ids=str)
def test_a_list_of_graphs(devices):
    """Nodes keep their order, also with fewer graphs than devices."""
    net = ListOfGraphs(NodeModel(4, 2), devices)
    for count in (5, 2, 1):
        graphs = [Graph(torch.randn(nodes, 4)) for nodes in range(1, count + 1)]
        assert_close(net(graphs), net.module(Graph.of(graphs)))


class Container:
    """A batch that is a list of chunks, one per device."""

    def __init__(self, chunks):
        self.chunks = chunks


class Unpacking(DataParallel):
    """Unpacks containers in `scatter`, also on the CPU, and has a train_step for one device, as mmcv's class does."""

    def __init__(self, *args, dim=0, **kwargs):
        super().__init__(*args, dim=dim, **kwargs)
        self.dim = dim

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

    def train_step(self, *inputs, **kwargs):
        if not self.device_ids:
            inputs, kwargs = self.scatter(inputs, kwargs, [-1])
            return self.module.train_step(*inputs[0], **kwargs[0])
        assert len(self.device_ids) == 1
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        return self.module.train_step(*inputs[0], **kwargs[0])


class Steps(nn.Linear):
    def train_step(self, x, *, factor):
        return {"loss": self(x).mean() * factor}


@no_accelerator
def test_containers_are_unpacked():
    """Chunks in a container go to their device. Without devices, the subclass scatters to device -1."""
    x = torch.randn(5, 4)
    for devices, chunks in ((TWO, [x[:2], x[2:]]), (["cpu"], [x]), (None, [x])):
        net = Unpacking(Steps(4, 2), device_ids=devices)
        assert_close(net(Container(chunks)), net.module(x))
        assert_close(net(x), net.module(x))
    for devices in (None, ["cpu"]):
        net = Unpacking(Steps(4, 2), device_ids=devices)
        assert_close(net.train_step(x, factor=2)["loss"], net.module(x).mean() * 2)


class Lists(DataParallel):
    """Cuts lists of images with their targets, and leaves other calls to the base class."""

    def scatter(self, inputs, kwargs, device_ids):
        if not inputs or not isinstance(inputs[0], list):
            return super().scatter(inputs, kwargs, device_ids)
        size = -(-len(inputs[0]) // len(device_ids))
        starts = range(0, len(inputs[0]), size)
        return [tuple(value[i : i + size] for value in inputs) for i in starts], [kwargs] * len(starts)

    def gather(self, outputs, output_device):
        return (
            [item for output in outputs for item in output]
            if type(outputs[0]) is list
            else super().gather(outputs, output_device)
        )


def test_lists_of_images_of_different_sizes():
    """A detection-style model gets lists, and the base class cuts the other calls."""

    class Detector(nn.Module):
        def forward(self, images, names=None):
            if isinstance(images, torch.Tensor):
                return images + 1
            return [{"size": image.shape, "name": name} for image, name in zip(images, names, strict=True)]

    net = Lists(Detector(), TWO)
    images = [torch.zeros(3, size) for size in (4, 2, 7, 5, 1)]
    found = net(images, list("abcde"))
    assert found == net.module(images, list("abcde"))
    assert net(torch.zeros(5)).tolist() == [1] * 5
    assert net(images=torch.zeros(3)).tolist() == [1] * 3


class Mixed(DataParallel):
    """Cuts the first argument by hand, and leaves the keyword arguments without rows to the base class."""

    def scatter(self, inputs, kwargs, device_ids):
        parts = [(part,) for part in inputs[0].chunk(len(device_ids))]
        _, kwargs = super().scatter((), kwargs, device_ids[: len(parts)])
        return parts, kwargs


def test_arguments_without_rows_have_one_entry_per_device():
    """As in torch, the base class gives values that it does not cut to every device."""

    class Scaled(nn.Linear):
        def forward(self, x, *, factor):
            return super().forward(x) * factor

    net = Mixed(Scaled(4, 2), TWO)
    x = torch.randn(6, 4)
    assert_close(net(x, factor=2.0), net.module(x, factor=2.0))


@pytest.mark.parametrize("nothing", [((), ()), ([], [])], ids=str)
@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=len)
def test_a_scatter_may_return_nothing_for_a_call_without_arguments(nothing, devices):
    """The module runs once on the first device, as in torch."""

    class Empty(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return nothing

    class Constant(nn.Module):
        def forward(self):
            return torch.ones(2)

    assert Empty(Constant(), devices)().tolist() == [1, 1]


@pytest.mark.parametrize(("parts", "found"), [(1, "1 inputs"), (3, "3 inputs")])
def test_a_scatter_with_other_numbers_of_parts_is_refused(parts, found):
    """Positional and keyword arguments, or more parts than devices, must agree; the error gives the numbers."""

    class Wrong(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return [(inputs[0],)] * parts, [{}] * (2 if parts == 1 else parts)

    with pytest.raises(ShardError, match=found):
        Wrong(nn.Linear(4, 2), TWO)(torch.zeros(4, 4))


# -- Other methods run in the lanes ----------------------------------------------------------------------------------------


class Encoders(DataParallel):
    """Runs another method of the replicas."""

    def encode(self, *inputs, **kwargs):
        if not self.device_ids:
            return self.module.encode(*inputs, **kwargs)
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        if len(self.device_ids) == 1:
            return self.module.encode(*inputs[0], **kwargs[0])
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply([replica.encode for replica in replicas], inputs, kwargs)
        return self.gather(outputs, self.output_device)


@pytest.mark.parametrize("devices", [None, ["cpu"], TWO, THREE], ids=str)
def test_another_method_in_the_lanes(devices):
    """`encode` of each replica gets its rows, next to calls of forward."""

    class Encoder(nn.Linear):
        def encode(self, x, scale=1.0):
            return self(x).tanh() * scale

    net = Encoders(Encoder(4, 2), devices)
    x = torch.randn(7, 4)
    for _ in range(2):
        assert_close(net.encode(x, scale=2.0), net.module.encode(x, scale=2.0))
        assert_close(net(x), net.module(x))


class Evaluator(DataParallel):
    """Replicates itself, and runs its own forward on each device, as the module for multi-scale evaluation does."""

    def forward(self, x):
        return self.module(x) * 2

    def parallel_forward(self, inputs, **kwargs):
        inputs = [(x.unsqueeze(0),) for x in inputs]
        replicas = self.replicate(self, self.device_ids[: len(inputs)])
        return self.parallel_apply(replicas, inputs, [kwargs] * len(inputs))


def test_a_subclass_may_replicate_itself():
    """Replicas of the wrapper run its forward with a replica of the module, also after a call."""
    net = Evaluator(nn.Linear(4, 2), TWO)
    x = torch.randn(2, 4)
    for _ in range(2):
        assert_close(torch.cat(net.parallel_forward(x)), net(x))


def test_a_replica_of_a_used_wrapper_has_its_own_lanes():
    """A call of the replica outside the lanes is cut, and the wrapper's later calls are cut as before."""
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    net = DataParallel(Model(4, 2), TWO)
    x = torch.randn(6, 4)
    net(x)
    replica, _ = replicate(net, TWO)
    for _ in range(2):
        assert_close(replica(x), net(x))
    assert seen == [3] * 10


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_a_used_wrapper_inside_another_one(first):
    """A model that contains a DataParallel can be replicated, whether or not that was called before."""
    inner = DataParallel(nn.Linear(4, 4), TWO)
    outer = DataParallel(nn.Sequential(inner, nn.Tanh()), THREE)
    x = torch.randn(7, 4)
    for net in (inner, outer) if first == "inner" else (outer, inner):
        net(x)
    for _ in range(2):
        assert_close(outer(x), torch.tanh(inner(x)))


def test_a_module_that_leads_back_to_its_wrapper():
    """A module may hold its own wrapper. Both are collected, and the lanes end."""
    model = nn.Linear(4, 2)
    net = DataParallel(model, TWO)
    model.holder = [net]
    x = torch.randn(5, 4)
    for _ in range(2):
        assert_close(net(x), model(x))
    collected = weakref.ref(net)
    del net, model
    gc.collect()
    assert collected() is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


@pytest.mark.parametrize("kind", [DataParallel, Marked, Watched], ids=lambda kind: kind.__name__)
def test_the_lanes_end_with_the_wrapper(kind):
    """Without a cycle, no garbage collection is needed."""
    model = Offset()
    net = kind(model, TWO)
    model.number = 0
    net(torch.zeros(4))
    collected = weakref.ref(net)
    del net
    assert collected() is None


def test_a_lazy_module_with_an_overridden_verb():
    """The first call gives the layer its shape, and later calls are cut."""
    model = nn.LazyLinear(2)
    net = Persistent(model, TWO)
    x = torch.randn(5, 4)
    for _ in range(3):
        assert_close(net(x), model(x))
    assert net.in_features == 4


# -- Losses and diagnostics ------------------------------------------------------------------------------------------------


class Pipeline(DataParallel):
    """Joins losses by itself, and keeps diagnostics apart."""

    def forward(self, *inputs, **kwargs):
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        losses, diagnostics = zip(*self.parallel_apply(replicas, inputs, kwargs), strict=True)
        return self.gather(losses, self.output_device).mean(0), diagnostics


@scalars
def test_losses_are_gathered_from_a_tuple():
    """A tuple of 0-d losses becomes a vector; values of other kinds stay with the subclass."""

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(), {"rows": len(x)}

    net = Pipeline(Loss(4, 1), TWO)
    loss, diagnostics = net(torch.ones(4, 4))
    assert_close(loss, net.module(torch.ones(4, 4))[0])
    assert diagnostics == ({"rows": 2}, {"rows": 2})


class ByKey(DataParallel):
    """Joins dicts key by key with the free function."""

    def gather(self, outputs, output_device):
        return {key: gather([output[key] for output in outputs], output_device) for key in outputs[0]}


def test_dicts_are_gathered_by_key():
    """The free function joins on the wrapper's output device."""

    class Heads(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": x}

    net = ByKey(Heads(4, 2), TWO)
    x = torch.randn(5, 4)
    assert_close(net(x), net.module(x))


# -- Scripts that use the functions ----------------------------------------------------------------------------------------


def test_a_model_whose_parts_are_parallel_by_hand():
    """A recommendation model: replicas of an MLP take rows, embeddings stay apart, and the parts are joined."""
    bottom, top = mlp(), nn.Linear(4, 1)
    table = nn.Embedding(6, 2)
    dense, sparse = torch.randn(6, 4), torch.randint(0, 6, (6,))
    plain = top(torch.cat([bottom(dense), table(sparse)], 1))
    bottoms, tops = replicate(bottom, TWO), replicate(top, TWO)
    x = parallel_apply(bottoms, scatter(dense, TWO), None, TWO)
    rows = scatter(table(sparse), TWO, dim=0)
    joined = [torch.cat(pair, 1) for pair in zip(x, rows, strict=True)]
    output = gather(parallel_apply(tops, joined, None, TWO), "cpu", dim=0)
    assert_close(output, plain)
    weights = [*bottom.parameters(), *top.parameters(), table.weight]
    assert_close(torch.autograd.grad(output.sum(), weights), torch.autograd.grad(plain.sum(), weights))


@pytest.mark.parametrize("inputs", [(), None], ids=str)
def test_a_trainer_that_passes_a_dict_as_keywords(inputs):
    """`data_parallel(model, (), devices, module_kwargs=batch)` cuts the dict."""

    class Named(nn.Linear):
        def forward(self, *, x, y):
            return super().forward(x) + y

    model = Named(4, 2)
    batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 2)}
    assert_close(data_parallel(model, inputs, tuple(TWO), module_kwargs=batch), model(**batch))


@no_accelerator
@pytest.mark.parametrize("device_ids", [None, range(2), [0]], ids=str)
def test_without_devices_the_methods_still_work(device_ids):
    """On a machine without accelerators, a subclass may call the methods with devices that it names itself."""
    net = DataParallel(nn.Linear(4, 2), device_ids)
    x = torch.randn(4, 4)
    assert net.device_ids == []
    assert_close(net(x), net.module(x))
    inputs, kwargs = net.scatter((x,), None, [-1, "cpu"])
    outputs = net.parallel_apply(net.replicate(net.module, TWO), inputs, kwargs)
    assert_close(net.gather(outputs, -1), net.module(x))


def test_device_ids_may_be_set_after_init():
    """A subclass for another kind of device sets `device_ids` itself; the next call follows."""

    class Late(DataParallel):
        def __init__(self, module):
            super().__init__(module, ["cpu"])
            self.device_ids = [torch.device("cpu")] * 3
            self.src_device_obj = torch.device("cpu")

    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    Late(Model())(torch.zeros(7))
    assert sorted(seen) == [2, 2, 3]


@pytest.mark.parametrize(
    "call", [lambda net: net(3), lambda net: net(n=3), lambda net: net("abc")], ids=["args", "kwargs", "text"]
)
def test_a_call_without_rows_runs_on_every_device(call):
    """As in torch, a call without tensors runs once per device, and its outputs are joined."""

    class Sample(nn.Module):
        def forward(self, n):
            return torch.zeros(n if isinstance(n, int) else len(n), 2)

    assert call(DataParallel(Sample(), TWO)).shape == (6, 2)
