"""Calls from several threads, nested blocks, recursion, and forks.

After close(), no thread or replica is left.
"""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.hooks import RemovableHandle

from parawrap import parallel
from parawrap.engine.lanes import Lane
from parawrap.engine.possible_writes import PossibleWrites
from tests.helpers.calling import Stateful, lane_threads, mlp
from tests.helpers.processes import run_script
from tests.helpers.waiting import PATIENCE_S, eventually

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def test_many_threads_call_one_model():
    """Each thread gets the outputs and input gradients of its rows. Calls, `submit`, and `map`
    share the lanes.
    """
    model, barrier = mlp(), threading.Barrier(12)
    plain = copy.deepcopy(model)

    def work(index):
        generator = torch.Generator().manual_seed(index)
        barrier.wait(PATIENCE_S)
        for _ in range(8):
            x = torch.randn(1 + index % 7, 4, generator=generator, requires_grad=True)
            ways = (
                lambda x: [model(x)],
                lambda x: [p.submit(x).result(PATIENCE_S)],
                lambda x: list(p.map([x] * 3)),
            )
            for y in ways[index % 3](x):
                assert_close(y, plain(x))
                (grad,) = torch.autograd.grad(y.sum(), x)
                assert_close(grad, torch.autograd.grad(plain(x).sum(), x)[0])

    with parallel(model, THREE, out_dims=0) as p, ThreadPoolExecutor(12) as executor:
        for future in [executor.submit(work, index) for index in range(12)]:
            future.result(PATIENCE_S)


def test_lanes_start_one_by_one():
    """After submitted calls have started some lanes, a cut call starts the others."""
    together = {1: threading.Barrier(2), 3: threading.Barrier(3)}  # by rows

    def meet(x):
        together[len(x)].wait(PATIENCE_S)
        return x

    with parallel(meet, THREE, out_dims=0) as p:
        futures = [p.submit(torch.ones(1)) for _ in range(2)]
        assert [len(future.result(PATIENCE_S)) for future in futures] == [1, 1]
        assert len(p(torch.ones(9))) == 9


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("starts", [False, True])
def test_a_lane_that_does_not_start(monkeypatch, error, starts):
    """The call that needs the thread raises the error, and the next one starts another thread."""
    start = threading.Thread.start

    def fail(thread):
        monkeypatch.undo()
        if starts:
            start(thread)
        raise error

    with parallel(lambda x: x, THREE, out_dims=0) as p:
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(error):
            p.submit(1)
        assert p.submit(2).result(PATIENCE_S) == 2
        eventually(lambda: len(lane_threads()) == 1, "the end of the other thread")
        assert len(p(torch.ones(9))) == 9


def test_a_stream_that_draws_beside_another():
    """A stream that draws random numbers keeps its calls in order, in one lane, while calls of
    another stream keep all lanes at work.
    """
    generator, go = torch.Generator().manual_seed(0), threading.Event()

    def draw(_):
        return torch.rand((), generator=generator)

    def source():
        for index in range(50):
            if index == 2:
                go.set()
            yield index

    with parallel(lambda x: (go.wait(PATIENCE_S), x)[1], THREE) as p:
        futures = [p.submit(0) for _ in range(9)]
        drawn = [*p.map(source(), prepare=draw, buffersize=20)]
        assert [future.result(PATIENCE_S) for future in futures] == [0] * 9
    generator.manual_seed(0)
    assert drawn == [*map(draw, range(50))]


def test_work_for_a_lane_that_goes_idle():
    """A call may be sent at any moment of a lane that looks for one: here, at lines of it, in
    different distances.
    """
    sent, waits = [], [*range(12)] * 4

    def trace(frame, event, _arg):
        if event == "line" and waits:
            waits[-1] -= 1
            if waits[-1] < 0:
                waits.pop()
                sent.append(executor.submit(p.submit, 0))
                # While it holds the lock of the queue, the sender waits
                lane = frame.f_locals["self"]
                eventually(lambda: sent[-1].done() or lane._queueing.locked(), "the end of submit")
        return trace if frame.f_code is Lane.take.__code__ else None

    before = threading.gettrace()
    threading.settrace(trace)  # of threads that start from here on
    try:
        with parallel(lambda x: x, ["cpu"]) as p, ThreadPoolExecutor(1) as executor:
            while waits:
                p.submit(0).result(PATIENCE_S)
            assert [each.result(PATIENCE_S).result(PATIENCE_S) for each in sent] == [0] * 48
    finally:
        threading.settrace(before)


@pytest.mark.parametrize("is_new", [False, True], ids=["one attribute", "new attributes"])
def test_writes_during_a_call(is_new):
    """Another thread may set attributes of the model at any moment: here, whenever a call enters a
    function.

    Calls follow the model, and undo no write.
    """
    model, x, undone = Stateful(lambda self, x: x * self.scale, scale=0), torch.ones(5, 2), []

    def write(_frame, event, _arg):
        if event == "call":
            if model.scale != numbers[-1]:
                undone.append(numbers[-1])
            numbers.append(len(numbers))
            model.scale = numbers[-1]
            if is_new and hasattr(model, "other"):
                del model.other
            elif is_new:
                model.other = numbers[-1]

    numbers, before = [0], sys.getprofile()
    with parallel(model, TWO), torch.no_grad():
        for _ in range(3):
            sys.setprofile(write)
            try:
                model(x)
            finally:
                sys.setprofile(before)
            assert_close(model(x), x * model.scale)
    assert len(numbers) > 100
    assert undone == []


@pytest.mark.filterwarnings("ignore:the model wrote")
def test_calls_beside_profiled_streams():
    """A profiler runs whole calls in the thread that submits them.

    No call finds what another thread's call left.
    """

    def forward(self, x):
        before, self.count = self.count, self.count + 1
        return x + before

    def submit():
        with torch.no_grad(), torch.profiler.profile():
            is_profiled.set()
            while not future.done():
                assert_close(p.submit(torch.zeros(2, 1)).result(PATIENCE_S), torch.zeros(2, 1))

    @torch.no_grad()
    def call():
        assert is_profiled.wait(PATIENCE_S)
        for _ in range(500):
            assert_close(model(torch.zeros(6, 1)), torch.zeros(6, 1))

    model, is_profiled, interval = (
        Stateful(forward, count=0).eval(),
        threading.Event(),
        sys.getswitchinterval(),
    )
    sys.setswitchinterval(1e-5)
    try:
        with parallel(model, THREE, out_dims=0) as p, ThreadPoolExecutor(1) as executor:
            future = executor.submit(call)
            submit()
            future.result(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)


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
    """Blocks of several threads close in any order. Calls go to the last block that is open, and a
    compiled model is compiled again after all.
    """
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


class Meanwhile:
    """A part of a model.

    At each copy of it one of `works` runs, as another thread would at that moment.
    """

    def __init__(self, *works):
        self.works = [*works]

    def __deepcopy__(self, memo):
        if self.works:
            self.works.pop(0)()
        return Meanwhile()


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    ["a hook", "a hook that goes", "a number", "a number that goes", "an attribute", "a buffer"],
)
def test_changes_while_lanes_are_made(change):
    """All lanes of a call have the model of one moment, and calls after the change follow it."""

    def forward(self, x):
        return self.layer(x) * self.scale + self.buffer + getattr(self, "other", 0)

    def begin():
        if change.startswith("a hook"):
            handles.append(
                model.layer.register_forward_hook(lambda _module, _args, output: output + 9)
            )
        elif change.startswith("a number"):
            model.scale = 5
        elif change == "an attribute":
            model.other = 3
        else:
            model.buffer.fill_(7)

    def end():
        if change == "a hook that goes":
            handles[0].remove()
        elif change == "a number that goes":
            model.scale = 1

    model, x, handles = Stateful(forward, scale=1), torch.ones(5, 2), []
    model.register_buffer("buffer", torch.zeros(1))
    model.layer = nn.Identity()
    # Two copies for each lane: parts of the process are looked for
    model.part = Meanwhile(begin, lambda: None, end)
    with ThreadPoolExecutor(1) as another, parallel(model, TWO, out_dims=0) as p:
        another.submit(int).result()  # there is a thread that may have made the changes
        for output in model(x), model(x), *p.map([x, x]):
            assert_close(output, forward(model, x).expand(5, 2))


@torch.no_grad()
def test_a_training_flag_set_while_lanes_are_made(monkeypatch):
    """A flag that another thread sets just after the flags were read counts for the call."""
    model, x = nn.Sequential(nn.BatchNorm1d(2)).eval(), torch.randn(6, 2)
    works = [model.train]

    class PossibleWritesMeanwhile(PossibleWrites):
        def __init__(self, survey):
            super().__init__(survey)
            if works:
                works.pop()()

    monkeypatch.setattr("parawrap.engine.replicas.PossibleWrites", PossibleWritesMeanwhile)
    with parallel(model, TWO, out_dims=0):
        model(x)
    assert model[0].num_batches_tracked == 1


@torch.no_grad()
def test_a_hook_registered_in_two_steps():
    """Torch counts a hook, and then enters it into the table of its module.

    A call may come in between.
    """
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(5, 2)
    with parallel(model, TWO, out_dims=0):
        model(x)
        handle = RemovableHandle(model[0]._forward_pre_hooks)
        plain = model(x)
        model[0]._forward_pre_hooks[handle.id] = lambda _module, args: (args[0] * 3,)
        assert_close(model(x), nn.functional.linear(x * 3, *model[0].parameters()))
        handle.remove()
        assert_close(model(x), plain)


def test_writes_while_a_block_opens_or_ends():
    """Another thread may set an attribute at any moment: here, when a function
    is entered or left.
    """

    def write(_frame, _event, _arg):
        moments.append(None)
        if len(moments) == moment:
            model.scale = moment

    model, before, moment, moments = nn.Linear(2, 2), sys.getprofile(), 0, [None]
    while len(moments) > moment:
        moment, moments = moment + 1, []
        sys.setprofile(write)
        try:
            with parallel(model, TWO):
                was_written = len(moments) >= moment
                within = vars(model).get("scale")
        finally:
            sys.setprofile(before)
        assert not was_written or within == moment
        assert len(moments) < moment or model.scale == moment
    assert moment > 100


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
            uses = {
                "submit": lambda: p.submit(nine).result(PATIENCE_S),
                "map": lambda: next(p.map([nine])),
            }
            return uses.get(how, lambda: p(nine))()[: len(x)]

    model = Asking(3, 2)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(1) as other:
        future = other.submit(torch.no_grad()(model), torch.ones(rows, 3))
        assert future.result(PATIENCE_S).shape == (rows, 2)


def test_nothing_is_left_after_close():
    """Outputs and graphs work.

    The model can be freed, and before it a value that it has dropped.
    """
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
@torch.no_grad()
@pytest.mark.parametrize("use", ["call", "submit", "close", "new block"])
def test_a_child_waits_for_no_thread(use):
    """A forked child runs plainly while the parent's lanes work, and a thread of the parent waits
    to copy the model.
    """
    waits, goes_on, begun = threading.Event(), threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        """Sevens wait until the child has ended."""

        def forward(self, x):
            if (x == 7).any():
                waits.set()
                assert goes_on.wait(PATIENCE_S)
            return super().forward(x)

    @torch.no_grad()
    def call(x, event):
        event.set()
        return model(x)

    def new_block():
        with parallel(torch.relu, TWO) as own:
            assert own.submit(torch.ones(4)).result(PATIENCE_S).sum().item() == 4

    model, x = Waiting(3, 2), torch.ones(6, 3)
    with parallel(model, TWO, out_dims=0) as p, ThreadPoolExecutor(2) as others:
        plain = model(x)
        slow = others.submit(call, torch.full((6, 3), 7.0), threading.Event())
        assert waits.wait(PATIENCE_S)
        model.tag = [use]
        waiting = others.submit(call, x, begun)
        assert begun.wait(PATIENCE_S)
        uses = {
            "call": lambda: assert_close(model(x), plain),
            "submit": lambda: p.submit(x).result(),
            "close": p.close,
        }
        child = multiprocessing.get_context("fork").Process(
            target=uses.get(use, new_block), daemon=True
        )
        with p._session._counting:  # as another thread does at the end of a plain call
            child.start()
        child.join(PATIENCE_S)
        goes_on.set()
        assert child.exitcode == 0
        assert slow.result(PATIENCE_S).shape == waiting.result(PATIENCE_S).shape == (6, 2)


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
    assert run_script(tmp_path, script) == "end\n"


def test_calls_from_a_helper_thread(tmp_path):
    """A plain call of the model waits for a thread that calls the model, plainly or cut."""
    script = """
        import threading, torch
        from parawrap import parallel
        class Helped(torch.nn.Linear):
            def forward(self, x):
                if (x == 7).all():
                    x, found = torch.ones(rows, 4), []
                    helper = threading.Thread(target=lambda: found.append(self(x)), daemon=True)
                    helper.start()
                    helper.join()
                    return found[0][:1]
                return super().forward(x)
        model = Helped(4, 2)
        for rows in (1, 8):
            plain = model(torch.full((1, 4), 7.0))
            with parallel(model, ["cpu"] * 2, out_dims=0):
                print(torch.allclose(model(torch.full((1, 4), 7.0)), plain))
    """
    assert run_script(tmp_path, script) == "True\nTrue\n"


def test_blocks_dropped_open():
    """The model can be freed, and the lanes end."""
    before, model = {*threading.enumerate()}, nn.Linear(4, 4)
    alive, p = weakref.ref(model), parallel(model, TWO, out_dims=0).__enter__()
    with torch.no_grad():
        model(torch.ones(8, 4))
        p.submit(torch.ones(8, 4)).result(PATIENCE_S)
    del model, p
    eventually(lambda: gc.collect() is None or alive() is None, "the end of the model")
    eventually(lambda: {*threading.enumerate()} <= before, "the end of the lanes")
