"""The error of outputs that cannot be joined names all of them, and the options that join them, as
one would paste them.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import DataParallel, GatherError, parallel
from tests.helpers.calling import Calls, Stateful
from tests.helpers.cures import options_in_error, options_of, run, says
from tests.helpers.same import assert_same

TWO = ["cpu", "cpu"]
X = torch.arange(22.0).view(22, 1)
WEIGHT = nn.Parameter(torch.ones(7))
Pair = namedtuple("Pair", "y loss")


@dataclasses.dataclass
class Result:
    y: object
    loss: object
    state: object = None


class Output(OrderedDict):
    """Like the outputs of transformers, with its items as attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def layers(x):
    """A state with the rows on dim 1."""
    return x.view(1, -1, 1).repeat(2, 1, 3)


def call(function, *args, **options):
    with torch.no_grad():
        return run(parallel(function, TWO, **options), *args)


OUTPUTS = {
    # an output, and the options that the error of its call names
    "a number": (lambda x: x.mean(), {"reduce": "mean"}),
    "a dict": (lambda x: {"y": x, "loss": x.mean()}, {"reduce": {"loss": "mean"}}),
    "one key": (lambda x: {"loss": x.mean()}, {"reduce": {"loss": "mean"}}),
    "a nested dict": (
        lambda x: {"y": x, "parts": {"box": x.mean(), "n": len(x)}},
        {"reduce": {"parts": {"box": "mean", "n": "sum"}}},
    ),
    "a state": (lambda x: {"y": x, "state": {"h": layers(x)}}, {"out_dims": {"state": {"h": 1}}}),
    "a tuple": (lambda x: (x, (layers(x), layers(x))), {"out_dims": (0, (1, 1))}),
    "a namedtuple": (lambda x: Pair(x, x.mean()), {"reduce": (None, "mean")}),
    "a dataclass": (
        lambda x: Result(x, x.mean(), {"h": layers(x)}),
        {"reduce": {"loss": "mean"}, "out_dims": {"state": {"h": 1}}},
    ),
    "a model's output": (lambda x: Output(loss=x.mean(), logits=x), {"reduce": {"loss": "mean"}}),
    "a list of dicts": (
        lambda x: [
            {"loss": x.mean(), "y": x},
            {"loss": -x.mean(), "y": x},
            {"loss": 2 * x.mean(), "y": x},
        ],
        {"reduce": ({"loss": "mean"}, {"loss": "mean"}, {"loss": "mean"})},
    ),
    "keys that are no texts": (lambda x: {0: x, 1: x.mean()}, {"reduce": {1: "mean"}}),
    "arrays": (lambda x: {"y": x.numpy(), "total": x.numpy().sum(0)}, {"reduce": {"total": "sum"}}),
    "frames": (
        lambda x: {"y": x, "patches": x.repeat_interleave(4, 0)},
        {"out_dims": {"patches": "ragged"}},
    ),
    "a filter": (lambda x: (x, x[x[:, 0] > 3]), {"out_dims": (0, "ragged")}),
    "lists": (lambda x: {"boxes": [*x[x[:, 0] > 3]]}, {"out_dims": {"boxes": "ragged"}}),
    "entries of all items": (
        lambda x: (x, WEIGHT, x.mean(), [x]),
        {"out_dims": (0, None, 0, (0,)), "reduce": (None, None, "mean", None)},
    ),
    "layers": (lambda x: (x, (layers(x),) * 3), {"out_dims": (0, 1)}),
    "layers in a list": (
        lambda x: {"mems": [layers(x), [layers(x)] * 3]},
        {"out_dims": {"mems": 1}},
    ),
    "many frames": (
        lambda x: {"y": (x.repeat_interleave(4, 0),) * 3, "z": [x.repeat_interleave(4, 0)] * 3},
        {"out_dims": {"y": "ragged", "z": ("ragged", "ragged", "ragged")}},
    ),
    "numbers": (lambda x: {"losses": [x.mean()] * 3, "y": x}, {"reduce": {"losses": "mean"}}),
    "all kinds": (
        lambda x: {
            "y": x,
            "loss": x.mean(),
            "count": len(x),
            "h": layers(x),
            "names": "".join(["a", "b"]),
            "steps": 3,
            "total": x.sum(0),
            "found": (x > 10).any(),
            "shape": x.shape[1:],
        },
        {
            "out_dims": {"h": 1, "names": None, "steps": None, "shape": None},
            "reduce": {"loss": "mean", "count": "sum", "total": "sum", "found": torch.any},
        },
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_cures_have_the_keys_of_the_output(name):
    """One error names all outputs that cannot be joined. Its options join them."""
    function, expected = OUTPUTS[name]
    cure = options_in_error(lambda: call(function, X))
    assert cure == expected
    assert_same(call(function, X, **cure), function(X))


@pytest.mark.parametrize("name", OUTPUTS)
def test_cures_for_other_methods(name):
    function, expected = OUTPUTS[name]
    model = Calls(function)
    model.encode = model.forward
    block = parallel(model, TWO, methods=("encode",))
    with torch.no_grad(), block, pytest.raises(GatherError) as refused:
        model.encode(X)
    assert options_of(str(refused.value)) == expected


def outputs(x):
    return {"y": x, "loss": x.mean(), "n": len(x), "state": {"h": layers(x), "c": x}}


GIVEN = {
    # options of the user, and those that the error names: these replace them
    "a dim for all": (
        {"out_dims": 0},
        {"out_dims": {"y": 0, "loss": 0, "n": 0, "state": {"h": 1, "c": 0}}},
    ),
    "a key of a tree": (
        {"out_dims": {"y": 0}},
        {"out_dims": {"y": 0, "state": {"h": 1}}},
    ),
    "a reduction for all": ({"reduce": "mean"}, {"out_dims": {"state": {"h": 1}}}),
    "another key of reduce": ({"reduce": {"loss": "sum"}}, {"out_dims": {"state": {"h": 1}}}),
}
REDUCTIONS = {
    "a dim for all": {"loss": "mean", "n": "sum"},
    "a key of a tree": {"loss": "mean", "n": "sum"},
    "a reduction for all": {"loss": "mean", "n": "sum"},
    "another key of reduce": {"loss": "sum", "n": "sum"},
}


@pytest.mark.parametrize("name", GIVEN)
def test_cures_keep_what_is_given(name):
    """An option that is set is named only with a change, and keeps its other entries."""
    given, cure = GIVEN[name]
    expected = cure | {"reduce": REDUCTIONS[name]}
    found = options_in_error(lambda: call(outputs, X, **given))
    assert found == expected
    assert call(outputs, X, **given | found)["state"]["h"].shape == (2, 22, 3)


def test_set_options_are_not_advised():
    for given, function in (
        ({"out_dims": 0}, lambda x: {"y": x, "n": x.mean()}),
        ({"reduce": {"n": "mean"}}, lambda x: {"y": layers(x), "n": x.mean()}),
        ({"join": "pad"}, lambda x: (LEAVES[-1](x).long(), x)),
    ):
        with pytest.raises(GatherError) as refused:
            call(function, X, **given)
        ((name, value),) = given.items()
        cure = options_of(str(refused.value))
        assert cure.get(name) != value
        call(function, X, **given | cure)


def test_a_second_meaning():
    """Equal values may be one value or two: both cures are named. The sizes cannot tell."""
    for function, options, others in (
        (lambda x: {"y": x, "n": 3}, {"out_dims": {"n": None}}, {"reduce": {"n": "sum"}}),
        (lambda x: {"y": x, "t": 0.5}, {"reduce": {"t": "mean"}}, {"out_dims": {"t": None}}),
        (
            lambda x: {"y": x, "z": torch.arange(3)},
            {"out_dims": {"z": None}},
            {"reduce": {"z": "sum"}},
        ),
    ):
        with pytest.raises(GatherError) as refused:
            call(function, X)
        assert (options_of(str(refused.value)), options_of(str(refused.value), "or ")) == (
            options,
            others,
        )
        assert_same(call(function, X, **options), function(X))
        call(function, X, **others)


def test_lists_as_long_as_the_shard():
    """A pair of outputs of shards of two rows is a pair, and a list with one
    item per row is not.
    """
    x = X[:4]
    for function, expected in (
        (lambda x: (x, x.mean()), {"reduce": (None, "mean")}),
        (lambda x: [layers(x)[:1], x], {"out_dims": (1, 0)}),
        (lambda x: {"rows": [*x]}, {"out_dims": {"rows": "items"}}),
    ):
        cure = options_in_error(lambda: call(function, x, out_dims=0))  # noqa: B023
        assert cure == expected
        assert_same(call(function, x, **({"out_dims": 0} | cure)), function(x))


# Outputs that no option joins


def compare_all(x):
    return {"logits_per_image": x @ x.T, "embeddings": x, "loss": (x @ x.T).mean()}


@pytest.mark.parametrize("lanes", [2, 3])
def test_outputs_that_compare_rows(lanes):
    """Outputs have the rows of the shard on two dims if they compare rows: no option is advised,
    not for a loss either.

    The page shows what works.
    """
    with (
        parallel(compare_all, ["cpu"] * lanes) as p,
        says("no option can join such comparisons") as refused,
    ):
        p(X)
    message = str(refused.value)
    assert 'output["logits_per_image"] has the rows of the shard on two dims' in message
    assert (
        'the page "Compute a loss in a block" of the documentation, section "Contrastive losses"'
        in message
    )
    assert not any(each in message for each in ("reduce=", "out_dims=", "join="))
    embeddings = call(lambda x: {"embeddings": x}, X)["embeddings"]
    assert_same(embeddings @ embeddings.T, X @ X.T)


def test_outputs_next_to_comparisons():
    with says(r"For the other outputs, use out_dims=\{\"h\": 1\}"):
        call(lambda x: {"y": x @ x.T, "h": layers(x)}, X)


def test_entries_on_another_dim():
    """The error names code that joins patches of all images next to each other on dim 1, as of
    Pixtral.
    """

    def patches(x):
        return {"last_hidden_state": x.repeat_interleave(4, 0)[None], "pooled": x}

    with says(r"several entries \(4 on dim 1\)") as refused:
        call(patches, X)
    message = str(refused.value)
    outputs = call(patches, X, **options_of(message))
    code = message[message.index("torch.cat(") :].partition(" (the page")[0]
    assert_same(eval(code, {"torch": torch, "outputs": outputs}), patches(X)["last_hidden_state"])


@pytest.mark.parametrize("dim", [1, -1])
def test_several_entries_on_the_dim_of_rows(dim):
    with says(r'Use out_dims="ragged"'):
        call(lambda x: x.repeat_interleave(2, 1), X.T, dim=dim)


def test_calls_can_do_without_caches():
    """The error of a cache that lanes cannot join says that the call can do without it."""
    message = r"use_cache=False in the call"
    with says(message):
        call(lambda x: {"y": x, "past_key_values": "".join(["cache", str(len(x))])}, X)

    def model(x, use_cache=True):
        return {"y": x, "past_key_values": object()} if use_cache else {"y": x}

    with says(message):
        call(model, X)
    with torch.no_grad(), parallel(model, TWO) as p:
        assert_same(p(X, use_cache=False), {"y": X})


# DataParallel, which has no options


OF_DATA_PARALLEL = {
    # an output that DataParallel refuses, and the options of a block that its error names
    "keys": (
        lambda x: {"y": x, "count": len(x), "state": {"h": layers(x)}},
        {"reduce": {"count": "sum"}, "out_dims": {"state": {"h": 1}}},
    ),
    "items": (lambda x: (x, [{"n": float(row)} for row in x]), {"out_dims": (0, "items")}),
    "widths": (
        lambda x: {"y": x.new_ones(len(x), 1 + int(x[0]) // 10), "loss": x.mean()},
        {"reduce": {"loss": "mean"}, "join": "pad"},
    ),
}


@pytest.mark.filterwarnings("ignore:the module returned 0-d tensors")
@pytest.mark.parametrize("name", OF_DATA_PARALLEL)
def test_data_parallel_names_a_block(name):
    """Errors of DataParallel name the options of a block, with the keys of the output. A block with
    these options joins the output.
    """
    function, expected = OF_DATA_PARALLEL[name]
    net = DataParallel(Calls(function), TWO)
    with says(r"Use parallel\(model, devices, ") as refused:
        net(X)
    net.close()
    cure = options_of(str(refused.value))
    assert cure == expected
    joined = call(Calls(function), X, **cure)
    if name != "widths":  # shorter rows are padded
        assert_same(joined, function(X))


# Entries of arguments


def test_entries_that_forward_writes():
    """Only options that hold for the entry as it is are named; keys of the
    output are not its own.
    """

    def write(batch):
        batch["loss"] = batch["x"].mean()
        return batch["x"]

    with says('Use reduce="mean".*Return it instead of writing it') as refused:
        call(write, {"x": X})
    batch = {"x": X}
    call(write, batch, **options_of(str(refused.value)))
    assert_same(batch["loss"], X.mean())

    def write_parts(batch):
        batch["aux"] = {"loss": batch["x"].mean()}
        return batch["x"]

    with says("Return it instead of writing it") as refused:
        call(write_parts, {"x": X})
    assert "reduce=" not in str(refused.value)

    def write_number(batch):
        batch["n"] = 3
        return batch["x"]

    # Neither is an option for the entry alone: `out_dims=None` is wrong for the output
    with says("Return it instead of writing it") as refused:
        call(write_number, {"x": X})
    assert "Use " not in str(refused.value)

    def write_several(batch):
        batch["loss"], batch["n"] = batch["x"].mean(), len(batch["x"])
        return batch["x"]

    with says(
        r'writes args\[0\]\["loss"\] and args\[0\]\["n"\] into a dict of the caller.*Return it '
        r"instead"
    ):
        call(write_several, {"x": X})

    def give_back(batch):
        return batch["x"], {"loss": batch["x"].mean()}

    cure = options_in_error(lambda: call(give_back, {"x": X}))
    assert_same(call(give_back, {"x": X}, **cure)[1]["loss"], X.mean())


def write_and_return(batch, layer=None):
    batch["loss"] = batch["x"].mean()
    batch["parts"]["n"] = len(batch["x"])
    batch["parts"]["y"] = -batch["x"]
    return {"batch": batch, "h": layers(batch["x"])}


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_entries_that_forward_returns(workers):
    """Entries of an argument that forward returns have the options of their places in the output,
    next to the other outputs.

    What was there needs none.
    """

    def batch():
        return {"x": X, "heads": 4, "parts": {"z": X, "names": ["a", "b", "c"]}}

    with says('output\\["batch"\\]\\["loss"\\]') as refused:
        call(write_and_return, batch(), workers=workers)
    options = options_of(str(refused.value))
    assert options == {
        "out_dims": {"h": 1},
        "reduce": {"batch": {"loss": "mean", "parts": {"n": "sum"}}},
    }
    given, plain = batch(), batch()
    output = call(write_and_return, given, workers=workers, **options)
    assert_same(output, write_and_return(plain))
    assert output["batch"] is given


def test_options_of_another_structure():
    """Options that do not fit the structure of the output are named alone: what other options mean
    is not known.
    """
    with says(
        r"^output\[\"state\"\] cannot be joined: reduce declares the key 'x', and the output has "
        r"\['c', 'h'\]"
    ):
        call(
            lambda x: {"loss": x.mean(), "state": {"h": x, "c": x}},
            X,
            reduce={"state": {"x": "mean"}},
        )


# Random outputs

LEAVES = [
    lambda x: 2 * x,
    lambda x: x.mean(),
    len,
    lambda x: 3,
    lambda x: True,
    lambda x: (x > 10).any(),
    layers,
    lambda x: "".join(["a", "b"]),
    lambda x: "constant",
    lambda x: x.sum(0),
    lambda x: x[x[:, 0] > 3],
    lambda x: x.repeat_interleave(4, 0),
    lambda x: ["a"] * 3,
    lambda x: ["row"] * len(x),
    lambda x: [*x],
    lambda x: None,
    lambda x: x.numpy(),
    lambda x: x.sum(0).numpy(),
    lambda x: float(x.mean()),
    lambda x: np.float32(x.mean()),
    lambda x: x.mean() + 1j,
    lambda x: x.shape[1:],
    lambda x: [x, x.mean()],
    lambda x: torch.arange(3),
    lambda x: WEIGHT,
    lambda x: x.new_ones(len(x), 1 + int(x[0]) // 10),
    lambda x: x.new_ones(len(x), 1 + int(x[0]) // 10) > 0,
]
STARTS = [{}, {}, {"reduce": "mean"}, {"reduce": "sum"}, {"join": "pad"}]


def make_output(choices, depth=0):
    """Return a function from rows to a nested output."""
    kinds = ["dict", "tuple", "list", "namedtuple", "dataclass"]
    if depth > 2 or (depth and choices.random() < 0.5):
        return choices.choice(LEAVES)
    kind = choices.choice(kinds)
    count = choices.randint(1, 4) if kind in ("dict", "tuple", "list") else 2
    parts = [make_output(choices, depth + 1) for _ in range(count)]
    return {
        "dict": lambda x: {f"key {index}": part(x) for index, part in enumerate(parts)},
        "tuple": lambda x: tuple(part(x) for part in parts),
        "list": lambda x: [part(x) for part in parts],
        "namedtuple": lambda x: Pair(*(part(x) for part in parts)),
        "dataclass": lambda x: Result(*(part(x) for part in parts)),
    }[kind]


@pytest.mark.parametrize("seed", range(60))
def test_cures_of_random_outputs(seed):
    """One try is enough, for outputs of any structure, whatever options are set."""
    choices = random.Random(seed)
    model, options = (
        Stateful(lambda self, x: self.make(x), make=make_output(choices)),
        choices.choice(STARTS),
    )
    with torch.no_grad(), parallel(model, ["cpu"] * choices.choice([2, 3]), **options) as p:
        try:
            p(X)
        except GatherError as error:
            options = options | options_of(str(error))
    with torch.no_grad(), parallel(model, TWO, **options) as p:
        p(X)


def test_comparisons_in_equal_shards():
    """Sizes do not prove a comparison in equal shards: the error names both meanings."""
    with (
        parallel(lambda x: x @ x.T, TWO, out_dims=None) as p,
        says(r"If output compares rows with rows, no option joins it, .*Contrastive losses"),
    ):
        p(torch.randn(10, 3))

    def clip(x):
        pairs = x @ x.T
        return {"pairs": pairs, "loss": pairs.logsumexp(1).mean()}

    with (
        parallel(clip, TWO, out_dims=0) as p,
        says(r'If output\["pairs"\] compares rows with rows, no option joins it, nor a loss of it'),
    ):
        p(torch.randn(10, 3))
