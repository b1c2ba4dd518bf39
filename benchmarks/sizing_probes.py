"""The probes of the sizing suite: ``python -m benchmarks.sizing_probes NAME`` runs one and prints its report as JSON.

No probe needs a cluster. One process answers for all nodes of a launch, and the ranks of a mesh are threads. Processor
times are those of the measured process only.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parawrap import Platform, wrapper
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.guard._start_methods import starter_named, stop_server
from parawrap.launch.rank._rank_assignment import Surroundings
from parawrap.launch.rank._signed_values import Signer
from parawrap.launch.slurm._batch_job import task_files
from parawrap.launch.slurm._coordinate_job import JobCoordinator
from parawrap.launch.slurm._job_follower import JobFollower
from parawrap.launch.slurm._launch_folder import Address, Folder, Plan
from parawrap.launch.slurm._store_messages import StoreQueue, connect
from parawrap.launch.slurm._task import TaskResult

__all__ = ["PER_NODE", "Report", "found"]

PER_NODE = 8
_PATIENCE_S = 120.0
_MESH_PATIENCE = dt.timedelta(seconds=60)
_MB = 1e6
_WATCHED = (8, 128, 512, 1024, 2048)
_MESHES = {8: 3, 16: 3, 32: 2, 64: 1}  # size: repetitions; closing many connections takes seconds
_CONNECTIONS_TO_STORE = 100
_LINES, _LINE = 200, b"x" * 79 + b"\n"
_RESULT_MB = 4
_ATTEMPT = "0-0"
_CONNECTIONS_PER_RANK = 2  # of its guard to the coordinator's store: for reports, and for orders
_ROUNDS = 3
_FORK_WARNING = "ignore::DeprecationWarning"  # probes fork while other threads run
# torch resolves the name of every address that it connects to, and warns if no resolver answers.
_ENVIRONMENT = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

Report = dict[str, Any]


def found(name: str) -> Report:
    """Return the report of a probe, which runs in its own process.

    Raises:
        RuntimeError: If the probe fails.
    """
    process = subprocess.run(
        [sys.executable, "-W", _FORK_WARNING, "-m", "benchmarks.sizing_probes", name],
        stdout=subprocess.PIPE,
        env=os.environ | _ENVIRONMENT,
        cwd=Path(__file__).parent.parent,
        text=True,
        check=False,
    )
    if process.returncode:
        msg = f"the probe {name!r} ended with exit code {process.returncode}. Its error is above"
        raise RuntimeError(msg)
    report: Report = json.loads(process.stdout.splitlines()[-1])
    return report


# -- imports of a node

_IMPORTS = """
import os, sys, time
opened = set()
sys.addaudithook(lambda event, given: opened.add(given[0]) if event == "open" and isinstance(given[0], str) else None)
began = time.process_time()
import torch, parawrap.launch.slurm._task
spent = time.process_time() - began
read = {each for each in opened if os.path.isfile(each) and not each.startswith("/proc")}
touched, whole, mapped, name = 0, 0, set(), ""
for line in open("/proc/self/smaps"):
    words = line.split()
    if "-" in words[0] and not words[0].endswith(":"):
        name = words[5] if len(words) > 5 and os.path.isfile(words[5]) else ""
    elif name and words[0] == "Rss:":
        touched += 1024 * int(words[1])
        mapped.add(name)
size = lambda files: sum(os.path.getsize(each) for each in files)
print(spent, len(read | mapped), touched + size(read - mapped), size(read | mapped))
"""


def imports() -> Report:
    """Measure the imports of a node before it can fork ranks, with all files in the page cache."""
    runs = [_run_imports() for _ in range(_ROUNDS + 2)][1:]
    return {
        "cpu_s": [run[0] for run in runs],
        "files": runs[0][1],
        "touched_mb": runs[0][2] / _MB,
        "whole_mb": runs[0][3] / _MB,
    }


def _run_imports() -> list[float]:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


# -- processor time and memory of a rank

_ALONE = Platform(device="cpu", n_cpus=4, ipc_groups=None, verbose=False)


def of_rank() -> Report:
    """Return the processor time and the memory of a rank when its function begins."""
    words = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    sizes = {line[0]: 1024 * int(line[1]) / _MB for line in words if line[-1] == "kB"}
    return {
        "cpu_s": time.process_time(),
        "rss_mb": sizes["Rss:"],
        "pss_mb": sizes["Pss:"],
        "own_mb": sizes["Private_Clean:"] + sizes["Private_Dirty:"],
    }


def ranks() -> Report:
    """Measure ranks forked from a warm process, ranks in fresh interpreters, and the fork itself."""
    wrapper(_ALONE)(of_rank)()  # starts the warm process, which loads the modules of later ranks
    report: Report = {"fork_s": _forks()}
    for method in ("forkserver", "spawn"):
        reports = [each for _ in range(_ROUNDS) for each in wrapper(replace(_ALONE, spawn_method=method))(of_rank)()]
        for word in reports[0]:
            report[f"{method}_{word}"] = [each[word] for each in reports]
    stop_server()
    return report


def _forks() -> list[float]:
    starter, times = starter_named("forkserver"), []
    for _ in range(10 * _ROUNDS):
        ours, its = socket.socketpair()
        with ours, its:
            began = time.perf_counter()
            status = starter.start(its, 0.0)
            times.append(time.perf_counter() - began)
        os.read(status, 4)  # the rank exits, because the block closed its connection
        os.close(status)
    return times


# -- watching a launch


def watching() -> Report:
    """Coordinate launches of several sizes, and read the output and the results of tasks."""
    _may_open_many()
    sizes = [size for size in _WATCHED if 5 * size < resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
    return {
        "runs": [_alone(lambda size=size: coordinate(size)) for size in sizes for _ in range(_ROUNDS)],
        "line_s": [_in_folder(_read_lines) for _ in range(_ROUNDS)],
        "mb_s": [_in_folder(_read_results) for _ in range(_ROUNDS)],
        "mb_put_s": [_in_folder(_write_results) for _ in range(_ROUNDS)],
    }


def coordinate(n_ranks: int) -> Report:
    """Coordinate a launch like rank 0's task of a batch job. One other process reports for all guards."""
    platform = Platform(
        device="cpu", n_cpus=PER_NODE, n_nodes=n_ranks // PER_NODE, launcher="slurm", ipc_groups=None, verbose=False
    )
    plan = Plan("sizing", platform, Surroundings.here().without_environ(), os.urandom(32), float("inf"))

    def run(folder: Folder) -> Report:
        with contextlib.ExitStack() as cleanup:
            coordinator = JobCoordinator(folder, plan, 0, _ATTEMPT, cleanup)
            pid = _forked(lambda: _report_for_guards(n_ranks, coordinator.address, plan.token))
            memory, files = _resident(), _files()
            began = time.process_time(), time.perf_counter()
            coordinator.begin()
            os.waitpid(pid, 0)
            ended = time.process_time(), time.perf_counter()
            assert len(coordinator.ending.outcomes) == n_ranks
            used = _resident() - memory
        watch_s, wall_s = (end - start for start, end in zip(began, ended, strict=True))
        return {
            "n_ranks": n_ranks,
            "watch_s": watch_s,
            "wall_s": wall_s,
            "files_per_node": 0,
            "files_per_rank": _CONNECTIONS_PER_RANK + (_files() - files) / n_ranks,
            "memory_kb_per_rank": used / 1e3 / n_ranks,
        }

    return _in_folder(run)


def _report_for_guards(n_ranks: int, address: Address, token: bytes) -> None:
    """Report for all guards that their ranks start and return, and wait for the order to finish."""
    signer = Signer(token)

    def queue(name: str) -> StoreQueue:
        return StoreQueue(connect("127.0.0.1", address.port), f"{_ATTEMPT}/{name}", signer)

    reports, orders = ([queue(name) for name in names] for names in (["reports"] * n_ranks, _order_queues(n_ranks)))
    for rank, report in enumerate(reports):
        report.send(rank, "hello", "node")
    for rank, report in enumerate(reports):
        report.send(rank, "started", 1)
        report.send(rank, "word", "reached", ("run", 0.0))
        report.send(rank, "word", "returned", {"at": 0.0})
        report.send(rank, "end", 0, "", "")
        report.send(rank, "over")
    for order in orders:
        while order.receive()[0] != "finish":
            pass
    os._exit(0)


def _order_queues(n_ranks: int) -> list[str]:
    return [f"orders-{rank}" for rank in range(n_ranks)]


def _in_folder(measure: Callable[[Folder], Any]) -> Any:
    """Call `measure` with a new launch folder, and remove the folder."""
    with tempfile.TemporaryDirectory(prefix="parawrap-sizing-") as place:
        folder = Folder(Path(place, "0"))
        folder.path.mkdir()
        folder.submitit.mkdir()
        return measure(folder)


def _follower(folder: Folder) -> JobFollower:
    transcripts = [Transcript(rank, prefix="", shown=False, folder=None) for rank in range(PER_NODE)]
    return JobFollower("1", "sizing", replace(_ALONE, n_cpus=PER_NODE), folder, transcripts)


def _read_lines(folder: Folder) -> float:
    """Return the processor time per line to read the output of tasks."""
    follower = _follower(folder)
    for rank in range(PER_NODE):
        Path(task_files(folder, "1", rank).stdout).write_bytes(_LINE * _LINES)
    began = time.process_time()
    follower.take_output()
    return (time.process_time() - began) / (PER_NODE * _LINES)


def _write_results(folder: Folder) -> float:
    """Return the processor time per megabyte to write the result of a task."""
    value = TaskResult(_ATTEMPT, bytes(int(_RESULT_MB * _MB)))
    began = time.process_time()
    Path(task_files(folder, "1", 0).result_pickle).write_bytes(pickle.dumps(("success", value)))
    return (time.process_time() - began) / _RESULT_MB


def _read_results(folder: Folder) -> float:
    """Return the processor time per megabyte to read the result of a task."""
    _write_results(folder)
    follower = _follower(folder)
    began = time.process_time()
    follower.result_of(0)
    return (time.process_time() - began) / _RESULT_MB


# -- the store and gloo


class _StoreProcess:
    """A launch's store in its own process, which reports its processor time, files, and memory."""

    def __init__(self) -> None:
        self._control, its = socket.socketpair()
        self._pid = _forked(lambda: self._serve(its))
        self.port = int(self._control.recv(100))

    def _serve(self, control: socket.socket) -> None:
        with open_store_host(Platform(device="cpu", ipc_protocol="tcp")) as place:
            assert place is not None
            control.sendall(str(place.port).encode())
            self._answer(control)

    @staticmethod
    def _answer(control: socket.socket) -> None:
        while control.recv(1):
            control.sendall(json.dumps([time.process_time(), _files(), _resident()]).encode())
        os._exit(0)

    def used(self) -> tuple[float, int, float]:
        """Return processor seconds, open files, and bytes of memory."""
        self._control.sendall(b"?")
        cpu_s, files, memory = json.loads(self._control.recv(1000))
        return cpu_s, files, memory

    def client(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._control.close()


@contextlib.contextmanager
def _store() -> Iterator[_StoreProcess]:
    process = _StoreProcess()
    try:
        yield process
    finally:
        process.close()


def meeting() -> Report:
    """Measure the store's connections, requests, and bytes, and gloo's connections through it."""
    _may_open_many()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with _store() as store:
        report, clients = _connections(store)
        report |= _requests(store, clients)
        for kind in ("full", "lazy"):
            os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(kind == "lazy"))
            turns = [(size, turn) for size, count in _MESHES.items() for turn in range(count)]
            report[kind] = [_mesh(store, clients[:size], f"{kind}-{size}-{turn}") for size, turn in turns]
    return report


def _connections(store: _StoreProcess) -> tuple[Report, list[dist.TCPStore]]:
    kept = [store.client()]
    before = store.used()
    clients = [store.client() for _ in range(_CONNECTIONS_TO_STORE)]
    cpu_s, files, memory = (end - start for start, end in zip(before, store.used(), strict=True))
    count = len(clients)
    return {
        "connection_s": cpu_s / count,
        "files_per_connection": files / count,
        "connection_kb": memory / 1e3 / count,
    }, kept + clients


def _requests(store: _StoreProcess, clients: Sequence[dist.TCPStore]) -> Report:
    """Measure small and large requests of one client, and small requests of eight clients at full rate."""
    client, count, mb = clients[0], 3000, 64
    client.set("small", "x" * 64)
    client.set("large", "x" * int(_MB))
    small: list[float] = []
    large: list[float] = []
    busy: list[float] = []
    rate: list[float] = []
    for _ in range(_ROUNDS):
        small.append(_cost(store, lambda: [client.get("small") for _ in range(count)]) / count)
        large.append(_cost(store, lambda: [client.get("large") for _ in range(mb)]) / mb)
        busy.append(_cost(store, lambda: rate.append(_rate(clients[:8], count))) / 8 / count)
    return {"request_s": small, "busy_request_s": busy, "mb_s": large, "requests_per_second": rate}


def _cost(store: _StoreProcess, work: Callable[[], object]) -> float:
    before = store.used()[0]
    work()
    return store.used()[0] - before


def _rate(clients: Sequence[dist.TCPStore], count: int) -> float:
    began = time.perf_counter()
    _in_threads(len(clients), lambda number: [clients[number].get("small") for _ in range(count)])
    return len(clients) * count / (time.perf_counter() - began)


def _mesh(store: _StoreProcess, clients: Sequence[dist.TCPStore], name: str) -> Report:
    """Measure a gloo group over threads of one process, which exits without destroying the group."""
    before = store.used()[0]
    report = _alone(lambda: _meshed(clients, name))
    return report | {"n_ranks": len(clients), "store_s": store.used()[0] - before}


def _meshed(clients: Sequence[dist.TCPStore], name: str) -> Report:
    size, stores = len(clients), [dist.PrefixStore(name, client) for client in clients]
    groups: list[Any] = [None] * size
    files, cpu_s, began = _files(), time.process_time(), time.perf_counter()

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(stores[rank], rank, size, _MESH_PATIENCE)

    def reduce(rank: int) -> None:
        groups[rank].allreduce([torch.ones(2)]).wait()

    _in_threads(size, join)
    _in_threads(size, reduce)
    cpu_s, wall_s, files = time.process_time() - cpu_s, time.perf_counter() - began, _files() - files
    keys = [len(clients[0].get(key)) for key in clients[0].list_keys() if key.startswith(f"{name}/")]
    return {"cpu_s": cpu_s, "wall_s": wall_s, "files_per_rank": files / size, "keys": len(keys), "bytes": sum(keys)}


# -- processes


def _forked(work: Callable[[], None]) -> int:
    """Run `work` in a fork of this process and return the fork's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def _alone(work: Callable[[], Report]) -> Report:
    """Return the result of `work` in a fork of this process."""
    reader, writer = os.pipe()

    def write_result() -> None:
        os.close(reader)
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)

    pid = _forked(write_result)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if os.waitpid(pid, 0)[1]:
        msg = "a measuring process failed; its error is above"
        raise RuntimeError(msg)
    report: Report = json.loads(text)
    return report


def _in_threads(count: int, work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _may_open_many() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_PROBES: dict[str, Callable[[], Report]] = {"imports": imports, "ranks": ranks, "watching": watching, "meeting": meeting}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(_PROBES[sys.argv[1]]()))
