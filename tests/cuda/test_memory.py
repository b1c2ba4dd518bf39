"""Memory is read only between its write and its reuse, is bounded, and is freed.

A caching allocator reuses freed memory at once, while GPU work may run much later. These tests keep
streams busy, free tensors that other streams have not read yet, and fill their memory with NaN.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import pytest
import torch
from torch import cuda, nn

from parawrap import parallel
from parawrap.engine.lanes import here
from tests.cuda.gpus import HOME, ONE, TWICE, every, settle

PATIENCE_S = 30
WIDTH = 512
SHAPE = (4096, WIDTH)
"""16 MiB in double precision.

The caching allocator keeps separate blocks for this size and reuses equal ones.
"""
LONG = 600_000_000
"""GPU clock cycles, about a third of a second: much longer than the host's work in a test."""
SPARE = 4  # tensors allocated in advance, because a new allocation may wait for all GPUs


class Late(nn.Module):
    """A module that adds one to its input. `late` maps lanes to their delay in GPU cycles."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.late = SimpleNamespace(lanes=(), cycles=0)

    def forward(self, x):
        lane = here.lane
        if lane is not None and lane.index in self.late.lanes:
            sleep(self.late.cycles)
        return x + self.weight

    def keep_busy(self, lanes, cycles):
        self.late.lanes, self.late.cycles = lanes, cycles


def sleep(cycles):
    """Keep the current stream busy without blocking the host."""
    if cycles:
        cuda._sleep(cycles)


def full(value, device=HOME):
    """Return a tensor of the shape that these tests use."""
    return torch.full(SHAPE, value, dtype=torch.float64, device=device)


def poison():
    """Allocate all memory that the current stream can get for such tensors, and
    fill it with NaN.
    """
    return [full(math.nan) for _ in range(SPARE + 2)]


def is_all(tensor, value):
    return bool((tensor == value).all())


def released(tensor):
    """Return an event that is set once no reference to the tensor is left."""
    gone = threading.Event()
    weakref.finalize(tensor, gone.set)
    return gone


def input_let_go_of(p, model, cycles):
    """The caller frees a submitted input and reuses its memory before the
    lane's stream reads it.
    """
    x = full(1.0)
    gone = released(x)
    model.keep_busy({0}, cycles)
    future = p.submit(x)
    del x
    assert gone.wait(PATIENCE_S)
    taken = poison()
    right = is_all(future.result(), 2.0)
    del taken
    return right


def input_brought_over(p, model, cycles):
    """A batch is copied into the memory of the previous batch before the lane's stream has read
    that batch.
    """
    batches = [full(float(index), "cpu") for index in range(4)]
    model.keep_busy({0}, cycles)
    return all(is_all(output, index + 1.0) for index, output in enumerate(list(p.map(batches))))


def result_used_elsewhere(p, model, cycles):
    """A thread frees an output that its stream has not read yet, and the lane reuses the memory for
    new outputs.
    """
    futures, bad = [p.submit(full(1.0))], full(math.nan)

    def use():
        stream = cuda.Stream(HOME)
        with torch.no_grad(), cuda.stream(stream):
            result = futures.pop().result()
            sleep(cycles)
            return stream, result.sum()

    with ThreadPoolExecutor(1) as thread:
        stream, total = thread.submit(use).result()
    further = [p.submit(bad) for _ in range(SPARE)]
    wait(further)
    stream.synchronize()
    return total.item() == 2 * math.prod(SHAPE)


def parts_joined_elsewhere(p, model, cycles):
    """A caller's stream has not joined its outputs yet when lanes allocate outputs for another
    caller.
    """
    x, bad = full(1.0), full(math.nan)
    stream = cuda.Stream(HOME)
    stream.wait_stream(cuda.current_stream(HOME))
    model.keep_busy({1}, cycles)
    with cuda.stream(stream):
        output = model(x)
    model.keep_busy((), 0)
    other = model(bad)
    stream.synchronize()
    with cuda.stream(stream):
        right = is_all(output, 2.0)
    return right and bool(other.isnan().all())


def caller_before_lanes(p, model, cycles):
    """The caller's stream has not written the input yet when the call starts."""
    x = full(0.0)
    settle()
    sleep(cycles)
    x.add_(1)
    return is_all(model(x), 2.0)


def lanes_before_caller(p, model, cycles):
    """The lanes' streams have not computed yet when the caller receives the output."""
    model(full(0.0))
    x = full(1.0)
    settle()
    model.keep_busy({0, 1}, cycles)
    return is_all(model(x), 2.0)


@pytest.mark.parametrize(
    ("happens", "lanes"),
    [
        (input_let_go_of, ONE),
        (input_brought_over, ONE),
        (result_used_elsewhere, ONE),
        (parts_joined_elsewhere, TWICE),
        (caller_before_lanes, TWICE),
        (lanes_before_caller, TWICE),
    ],
)
def test_memory_is_read_in_time(happens, lanes):
    """Outputs are right if streams run late.

    A first run without delays loads kernels and allocates memory.
    """
    model = Late().to(HOME)
    gc.collect()
    settle()
    cuda.empty_cache()
    with torch.no_grad(), parallel(model, lanes, out_dims=0) as p:
        for cycles in (0, LONG):
            spare = [full(0.0) for _ in range(SPARE)]
            del spare
            settle()
            right = happens(p, model, cycles)
            model.keep_busy((), 0)
            settle()
    assert right


@pytest.mark.parametrize("pinned", [True, False])
def test_the_host_may_free_an_input(pinned, devices):
    """The host frees a submitted input and reuses its memory before the copy can have started."""
    model = Late().to(HOME)

    def on_host(value):
        return full(value, "cpu").pin_memory() if pinned else full(value, "cpu")

    with torch.no_grad(), parallel(model, devices) as p:
        for cycles in (0, LONG):
            x = on_host(1.0)
            gone = released(x)
            sleep(cycles)
            future = p.submit(x)
            del x
            assert gone.wait(PATIENCE_S)
            taken = [on_host(math.nan) for _ in range(3)]
            assert is_all(future.result(), 2.0)
            del taken


@pytest.mark.parametrize("lanes", [ONE, TWICE], ids=["one lane", "two lanes on a GPU"])
def test_map_needs_bounded_memory(lanes):
    """The peak over 100 batches exceeds that over 10 by at most a few batches, and outputs come in
    order.
    """
    model = Late().to(HOME)
    batch = torch.zeros(1024, SHAPE[1], dtype=torch.float64)

    def peak(p, count):
        settle()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(HOME)
        firsts = [output[0, 0].clone() for output in p.map(batch + index for index in range(count))]
        assert torch.stack(firsts).tolist() == [index + 1.0 for index in range(count)]
        # Freed blocks that wait for a stream count too, because they cannot be reused yet.
        return cuda.memory_stats(HOME)["active_bytes.all.peak"]

    with torch.no_grad(), parallel(model, lanes) as p:
        few, many = peak(p, 10), peak(p, 100)
    assert many - few <= 8 * 2 * batch.nbytes


def held():
    """Return the bytes of live tensors on all GPUs, after all work and a garbage collection."""
    gc.collect()
    settle()
    cuda.empty_cache()
    return sum(cuda.memory_allocated(device) for device in every())


def test_memory_is_freed_after_a_block(devices):
    model = Late().to(HOME)
    before = held()
    with parallel(model, devices) as p:
        with torch.no_grad():
            model(full(1.0))
            for output in p.map(full(float(index), "cpu") for index in range(4)):
                del output
            p.submit(full(1.0))  # its output is not read
        model(full(1.0)).sum().backward()
    model.zero_grad()
    del p
    assert held() == before
