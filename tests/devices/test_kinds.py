"""The first call of each kind decides how later calls of that kind are joined and whether their lanes run in turns."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parawrap import GatherError, parallel
from tests import simdevice
from tests.devices.zoo import SIMS, assert_same_gradients, mlp, rows, side_stream

TWICE = ["sim:0", "sim:0"]
LANES = pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:1", "sim:2"], ["sim:0", "sim:1", "sim:1"]], ids=str)


def plainly(model: nn.Module, *args: Tensor) -> Any:
    """Return the plain output, also inside a block."""
    return type(model).forward(model, *args)


def assert_same_output(output: dict, expected: dict) -> None:
    """Assert that two outputs of a `Mixed` are equal."""
    for name in ("names", "kind"):
        assert output[name] == expected[name]
    for name in ("rows", "tables"):
        torch.testing.assert_close(output[name], expected[name])


def threads_of(seen: list[str]) -> set[str]:
    """Return the names of the threads that ran a call's lanes, and clear the list for the next call."""
    names, seen[:] = set(seen), []
    return names


def thread_recorder(seen: list[str]) -> Callable[[], None]:
    """Return a function that appends the calling thread's name to the list, which all lanes share."""
    return lambda: seen.append(threading.current_thread().name)


# ---------------------------------------------------------------- random numbers


def dropout(home: str = "sim:0") -> nn.Module:
    """Two linear layers around dropout."""
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double().to(home)


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.parametrize("count", [2, 4, 8, 9, 16])
@LANES
def test_a_seed_gives_the_same_numbers_every_time(devices, count, home):
    """Calls with the same seed have equal outputs; another seed gives another output."""
    model = dropout(home)
    x = rows(count)
    outputs = []
    with torch.no_grad(), parallel(model, devices):
        for seed in (1, 2, 1, 1, 2):
            torch.manual_seed(seed)
            outputs.append(model(x))
    first, second, *again = outputs
    torch.testing.assert_close(again, [first, first, second], rtol=0, atol=0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("devices", [TWICE, ["sim:1", "sim:1"], SIMS], ids=str)
def test_lanes_that_share_a_generator_draw_in_lane_order(devices):
    """In every call, the masks are those that the plain model draws for one shard after the other."""
    model = dropout("sim:1")
    plain = copy.deepcopy(model)
    x = rows(7 if len(devices) == 4 else 9).to("sim:1")
    with torch.no_grad(), parallel(model, devices) as p:
        for seed in range(4):
            torch.manual_seed(seed)
            output = model(x)
            torch.manual_seed(seed)
            expected = torch.cat([plain(part) for part in x.split(p.stats().shards)])
            torch.testing.assert_close(output, expected)


def test_a_call_draws_as_many_numbers_as_plain_calls_of_its_shards():
    """After a call, the shared generator is in the same state as after plain calls of the shards."""
    model = dropout()
    plain = copy.deepcopy(model)
    x = rows(9).to("sim:0")
    with torch.no_grad(), parallel(model, TWICE):
        for _ in range(3):
            torch.manual_seed(5)
            model(x)
            after = torch.rand(4)
            torch.manual_seed(5)
            [plain(part) for part in x.split((5, 4))]
            assert torch.equal(after, torch.rand(4))


@pytest.mark.parametrize("devices", [TWICE, ["sim:1"] * 3], ids=str)
def test_checkpointing_recomputes_the_same_masks(devices):
    """With and without checkpointing, a seed gives the same gradients.

    The lanes share one device because backward runs one thread per device, and all simulated devices share the CPU's
    random generator.
    """

    class Checkpointed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    body = dropout()
    model, plain = Checkpointed(copy.deepcopy(body)), body
    x = rows(9)
    for each in (model, plain):
        with parallel(each, devices):
            for seed in range(3):
                torch.manual_seed(seed)
                each(x).square().sum().backward()
    assert_same_gradients(model.body, plain)


class Recording(nn.Module):
    """Records the thread of each lane, and applies dropout in train mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)
        self.record = thread_recorder(seen := [])
        self.threads = lambda: threads_of(seen)

    def forward(self, x):
        self.record()
        return self.dropout(x) * self.weight


@pytest.mark.parametrize("devices", [TWICE, ["sim:2", "sim:1"]], ids=str)
def test_lanes_run_in_turns_only_in_calls_that_draw(devices):
    """Calls that draw run their lanes one after another in the caller's thread; in eval mode, only the first call does."""
    model = Recording().to("sim:0")
    caller, lane = threading.current_thread().name, f"parawrap-lane 1 on {devices[1]}"
    x = rows(9)
    with torch.no_grad(), parallel(model, devices):
        for _ in range(3):
            model.train()(x)
            assert model.threads() == {caller}
        model.eval()(x)
        assert model.threads() == {caller}
        for _ in range(3):
            model.eval()(x)
            assert model.threads() == {caller, lane}
            model.train()(x)
            assert model.threads() == {caller}


def test_a_kind_that_starts_to_draw_warns_and_is_reproducible_afterwards():
    """The first call of a known kind that draws random numbers warns. After it, a seed gives the same numbers."""

    class Late(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5) if self.draws else x

    model, x = Late(), rows(9).to("sim:0")
    model.draws = False
    with torch.no_grad(), parallel(model, TWICE):
        model(x)
        model(x)
        model.draws = True
        with pytest.warns(UserWarning, match="earlier calls of the same kind did not"):
            model(x)
        outputs = []
        for _ in range(4):
            torch.manual_seed(3)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 4, rtol=0, atol=0)


@pytest.fixture
def generators(monkeypatch):
    """Give each simulated device its own random generator, as GPUs have. By default they share the CPU's generator."""
    own = {torch.device(device): torch.Generator() for device in SIMS}
    monkeypatch.setattr(torch.sim, "get_rng_state", lambda device: own[torch.device(device)].get_state(), raising=False)
    return own


class Noise(nn.Module):
    """Adds random numbers from the generator of the input's device, and records the thread."""

    def __init__(self, generators):
        super().__init__()
        self.draw = lambda x: torch.rand(x.shape, generator=generators[x.device]).to(x.device)
        self.record = thread_recorder(seen := [])
        self.threads = lambda: threads_of(seen)

    def forward(self, x):
        self.record()
        return x + self.draw(x)


@pytest.mark.parametrize("count", [4, 8, 9, 16])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:2", "sim:1"]], ids=str)
def test_a_seed_reproduces_calls_with_one_generator_per_device(devices, count, generators):
    """If each device has its own generator, the first and later calls with the same seed have equal outputs."""
    model, x = Noise(generators), torch.zeros(count, 3).to("sim:0")
    outputs = []
    with torch.no_grad(), parallel(model, devices, output_device="cpu"):
        for _ in range(4):
            for generator in generators.values():
                generator.manual_seed(1)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 4, rtol=0, atol=0)


def test_lanes_with_separate_generators_run_at_the_same_time(generators):
    """If no two lanes share a generator, each lane runs in its own thread from the second call on."""
    model, x = Noise(generators), torch.zeros(9, 3).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model.threads()
        model(x)
    assert len(model.threads()) == 4


@pytest.mark.parametrize("devices", [TWICE, SIMS], ids=str)
def test_lanes_that_share_a_generator_of_the_module_draw_in_lane_order(devices):
    """All lanes share a generator that the module holds, and a seed gives the same numbers every time."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x + torch.rand(x.shape, generator=self.generator).to(x.device)

    model, x = Own(), torch.zeros(9, 3).to("sim:0")
    outputs = []
    with torch.no_grad(), parallel(model, devices, output_device="cpu"):
        for _ in range(20):
            model.generator.manual_seed(1)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 20, rtol=0, atol=0)


# ---------------------------------------------------------------- evidence from the first call


class Mixed(nn.Module):
    """Returns rows, parameters with as many entries as a shard has rows, and a list with one item per row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict:
        y = self.linear(x)
        return {
            "rows": y,
            "tables": (self.linear.bias, self.linear.weight),
            "nothing": None,
            "names": [f"row {value:.3f}" for value in y[:, 0].tolist()],
            "kind": "mixed",
        }


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize("count", [4, 8, 9, 12, 16])
def test_the_first_call_shows_which_outputs_follow_the_rows(count, home):
    """Rows and lists are concatenated; tables are returned once, even if they are as long as a shard."""
    model = Mixed().to(home)
    x = rows(count)
    expected = model(x.to(home))
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(3):
            assert_same_output(model(x), expected)


@pytest.mark.parametrize(
    ("count", "first", "later"),
    [
        (4, (2, 1, 1), (1, 1, 1, 1)),
        (8, (4, 2, 2), (2, 2, 2, 2)),
        (12, (4, 3, 3, 2), (3, 3, 3, 3)),
        (16, (4, 4, 4, 4), (4, 4, 4, 4)),
        (10, (3, 3, 2, 2), (3, 3, 2, 2)),
        (3, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_later_calls_use_every_lane(count, first, later):
    """The first call of a kind has shards of different sizes; later calls are balanced over all lanes."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        if count == 3:  # shards of one row each give no evidence
            model(rows(9))
        else:
            model(rows(count))
            assert p.stats().shards == first
        for _ in range(2):
            model(rows(count))
            assert p.stats().shards == later


def test_the_evidence_holds_for_batches_of_other_sizes():
    """After the first call, batches of any size are cut and joined in the same way, also a short last batch."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        model(rows(16))
        for count in (8, 4, 3, 2, 12, 5):
            x = rows(count)
            torch.testing.assert_close(model(x), plainly(model, x.to("sim:0")))
            assert len(p.stats().shards) == min(4, count)


class Filtered(nn.Module):
    """Returns the rows whose first value is positive."""

    def forward(self, x):
        return x[x[:, 0] > 0]


@pytest.mark.parametrize("count", [8, 10])
def test_the_evidence_is_checked_on_each_call(count):
    """An output that no longer follows the rows is refused, even if all lanes return equal values."""
    ones = torch.ones(count, 5)
    few = -ones
    few[[0, 3, 6, 8] if count == 10 else [0, 2, 4, 6]] = 1  # one row per lane
    with torch.no_grad(), parallel(Filtered(), SIMS, output_device="cpu") as p:
        torch.testing.assert_close(p(ones), ones)
        with pytest.raises(GatherError, match="out_dims"):
            p(few)


@pytest.mark.parametrize("count", [8, 10])
def test_ragged_outputs_are_declared(count):
    """With out_dims="ragged", a filter returns its rows in order, whatever their number."""
    x = rows(count)
    with torch.no_grad(), parallel(Filtered(), SIMS, out_dims="ragged", output_device="cpu") as p:
        for _ in range(2):
            torch.testing.assert_close(p(x), x[x[:, 0] > 0])


def test_a_new_output_is_refused_once_and_then_joined():
    """An output that earlier calls of the kind did not have raises and names `out_dims`. The next call gathers evidence."""

    class Growing(nn.Linear):
        more = False

        def forward(self, x):
            y = super().forward(x)
            return (y, y * 2) if self.more else (y,)

    model = Growing(5, 3, dtype=torch.float64).to("sim:0")
    x = rows(8)
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(2):
            torch.testing.assert_close(model(x), plainly(model, x.to("sim:0")))
        Growing.more = True
        with pytest.raises(GatherError, match=r"output\[1\] cannot be joined: all lanes had 2 rows.*out_dims"):
            model(x)
        for _ in range(2):
            torch.testing.assert_close(model(x), plainly(model, x.to("sim:0")))


@pytest.mark.parametrize("home", ["sim:1", "sim:0", "cpu"])
@pytest.mark.parametrize("counts", [(4, 2, 4), (2, 4, 2), (2, 2, 4), (1, 2, 4), (4, 4, 1, 2), (2, 8, 4)], ids=str)
def test_two_lanes_and_few_rows(counts, home):
    """With two lanes, a first call of two or four rows runs whole. All calls have the plain output."""
    model = mlp().to(home)
    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        for count in counts:
            x = rows(count)
            torch.testing.assert_close(model(x), plainly(model, x.to(home)))
        model(rows(4))
        assert p.stats().shards == (2, 2)


@pytest.mark.parametrize("home", ["sim:0", "sim:3", "cpu"])
def test_calls_of_zero_and_one_rows_are_plain(home):
    """A call of zero rows or one row has the plain output, including a parameter, before and after the first cut call."""

    class WithTable(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    model = WithTable(5, 3, dtype=torch.float64).to(home)
    with torch.no_grad(), parallel(model, SIMS):
        for count in (1, 0, 9, 1, 0, 8):
            x = rows(count)
            torch.testing.assert_close(model(x), plainly(model, x.to(home)))


@pytest.mark.parametrize("devices", [TWICE, ["sim:1", "sim:2"]], ids=str)
def test_evidence_from_a_call_on_another_stream(devices):
    """Evidence from a whole call on one stream is used by cut calls on other streams."""
    model = mlp().to("sim:0")
    x = rows(4).to("sim:0")
    expected = plainly(model, x)
    torch.sim.synchronize("sim:0")
    with torch.no_grad(), parallel(model, devices):
        for _ in range(3):
            with torch.sim.stream(side_stream()):
                output = model(x)
    torch.sim.synchronize("sim:0")
    torch.testing.assert_close(output, expected.detach())


def test_the_output_of_a_whole_first_call_is_not_kept_after_close():
    """After the block, its evidence holds no device memory."""
    model = nn.Linear(5, 1000).to("sim:0")
    gc.collect()
    before = simdevice.stats().live_bytes
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        model(torch.randn(4, 5))
    gc.collect()
    assert simdevice.stats().live_bytes == before
    assert p.stats().calls == 1


# ---------------------------------------------------------------- declared outputs


def test_declared_outputs_are_balanced_from_the_first_call():
    """With `out_dims`, the first call needs no evidence and uses every lane."""
    model = mlp().to("sim:0")
    x = rows(8)
    with torch.no_grad(), parallel(model, SIMS, out_dims=0) as p:
        torch.testing.assert_close(model(x), plainly(model, x.to("sim:0")))
        assert p.stats().shards == (2, 2, 2, 2)


@pytest.mark.parametrize("count", [4, 8, 10])
def test_declared_outputs_of_all_sorts(count):
    """`out_dims` takes a dim per output (an LSTM's states have rows on dim 1), None, and "items"."""

    class Recurrent(nn.LSTM):
        def forward(self, x):
            output, states = super().forward(x)
            return output, states, self.weight_ih_l0.sum(1), [str(len(row)) for row in x]

    model = Recurrent(5, 4, batch_first=True, dtype=torch.float64).to("sim:0")
    x = torch.randn(count, 6, 5, dtype=torch.float64)
    expected = model(x.to("sim:0"))
    with torch.no_grad(), parallel(model, SIMS, out_dims=(0, (1, 1), None, "items")):
        for _ in range(2):
            output = model(x)
            assert output[3] == expected[3]
            torch.testing.assert_close(output[:3], expected[:3])


def test_padding_to_the_longest_lane():
    """With join="pad", outputs with different sizes on other dims are padded to the longest lane."""

    class Generate(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, : 1 + x.device.index]

    model = Generate(5, 4, dtype=torch.float64).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS, join="pad", pad_value=-1):
        for _ in range(2):
            output = model(rows(9))
            assert output.shape == (9, 4)
            assert (output == -1).sum(1).tolist() == [3, 3, 3, 2, 2, 1, 1, 0, 0]


# ---------------------------------------------------------------- kinds


class Modal(nn.Module):
    """Returns rows and a parameter in train mode, and only rows in eval mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x):
        y = self.linear(x)
        return (y, self.linear.bias) if self.training else y


@pytest.mark.parametrize("grad", [True, False])
def test_train_and_eval_mode_are_two_kinds(grad):
    """A model may return another structure in eval mode. Each mode has one first call."""
    model = Modal().to("sim:0")
    x = rows(8)
    shards = []
    with torch.set_grad_enabled(grad), parallel(model, SIMS) as p:
        for mode in (True, False, False, True, False, True):
            model.train(mode)
            torch.testing.assert_close(model(x), plainly(model, x.to("sim:0")))
            shards.append(p.stats().shards)
    assert shards == [(4, 2, 2)] * 2 + [(2, 2, 2, 2)] * 4


@pytest.mark.parametrize(
    "other",
    [
        lambda model, x: model.linear.eval() and model(x),
        lambda model, x: torch.no_grad()(model)(x),
        lambda model, x: torch.inference_mode()(model)(x),
        lambda model, x: torch.autocast("sim", torch.bfloat16)(model)(x),
        lambda model, x: model(x=x),
        lambda model, x: model(x, 2),
    ],
    ids=["a submodule in eval mode", "no_grad", "inference_mode", "autocast", "a keyword", "another value"],
)
def test_modes_argument_structures_and_values_make_another_kind(other):
    """Each mode, argument structure, and non-tensor argument has exactly one first call."""

    class Scaled(Modal):
        def forward(self, x, factor=1):
            return self.linear(x.to(self.linear.weight)) * factor

    model = Scaled().to("sim:0")
    x = rows(8)
    with parallel(model, SIMS) as p:
        for call, shards in (
            (type(model).__call__, (4, 2, 2)),
            (type(model).__call__, (2, 2, 2, 2)),
            (other, (4, 2, 2)),
            (other, (2, 2, 2, 2)),
        ):
            call(model, x)
            assert p.stats().shards == shards
        model.train()
        model(x)
        assert p.stats().shards == (2, 2, 2, 2)


def test_each_method_is_a_kind():
    """Each method of a block has its own first call."""

    class Two(Modal):
        def encode(self, x):
            return self.linear(x), self.linear.bias

    model = Two().eval().to("sim:0")
    x = rows(8)
    with torch.no_grad(), parallel(model, SIMS, methods=("forward", "encode")):
        for _ in range(2):
            torch.testing.assert_close(model(x), model.linear(x.to("sim:0")))
            output, table = model.encode(x)
            torch.testing.assert_close(output, model.linear(x.to("sim:0")))
            assert table is model.linear.bias


def test_a_first_call_trains_like_later_calls():
    """The last lane runs two shards in the first call. The gradients of all calls add up to the plain ones."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    with parallel(model, SIMS):
        for count in (16, 16, 8):
            x = rows(count)
            model(x).square().sum().backward()
            plain(x.to("sim:0")).square().sum().backward()
            assert_same_gradients(model, plain)
