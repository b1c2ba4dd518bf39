"""`parallel(..., workers="process")`: the block, its streams, and the options that it refuses."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import psutil
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import build, parallel
from parawrap.errors import SessionError, ShardError

CPUS = ["cpu", "cpu"]


class Endless(nn.Module):
    def forward(self, x):
        threading.Event().wait()
        return x


class Where(nn.Module):
    def forward(self, x):
        return x + 1, os.getpid()


class WaitsForFile(Where):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def forward(self, x):
        while not self.path.exists():
            time.sleep(0.005)
        return super().forward(x)


@torch.no_grad()
def test_block_is_the_same_object():
    """Inside the block the model's own calls run in the workers; afterwards the model is what it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x, before = torch.randn(9, 4), dict(vars(model))
    expected = model(x)
    with parallel(model, CPUS, workers="process") as p:
        assert_close(model(x), expected)
        assert_close(model(x), expected)
        assert p.stats().shards == (5, 4)
    assert vars(model) == before
    assert_close(model(x), expected)


@torch.no_grad()
def test_map_runs_in_workers_and_keeps_order():
    """`map` yields in order, from processes other than this one."""
    with parallel(Where(), CPUS, workers="process") as p:
        outputs = list(p.map(torch.arange(20.0).split(1)))
    assert [int(x) for x, _ in outputs] == list(range(1, 21))
    assert os.getpid() not in {pid for _, pid in outputs}


@torch.no_grad()
def test_function_may_use_modules_of_any_class():
    """A function, and `prepare`, may use torch.backends and operators of torch."""
    double = torch.ops.aten.mul.Scalar

    def prepare(x):
        torch.backends.cudnn.benchmark = True
        return double(x, 2)

    def plus(x):
        return torch.ops.aten.add(x, int(torch.backends.cudnn.benchmark))

    with parallel(plus, CPUS, workers="process") as p:
        outputs = list(p.map(torch.arange(4.0).split(2), prepare=prepare))
    assert torch.cat(outputs).tolist() == [1, 3, 5, 7]


@torch.no_grad()
def test_lazy_module_is_sent_after_its_first_call():
    """The first call gives a lazy module its parameters, in this process. Workers then have the same ones."""
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU()), torch.randn(8, 3)
    with parallel(model, CPUS, workers="process", out_dims=0) as p:
        first = model(x)
        assert_close(model(x), first)
        assert_close(p.submit(x).result(), first)
        assert p.stats().plain == 1


@torch.no_grad()
def test_two_blocks_at_once_are_apart():
    """Two blocks on two models give each model's own output."""
    first, second, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(9, 3)
    expected = first(x), second(x)
    with parallel(first, CPUS, workers="process"), parallel(second, CPUS, workers="process"):
        assert_close((first(x), second(x)), expected)


@torch.no_grad()
def test_exception_in_the_block_ends_running_calls():
    """A block that ends with an exception does not wait for the calls that its workers run."""
    with pytest.raises(KeyError), parallel(Endless(), CPUS, workers="process") as p:  # noqa: PT012
        future = p.submit(torch.ones(2))
        raise KeyError
    with pytest.raises((SessionError, CancelledError)):
        future.result()


@torch.no_grad()
def test_block_that_is_never_closed_ends_with_its_last_reference():
    """A `parallel` object that nothing refers to any more leaves no process and no thread."""
    p = parallel(Where(), CPUS, workers="process")
    process = psutil.Process(p.submit(torch.ones(1)).result()[1])
    del p
    gc.collect()
    process.wait(20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-lane")]


UNCLOSED = """
import sys, time, torch
from torch import nn
from parawrap import parallel

class Sleeping(nn.Module):
    def forward(self, x):
        time.sleep(float(x[0]))
        return x

if __name__ == "__main__":
    torch.set_grad_enabled(False)
    p = parallel(Sleeping(), ["cpu", "cpu"], workers="process")
    futures = [p.submit(torch.full((2,), seconds)) for seconds in (0.0, SECONDS, SECONDS)]
    print(futures[0].result().tolist())
"""


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["idle", "busy"])
def test_script_that_never_closes_its_block_exits(tmp_path, seconds):
    """At the end of a script, workers end, also in the middle of a call."""
    script = tmp_path / "script.py"
    script.write_text(UNCLOSED.replace("SECONDS", str(seconds)))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=40, env=environ, check=True
    )
    assert (done.stdout, done.stderr) == ("[0.0, 0.0]\n", "")


@torch.no_grad()
def test_callback_of_a_submitted_call_may_call_the_block(tmp_path):
    """A callback runs in the thread of a lane, so its call runs plainly."""
    outputs, done = [], threading.Event()
    with parallel(WaitsForFile(tmp_path / "go"), CPUS, workers="process") as p:
        future = p.submit(torch.zeros(2))
        future.add_done_callback(lambda _: (outputs.append(p(torch.zeros(4))), done.set()))
        (tmp_path / "go").touch()  # once the callback waits: it would run in this thread otherwise
        assert done.wait(20)
    assert outputs[0][1] == os.getpid()


def test_unknown_kind_of_worker_is_refused():
    """`workers` and `retries` are checked before anything starts."""
    with pytest.raises(ShardError, match="workers='fiber'"):
        parallel(nn.Identity(), CPUS, workers="fiber")
    with pytest.raises(ShardError, match="retries=-1"):
        parallel(nn.Identity(), CPUS, workers="process", retries=-1)


@torch.no_grad()
def test_build_needs_processes():
    """A target that workers build is refused with lanes in threads."""
    with parallel(build(nn.Linear, 2, 2), CPUS) as p, pytest.raises(SessionError, match='workers="process"'):
        p(torch.ones(9, 2))


def fail(x):
    raise ValueError("the user's line")


def test_the_traceback_of_a_worker_starts_in_the_users_code():
    """The note with the worker's traceback has no frames of parawrap above the user's function."""
    with torch.no_grad(), parallel(fail, CPUS, workers="process") as p:
        (error,) = p.map([torch.ones(2, 3)], return_exceptions=True)
    (remote,) = [note for note in error.__notes__ if "Traceback" in note]
    assert "the user's line" in remote
    assert "/parawrap/" not in remote
