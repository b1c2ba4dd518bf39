"""What `plan` promises where lanes are devices: all ways give the plain answer, and unequal devices get unequal shares."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parawrap import Parallel, Plan, parallel
from parawrap.engine.plan import PLAIN, Way, _planner, _spares
from tests.devices.zoo import SIMS, Where, assert_same_gradients, mlp, rows, side_stream
from tests.settled import settle_on

WAYS = {
    "plain": PLAIN,
    "two": Way(2),
    "three": Way(3),
    "four": Way(4),
    "weighted": Way(4, weights=(40, 30, 20, 10)),
    "two weighted": Way(2, weights=(10, 90)),
}
EXPECTED_OF_20 = dict(zip(WAYS.values(), ([20], [10, 10], [7, 7, 6], [5] * 4, [8, 6, 4, 2], [2, 18]), strict=True))


@pytest.fixture
def force(monkeypatch):
    """Settle every choice on one way, before anything is measured."""
    return partial(settle_on, monkeypatch)


def chosen(p: Parallel[Any]) -> Way | None:
    """What is chosen for the only kind of call there was."""
    (contest,) = [contest for book in p.plan._books.values() for contest in book.contests.values()]
    return contest.fixed or (contest.race.choice if contest.race else None)


def ways_tried(p: Parallel[Any]) -> list[Way]:
    (contest,) = [contest for book in p.plan._books.values() for contest in book.contests.values()]
    return [way for way in contest.race.ways if contest.race.times(way) is not None]


def call_until_chosen(p: Parallel[Any], call: Callable[[], object], *, most: int = 300) -> Way:
    for _ in range(most):
        call()
        if (way := chosen(p)) is not None:
            return way
    raise AssertionError(f"nothing is chosen after {most} calls:\n{p.plan}")


class Paced(nn.Module):
    """Answers with the device of each row; takes as many milliseconds a row as its device is given."""

    def __init__(self, *ms_a_row: float) -> None:
        super().__init__()
        self.where = Where()
        self.ms_a_row = ms_a_row

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(len(x) * self.ms_a_row[x.device.index] / 1e3)
        output: Tensor = self.where(x)
        return output


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_every_way_gives_the_plain_answer(way, home, force):
    """Wherever the model and the input are, outputs and gradients of each way are the plain ones, and lie where they do."""
    force(way)
    model = mlp().to(home)
    plain = copy.deepcopy(model)
    with parallel(model, SIMS, plan="auto") as p:
        for count in (10, 10, 9, 3, 2, 1, 0):
            for given in ("cpu", home):
                x = rows(count).to(given).requires_grad_()
                own = x.detach().to(home).requires_grad_()
                model.zero_grad()
                plain.zero_grad()
                output, expected = model(x), plain(own)
                torch.testing.assert_close(output, expected)
                output.square().sum().backward()
                expected.square().sum().backward()
                assert x.grad is not None
                torch.testing.assert_close(x.grad, own.grad.to(given))
                assert_same_gradients(model, plain)
        assert p.plan.extra_calls == 0


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_each_way_goes_to_its_devices(way, force):
    """A way with fewer lanes uses the first of them, and shares are as its weights, which sum up."""
    force(way)
    model = Where().to("sim:0")
    x = torch.zeros(20, device="sim:0")
    with torch.no_grad(), parallel(model, SIMS, plan="auto") as p:
        assert model(x).unique().tolist() == [0, 1, 2, 3]  # the first goes to all lanes
        got = model(x).cpu().int().bincount(minlength=4).tolist()
        assert sum(got) == 20
        assert got == EXPECTED_OF_20[way] + [0] * (4 - way.lanes)
        assert p.stats().plain == (way == PLAIN)


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_auto_tries_one_device_and_several(home):
    """With "auto" the first device alone, two and four are tried, in training; each answer is right, and one is chosen."""
    model = mlp().to(home)
    plain = copy.deepcopy(model)
    x = rows(12)
    expected = plain(x.to(home))
    expected.square().sum().backward()
    with parallel(model, SIMS, plan="auto") as p:

        def step() -> None:
            model.zero_grad()
            output = model(x)
            torch.testing.assert_close(output, expected)
            output.square().sum().backward()
            assert_same_gradients(model, plain)

        call_until_chosen(p, step)
        table = str(p.plan)
        assert p.stats().calls == sum(lane.tasks for lane in p.stats().lanes[:1]) + p.stats().plain
    assert [line.strip("* ").split("  ")[0] for line in table.splitlines()[3:6]] == ["plain", "2 lanes", "4 lanes"]


def test_the_default_uses_all_devices():
    """Without a plan every call is cut over all devices, and nothing is measured."""
    model = Paced(0, 1, 1, 1).to("sim:0")
    x = torch.zeros(4, device="sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        for _ in range(30):
            assert model(x).tolist() == [0, 1, 2, 3]
        assert p.stats().plain == 0
        assert str(p.plan) == "plan 'default', 0 extra calls"


# ---------------------------------------------------------------- choices


def test_one_fast_device_is_used_alone():
    """Where the other devices are far slower, calls stay on the first."""
    model = Paced(0, 20, 20, 20).to("sim:0")
    x = torch.zeros(8, device="sim:0")
    with torch.no_grad(), parallel(model, SIMS[:2], plan="auto") as p:
        assert call_until_chosen(p, lambda: model(x)) == PLAIN
        assert model(x).unique().tolist() == [0]


def test_equal_devices_share_a_slow_model():
    """Where a row takes as long on each device, all of them are used, and shares stay near to equal."""
    model = Paced(2, 2, 2, 2).to("sim:0")
    x = torch.zeros(16, device="sim:0")
    with torch.no_grad(), parallel(model, SIMS, plan="auto") as p:
        assert call_until_chosen(p, lambda: model(x)).lanes == 4
        sizes = p.stats().shards
        assert sum(sizes) == 16
        assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.parametrize(("paces", "of_24"), [((2.0, 4.0), 16), ((4.0, 1.0), 5)], ids=["the second", "the first"])
def test_unequal_devices_get_unequal_shares(paces, of_24, home):
    """A device that takes longer for each row gets fewer of them; sizes add up and rows stay in order."""
    model = Paced(*paces).to(home)
    x = torch.zeros(24, device="sim:0")
    with torch.no_grad(), parallel(model, SIMS[:2], plan="auto") as p:

        def call() -> None:
            devices = model(x).tolist()
            assert len(devices) == 24
            assert devices == sorted(devices)
            if len(set(devices)) > 1:
                assert sum(p.stats().shards) == 24

        way = call_until_chosen(p, call)
        assert way.weights, str(p.plan)
        assert "shares" in str(p.plan)
        first = model(x).tolist().count(0)
        assert abs(first - of_24) <= 3
        for count in (23, 13, 12, 2, 1):  # the last of other kinds
            assert len(model(torch.zeros(count, device="sim:0"))) == count


def test_one_device_that_beats_equal_shares_may_lose_to_unequal_ones():
    """Where halves take longer than the first device alone, shares by speed are tried before that is chosen."""
    model = Paced(3.0, 9.0).to("sim:0")
    x = torch.zeros(24, device="sim:0")
    with torch.no_grad(), parallel(model, SIMS[:2], plan="auto") as p:
        assert call_until_chosen(p, lambda: model(x)).weights
        assert len(ways_tried(p)) == 3
        assert 16 <= model(x).tolist().count(0) <= 20


# ---------------------------------------------------------------- streams, and devices beside the lanes'


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_callers_on_other_streams(grad):
    """Calls on a side stream, while it is measured and after, find their input and leave their output in order."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    stream = side_stream()
    stream.wait_stream(torch.sim.current_stream("sim:0"))
    with torch.set_grad_enabled(grad), parallel(model, SIMS, plan="auto") as p, torch.sim.stream(stream):
        for count in (8, 7, 8):
            for _ in range(25):
                x = rows(count).to("sim:0") * 1
                output = model(x)
                expected = plain(x)
                torch.testing.assert_close(output, expected)
                if grad:
                    (output * 1).sum().backward()
        assert p.stats().calls == 75
    stream.synchronize()


def test_a_backward_pass_is_over_when_the_devices_are(monkeypatch):
    """While ways are compared, a backward pass is timed until the devices have done it; afterwards nobody waits."""
    waited: list[torch.device] = []
    monkeypatch.setattr(_planner, "_wait_for", waited.append)
    model = Paced(1, 1, 1, 1).to("sim:0")
    x = torch.zeros(8, device="sim:0")
    with parallel(model, SIMS[:2], plan="auto") as p:

        def backward() -> int:
            loss = model(x).sum()
            waited.clear()
            loss.backward()
            return len(waited)

        backward()  # it is of a call that was cut to be learned from
        assert backward() == 2
        call_until_chosen(p, backward)
        assert backward() == 0


@pytest.mark.parametrize("rule", [None, "auto", "lanes"])
def test_inputs_from_a_device_to_lanes_on_the_cpu(rule, force, monkeypatch):
    """Lanes on the CPU take input from a device, also of a shape whose calls from the CPU are plain."""
    monkeypatch.setattr(_spares, "_ASKING_NS", 10**15)
    force(PLAIN)
    model = mlp()
    x = rows(8)
    expected = model(x).detach()
    with torch.no_grad(), parallel(model, ["cpu", "cpu"], plan=rule):
        for _ in range(5):
            torch.testing.assert_close(model(x), expected)
            torch.testing.assert_close(model(x.to("sim:1")), expected)


def test_a_module_that_moves():
    """A module that is moved between calls has the right answer at each, measured or not."""
    model = mlp().to("sim:0")
    x = rows(8)
    with torch.no_grad():
        expected = copy.deepcopy(model).cpu()(x)
        with parallel(model, SIMS, plan=Plan("auto")):
            for home in ("sim:0", "cpu", "sim:2", "sim:0"):
                model.to(home)
                for _ in range(15):
                    output = model(x)
                    assert str(output.device) == home
                    torch.testing.assert_close(output.cpu(), expected)
