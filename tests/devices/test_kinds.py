"""The first call of each kind shows how later ones are joined, and whether their lanes draw random numbers in turns."""

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
    """The plain output, also inside a block."""
    return type(model).forward(model, *args)


def assert_same_output(output: dict, expected: dict) -> None:
    """The outputs of a `Mixed` are equal."""
    for name in ("names", "kind"):
        assert output[name] == expected[name]
    for name in ("rows", "tables"):
        torch.testing.assert_close(output[name], expected[name])


def threads_of(seen: list[str]) -> set[str]:
    """The names of the threads that ran a call's lanes, without those of the next call."""
    names, seen[:] = set(seen), []
    return names


def noting(seen: list[str]) -> Callable[[], None]:
    """A function that notes the calling thread in a list, which is the same list in all lanes."""
    return lambda: seen.append(threading.current_thread().name)


# ---------------------------------------------------------------- random numbers


def dropout(home: str = "sim:0") -> nn.Module:
    """Two linear layers around dropout."""
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double().to(home)


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.parametrize("count", [2, 4, 8, 9, 16])
@LANES
def test_a_seed_gives_the_same_numbers_every_time(devices, count, home):
    """Each call with a seed draws what the first call with it drew; another seed draws others."""
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
    """Masks are those that the plain model draws for one shard after the other, in the first call and in later ones."""
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


def test_a_call_draws_as_many_numbers_as_the_plain_one_per_shard():
    """After a call the shared generator stands where the plain calls of the shards leave it."""
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

    On one device: backward runs a thread per device, and all simulated devices share the CPU's generator.
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


class Noted(nn.Module):
    """Notes the thread of each lane, and drops out some of its input in train mode."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)
        self.note = noting(seen := [])
        self.threads = lambda: threads_of(seen)

    def forward(self, x):
        self.note()
        return self.dropout(x) * self.weight


@pytest.mark.parametrize("devices", [TWICE, ["sim:2", "sim:1"]], ids=str)
def test_only_calls_that_draw_keep_their_lanes_in_turns(devices):
    """In train mode every call runs its lanes one after another in the caller's thread, in eval mode the first one only."""
    model = Noted().to("sim:0")
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


def test_a_kind_that_begins_to_draw_warns_and_is_reproducible_from_then_on():
    """A call that draws though earlier ones of its kind did not warns; after it, a seed gives the same numbers."""

    class Late(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5) if self.draws else x

    model, x = Late(), rows(9).to("sim:0")
    model.draws = False
    with torch.no_grad(), parallel(model, TWICE):
        model(x)
        model(x)
        model.draws = True
        with pytest.warns(UserWarning, match="earlier calls of its kind drew none"):
            model(x)
        outputs = []
        for _ in range(4):
            torch.manual_seed(3)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 4, rtol=0, atol=0)


@pytest.fixture
def generators(monkeypatch):
    """Give each simulated device a random generator of its own, as GPUs have: the devices themselves share the CPU's."""
    own = {torch.device(device): torch.Generator() for device in SIMS}
    monkeypatch.setattr(torch.sim, "get_rng_state", lambda device: own[torch.device(device)].get_state(), raising=False)
    return own


class Noise(nn.Module):
    """Adds numbers drawn from the generator of the input's device, and notes the thread."""

    def __init__(self, generators):
        super().__init__()
        self.draw = lambda x: torch.rand(x.shape, generator=generators[x.device]).to(x.device)
        self.note = noting(seen := [])
        self.threads = lambda: threads_of(seen)

    def forward(self, x):
        self.note()
        return x + self.draw(x)


@pytest.mark.parametrize("count", [4, 8, 9, 16])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:2", "sim:1"]], ids=str)
def test_a_seed_reproduces_calls_that_draw_from_the_devices_own_generators(devices, count, generators):
    """Where each device has its own generator, the first call of a kind draws what later calls with that seed draw."""
    model, x = Noise(generators), torch.zeros(count, 3).to("sim:0")
    outputs = []
    with torch.no_grad(), parallel(model, devices, output_device="cpu"):
        for _ in range(4):
            for generator in generators.values():
                generator.manual_seed(1)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 4, rtol=0, atol=0)


def test_lanes_that_share_no_generator_run_at_the_same_time(generators):
    """Calls that draw from generators that no two lanes share run each lane in its own thread from the second call on."""
    model, x = Noise(generators), torch.zeros(9, 3).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model.threads()
        model(x)
    assert len(model.threads()) == 4


@pytest.mark.parametrize("devices", [TWICE, SIMS], ids=str)
def test_lanes_that_share_a_generator_of_the_module_draw_in_lane_order(devices):
    """A generator that the module holds is one for all lanes: a seed gives the same numbers every time."""

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


# ---------------------------------------------------------------- what is learned


class Mixed(nn.Module):
    """Returns rows, values that are no rows but as many as some shard has, and lists."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict:
        y = self.linear(x)
        return {
            "rows": y,
            "tables": (y.new_ones(2), y.new_ones(4, 4), self.linear.weight),
            "nothing": None,
            "names": [f"row {value:.3f}" for value in y[:, 0].tolist()],
            "kind": "mixed",
        }


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize("count", [4, 8, 9, 12, 16])
def test_what_follows_the_rows_is_learned_from_the_first_call(count, home):
    """Tables as long as a shard are returned once, rows are concatenated, and lists have one item per row."""
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
    """The first call has shards of different sizes; every later one of its kind is balanced over all lanes."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        if count == 3:  # one row per lane never shows anything
            model(rows(9))
        else:
            model(rows(count))
            assert p.stats().shards == first
        for _ in range(2):
            model(rows(count))
            assert p.stats().shards == later


def test_what_was_learned_holds_for_batches_of_other_sizes():
    """After the first call, batches of any size are cut and joined alike, down to a short last one."""
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
def test_what_was_learned_is_checked_on_each_call(count):
    """An output that followed the rows and does so no longer is refused, also if all lanes return equal values."""
    ones = torch.ones(count, 5)
    few = -ones
    few[[0, 3, 6, 8] if count == 10 else [0, 2, 4, 6]] = 1  # one row per lane
    with torch.no_grad(), parallel(Filtered(), SIMS, output_device="cpu") as p:
        torch.testing.assert_close(p(ones), ones)
        with pytest.raises(GatherError, match="out_dims"):
            p(few)


@pytest.mark.parametrize("count", [8, 10])
def test_rows_whatever_their_number_are_declared(count):
    """With out_dims="ragged" a filter returns its rows in order."""
    x = rows(count)
    with torch.no_grad(), parallel(Filtered(), SIMS, out_dims="ragged", output_device="cpu") as p:
        for _ in range(2):
            torch.testing.assert_close(p(x), x[x[:, 0] > 0])


def test_a_place_that_no_call_has_proved_is_learned_again():
    """An output that a known kind has not shown is refused with the option that settles it; the next call shows it."""

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
    """Two lanes with two or four rows run the first call whole; it and all later calls have the plain answer."""
    model = mlp().to(home)
    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        for count in counts:
            x = rows(count)
            torch.testing.assert_close(model(x), plainly(model, x.to(home)))
        model(rows(4))
        assert p.stats().shards == (2, 2)


@pytest.mark.parametrize("home", ["sim:0", "sim:3", "cpu"])
def test_calls_of_one_row_and_of_none_are_plain(home):
    """A call of one row or none has the plain output, tables included, before and after something was learned."""

    class WithTable(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.new_ones(7)

    model = WithTable(5, 3, dtype=torch.float64).to(home)
    with torch.no_grad(), parallel(model, SIMS):
        for count in (1, 0, 9, 1, 0, 8):
            x = rows(count)
            torch.testing.assert_close(model(x), plainly(model, x.to(home)))


@pytest.mark.parametrize("devices", [TWICE, ["sim:1", "sim:2"]], ids=str)
def test_evidence_from_a_call_on_another_stream(devices):
    """What a whole call on one stream has shown serves a cut call on another one."""
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
    """The evidence that a block gathered holds no memory of a device once the block has ended."""
    model = nn.Linear(5, 1000).to("sim:0")
    gc.collect()
    before = simdevice.stats().live_bytes
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        model(torch.randn(4, 5))
    gc.collect()
    assert simdevice.stats().live_bytes == before
    assert p.stats().calls == 1


# ---------------------------------------------------------------- what is declared


def test_declared_outputs_are_balanced_from_the_first_call():
    """With out_dims nothing is learned: every lane has its share at once."""
    model = mlp().to("sim:0")
    x = rows(8)
    with torch.no_grad(), parallel(model, SIMS, out_dims=0) as p:
        torch.testing.assert_close(model(x), plainly(model, x.to("sim:0")))
        assert p.stats().shards == (2, 2, 2, 2)


@pytest.mark.parametrize("count", [4, 8, 10])
def test_declared_outputs_of_all_sorts(count):
    """out_dims names the dim of each output: an LSTM's states lie on another one; None and "items" are taken too."""

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
    """join="pad" pads outputs that differ beyond the rows, on the home device."""

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
    """Returns rows and a table in train mode, rows alone in eval mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x):
        y = self.linear(x)
        return (y, y.new_ones(2)) if self.training else y


@pytest.mark.parametrize("grad", [True, False])
def test_train_and_eval_mode_are_learned_once_each(grad):
    """A model that returns something else in eval mode may be switched back and forth; each mode is learned once."""
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
def test_what_makes_another_kind(other):
    """Each mode, structure of the arguments, and non-tensor value has a first call of its own, and no more than one."""

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


def test_methods_are_learned_apart():
    """Each method of a block has a first call of its own."""

    class Two(Modal):
        def encode(self, x):
            return self.linear(x), x.new_ones(2, device=x.device)

    model = Two().eval().to("sim:0")
    x = rows(8)
    with torch.no_grad(), parallel(model, SIMS, methods=("forward", "encode")):
        for _ in range(2):
            torch.testing.assert_close(model(x), model.linear(x.to("sim:0")))
            output, table = model.encode(x)
            torch.testing.assert_close((output, table), (model.linear(x.to("sim:0")), torch.ones_like(table)))
            assert table.shape == (2,)


def test_a_first_call_trains_like_later_ones():
    """The gradients of the first call, whose last lane runs two shards, are the plain ones, and add up with others."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    with parallel(model, SIMS):
        for count in (16, 16, 8):
            x = rows(count)
            model(x).square().sum().backward()
            plain(x.to("sim:0")).square().sum().backward()
            assert_same_gradients(model, plain)
