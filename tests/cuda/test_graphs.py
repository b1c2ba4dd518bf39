"""Calls in a CUDA graph: a capture records what one thread queues, and lanes cannot add to it."""

from __future__ import annotations

import copy

import torch

from parawrap import parallel
from tests.cuda.gpus import HOME, cuda
from tests.devices.zoo import mlp, rows


def test_a_call_that_is_captured_runs_plainly(devices):
    """The graph replays the plain call; before and after the capture, calls are cut as ever."""
    model = mlp().to(HOME)
    plain = copy.deepcopy(model)
    x = rows(8).to(HOME)
    with torch.no_grad(), parallel(model, devices) as p:
        warm_up(lambda: (model(x), plain(x)))
        before = p.stats()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            output = model(x)
        assert p.stats().plain == before.plain + 1
        assert p.stats().calls == before.calls + 1
        for _ in range(2):
            x.copy_(rows(8))
            graph.replay()
            torch.testing.assert_close(output, plain(x))
            torch.testing.assert_close(model(x), plain(x))


def warm_up(work):
    """Have all that the work needs made on a stream beside the current one, as torch wants it before a capture."""
    stream = cuda.Stream(HOME)
    stream.wait_stream(cuda.current_stream(HOME))
    with cuda.stream(stream):
        for _ in range(3):
            work()
    cuda.current_stream(HOME).wait_stream(stream)
