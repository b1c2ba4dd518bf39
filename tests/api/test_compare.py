"""`compare`: its table, the state that it leaves behind, and the differences that it finds."""

from __future__ import annotations

import dataclasses
import math
import os
import threading

import pytest
import torch
from torch import nn

from parawrap import compare
from parawrap.api.compare import Comparison, Difference, Way, conclude, difference
from parawrap.api.other_programs import CoreTimes

LANES = ["cpu", "cpu"]
SHORT = {"rounds": 2, "calls": 1, "show": False}
SAME = Difference(0.0, 0.0)
SLOW = Way("plain", (0.004, 0.004, 0.004), SAME, None)
FAST = dataclasses.replace(SLOW, name="lanes", seconds=(0.001, 0.002, 0.003))


# -- the table


def test_the_table_has_a_row_per_way(capsys):
    comparison = compare(nn.Linear(3, 2).eval(), torch.randn(9, 3), LANES, rounds=2, calls=3)
    text = capsys.readouterr().out
    title, _, *rows = text.splitlines()
    assert title == "parallel(Linear, ['cpu', 'cpu']): forward in eval mode, 2 rounds of 3 calls"
    names = ["plain", "plain, 1 thread", "map", "lanes"]
    assert all(line.strip().startswith(name) for line, name in zip(rows[:4], names, strict=True))
    assert [way.name for way in comparison.ways] == names
    assert all(len(way.seconds) == 2 and min(way.seconds) > 0 for way in comparison.ways)
    assert repr(comparison).startswith("<Comparison: plain ")
    assert text.endswith(f"\n{comparison.conclusion}\n")
    assert comparison.conclusion.splitlines()[0] in repr(comparison)
    compare(nn.Linear(3, 2), torch.randn(9, 3), LANES, **SHORT)
    assert capsys.readouterr().out == ""


def test_a_table_of_known_numbers():
    """The table has the median, the quartiles, the ratio of medians, and both differences."""
    plain = dataclasses.replace(SLOW, gradients=SAME)
    lanes = Way("lanes", FAST.seconds, Difference(0.5, 0.25), Difference(math.inf, math.inf))
    other = dataclasses.replace(lanes, outputs=SAME, gradients=Difference(1e-7, 1e-8))
    assert str(Comparison("title", (plain, lanes, other))) == (
        "title\n"
        "  way  median ms  middle half ms  speed-up     outputs differ   gradients differ\n"
        "plain      4.000  4.000 to 4.000      1.00                  0                  0\n"
        "lanes      2.000  1.500 to 2.500      2.00  5.0e-01 (2.5e-01)          inf (inf)\n"
        "lanes      2.000  1.500 to 2.500      2.00                  0  1.0e-07 (1.0e-08)"
    )


# -- the conclusion


def way(name, ms, outputs=SAME, gradients=None):
    """Return a way whose middle half is from 1 % below to 1 % above a time."""
    seconds = tuple(ms / 1000 * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02))
    return Way(name, seconds, outputs, gradients)


NO_DIFFERENCE = "No difference was found between the plain call and"
THAN = "as the fastest plain way"
FIND_OUT = "by more than rounding: find out why before you use it."
MIXED = Difference(0.5, 0.25, exceeds_rounding=True)
PLAIN, ONE = way("plain", 4), way("plain, 1 thread", 3)
MAP, CUT = way("map", 2), way("lanes", 2.5)
CONCLUSIONS = {
    "map": (
        (PLAIN, ONE, MAP, CUT),
        f"Map over lanes is 1.50 times as fast {THAN} (plain, 1 thread): write p.map(batches).",
    ),
    "lanes": (
        (PLAIN, way("map", 3), CUT),
        (
            f"A call cut over lanes is 1.60 times as fast {THAN} (plain): write the call inside "
            "the block."
        ),
    ),
    "training": (
        (way("plain", 4, SAME, SAME), way("lanes", 2, SAME, SAME)),
        (
            f"A training step cut over lanes is 2.00 times as fast {THAN} (plain): write the "
            "training step inside the block."
        ),
    ),
    "slower": (
        (PLAIN, way("plain, 1 thread", 5), way("map", 6), way("lanes", 7)),
        "No way is faster than the plain call: keep the plain call.",
    ),
    "one thread": (
        (PLAIN, ONE, way("map", 6), way("lanes", 7)),
        (
            "No way is faster than the plain call with 1 thread: "
            "keep the plain call and write torch.set_num_threads(1) before it."
        ),
    ),
    "one thread, hardly faster": (
        (PLAIN, way("plain, 1 thread", 3.8), way("map", 6), way("lanes", 7)),
        "No way is faster than the plain call with 1 thread: keep the plain call.",
    ),
    "overlap below": (
        (PLAIN, way("map", 3.95), way("lanes", 7)),
        f"{NO_DIFFERENCE} map over lanes (their middle halves overlap): keep the plain call.",
    ),
    "overlap above": (
        (PLAIN, way("map", 7), way("lanes", 4.05)),
        (
            f"{NO_DIFFERENCE} a call cut over lanes (their middle halves overlap): keep the plain "
            "call."
        ),
    ),
    "changed": (
        (PLAIN, way("map", 3), way("lanes", 2, MIXED)),
        (
            f"Map over lanes is 1.33 times as fast {THAN} (plain): write p.map(batches).\n"
            f"A call cut over lanes is 2.00 times as fast, but changes the outputs {FIND_OUT}"
        ),
    ),
    "changed, and the others are slow": (
        (PLAIN, way("map", 6), way("lanes", 2, MIXED)),
        (
            "No way that keeps the results is faster than the plain call: keep the plain call.\n"
            f"A call cut over lanes is 2.00 times as fast, but changes the outputs {FIND_OUT}"
        ),
    ),
    "all changed": (
        (PLAIN, way("map", 6, MIXED), way("lanes", 7, MIXED)),
        "Every way changes the results: keep the plain call.",
    ),
    "changed gradients": (
        (way("plain", 4, SAME, SAME), way("lanes", 2, SAME, MIXED)),
        (
            "Every way changes the results: keep the plain training step.\nA training step cut "
            f"over lanes is 2.00 times as fast, but changes the gradients {FIND_OUT}"
        ),
    ),
}


@pytest.mark.parametrize(("ways", "text"), CONCLUSIONS.values(), ids=CONCLUSIONS)
def test_the_conclusion_of_known_times(ways, text):
    """The conclusion names the way to write if that is faster by more than the spread and keeps the
    results.
    """
    assert conclude(ways, "lanes") == text


def test_the_conclusion_is_shown():
    """The conclusion stands below the table, in the repr, and in a notebook, where markup is
    escaped.
    """
    comparison = Comparison("title", (PLAIN, MAP), "First <b>.\nSecond.")
    assert str(comparison).endswith("\nFirst <b>.\nSecond.")
    assert repr(comparison) == "<Comparison: plain 4 ms, map 2 ms. First <b>. Second.>"
    assert "</table><div" in comparison._repr_html_()
    assert ">First &lt;b&gt;.\nSecond.</div></div>" in comparison._repr_html_()


def test_mixed_rows_are_not_recommended():
    """The conclusion of a model whose outputs change does not advise the cut call."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Softmax(0))
    comparison = compare(model, torch.randn(9, 3), LANES, **SHORT)
    assert comparison.ways[-1].name_changes() == "outputs"
    assert "inside the block" not in comparison.conclusion


def test_workers_are_called_workers():
    comparison = compare(nn.Linear(3, 2), torch.randn(9, 3), ["cpu"], workers="process", **SHORT)
    assert "lanes" not in comparison.conclusion


@pytest.mark.parametrize(("busy_s", "is_said"), [(20, False), (150, True)])
def test_other_programs_are_named(monkeypatch, busy_s, is_said):
    """If they used the cores during the measurement, the first line says how many."""
    second = os.sysconf("SC_CLK_TCK")
    readings = [CoreTimes(0.0, 2, 0, {1: 0}), CoreTimes(100.0, 2, busy_s * second, {1: 0})]
    monkeypatch.setattr("parawrap.api.compare.read_core_times", lambda: readings.pop(0))
    comparison = compare(nn.Linear(3, 2), torch.randn(9, 3), LANES, **SHORT)
    said = "Other programs used 1.5 of 2 cores meanwhile: measure again on an idle machine.\n"
    assert comparison.conclusion.startswith(said) is is_said


# -- calls


@pytest.mark.parametrize("train", [True, False])
def test_the_ways_call_the_model(train):
    """The plain ways get the whole batch in the caller, also with one thread; `map` gives it whole
    to a lane.

    A tuple or dict is spread as in `map`.
    """
    seen = []

    class Recorder(nn.Linear):
        def forward(self, x, scale):
            in_main = threading.current_thread() is threading.main_thread()
            seen.append((len(x), in_main, torch.get_num_threads(), torch.is_grad_enabled()))
            return super().forward(x) * scale

    for batch in ((torch.randn(9, 3), 2.0), {"x": torch.randn(9, 3), "scale": 2.0}):
        compare(Recorder(3, 2), batch, LANES, train=train, **SHORT)
    assert all(grad is train for *_, grad in seen)
    plain = [call for call in seen if call[0] == 9]
    assert len(plain) < len(seen)
    assert (9, True, 1, train) in plain
    assert all(in_main for _, in_main, *_ in plain) is train


def test_lists_of_inputs_get_a_cure():
    """A list is one argument. The error of the call says how to pass the items of a DataLoader."""
    with pytest.raises(TypeError) as caught:
        compare(nn.Linear(3, 2), [torch.randn(9, 3), torch.zeros(9)], LANES, **SHORT)
    assert "To leave out labels, pass batch[0]" in caught.value.__notes__[0]


# -- differences


def test_differences_show_mixed_rows():
    """A row-wise model has none, also with sparse gradients.

    Options such as `reduce` reach the lanes.
    """
    x = torch.randn(9, 3)
    *_, lanes = compare(
        nn.Sequential(nn.Linear(3, 2), nn.Softmax(0)),
        x,
        LANES,
        train=True,
        loss=lambda y: y.square().sum(),
        **SHORT,
    ).ways
    assert min(lanes.outputs.absolute, lanes.outputs.relative) > 0.01
    assert lanes.gradients.absolute > 0.001
    row_wise = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    *_, lanes = compare(row_wise, torch.arange(9) % 5, LANES, train=True, **SHORT).ways
    assert max(lanes.outputs.absolute, lanes.gradients.absolute) < 1e-5
    *_, lanes = compare(lambda x: x.abs().sum(), x, LANES, reduce="sum", **SHORT).ways
    assert lanes.outputs.absolute < 1e-4
    *_, lanes = compare(lambda x: (x - x) / 0, x, LANES, **SHORT).ways  # NaNs in the same places
    assert lanes.outputs == SAME


def test_small_differences_are_rounding():
    """Half of the digits of a dtype must agree. Integers must be equal."""
    one = torch.ones(3)
    assert not difference([one * (1 + 1e-5)], [one]).exceeds_rounding
    assert difference([one * (1 + 1e-3)], [one]).exceeds_rounding
    assert not difference([one.bfloat16() * 1.02], [one.bfloat16()]).exceeds_rounding
    assert difference([torch.tensor([1000001])], [torch.tensor([1000000])]).exceeds_rounding
    assert difference([one], [torch.ones(4)]).exceeds_rounding
    assert not difference([one], [one]).exceeds_rounding


def test_gradients_are_seen_next_to_larger():
    """A gradient that is zero but for rounding, as of the bias of attention keys, is no change."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return (self.query(x) @ self.key(x).mT).softmax(-1) @ x

    torch.manual_seed(0)
    *_, lanes = compare(
        Attention(),
        torch.randn(9, 5, 8),
        LANES,
        train=True,
        loss=lambda y: y.square().sum(),
        **SHORT,
    ).ways
    assert lanes.gradients.relative < 1e-4
    assert lanes.name_changes() == ""


# -- the state afterwards


@pytest.mark.filterwarnings("ignore:the model wrote 'steps', 'linear.training':UserWarning")
@pytest.mark.parametrize("fails_in", [None, "lanes"])
def test_the_model_is_restored(fails_in):
    """Buffers, gradients, training flags, and attributes are what they were.

    An error has a note that names its way.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 2)
            self.register_buffer("steps", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.steps = self.steps + 1  # a new tensor
            self.linear.training = False
            if fails_in and len(x) < 9:
                raise KeyError("here")
            return self.linear(self.norm(x))

    model = Model()
    gradient = model.linear.weight.grad = torch.ones(2, 3)
    batch = torch.randn(9, 3, requires_grad=True)
    steps, buffers = model.steps, {name: buffer.clone() for name, buffer in model.named_buffers()}
    if fails_in is None:
        compare(model, batch, LANES, train=True, **SHORT)
    else:
        with pytest.raises(KeyError) as caught:
            compare(model, batch, LANES, train=True, **SHORT)
        assert f"raised in the way {fails_in!r} of parawrap.compare" in caught.value.__notes__
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 3))
    assert model.linear.bias.grad is batch.grad is None
    assert model.steps is steps
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())
    assert "forward" not in vars(model)


def test_the_random_state_of_each_way():
    """All ways draw the numbers that the caller would draw next, and the caller's random state does
    not change.
    """
    drawn, state = [], torch.get_rng_state()

    def noise(x):
        drawn.append(torch.rand(()).item())
        return x

    compare(noise, torch.zeros(9, 3), ["cpu"], **SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn.count(torch.rand(()).item()) == 8  # four ways, two turns


def test_model_of_inference_mode():
    """Its buffers refuse writes, and calls in eval mode do not write them."""
    with torch.inference_mode():
        model = nn.BatchNorm1d(3).eval()
    comparison = compare(model, torch.randn(9, 3), ["cpu"] * 2, rounds=2, calls=1, show=False)
    assert [str(way.outputs) for way in comparison.ways] == ["0"] * 4
