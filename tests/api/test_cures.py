"""Each error of the blocks and the wrappers names a cure.

The code with the cure gives the right result.
"""

from __future__ import annotations

import configparser
import functools
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import parawrap
from parawrap import (
    DataParallel,
    GatherError,
    Platform,
    ShardError,
    TupleParallel,
    Wrapper,
    cat,
    collect,
    compare,
    default_collate,
    gather,
    neuron,
    parallel,
    parallel_apply,
    recursive_cuda,
    recursive_to,
    scatter,
    scatter_kwargs,
    tp_collate,
    transpose,
    tuple_fn,
    wrapper,
)
from parawrap.testing import check_rowwise, neuron_host
from tests.helpers.calling import Calls
from tests.helpers.cures import run, says
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


class CallableTokenizer(Tokenizer):
    def __call__(self, x):
        return -x


class Scaled(nn.Module):
    def forward(self, x, **options):
        return x * options["factor"]


# -- parallel

OPTIONS = {
    # what is wrong: the name, wrong values, the message, and values of the cure
    "methods": (
        "methods",
        ["forward", ()],
        r"not a sequence of names\. .*methods=\(\"forward\",\)",
        [("forward",)],
    ),
    "a missing method": (
        "methods",
        [("nothing",)],
        "'nothing', but Double has no such method",
        [("forward",)],
    ),
    "workers": (
        "workers",
        ["threads"],
        'workers=.+: give "thread" or "process"',
        ["thread", "process"],
    ),
    "retries": (
        "retries",
        [-1, "1"],
        "retries=.+: give a number of further attempts, at least 0",
        [0],
    ),
    "dim": ("dim", ["0", True], "dim=.+: give the dim that the rows lie on, such as 0", [0]),
    "unit": (
        "unit",
        [0, 2.0],
        "unit=.+: give the number of rows that stay together, at least 1",
        [1],
    ),
    "in_dims": (
        "in_dims",
        [0, (0, None)],
        r"is not a mapping\. Use in_dims=\{\"parameter name\"",
        [{"x": 0}],
    ),
    "a missing parameter": (
        "in_dims",
        [{"y": 0}],
        "names 'y', but Double has no such .* It has: x",
        [{"x": 0}],
    ),
    "an entry of in_dims": (
        "in_dims",
        [{"x": "rows"}, {"x": 1.5}, {"x": True}, {"x": {"y": "rows"}}],
        r'in_dims\[.*\]=.* is not supported. Use a dim, None, "items"',
        [{"x": 0}, {"x": -2}],
    ),
    "out_dims": (
        "out_dims",
        ["rows", (0, {"a": 1.5})],
        'Use a dim, None, "items", "ragged", or a tuple',
        [0, "ragged"],
    ),
    "out_dims that reduce": ("out_dims", ["mean"], "'mean' is a value of reduce", [0]),
    "reduce": (
        "reduce",
        ["max", {"a": "median"}, 1],
        "Use 'mean', 'sum', 'stack', a function",
        ["mean", torch.max],
    ),
    "join": ("join", ["stack"], "Use 'cat', 'pad', or 'list'", ["cat", "pad"]),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_cures_of_options(what):
    """The error comes at the call of `parallel`, and is a ShardError, or a GatherError if outputs
    are concerned.
    """
    name, wrong, message, cures = OPTIONS[what]
    for value in wrong:
        with pytest.raises(
            GatherError if name in ("out_dims", "reduce", "join") else ShardError, match=message
        ):
            parallel(Double(), TWO, **{name: value})
    for value in cures:
        assert_same(run(parallel(Double(), TWO, **{name: value}), X), 2 * X)


def test_cures_of_targets():
    with says("target=3 is not callable. Give parallel a module, a method, or another callable"):
        parallel(3, TWO)
    assert_same(run(parallel(torch.neg, TWO), X), -X)
    with says("is not callable. Give parallel a module, a method"):
        parallel(Tokenizer(), TWO, methods=("encode",))
    assert_same(run(parallel(Tokenizer().encode, TWO), X), 2 * X)
    with says(
        r"methods=.* needs a module, and the target is a method\. Pass the method itself as the "
        r"target"
    ):
        parallel(Double().triple, TWO, methods=("forward", "triple"))
    assert_same(run(parallel(Double().triple, TWO), X), 3 * X)
    with says("the target is a CallableTokenizer. Pass the method itself as the target"):
        parallel(CallableTokenizer(), TWO, methods=("encode",))
    assert_same(run(parallel(CallableTokenizer(), TWO), X), -X)
    assert_same(run(parallel(CallableTokenizer().encode, TWO), X), 2 * X)


def test_cures_of_methods():
    model = Double()
    with (
        parallel(model, TWO) as p,
        says(r"Name it in parallel\(\.\.\., methods=\(\.\.\., 'triple'\)\)"),
    ):
        p.method("triple")
    with parallel(model, TWO, methods=("forward", "triple")) as p:
        assert_same(p.method("triple")(X), 3 * X)
        for use in (lambda: p(X), lambda: p.map([]), lambda: p.submit(X)):
            with says(r"names several methods\. Choose one: p\.method\('forward'\)"):
                use()
        assert_same(p.method("forward")(X), 2 * X)
    with parallel(model.triple, TWO) as p:
        with says(r"the target, which is not a module\. Call, map, or submit the block itself"):
            p.method("triple")
        assert_same(p(X), 3 * X)


def test_names_of_keywords():
    """in_dims may name a keyword of `**kwargs`."""
    with says(
        r"in_dims names 'options', but Scaled .*Name the keyword arguments of \*\*kwargs one by one"
    ):
        parallel(Scaled(), TWO, in_dims={"options": None})
    block = parallel(Scaled(), TWO, in_dims={"factor": None}, out_dims=0)
    assert_same(run(block, X, factor=torch.full((1,), 3.0)), 3 * X)
    for in_dims in ({"factor": None}, None):
        assert_same(run(parallel(Scaled(), TWO, in_dims=in_dims), X, factor=2), 2 * X)


def test_a_block_without_effect():
    """Each of the three uses that the warning names works, and gives no warning.

    Neither does close().
    """
    parallel(model := Double(), TWO).close()
    with pytest.warns(
        UserWarning, match="had no effect: open it with `with`, call it, or use it as a decorator"
    ):
        parallel(model, TWO)
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
    """A block does not decorate a generator, which would run after its block has ended."""
    model = Double()

    def outputs(x):
        yield model(x)

    def outputs_of_a_block(x):
        with parallel(model, TWO):
            yield model(x)

    with says(r"outputs is a coroutine or a generator.*Open the block inside it"):
        parallel(model, TWO)(outputs)
    assert_same(list(outputs_of_a_block(X)), [2 * X])


# -- map, check_rowwise, compare, collect


STREAMS = {
    # what is wrong: wrong options, the message, and options of the cure
    "buffersize": (
        {"buffersize": 0},
        "buffersize=0 is too small.*Use 1 or more",
        [{"buffersize": 1}],
    ),
    "chunksize": (
        {"chunksize": 0},
        'chunksize=0: .*Use 1 or more, or "auto"',
        [{"chunksize": 1}, {"chunksize": "auto"}],
    ),
    "a small buffer": (
        {"chunksize": 2, "buffersize": 1},
        "buffersize=1 has no room for chunksize=2 batches. Use at least as many",
        [{"chunksize": 2, "buffersize": 2}],
    ),
    "key alone": ({"key": len}, "key= is given without resume=", [{}]),
}


@pytest.mark.parametrize("what", STREAMS)
def test_cures_of_streams(what):
    """The error comes at the call of `map`."""
    wrong, message, cures = STREAMS[what]
    with parallel(Double(), TWO) as p:
        with pytest.raises(ShardError, match=message):
            p.map(PARTS, **wrong)
        for options in cures:
            assert_same([*p.map(PARTS, **options)], [2 * part for part in PARTS])


def test_cures_of_sources():
    """Iterating a tensor gives single rows, and iterating a dict its keys."""
    with parallel(Double(), TWO) as p:
        with says(r"p\.map\(x\.split\(32\)\), or give a list of batches: p\.map\(\[x\]\)"):
            p.map(X)
        assert_same([*p.map(X.split(32)), *p.map([X])], [2 * X, 2 * X])
        with says(
            r"p\.map\(torch\.as_tensor\(x\)\.split\(32\)\), or give a list of batches: "
            r"p\.map\(\[x\]\)"
        ):
            p.map(X.numpy())
        assert_same(
            [*p.map(torch.as_tensor(X.numpy()).split(32)), *p.map([X.numpy()])],
            [2 * X, 2 * X.numpy()],
        )
        with says(r"p\.map\(\[batch\]\), or p\.map\(d\.values\(\)\)"):
            p.map({"x": X})
        assert_same(
            [*p.map([{"x": X}]), *p.map({"a": X, "b": -X}.values())], [2 * X, 2 * X, -2 * X]
        )
    with parallel(str.upper, TWO) as p:
        with says(r"batches is a str.*p\.map\(\[batch\]\)"):
            p.map("ab")
        assert [*p.map(["ab"])] == ["AB"]


def test_a_bar_without_tqdm(monkeypatch):
    """The extra of the message installs tqdm."""
    with parallel(Double(), TWO) as p, monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tqdm", None)
        patch.setitem(sys.modules, "tqdm.auto", None)
        with pytest.raises(ImportError, match=r"Run pip install 'parawrap-torch\[cli\]'"):
            list(p.map(PARTS, progress=True))
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    assert "tqdm" in extras["options.extras_require"]["cli"]


class Twice(nn.Module):
    """Runs its layer two times, and its unused layer never."""

    def __init__(self):
        super().__init__()
        self.layer, self.last, self.unused = Double(), Double(), Double()

    def forward(self, x):
        return self.last(self.layer(self.layer(x)))


def test_cures_of_check_and_compare():
    short = {"rounds": 2, "calls": 1, "show": False}
    for wrong in (X[:4], X[:3].tolist() * 2):
        with says("the batch was not cut.*Give a batch of 5 rows or more, as tensors"):
            check_rowwise(Double(), wrong)
    check_rowwise(Double(), X[:5])
    with says(
        "Dropout mixes rows.*It draws random numbers, which differ between cuts. Use eval mode"
    ):
        check_rowwise(nn.Dropout(), X)
    check_rowwise(nn.Dropout().eval(), X)
    for wrong in ({"rounds": 1}, {"calls": 0}, {"methods": ("forward", "triple")}):
        with says("compare needs rounds >= 2, calls >= 1, and one method"):
            compare(Double(), X, TWO, **wrong)
    assert compare(Double(), X, TWO, methods=("forward",), **short).ways[-1].outputs.absolute == 0
    x = torch.ones(20, 2, requires_grad=True)
    with says(
        "no floating-point tensor that requires gradients. Pass loss=, a function of the output"
    ):
        compare(torch.fft.fft, x, TWO, train=True, **short)
    found = compare(
        torch.fft.fft, x, TWO, train=True, loss=lambda output: output.abs().sum(), **short
    )
    assert found.ways[-1].gradients.absolute == 0


def test_cures_of_collect():
    with says(r"layers='last' is one name. Give a sequence of names: \['last'\]"):
        collect(Twice(), "last")
    with says("the layer 'layer' ran 2 times in one call. Name layers that run once"):
        collect(Twice(), ["layer"])(X)
    with says("the layer 'unused' ran 0 times in one call. Name layers that run once"):
        collect(Twice(), ["unused"])(X)
    assert_same(collect(Twice(), ["last"])(X), {"last": 8 * X})
    with says(r"Twice has no submodule 'lst'. model\.named_modules\(\) lists the names"):
        collect(Twice(), ["lst"])
    assert [name for name, _ in Twice().named_modules()] == ["", "layer", "last", "unused"]


# -- DataParallel and its steps


class Moves:
    """An object whose `to` moves it in place, and returns None."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)

    cuda = to


class MovesAndReturns(Moves):
    def to(self, device):
        super().to(device)
        return self


def test_cures_of_data_parallel():
    with says(
        "devices is empty: name at least one device, or omit it to use every visible accelerator"
    ):
        DataParallel(Double(), [])
    assert_same(
        [DataParallel(Double(), ["cpu"])(X), DataParallel(Double())(X).cpu()], [2 * X, 2 * X]
    )
    for wrong in (None, 1.5):
        with says(
            f"{wrong} is not a device: pass an index, a string such as 'cuda:0', or a torch.device"
        ):
            DataParallel(Double(), [wrong])
    assert_same(DataParallel(Double(), [torch.device("cpu")] * 2)(X), 2 * X)
    mean = Calls(lambda x: (2 * x).mean())
    with says(r'joins them into a vector.*For their mean, use parallel\(module, reduce="mean"\)'):
        DataParallel(mean, TWO)(X)
    assert_same(run(parallel(mean, TWO, reduce="mean"), X), 2 * X.mean())

    def add(x, y):
        return x + y

    with says(r"(?s)args\[1\] has 3.*parallel block.*in_dims"):
        DataParallel(Calls(add), TWO)(X, torch.zeros(3))
    assert_same(
        run(parallel(add, TWO, in_dims={"y": None}, out_dims=0), X, torch.zeros(3)),
        X + torch.zeros(3),
    )


def test_cures_of_entries_of_rows():
    """The error of patches of all images next to one text per image names another shape and whole
    batches.
    """
    patches = torch.arange(80.0).view(80, 1)

    def describe(x, patches):
        return x + patches.flatten(0, -2).view(len(x), 4).sum(1, keepdim=True)

    plain = describe(X, patches)
    with says(
        r"pass it as \(20, 4, \.\.\.\), and use flatten\(0, 1\) in the target.*`map` of the block, "
        r"or TupleParallel"
    ):
        run(parallel(describe, TWO), X, patches)
    with parallel(describe, TWO) as p:
        assert_same(p(X, patches.view(20, 4, 1)), plain)
        assert len(p.stats().shards) == 2
        assert_same([*p.map([(X, patches)])], [plain])
    parts = tuple_parallel(PARTS, patches.split(40), function=describe)
    assert_same(torch.cat(parts), plain)


def test_cures_of_steps_of_calls():
    for use in (lambda: scatter(X, []), lambda: scatter_kwargs((X,), None, ())):
        with says("the list of devices is empty. Name at least one device"):
            use()
    assert_same(scatter(X, ["cpu"]), (X,))
    with says("gather got a dict, which is one output. Give a list with one output per device"):
        gather({"x": X}, "cpu")
    assert_same(gather([{"x": part} for part in PARTS], "cpu"), {"x": X})
    with says("gather got no outputs. Give one output per device"):
        gather([], "cpu")
    assert_same(gather([*PARTS], "cpu"), X)
    with says(
        "got 2 modules, 1 inputs, 2 dicts of keyword arguments, 1 devices. Give one of each "
        "per call"
    ):
        parallel_apply([torch.neg, torch.abs], [X], devices=["cpu"])
    assert_same(parallel_apply([torch.neg, torch.abs], [X, X], [{}, {}], devices=TWO), [-X, X])
    for move, name in ((recursive_to, "to"), (recursive_cuda, "cuda")):
        with says(
            rf"Moves\.{name}\(\) returned None\. End it with `return self`, or return the moved "
            rf"Moves"
        ):
            move(Moves(X), "cpu")
    assert_same(recursive_to(MovesAndReturns(X), "cpu").x, X)


# -- TupleParallel, tp_collate, cat


def pairs(samples):
    """Collate samples into a tuple of two tensors."""
    return torch.stack(samples), -torch.stack(samples)


def one_or_two(samples):
    return torch.stack(samples) if len(samples) > 1 else pairs(samples)


def tuple_parallel(*args, function=torch.neg, **options):
    """Call a TupleParallel of a function."""
    with TupleParallel(Calls(function), TWO, **options) as net:
        return net(*args)


NEGATIVE = tuple(-part for part in PARTS)


def test_cures_of_collate_functions():
    """A batch in place of the number is shortened."""
    samples = list(X)
    with says(
        r"ndevices=<function pai.*> is not a number of devices. Give tp_collate an int .* "
        r"tp_collate\(2\)"
    ):
        tp_collate(pairs)
    assert_same(tp_collate(2)(pairs)(samples), (PARTS, NEGATIVE))
    with says(
        r"is not a number of devices. Give default_collate an int .*, such as default_collate\(2\)"
    ) as caught:
        next(iter(DataLoader(X, 20, collate_fn=default_collate)))
    assert len(str(caught.value)) < 400
    assert_same(next(iter(DataLoader(X, 20, collate_fn=default_collate(len(TWO))))), PARTS)
    with says(r"tp_collate cannot cut a .*Give it a list: list\(samples\)"):
        tp_collate(2)(torch.stack)(iter(X))
    assert_same(tp_collate(2)(torch.stack)(list(iter(X))), PARTS)
    with says(
        "the collate function's parts differ.*Return the same structure for any number of samples"
    ):
        tp_collate(2)(one_or_two)(samples[:3])
    with says("part 1 has 1 item, part 0 has 2"):  # no value is dropped as by zip
        tp_collate(2)(tuple)([1, 2, 3])
    assert_same(tp_collate(2)(pairs)(samples[:3])[0], X[:3].split([2, 1]))


def test_cures_of_parts_per_device():
    with says(r"args\[0\] is a Tensor\. Give a tuple or list with one part per device"):
        tuple_parallel(X)
    with says(r"args\[1\] is a PackedSequence\. Give a tuple or list with one part per device"):
        tuple_parallel(PARTS, pack_sequence([X]))
    assert_same([tuple_parallel(PARTS), tuple_parallel([*PARTS])], [NEGATIVE, NEGATIVE])
    with says(r"kwargs\[\"batch\"\]\[\"y\"\] is a int"):
        TupleParallel(Double(), TWO)(batch={"x": PARTS, "y": 3})
    negate = functools.partial(tuple_parallel, function=lambda batch: -batch["x"])
    with says(
        r"args\[0\]\[\"x\"\] is a Tensor\. .*If the dict itself is one part, give a tuple with one "
        r"dict per device"
    ):
        negate({"x": X})
    assert_same([negate({"x": PARTS}), negate([{"x": X}, {"x": -X}])], [NEGATIVE, (-X, X)])
    with says(
        r"args\[0\] is an empty dict, so the number of parts is unknown. Give a tuple with one "
        r"dict per device"
    ):
        tuple_parallel({}, function=len)
    assert tuple_parallel(({}, {}), function=len) == (0, 0)


def test_cures_of_numbers_of_parts():
    with says(
        "the arguments have different numbers of parts.*Give each argument one part per device"
    ):
        tuple_parallel(PARTS, (1,), function=torch.add)
    assert_same(tuple_parallel(PARTS, (1, 2), function=torch.add), (PARTS[0] + 1, PARTS[1] + 2))
    with says(r"different numbers of parts: .*'args\[0\]\[\"x\"\]': 2, 'args\[0\]\[\"y\"\]': 1"):
        tuple_parallel({"x": (1, 2), "y": (1,)})
    with says(
        r"there are 4 parts for 2 devices. Cut into at most 2 parts, as tp_collate\(2\) does"
    ):
        tuple_parallel(X.split(5))
    assert_same(tuple_parallel(tp_collate(2)(torch.stack)(list(X))), NEGATIVE)
    batch = [PARTS, PARTS, PARTS]
    with says(r"there are 3 parts for 2 devices.*pass each item as an argument: model\(\*batch\)"):
        tuple_parallel(batch, function=torch.addcmul)
    assert_same(
        tuple_parallel(*batch, function=torch.addcmul), tuple(part + part * part for part in PARTS)
    )
    with says(
        "output 1 has 2 items, output 0 has 1.*Return equally many items for every part; put "
        "other lists into a dict"
    ):
        tuple_parallel(PARTS, function=lambda x: x[: int(x[0]) // 10 + 1].split(1))
    lists = tuple_parallel(PARTS, function=lambda x: {"rows": x[: int(x[0]) // 10 + 1].split(1)})
    assert_same(lists, ({"rows": (X[0:1],)}, {"rows": (X[10:11], X[11:12])}))


def test_cures_of_tuple_parallel():
    with says(
        "'cpu' is not True or False.*To name the device of outputs, use "
        "transfer_output=True, output_device='cpu'"
    ):
        TupleParallel(Double(), TWO, transfer_output="cpu")
    with says("output_device='cpu' has no effect without transfer_output=True. Give both, or none"):
        TupleParallel(Double(), TWO, output_device="cpu")
    assert_same(tuple_parallel(PARTS, transfer_output=True, output_device="cpu"), NEGATIVE)
    with says("transfer_input='cpu' is not True or False. Parts move to device_ids"):
        TupleParallel(Double(), TWO, transfer_input="cpu")
    assert_same(tuple_parallel(PARTS, transfer_input=True), NEGATIVE)
    with says(
        r"dim=1 has no effect: .*Leave it out\. To join .*use "
        r"reduction=functools\.partial\(parawrap\.cat, dim=1\)"
    ):
        TupleParallel(Double(), TWO, dim=1)
    joined = tuple_parallel((X.T, X.T), reduction=functools.partial(parawrap.cat, dim=1))
    assert_same(joined, torch.cat([-X.T, -X.T], 1))
    for wrong in (tuple_fn, tuple_fn(None)):
        with says("tuple_fn cannot decorate 3, which is not callable. Give it a function"):
            wrong(3)
    assert_same(tuple_fn(torch.neg)(PARTS), NEGATIVE)


def test_cures_of_transpose():
    for rows, message in (
        ([X, X], "row 0 is of type Tensor. Give every row as a tuple, a list, or a dict"),
        ([(1, 2), (1, 2), (1, 2, 3)], "row 2 has 3 items, row 0 has 2"),
        ([{"x": 1}, {"z": 1}], r"row 1 has the keys \['z'\], row 0 has \['x'\]"),
    ):
        with pytest.raises(ShardError, match=message):
            transpose(rows)
    assert transpose([(1, 2), (3, 4)]) == transpose([[1, 2], [3, 4]]) == ((1, 3), (2, 4))
    assert transpose([{"x": 1}, {"x": 2}]) == {"x": (1, 2)}


def test_cures_of_joining_with_cat():
    with says(r"cannot join output\['x'\]: it is of type Tensor. Give the tuple of its parts"):
        cat({"x": X})
    assert_same(cat({"x": PARTS}), {"x": X})
    with says("different numbers of parts.*Return one part per device for each output"):
        cat({"x": PARTS, "y": PARTS[:1]})
    assert_same(cat({"x": PARTS, "y": NEGATIVE}), {"x": X, "y": -X})
    for wrong, difference in (
        (({"x": X}, {"y": X}), r"output: part 1 has the keys \['y'\], part 0 has \['x'\]"),
        (({"h": (1,)}, {"h": (1, 2)}), r"output\['h'\]: part 1 has 2 items, part 0 has 1"),
        ((X, None), "output: part 1 is None, part 0 is of type Tensor"),
    ):
        with says(f"{difference}.*Return the same structure on every device"):
            cat(wrong)
    assert_same(cat(({"x": PARTS[0]}, {"x": PARTS[1]})), {"x": X})
    with says(r"cannot join output: it has no parts\. Give one part per device"):
        cat(())
    assert_same(cat(PARTS), X)
    wide, narrow = torch.ones(2, 3), torch.ones(2, 2)
    with says(
        r"output: shapes \(2, 3\), \(2, 2\) differ beyond dim 0. Pad them, or do not join them"
    ):
        cat((wide, narrow))
    assert_same(cat((wide, nn.functional.pad(narrow, (0, 1), value=1.0))), torch.ones(4, 3))
    with says(r"shape \(2,\) has no dim 1\. Give a dim that it has"):
        cat((torch.ones(2), torch.ones(2)), dim=1)
    assert_same(cat((torch.ones(2), torch.ones(2)), dim=0), torch.ones(4))


# -- wrapper


def size():
    return parawrap.current_rank().world_size


def place(global_rank, local_rank, process_group, args):
    """A task for `Wrapper.start`."""
    return global_rank, args


def numbers():
    yield 1


async def waits():
    pass


@wrapper(CPU)
def launched():
    return size()


def test_cures_of_platforms():
    with says(
        r"wrapper got <function size .* instead of a platform. Write "
        r"wrapper\(Platform\(device=\.\.\.\)\)"
    ):
        wrapper(size)
    assert wrapper(CPU)(size)() == (1,)
    assert wrapper(Platform(device="cpu"))(size).inline() == (1,)
    with says(
        r"Wrapper got 'cpu' instead of a platform. Write Wrapper\(Platform\(device=\.\.\.\)\)"
    ):
        Wrapper("cpu")
    assert Wrapper(Platform(device="cpu", verbose=False)).start(place) == ((0, None),)


def test_cures_of_functions():
    with says("Wrapper.start cannot run None, which is not callable. Give it a function"):
        Wrapper(CPU).start(None)
    with says(r"args=3 is not a tuple. Give Wrapper.start the task's arguments as a tuple: \(3,\)"):
        Wrapper(CPU).start(place, 3)
    assert Wrapper(CPU).start(place, (3,)) == ((0, (3,)),)
    with says("wrapper cannot decorate 'size', which is not callable. Give it a function"):
        wrapper(CPU)("size")
    for function in (numbers, waits):
        with says(
            f"{function.__name__} returns a coroutine or a generator, which a rank cannot send. "
            "Return values instead"
        ):
            wrapper(CPU)(function)
    assert wrapper(CPU)(lambda: [*numbers()])() == ([1],)
    for wrong in (0, -1, 2.0, "2"):
        with says(f"max_parallel={wrong!r}: use an int of 1 or more, or None for the default"):
            wrapper(CPU)(abs).map([-1], max_parallel=wrong)
    assert [[*wrapper(CPU)(abs).map([-1], max_parallel=each)] for each in (1, None)] == [
        [(1,)],
        [(1,)],
    ]


def test_cures_of_launches_in_ranks():
    def inline(function):
        return wrapper(CPU)(function).inline()

    with says(
        r"launched was launched within rank 0 of 1: .*Call launched\.__wrapped__\(\.\.\.\) to run "
        r"it in this rank only"
    ):
        inline(lambda: launched())
    assert inline(lambda: launched.__wrapped__()) == (1,)
    with says(
        r"place was launched within rank 0 of 1: .*Call place\(\.\.\.\) to run it in this rank only"
    ):
        inline(lambda: Wrapper(CPU).start(place))
    assert inline(lambda: place(0, 0, None, None)) == ((0, None),)
    with says("a rank cannot launch ranks. Open them in the launching process"):
        inline(lambda: CPU.open())
    with CPU.open() as ranks:
        assert ranks(size) == (1,)


# -- NeuronCores


def on_cores(rows=4, function=torch.neg, split_size=None, **options):
    """Call a model that is compiled for two rows, on two cores."""
    net = neuron.DataParallel(
        neuron.trace(function, torch.zeros(2, 3)), device_ids=[0, 1], **options
    )
    net.split_size = split_size
    return net(torch.ones(rows, 3))


def block_on_cores(**options):
    return run(
        parallel(neuron.trace(torch.neg, torch.zeros(2, 3)), ["nc:0", "nc:1"], **options),
        torch.ones(4, 3),
    )


def test_cures_on_neuroncores():
    def turned(x):
        return -x, x.T

    with neuron_host(cores=2):
        with says(
            "Each core must get exactly .*To silence this warning, set set_dynamic_batching=False"
        ):
            on_cores(function=turned)
        assert_same(on_cores(function=turned, set_dynamic_batching=False)[0], -torch.ones(4, 3))
        with says("split_size=0 is not a valid number. Use an integer of at least 1"):
            on_cores(split_size=0)
        assert_same(on_cores(split_size=1), -torch.ones(4, 3))
        with says('workers="process" is not supported on NeuronCores. Leave workers out'):
            block_on_cores(workers="process")
        with says("unit is not supported on NeuronCores: .*Leave unit out"):
            block_on_cores(unit=2)
        assert_same(block_on_cores(), -torch.ones(4, 3))
