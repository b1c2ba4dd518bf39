"""Workers on a Ray cluster: refused platforms, lost actors, and lost nodes.

`test_worker_pool.py` and `test_requests.py` have the contract that Ray shares with threads and
processes.
"""

from __future__ import annotations

import os
import signal
from collections import deque

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import Platform, parallel
from parawrap.errors import LaunchError, PlatformError, RankDiedError
from parawrap.workers import devices_of
from parawrap.workers.ray_workers import RayWorker, RayWorkers
from tests.helpers.pools import over


class Where(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if (x < 0).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x * self.factor, os.getpid()

    def count(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (Platform(device="cpu", n_cpus=2), "launcher=None: .*workers='process'"),
        (Platform(device="slurm", n_nodes=2), "launcher='slurm': .*@wrapper"),
        (Platform(device="ray", seed=3), "seed=3: .*Leave it out"),
        (Platform(device="neuron", launcher="ray", n_gpus=1), "device='neuron': .*CPUs or GPUs"),
    ],
    ids=["local", "slurm", "seed", "neuron"],
)
def test_refused_platforms(platform, message):
    """The error says what to do. Nothing starts."""
    with pytest.raises(PlatformError, match=message):
        parallel(nn.Identity(), platform)


def test_platform_has_one_lane_per_rank():
    assert devices_of(Platform(device="ray", n_nodes=4, n_gpus=8)) == [torch.device("cuda:0")] * 32
    assert devices_of(Platform(device="ray", n_nodes=2, n_cpus=3)) == [torch.device("cpu")] * 6


class _ShutDown:
    """Ray after `ray.shutdown()`."""

    def is_initialized(self):
        return False


@pytest.mark.parametrize("sent", [0, 1])
def test_shutdown_ends_all_workers(sent):
    """Also one without a message, whose next call would wait for ever. Nothing starts Ray again."""
    workers = RayWorkers(Platform(device="ray", n_nodes=2, n_cpus=1))
    worker = RayWorker.__new__(RayWorker)
    worker._label, worker._death, worker._sent = "worker 0", None, deque([object()] * sent)
    worker._ray = workers._ray = _ShutDown()
    assert [*workers.poll([worker], 0.0)] == [0]
    assert worker.receive() is None
    assert "ray.shutdown() was called" in str(worker.death())


class _Interrupted:
    """Ray while Ctrl-C comes."""

    def is_initialized(self):
        return True

    def get(self, _):
        raise KeyboardInterrupt


def test_interrupt_while_an_answer_is_read():
    """The next look finds the answer, or the death of its worker."""
    worker = RayWorker.__new__(RayWorker)
    worker._ray, worker._sent = _Interrupted(), deque(["answer"])
    with pytest.raises(KeyboardInterrupt):
        worker.receive()
    assert worker.oldest == "answer"


@pytest.mark.ray
def test_call_after_shutdown(ray_cluster):
    import ray

    with torch.no_grad(), over("ray", nn.Identity()) as p:
        assert p.submit(torch.ones(1)).result(60) == 1
        ray.shutdown()
        with pytest.raises(LaunchError, match="was called"):
            p.submit(torch.ones(1)).result(60)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:the model wrote 'calls':UserWarning")
def test_changes_and_deaths_of_actors(ray_cluster):
    """Changes of the model arrive, and a killed actor loses no batch."""
    model = Where().eval()
    with over("ray", model, methods=("forward", "count")) as p:
        model.factor.mul_(2)
        assert_close(model.count(torch.zeros(9)), torch.ones(9))
        found = []
        source = (torch.full((3,), float(number)) for number in range(200))
        for x, pid in p.method("forward").map(source, chunksize=1):  # which reads few batches ahead
            found.append(int(x[0]))
            if len(found) == 15:
                os.kill(pid, signal.SIGKILL)
        assert found == [4 * number for number in range(200)]
        with pytest.raises(RankDiedError, match=r"worker . on cpu died"):
            p.method("forward").submit(torch.full((2,), -1.0)).result()
        assert_close(p.method("forward").submit(torch.ones(4)).result()[0], torch.full((4,), 4.0))


@pytest.mark.ray
def test_lost_node_moves_its_worker(ray_cluster):
    """When a node is lost and another one joins, each batch comes out once."""
    with over("ray", Where(), retries=3) as p:

        def source():
            for number in range(30):
                if number == 10:
                    ray_cluster.kill_node(ray_cluster.nodes[1])
                    ray_cluster.add_node()
                yield torch.full((3,), float(number))

        assert [int(x[0]) for x, _ in p.map(source())] == [2 * number for number in range(30)]
