"""Six ways to launch a function on two gloo ranks of this machine, with an all_reduce or a failure
in the ranks.

``python -m benchmarks.launch_peers PEER SCENARIO`` runs one launch in a fresh process and prints
the outcome as JSON. ``python -m benchmarks.launch_peers PEER SCENARIO 4`` runs four without a pause
and prints the seconds of each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SCENARIOS = ("fine", "raises", "killed")
RELAUNCHED = ("empty", "ddp")


def one_reduce() -> float:
    """Run the smallest collective that needs all ranks."""
    value = torch.ones(2)
    dist.all_reduce(value)
    return value[0].item()


def one_step() -> float:
    """Run one training step of a small model in DistributedDataParallel."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    return float(loss)


def task(rank: int, scenario: str) -> float:
    """Run a scenario in a rank. If rank 1 fails, rank 0 is blocked in a collective."""
    if scenario in RELAUNCHED:
        return one_step() if scenario == "ddp" else 0.0
    one_reduce()
    if rank == 1 and scenario == "raises":
        raise ValueError(repr(time.time()))
    if rank == 1 and scenario == "killed":
        Path(os.environ["KILLED_AT"]).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return one_reduce()


def in_rank(scenario: str) -> float:
    """Run the task in an existing process group."""
    return task(dist.get_rank(), scenario)


def in_own_group(rank: int, port: int, scenario: str) -> None:
    """Create the process group, then run the task."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    task(rank, scenario)
    dist.destroy_process_group()


def under_agent(scenario: str) -> float:
    """Run the task under an elastic agent, which sets the rendezvous in the environment."""
    dist.init_process_group("gloo")
    try:
        return in_rank(scenario)
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """Return a port that is free now. Another process may take it later."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def parawrap(scenario: str) -> Any:
    import parawrap as pw

    return pw.wrapper(pw.Platform(device="cpu", n_cpus=2, verbose=False))(in_rank)(scenario)


def torchrunx(scenario: str) -> Any:
    import torchrunx as trx

    launcher = trx.Launcher(hostnames=["localhost"], workers_per_host=2, backend="gloo")
    return launcher.run(in_rank, scenario).results


def accelerate(scenario: str) -> Any:
    import accelerate as hf

    return hf.debug_launcher(in_rank, (scenario,), num_processes=2)


def mp_spawn(scenario: str) -> Any:
    return torch.multiprocessing.spawn(in_own_group, (free_port(), scenario), nprocs=2)


def elastic_launch(scenario: str) -> Any:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=0, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="benchmark",
    )  # fmt: skip
    return elastic_launch(config, under_agent)(scenario)


def ddpw(scenario: str) -> Any:
    import ddpw as ddpw_

    def in_ddpw(global_rank: int, local_rank: int, group: Any, args: Any) -> None:
        task(global_rank, scenario)

    platform = ddpw_.Platform(device="cpu", n_cpus=2, verbose=False)
    with contextlib.redirect_stdout(sys.stderr):
        return ddpw_.Wrapper(platform).start(in_ddpw)


PEERS: dict[str, Callable[[str], Any]] = {
    "parawrap": parawrap,
    "accelerate debug_launcher": accelerate,
    "torchrunx": torchrunx,
    "elastic_launch": elastic_launch,
    "mp.spawn": mp_spawn,
    "ddpw": ddpw,
}


MODULES = {
    "parawrap": "parawrap",
    "accelerate debug_launcher": "accelerate",
    "torchrunx": "torchrunx",
    "elastic_launch": "torch.distributed.launcher.api",
    "mp.spawn": "torch.multiprocessing",
    "ddpw": "ddpw",
}


def relaunched(peer: str, scenario: str, times: int) -> list[float]:
    """Return the seconds of each of `times` launches that follow each other without a pause."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        PEERS[peer](scenario)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Run one launch and print its outcome and times, or time several launches."""
    peer, scenario, *times = sys.argv[1:]
    importlib.import_module(MODULES[peer])
    if times:
        print(json.dumps({"each": relaunched(peer, scenario, int(times[0]))}))
        return
    start = time.time()
    found: dict[str, Any] = {}
    try:
        found["returned"] = repr(PEERS[peer](scenario))
    except BaseException as error:  # noqa: BLE001 (any error of a peer is a result)
        found["raised"] = (
            f"{type(error).__name__}: "
            f"{str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        )
        found["keeps_type"] = isinstance(error, ValueError)
        found["text"] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    found["seconds"] = time.time() - start
    found["ended_at"] = time.time()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
