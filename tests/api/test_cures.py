"""Each error of the blocks and the wrappers names a cure. The code with the cure gives the right result."""

from __future__ import annotations

import configparser
import functools
import sys

import pytest
import torch
from torch import nn

import parawrap
from parawrap import (
    DataParallel,
    Platform,
    TupleParallel,
    Wrapper,
    cat,
    collect,
    compare,
    default_collate,
    neuron,
    parallel,
    parallel_apply,
    recursive_to,
    scatter,
    tp_collate,
    transpose,
    tuple_fn,
    wrapper,
)
from parawrap.testing import check_rowwise, neuron_host
from tests.helpers.calling import Calls
from tests.helpers.cures import check, run, table
from tests.helpers.same import assert_same
from tests.helpers.worlds import ROOT

TWO = ["cpu", "cpu"]
X = torch.arange(20.0).view(20, 1)
PARTS = X.split(10)
CPU = Platform(device="cpu", n_cpus=1, verbose=False)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x

    def triple(self, x):
        return 3 * x


class Tokenizer:
    """Not a module, and not callable."""

    def encode(self, x):
        return 2 * x

    def decode(self, x):
        return x / 2


class CallableTokenizer(Tokenizer):
    def __call__(self, x):
        return -x


class Scaled(nn.Module):
    def forward(self, x, **options):
        return x * options["factor"]


def stream(*batches, block=None, **options):
    """Return the outputs of `map`."""
    with block or parallel(Double(), TWO) as p:
        return list(p.map(*batches, **options))


# -- parallel

BLOCKS = {
    "a target without a call": (
        lambda: parallel(3, TWO),
        "target=3 is not callable. Give parallel a module or another callable",
        lambda: (run(parallel(Double(), TWO), X), run(parallel(torch.neg, TWO), X)),
        (2 * X, -X),
    ),
    "a target with a method": (
        lambda: parallel(Tokenizer(), TWO, methods=("encode",)),
        r"Pass its method instead: parallel\(tokenizer\.encode, \.\.\.\)",
        lambda: run(parallel(Tokenizer().encode, TWO), X),
        2 * X,
    ),
    "a text as methods": (
        lambda: parallel(Double(), TWO, methods="forward"),
        r"methods='forward' is not a sequence of names\. .*methods=\(\"forward\",\)",
        lambda: run(parallel(Double(), TWO, methods=("forward",)), X),
        2 * X,
    ),
    "methods of a function": (
        lambda: parallel(Double().triple, TWO, methods=("forward", "triple")),
        r"methods=.* needs a module, and the target is a method\. Leave methods out \(",
        lambda: run(parallel(Double().triple, TWO), X),
        3 * X,
    ),
    "methods of a callable object": (
        lambda: parallel(CallableTokenizer(), TWO, methods=("encode",)),
        r"Leave methods out, or pass the method itself: parallel\(callabletokenizer\.encode, \.\.\.\)",
        lambda: [run(parallel(CallableTokenizer(), TWO), X), run(parallel(CallableTokenizer().encode, TWO), X)],
        [-X, 2 * X],
    ),
    "unknown workers": (
        lambda: parallel(Double(), TWO, workers="threads"),
        'give "thread" or "process"',
        lambda: [run(parallel(Double(), TWO, workers=each), X) for each in ("thread", "process")],
        [2 * X, 2 * X],
    ),
    "no retries": (
        lambda: parallel(Double(), TWO, retries=-1),
        "give a number of further attempts, at least 0",
        lambda: run(parallel(Double(), TWO, retries=0), X),
        2 * X,
    ),
    "a dim that is not a number": (
        lambda: parallel(Double(), TWO, dim="0"),
        "give the dim that the rows lie on, such as 0",
        lambda: run(parallel(Double(), TWO, dim=0), X),
        2 * X,
    ),
    "no unit": (
        lambda: parallel(Double(), TWO, unit=0),
        "give the number of rows that stay together, at least 1",
        lambda: run(parallel(Double(), TWO, unit=1), X),
        2 * X,
    ),
    "in_dims without names": (
        lambda: parallel(torch.add, TWO, in_dims=(0, None)),
        r"is not a mapping\. Use in_dims=\{\"parameter name\"",
        lambda: run(parallel(lambda x, y: x + y, TWO, in_dims={"x": 0, "y": None}), X, torch.ones(1, 1)),
        X + 1,
    ),
    "in_dims of keywords": (
        lambda: parallel(Scaled(), TWO, in_dims={"options": None}),
        r"in_dims names 'options', but Scaled .*Name the keyword arguments of \*\*kwargs one by one",
        lambda: run(parallel(Scaled(), TWO, in_dims={"factor": None}, out_dims=0), X, factor=torch.full((1,), 3.0)),
        3 * X,
    ),
    "an unknown entry of in_dims": (
        lambda: parallel(Double(), TWO, in_dims={"x": "rows"}),
        'is not supported. Use a dim, None, "items"',
        lambda: [run(parallel(Double(), TWO, in_dims={"x": each}, out_dims=0), X) for each in (0, -2)],
        [2 * X, 2 * X],
    ),
    "a name that methods lacks": (
        lambda: run_method(parallel(Double(), TWO), "triple"),
        r"Name it in parallel\(\.\.\., methods=\(\.\.\., 'triple'\)\)",
        lambda: run_method(parallel(Double(), TWO, methods=("forward", "triple")), "triple"),
        3 * X,
    ),
    "a method of a function": (
        lambda: run_method(parallel(Double().triple, TWO), "triple"),
        r"the target, which is not a module\. Call, map, or submit the block itself",
        lambda: run(parallel(Double().triple, TWO), X),
        3 * X,
    ),
    "several methods": (
        lambda: run(parallel(Double(), TWO, methods=("forward", "triple")), X),
        r"names several methods\. Choose one: p\.method\('forward'\)",
        lambda: run_method(parallel(Double(), TWO, methods=("forward", "triple")), "forward"),
        2 * X,
    ),
}


def run_method(block, name):
    with block as p:
        return p.method(name)(X)


@table(BLOCKS)
def test_cures_of_blocks(row):
    check(row)


def test_a_closed_block():
    """It works inside its `with` block, and a new one works too."""
    with parallel(Double(), TWO) as p:
        pass
    with pytest.raises(parawrap.SessionError, match=r"is closed\. Use it inside its `with` block, or make a new one"):
        p(X)
    with p:
        assert_same(p(X), 2 * X)
    assert_same(run(parallel(Double(), TWO), X), 2 * X)


def test_a_block_without_effect():
    """Each of the three uses that the warning names works, and gives no warning."""
    says = "had no effect: open it with `with`, call it, or use it as a decorator"
    with pytest.warns(UserWarning, match=says):
        parallel(Double(), TWO)
    model = Double()
    with parallel(model, TWO) as p:
        assert_same(model(X), 2 * X)
        assert p.stats().calls == 1
    called = parallel(model, TWO)
    assert_same(called(X), 2 * X)
    called.close()
    block = parallel(model, TWO)
    assert_same(block(lambda: model(X))(), 2 * X)
    assert block.stats().calls == 1


def test_a_generator_is_not_decorated():
    model = Double()

    def outputs(x):
        yield model(x)

    def outputs_of_a_block(x):
        with parallel(model, TWO):
            yield model(x)

    with pytest.raises(parawrap.ShardError, match=r"outputs is a coroutine or a generator.*Open the block inside it"):
        parallel(model, TWO)(outputs)
    assert_same(list(outputs_of_a_block(X)), [2 * X])


def test_a_keyword_that_no_call_passed():
    with pytest.warns(UserWarning, match="in_dims names 'factr', .*Correct the name, or leave it out"):
        run(parallel(Scaled(), TWO, in_dims={"factr": None}), X, factor=2)
    for in_dims in ({"factor": None}, None):
        assert_same(run(parallel(Scaled(), TWO, in_dims=in_dims), X, factor=2), 2 * X)


# -- map, check_rowwise, compare, collect

STREAMS = {
    "no batches in flight": (
        lambda: stream(PARTS, buffersize=0),
        "buffersize=0 is too small.*Use 1 or more",
        lambda: stream(PARTS, buffersize=1),
        [2 * part for part in PARTS],
    ),
    "an empty message": (
        lambda: stream(PARTS, chunksize=0),
        'chunksize=0: .*Use 1 or more, or "auto"',
        lambda: [stream(PARTS, chunksize=each) for each in (1, "auto")],
        [[2 * part for part in PARTS]] * 2,
    ),
    "a buffer below a message": (
        lambda: stream(PARTS, chunksize=2, buffersize=1),
        "buffersize=1 has no room for chunksize=2 batches. Use at least as many",
        lambda: stream(PARTS, chunksize=2, buffersize=2),
        [2 * part for part in PARTS],
    ),
    "no function as prepare": (
        lambda: stream([1, 2], prepare=0.5),
        "prepare=0.5 is not callable. Give a function of one batch that returns the model's arguments",
        lambda: stream(PARTS, prepare=torch.neg),
        [-2 * part for part in PARTS],
    ),
    "a tensor as batches": (
        lambda: stream(X),
        r"p\.map\(x\.split\(32\)\), or give a list of batches: p\.map\(\[x\]\)",
        lambda: (stream(X.split(32)), stream([X])),
        ([2 * X], [2 * X]),
    ),
    "an array as batches": (
        lambda: stream(X.numpy()),
        r"p\.map\(torch\.as_tensor\(x\)\.split\(32\)\), or give a list of batches: p\.map\(\[x\]\)",
        lambda: (stream(torch.as_tensor(X.numpy()).split(32)), stream([X.numpy()])),
        ([2 * X], [2 * X.numpy()]),
    ),
    "a dict as batches": (
        lambda: stream({"x": X}),
        r"p\.map\(\[batch\]\), or p\.map\(d\.values\(\)\)",
        lambda: (stream([{"x": X}]), stream({"a": X, "b": -X}.values())),
        ([2 * X], [2 * X, -2 * X]),
    ),
    "a text as batches": (
        lambda: stream("ab", block=parallel(str.upper, TWO)),
        r"batches is a str.*p\.map\(\[batch\]\)",
        lambda: stream(["ab"], block=parallel(str.upper, TWO)),
        ["AB"],
    ),
}


@table(STREAMS)
def test_cures_of_streams(row):
    check(row)


def test_a_bar_without_tqdm(monkeypatch):
    """The extra of the message installs tqdm. With tqdm, the bar counts the batches."""
    pytest.importorskip("tqdm")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tqdm", None)
        patch.setitem(sys.modules, "tqdm.auto", None)
        with pytest.raises(ImportError, match=r"Run pip install 'parawrap-torch\[cli\]'"):
            stream(PARTS, progress=True)
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    assert "tqdm" in extras["options.extras_require"]["cli"]
    assert_same(stream(PARTS, progress=True), [2 * part for part in PARTS])


class Twice(nn.Module):
    """Runs its layer two times, and writes the output of its last layer in place."""

    def __init__(self):
        super().__init__()
        self.layer, self.last, self.relu = Double(), Double(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.last(self.layer(self.layer(x))))


def ways(**options):
    """Return the names of the measured ways."""
    options = {"rounds": 2, "calls": 1, **options}
    return [way.name for way in compare(nn.Linear(1, 2), X, TWO, show=False, **options).ways]


def train_steps(function, **options):
    """Return how far the gradients of each way are from those of the plain call."""
    x = torch.ones(20, 2, requires_grad=True)
    found = compare(function, x, TWO, train=True, rounds=2, calls=1, show=False, **options)
    return [way.gradients.absolute for way in found.ways]


TOOLS = {
    "check_rowwise with two rows": (
        lambda: check_rowwise(Double(), X[:2]),
        "the batch was not cut.*Give a batch of 3 rows or more, as tensors",
        lambda: check_rowwise(Double(), X[:3]),
        None,
    ),
    "check_rowwise without tensors": (
        lambda: check_rowwise(Double(), X[:3].tolist() * 2),
        "the batch was not cut.*Give a batch of 3 rows or more, as tensors",
        lambda: check_rowwise(Double(), X[:3]),
        None,
    ),
    "check_rowwise with dropout": (
        lambda: check_rowwise(nn.Dropout(), X),
        "Dropout mixes rows.*It draws random numbers, which differ between cuts. Use eval mode",
        lambda: check_rowwise(nn.Dropout().eval(), X),
        None,
    ),
    "compare with one round": (
        lambda: ways(rounds=1),
        "compare needs rounds >= 2, calls >= 1, and one method",
        lambda: ways(rounds=2, methods=("forward",)),
        ["plain", "plain, 1 thread", "map", "lanes"],
    ),
    "compare without a loss": (
        lambda: train_steps(torch.fft.fft),
        "no floating-point tensor that requires gradients. Pass loss=, a function of the output",
        lambda: train_steps(torch.fft.fft, loss=lambda output: output.abs().sum()),
        [0.0, 0.0, 0.0],
    ),
    "collect with one name": (
        lambda: collect(Twice(), "last"),
        r"layers='last' is one name. Give a sequence of names: \['last'\]",
        lambda: collect(Twice(), ["relu"])(X),
        {"relu": 8 * X},
    ),
    "collect of an unknown layer": (
        lambda: collect(Twice(), ["lst"]),
        r"no submodule 'lst'. model\.named_modules\(\) lists the names",
        lambda: [name for name, _ in Twice().named_modules()],
        ["", "layer", "last", "relu"],
    ),
    "collect of a layer that runs twice": (
        lambda: collect(Twice(), ["layer"])(X),
        "the layer 'layer' ran 2 times in one call. Name layers that run once",
        lambda: collect(Twice(), ["relu"])(X),
        {"relu": 8 * X},
    ),
    "collect of an output that is overwritten": (
        lambda: collect(Twice(), ["last"])(X),
        "a later layer wrote the output of 'last' in place.*Name the later layer",
        lambda: collect(Twice(), ["relu"])(X),
        {"relu": 8 * X},
    ),
}


@table(TOOLS)
def test_cures_of_tools(row):
    check(row)


# -- DataParallel and its steps


class Moves:
    """An object whose `to` moves it in place."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)


class MovesAndReturns(Moves):
    def to(self, device):
        super().to(device)
        return self


def mean_loss(model):
    """Return the loss of each shard."""
    return DataParallel(Calls(lambda x: model(x).mean()), TWO)(X)


STEPS = {
    "no device_ids": (
        lambda: DataParallel(Double(), []),
        "device_ids is empty. Name at least one device, or leave it out to use every visible one",
        lambda: [DataParallel(Double(), ["cpu"])(X), DataParallel(Double())(X).cpu()],
        [2 * X, 2 * X],
    ),
    "a device that is none": (
        lambda: DataParallel(Double(), [None]),
        "device_ids holds None, which is not a device. Use indices, strings such as 'cuda:0', or torch devices",
        lambda: [DataParallel(Double(), each)(X) for each in (["cpu", "cpu"], [torch.device("cpu")] * 2)],
        [2 * X, 2 * X],
    ),
    "losses of shards": (
        lambda: mean_loss(Double()),
        r'joins them into a vector.*For their mean, use parallel\(module, reduce="mean"\)',
        lambda: run(parallel(Calls(lambda x: Double()(x).mean()), TWO, reduce="mean"), X),
        2 * X.mean(),
    ),
    "scatter to no device": (
        lambda: scatter(X, []),
        "the list of devices is empty. Name at least one device",
        lambda: scatter(X, ["cpu"]),
        (X,),
    ),
    "gather of a dict": (
        lambda: parawrap.gather({"x": X}, "cpu"),
        "gather got a dict, which is one output. Give a list with one output per device",
        lambda: parawrap.gather([{"x": part} for part in PARTS], "cpu"),
        {"x": X},
    ),
    "gather of nothing": (
        lambda: parawrap.gather([], "cpu"),
        "gather got no outputs. Give one output per device",
        lambda: parawrap.gather([*PARTS], "cpu"),
        X,
    ),
    "parallel_apply of unequal numbers": (
        lambda: parallel_apply([torch.neg, torch.abs], [X], devices=["cpu"]),
        "parallel_apply got 2 modules, 1 inputs, 2 dicts of keyword arguments, 1 devices. Give one of each per call",
        lambda: parallel_apply([torch.neg, torch.abs], [X, X], [{}, {}], devices=TWO),
        [-X, X],
    ),
    "an object that moves itself": (
        lambda: recursive_to(Moves(X), "cpu"),
        r"Moves\.to\(\) returned None\. End it with `return self`, or return the moved Moves",
        lambda: recursive_to(MovesAndReturns(X), "cpu").x,
        X,
    ),
}


@table(STEPS)
def test_cures_of_steps(row):
    check(row)


# -- TupleParallel, tp_collate, cat


def pairs(samples):
    """Collate samples into a tuple of two tensors."""
    return torch.stack(samples), -torch.stack(samples)


def one_or_two(samples):
    return torch.stack(samples) if len(samples) > 1 else pairs(samples)


def tuple_parallel(*args, function=torch.neg, devices=TWO, **options):
    """Call a TupleParallel of a function."""
    with TupleParallel(Calls(function), devices, **options) as net:
        return net(*args)


NEGATIVE = tuple(-part for part in PARTS)
BATCH = tp_collate(2)(pairs)(list(X))  # two arguments of two parts
LEVELS = [[torch.ones(2, 1), torch.ones(2, 1)] for _ in TWO]  # two parts of two items with two rows


def item_per_row(samples):
    return [{"x": sample} for sample in samples]


TUPLES = {
    "tp_collate without a number": (
        lambda: tp_collate(pairs),
        r"tp_collate got the callable pairs instead of a number of devices. Write tp_collate\(2\), with parentheses",
        lambda: tp_collate(2)(pairs)(list(X)),
        (PARTS, NEGATIVE),
    ),
    "default_collate without a number": (
        lambda: torch.utils.data.DataLoader(X, 20, collate_fn=default_collate).__iter__().__next__(),
        r"is not a number of devices. Give default_collate an int of at least 1, such as len\(device_ids\)",
        lambda: next(iter(torch.utils.data.DataLoader(X, 20, collate_fn=default_collate(len(TWO))))),
        PARTS,
    ),
    "tp_collate of no device": (
        lambda: tp_collate(0),
        "ndevices=0 is not a number of devices. Give tp_collate an int of at least 1",
        lambda: tp_collate(1)(torch.stack)(list(X)),
        (X,),
    ),
    "tp_collate of no function": (
        lambda: tp_collate(2)(None),
        "tp_collate cannot decorate None, which is not callable. Give it a collate function",
        lambda: tp_collate(2)(torch.stack)(list(X)),
        PARTS,
    ),
    "tp_collate of an iterator": (
        lambda: tp_collate(2)(torch.stack)(iter(X)),
        r"tp_collate cannot cut a .*Give it a list: list\(samples\)",
        lambda: tp_collate(2)(torch.stack)(list(iter(X))),
        PARTS,
    ),
    "tp_collate with unequal parts": (
        lambda: tp_collate(2)(one_or_two)(list(X[:3])),
        "the collate function's parts differ.*Return the same structure for any number of samples",
        lambda: tp_collate(2)(pairs)(list(X[:3])),
        (X[:3].split([2, 1]), tuple(-part for part in X[:3].split([2, 1]))),
    ),
    "a whole batch of tp_collate": (
        lambda: tuple_parallel(BATCH, function=torch.sub),
        r"args\[0\] is a whole batch of 2 arguments.*Pass each as an argument of its own: model\(\*batch\)",
        lambda: tuple_parallel(*BATCH, function=torch.sub),
        tuple(2 * part for part in PARTS),
    ),
    "a tensor that is not cut": (
        lambda: tuple_parallel(X),
        r"args\[0\] is a Tensor\. Give a tuple or list with one part per device",
        lambda: [tuple_parallel(PARTS), tuple_parallel([*PARTS])],
        [NEGATIVE, NEGATIVE],
    ),
    "a dict that is not cut": (
        lambda: tuple_parallel({"x": X}, function=lambda batch: -batch["x"]),
        r"args\[0\]\[\"x\"\] is a Tensor\. .*If the dict itself is one part, give a tuple with one dict per device",
        lambda: [
            tuple_parallel(each, function=lambda batch: -batch["x"]) for each in (({"x": PARTS}), [{"x": X}, {"x": -X}])
        ],
        [NEGATIVE, (-X, X)],
    ),
    "an empty dict": (
        lambda: tuple_parallel({}, function=len),
        r"args\[0\] is an empty dict, so the number of parts is unknown. Give a tuple with one dict per device",
        lambda: tuple_parallel(({}, {}), function=len),
        (0, 0),
    ),
    "unequal numbers of parts": (
        lambda: tuple_parallel(PARTS, (1,), function=torch.add),
        "the arguments have different numbers of parts.*Give each argument one part per device",
        lambda: tuple_parallel(PARTS, (1, 2), function=torch.add),
        (PARTS[0] + 1, PARTS[1] + 2),
    ),
    "more parts than devices": (
        lambda: tuple_parallel(X.split(5)),
        r"there are 4 parts for 2 devices. Cut into at most 2 parts, as tp_collate\(2\) does",
        lambda: tuple_parallel(tp_collate(2)(torch.stack)(list(X))),
        NEGATIVE,
    ),
    "a batch of more arguments than devices": (
        lambda: tuple_parallel([PARTS, PARTS, PARTS], function=torch.addcmul),
        r"there are 3 parts for 2 devices.*pass each item as an argument: model\(\*batch\)",
        lambda: tuple_parallel(*[PARTS, PARTS, PARTS], function=torch.addcmul),
        tuple(part + part * part for part in PARTS),
    ),
    "outputs of unequal length": (
        lambda: tuple_parallel(PARTS, function=lambda x: x[: int(x[0]) // 10 + 1].split(1)),
        "the parts' outputs differ: .*Return equally many items for every part; put other lists into a dict",
        lambda: (
            tuple_parallel(PARTS, function=lambda x: x[:2].split(1)),
            tuple_parallel(PARTS, function=lambda x: {"rows": x[: int(x[0]) // 10 + 1].split(1)}),
        ),
        (((X[0:1], X[10:11]), (X[1:2], X[11:12])), ({"rows": (X[0:1],)}, {"rows": (X[10:11], X[11:12])})),
    ),
    "a device as transfer_output": (
        lambda: TupleParallel(Double(), TWO, transfer_output="cpu"),
        "To name the device of outputs, use transfer_output=True, output_device='cpu'",
        lambda: tuple_parallel(PARTS, transfer_output=True, output_device="cpu"),
        NEGATIVE,
    ),
    "a device as transfer_input": (
        lambda: TupleParallel(Double(), TWO, transfer_input="cpu"),
        "transfer_input='cpu' is not True or False. Parts move to device_ids",
        lambda: tuple_parallel(PARTS, transfer_input=True),
        NEGATIVE,
    ),
    "output_device alone": (
        lambda: TupleParallel(Double(), TWO, output_device="cpu"),
        "output_device='cpu' has no effect without transfer_output=True. Give both, or none",
        lambda: [tuple_parallel(PARTS, transfer_output=True, output_device="cpu"), tuple_parallel(PARTS)],
        [NEGATIVE, NEGATIVE],
    ),
    "no function as reduction": (
        lambda: TupleParallel(Double(), TWO, reduction="cat"),
        "Give a function of the tuple of outputs, such as parawrap.cat",
        lambda: tuple_parallel(PARTS, reduction=parawrap.cat),
        -X,
    ),
    "dim of a TupleParallel": (
        lambda: TupleParallel(Double(), TWO, dim=1),
        r"Leave it out\. To join .*use reduction=functools\.partial\(parawrap\.cat, dim=1\)",
        lambda: tuple_parallel((X.T, X.T), reduction=functools.partial(parawrap.cat, dim=1)),
        torch.cat([-X.T, -X.T], 1),
    ),
    "tuple_fn of no function": (
        lambda: tuple_fn(None)(3),
        "tuple_fn cannot decorate 3, which is not callable. Give it a function",
        lambda: tuple_fn(torch.neg)(PARTS),
        NEGATIVE,
    ),
    "transpose of a tensor": (
        lambda: transpose([X, X]),
        "row 0 is of type Tensor. Give every row as a tuple, a list, or a dict",
        lambda: [transpose([(1, 2), (3, 4)]), transpose([[1, 2], [3, 4]]), transpose([{"x": 1}, {"x": 2}])],
        [((1, 3), (2, 4)), ((1, 3), (2, 4)), {"x": (1, 2)}],
    ),
    "cat of one part": (
        lambda: cat({"x": X}),
        r"cannot join output\['x'\]: it is of type Tensor. Give the tuple of its parts",
        lambda: cat({"x": PARTS}),
        {"x": X},
    ),
    "cat of unequal numbers of parts": (
        lambda: cat({"x": PARTS, "y": PARTS[:1]}),
        "different numbers of parts.*Return one part per device for each output",
        lambda: cat({"x": PARTS, "y": NEGATIVE}),
        {"x": X, "y": -X},
    ),
    "cat of different structures": (
        lambda: cat(({"x": X}, {"y": X})),
        "Return the same structure on every device",
        lambda: cat(({"x": PARTS[0]}, {"x": PARTS[1]})),
        {"x": X},
    ),
    "cat of nothing": (
        lambda: cat(()),
        r"cannot join output: it has no parts\. Give one part per device",
        lambda: cat(PARTS),
        X,
    ),
    "cat of lists that may be both": (
        lambda: cat(tuple({"levels": level} for level in LEVELS)),
        "Return a tuple to join its items, or a tensor instead of one item per row",
        lambda: (
            cat(tuple({"levels": tuple(level)} for level in LEVELS)),
            cat(tuple(torch.stack(each) for each in LEVELS)),
        ),
        ({"levels": (torch.ones(4, 1), torch.ones(4, 1))}, torch.ones(4, 2, 1)),
    ),
    "cat of unequal shapes": (
        lambda: cat((torch.ones(2, 3), torch.ones(2, 2))),
        "differ beyond dim 0. Pad them, or do not join them",
        lambda: cat((torch.ones(2, 3), nn.functional.pad(torch.ones(2, 2), (0, 1), value=1.0))),
        torch.ones(4, 3),
    ),
    "cat on a dim that is missing": (
        lambda: cat((torch.ones(2), torch.ones(2)), dim=1),
        r"shape \(2,\) has no dim 1\. Give a dim that it has",
        lambda: cat((torch.ones(2), torch.ones(2)), dim=0),
        torch.ones(4),
    ),
}


@table(TUPLES)
def test_cures_of_tuples(row):
    check(row)


# -- wrapper


def size():
    return parawrap.current_rank().world_size


def place(global_rank, local_rank, process_group, args):
    """A task for `Wrapper.start`."""
    return global_rank, args


def numbers():
    yield 1


LAUNCHES = {
    "wrapper without parentheses": (
        lambda: wrapper(size),
        r"wrapper got the callable size instead of a platform. Write @wrapper\(Platform\(\.\.\.\)\) above size",
        lambda: [*wrapper(CPU)(size)()],
        [1],
    ),
    "wrapper of a name": (
        lambda: wrapper("cpu"),
        r"wrapper got 'cpu' instead of a platform. Write wrapper\(Platform\(device=\.\.\.\)\)",
        lambda: [*wrapper(Platform(device="cpu"))(size).inline()],
        [1],
    ),
    "Wrapper of a function": (
        lambda: Wrapper(place),
        r"Wrapper got the callable place instead of a platform. Write Wrapper\(Platform\(\.\.\.\)\)\.start\(place\)",
        lambda: [*Wrapper(CPU).start(place)],
        [(0, None)],
    ),
    "Wrapper of a name": (
        lambda: Wrapper("cpu"),
        r"Wrapper got 'cpu' instead of a platform. Write Wrapper\(Platform\(device=\.\.\.\)\)",
        lambda: [*Wrapper(Platform(device="cpu", verbose=False)).start(place)],
        [(0, None)],
    ),
    "no task": (
        lambda: Wrapper(CPU).start(None),
        "Wrapper.start cannot run None, which is not callable. Give it a function",
        lambda: [*Wrapper(CPU).start(place)],
        [(0, None)],
    ),
    "args that are no tuple": (
        lambda: Wrapper(CPU).start(place, 3),
        r"args=3 is not a tuple. Give Wrapper.start the task's arguments as a tuple: \(3,\)",
        lambda: [*Wrapper(CPU).start(place, (3,))],
        [(0, (3,))],
    ),
    "wrapper of no function": (
        lambda: wrapper(CPU)("size"),
        "wrapper cannot decorate 'size', which is not callable. Give it a function",
        lambda: [*wrapper(CPU)(size).inline()],
        [1],
    ),
    "wrapper of a generator": (
        lambda: wrapper(CPU)(numbers),
        "numbers returns a coroutine or a generator, which a rank cannot send. Return values instead",
        lambda: [*wrapper(CPU)(lambda: [*numbers()])()],
        [[1]],
    ),
    "a misspelled method": (
        lambda: wrapper(CPU)(size).sumbit(),
        "has no attribute 'sumbit': did you mean 'submit'",
        lambda: [*wrapper(CPU)(size).submit().results()],
        [1],
    ),
    "no launch at a time": (
        lambda: wrapper(CPU)(abs).map([-1], max_parallel=0),
        "max_parallel=0 is too small. Use 1 or more, or None for the default",
        lambda: [[*result] for each in (1, None) for result in wrapper(CPU)(abs).map([-1], max_parallel=each)],
        [[1], [1]],
    ),
    "a launch in a rank": (
        lambda: wrapper(CPU)(lambda: [*launched()]).inline(),
        r"launched was launched within rank 0 of 1: .*Call launched\.__wrapped__\(\.\.\.\) to run it in this rank only",
        lambda: [*wrapper(CPU)(lambda: launched.__wrapped__()).inline()],
        [1],
    ),
    "a task in a rank": (
        lambda: wrapper(CPU)(lambda: Wrapper(CPU).start(place)).inline(),
        r"place was launched within rank 0 of 1: .*Call place\(\.\.\.\) to run it in this rank only",
        lambda: [*wrapper(CPU)(lambda: place(0, 0, None, None)).inline()],
        [(0, None)],
    ),
    "ranks in a rank": (
        lambda: wrapper(CPU)(lambda: CPU.open()).inline(),
        "a rank cannot launch ranks. Open them in the launching process",
        lambda: open_and_call(size),
        [1],
    ),
}


@wrapper(CPU)
def launched():
    return size()


def open_and_call(function):
    with CPU.open() as ranks:
        return [*ranks(function)]


@table(LAUNCHES)
def test_cures_of_launches(row):
    check(row)


# -- NeuronCores


def on_cores(rows=4, function=torch.neg, split_size=None, **options):
    """Call a model that is compiled for two rows, on two cores."""
    net = neuron.DataParallel(neuron.trace(function, torch.zeros(2, 3)), device_ids=[0, 1], **options)
    net.split_size = split_size
    return net(torch.ones(rows, 3))


def block_on_cores(**options):
    return run(parallel(neuron.trace(torch.neg, torch.zeros(2, 3)), ["nc:0", "nc:1"], **options), torch.ones(4, 3))


CORES = {
    "a fixed size": (
        lambda: on_cores(function=lambda x: (-x, x.T)),
        "Each core must get exactly the compiled size. To silence this warning, set set_dynamic_batching=False",
        lambda: on_cores(function=lambda x: (-x, x.T), set_dynamic_batching=False)[0],
        -torch.ones(4, 3),
    ),
    "split_size of no rows": (
        lambda: on_cores(split_size=0),
        "split_size=0 is not a valid number. Use an integer of at least 1",
        lambda: on_cores(split_size=1),
        -torch.ones(4, 3),
    ),
    "too few rows": (
        lambda: on_cores(2),
        "2 rows keep 1 of 2 NeuronCores busy. To use all cores evenly, give a multiple of 4 rows",
        lambda: on_cores(4),
        -torch.ones(4, 3),
    ),
    "a split_size above the rows": (
        lambda: on_cores(4, split_size=4),
        "4 rows keep 1 of 2 NeuronCores busy. .*give a multiple of 8 rows, or set a smaller split_size",
        lambda: (on_cores(8, split_size=4), on_cores(4, split_size=2)),
        (-torch.ones(8, 3), -torch.ones(4, 3)),
    ),
    "workers on cores": (
        lambda: block_on_cores(workers="process"),
        'workers="process" is not supported on NeuronCores. Leave workers out',
        block_on_cores,
        -torch.ones(4, 3),
    ),
    "a unit on cores": (
        lambda: block_on_cores(unit=2),
        "unit is not supported on NeuronCores: .*Leave unit out",
        block_on_cores,
        -torch.ones(4, 3),
    ),
}


@table(CORES)
def test_cures_on_neuroncores(row):
    with neuron_host(cores=2):
        check(row)
