"""TupleParallel and tuple_fn: arguments are tuples with one part per device, as
in tuple_parallel.
"""

from __future__ import annotations

import copy
import pickle
from collections import UserDict, namedtuple
from collections.abc import MutableMapping

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from parawrap import (
    DataParallel,
    ShardError,
    TupleParallel,
    cat,
    default_collate,
    tp_collate,
    tuple_fn,
)
from tests.helpers.calling import Calls

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
Pair = namedtuple("Pair", ["x", "y"])


def pairs(samples):
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.stack(ys)


@pytest.mark.parametrize(
    "collate", [tp_collate(2)(pairs), default_collate(2)], ids=["tp_collate", "default_collate"]
)
def test_epoch_trains_like_the_model(collate):
    """With one loss per part, averaged over equal parts, the weights are those
    of plain training.
    """
    plain = nn.Linear(5, 1)
    model = copy.deepcopy(plain)
    net, mse = TupleParallel(model, TWO), tuple_fn(nn.functional.mse_loss)
    data = TensorDataset(torch.randn(50, 5), torch.randn(50, 1))
    for (xs, ys), (x, y) in zip(
        DataLoader(data, 20, collate_fn=collate), DataLoader(data, 20), strict=True
    ):
        out = net(xs)
        assert [len(part) for part in out] == [len(x) // 2] * 2
        assert_close((cat(out), cat(ys)), (plain(x), y))
        for module, loss in (
            (model, sum(mse(out, ys)) / 2),
            (plain, nn.functional.mse_loss(plain(x), y)),
        ):
            module.zero_grad()
            loss.backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_is_a_data_parallel():
    """The options have the order of tuple_parallel."""
    net = TupleParallel(nn.Linear(5, 2), TWO, True, False, cat)
    assert isinstance(net, DataParallel)
    assert list(net.state_dict()) == ["module.weight", "module.bias"]
    assert (net.transfer_output, net.transfer_input, net.reduction) == (True, False, cat)
    assert (net.ndevices, net.home_device, net.output_device) == (
        2,
        torch.device("cpu"),
        torch.device("cpu"),
    )


def test_outputs_are_transposed():
    """A module with two outputs returns ((a1, a2), (b1, b2)).

    Keyword arguments have one part per device too.
    """
    net = TupleParallel(Calls(lambda x, y, *, k: ((x + y) * k, x - y)), TWO)
    assert net((1, 2), [3, 4], k=(1, 2)) == ((4, 12), (-2, -2))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_plain_without_accelerator():
    """Parts run one after another, and any number of parts is allowed."""
    net = TupleParallel(nn.Identity())
    assert (net.ndevices, net.home_device) == (1, torch.device("cpu"))
    assert net((1, 2, 3)) == (1, 2, 3)


def test_transfer_input_false():
    class Part:
        def to(self, *args, **kwargs):
            raise AssertionError("moved")

        cuda = to

    parts = (Part(), Part())
    assert TupleParallel(nn.Identity(), TWO, transfer_input=False)(parts) == parts
    with pytest.raises(AssertionError, match="moved"):
        TupleParallel(nn.Identity(), TWO)(parts)


def test_device_ids_may_change():
    """As in torch, the next call follows them."""
    net = TupleParallel(nn.Identity(), TWO)
    assert net((1, 2)) == (1, 2)
    net.device_ids = [*map(torch.device, THREE)]
    assert net.ndevices == 3
    assert net((1, 2, 3)) == (1, 2, 3)


def test_call_without_arguments():
    """As in tuple_parallel, a module without inputs gives one output per device."""
    assert TupleParallel(Calls(lambda: 7), THREE)() == (7, 7, 7)


# --- batches that are passed whole ---

SAMPLES = [(torch.tensor(float(i)), torch.tensor(float(i * i))) for i in range(5)]


def as_dict(samples):
    xs, ys = zip(*samples, strict=True)
    return {"x": torch.stack(xs), "y": torch.stack(ys)}


def subtract(batch, scale=1):
    """Take a whole batch with the keys x and y, or the fields of a Pair, and
    scale the difference.
    """
    x, y = (batch.x, batch.y) if isinstance(batch, Pair) else (batch["x"], batch["y"])
    return (x - y) * scale


EXPECTED = subtract(as_dict(SAMPLES))


class Items(MutableMapping):
    """A mapping that a shallow copy shares its items with."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@pytest.mark.parametrize("devices", [TWO, ["cpu"] * 7], ids=len)
@pytest.mark.parametrize(
    "kind",
    [dict, UserDict, Items, lambda b: Pair(**b)],
    ids=["dict", "mapping", "mapping with a dict", "namedtuple"],
)
def test_batch_is_passed_whole(devices, kind):
    """The batch of `tp_collate` can be the only argument, or one of several, positional or by
    keyword.
    """
    batch = tp_collate(len(devices))(lambda samples: kind(as_dict(samples)))(SAMPLES)
    net = TupleParallel(Calls(subtract), devices, reduction=cat)
    assert_close(net(batch), EXPECTED)
    scales = (2,) * min(len(devices), len(SAMPLES))
    assert_close(net(batch, scales), EXPECTED * 2)
    assert_close(net(scale=[*scales], batch=batch), EXPECTED * 2)


@pytest.mark.parametrize(
    "collate", [tp_collate(2)(pairs), default_collate(2)], ids=["tp_collate", "default_collate"]
)
def test_a_batch_that_is_not_spread(collate):
    """The parts of arguments know that they are parts: each lane would get one argument whole.

    The cure works.
    """
    model = Calls(lambda x, y: (x - y).sum())
    batch = collate([(torch.tensor([float(i)]), torch.tensor([100.0])) for i in range(4)])
    with TupleParallel(model, TWO) as net:
        with pytest.raises(
            ShardError, match=r"args\[0\] is a whole batch of 2 arguments.*: model\(\*batch\)"
        ):
            net(batch)
        assert [float(each) for each in net(*batch)] == [-199.0, -195.0]
        # Parts that are put together by hand
        assert len(net((batch[0][0], batch[0][1]), batch[1])) == 2
    doubled = torch.utils._pytree.tree_map(lambda each: each * 2, batch)
    assert doubled[0][1].tolist() == [[4.0], [6.0]]


class Held:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Held(self.x.to(device))


def test_classes_with_a_plain_to():
    """`.to` of classes of others is called with the device alone."""
    with TupleParallel(Calls(lambda held: held.x * 2), TWO) as net:
        assert_close(
            net((Held(torch.ones(2)), Held(torch.ones(1)))),
            (torch.full((2,), 2.0), torch.full((1,), 2.0)),
        )


def test_nested_containers_of_parts():
    """The first tuple or list on the way down holds the parts.

    Each lane gets its own containers.
    """

    def forward(batch):
        batch["seen"] = True
        return batch

    batch = {"a": {"b": (1, 2)}, "c": Pair([3, 4], {}), "d": ({"e": (5,)}, {"e": (6,)})}
    one, two = TupleParallel(Calls(forward), TWO)(batch)
    assert one == {"a": {"b": 1}, "c": Pair(3, {}), "d": {"e": (5,)}, "seen": True}
    assert two == {"a": {"b": 2}, "c": Pair(4, {}), "d": {"e": (6,)}, "seen": True}
    assert "seen" not in batch


def test_other_outputs_are_one_output():
    """A PackedSequence, or a list with one item per row, is one output."""
    parts = ["a", "b"], ["c"]
    assert TupleParallel(nn.Identity(), TWO)(parts) == parts
    outputs = TupleParallel(nn.Identity(), TWO)(
        (pack_sequence([torch.zeros(2)]), pack_sequence([torch.ones(1)]))
    )
    assert [type(output) for output in outputs] == [PackedSequence] * 2


# --- tuple_fn ---


@pytest.mark.parametrize("parallel", [False, True])
def test_tuple_fn_calls_once_per_part(parallel):
    """Tuples are transposed, and a dict of parts is cut."""

    @tuple_fn(parallel=parallel)
    def loss(output, *, target):
        return (output - target).abs()

    out = loss((torch.ones(2), torch.ones(1)), target=[torch.zeros(2), torch.full((1,), 3.0)])
    assert [part.tolist() for part in out] == [[1.0, 1.0], [2.0]]
    assert loss.__name__ == "loss"
    assert tuple_fn(lambda x: (x, -x), parallel=parallel)((1, 2, 3)) == ((1, 2, 3), (-1, -2, -3))
    whole = tuple_fn(subtract, parallel=parallel)(tp_collate(2)(as_dict)(SAMPLES), scale=(2, 2))
    assert_close(cat(whole), EXPECTED * 2)


@tuple_fn
def halve(x):
    return x / 2


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "function",
    [lambda x, y: x - y, torch.sub, nn.PairwiseDistance(1, eps=0)],
    ids=["lambda", "function of torch", "module"],
)
def test_tuple_fn_is_pickled_and_copied(function, parallel):
    """Ranks get functions of the script by value, and lanes get copies, with the decorator."""
    decorated = tuple_fn(function, parallel=parallel)
    assert isinstance(decorated, nn.Module) == isinstance(function, nn.Module)
    x, y = (torch.full((1,), 5.0), torch.full((1,), 4.0)), (torch.ones(1), torch.ones(1))
    for copied in (cloudpickle.loads(cloudpickle.dumps(decorated)), copy.deepcopy(decorated)):
        assert [each.item() for each in copied(x, y)] == [4, 3]
    for pickles in (pickle, cloudpickle):
        assert pickles.loads(pickles.dumps(halve)) is halve


def test_tuple_fn_works_on_methods():
    """`self` is passed unchanged to every call."""

    class Loss:
        scale = 2

        @tuple_fn
        def plain(self, x):
            return x * self.scale

        @tuple_fn(parallel=True)
        def lanes(self, x):
            return x * self.scale

    assert Loss().plain((1, 2)) == Loss().lanes((1, 2)) == (2, 4)
