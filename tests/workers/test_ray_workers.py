"""Workers on a Ray cluster: platforms that are refused, actors and nodes that are lost, and drivers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import Platform, parallel
from parawrap.errors import PlatformError, RankDiedError
from parawrap.workers import devices_of

TWO_NODES = Platform(device="ray", n_nodes=2, n_cpus=1)
EXAMPLES = Path(__file__).parents[2] / "examples"


class Where(nn.Module):
    """Returns its input and the process id. Kills its process for negative rows."""

    def forward(self, x):
        if (x < 0).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2, os.getpid()


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (Platform(device="cpu", n_cpus=2), "launcher=None: .*workers='process'"),
        (Platform(device="slurm", n_nodes=2), "launcher='slurm': .*@wrapper"),
        (Platform(device="ray", seed=3), "seed=3: .*seed torch before the block"),
        (Platform(device="ray", max_restarts=2), "max_restarts=2: .*retries"),
        (Platform(device="ray", backend="gloo"), "backend='gloo': .*leave it out"),
        (Platform(device="neuron", launcher="ray", n_gpus=1), "device='neuron': .*CPUs or GPUs"),
    ],
    ids=["local", "slurm", "seed", "restarts", "backend", "neuron"],
)
def test_platform_that_a_block_cannot_use_is_refused(platform, message):
    """Other launchers, and fields without a meaning for a block, raise with the way out. Nothing starts."""
    with pytest.raises(PlatformError, match=message):
        parallel(nn.Identity(), platform)


def test_platform_has_one_lane_per_rank():
    """Four nodes with eight GPUs are 32 lanes."""
    assert devices_of(Platform(device="ray", n_nodes=4, n_gpus=8)) == [torch.device("cuda:0")] * 32
    assert devices_of(Platform(device="ray", n_nodes=2, n_cpus=3)) == [torch.device("cpu")] * 6


@pytest.mark.ray
@torch.no_grad()
def test_killed_actors_lose_and_repeat_no_batch(ray_cluster):
    """While actors are killed, each batch comes out once, in order. A batch that kills every actor raises."""
    with parallel(Where(), TWO_NODES, retries=3) as p:

        def source():
            for number in range(40):
                if number in (10, 25):
                    lane = p._session.pool.lanes[number % 2]
                    os.kill(lane.pid, signal.SIGKILL)
                yield torch.full((3,), float(number))

        assert [int(x[0]) for x, _ in p.map(source())] == [2 * number for number in range(40)]
        with pytest.raises(RankDiedError, match=r"worker . on cpu died"):
            p.submit(torch.full((2,), -1.0)).result()
        assert_close(p.submit(torch.ones(4)).result()[0], torch.full((4,), 2.0))


@pytest.mark.ray
@torch.no_grad()
def test_actor_that_ended_while_it_was_idle_costs_no_retry(ray_cluster):
    """No call ran when it ended."""
    x = torch.arange(9.0)
    with parallel(nn.Identity(), TWO_NODES, retries=0) as p:
        assert_close(p(x), x)
        os.kill(p._session.pool.lanes[1].pid, signal.SIGKILL)
        time.sleep(1.5)
        assert_close(p(x), x)


@pytest.mark.ray
@torch.no_grad()
def test_worker_of_a_lost_node_moves_to_another_one(ray_cluster):
    """When a node is lost and another one joins, each batch comes out once."""
    with parallel(Where(), TWO_NODES, retries=3) as p:

        def source():
            for number in range(30):
                if number == 10:
                    ray_cluster.kill_node(ray_cluster.nodes[1])
                    ray_cluster.add_node()
                yield torch.full((3,), float(number))

        assert [int(x[0]) for x, _ in p.map(source())] == [2 * number for number in range(30)]


@pytest.mark.ray
def test_example_runs_on_two_nodes(ray_cluster):
    """The program that runs on threads and processes runs unchanged on a Ray cluster."""
    command = [sys.executable, EXAMPLES / "one_block.py", "ray"]
    environ = {**os.environ, **ray_cluster.environment, "OMP_NUM_THREADS": "1"}  # several threads on busy cores are slower
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert found.returncode == 0, found.stderr
    assert "the outputs of ray are those of the plain loop" in found.stdout


DRIVER = """
import os, time, torch
from torch import nn
from parawrap import Platform, parallel

class Sleeping(nn.Module):
    def forward(self, x):
        time.sleep(float(x[0]))
        return x, os.getpid()

if __name__ == "__main__":
    torch.set_grad_enabled(False)
    with parallel(Sleeping(), Platform(device="ray", n_nodes=2, n_cpus=1)) as p:
        futures = [p.submit(torch.zeros(1)) for _ in range(2)]
        [future.result() for future in futures]
        print(*[lane.pid for lane in p._session.pool.lanes], flush=True)
        p.submit(torch.full((1,), 600.0)).result()
"""


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_actors_end_with_their_driver(ray_cluster, tmp_path, number):
    """Ctrl-C and SIGKILL of the driver end the actors, also in the middle of a call."""
    (tmp_path / "driver.py").write_text(DRIVER)
    environ = {**os.environ, **ray_cluster.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "driver.py")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # jobs in the background ignore it
    ) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        driver.send_signal(number)
    assert len(pids) == 2
    until = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


def is_running(pid):
    """True if a process runs: a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
