"""What `plan` promises: whichever way a call goes, it is one run of the model and the answer is the same."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from parawrap import GatherError, Parallel, Plan, PlanError, SessionError, parallel, testing
from parawrap.backends import cpu
from parawrap.engine.plan import PLAIN, Way, _backward_clock, _candidates, _memory, _planner, _race, _spares
from tests.settled import settle_on

TWO = ["cpu"] * 2
FOUR = ["cpu"] * 4
WAYS = {
    "plain": PLAIN,
    "one thread": Way(threads=1),
    "two lanes": Way(2, 1),
    "four lanes": Way(4, 1),
    "own backward": Way(4, 1, own_backward=True),
    "memory kept": Way(2, 1, memory_kept=True),
    "traced": Way(2, 1, traced=True),
    "traced whole": Way(traced=True),
    "weighted": Way(2, 1, weights=(70, 30)),
}

every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


@pytest.fixture
def force(monkeypatch):
    """Settle every choice on one way, before anything is measured."""
    return partial(settle_on, monkeypatch)


@pytest.fixture
def spare_all(monkeypatch):
    """Let plain calls count as short however crowded the machine is."""
    monkeypatch.setattr(_spares, "_ASKING_NS", 10**15)


@pytest.fixture
def passes(monkeypatch):
    """Time passes for the plan where the test says how much, in seconds, and nowhere else."""
    now, access = [0], threading.Lock()

    def let_pass(seconds: float) -> None:
        with access:
            now[0] += int(seconds * 1e9)

    for module in (_planner, _backward_clock):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    return let_pass


@pytest.fixture
def one_thread():
    """Operators in the caller use one thread: none is left spinning, which takes seconds on a crowded machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def however_short(monkeypatch):
    """Have all ways compared though these calls are so short that others than the plain one would not be tried."""
    monkeypatch.setattr(_race, "_TOO_SHORT_NS", 0)


@pytest.fixture(autouse=True)
def nothing_stays():
    """Fail where a block leaves a thread, a figure of threads or a holder of memory behind; start from one seed."""
    torch.manual_seed(0)
    figures = torch.get_num_threads(), figure_of_a_new_thread()
    yield
    if lanes_left():
        gc.collect()  # takes a fifth of a second: only where a block hangs on a cycle
    assert not lanes_left()
    assert (torch.get_num_threads(), figure_of_a_new_thread()) == figures
    assert _memory._holders == 0


def figure_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(torch.get_num_threads).result()


def lanes_left() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


def contests(p: Parallel[Any]) -> list[Any]:
    return [contest for book in p.plan._books.values() for contest in book.contests.values()]


def chosen(p: Parallel[Any]) -> Way | None:
    """What is chosen for the only kind of call there was."""
    (contest,) = contests(p)
    return contest.fixed or (contest.race.choice if contest.race else None)


def call_until_chosen(p: Parallel[Any], call: Callable[[], object]) -> Way:
    for _ in range(400):
        call()
        if (way := chosen(p)) is not None:
            return way
    raise AssertionError(f"nothing is chosen after 400 calls:\n{p.plan}")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def counted(inner: nn.Module) -> tuple[nn.Module, list[int]]:
    """The module, and a list of the rows of each run of it, in whichever thread."""
    runs: list[int] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            runs.append(x.shape[0])  # len(x) cannot be traced
            return self.inner(x)

    return Counted(), runs


class Paced(nn.Module):
    """A linear layer that takes a while, by the rows that it is given."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds(len(x)))
        return self.linear(x)


def lanes_lose(rows: int) -> float:
    return 0.0 if rows == 8 else 0.02


def lanes_win(rows: int) -> float:
    return 0.02 if rows == 8 else 0.0


# ---------------------------------------------------------------- one call is one run


STATEFUL = {
    "mlp": mlp,
    "dropout": lambda: nn.Sequential(mlp(), nn.Dropout()),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("rule", [None, "auto", "lanes"])
def test_each_row_is_run_once(rule, name, grad):
    """However a call is run, the rows that the model saw add up to the rows it was called with."""
    model, runs = counted(STATEFUL[name]())
    with torch.set_grad_enabled(grad), parallel(model, TWO, plan=rule) as p:
        for call in range(60):
            runs.clear()
            rows = (16, 16, 7, 4)[call % 4]
            output = model(torch.randn(rows, 4))
            assert sum(runs) == len(output) == rows
            if grad:
                output.sum().backward()
                assert sum(runs) == rows, "backward has run the model"
        assert p.plan.extra_calls == 0
        assert p.stats().calls == 60


@every_way
def test_each_way_is_one_run(way, force):
    """Each way runs a call's rows once; only tracing runs the model beside, and says how often."""
    model, runs = counted(mlp())
    model.eval()
    force(way)
    with torch.no_grad(), parallel(model, FOUR, plan=Plan("auto", traced=way.traced)) as p:
        for _ in range(4):
            runs.clear()
            extra = p.plan.extra_calls
            assert model(torch.randn(9, 4)).shape == (9, 3)
            seen, told = sum(map(int, runs)), p.plan.extra_calls - extra
            if way.traced:  # what a trace runs is not seen
                assert seen <= 9 * (1 + told)
            else:
                assert (seen, told) == (9, 0)
        assert bool(p.plan.extra_calls) == way.traced
        assert seen == (0 if way.traced else 9)


# ---------------------------------------------------------------- the answers


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, mask=None):
        return self.layer(x, src_key_padding_mask=mask)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


class Several(nn.Module):
    """Takes tensors by position and by name, and things that are no tensors; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, y, times=1, *, shift=None, mode="add", row=None):
        output = self.linear(x) * times
        output = output + y if mode == "add" else output - y
        if shift is not None:
            output = output + shift
        if row is not None:
            output = output * row
        return {"output": output, "parts": (x * 2, [y]), "nothing": None}


def tensors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "mlp": (mlp, lambda n: ((tensors(n, 4),), {})),
    "by name": (mlp, lambda n: ((), {"input": tensors(n, 4)})),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()), lambda n: ((tensors(n, 2, 5, 5),), {})),
    "lstm": (Last, lambda n: ((tensors(n, 5, 4),), {})),
    "encoder": (Encoder, lambda n: ((tensors(n, 5, 8),), {"mask": torch.arange(5).expand(n, 5) > 3})),
    "several": (Several, lambda n: ((tensors(n, 4), tensors(n, 3, seed=1), 2), {"shift": tensors(n, 3), "mode": "sub"})),
    "one row for all": (
        Several,
        lambda n: ((tensors(n, 4), tensors(1, 3)), {"row": tensors(1, 3), "shift": torch.tensor(2.0)}),
    ),
}


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def called(model: nn.Module, args: Any, kwargs: Any, *, grad: bool) -> tuple[Any, list[Tensor | None]]:
    """What a call gives, and the gradients of parameters and inputs."""
    args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.clone(), (args, kwargs))
    inputs = [leaf for leaf in leaves((args, kwargs)) if leaf.is_floating_point()]
    if not grad:
        return model(*args, **kwargs), []
    for leaf in inputs:
        leaf.requires_grad_()
    model.zero_grad()
    output = model(*args, **kwargs)
    torch.stack([leaf.square().sum() for leaf in leaves(output)]).sum().backward()
    return output, [None if leaf.grad is None else leaf.grad.clone() for leaf in [*inputs, *model.parameters()]]


@pytest.mark.parametrize(
    ("way", "grad"),
    [(way, grad) for grad in (False, True) for way in WAYS.values() if not (way.traced and grad)],
    ids=lambda value: str(value) if isinstance(value, Way) else ["no grad", "grad"][value],
)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("one_thread")
def test_every_way_gives_the_plain_answer(name, grad, way, force):
    """Outputs and gradients of full, short and tiny batches are the plain ones in every way."""
    make, arguments = CALLS[name]
    model = make().train(grad)
    force(way)
    sizes = [8, 5, 4, 3, 1] + ([0] if name == "mlp" else [])  # the first of each kind goes to all lanes: 8, 4
    calls = [arguments(rows) for rows in sizes]
    with torch.set_grad_enabled(grad):
        plain = copy.deepcopy(model)
        expected = [called(plain, *call, grad=grad) for call in calls]
        with parallel(model, FOUR, plan=Plan("auto", traced=way.traced)):
            for call, (output, grads) in zip(calls, expected, strict=True):
                mine, my_grads = called(model, *call, grad=grad)
                assert_close(mine, output)
                assert_close(my_grads, grads)


@pytest.mark.parametrize("rule", [None, "auto"])
def test_calls_without_tensors_and_without_rows(rule):
    """What has nothing to be cut is run plainly, however often it comes."""
    with parallel(lambda *args, scale=2: (args, scale), TWO, plan=rule) as p:
        for _ in range(40):
            assert p() == ((), 2)
            assert p(3, scale="x") == ((3,), "x")
            assert p(torch.tensor(1.0))[0][0] == 1
            assert p(torch.zeros(0, 3))[0][0].shape == (0, 3)
        assert p.stats().calls == p.stats().plain == 160


# ---------------------------------------------------------------- where the answer depends on the lanes


class Loss(nn.Module):
    """Returns a loss; rows of 5 and 4 make the mean of the lanes' another than the mean of all."""

    def __init__(self, *, always: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.returns_loss = always

    def forward(self, x, loss=None):
        output = self.linear(x)
        return output.detach().square().sum().sqrt() if (self.returns_loss if loss is None else loss) else output


def values(model: Callable[..., Any], times: int, **kwargs: Any) -> set[float]:
    x = tensors(9, 4)
    return {round(float(model(x, **kwargs)), 5) for _ in range(times)}


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("rule", [None, "auto"])
@pytest.mark.usefixtures("spare_all")
def test_a_loss_is_the_same_at_every_call(rule, reduce):
    """A 0-d output is what all lanes make of it, in each of sixty calls."""
    model = Loss()
    with parallel(model, TWO, reduce=reduce, plan="lanes"):
        expected = values(model, 1)
    with parallel(model, TWO, reduce=reduce, plan=rule) as p:
        assert values(model, 60) == expected
        assert chosen(p) == Way(2, p._opened().pool.threads or 0)
        assert "the only way that is right here" in str(p.plan)


@pytest.mark.parametrize("rule", [None, "auto"])
@pytest.mark.usefixtures("spare_all")
def test_a_flag_tells_losses_from_outputs(rule, force):
    """A target that returns rows or a loss by a flag is measured for the one, and not for the other."""
    model = Loss()
    with parallel(model, TWO, plan="lanes"):
        expected = values(model, 1, loss=True)
    force(PLAIN)
    with parallel(model, TWO, plan=rule) as p:
        for _ in range(5):
            assert model(tensors(9, 4), loss=False).shape == (9, 3)
        assert p.stats().plain == 4
        assert values(model, 20, loss=True) == expected
        assert p.stats().plain == 4


def test_a_module_that_begins_to_return_a_loss(force):
    """Where an attribute makes a module return something else, calls are cut from the next one on."""
    model = Loss(always=False)
    with parallel(model, TWO, plan="lanes"):
        expected = values(model, 1, loss=True)
    force(PLAIN)
    with parallel(model, TWO):
        for _ in range(4):
            model(tensors(9, 4), loss=None)
        model.returns_loss = True
        values(model, 1, loss=None)
        assert values(model, 10, loss=None) == expected


@pytest.mark.usefixtures("spare_all")
def test_a_loss_that_begins_while_calls_are_spared(force):
    """The one call that shows it ends the sparing of all shapes: further calls are cut, and each call is counted once."""
    model = Loss(always=False)
    long, short = tensors(9, 4), tensors(11, 4)  # of one kind
    with parallel(model, TWO, plan="lanes"):
        expected = values(model, 1, loss=True)
    force(PLAIN)
    with parallel(model, TWO) as p:
        for _ in range(20):
            model(long)
        planner = p._opened()._planner
        assert planner.spared_calls() == 18  # the first is cut, the second is looked at
        assert (p.stats().calls, p.stats().plain) == (20, 19)
        model.returns_loss = True
        assert model(short).ndim == 0
        assert (p.stats().calls, p.stats().plain) == (21, 20)
        for call in range(20):
            assert values(model, 1) == expected
            assert model(short).ndim == 0
            assert p.stats().calls == 23 + 2 * call
        assert planner.spared_calls() == 18
        assert p.stats().plain == 20
        assert chosen(p) == Way(2, p._opened().pool.threads or 0)
    assert p.stats().calls == 61


class Headed(nn.Module):
    """Returns rows, or a loss, by the name of what is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, what):
        output = self.linear(x)
        return output if what == "logits" else output.detach().square().sum().sqrt()


@pytest.mark.parametrize("rule", [None, "auto"])
@pytest.mark.usefixtures("spare_all")
def test_a_word_tells_losses_from_outputs(rule, force):
    """What was chosen for one word decides nothing for another: the first loss is what the lanes make of it, as all are."""
    model, x = Headed(), tensors(9, 4)
    with parallel(model, TWO, plan="lanes"):
        expected = float(model(x, "loss"))
    force(PLAIN)
    with parallel(model, TWO, plan=rule) as p:
        for _ in range(5):
            assert model(x, "logits").shape == (9, 3)
        assert p.stats().plain == 4
        assert [float(model(x, "loss")) for _ in range(10)] == pytest.approx([expected] * 10)
        assert p.stats().plain == 4
        assert model(x, "logits").shape == (9, 3)
        assert p.stats().plain == 5


class Odd(nn.Module):
    """Returns what does not lie one a row."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        output = self.linear(x)
        return {"count": (output, len(x)), "mean": (output, output.mean(0)), "number": len(x)}[self.what]


@pytest.mark.parametrize("rule", [None, "auto"])
@pytest.mark.parametrize("what", ["count", "mean", "number"])
@pytest.mark.usefixtures("spare_all")
def test_what_depends_on_the_lanes_does_not_change(what, rule):
    """Outputs that are not one value a row are at every call what the lanes make of them, an error too."""
    model = Odd(what)

    def once() -> Any:
        try:
            return repr(model(tensors(8, 4)))
        except GatherError as error:
            return str(error)

    with torch.no_grad():
        with parallel(model, TWO, plan="lanes"):
            expected = once()
        with parallel(model, TWO, plan=rule):
            assert {once() for _ in range(60)} == {expected}


@pytest.mark.parametrize("rule", [None, "auto"])
@pytest.mark.usefixtures("spare_all")
def test_a_norm_in_train_mode_stays_with_the_lanes(rule, force):
    """Batch norm is plain where it was chosen in eval mode, and cut as ever from the first call in train mode on."""
    force(PLAIN)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = tensors(9, 4)
    with torch.no_grad(), parallel(model, TWO, plan=rule) as p:
        for _ in range(10):
            model(x)
        assert p.stats().plain == 9
        model.train()
        for _ in range(10):
            model(x)
        assert p.stats().plain == 9
        model.eval()
        assert_close(model(x), copy.deepcopy(model)(x))
        assert p.stats().plain == 10


def test_one_plan_for_targets_that_look_alike(force):
    """Two targets whose structure is the same share what was measured, and not what the lanes make of their outputs."""
    force(PLAIN)
    plan = Plan("auto")
    x = tensors(9, 4)
    with parallel(lambda v: v * 2, TWO, plan=plan) as p:
        for _ in range(5):
            assert_close(p(x), x * 2)
    with parallel(lambda v: v.square().sum().sqrt(), TWO, plan="lanes") as p:
        expected = float(p(x))
    with parallel(lambda v: v.square().sum().sqrt(), TWO, plan=plan) as p:
        assert {float(p(x)) for _ in range(10)} == {expected}


@pytest.mark.parametrize("rule", [None, "auto"])
def test_lists_and_stacks_have_one_item_a_lane(rule):
    """With join="list" and reduce="stack" every call is cut over all lanes."""
    model = Loss()
    x = tensors(8, 4)
    with torch.no_grad(), parallel(model, TWO, reduce="stack", plan=rule) as p:
        assert {model(x).shape for _ in range(30)} == {torch.Size([2])}
        assert p.stats().plain == 0
    with torch.no_grad(), parallel(mlp(), TWO, join="list", plan=rule) as p:
        assert {len(p(x)) for _ in range(30)} == {2}
        assert p.stats().plain == 0


@pytest.mark.parametrize("rule", [None, "auto"])
def test_verify_beside_a_plan(rule):
    """With verify, a model that mixes rows is found out at the first call, and one that does not never is."""
    model = mlp()
    with torch.no_grad(), parallel(model, TWO, verify=True, plan=rule):
        x = tensors(8, 4)
        for _ in range(40):
            assert_close(model(x), copy.deepcopy(model)(x))
    with (
        parallel(lambda v: v - v.mean(0), TWO, verify=True, plan=rule) as p,
        pytest.raises(Exception, match=r"mean|plain|diff"),
    ):
        p(x)


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("rule", ["default", "auto"])
def test_lanes_that_lose_are_not_used(rule):
    """Where the plain call is much faster it is chosen, and from then on calls are plain."""
    model = Paced(lanes_lose)
    x = torch.zeros(8, 4)
    with torch.no_grad(), parallel(model, TWO, plan=Plan(rule, keep_memory=False)) as p:
        assert call_until_chosen(p, lambda: model(x)).lanes == 1
        before = p.stats()
        for _ in range(10):
            model(x)
        assert p.stats().plain - before.plain == p.stats().calls - before.calls == 10


@pytest.mark.parametrize("rule", ["default", "auto"])
def test_lanes_that_win_are_used(rule):
    """Where lanes are much faster they are chosen, and from then on calls are cut."""
    model = Paced(lanes_win)
    x = torch.zeros(8, 4)
    with torch.no_grad(), parallel(model, TWO, plan=Plan(rule, keep_memory=False)) as p:
        assert call_until_chosen(p, lambda: model(x)).lanes == 2
        before = p.stats().plain
        for _ in range(10):
            model(x)
        assert p.stats().plain == before


@pytest.mark.usefixtures("spare_all")
def test_a_choice_for_plain_stands():
    """Once plain is chosen every further call of that shape is plain, and counted."""
    model = Paced(lanes_lose)
    x = torch.zeros(8, 4)
    with torch.no_grad(), parallel(model, TWO) as p:
        call_until_chosen(p, lambda: model(x))
        for _ in range(2500):
            before = p.stats().plain
            model(x)
            assert p.stats().plain == before + 1


def test_shapes_that_take_turns_are_decided():
    """Two sizes of one kind of call, in turn, lead to a choice."""
    model = Paced(lambda rows: 0.0 if rows >= 7 else 0.005)
    batches = [torch.zeros(rows, 4) for rows in (8, 7)]
    with torch.no_grad(), parallel(model, TWO, plan=Plan("auto", keep_memory=False)) as p:
        for call in range(400):
            model(batches[call % 2])
            if contests(p)[0].race is not None:
                assert contests(p)[0].missed <= 1
            if (way := chosen(p)) is not None:
                break
        assert way is not None
        assert way.lanes == 1


@pytest.mark.parametrize("rule", ["default", "auto"])
def test_calls_that_are_never_alike_are_decided(rule):
    """Where no two calls of a kind have as many elements, nothing can be compared: after a while they are plain."""
    widths = iter(range(4097, 8192))
    with torch.no_grad(), parallel(lambda v: v.sum(1), TWO, plan=Plan(rule, keep_memory=False)) as p:

        def call() -> None:
            x = torch.ones(2, next(widths))
            assert p(x).tolist() == [x.shape[1]] * 2

        assert call_until_chosen(p, call) == PLAIN
        assert len(contests(p)) == 1
        assert "  * plain" in str(p.plan)
        before = p.stats()
        for _ in range(50):
            call()
        assert p.stats().plain - before.plain == p.stats().calls - before.calls == 50


@pytest.mark.parametrize("rule", ["default", "auto"])
def test_forwards_after_training_steps_are_decided(rule):
    """Where backward passes stop coming, the calls are compared by what they take alone, and a way is chosen."""
    model = Paced(lanes_win)
    x = tensors(8, 4)
    with parallel(model, TWO, plan=Plan(rule, keep_memory=False)) as p:
        for _ in range(3):
            model(x).sum().backward()
        (contest,) = contests(p)
        assert contest.saw_backward
        assert chosen(p) is None
        assert call_until_chosen(p, lambda: model(x)).lanes == 2
        assert not contest.saw_backward
        assert contest.race.times(PLAIN) is not None


def test_one_forward_between_training_steps_tells_nothing():
    """A call that no backward pass follows, among those that one does, is not taken for one of them."""
    model = Paced(lanes_win)
    x = tensors(8, 4)
    with parallel(model, TWO, plan=Plan("auto", keep_memory=False)) as p:

        def step() -> None:
            model(x).sum().backward()
            model(x)

        assert call_until_chosen(p, step).lanes == 2
        assert contests(p)[0].saw_backward


def test_backward_is_part_of_what_is_measured(passes):
    """In training, a way whose forward is fast and whose backward is slow is not chosen."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.rows = len(x)
            passes(0.005 if len(x) == 8 else 0.0)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            passes(0.0 if ctx.rows == 8 else 0.03)
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return Slow.apply(self.linear(x))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = tensors(8, 4), tensors(8, 3)
    first = last = 0.0
    with parallel(model, TWO, plan=Plan("auto", keep_memory=False)) as p:

        def step() -> None:
            nonlocal first, last
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            last = float(loss.detach())
            first = first or last

        assert call_until_chosen(p, step).lanes == 1
        assert contests(p)[0].saw_backward
    assert last < first


def test_a_choice_in_training_stands(monkeypatch, passes):
    """A call whose forward is a small part of what was measured is not taken for one that has become faster."""

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
            passes(0.005 if len(grad) == 8 else 0.03)
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return Late.apply(self.linear(x))

    monkeypatch.setattr(_candidates, "CAREFUL", _candidates.CAREFUL._replace(patience=20))
    model = Model()
    x = tensors(8, 4)
    with parallel(model, TWO, plan=Plan("auto", keep_memory=False)) as p:

        def step() -> None:
            model(x=x).sum().backward()  # by name: such calls are not spared

        call_until_chosen(p, step)
        for _ in range(60):
            step()
            assert chosen(p) is not None, str(p.plan)


@pytest.mark.usefixtures("spare_all")
def test_deterministic_algorithms_mean_all_lanes():
    """Where torch is asked for the same numbers each time, which way is faster is not asked; kinds are all cut."""
    model = Paced(lanes_lose)
    x = torch.zeros(8, 4)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad(), parallel(model, TWO) as p:
            for _ in range(20):
                model(x)
            assert p.stats().plain == 0
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- gradients that are asked for in other ways


GRAD_WAYS = [PLAIN, Way(2, 1), Way(2, 1, own_backward=True)]


@pytest.mark.parametrize("rule", [None, "auto"])
def test_backward_passes_of_all_sorts(rule):
    """Forwards without backward, two before two, kept graphs, other threads and autograd.grad give the plain gradients."""
    model = mlp()
    plain = copy.deepcopy(model)
    x = tensors(8, 4)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    twice = [2 * grad for grad in expected]

    def grads() -> list[Tensor]:
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return found

    with parallel(model, TWO, plan=rule):
        for _ in range(12):
            model(x)
            losses = [model(x).square().sum() for _ in range(2)]
            for loss in losses:
                loss.backward()
            assert_close(grads(), twice)
            kept = model(x).square().sum()
            kept.backward(retain_graph=True)
            kept.backward()
            assert_close(grads(), twice)
            torch.stack([model(x).square().sum() for _ in range(2)]).sum().backward()
            assert_close(grads(), twice)
            with ThreadPoolExecutor(1) as executor:
                executor.submit(model(x).square().sum().backward).result()
            assert_close(grads(), list(expected))
            assert_close(torch.autograd.grad(model(x).square().sum(), list(model.parameters())), expected)


@pytest.mark.parametrize("way", [None, *GRAD_WAYS], ids=str)
def test_nothing_of_a_step_is_kept(way, force):
    """After a step neither its output nor what the model computed on the way is kept by the plan."""
    seen: list[weakref.ref[Tensor]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            hidden = self.one(x).tanh()
            seen.append(weakref.ref(hidden))
            return self.two(hidden)

    model = Model()
    if way is not None:
        force(way)
    with parallel(model, TWO, plan="auto"):
        for _ in range(30):
            seen.clear()
            x = torch.randn(8, 4)
            output = model(x)
            output.sum().backward()
            seen += [weakref.ref(x), weakref.ref(output)]
            del x, output
            assert [reference() for reference in seen] == [None] * len(seen)
            model(torch.randn(8, 4))  # without a backward pass
            assert [reference() for reference in seen] == [None] * len(seen)


# ---------------------------------------------------------------- counters


@pytest.mark.usefixtures("spare_all")
@pytest.mark.parametrize("rule", [None, "auto"])
def test_every_call_is_counted(rule, force):
    """Three thousand calls of several shapes, from several threads, are three thousand; plain ones are told as such."""
    force(PLAIN)
    model = mlp().eval()
    plain = copy.deepcopy(model)
    batches = [tensors(rows, 4) for rows in (8, 1, 5, 0, 3)]
    with torch.no_grad():
        expected = [plain(x) for x in batches]

        def work(_: int) -> None:
            with torch.no_grad():
                for call in range(750):
                    assert_close(model(batches[call % 5]), expected[call % 5])

        with parallel(model, TWO, plan=rule) as p:
            for x in batches:  # learned from, those of more than one row
                model(x)
            cut = 5 - p.stats().plain
            with ThreadPoolExecutor(4) as executor:
                list(executor.map(work, range(4)))
            stats = p.stats()
            assert stats.calls == 3005
            assert stats.plain == 3005 - cut
            assert p._opened()._planner.spared_calls() > 1000
        assert p.stats() == stats


@pytest.mark.usefixtures("spare_all")
def test_submit_and_map_beside_calls():
    """Calls that are submitted or mapped go whole to lanes, and are counted, beside those that a plan is for."""
    model = mlp().eval()
    x = tensors(8, 4)
    with torch.no_grad():
        expected = model(x)
        with parallel(model, TWO) as p:
            for _ in range(20):
                future = p.submit(x)
                assert_close(model(x), expected)
                assert_close(future.result(40), expected)
                for output in p.map([x, x]):
                    assert_close(output, expected)
            assert p.stats().calls == 80


@pytest.mark.usefixtures("spare_all")
def test_calls_without_a_block(force):
    """Calls through what `parallel` returns, outside of a with block, are counted and leave nothing that grows."""
    force(PLAIN)
    model = mlp().eval()
    x = tensors(8, 4)
    p = parallel(model, TWO)
    try:
        with torch.no_grad():
            for _ in range(2000):
                p(x)
            assert p.stats().calls == 2000
            assert p.stats().plain == 1999
            assert len(p._opened()._planner._spares._tickets) == 1
    finally:
        p.close()


@pytest.mark.parametrize("how", ["called", "entered"])
@pytest.mark.parametrize("rule", [None, "auto", "lanes"])
def test_a_block_that_is_dropped_hangs_on_no_cycle(rule, how):
    """Without close and without the collector, the session goes with its last user, and its lanes end."""
    model = mlp()
    x = tensors(8, 4)
    gc.collect()
    gc.disable()
    try:
        p = parallel(model, TWO, plan=rule)
        call = p if how == "called" else p.__enter__()
        for _ in range(3):
            output = call(x)
            output.sum().backward()
        call(x)
        session = weakref.ref(p._opened())
        lanes = lanes_left()
        assert lanes
        del p, call, output
        assert session() is None
        for lane in lanes:
            lane.join(40)
        assert not lanes_left()
        assert_close(model(x), copy.deepcopy(model)(x))
    finally:
        gc.enable()


def test_one_lane_is_planned_too():
    """With one lane on the CPU there still are ways to compare, however the call is spelled."""
    model = mlp().eval()
    x = tensors(8, 4)
    with torch.no_grad(), parallel(model, ["cpu"], plan=Plan("auto", keep_memory=False)) as p:
        call_until_chosen(p, lambda: model(x))
    assert "5 to 8 rows" in str(p.plan)


# ---------------------------------------------------------------- threads


class Figures(nn.Module):
    """Notes the figure of threads that operators have in each run; may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.error: BaseException | None = None
        self.only_in_lane_1 = False

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.linear(x)


@pytest.fixture
def eight_threads(monkeypatch):
    """A process that uses eight threads, on eight cores as far as plans know."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "usable_cores", lambda: 8)
    monkeypatch.setattr(_candidates, "usable_cores", lambda: 8)
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


MANY_THREADS = [PLAIN, Way(threads=1), Way(2, 4), Way(4, 2), Way(2, 4, own_backward=True), Way(4, 1)]


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("way", MANY_THREADS, ids=str)
@pytest.mark.usefixtures("eight_threads")
def test_the_callers_figure_stays(way, error, force):
    """The caller's threads, and those of new threads, are as many after a call as before, also after an error."""
    force(way)
    model = Figures()
    x = tensors(8, 4)
    with parallel(model, FOUR, plan="auto"):
        for call in range(4):
            model.error = error if call % 2 else None
            with pytest.raises(type(error)) if model.error is not None else contextlib.nullcontext():
                model(x).sum().backward()
            assert torch.get_num_threads() == 8
            assert figure_of_a_new_thread() == 8
    assert torch.get_num_threads() == 8
    assert figure_of_a_new_thread() == 8


@pytest.mark.usefixtures("eight_threads")
def test_submitting_after_a_way_with_other_threads(force):
    """After calls with other figures of threads a lane has its own for what is submitted, and new threads the process's."""
    force(Way(2, 4))
    woken = threading.Event()

    class Model(nn.Module):
        def forward(self, x):
            if threading.current_thread().name.startswith("parawrap-"):
                woken.set()
            else:
                woken.wait(40)  # until the lane's own thread has begun
            return x + torch.get_num_threads()

    model = Model()
    x = torch.zeros(8, 1)
    with parallel(model, FOUR, plan="auto") as p:
        p.submit(x).result(40)
        for _ in range(3):
            model(x)
            woken.clear()
        assert torch.cat([p.submit(x).result(40) for _ in range(8)]).unique().tolist() == [2.0]
        assert figure_of_a_new_thread() == 8


@pytest.mark.parametrize("rule", [None, "auto"])
def test_many_callers_at_once(rule):
    """Eight threads get the right answers from one block, whose plan stays readable meanwhile."""
    model = mlp()
    plain = copy.deepcopy(model)

    def work(index: int) -> None:
        x = tensors(2 + index, 4, seed=index)
        expected = plain(x).detach()
        for call in range(200):
            output = model(x)
            assert_close(output, expected)
            if call % 50 == 0:
                output.sum().backward()
                assert "plan" in str(p.plan)

    with parallel(model, TWO, plan=rule) as p:
        with ThreadPoolExecutor(8) as executor:
            list(executor.map(work, range(8), timeout=100))
        assert p.stats().calls == 1600
        assert len(contests(p)) == 4  # to 2, to 4, to 8 and to 16 rows
        x = tensors(9, 4)
        for _ in range(5):
            assert_close(model(x), plain(x))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("way", [PLAIN, Way(threads=1), Way(2, 1), Way(2, 1, own_backward=True)], ids=str)
def test_errors_keep_their_type_in_every_way(way, force):
    """A model's exception arrives as it is, from a lane with a note; the next call is run as ever."""
    force(way)
    model = Figures()
    x = tensors(8, 4)
    with parallel(model, TWO, plan="auto") as p:
        expected = model(x)
        for error in (ValueError("no"), KeyboardInterrupt(), GeneratorExit()):
            model.error = error
            with pytest.raises(type(error)) as caught:
                model(x)
            notes = "".join(getattr(caught.value, "__notes__", ()))
            assert ("lane 0" in notes) == (way.lanes > 1 and isinstance(error, Exception)) or not isinstance(
                error, Exception
            )
            model.error = None
            assert_close(model(x), expected)
        assert chosen(p) == way


@pytest.mark.parametrize("rule", ["default", "auto"])
def test_the_race_goes_on_after_errors(rule):
    """Calls that fail are not learned from, and a choice is made all the same."""
    model = Paced(lanes_lose)
    x = torch.zeros(8, 4)
    with torch.no_grad(), parallel(model, TWO, plan=Plan(rule, keep_memory=False)) as p:

        def call() -> None:
            model(x)
            with pytest.raises(RuntimeError):
                model(torch.zeros(8, 5))

        for _ in range(60):
            call()
        good, bad = contests(p)
        assert good.race.choice.lanes == 1
        assert bad.race is None
        with pytest.raises(RuntimeError, match=r"mat1|shapes"):
            model(torch.zeros(8, 5))


# ---------------------------------------------------------------- a model that changes


@pytest.mark.parametrize("way", [PLAIN, Way(2, 1), Way(2, 1, traced=True), Way(traced=True)], ids=str)
@pytest.mark.usefixtures("spare_all")
def test_a_changed_model_answers_as_it_is(way, force):
    """Modes, values, parameters and dtypes that change have their effect at the next call, spared or traced or not."""
    force(way)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.Linear(4, 3)).eval()
    x = tensors(8, 4)

    def check(x: Tensor) -> None:
        plain = copy.deepcopy(model)
        for _ in range(3):
            assert_close(model(x), plain(x))

    with torch.no_grad(), parallel(model, TWO, plan=Plan("auto", traced=True)):
        check(x)
        model.train()
        check(x)
        model.eval()
        check(x)
        model[0].weight.mul_(2)
        check(x)
        model[0].weight = nn.Parameter(torch.ones(4, 4))
        check(x)
        model[2] = nn.Linear(4, 5)
        check(x)
        model.double()
        check(x.double())
        with pytest.raises(RuntimeError, match=r"dtype|Double|double"):
            model(x)
        model.float()
        check(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        check(x)


# ---------------------------------------------------------------- where calls come from


@pytest.mark.usefixtures("spare_all")
def test_transforms_and_tracers_see_the_plain_model(force):
    """vmap, functional gradients, traces and compiled callers work on spared shapes as on others."""
    force(PLAIN)
    model = mlp().eval()
    plain = copy.deepcopy(model)
    x = tensors(8, 4)
    with parallel(model, TWO) as p:
        with torch.no_grad():
            for _ in range(5):
                model(x)
        before = p.stats().calls
        assert_close(torch.func.vmap(model)(x[None]), plain(x)[None])
        assert_close(
            torch.func.grad(lambda v: model(v).square().sum())(x), torch.func.grad(lambda v: plain(v).square().sum())(x)
        )
        assert_close(torch.jit.trace(model, x)(x * 2), plain(x * 2))
        with torch.no_grad():
            assert_close(torch.compile(lambda v: model(v) * 2, backend="eager")(x), plain(x) * 2)
        assert p.stats().calls > before


class Halving(nn.Module):
    """Calls itself by each reference there is, for one half of its rows after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if len(x) <= 4:
            return self.linear(x)
        half = len(x) // 2
        return torch.cat([self(x[:half]), self(x[half:])])


@pytest.mark.parametrize("way", [None, *GRAD_WAYS], ids=str)
@pytest.mark.parametrize("rule", [None, "auto"])
def test_recursion_and_nested_blocks(rule, way, force):
    """A model that calls itself, and a part that is parallel inside a whole that is, give the plain answer."""
    if way is not None:
        force(way)
    model = nn.Sequential(mlp(), nn.Linear(3, 4), Halving())
    plain = copy.deepcopy(model)
    x = tensors(16, 4)
    with parallel(model, TWO, plan=rule), parallel(model[2], TWO, plan=rule), parallel(model, TWO, plan="lanes"):
        for _ in range(10):
            model.zero_grad()
            output = model(x)
            assert_close(output, plain(x))
            output.sum().backward()
    plain(x).sum().backward()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.usefixtures("spare_all")
def test_a_call_inside_a_lane_is_plain(force):
    """A model that is parallel, called in the lane of another block, neither waits nor takes a spared call's ticket."""
    force(PLAIN)
    inner = mlp().eval()
    x = tensors(8, 4)
    with torch.no_grad(), parallel(inner, TWO) as p:
        for _ in range(4):
            inner(x)
        spared = p._opened()._planner.spared_calls()
        with parallel(lambda v: inner(v.repeat(2, 1)), TWO, plan="lanes") as outer:
            assert_close(outer(x)[:4], inner(x)[:4])
        assert p._opened()._planner.spared_calls() == spared + 1


# ---------------------------------------------------------------- plans as they are given


@pytest.mark.parametrize("plan", ["fast", "", "Auto", 3, True, ["auto"]], ids=repr)
def test_what_is_no_plan(plan):
    """What is no rule and no Plan is refused at once, with the names of the rules."""
    with pytest.raises(PlanError, match=r"'auto'.*'lanes'") as caught:
        parallel(mlp(), TWO, plan=plan)
    assert repr(plan) in str(caught.value)


@pytest.mark.parametrize("plan", ["auto", "lanes", Plan()], ids=str)
def test_cores_take_no_plan(plan):
    """A plan for NeuronCores is refused."""
    with testing.neuron_host(cores=2), pytest.raises(PlanError, match="NeuronCores"):
        parallel(mlp(), ["nc:0", "nc:1"], plan=plan)


def test_one_plan_for_several_blocks(force):
    """What one block has measured the next one has, at once and later, and other models and lanes have their own."""
    force(PLAIN)
    plan = Plan("auto")
    one, other = mlp().eval(), nn.Linear(4, 3).eval()
    x = tensors(8, 4)
    with torch.no_grad():
        with parallel(one, TWO, plan=plan) as p, parallel(other, FOUR, plan=plan) as q:
            for _ in range(5):
                assert_close(one(x), copy.deepcopy(one)(x))
                assert_close(other(x), copy.deepcopy(other)(x))
            assert p.plan is q.plan is plan
        table = str(plan)
        assert "Sequential on cpu, cpu\n" in table
        assert "Linear on cpu, cpu, cpu, cpu\n" in table
        same = copy.deepcopy(one)
        with parallel(same, TWO, plan=plan), p:
            for _ in range(5):
                assert_close(same(x), one(x))
        assert len(plan._books) == 2
    assert str(plan) == table


def test_memory_is_let_go_of_at_the_end(force):
    """A way that keeps memory is kept up by the block, and not beyond it, nor by a call that ends later."""
    force(Way(2, 1, memory_kept=True))
    model = mlp().eval()
    x = tensors(8, 4)
    held = 1 if _memory.can_hold_memory() else 0
    with torch.no_grad():
        plan = Plan("auto")
        with parallel(model, TWO, plan=plan):
            model(x)
            model(x)
            assert _memory._holders == held
            with parallel(mlp().eval(), TWO, plan=plan) as p:
                p(x)
                p(x)
                assert _memory._holders == 2 * held
                planner = p._opened()._planner
            assert _memory._holders == held
            planner._candidates.prepare(Way(memory_kept=True), contests(p)[0])
            assert _memory._holders == held
        assert _memory._holders == 0
        with parallel(model, TWO, plan=Plan("auto", keep_memory=False)):
            model(x)
            model(x)
            assert _memory._holders == 0


# ---------------------------------------------------------------- the table


def test_the_table_of_a_block():
    """A plan can be printed before any call, while it measures, when it has chosen, and after the block."""
    model = Paced(lanes_lose)
    x = torch.zeros(8, 4)
    with torch.no_grad(), parallel(model, TWO, plan=Plan("auto", keep_memory=False)) as p:
        assert str(p.plan).splitlines() == ["plan 'auto', 0 extra calls", "Paced on cpu, cpu"]
        model(x)
        assert "forward(args[0] float32 2-d); 5 to 8 rows; up to 32 elements; in train mode: being measured" in str(p.plan)
        assert "not counted" in str(p.plan)
        call_until_chosen(p, lambda: model(x))
        inside = str(p.plan)
        assert "being measured" not in inside
        (line,) = [line for line in inside.splitlines() if line.startswith("  * ")]
        assert " us (" in line
        assert "call" in line
    assert str(p.plan).splitlines()[:3] == inside.splitlines()[:3]
    assert all(len(line) < 125 for line in inside.splitlines())


def test_the_table_of_functions():
    """Functions, lambdas and callable objects are told by name."""

    class Callable_:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    x = tensors(8, 4)
    for target, name in ((torch.tanh, "tanh"), (lambda v: v + 1, "<lambda>"), (Callable_(), "Callable_")):
        with torch.no_grad(), parallel(target, TWO) as p:
            for _ in range(5):
                assert_close(p(x), target(x))
            assert f"{name} on cpu, cpu\n  call(args[0] float32 2-d)" in str(p.plan)
        with pytest.raises(SessionError):
            p(x)
