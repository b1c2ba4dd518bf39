"""Threads, nested blocks, recursion, and forks. After close(), no thread, replica, or memory is left."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from parawrap import ReplicaError, SessionError, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def lanes():
    return [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


def in_threads(count, work):
    """Run `work(index)` in `count` threads that start together. Raise the first error."""
    barrier = threading.Barrier(count)

    def start(index):
        barrier.wait(20)
        return work(index)

    with ThreadPoolExecutor(count) as executor:
        return [future.result(60) for future in [executor.submit(start, index) for index in range(count)]]


def test_sixteen_threads_can_call_one_model():
    """Each thread gets the outputs and input gradients of its own rows."""
    model = mlp()

    def work(index):
        generator = torch.Generator().manual_seed(index)
        for _ in range(25):
            x = torch.randn(1 + index % 7, 4, generator=generator, requires_grad=True)
            y = model(x)
            assert_close(y, plain(x))
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert_close(grad, torch.autograd.grad(plain(x).sum(), x)[0])

    import copy

    plain = copy.deepcopy(model)
    with parallel(model, THREE, out_dims=0) as p:
        in_threads(16, work)
        assert p.stats().calls == 400


def test_threads_can_submit_map_and_call_at_the_same_time():
    """Calls, submit, and map share the lanes, and all have the plain output."""
    model = mlp()
    x = torch.randn(7, 4)
    plain = model(x)

    def work(index):
        for _ in range(10):
            if index % 3 == 0:
                assert_close(model(x), plain)
            elif index % 3 == 1:
                assert_close(p.submit(x).result(20), plain)
            else:
                for y in p.map([x] * 3):
                    assert_close(y, plain)

    with parallel(model, THREE) as p:
        in_threads(9, work)


def test_a_model_in_training_does_not_race():
    """If several threads train a batch norm, each call is counted once, and all statistics are finite."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def work(index):
        generator = torch.Generator().manual_seed(index)
        for _ in range(10):
            model(torch.randn(10, 4, generator=generator)).sum().backward()

    with parallel(model, THREE):
        in_threads(6, work)
    assert model[1].num_batches_tracked.item() == 60
    assert torch.isfinite(model[1].running_var).all()


def test_threads_can_open_blocks_on_separate_models():
    """Blocks on different models do not affect each other."""

    def work(index):
        model = mlp()
        x = torch.randn(5, 4)
        plain = model(x)
        for _ in range(5):
            with parallel(model, TWO):
                assert_close(model(x), plain)
        assert "forward" not in vars(model)

    in_threads(8, work)
    assert not lanes()


def test_a_thread_can_enter_a_block_that_another_thread_leaves():
    """If a thread enters a block while another thread still leaves it, the model is parallel."""
    hold, submitted = threading.Event(), threading.Event()

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if len(x) == 1:
                hold.wait(20)
            return self.linear(x)

    model = Held()
    p = parallel(model, TWO)

    def leave():
        with p:
            p.submit(torch.ones(1, 4))
            submitted.set()

    thread = threading.Thread(target=leave)
    thread.start()
    try:
        assert submitted.wait(20)
        while "forward" in vars(model):  # wait until the thread leaves the block and is blocked on its lane
            thread.join(0.001)
        with p:
            model(torch.randn(5, 4))
            assert p.stats().shards == (3, 2)
        assert "forward" not in vars(model)
        assert thread.is_alive()
    finally:
        hold.set()
        thread.join(20)


# -- nested blocks -------------------------------------------------------------------------------------------------------


def test_entering_the_same_block_twice_nests():
    """The model stays parallel until the outermost block ends."""
    model = mlp()
    with parallel(model, TWO) as p:
        with p:
            model(torch.randn(5, 4))
        assert "forward" in vars(model)
        model(torch.randn(5, 4))
        assert (p.stats().calls, p.stats().plain) == (2, 0)
    assert "forward" not in vars(model)


def test_two_blocks_on_the_same_model_nest():
    """Calls use the inner block's lanes while it is open, then the outer block's lanes."""
    model = mlp()
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, TWO) as outer:
        with parallel(model, THREE) as inner:
            assert_close(model(x), plain)
            assert inner.stats().shards == (3, 2, 2)
        assert outer.stats().shards == ()
        assert_close(model(x), plain)
        assert outer.stats().shards == (4, 3)
    assert "forward" not in vars(model)


def test_blocks_on_a_model_and_its_submodule():
    """The output is the plain one, whichever block is opened first."""
    model = mlp()
    x = torch.randn(7, 4)
    plain = model(x)
    for first, second in ((model, model[0]), (model[0], model)):
        with parallel(first, TWO), parallel(second, THREE):
            assert_close(model(x), plain)
            assert_close(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))
        assert "forward" not in vars(model)
        assert "forward" not in vars(model[0])


def test_a_block_on_a_submodule_opened_after_the_first_call():
    """Existing replicas follow when a block on a submodule opens and closes."""
    model = mlp()
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, TWO):
        model(x)
        with parallel(model[0], THREE):
            assert_close(model(x), plain)
        assert_close(model(x), plain)


def test_blocks_on_two_models():
    """Parallel models can call each other inside their lanes."""
    one, two = mlp(), nn.Linear(3, 4)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.others = [one, two]

        def forward(self, x):
            return self.others[1](self.others[0](x))

    both = Both()
    x = torch.randn(7, 4)
    plain = both(x)
    with parallel(one, TWO), parallel(two, THREE), parallel(both, TWO):
        assert_close(both(x), plain)
        assert_close(two(one(x)), plain)


def test_blocks_on_different_models_close_in_any_order():
    """Only blocks on the same model must close in reverse order."""
    one, two = mlp(), mlp()
    a, b = parallel(one, TWO), parallel(two, TWO)
    a.__enter__()
    b.__enter__()
    a.close()
    assert "forward" not in vars(one)
    two(torch.randn(5, 4))
    assert b.stats().shards == (3, 2)
    b.close()


def test_blocks_on_one_model_closed_out_of_order_are_refused():
    """Closing the outer block first raises SessionError and changes nothing. Closing in order then works."""
    model = mlp()
    x = torch.randn(7, 4)
    plain = model(x)
    outer, inner = parallel(model, TWO), parallel(model, THREE)
    outer.__enter__()
    inner.__enter__()
    before = dict(vars(model))
    with pytest.raises(SessionError, match="close that one first"):
        outer.__exit__(None, None, None)
    with pytest.raises(SessionError, match="close that one first"):
        outer.close()
    assert {k: id(v) for k, v in vars(model).items()} == {k: id(v) for k, v in before.items()}
    assert_close(model(x), plain)
    assert inner.stats().shards == (3, 2, 2)
    inner.close()
    assert_close(model(x), plain)
    assert outer.stats().shards == (4, 3)
    outer.close()
    assert "forward" not in vars(model)
    assert not lanes()


# -- calls from lanes ------------------------------------------------------------------------------------------------------


class Recursive(nn.Module):
    """A model that calls itself, directly and through a reference in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.me = [self]

    def forward(self, x, depth=2):
        if depth == 0:
            return self.linear(x)
        return self(x, depth=depth - 1) + self.me[0](x, depth - 1)


def test_a_model_can_call_itself():
    """A recursive call in a lane runs plainly in that lane and does not deadlock."""
    model = Recursive()
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE):
        for _ in range(3):
            assert_close(model(x), plain)


def test_a_function_can_call_its_own_block():
    """If the target of `p` calls `p`, `p.submit`, or `p.map`, these calls run plainly in its lane."""

    def target(x, depth=1):
        if depth == 0:
            return x + 1
        return p(x, 0) + p.submit(x, 0).result(20) + next(iter(p.map([(x, 0)])))

    with parallel(target, THREE) as p:
        for _ in range(3):
            assert p(torch.zeros(7)).tolist() == [3.0] * 7


def test_a_thread_pool_inside_forward():
    """Threads that forward starts can call modules, also parallel ones."""
    helper = nn.Linear(4, 4)

    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper = helper

        def forward(self, x):
            with ThreadPoolExecutor(2) as executor:
                return sum(executor.map(self.helper, [x, x * 2]))

    model = Threaded()
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE), parallel(helper, TWO):
        for _ in range(5):
            assert_close(model(x), plain)


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_close_from_inside_the_model(lane):
    """A call can close its own block, from any lane."""
    closed = threading.Event()

    class Closes(nn.Module):
        def forward(self, x):
            if x[0].item() == lane and not closed.is_set():
                closed.set()
                p.close()
            return x + 1

    model = Closes()
    p = parallel(model, THREE, out_dims=0)
    with p:
        assert model(torch.arange(3.0)).tolist() == [1.0, 2.0, 3.0]
        assert closed.is_set()
    assert "forward" not in vars(model)
    assert model(torch.arange(3.0)).tolist() == [1.0, 2.0, 3.0]


# -- after close() ---------------------------------------------------------------------------------------------------------


def test_close_leaves_no_thread():
    """After cut calls, submitted calls, and map, the end of the block ends all lane threads."""
    model = mlp()
    before = set(threading.enumerate())
    with parallel(model, THREE) as p:
        with torch.no_grad():
            model(torch.randn(7, 4))
        assert len(lanes()) == 2  # the caller runs lane 0 itself
        p.submit(torch.randn(7, 4)).result(20)
        list(p.map(torch.randn(8, 4).split(2)))
        assert lanes()
    assert set(threading.enumerate()) == before


def test_close_waits_for_submitted_calls():
    """Calls submitted inside the block are done after it."""
    release = threading.Event()

    def target(x):
        release.wait(20)
        return x + 1

    with parallel(target, TWO) as p:
        futures = [p.submit(torch.zeros(2)) for _ in range(6)]
        release.set()
    assert all(future.done() for future in futures)
    assert [future.result().tolist() for future in futures] == [[1.0, 1.0]] * 6


def test_close_leaves_no_replica():
    """After the block, the replicas are freed, and the model itself can be freed."""
    seen: list[weakref.ref] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            seen.append(weakref.ref(self))
            return self.linear(x)

    model = Model()
    with parallel(model, THREE) as p:
        for _ in range(2):
            model(torch.randn(7, 4)).sum().backward()
        assert len({id(ref()) for ref in seen}) == 3
    gc.collect()
    assert [ref() for ref in seen if ref() is not None] == []
    alive = weakref.ref(model)
    del model, p
    gc.collect()
    assert alive() is None


def test_an_abandoned_block_ends_its_lanes():
    """A Parallel that is garbage-collected without close() leaves no thread."""
    p = parallel(torch.tanh, THREE)
    p.submit(torch.zeros(4)).result(20)
    assert lanes()
    del p
    gc.collect()
    assert not lanes()


def test_an_output_holds_no_lane():
    """Outputs and graphs that are used after the block keep no thread alive."""
    model = mlp()
    with parallel(model, THREE) as p:
        cut, whole = model(torch.randn(7, 4)), p.submit(torch.randn(7, 4)).result(20)
        assert lanes()
    assert not lanes()
    (cut.sum() + whole.sum()).backward()


# -- forks -----------------------------------------------------------------------------------------------------------------


class Rows(Dataset):
    """Rows that a model computes in the loader's worker."""

    def __init__(self, model) -> None:
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(torch.full((5, 1), float(index)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_data_loader_worker_calls_the_parallel_model():
    """In a forked child, which has no lanes, the model runs plainly."""
    model = nn.Linear(1, 1)
    with parallel(model, TWO):
        with torch.no_grad():
            model(torch.ones(5, 1))
        assert lanes()
        loader = DataLoader(Rows(model), batch_size=3, num_workers=1, multiprocessing_context="fork", timeout=30)
        batches = list(loader)
        assert_close(torch.cat(batches), torch.stack([Rows(model)[index] for index in range(6)]))
        assert model(torch.ones(5, 1)).shape == (5, 1)


_waits = threading.Event()
_goes_on = threading.Event()


class Counting(nn.Module):
    """Counts its calls in a buffer, or in another tensor; one of more than 3 rows is 2. Sevens wait for `_goes_on`."""

    def __init__(self, *, as_buffer=True):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        if as_buffer:
            self.register_buffer("count", torch.zeros(()))
        else:
            self.count = torch.zeros(())

    def forward(self, x):
        if (x == 7).any():
            _waits.set()
            assert _goes_on.wait(20)
        self.count.add_(1 if len(x) <= 3 else 2)
        return self.linear(x)


@contextlib.contextmanager
def slow_call(model, row=5):
    """Call the model with six rows in another thread. One of the rows waits until the end of the block."""
    _waits.clear()
    _goes_on.clear()
    x = torch.ones(6, 3)
    x[row] = 7
    with ThreadPoolExecutor(1) as other:
        try:
            future = other.submit(torch.no_grad()(model), x)
            assert _waits.wait(20)
            yield
        finally:
            _goes_on.set()
        future.result(20)


@torch.no_grad()
@pytest.mark.parametrize("as_buffer", [True, False], ids=["buffer", "tensor"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("rows", [1, 6], ids=["plain", "cut"])
@pytest.mark.parametrize("change", ["nothing", "refresh", "attribute"])
def test_calls_of_other_threads_keep_what_a_call_writes(as_buffer, training, rows, change):
    """A call that starts while lane 0 has ended its part and lane 1 has not finds what that call writes."""
    model = Counting(as_buffer=as_buffer).train(training)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as another:
        model(torch.ones(6, 3))
        with slow_call(model):
            if change == "refresh":
                p.refresh()
            elif change == "attribute":
                model.linear.tag = [change]
            during = another.submit(torch.no_grad()(model), torch.ones(rows, 3))
            wait([during], 0.2)
        during.result(20)
    assert model.count == 3


@torch.no_grad()
def test_a_whole_call_does_not_make_a_cut_call_of_another_thread_fail():
    """What a whole call writes in lane 1, behind its part of the cut call, is not compared with lane 0's part."""
    model = Counting(as_buffer=False).eval()
    with parallel(model, TWO, out_dims=0) as p:
        model(torch.ones(6, 3))
        futures = [p.submit(torch.ones(6, 3)) for _ in range(200)]
        with slow_call(model, row=0):
            wait(futures[-20:], 5)
        assert [len(future.result(20)) for future in futures] == [6] * 200


@torch.no_grad()
@pytest.mark.parametrize("as_buffer", [True, False], ids=["buffer", "tensor"])
def test_parts_that_begin_before_and_after_a_whole_call_are_not_compared(as_buffer):
    """Lane 1 runs its part while a whole call in lane 0 goes on, which then writes the model."""
    passed = threading.Event()

    class Passing(Counting):
        def forward(self, x):
            output = super().forward(x)
            if (x == 5).any():
                passed.set()
            return output

    model = Passing(as_buffer=as_buffer).eval()
    x = torch.ones(6, 3)
    x[5] = 5
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as other:
        _waits.clear()
        _goes_on.clear()
        try:
            whole = p.submit(torch.full((6, 3), 7.0))
            assert _waits.wait(20)
            cut = other.submit(torch.no_grad()(model), x)
            assert passed.wait(20)
        finally:
            _goes_on.set()
        assert [len(each.result(20)) for each in (whole, cut)] == [6, 6]


@torch.no_grad()
@pytest.mark.parametrize("how", ["submit", "map", "call", "refresh"])
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_a_plain_call_may_use_its_block(how, is_module):
    """A call of few rows runs the model itself. What its forward asks of the block then runs plainly."""

    class Asking(nn.Linear):
        def forward(self, x):
            return ask(super().forward, x)

    def ask(forward, x):
        if len(x) > 1:
            return forward(x)
        six = torch.ones(6, 3)
        p.refresh()
        uses = {"submit": lambda: p.submit(six).result(20), "map": lambda: next(p.map([six])), "call": lambda: p(six)}
        return uses.get(how, lambda: forward(six))()[:1]

    linear = nn.Linear(3, 2)
    target = Asking(3, 2) if is_module else functools.partial(ask, linear)
    with parallel(target, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as other:
        assert other.submit(torch.no_grad()(target if is_module else p), torch.ones(1, 3)).result(20).shape == (1, 2)


@torch.no_grad()
def test_whole_calls_of_a_lazy_model_run_plainly():
    """The first calls give it its shapes, also next to the first call of another thread."""
    model = nn.Sequential(nn.LazyLinear(2))
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(2) as others:
        futures = [others.submit(lambda: p.submit(torch.ones(6, 3)).result(20)) for _ in range(4)]
        assert [future.result(20).shape for future in futures] == [(6, 2)] * 4
        assert model(torch.ones(6, 3)).shape == (6, 2)


@torch.no_grad()
def test_plain_whole_calls_join_and_count_once():
    """Under a mode that lanes do not see, `submit` and `map` give what a call gives."""
    model, x = nn.Linear(3, 2), torch.ones(9, 3)

    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    model = Mean(3, 2)
    with parallel(model, TWO, reduce=lambda values: values.mean() + 1) as p:
        expected = [model(x)] * 3
        before = p.stats().plain
        with FlopCounterMode(display=False):
            assert_close([model(x), p.submit(x).result(), next(p.map([x]))], expected)
        assert p.stats().plain == before + 3


@torch.no_grad()
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("use", ["call", "submit", "refresh", "close"])
def test_a_forked_child_waits_for_no_thread_of_its_parent(use):
    """A child runs calls plainly, also if the parent's lanes were at work, and a thread was copying the model."""
    model, x = Counting().eval(), torch.ones(6, 3)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as another:
        model(x)
        with slow_call(model):
            model.linear.tag = [use]
            waiting = another.submit(torch.no_grad()(model), x)  # waits for the lanes, to copy the model
            wait([waiting], 0.2)
            child = os.fork()
            if child == 0:
                faulthandler.dump_traceback_later(20, exit=True)
                code = 1
                try:
                    uses = {"call": lambda: model(x), "submit": lambda: p.submit(x).result(), "refresh": p.refresh}
                    uses.get(use, p.close)()
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        waiting.result(20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_can_open_its_own_block():
    """A child that was forked inside an open block can open and close another block."""
    with parallel(torch.tanh, TWO) as p:
        p.submit(torch.zeros(4)).result(20)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with parallel(torch.relu, TWO) as own:
                    code = 0 if own.submit(torch.ones(4)).result(20).sum().item() == 4 else 2
                p.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert p(torch.zeros(5)).tolist() == [0.0] * 5


def test_a_program_that_does_not_close_its_block_exits():
    """The interpreter exits without an error if a block is still open."""
    code = """
        import torch
        from parawrap import parallel
        model = torch.nn.Linear(4, 4)
        p = parallel(model, ["cpu"] * 3)
        p.__enter__()
        model(torch.randn(7, 4))
        p.submit(torch.randn(7, 4)).result()
        print("end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_blocks_of_two_threads_on_one_model_can_overlap_in_any_order():
    """Each thread can leave its own block first. After both, the model is plain."""
    model = nn.Linear(4, 2)
    x = torch.randn(7, 4)
    plain = model(x)
    entered, left = threading.Event(), threading.Event()
    failures = []

    def first():
        try:
            with parallel(model, TWO):
                entered.set()
                left.wait(20)
                assert_close(model(x), plain)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=first)
    with parallel(model, TWO):
        thread.start()
        entered.wait(20)
        assert_close(model(x), plain)
    left.set()
    thread.join(20)
    assert failures == []
    assert "forward" not in vars(model)
    assert_close(model(x), plain)


def test_calls_during_a_close_do_not_raise():
    """If other threads call the model while a block ends, their calls have the plain output."""
    model = nn.Linear(4, 2)
    x = torch.randn(7, 4)
    plain = model(x)
    stop, failures = threading.Event(), []

    def call():
        while not stop.is_set():
            try:
                assert_close(model(x), plain)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with parallel(model, TWO):
            model(x)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_submitted_calls_see_no_later_write():
    """A call whose parameters are written before it ran, or while it runs, raises an error. Later calls are right."""
    started, go = threading.Semaphore(0), threading.Event()

    class Waiting(nn.Linear):
        def forward(self, x):
            started.release()
            assert go.wait(60)
            return super().forward(x)

    model, x = Waiting(2, 2), torch.ones(3, 2)
    with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p:
        futures = [p.submit(x) for _ in range(3)]
        for _ in range(2):  # both lanes run, and the third call waits
            assert started.acquire(timeout=60)
        model.weight.fill_(1)
        go.set()
        for future in futures[:2]:
            with pytest.raises(ReplicaError, match="'weight' was written during a call"):
                future.result(60)
        with pytest.raises(SessionError, match="was written after this call was submitted"):
            futures[2].result(60)
        assert torch.equal(p.submit(x).result(60), model(x))
