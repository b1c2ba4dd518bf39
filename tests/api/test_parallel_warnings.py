"""Each warning of a block appears once, names a cure, and points at the caller's line."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from parawrap import DataParallel, parallel

TWO = ["cpu"] * 2
FOUR = ["cpu"] * 4


def warnings_of(use):
    """Return the messages of all warnings that `use` causes. Each must point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    assert all(each.category is UserWarning and each.filename == __file__ for each in caught), [
        str(each) for each in caught
    ]
    return [str(each.message) for each in caught]


def called(target, x, devices=TWO, **options):
    """Return a function that opens a block and calls `target` three times."""

    def use():
        with parallel(target, devices, **options) as p:
            for _ in range(3):
                p(x)

    return use


# -- sizes of shards


@pytest.mark.parametrize(
    ("rows", "lanes", "says"),
    [
        (8, 2, "a call of 8 rows on 2 lanes has a shard of 5 rows, .* With out_dims=0, the largest shard has 4 of them"),
        (14, 2, "a call of 14 rows on 2 lanes has a shard of 8 rows, .* With out_dims=0, the largest shard has 7 of them"),
        (8, 4, "a call of 8 rows on 4 lanes has a shard of 3 rows, .* With out_dims=0, the largest shard has 2 of them"),
        (4, 2, "a call of 4 rows on 2 lanes runs whole, .* With out_dims=0, the largest shard has 2 of them"),
    ],
)
def test_a_shard_much_larger_than_a_balanced_one_warns_once_per_block(rows, lanes, says):
    """The warning names the sizes and out_dims=0, which balances and does not warn."""
    x, devices = torch.zeros(rows, 3), ["cpu"] * lanes
    for _ in range(2):
        (message,) = warnings_of(called(torch.tanh, x, devices))
        with pytest.warns(UserWarning, match=says):
            warnings.warn(message, UserWarning, stacklevel=1)
    assert warnings_of(called(torch.tanh, x, devices, out_dims=0)) == []


def test_calls_of_other_sizes_do_not_warn_again():
    """One block gives one warning, whatever the sizes of its calls."""

    def use():
        with parallel(torch.tanh, TWO) as p:
            for rows in (9, 8, 6, 14, 8):
                p(torch.zeros(rows))

    assert len(warnings_of(use)) == 1


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 7, 9, 16, 18, 64])
def test_shards_that_are_nearly_balanced_do_not_warn(rows):
    """A shard may be up to an eighth larger than a balanced one: 16 rows on two lanes are 9 and 7."""
    assert warnings_of(called(torch.tanh, torch.zeros(rows, 3))) == []


@pytest.mark.parametrize("options", [{"join": "list"}, {"out_dims": "ragged"}, {"out_dims": (0,)}], ids=str)
def test_options_that_need_no_proof_balance_without_a_warning(options):
    """The shards of 8 rows on two lanes are 4 and 4."""

    def use():
        with parallel(lambda x: (x,), TWO, **options) as p:
            p(torch.zeros(8))
            assert p.stats().shards == (4, 4)

    assert warnings_of(use) == []


def test_whole_calls_and_torchs_wrapper_do_not_warn_of_sizes():
    """`map`, `submit`, one lane, and DataParallel do not warn."""

    def use():
        x = torch.zeros(8, 3)
        with parallel(torch.tanh, TWO) as p:
            p.submit(x).result(20)
            list(p.map([x] * 3))
        with parallel(torch.tanh, ["cpu"]) as p:
            p(x)
        DataParallel(nn.Linear(3, 3), TWO)(x)

    assert warnings_of(use) == []


# -- calls without tensors


def test_a_call_of_texts_without_tensors_warns_once_that_it_is_not_cut():
    """The warning names both values of `in_dims`. Each of them ends it."""
    texts = ["a", "b", "c", "d", "e"]

    def target(texts):
        return [text.upper() for text in texts]

    (message,) = warnings_of(called(target, texts))
    assert message.startswith("a call without tensors runs plainly: args[0] is a list")
    for in_dim, shards in (("items", (3, 2)), (None, ())):
        assert f"in_dims={{'texts': {in_dim!r}}}".replace("'", '"') in message
        with parallel(target, TWO, in_dims={"texts": in_dim}) as p:
            assert p(texts) == ["A", "B", "C", "D", "E"]
            assert p.stats().shards == shards


# -- random numbers and turns


def test_lanes_that_draw_at_the_same_time_warn_once():
    """The warning names torch.use_deterministic_algorithms(True)."""
    model, x = nn.Dropout(0.5), torch.ones(9, 3)
    with torch.no_grad():
        for _ in range(2):
            (message,) = warnings_of(called(model, x))
            assert "drew from it at the same time, so a seed does not reproduce this call" in message
            assert "With torch.use_deterministic_algorithms(True), lanes run one after another" in message


@pytest.mark.usefixtures("_deterministic")
def test_deterministic_algorithms_end_the_warning_of_draws():
    """Lanes then run in turns, and a seed reproduces the call."""

    def use():
        model, x = nn.Dropout(0.5), torch.ones(9, 3)
        with torch.no_grad(), parallel(model, TWO):
            outputs = []
            for _ in range(3):
                torch.manual_seed(1)
                outputs.append(model(x))
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])

    assert warnings_of(use) == []


def test_lanes_that_draw_in_turns_do_not_warn():
    """With gradients, the lanes of a model that learns run in turns."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    assert warnings_of(called(model, torch.ones(9, 3))) == []


def test_lanes_that_draw_nothing_do_not_warn():
    """Numbers that the caller draws between calls do not count."""

    def use():
        with parallel(torch.tanh, TWO) as p:
            for _ in range(3):
                p(torch.randn(9))

    assert warnings_of(use) == []


def test_a_model_in_eval_mode_with_gradients_warns_once():
    """The warning names torch.inference_mode(), which ends it."""
    model, x = nn.Linear(3, 2).eval(), torch.ones(9, 3)
    for _ in range(2):
        (message,) = warnings_of(called(model, x))
        assert message.startswith("a model in eval mode is called with gradients enabled")
        assert "inside torch.inference_mode()" in message
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            assert warnings_of(called(model, x)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 2).eval()),
        lambda: nn.Linear(3, 2).eval().requires_grad_(requires_grad=False),
        lambda: nn.Tanh().eval(),
        lambda: torch.tanh,
    ],
    ids=["train mode", "submodule in eval mode", "frozen", "without parameters", "function"],
)
def test_other_targets_do_not_warn_of_eval_mode(make):
    """A model in train mode, a model without anything to train, and a function do not warn."""
    assert warnings_of(called(make(), torch.ones(9, 3))) == []


def test_inference_mode_runs_a_model_in_eval_mode_at_the_same_time():
    """As the warning says: the lanes run in turns with gradients, and at the same time without."""
    threads = []

    class Model(nn.Linear):
        def forward(self, x):
            threads.append(threading.get_ident())
            return super().forward(x)

    model = Model(3, 2)
    with parallel(model, FOUR):
        model(torch.ones(9, 3))
        assert set(threads) == {threading.get_ident()}
        threads.clear()
        model.eval()
        with torch.inference_mode():
            model(torch.ones(9, 3))
        assert len(set(threads)) == 4


# -- what forward writes


class Writes(nn.Module):
    """Changes its own state in each forward, in the way that `kind` names. Each forward must find the first state."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear, self.extra = nn.Linear(3, 3), nn.Tanh()
        self.register_buffer("shift", torch.zeros(3))
        self.label, self.words, self.table, self.seen = "first", ["a", "b"], {"a": 1, "b": 2}, set()
        self.config = type("Config", (), {})()
        self.config.depth = 2

    def forward(self, x):
        assert self.state() == ("first", ["a", "b"], {"a": 1, "b": 2}, set(), 2, True, True, False)
        WAYS_TO_WRITE[self.kind][1](self)
        return x + 1

    def state(self):
        return (
            getattr(self, "label", None), self.words, self.table, self.seen, getattr(self.config, "depth", None),
            hasattr(self, "extra"), hasattr(self, "shift"), hasattr(self, "new"),
        )  # fmt: skip


WAYS_TO_WRITE = {
    "sets a new attribute": ("new", lambda self: setattr(self, "new", 1)),
    "sets an attribute": ("label", lambda self: setattr(self, "label", "second")),
    "removes an attribute": ("label", lambda self: delattr(self, "label")),
    "removes an attribute of an object": ("config.depth", lambda self: delattr(self.config, "depth")),
    "appends to a list": ("words", lambda self: self.words.append("c")),
    "empties a list": ("words", lambda self: self.words.clear()),
    "puts an item into a dict": ("table['c']", lambda self: self.table.update(c=3)),
    "removes an item from a dict": ("table['a']", lambda self: self.table.pop("a")),
    "empties a dict": ("table['a']", lambda self: self.table.clear()),
    "adds to a set": ("seen", lambda self: self.seen.add(1)),
    "removes a submodule": ("extra", lambda self: delattr(self, "extra")),
    "replaces a submodule by None": ("extra", lambda self: setattr(self, "extra", None)),
}
"""The place that a warning names, and what forward does."""


@pytest.mark.parametrize("way", ["call", "map", "submit"])
@pytest.mark.parametrize("kind", WAYS_TO_WRITE)
def test_what_forward_writes_is_put_back_with_one_warning_per_block(kind, way):
    """In calls, `map`, and `submit`, each task starts from the model's state, and the model keeps it."""
    model = Writes(kind)
    x = torch.zeros(9, 3)

    def use():
        with torch.no_grad(), parallel(model, TWO) as p:
            if way == "call":
                outputs = [model(x) for _ in range(3)]
            elif way == "map":
                outputs = list(p.map([x] * 6))
            else:
                outputs = [p.submit(x).result(20) for _ in range(4)]
        assert all(torch.equal(output, x + 1) for output in outputs)

    for _ in range(2):
        before = model.state()
        messages = warnings_of(use)
        assert model.state() == before
        assert len(messages) == 1
        assert messages[0].startswith("the model wrote ")
        assert WAYS_TO_WRITE[kind][0] in messages[0]
        assert "these writes do not come back to the model" in messages[0]


@pytest.mark.parametrize("way", ["call", "map", "submit"])
def test_a_model_that_writes_nothing_does_not_warn(way):
    """Reading, and setting the same value again, are not writes."""

    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2

        def forward(self, x):
            self.scale = 2
            return x * self.scale

    def use():
        model, x = Sets(), torch.zeros(9, 3)
        with torch.no_grad(), parallel(model, TWO) as p:
            {"call": lambda: p(x), "map": lambda: list(p.map([x] * 4)), "submit": lambda: p.submit(x).result(20)}[way]()

    assert warnings_of(use) == []
