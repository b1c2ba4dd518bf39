"""CUDA graphs record only the work of the capturing thread, not of lanes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import cuda

from parawrap import ReplicaError, parallel
from tests.cuda.gpus import HOME, TWICE
from tests.helpers.device_models import mlp, rows


def test_a_captured_call_runs_plainly(devices):
    """The graph replays the plain call, and calls before and after the capture are cut."""
    model = mlp().to(HOME)
    plain = copy.deepcopy(model)
    x = rows(13).to(HOME)
    with torch.no_grad(), parallel(model, devices) as p:
        warm_up(lambda: (model(x), plain(x)))
        before = p.stats()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            output = model(x)
        assert p.stats().plain == before.plain + 1
        assert p.stats().calls == before.calls + 1
        for _ in range(2):
            x.copy_(rows(13))
            graph.replay()
            torch.testing.assert_close(output, plain(x))
            torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused(mode):
    """Torch keeps the graphs for one thread. The error names modes that lanes can run."""
    compiled = torch.compile(mlp().to(HOME), mode=mode)
    with (
        torch.no_grad(),
        parallel(compiled, TWICE),
        pytest.raises(ReplicaError, match=r"CUDA graphs.*max-autotune-no-cudagraphs"),
    ):
        compiled(rows(13).to(HOME))


def warm_up(work):
    """Run the work once on a side stream, as torch requires before a capture."""
    stream = cuda.Stream(HOME)
    stream.wait_stream(cuda.current_stream(HOME))
    with cuda.stream(stream):
        for _ in range(3):
            work()
    cuda.current_stream(HOME).wait_stream(stream)
