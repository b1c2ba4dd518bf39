"""Each error of a call in a parallel block names a cure. The code with the cure gives the right result."""

from __future__ import annotations

import copy
import functools
import sys
import weakref

import pytest
import torch
from torch import nn

from parawrap import DataParallel, Platform, parallel, wrapper
from parawrap.errors import ReplicaError
from tests.helpers.calling import Calls, Stateful
from tests.helpers.cures import check, run, table
from tests.helpers.same import assert_same

TWO = ["cpu", "cpu"]
X = torch.arange(20.0).view(20, 1)


def call(function, *args, **options):
    """Call a function of rows in a block on two lanes."""
    return run(parallel(function, TWO, **options), *args)


DEVICES = {
    "no lanes": (
        lambda: parallel(torch.neg, 0),
        "devices=0: pass a number of at least 1",
        lambda: run(parallel(torch.neg, 1), X),
        -X,
    ),
    "no devices": (
        lambda: parallel(torch.neg, []),
        "devices is empty: name at least one device, or omit it",
        lambda: [run(parallel(torch.neg, ["cpu"]), X), run(parallel(torch.neg), X)],
        [-X, -X],
    ),
    "an empty name": (
        lambda: parallel(torch.neg, ""),
        "devices is an empty string: pass a kind such as 'cuda', or omit it",
        lambda: [run(parallel(torch.neg, "cpu"), X), run(parallel(torch.neg), X)],
        [-X, -X],
    ),
    "a number that is not whole": (
        lambda: parallel(torch.neg, 1.5),
        "pass a number, a kind such as 'cuda', or a sequence of devices",
        lambda: [run(parallel(torch.neg, each), X) for each in (2, "cpu", TWO)],
        [-X, -X, -X],
    ),
    "a second CPU": (
        lambda: parallel(torch.neg, ["cpu", "cpu:1"]),
        r'repeat the name, as in \["cpu", "cpu"\], or pass a number, as in devices=2',
        lambda: [run(parallel(torch.neg, ["cpu", "cpu"]), X), run(parallel(torch.neg, devices=2), X)],
        [-X, -X],
    ),
    "a device that is none": (
        lambda: parallel(torch.neg, [None]),
        "None is not a device: pass an index, a string such as 'cuda:0', or a torch.device",
        lambda: run(parallel(torch.neg, [torch.device("cpu")]), X),
        -X,
    ),
    "an unknown kind": (
        lambda: parallel(torch.neg, "nonsense"),
        "nonsense.* is not a kind of device .*Known kinds: .*cpu",
        lambda: run(parallel(torch.neg, "cpu"), X),
        -X,
    ),
}


@table(DEVICES)
def test_cures_of_devices(row):
    check(row)


def ragged(x):
    """Return rows as long as the first value of a shard, which differs between shards."""
    return x.new_ones(len(x), 1 + int(x[0]) // 10)


def ragged_with_mask(x):
    return {"logits": ragged(x), "mask": ragged(x) > 0}


def nested(x):
    return torch.nested.nested_tensor(list(x), layout=torch.strided)


PADDED = torch.cat([torch.tensor([[1.0, -1.0]] * 11), torch.ones(9, 2)])

OUTPUTS = {
    "unequal widths": (
        lambda: call(ragged, X),
        'differ beyond dim 0. join="pad" pads them to the longest',
        lambda: call(ragged, X, join="pad").shape,
        torch.Size([20, 2]),
    ),
    "padding of two outputs": (
        lambda: call(ragged_with_mask, X, join="pad"),
        r'Give pad_value: one number for all, or a dict or tuple like the output, such as pad_value=\{"logits"',
        lambda: call(ragged_with_mask, X, join="pad", pad_value={"logits": -1.0, "mask": False}),
        {"logits": PADDED, "mask": PADDED > 0},
    ),
    "padding of integers": (
        lambda: call(lambda x: ragged(x).long(), X, join="pad", pad_value=0.5),
        "pad_value=0.5 is not a value of torch.int64. Give this output a whole number",
        lambda: call(lambda x: ragged(x).long(), X, join="pad", pad_value=-1),
        PADDED.long(),
    ),
    "a number": (
        lambda: call(len, X),
        'Use reduce="mean" for a mean over rows, "sum" for sums and counts, "stack" for one value per lane',
        lambda: [
            call(len, X, reduce="sum"),
            call(len, X, reduce="stack"),
            call(lambda x: x.mean().item(), X, reduce="mean"),
        ],
        [20, torch.tensor([11, 9]), 9.5],
    ),
    "a truth": (
        lambda: call(lambda x: (x > 10).any(), X, reduce="sum"),
        "has no sum. Use a function as reduce, such as torch.any",
        lambda: call(lambda x: (x > 10).any(), X, reduce=torch.any),
        torch.tensor(True),
    ),
    "a mean of counts": (
        lambda: call(lambda x: torch.tensor(len(x)), X, reduce="mean"),
        'has no mean over lanes. Use reduce="sum" for a count, reduce="stack" for one value per lane',
        lambda: [call(lambda x: torch.tensor(len(x)), X, reduce=each) for each in ("sum", "stack")],
        [torch.tensor(20), torch.tensor([11, 9])],
    ),
    "a sum over rows": (
        lambda: call(lambda x: x.sum(0), X),
        'If it sums over rows, name it in reduce: reduce="sum"',
        lambda: call(lambda x: x.sum(0), X, reduce="sum"),
        X.sum(0),
    ),
    "one of several sums": (
        lambda: call(lambda x: {"y": -x, "total": x.sum(0)}, X),
        r'reduce=\{"key": "sum"\} for one of several outputs',
        lambda: call(lambda x: {"y": -x, "total": x.sum(0)}, X, reduce={"total": "sum"}),
        {"y": -X, "total": X.sum(0)},
    ),
    "a text": (
        lambda: call(lambda x: f"{len(x) * 0} found", X),
        "Declare it with out_dims: .*None for one value that is the same in every lane",
        lambda: call(lambda x: f"{len(x) * 0} found", X, out_dims=None),
        "0 found",
    ),
    "other types": (
        lambda: call(lambda x: x.double() if x[0] else x, X),
        r"tensors of torch\.float32 and torch\.float64\. .*join=\"list\" returns",
        lambda: call(lambda x: x.double() if x[0] else x, X, join="list"),
        [X[:10], X[10:].double()],
    ),
    "a nested tensor": (
        lambda: call(nested, X),
        'a nested tensor has no dim to join on. join="list" returns',
        lambda: [len(each.unbind()) for each in call(nested, X, join="list")],
        [10, 10],
    ),
    "an array that is reduced": (
        lambda: call(lambda x: {"mean": x.mean(0).numpy()}, X, reduce={"mean": "mean"}),
        r'an array can only be reduced by "sum"\. Return torch\.from_numpy\(\.\.\.\) of it',
        lambda: call(lambda x: {"mean": torch.from_numpy(x.mean(0).numpy())}, X, reduce={"mean": "mean"}),
        {"mean": X.mean(0)},
    ),
    "an array that is a sum": (
        lambda: call(lambda x: x.sum(0).numpy(), X),
        'If it sums over rows, name it in reduce: reduce="sum"',
        lambda: call(lambda x: x.sum(0).numpy(), X, reduce="sum").tolist(),
        [190.0],
    ),
    "rows that are reduced": (
        lambda: call(lambda x: {"y": -x, "total": x.sum(0)}, X, reduce={"y": "sum", "total": "sum"}),
        "which reduce cannot put together. Leave this entry out of reduce",
        lambda: call(lambda x: {"y": -x, "total": x.sum(0)}, X, reduce={"total": "sum"}),
        {"y": -X, "total": X.sum(0)},
    ),
    "a row without its dim": (
        lambda: call(lambda x: x.squeeze(), torch.ones(2, 1), out_dims=0, reduce="mean"),
        r"Keep the dim in the model \(squeeze\(1\) instead of squeeze\(\)\)",
        lambda: call(lambda x: x.squeeze(1), torch.ones(2, 1), out_dims=0, reduce="mean"),
        torch.ones(2),
    ),
    "a value that is equal and reduced": (
        lambda: call(len, X, out_dims=None, reduce="sum"),
        "Keep one of them: .*out_dims=0 leaves numbers to reduce",
        lambda: call(len, X, out_dims=0, reduce="sum"),
        20,
    ),
    "an unknown reduction": (
        lambda: parallel(len, TWO, reduce="max"),
        "Use 'mean', 'sum', 'stack', a function of a vector",
        lambda: call(lambda x: x.max(), X, reduce=torch.max),
        X.max(),
    ),
    "an unknown join": (
        lambda: parallel(len, TWO, join="stack"),
        "Use 'cat', 'pad', or 'list'",
        lambda: call(torch.neg, X, join="list"),
        [*(-X).split([10, 10])],
    ),
    "an unknown entry of out_dims": (
        lambda: parallel(len, TWO, out_dims="rows"),
        'Use a dim, None, "items", "ragged", or a tuple, dict',
        lambda: [call(torch.neg, X, out_dims=0), call(lambda x: x[x > 4], X, out_dims="ragged")],
        [-X, X[5:, 0]],
    ),
    "a count for DataParallel": (
        lambda: DataParallel(Calls(len), TWO)(X),
        r'Return a 0-d tensor, .*or use parallel\(model, devices, reduce="sum"\)',
        lambda: call(len, X, reduce="sum"),
        20,
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@table(OUTPUTS)
def test_cures_of_outputs(row):
    check(row)


def add_in_place(total, x):
    total += x.sum(0)
    return x + 0 * total


ARGUMENTS = {
    "a dim out of range": (
        lambda: call(lambda x, y: x + y, X, X[:, 0], in_dims={"y": 1}),
        r"dim 1 is out of range for args\[1\], of shape \(20,\): it has 1 dimensions",
        lambda: call(lambda x, y: x + y[:, None], X, X[:, 0], in_dims={"y": 0}),
        2 * X,
    ),
    "a unit that does not fit": (
        lambda: call(torch.neg, X[:19], unit=4),
        "Pass a batch of 16 or 20 rows, or another unit",
        lambda: [
            call(torch.neg, X[:16], unit=4, out_dims=0),
            call(torch.neg, X, unit=4, out_dims=0),
            call(torch.neg, X[:19]),
        ],
        [-X[:16], -X, -X[:19]],
    ),
    "a nested tensor": (
        lambda: call(lambda x, y: x, X, nested(X)),
        "is a nested tensor, which torch cannot split. Pad it to cut it",
        lambda: call(lambda x, y: x + y, X, nested(X).to_padded_tensor(0.0)),
        2 * X,
    ),
    "an array": (
        lambda: call(lambda x, y: x, X, X.numpy()),
        r"is an array with 20 rows, and the batch has 20. Pass torch\.from_numpy\(\.\.\.\) of it",
        lambda: call(lambda x, y: x + y, X, torch.from_numpy(X.numpy())),
        2 * X,
    ),
    "a shard of unequal size": (
        lambda: call(torch.neg, X[:4]),
        "With out_dims=0, the largest shard has 2 of them",
        lambda: call(torch.neg, X[:4], out_dims=0),
        -X[:4],
    ),
    "a total that is written": (
        lambda: call(add_in_place, torch.zeros(1), X, in_dims={"total": None}),
        "Pass one copy per row, cut the tensor with in_dims, or use an out-of-place operation",
        lambda: call(lambda total, x: (total + x.sum(0)) * 0 + x, torch.zeros(1), X, in_dims={"total": None}),
        X,
    ),
    "gradients in eval mode": (
        lambda: call(nn.Linear(1, 1).eval(), X),
        r"For inference, call it inside torch\.inference_mode\(\)",
        lambda: torch.inference_mode()(lambda: call(nn.Linear(1, 1).eval(), X).shape)(),
        torch.Size([20, 1]),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@table(ARGUMENTS)
def test_cures_of_arguments(row):
    check(row)


SCALE = nn.Linear(1, 1, bias=False)
nn.init.constant_(SCALE.weight, 2.0)


def scale(x):
    return SCALE(x)


def scale_by(module, x):
    return module(x)


class ByGlobal(nn.Module):
    def forward(self, x):
        return SCALE(x)


class ByAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = SCALE

    def forward(self, x):
        return self.scale(x)


def lazily(model, x):
    if not hasattr(model, "weight"):
        model.weight = nn.Parameter(torch.full((1,), 2.0))
    return x * model.weight


def counts(model, x):
    model.calls = len(x)
    return x


def reset_weight(model, x):
    with torch.no_grad():
        model.layer.weight.fill_(2.0)
    return model.layer(x)


def called_before(model):
    model(X)
    return model


def scale_by_first(layers):
    return lambda model, x: layers[0](x)


def scale_first(layers, model, x):
    return layers[0](x)


class Handle:
    __slots__ = ()
    factor = 3

    def __reduce_ex__(self, protocol):
        msg = "a handle of the system"
        raise TypeError(msg)


class CopiedHandle(Handle):
    __slots__ = ()

    def __deepcopy__(self, memo):
        return CopiedHandle()


class Sharing(ByAttribute):
    def __deepcopy__(self, memo):
        copied = Sharing.__new__(Sharing)
        nn.Module.__init__(copied)
        copied.scale = self.scale
        return copied


class Copying(ByAttribute):
    def __deepcopy__(self, memo):
        copied = Copying.__new__(Copying)
        nn.Module.__init__(copied)
        copied.scale = copy.deepcopy(self.scale, memo)
        return copied


def nested_lists(depth):
    chain = []
    for _ in range(depth):
        chain = [chain]
    return chain


def with_recursion_limit(limit, function):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        return function()
    finally:
        sys.setrecursionlimit(before)


def keep_rows(model, x):
    model.kept = x
    return x


def in_a_rank(function):
    return wrapper(Platform(device="cpu"))(function).inline()[0]


MODELS = {
    "a global": (
        lambda: call(ByGlobal(), X),
        "uses the global 'SCALE'.*Make it an attribute of the model, or an argument of functools.partial",
        lambda: [call(ByAttribute(), X).detach(), call(functools.partial(scale_by, SCALE), X).detach()],
        [2 * X, 2 * X],
    ),
    "an iterator": (
        lambda: call(Stateful(lambda model, x: x, source=iter([1])), X),
        "'source' is an iterator .*Keep its items in a list",
        lambda: call(Stateful(lambda model, x: x * model.source[0], source=[3]), X),
        3 * X,
    ),
    "a module that is parallel already": (
        lambda: in_a_rank(lambda: call(nn.parallel.DistributedDataParallel(SCALE), X)),
        "is a DistributedDataParallel, which is parallel already. Give the module in it",
        lambda: in_a_rank(lambda: call(nn.parallel.DistributedDataParallel(SCALE).module, X).detach()),
        2 * X,
    ),
    "a weak reference": (
        lambda: call(Stateful(lambda model, x: model.scale()(x), scale=weakref.ref(SCALE)), X),
        r"is a weak reference to a Linear; .*Hold it in a list: \[value\]",
        lambda: call(Stateful(lambda model, x: model.scale[0](x), scale=[SCALE]), X).detach(),
        2 * X,
    ),
    "a list in a closure": (
        lambda: call(Stateful(scale_by_first([SCALE]), scale=SCALE), X),
        "a function captures a list .*Make it an attribute of the model, or give it by functools.partial",
        lambda: [
            call(Stateful(lambda model, x: model.layers[0](x), layers=[SCALE], scale=SCALE), X).detach(),
            call(Stateful(functools.partial(scale_first, [SCALE]), scale=SCALE), X).detach(),
        ],
        [2 * X, 2 * X],
    ),
    "an object that cannot be copied": (
        lambda: call(Stateful(lambda model, x: x * model.handle.factor, handle=Handle()), X),
        "'handle' is a Handle, which cannot be copied .*Make it in forward, or give its class a __deepcopy__",
        lambda: [
            call(Stateful(lambda model, x: x * Handle().factor), X),
            call(Stateful(lambda model, x: x * model.handle.factor, handle=CopiedHandle()), X),
        ],
        [3 * X, 3 * X],
    ),
    "a copy that shares its layer": (
        lambda: call(Sharing(), X),
        r"Let its __deepcopy__ copy all attributes with copy\.deepcopy\(value, memo\), or remove the method",
        lambda: [call(Copying(), X).detach(), call(ByAttribute(), X).detach()],
        [2 * X, 2 * X],
    ),
    "a model that is nested deeply": (
        lambda: call(Stateful(lambda model, x: x, chain=nested_lists(1000)), X),
        "the model is nested too deeply to be copied. Raise the limit with sys.setrecursionlimit",
        lambda: with_recursion_limit(20000, lambda: call(Stateful(lambda model, x: x, chain=nested_lists(1000)), X)),
        X,
    ),
    "a buffer with one value per row": (
        lambda: call(Stateful(keep_rows, buffers={"kept": torch.zeros(1, 1)}).eval(), X),
        "State per row belongs in the arguments and the output",
        lambda: call(lambda x, kept: (x + kept, x), X, torch.zeros(20, 1)),
        (X, X),
    ),
    "a parameter that forward makes": (
        lambda: call(Stateful(lazily), X),
        "Make it before the block, for instance by a call of the model",
        lambda: call(called_before(Stateful(lazily)), X).detach(),
        2 * X,
    ),
    "a number that forward writes": (
        lambda: call(Stateful(counts), X),
        "Return the value from the call instead",
        lambda: call(lambda x: (x, len(x)), X, reduce="sum"),
        (X, 20),
    ),
    "a parameter that forward writes": (
        lambda: call(Stateful(reset_weight, layer=nn.Linear(1, 1, bias=False)), X),
        "Compute with a new tensor, make it a buffer, or write it between calls",
        lambda: call(Stateful(lambda model, x: nn.functional.linear(x, torch.full((1, 1), 2.0)), layer=SCALE), X),
        2 * X,
    ),
}


@table(MODELS)
def test_cures_of_models(row):
    check(row)


def fill(model, value):
    """Change the weight in place."""
    model.weight.fill_(value)


def replace(model, value):
    """Make another weight. The lanes get it with the next call."""
    model.weight = nn.Parameter(torch.full((1, 1), value))
    model(X)


@pytest.mark.parametrize(
    ("change", "says"),
    [(fill, "or write it between calls"), (replace, "Read the outputs first, and change the model then")],
)
def test_a_model_that_changes_during_a_stream(change, says):
    """It may change once the outputs are read."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad(), parallel(model, TWO, out_dims=0) as p:
        outputs = p.map(X.split(1))
        next(outputs)
        change(model, 3.0)
        with pytest.raises(ReplicaError, match=says):
            list(outputs)
        before = [*p.map(X.split(1))]
        change(model, 4.0)
        assert_same(torch.cat(before), 3 * X)
        assert_same(torch.cat([*p.map(X.split(1))]), 4 * X)


def test_a_trace_that_was_used(tmp_path):
    with parallel(torch.neg, TWO) as p:
        trace = p.trace(tmp_path / "lanes.json")
        with trace:
            p(X)
        with pytest.raises(Exception, match=r"was already used. Call p\.trace\(\.\.\.\) for each `with` block"), trace:
            pass
        with p.trace(tmp_path / "again.json") as again:
            p(X)
        assert len(again.spans) == 2
