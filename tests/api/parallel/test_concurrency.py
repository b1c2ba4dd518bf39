"""Calls from several threads, nested blocks, recursion, and forks. After close(), no thread or replica is left."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import multiprocessing
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from tests.helpers.calling import lane_threads
from tests.helpers.processes import run_script
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_many_threads_call_one_model():
    """Each gets the outputs and input gradients for its rows. Calls, `submit`, and `map` share the lanes."""
    model, barrier = mlp(), threading.Barrier(12)
    plain = copy.deepcopy(model)

    def work(index):
        generator = torch.Generator().manual_seed(index)
        barrier.wait(PATIENCE_S)
        for _ in range(8):
            x = torch.randn(1 + index % 7, 4, generator=generator, requires_grad=True)
            ways = (lambda x: [model(x)], lambda x: [p.submit(x).result(PATIENCE_S)], lambda x: list(p.map([x] * 3)))
            for y in ways[index % 3](x):
                assert_close(y, plain(x))
                (grad,) = torch.autograd.grad(y.sum(), x)
                assert_close(grad, torch.autograd.grad(plain(x).sum(), x)[0])

    with parallel(model, THREE, out_dims=0) as p, ThreadPoolExecutor(12) as executor:
        for future in [executor.submit(work, index) for index in range(12)]:
            future.result(PATIENCE_S)


def test_calls_during_a_close():
    model, x = nn.Linear(4, 2), torch.randn(7, 4)
    plain, stop = model(x), threading.Event()

    def call():
        while not stop.is_set():
            assert_close(model(x), plain)

    with ThreadPoolExecutor(2) as executor:
        futures = [executor.submit(call) for _ in range(2)]
        for _ in range(30):
            with parallel(model, TWO):
                model(x)
        stop.set()
        for future in futures:
            future.result(PATIENCE_S)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_blocks_close_in_any_order(order):
    """Also of several threads. Calls go to the last block that is open. After all, a compiled model is compiled again."""
    model, x = nn.Linear(4, 2), torch.randn(7, 4)
    model.compile(backend="eager")
    plain, compiled = model(x), vars(model)["_compiled_call_impl"]
    blocks = []
    for _ in order:
        blocks.append(parallel(model, TWO))
        with ThreadPoolExecutor(1) as another:
            another.submit(blocks[-1].__enter__).result(PATIENCE_S)
    left, calls = [*blocks], [0, 0, 0]
    for number in order:
        calls[blocks.index(left[-1])] += 1
        assert_close(model(x), plain)
        assert [block.stats().calls for block in blocks] == calls
        blocks[number].close()
        left.remove(blocks[number])
    assert "forward" not in vars(model)
    assert vars(model)["_compiled_call_impl"] is compiled


_waits, _goes_on = threading.Event(), threading.Event()


class Counting(nn.Module):
    """Counts its calls in a tensor; one of more than 3 rows is 2. Sevens wait for `_goes_on`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.count = torch.zeros(())

    def forward(self, x):
        if (x == 7).any():
            _waits.set()
            assert _goes_on.wait(PATIENCE_S)
        self.count.add_(1 if len(x) <= 3 else 2)
        return self.linear(x)


@contextlib.contextmanager
def slow_call(call, x):
    """Run a call in another thread. Its sevens wait until the end of the block."""
    _waits.clear()
    _goes_on.clear()
    with ThreadPoolExecutor(1) as other:
        try:
            future = other.submit(torch.no_grad()(call), x)
            assert _waits.wait(PATIENCE_S)
            yield
        finally:
            _goes_on.set()
        future.result(PATIENCE_S)


def test_blocks_on_model_and_submodule():
    """Whichever is opened first."""
    model, x = mlp(), torch.randn(7, 4)
    plain = model(x), model[0](x)
    for first, second in ((model, model[0]), (model[0], model)):
        with parallel(first, TWO):
            with parallel(second, THREE):
                assert_close((model(x), model[0](x)), plain)
            assert_close((model(x), model[0](x)), plain)


@torch.no_grad()
@pytest.mark.parametrize("how", ["submit", "map", "call"])
@pytest.mark.parametrize("rows", [1, 7], ids=["plain", "in a lane"])
def test_a_call_may_use_its_block(how, rows):
    """Calls of the block in forward run plainly, in the same thread."""

    class Asking(nn.Linear):
        def forward(self, x):
            if len(x) == 9:
                return super().forward(x)
            nine = torch.ones(9, 3)
            uses = {"submit": lambda: p.submit(nine).result(PATIENCE_S), "map": lambda: next(p.map([nine]))}
            return uses.get(how, lambda: p(nine))()[: len(x)]

    model = Asking(3, 2)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as other:
        future = other.submit(torch.no_grad()(model), torch.ones(rows, 3))
        assert future.result(PATIENCE_S).shape == (rows, 2)


@pytest.mark.parametrize("lane", [0, 2])
def test_close_from_inside_the_model(lane):
    closed = threading.Event()

    def target(x):
        if x[0].item() == lane and not closed.is_set():
            closed.set()
            p.close()
        return x + 1

    with parallel(target, THREE, out_dims=0) as p:
        assert p(torch.arange(3.0)).tolist() == [1.0, 2.0, 3.0]
        assert closed.is_set()


def test_nothing_is_left_after_close():
    """Outputs and graphs work. The model can be freed, and before it a value that it has dropped."""
    seen, before = [], set(threading.enumerate())

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(weakref.ref(self))
            return super().forward(x)

    model = Model(4, 4)
    model.held = torch.ones(4)
    held = weakref.ref(model.held)
    with parallel(model, THREE) as p:
        cut, whole = model(torch.randn(7, 4)), p.submit(torch.randn(7, 4)).result(PATIENCE_S)
        assert len({id(ref()) for ref in seen}) == 3
        assert lane_threads()
        model.held = None
    assert set(threading.enumerate()) == before
    (cut.sum() + whole.sum()).backward()
    del cut, whole
    gc.collect()
    assert [ref() for ref in seen if ref() not in (None, model)] == []
    assert held() is None
    alive = weakref.ref(model)
    del model, p
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:the model wrote 'count':UserWarning")
@torch.no_grad()
@pytest.mark.parametrize("use", ["call", "submit", "close", "new block"])
def test_a_child_waits_for_no_thread(use):
    """Also if the parent's lanes are at work, and a thread of the parent waits to copy the model."""
    begun = threading.Event()

    @torch.no_grad()
    def call(x):
        begun.set()
        return model(x)

    def new_block():
        with parallel(torch.relu, TWO) as own:
            assert own.submit(torch.ones(4)).result(PATIENCE_S).sum().item() == 4

    model, x = Counting().eval(), torch.ones(6, 3)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as other:
        plain = model(x)
        with slow_call(model, torch.full((6, 3), 7.0)):
            model.linear.tag = [use]
            waiting = other.submit(call, x)
            assert begun.wait(PATIENCE_S)
            uses = {"call": lambda: assert_close(model(x), plain), "submit": lambda: p.submit(x).result(), "close": p.close}
            child = multiprocessing.get_context("fork").Process(target=uses.get(use, new_block), daemon=True)
            child.start()
            child.join(PATIENCE_S)
            assert child.exitcode == 0
        assert waiting.result(PATIENCE_S).shape == (6, 2)


def test_programs_with_open_blocks_exit(tmp_path):
    script = """
        import torch
        from parawrap import parallel
        model = torch.nn.Linear(4, 4)
        p = parallel(model, ["cpu"] * 3)
        p.__enter__()
        model(torch.randn(7, 4))
        p.submit(torch.randn(7, 4)).result()
        print("end")
    """
    assert run_script(tmp_path, script, fresh=True) == "end\n"
