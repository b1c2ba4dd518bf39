"""`compare`: its table, the state that it leaves behind, and the differences that it finds."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from parawrap.api import _comparison_table as module_of_comparison
from parawrap.api import _isolate_measurements as module_of_isolation
from parawrap.api import compare as module_of_compare
from parawrap.api._comparison_table import Comparison, Difference, Way
from parawrap.api.compare import compare
from parawrap.errors import ShardError

LANES = ["cpu", "cpu"]
SHORT = {"rounds": 2, "calls": 1, "show": False}


class Recorder(nn.Module):
    """A row-wise model that records how it is called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, *args, **kwargs):
        inputs = [*args, *kwargs.values()]
        record = (len(args), sorted(kwargs), len(inputs[0]), torch.is_grad_enabled())
        self.seen.append((*record, threading.current_thread() is threading.main_thread()))
        return self.linear(inputs[0])


class MixesRows(nn.Module):
    """A model with rows that depend on each other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).softmax(0)


def test_the_table_has_a_row_per_way(capsys):
    """`compare` prints the times, memory, faults, and differences of each way, and returns the numbers."""
    comparison = compare(nn.Linear(3, 2).eval(), torch.randn(9, 3), LANES, rounds=2, calls=3)
    title, header, plain, one_thread, lanes, *_ = capsys.readouterr().out.splitlines()
    assert title == "parallel(Linear, ['cpu', 'cpu']): forward in eval mode, 2 rounds of 3 calls"
    assert header.split() == (
        ["way", "median", "ms", "middle", "half", "ms", "speed-up", "extra", "MiB", "page", "faults", "outputs", "differ"]
    )
    assert len({len(line) for line in (header, plain, one_thread, lanes)}) == 1
    names = ["plain", "plain, 1 thread", "lanes"]
    assert all(line.strip().startswith(name) for line, name in zip((plain, one_thread, lanes), names, strict=True))
    assert [way.name for way in comparison.ways] == names
    assert all(len(way.seconds) == 2 and min(way.seconds) > 0 for way in comparison.ways)
    assert repr(comparison).startswith("<Comparison: plain ")
    assert len(repr(comparison).splitlines()) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.title = "another"


def test_a_table_of_known_numbers():
    """The table shows the median, the quartiles, the ratio of medians, MiB, page faults, and both differences."""
    plain = Way("plain", (0.004, 0.004, 0.004), 0, 0.0, Difference(0.0, 0.0), Difference(0.0, 0.0))
    lanes = Way("lanes", (0.001, 0.002, 0.003), 3 << 19, 12.4, Difference(0.5, 0.25), Difference(math.inf, math.inf))
    unknown = dataclasses.replace(lanes, extra_bytes=None, outputs=Difference(0.0, 0.0), gradients=Difference(1e-7, 1e-8))
    table, _, remark = str(Comparison("title", (plain, lanes, unknown), 1.0)).rpartition("\n")
    assert remark.startswith("Other processes")
    assert table == (
        "title\n"
        "  way  median ms  middle half ms  speed-up  extra MiB  page faults     outputs differ   gradients differ\n"
        "plain      4.000  4.000 to 4.000      1.00        0.0            0                  0                  0\n"
        "lanes      2.000  1.500 to 2.500      2.00        1.5           12  5.0e-01 (2.5e-01)          inf (inf)\n"
        "lanes      2.000  1.500 to 2.500      2.00    unknown           12                  0  1.0e-07 (1.0e-08)"
    )


WAYS = (
    Way("plain", (0.004, 0.004, 0.004), 0, 0.0, Difference(0.0, 0.0), None),
    Way("lanes", (0.001, 0.002, 0.003), 0, 0.0, Difference(0.0, 0.0), None),
)
CLOSE = (WAYS[0], dataclasses.replace(WAYS[1], seconds=(0.003, 0.004, 0.005)))


@pytest.mark.parametrize(
    ("ways", "busy_cores", "remark"),
    [
        (WAYS, 0.02, None),
        (WAYS, None, None),
        (CLOSE, 0.0, "overlap: the difference is not significant"),
        ((WAYS[0], dataclasses.replace(CLOSE[1], name="plain, 1 thread"), WAYS[1]), 0.0, None),
        ((WAYS[0], dataclasses.replace(WAYS[1], name="plain, 1 thread"), WAYS[1]), 0.0, "overlap"),
        (WAYS, 1.26, "Other processes used 1.3 cores during the measurement"),
        (CLOSE, 1.26, "Other processes used 1.3 cores during the measurement"),
    ],
)
def test_a_remark_says_why_the_speed_up_may_not_last(ways, busy_cores, remark):
    """A busy machine is named, and then significance is not mentioned. On an idle machine, overlapping times are named."""
    comparison = Comparison("title", ways, busy_cores)
    for text in (str(comparison), comparison._repr_html_()):
        assert (remark or "title") in text
        assert ("significant" in text) == (remark is not None and "overlap" in remark)
        assert ("Other processes" in text) == (remark is not None and "Other" in remark)


def test_one_way_runs_with_one_thread():
    """On the CPU, the second way runs the whole batch with one thread per operator, and the count is restored."""
    seen = []

    def count_threads(x):
        seen.append((len(x), torch.get_num_threads()))
        return x

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        comparison = compare(count_threads, torch.randn(9, 3), LANES, **SHORT)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert comparison.ways[1].name == "plain, 1 thread"
    whole = [threads for rows, threads in seen if rows == 9]
    assert {1, 2} == set(whole)
    assert whole.count(1) == whole.count(2)


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A copy of /proc with 100 ticks of the cores of this process, of which 10 are its own and 20 its descendants'."""
    me = os.getpid()
    processes = {me: (1, 10), 900001: (me, 15), 900002: (900001, 5), 900003: (1, 40)}
    for pid, (parent, ticks) in processes.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) name) S {parent} {'0 ' * 9}{ticks - 3} 1 1 1 20 0\n")
    core, *others = sorted(os.sched_getaffinity(0))
    lines = [f"cpu{core} 50 10 20 9999 9999 5 5 10 0 0", *(f"cpu{index} 0 0 0 9 9 0 0 0 0 0" for index in others)]
    (tmp_path / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, "cpu9999 7 7 7 7 7 7 7 7 0 0", "intr 3"]))
    monkeypatch.setattr(module_of_isolation, "_PROC", tmp_path)
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="reads /proc")
def test_the_load_of_others_excludes_this_process_and_its_descendants(proc):
    """Ticks of this process's cores count, with stolen ones, without idle ones and without those of its workers."""
    assert module_of_isolation._ticks_of_others() == 100 - 10 - 20


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="reads /proc")
def test_the_load_of_others_is_measured_in_cores(proc):
    """The result is a number of cores, on average since the start; None without /proc."""
    used = module_of_isolation.cores_of_others()
    ticks = os.sysconf("SC_CLK_TCK")
    text = (proc / "stat").read_text()
    (proc / "stat").write_text(text.replace(" 50 10 20", f" {50 + ticks} 10 20"))
    start = time.monotonic()
    assert 1.0 < used() < 1 / module_of_isolation._SHORTEST_S + 0.1
    assert time.monotonic() - start > module_of_isolation._SHORTEST_S / 2
    (proc / "stat").unlink()
    assert module_of_isolation.cores_of_others()() is None


def test_show_false_prints_nothing(capsys):
    """With `show=False`, the caller can print the table with `str`."""
    comparison = compare(nn.Linear(3, 2), torch.randn(9, 3), LANES, **SHORT)
    assert capsys.readouterr().out == ""
    assert "lanes" in str(comparison)


def test_one_way_runs_plain_and_the_other_in_lanes():
    """The plain way calls the model with the whole batch; the other way cuts the batch."""
    model = Recorder()
    compare(model, torch.randn(9, 3), LANES, **SHORT)
    plain, lanes = ([seen for seen in model.seen if (seen[2] == 9) is whole] for whole in (True, False))
    assert plain
    assert all(in_main for *_, in_main in plain)
    assert lanes
    assert not any(with_grad for *_, with_grad, _ in model.seen)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.randn(9, 3), (1, [])),
        ((torch.randn(9, 3), torch.randn(9)), (2, [])),
        ({"x": torch.randn(9, 3)}, (0, ["x"])),
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_a_batch_is_a_call_as_in_map(batch, expected):
    """A tuple is spread, a dict becomes keyword arguments, and any other batch is one argument."""
    model = Recorder()
    compare(model, batch, LANES, **SHORT)
    assert all((count, names) == expected for count, names, *_ in model.seen)


def test_a_packed_sequence_is_one_argument():
    """A PackedSequence is not spread, although it is a tuple."""
    model = nn.LSTM(3, 2).eval()
    batch = pack_sequence([torch.randn(4, 3), torch.randn(2, 3), torch.randn(1, 3)])
    comparison = compare(model, batch, LANES, out_dims=(0, (1, 1)), **SHORT)
    assert comparison.ways[-1].outputs.absolute < 1e-5
    assert any(tensor is batch.data for tensor in module_of_compare._tensors((batch, 1)))


def test_differences_are_small_for_a_row_wise_model():
    """Outputs and gradients are equal up to rounding."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    *_, lanes = compare(model, torch.randn(9, 3), LANES, train=True, **SHORT).ways
    assert lanes.outputs.absolute < 1e-5
    assert lanes.gradients.absolute < 1e-5


def test_differences_show_a_model_that_mixes_rows():
    """A softmax over the batch gives other outputs and other gradients in lanes."""
    *_, lanes = compare(MixesRows(), torch.randn(9, 3), LANES, train=True, loss=lambda y: y.square().sum(), **SHORT).ways
    assert lanes.outputs.absolute > 0.01
    assert lanes.outputs.relative > 0.01
    assert lanes.gradients.absolute > 0.001


def test_differences_of_shapes_and_of_nans_are_infinite():
    """NaNs in the same places are equal; a NaN in one way only, or another shape, is an infinite difference."""
    difference = module_of_comparison.difference
    nan = torch.tensor([math.nan, 1.0, math.inf])
    assert difference([nan], [nan.clone()]) == (0, 0)
    assert difference([torch.tensor([0.0, 1.0, math.inf])], [nan]) == (math.inf, math.inf)
    assert difference([torch.zeros(2)], [torch.zeros(3)]) == (math.inf, math.inf)
    assert difference([torch.zeros(2)], []) == (math.inf, math.inf)
    assert difference([torch.tensor([0.0, 3.0])], [torch.tensor([1.0, 4.0])]) == (1.0, 0.25)
    assert difference([torch.ones(2)], [torch.zeros(2)]) == (1.0, math.inf)
    assert difference([torch.tensor([True])], [torch.tensor([False])]) == (1.0, math.inf)
    assert difference([torch.tensor([3j])], [torch.tensor([4j])]) == (1.0, 0.25)
    assert difference([torch.zeros(0)], [torch.zeros(0)]) == (0, 0)
    assert difference([torch.tensor(3.0)], [torch.tensor(4.0)]) == (1.0, 0.25)
    assert difference([torch.tensor([1, 2**40])], [torch.tensor([1, 2**39])]) == (2.0**39, 1.0)
    assert difference([torch.tensor([1])], [torch.tensor([1.0])]) == (math.inf, math.inf)
    assert difference([torch.ones(2).bfloat16()], [torch.full([2], 2.0).bfloat16()]) == (1.0, 0.5)


@pytest.mark.filterwarnings("ignore:the model wrote 'linear.training':UserWarning")
def test_the_model_is_restored():
    """After a training step, buffers, gradients, training flags, and attributes are what they were before."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 2)
            self.register_buffer("steps", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.steps = self.steps + 1  # a new tensor
            self.linear.training = False
            return self.linear(self.norm(x))

    model = Model()
    model.linear.weight.grad = torch.ones(2, 3)
    batch = torch.randn(9, 3, requires_grad=True)
    gradient, steps, buffers = model.linear.weight.grad, model.steps, {k: b.clone() for k, b in model.named_buffers()}
    compare(model, batch, LANES, train=True, **SHORT)
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 3))
    assert model.linear.bias.grad is None
    assert batch.grad is None
    assert model.steps is steps
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())
    assert "forward" not in vars(model)


def test_each_way_starts_from_the_callers_random_state():
    """All ways draw the numbers that the caller would draw next, and the caller's random state does not change."""
    drawn = []

    def noise(x):
        drawn.append(torch.rand(()).item())
        return x

    torch.manual_seed(1)
    following = torch.rand(())
    torch.manual_seed(1)
    compare(noise, torch.randn(9, 3, generator=torch.Generator()), ["cpu"], **SHORT)
    assert torch.equal(torch.rand(()), following)
    assert drawn.count(following.item()) == 6  # three ways, two turns


def test_the_state_is_restored_after_an_error():
    """A model that raises leaves buffers and gradients as they were."""

    class Raises(nn.BatchNorm1d):
        def forward(self, x):
            super().forward(x)
            raise KeyError

    model = Raises(3)
    with pytest.raises(KeyError):
        compare(model, torch.randn(9, 3), LANES, **SHORT)
    assert model.num_batches_tracked == 0


@pytest.mark.parametrize("grad", [True, False])
def test_the_grad_mode_follows_train(grad):
    """A training step enables gradients, also under `torch.no_grad`. A forward comparison disables them."""
    model = Recorder()
    with torch.set_grad_enabled(grad):
        compare(model, torch.randn(9, 3), LANES, **SHORT)
        compare(model, torch.randn(9, 3), LANES, train=True, **SHORT)
        assert torch.is_grad_enabled() is grad
    with_grad = [seen[3] for seen in model.seen]
    assert with_grad == sorted(with_grad)
    assert set(with_grad) == {False, True}


def test_the_default_loss_sums_all_floating_point_outputs():
    """Without `loss`, each floating-point tensor of the output contributes; other values do not."""

    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"a": y, "b": [2 * y], "rows": torch.arange(len(x)), "name": "two"}

    assert module_of_compare._sum(Two(3, 2)(torch.randn(9, 3))).ndim == 0
    output = Two(3, 2)(torch.randn(9, 3))
    assert torch.isclose(module_of_compare._sum(output), 3 * output["a"].sum())


def test_an_output_without_gradients_requires_a_loss():
    """The error names `loss`, and its note names the way."""
    with pytest.raises(ShardError, match="Pass loss=") as caught:
        compare(torch.argmax, (torch.randn(9, 3), 1), LANES, train=True, **SHORT)
    assert caught.value.__notes__ == ["raised in the way 'plain' of parawrap.compare"]


def test_options_reach_parallel():
    """`reduce`, and every other option of `parallel`, applies to the lanes."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Flatten(0), nn.Softplus())

    def total(x):
        return model(x).sum()

    with pytest.raises(Exception, match="reduce") as caught:
        compare(total, torch.randn(9, 3), LANES, **SHORT)
    assert "raised in the way 'lanes' of parawrap.compare" in caught.value.__notes__
    *_, lanes = compare(total, torch.randn(9, 3), LANES, reduce="sum", **SHORT).ways
    assert lanes.outputs.absolute < 1e-4
    with pytest.raises(TypeError, match="no_such_option"):
        compare(model, torch.randn(9, 3), LANES, no_such_option=1)


def test_another_method_can_be_compared():
    """`methods` names the method to call; a bound method is called as it is."""

    class Encoder(nn.Linear):
        def encode(self, x):
            return super().forward(x)

        def forward(self, x):
            raise AssertionError("the other method")

    model = Encoder(3, 2)
    assert compare(model, torch.randn(9, 3), LANES, methods=("encode",), **SHORT).ways[-1].outputs.absolute < 1e-5
    assert compare(model.encode, torch.randn(9, 3), LANES, **SHORT).ways[-1].outputs.absolute < 1e-5


@pytest.mark.parametrize("wrong", [{"rounds": 1}, {"calls": 0}, {"methods": ("forward", "extra_repr")}])
def test_wrong_options_are_refused(wrong):
    """Too few rounds or calls, or several methods, raise ShardError."""
    with pytest.raises(ShardError, match="compare needs rounds >= 2, calls >= 1, and one method"):
        compare(nn.Linear(3, 2), torch.randn(9, 3), LANES, **wrong)


@pytest.mark.parametrize("way", ["plain", "lanes"])
def test_an_error_names_its_way(way):
    """An exception keeps its type and gains a note that names the way."""
    main = threading.main_thread()

    class Raises(nn.Linear):
        def forward(self, x):
            if (len(x) == 9 and threading.current_thread() is main) is (way == "plain"):
                raise KeyError("here")
            return super().forward(x)

    with pytest.raises(KeyError) as caught:
        compare(Raises(3, 2), torch.randn(9, 3), LANES, **SHORT)
    assert f"raised in the way {way!r} of parawrap.compare" in caught.value.__notes__


def test_a_sparse_gradient_is_compared():
    """A sparse gradient is compared like a dense one."""
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1))
    *_, lanes = compare(model, torch.arange(9) % 5, LANES, train=True, **SHORT).ways
    assert lanes.gradients.absolute < 1e-5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
def test_extra_memory_counts_what_a_call_allocates():
    """A call that allocates 64 MiB has a peak of about 64 MiB of extra memory, also in later rounds."""

    def needy(x):
        return x + torch.ones(2**24).sum()

    plain, *_ = compare(needy, torch.randn(9, 3), ["cpu"], **SHORT).ways
    if plain.extra_bytes is None:
        pytest.skip("this machine does not allow the peak to be reset")
    assert 60 << 20 < plain.extra_bytes < 100 << 20
