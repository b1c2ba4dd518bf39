"""Each error of a call in a parallel block names a cure.

The code with the cure gives the right result.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref

import pytest
import torch
from torch import nn

from parawrap import DataParallel, Platform, parallel, wrapper
from parawrap.errors import DeviceListError, DeviceUnavailableError, ReplicaError
from tests.helpers.calling import Calls, Stateful
from tests.helpers.cures import options_in_error, options_of, run, says
from tests.helpers.same import assert_same

TWO = ["cpu", "cpu"]
X = torch.arange(20.0).view(20, 1)


def call(function, *args, **options):
    """Call a function of rows in a block on two lanes."""
    return run(parallel(function, TWO, **options), *args)


DEVICES = {
    # the message: wrong devices, and devices of the cure
    "devices=0: pass a number of at least 1": ([0], [1]),
    "devices is empty: name at least one device, or omit it": ([[]], [["cpu"], None]),
    "'' is not a device: pass a kind": ([""], ["cpu", None]),
    r"(1\.5|True) is not a device: pass an index, a string such as": (
        [1.5, True],
        ["cpu", torch.device("cpu")],
    ),
    "None is not a device: pass an index, a string such as 'cuda:0', or a torch.device": (
        [[None]],
        [[torch.device("cpu")]],
    ),
    "'cpu:x' is not a device: pass a kind, or a kind with an index": ([["cpu:x"]], [["cpu:0"]]),
}
UNAVAILABLE = {
    r'repeat the name, as in \["cpu", "cpu"\], or pass a number, as in devices=2': (
        ["cpu", "cpu:1"],
        [TWO, 2],
    ),
    "'nonsense' is not a kind of device .*Known kinds: .*cpu": (["nonsense"], ["cpu"]),
}


@pytest.mark.parametrize("message", [*DEVICES, *UNAVAILABLE])
def test_cures_of_devices(message):
    wrong, cures = (
        DEVICES[message]
        if message in DEVICES
        else ([UNAVAILABLE[message][0]], UNAVAILABLE[message][1])
    )
    for devices in wrong:
        with pytest.raises(
            DeviceListError if message in DEVICES else DeviceUnavailableError, match=message
        ):
            parallel(torch.neg, devices)
    for devices in cures:
        assert_same(run(parallel(torch.neg, devices), X), -X)
    if message in UNAVAILABLE:
        with pytest.raises(DeviceUnavailableError, match=message):
            parallel(torch.neg, TWO, output_device=wrong[0][-1])


def ragged(x):
    """Return rows as long as the first value of a shard, which differs between shards."""
    return x.new_ones(len(x), 1 + int(x[0]) // 10)


def nested(x):
    return torch.nested.nested_tensor(list(x), layout=torch.strided)


PADDED = torch.cat([torch.tensor([[1.0, -1.0]] * 11), torch.ones(9, 2)])


def test_cures_of_padding():
    with says("which differ beyond dim 0") as refused:
        call(ragged, X)
    assert options_of(str(refused.value)) == {"join": "pad"}
    # One output of floats needs no value
    assert_same(call(ragged, X, join="pad"), PADDED.clamp(min=0))

    def two(x):
        return {"logits": ragged(x), "mask": ragged(x) > 0}

    for options in ({"join": "pad"}, {}):
        cure = options | options_in_error(lambda: call(two, X, **options))  # noqa: B023
        assert cure == {"join": "pad", "pad_value": {"logits": 0.0, "mask": False}}
        assert_same(call(two, X, **cure), {"logits": PADDED.clamp(min=0), "mask": PADDED > 0})
    with says("holds torch.bool.*pad_value"):
        call(two, X, join="pad", pad_value={"logits": -1.0})
    with says("pad_value=-1 is not a value of torch.bool. Give this output another one") as refused:
        call(two, X, join="pad", pad_value=-1)
    cure = options_of(str(refused.value))
    assert cure == {"pad_value": {"logits": -1, "mask": False}}
    assert_same(call(two, X, join="pad", **cure), {"logits": PADDED, "mask": PADDED > 0})
    assert_same(call(two, X, join="pad", pad_value=0)["logits"], PADDED.clamp(min=0))

    def several(x):
        return {"labels": ragged(x).long(), "heads": [ragged(x), ragged(x)]}

    cure = options_in_error(lambda: call(several, X))
    assert cure == {"join": "pad", "pad_value": {"labels": -100, "heads": (0.0, 0.0)}}
    assert call(several, X, **cure)["labels"][0].tolist() == [1, -100]
    for wrong in (0.5, float("inf"), 2**64):
        with says(f"pad_value={wrong} is not a value of torch.int64"):
            call(lambda x: ragged(x).long(), X, join="pad", pad_value=wrong)
    with says("pad_value='x' is not supported"):
        parallel(ragged, TWO, join="pad", pad_value="x")


def test_cures_of_numbers():
    with says(
        '"mean" is for a mean over rows, "sum" for sums and counts, "stack" for one value per lane'
    ) as refused:
        call(len, X)
    assert options_of(str(refused.value)) == {"reduce": "sum"}
    assert_same(
        [call(len, X, reduce="sum"), call(len, X, reduce="stack")], [20, torch.tensor([11, 9])]
    )
    assert_same(call(lambda x: x.mean().item(), X, reduce="mean"), 9.5)
    for options in ({}, {"reduce": "mean"}):
        with says("if it depends on the rows") as refused:
            call(lambda x: 3, X, **options)
        assert call(lambda x: 3, X, **options | options_of(str(refused.value))) == 3
        assert call(lambda x: 3, X, **options | options_of(str(refused.value), "or ")) == 6

    def count(x):
        return torch.tensor(len(x))

    with says("has no mean over lanes") as refused:
        call(count, X, reduce="mean")
    assert options_of(str(refused.value)) == {"reduce": "sum"}
    assert_same(
        [call(count, X, reduce=each) for each in ("sum", "stack")],
        [torch.tensor(20), torch.tensor([11, 9])],
    )
    with says("has no sum") as refused:
        call(lambda x: (x > 10).any(), X, reduce="sum")
    assert_same(
        call(lambda x: (x > 10).any(), X, **options_of(str(refused.value))), torch.tensor(True)
    )
    with says("Keep one of them") as refused:
        call(len, X, out_dims=None, reduce="sum")
    assert options_of(str(refused.value)) == {"out_dims": 0}
    assert call(len, X, out_dims=0, reduce="sum") == 20
    with says(r"which DataParallel joins as tensors alone. Return a 0-d tensor") as refused:
        DataParallel(Calls(len), TWO)(X)
    assert call(len, X, **options_of(str(refused.value))) == 20


def test_cures_of_sums_over_rows():
    def rows_and_sum(x):
        return {"y": -x, "total": x.sum(0)}

    for array in (False, True):
        with says("without the rows on dim 0") as refused:
            call(lambda x: x.sum(0).numpy() if array else x.sum(0), X)  # noqa: B023
        assert options_of(str(refused.value)) == {"reduce": "sum"}
        total = call(lambda x: x.sum(0).numpy() if array else x.sum(0), X, reduce="sum")  # noqa: B023
        assert total.tolist() == [190.0]
    for options in ({}, {"reduce": "sum"}, {"reduce": {"y": "sum", "total": "sum"}}):
        cure = options_in_error(lambda: call(rows_and_sum, X, **options))  # noqa: B023
        assert cure == {"reduce": {"total": "sum"}}
        assert_same(call(rows_and_sum, X, **cure), {"y": -X, "total": X.sum(0)})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_cures_of_other_outputs():
    with says("Return a list with one item per row"):
        call(lambda x: f"{len(x)} found", X)
    assert call(lambda x: [f"{row}" for row in x], X) == [f"{row}" for row in X]
    with says(r"tensors of torch\.float32 and torch\.float64\. .*join=\"list\" returns"):
        call(lambda x: x.double() if x[0] else x, X)
    assert_same(
        call(lambda x: x.double() if x[0] else x, X, join="list"), [X[:10], X[10:].double()]
    )
    with says('a nested tensor has no dim to join on. join="list" returns'):
        call(nested, X)
    assert [len(each.unbind()) for each in call(nested, X, join="list")] == [10, 10]
    with says(r"Keep the dim in the model \(squeeze\(1\) instead of squeeze\(\)\)"):
        call(torch.squeeze, torch.ones(2, 1), out_dims=0, reduce="mean")
    assert_same(
        call(lambda x: x.squeeze(1), torch.ones(2, 1), out_dims=0, reduce="mean"), torch.ones(2)
    )


def add_in_place(total, x):
    total += x.sum(0)
    return x + 0 * total


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_cures_of_arguments():
    def add(x, y):
        return x + y

    with says(r"dim 1 is out of range for args\[1\], of shape \(20,\): it has 1 dimensions"):
        call(add, X, X[:, 0], in_dims={"y": 1})
    assert_same(call(lambda x, y: x + y[:, None], X, X[:, 0], in_dims={"y": 0}), 2 * X)
    with says("Pass a batch of 16 or 20 rows, or another unit"):
        call(torch.neg, X[:19], unit=4)
    for x, unit in ((X[:16], 4), (X, 4), (X[:19], 1)):
        assert_same(call(torch.neg, x, unit=unit, out_dims=0), -x)
    with says("is a nested tensor, which torch cannot split. Pass a dense tensor to cut it"):
        call(add, X, nested(X))
    assert_same(call(add, X, nested(X).to_padded_tensor(0.0)), 2 * X)
    for layout in (torch.strided, torch.jagged):
        texts = torch.nested.nested_tensor([X, X[:3]], layout=layout)
        with says(r'differ in size on the dim of the rows.*in_dims=\{"y": None\} gives it whole'):
            call(lambda x, y: x, X, texts, in_dims={"y": 1})
        assert_same(call(lambda x, y: x, X, texts, in_dims={"y": None}), X)
    with says(
        r"is an array with 20 rows, and the batch has 20. Pass torch\.from_numpy\(\.\.\.\) of it"
    ):
        call(add, X, X.numpy())
    assert_same(call(add, X, torch.from_numpy(X.numpy())), 2 * X)
    for mode in (torch.no_grad, torch.inference_mode):  # an inference tensor has no version
        with (
            mode(),
            says("Pass one copy per row, cut the tensor with in_dims, or use an out-of-place oper"),
        ):
            call(add_in_place, torch.zeros(1), X, in_dims={"total": None})
    assert_same(
        call(
            lambda total, x: (total + x.sum(0)) * 0 + x, torch.zeros(1), X, in_dims={"total": None}
        ),
        X,
    )


SCALE = nn.Linear(1, 1, bias=False)
nn.init.constant_(SCALE.weight, 2.0)


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


def keep_rows(model, x):
    model.kept = x
    return x


def test_cures_of_globals_and_closures():
    with says(
        "uses the global 'SCALE'.*Make it an attribute of the model, or an argument of "
        "functools.partial"
    ):
        call(ByGlobal(), X)
    for model in (ByAttribute(), functools.partial(scale_by, SCALE)):
        assert_same(call(model, X).detach(), 2 * X)
    with says(
        "a function captures a list .*Make it an attribute of the model, or give it by "
        "functools.partial"
    ):
        call(Stateful(scale_by_first([SCALE]), scale=SCALE), X)
    for model in (
        Stateful(lambda model, x: model.layers[0](x), layers=[SCALE], scale=SCALE),
        Stateful(functools.partial(scale_first, [SCALE]), scale=SCALE),
    ):
        assert_same(call(model, X).detach(), 2 * X)


def test_cures_of_attributes():
    with says(
        r"args\[1\] is a list_iterator, and lanes would take its items from each other. Pass a "
        r"list of them"
    ):
        call(lambda x, items: x, X, iter([1, 2]))
    with says("'source' is an iterator .*Keep its items in a list"):
        call(Stateful(lambda model, x: x, source=iter([1])), X)
    assert_same(call(Stateful(lambda model, x: x * model.source[0], source=[3]), X), 3 * X)
    with says(r"is a weak reference to a Linear; .*Hold it in a list: \[value\]"):
        call(Stateful(lambda model, x: model.scale()(x), scale=weakref.ref(SCALE)), X)
    assert_same(
        call(Stateful(lambda model, x: model.scale[0](x), scale=[SCALE]), X).detach(), 2 * X
    )
    with says(
        "'handle' is a Handle, which cannot be copied .*Make it in forward, or give its "
        "class a __deepcopy__"
    ):
        call(Stateful(lambda model, x: x * model.handle.factor, handle=Handle()), X)
    assert_same(call(Stateful(lambda model, x: x * Handle().factor), X), 3 * X)
    assert_same(
        call(Stateful(lambda model, x: x * model.handle.factor, handle=CopiedHandle()), X), 3 * X
    )


def test_a_module_that_is_parallel_already():
    @wrapper(Platform(device="cpu"))
    def use():
        model = nn.parallel.DistributedDataParallel(SCALE)
        with says("is a DistributedDataParallel, which is parallel already. Give the module in it"):
            call(model, X)
        return call(model.module, X).detach()

    assert_same(use.inline()[0], 2 * X)


def test_cures_of_copies():
    with says(
        r"Let its __deepcopy__ copy all attributes with copy\.deepcopy\(value, memo\), or remove "
        r"the method"
    ):
        call(Sharing(), X)
    for cured in (Copying(), ByAttribute()):
        assert_same(call(cured, X).detach(), 2 * X)
    deep = Stateful(
        lambda model, x: x, chain=functools.reduce(lambda inner, _: [inner], range(1000), [])
    )
    with says(
        "the model is nested too deeply to be copied. Raise the limit with sys.setrecursionlimit"
    ):
        call(deep, X)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20000)
    try:
        assert_same(call(deep, X), X)
    finally:
        sys.setrecursionlimit(before)


def test_cures_of_writes():
    with says("State per row belongs in the arguments and the output"):
        call(Stateful(keep_rows, buffers={"kept": torch.zeros(1, 1)}).eval(), X)
    assert_same(call(lambda x, kept: (x + kept, x), X, torch.zeros(20, 1)), (X, X))
    with says("Make it before the block, for instance by a call of the model"):
        call(Stateful(lazily), X)
    lazily(made := Stateful(lazily), X)
    assert_same(call(made, X).detach(), 2 * X)
    with says("Return the value from the call instead"):
        call(Stateful(counts), X)
    assert_same(call(lambda x: (x, len(x)), X, reduce="sum"), (X, 20))
    with parallel(Stateful(reset_weight, layer=nn.Linear(1, 1, bias=False)), TWO) as p:
        for use in (lambda: p(X), lambda: next(p.map([X]))):
            with says(
                "'layer.weight'.*another thread.*Compute with a new tensor, make it a buffer, or "
                "write it between calls"
            ):
                use()
    new_tensor = Stateful(
        lambda model, x: nn.functional.linear(x, torch.full((1, 1), 2.0)), layer=SCALE
    )
    assert_same(call(new_tensor, X), 2 * X)


def fill(model, value):
    """Change the weight in place."""
    model.weight.fill_(value)


def replace(model, value):
    """Make another weight. The lanes get it with the next call."""
    model.weight = nn.Parameter(torch.full((1, 1), value))
    model(X)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (fill, "or write it between calls"),
        (replace, "Read the outputs first, and change the model then"),
    ],
)
def test_models_that_change_during_streams(change, says):
    """A model may change once the outputs of a stream are read, and not before."""
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


def scale(x, *others):
    """Take a factor per row, a whole vector, and a dict with another one."""
    return x * others[0] + others[1] + others[2]["shift"]


def log_calls(function):
    """Decorate a function without `functools.wraps`, so that its parameters have no names."""

    def logged(*args, **kwargs):
        return function(*args, **kwargs)

    return logged


def test_cures_of_arguments_without_names():
    """Each argument of ``*args`` gets an entry of its own. Builtins need a keyword."""
    shift = torch.arange(3.0)
    args = torch.ones(20, 3), X, shift, {"shift": shift, "more": X}
    for function in (scale, log_calls(scale)):
        cure = options_in_error(lambda function=function: call(function, *args))
        assert_same(call(function, *args, **cure), scale(*args))
    assert cure == {"in_dims": {"args": (0, 0, None, None)}}
    # The entries of the user stay, also one for all arguments of ``*args``
    cure = options_in_error(lambda: call(scale, *args, in_dims={"others": 0}))
    assert cure == {"in_dims": {"others": (0, None, None)}}
    with says('in_dims={"name of args.1.": None} and pass args.1. by keyword'):
        call(torch.add, args[0], shift)
    with parallel(torch.add, TWO, in_dims={"other": None}) as p:
        assert_same(p(args[0], other=shift), args[0] + shift)


def test_lists_in_extra_arguments():
    """The entries of a tuple may be "items", or for parts of an argument. Some may be left out."""

    def join(x, *lists):
        return [f"{row.item():.0f}{text}" for row, text in zip(x, lists[0], strict=True)], lists[1]

    texts = [*"abcd"]
    entries = ("items", (None, None))
    with parallel(join, TWO, in_dims={"lists": entries}, out_dims=("items", None)) as p:
        joined, whole = p(X[:4], texts, (texts, texts), 1)
    assert (joined, whole) == (["0a", "1b", "2c", "3d"], (texts, texts))
    with (
        parallel(join, TWO, in_dims={"lists": (None, (0,))}) as p,
        says(r'in_dims\["lists"\]\[1\] decl'),
    ):
        p(X[:4], texts, (texts, texts))
