"""Ranks that stay: each call has the contract of a launch, and the ranks keep their state between calls."""

from __future__ import annotations

import functools
import gc
import pickle
import random
import re
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    Platform,
    PlatformError,
    RankResults,
    UnsendableError,
    current_rank,
    functional,
    wrapper,
)
from tests.helpers.processes import assert_gone, ranks
from tests.helpers.waiting import PATIENCE_S, eventually

MEBI = 1 << 20


@pytest.fixture(scope="module")
def world():
    """Two ranks that all tests of this module share. No test ends them."""
    with ranks(seed=0).open() as opened:
        yield opened


def rank_and_pid():
    import os

    return current_rank().global_rank, os.getpid()


def my_rank():
    return current_rank().global_rank


def all_sum(value=1.0):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


# -- calls


def test_results_come_in_the_order_of_ranks(world):
    results = world(my_rank)
    assert type(results) is RankResults
    assert results == (0, 1)


def test_the_same_processes_answer_all_calls(world):
    assert len({world(rank_and_pid) for _ in range(5)}) == 1


def test_collectives_work_in_every_call(world):
    assert [world(all_sum, float(step)) for step in range(3)] == [(0.0, 0.0), (2.0, 2.0), (4.0, 4.0)]


def test_ranks_can_be_called_one_by_one(world):
    """An index, negative ones too, selects one rank, and the call returns its value and not a tuple."""
    assert len(world) == 2
    assert [world[0](my_rank), world[1](my_rank), world[-1](my_rank)] == [0, 1, 1]
    assert [one(my_rank) for one in world] == [0, 1]


def test_a_call_of_one_rank_leaves_the_others_idle(world):
    world(store, "value", 0)
    world[1](store, "value", 7)
    assert world(recall, "value") == (0, 7)


def test_a_world_may_have_one_rank():
    with ranks(1).open() as opened:
        assert opened(all_sum) == (1.0,)
        assert opened[0](my_rank) == 0


@pytest.mark.parametrize("index", [2, -3, 100])
def test_an_unknown_rank_raises_index_error(world, index):
    with pytest.raises(IndexError, match=rf"rank={index}: there are the ranks 0 to 1"):
        world[index]


def add(left, right=0, *more, scale=1):
    return (left + right + sum(more)) * scale + current_rank().global_rank


class Adder:
    """Adds a number, by all kinds of methods."""

    base = 10

    def __init__(self, number):
        self.number = number

    def add(self, value):
        return self.number + value

    @classmethod
    def add_base(cls, value):
        return cls.base + value

    @staticmethod
    def double(value):
        return 2 * value

    def __call__(self, value):
        return self.number * value


@wrapper(Platform(device="cpu", n_cpus=1, verbose=False))
def decorated(value):
    return value, current_rank().world_size


def closure_over(number):
    def inner(value):
        return number + value

    return inner


def test_arguments_arrive_by_position_and_name(world):
    assert world(add, 1) == (1, 2)
    assert world(add, 1, 2, 3, scale=10) == (60, 61)
    assert world(add, left=4, right=1) == (5, 6)
    assert world[1](add, 1, scale=3) == 4


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (Adder(3).add, 5),
        (Adder.add_base, 12),
        (Adder.double, 4),
        (Adder(3), 6),
        (closure_over(40), 42),
        (lambda value: value * 50, 100),
        (functools.partial(pow, 2), 4),
        (float, 2.0),
        (decorated, (2, 2)),
    ],
    ids=["method", "class", "static", "callable", "closure", "lambda", "partial", "builtin", "decorated"],
)
def test_functions_of_every_kind_can_be_called(world, function, value):
    """A decorated function runs in these ranks, and not in those of its own platform."""
    assert world(function, 2) == (value, value)
    assert world.submit(function, 2).results(PATIENCE_S) == (value, value)


def test_a_closure_is_sent_with_its_present_variables(world):
    """A variable that changes between two calls arrives with its new value."""
    number = 1

    def read():
        return number

    assert world(read) == (1, 1)
    number = 2
    assert world(read) == (2, 2)


def test_a_call_that_cannot_work_is_refused(world):
    """Wrong arguments, coroutines, and generators are refused before anything is sent."""

    async def waits():
        pass

    def yields():
        yield

    with pytest.raises(TypeError, match="wrong"):
        world(add, 1, right=2, wrong=3)
    for function in (waits, yields):
        with pytest.raises(TypeError):
            world(function)
    assert world(my_rank) == (0, 1)


def test_rank_and_functional_work_in_a_call(world):
    def reduce():
        rank = current_rank()
        return rank.world_size, rank.device.type, functional.reduce_metrics({"loss": float(rank.global_rank)})["loss"]

    assert world(reduce) == ((2, "cpu", 0.5),) * 2


# -- state


STATE = {}
COUNTER = 0


def store(name, value):
    STATE[name] = value


def recall(name):
    return STATE.get(name)


def append_rank(name):
    STATE[name].append(my_rank())


def count_up():
    global COUNTER
    COUNTER += 1 + current_rank().global_rank
    return COUNTER


def test_globals_of_a_module_stay(world):
    """A function of a module changes the globals of the module in the rank; those here stay as they are."""
    first = world(count_up)
    assert world(count_up) == (first[0] + 1, first[1] + 2)
    world(store, "list", [])
    world(append_rank, "list")
    assert world(recall, "list") == ([0], [1])
    assert COUNTER == 0
    assert STATE == {}


def draw(count):
    return [(random.random(), torch.rand(1).item()) for _ in range(count)]


def test_random_numbers_go_on_over_calls():
    """The seed is set once: two calls draw the numbers of one launch."""
    platform = ranks(seed=5)
    ((first, second), _other) = wrapper(platform)(draw)(2)
    with platform.open() as opened:
        assert opened(draw, 1)[0] == [first]
        assert opened(draw, 1)[0] == [second]


class Net(torch.nn.Module):
    """A model with random numbers in its forward pass, so that their stream counts."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def prepare():
    model = DistributedDataParallel(Net())
    STATE["training"] = model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(steps):
    model, optimizer = STATE["training"]
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8) + my_rank()).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), [each.detach().clone() for each in model.module.parameters()]


def train_at_once(steps):
    prepare()
    return train(steps)


def test_training_over_calls_equals_one_launch():
    """30 calls of one step each have the same losses and weights as one launch, bit for bit."""
    platform = ranks(seed=1)
    expected = wrapper(platform)(train_at_once)(30)
    with platform.open() as opened:
        opened(prepare)
        found = [opened(train, 1) for _ in range(30)][-1]
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    assert expected[0][0] != expected[1][0]  # each rank has its own batches
    for (_, here), (_, there) in zip(found, expected, strict=True):
        assert all(map(torch.equal, here, there))


# -- tensors and classes


def test_tensors_that_share_memory_share_it_in_the_rank(world):
    """Views of one tensor in the arguments and the result of a call are views there, too."""
    base = torch.arange(MEBI)

    def change(whole, part, more):
        whole[5] = -1
        return part[0].item(), more["part"][0].item(), whole, whole[5:]

    results = world(change, base, base[5:], {"part": base[5:7]})
    assert base[5] == 5
    for value, nested, whole, part in results:
        assert (value, nested) == (-1, -1)
        assert whole[4:7].tolist() == [4, -1, 6]
        whole[5] = 3
        assert part[0] == 3
    assert results[0][2].data_ptr() != results[1][2].data_ptr()


def exchange(tensor):
    kept = STATE["kept"]
    kept.append(tensor)
    return tensor + my_rank(), [each[0].item() for each in kept], [each[-1].item() for each in kept]


def test_large_tensors_outlive_later_calls(world):
    """The memory of arguments that a rank keeps, and of results, is not used again by later calls."""
    world(store, "kept", [])
    results = [world(exchange, torch.full((MEBI,), 10.0 * step)) for step in range(4)]
    for step, each in enumerate(results):
        for rank, (tensor, firsts, lasts) in enumerate(each):
            assert torch.equal(tensor, torch.full((MEBI,), 10.0 * step + rank))
            assert firsts == lasts == [10.0 * earlier for earlier in range(step + 1)]
    world(store, "kept", None)


def test_tensors_of_every_kind_keep_their_kind(world):
    """Data types, layouts, requires_grad, parameters, and empty tensors arrive unchanged."""
    tensors = [
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ]
    for here in world(lambda *each: each, *tensors):
        for given, found in zip(tensors, here, strict=True):
            assert type(found) is type(given)
            assert (found.dtype, found.layout, found.requires_grad) == (given.dtype, given.layout, given.requires_grad)
            assert torch.equal(found.to_dense(), given.to_dense())


@dataclass
class Report:
    """A result of a class of this module."""

    rank: int
    weights: torch.Tensor


def report():
    return Report(my_rank(), torch.full((3,), float(my_rank())))


def test_instances_keep_their_class(world):
    """Instances of a class of a module, and of a class of a function, have that class as argument and as result."""

    class Local:
        def __init__(self, value):
            self.value = value

    results = world(report)
    assert [type(each) for each in results] == [Report, Report]
    assert [each.weights.sum().item() for each in results] == [0.0, 3.0]

    def change(given):
        assert type(given) is Local
        return Local(given.value + my_rank())

    local = world(change, Local(5))
    assert [type(each) for each in local] == [Local, Local]
    assert [each.value for each in local] == [5, 6]


def test_an_unsendable_argument_is_named(world):
    with pytest.raises(UnsendableError, match=re.escape("args[0]['steps'][1] cannot be sent to another process: ")):
        world(lambda _: None, {"steps": [0, threading.Lock()]})
    with pytest.raises(UnsendableError, match=re.escape("kwargs['config'][0] cannot be sent to another process: ")):
        world(lambda **_: None, config=[threading.Lock()])
    lock = threading.Lock()
    with pytest.raises(UnsendableError, match="'lock'"):
        world(lambda: lock)
    assert world(my_rank) == (0, 1)


def test_an_unsendable_result_is_named(world):
    """The error names the part of the result and the rank, and the ranks stay."""

    def returns():
        return {"history": [1, threading.Lock()]} if my_rank() == 1 else None

    before = world(rank_and_pid)
    with pytest.raises(UnsendableError) as caught:
        world(returns)
    address, _, reason = str(caught.value).partition(" cannot be sent to another process: ")
    assert "the result['history']" in address
    assert "[1]" in address
    assert reason.startswith("lock")
    assert "rank 1 of 2" in "\n".join(caught.value.__notes__)
    assert world(rank_and_pid) == before


def test_an_argument_that_cannot_be_loaded_raises(world):
    """An exception of the unpickling in the rank is raised here with a note, and the ranks stay."""

    class Cursed:
        def __reduce__(self):
            return int, ("no number",)

    with pytest.raises(ValueError, match="no number") as caught:
        world(lambda _: None, Cursed())
    assert "unpickled the function, its arguments, and its globals" in "\n".join(caught.value.__notes__)
    assert world(all_sum) == (2.0, 2.0)


# -- output


def speak(word):
    print(f"{word} of {my_rank()}", flush=True)


def test_output_has_the_rank_in_front(capfd, tmp_path):
    """The output of a call is shown before the call returns, kept by `logs`, and written to files."""
    with ranks(verbose=True, console_logs=tmp_path).open() as opened:
        opened(speak, "one")
        assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] one of 0", "[rank 1] one of 1"]
        opened[1](speak, "two")
        assert capfd.readouterr().out == "[rank 1] two of 1\n"
        assert opened.logs(0) == "one of 0\n"
        assert opened.logs(1) == "one of 1\ntwo of 1\n"
    (file,) = tmp_path.rglob("rank-1.log")
    assert file.read_text() == "one of 1\ntwo of 1\n"


def test_print_ranks_selects_the_output(capfd):
    with ranks(verbose=True, print_ranks=(1,)).open() as opened:
        opened(speak, "one")
        assert opened.logs(0) == "one of 0\n"
    assert capfd.readouterr().out == "[rank 1] one of 1\n"


# -- handles of calls


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)
    return my_rank()


def test_a_submitted_call_is_a_launch(world, tmp_path):
    """The handle has the results, the stacks, and the output of its own call."""
    world(speak, "before")
    assert world.state == "idle"

    def work(path):
        speak("during")
        return wait_for(path)

    launch = world.submit(work, tmp_path / "go")
    eventually(lambda: "during" in launch.logs(0) + launch.logs(1), "output of the call")
    assert not launch.done()
    assert (launch.state, world.state) == ("running", "running")
    assert repr(world) == "<2 ranks of cpu: running>"
    with pytest.raises(TimeoutError):
        launch.results(timeout=0.01)
    stacks = launch.stacks()
    assert sorted(stacks) == [0, 1]
    assert all("in wait_for" in text for text in stacks.values())
    assert all("in wait_for" in text for text in world.stacks().values())
    (tmp_path / "go").touch()
    assert launch.results(PATIENCE_S) == (0, 1)
    assert launch.results() == (0, 1)
    assert launch.done()
    assert launch.state == "finished"
    assert [launch.logs(0), launch.logs(1)] == ["during of 0\n", "during of 1\n"]
    assert launch.stacks() == {}


def test_submitted_calls_run_in_their_order(world, tmp_path):
    """A call of one rank waits for the calls before it, and calls of several threads do not mix."""
    world(store, "order", [])
    first = world.submit(wait_for, tmp_path / "go")
    others = [world.submit(lambda step=step: recall("order").append(step)) for step in range(5)]
    assert not others[0].done()
    (tmp_path / "go").touch()
    assert world(recall, "order") == ([0, 1, 2, 3, 4],) * 2
    assert first.results() == (0, 1)
    for each in others:
        each.results()


def test_a_cancelled_call_keeps_the_ranks(world, tmp_path):
    """`cancel` raises KeyboardInterrupt in the function; a call that has not begun never runs."""
    before = world(rank_and_pid)

    def waits(path):
        speak("waits")
        try:
            wait_for(path)
        except KeyboardInterrupt:
            (path.parent / f"{my_rank()}.interrupted").touch()
            raise

    first = world.submit(waits, tmp_path / "go")
    second = world.submit(store, "cancelled", True)
    eventually(lambda: first.logs(0) and first.logs(1), "output of the call")
    second.cancel()
    first.cancel()
    for launch in first, second:
        with pytest.raises(LaunchCancelledError):
            launch.results()
        assert launch.state == "cancelled"
    assert sorted(each.name for each in tmp_path.glob("*.interrupted")) == ["0.interrupted", "1.interrupted"]
    assert world(recall, "cancelled") == (None, None)
    assert world(rank_and_pid) == before
    assert world(all_sum) == (2.0, 2.0)


def test_the_error_of_a_submitted_call(world):
    def fails():
        raise LookupError("in the call")

    launch = world.submit(fails)
    with pytest.raises(LookupError, match="in the call"):
        launch.results(PATIENCE_S)
    assert launch.state == "failed"
    assert world(all_sum) == (2.0, 2.0)


# -- several threads and worlds


def test_threads_may_call_the_same_ranks(world):
    """Each thread gets the results of its own calls, although all use collectives."""
    found = {}

    def calls(number):
        found[number] = [world(all_sum, float(number)) for _ in range(20)]

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    assert found == {number: [(2.0 * number,) * 2] * 20 for number in range(4)}


def test_two_worlds_work_at_once(world):
    """Each world has its own processes, process group, and state."""
    with ranks(3).open() as other:
        results = {}

        def calls(opened, number):
            opened(store, "world", number)
            results[number] = [opened(all_sum, float(number)) for _ in range(20)]

        threads = [threading.Thread(target=calls, args=each) for each in ((world, 1), (other, 2))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(PATIENCE_S)
        assert results == {1: [(2.0, 2.0)] * 20, 2: [(6.0, 6.0, 6.0)] * 20}
        assert world(recall, "world") == (1, 1)
        assert other(recall, "world") == (2, 2, 2)
        assert not set(world(rank_and_pid)) & set(other(rank_and_pid))


def test_launches_work_beside_ranks_that_stay(world):
    assert wrapper(ranks())(all_sum)() == (2.0, 2.0)
    assert world(all_sum) == (2.0, 2.0)


# -- displays


def test_ranks_show_their_state(world):
    world(my_rank)
    pids = [pid for _, pid in world(rank_and_pid)]
    assert repr(world) == "<2 ranks of cpu: idle>"
    assert repr(world[1]) == "<rank 1 of <2 ranks of cpu: idle>>"
    page = world._repr_html_()
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert rows[0] == ["rank", "device", "process", "state", "last call"]
    for rank, row in enumerate(rows[1:]):
        assert row[:4] == [f"{rank}", "cpu", f"{pids[rank]}", "idle"]
        assert re.fullmatch(r"rank_and_pid, [\d.e-]+ s", row[4])


# -- the end


def test_closed_ranks_refuse_calls():
    """`close` may be called again, ends the processes, and later calls raise."""
    finished = []
    opened = ranks(upon_finish=lambda: finished.append(1)).open()
    pids = [pid for _, pid in opened(rank_and_pid)]
    launch = opened.submit(my_rank)
    opened.close()
    opened.close()
    assert launch.results(0) == (0, 1)
    assert finished == [1]
    assert_gone(pids)
    assert repr(opened) == "<2 ranks of cpu: ended>"
    assert "ended" in opened._repr_html_()
    assert opened.stacks() == {}
    for call in (opened, opened.submit, opened[0]):
        with pytest.raises(LaunchError, match="these ranks are closed, and cannot call my_rank"):
            call(my_rank)


def test_an_exception_in_the_block_ends_the_ranks():
    pids = []

    def work():
        with ranks().open() as opened:
            pids.extend(pid for _, pid in opened(rank_and_pid))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert_gone(pids)


def test_forgotten_ranks_end():
    """The garbage collector ends ranks that were never closed."""
    opened = ranks().open()
    pids = [pid for _, pid in opened(rank_and_pid)]
    del opened
    gc.collect()
    assert_gone(pids, PATIENCE_S)


def test_ranks_cannot_be_sent(world):
    with pytest.raises(TypeError, match="ranks belong to the process that opened them"):
        pickle.dumps(world)
    with pytest.raises(UnsendableError, match=re.escape("args[0]")):
        world(lambda _: None, world)


# -- platforms without ranks that stay


@pytest.mark.parametrize(
    ("fields", "way_out"),
    [
        ({"launcher": "slurm"}, "launcher='ray'"),
        ({"launcher": "env"}, "launcher='local'"),
        ({"max_restarts": 1}, "Leave max_restarts out"),
    ],
    ids=["slurm", "env", "restarts"],
)
def test_a_platform_that_cannot_stay_is_refused(fields, way_out):
    """The error names the field, and a way out."""
    ((name, value),) = fields.items()
    with pytest.raises(PlatformError) as caught:
        ranks(**fields).open()
    assert str(caught.value).startswith(f"{name}={value!r}: ")
    assert way_out in str(caught.value)


def test_a_rank_of_torchrun_opens_no_ranks(monkeypatch):
    """In a process that torchrun started, the launcher is env by default."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(PlatformError, match="launcher='env'"):
        ranks().open()


def open_inside():
    ranks(1).open()


def test_a_rank_opens_no_ranks(world):
    with pytest.raises(LaunchError, match=re.escape("Platform.open was called within a rank")):
        world(open_inside)
    assert world(my_rank) == (0, 1)


def test_ranks_without_groups_can_be_called():
    """Without a process group, calls and failures work as well."""

    def fails():
        raise LookupError("here")

    with ranks(ipc_groups=None).open() as opened:
        assert opened(my_rank) == (0, 1)
        with pytest.raises(LookupError, match="here"):
            opened(fails)
        assert opened(dist.is_initialized) == (False, False)
