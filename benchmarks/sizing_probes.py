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
import resource
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parawrap.launch.clusters._connections import Address, Front, dial
from parawrap.launch.clusters._remote_node import await_nodes
from parawrap.launch.slurm._report_journal import Journal, JournalRecord

from parawrap import Platform, wrapper
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._store_host import open_store_host
from parawrap.launch.guard._start_methods import starter_named, stop_server
from parawrap.launch.messages._channel import Channel, Message
from parawrap.launch.messages._first_rank_failure import Returned
from parawrap.launch.messages._pickle_values import packed
from parawrap.launch.rank._rank_assignment import Surroundings

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


@dataclass(frozen=True)
class _Load:
    """The work of each rank of a launch."""

    n_ranks: int
    lines: int = 0
    result_mb: int = 0

    @property
    def n_nodes(self) -> int:
        return self.n_ranks // PER_NODE


def watching() -> Report:
    """Watch launches of several sizes, a launch with output, and a launch with large results."""
    _may_open_many()
    sizes = [size for size in _WATCHED if 2 * size < resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
    runs = [_alone(lambda size=size: _watched(_Load(size))) for size in sizes for _ in range(_ROUNDS)]
    some = 8 * PER_NODE
    quiet, lines, large = (
        [_alone(lambda load=load: _watched(load)) for _ in range(_ROUNDS)]
        for load in (_Load(some), _Load(some, lines=_LINES), _Load(some, result_mb=_RESULT_MB))
    )

    def more(loud: Sequence[Report], word: str, units: int) -> list[float]:
        return [(each[word] - statistics.median(other[word] for other in quiet)) / units for each in loud]

    return {
        "runs": runs,
        "line_s": more(lines, "watch_s", some * _LINES),
        "mb_s": more(large, "watch_s", some * _RESULT_MB),
        "mb_put_s": more(large, "put_s", some * _RESULT_MB),
    }


def _watched(load: _Load) -> Report:
    """Watch a launch like the first node of a batch job. One other process answers for all nodes."""
    token, loop = os.urandom(32), Loop()
    front, folder = Front(["127.0.0.1"], token), Path(tempfile.mkdtemp(prefix="parawrap-sizing-"))
    pid = _forked(lambda: _answer(load, front.address))
    try:
        platform = Platform(
            device="cpu", n_cpus=PER_NODE, n_nodes=load.n_nodes, launcher="slurm", ipc_groups=None, verbose=False
        )
        before = _files()
        nodes = await_nodes(front, loop, range(load.n_nodes), lambda: None)
        files_per_node = (_files() - before) / load.n_nodes
        journal, memory, before = Journal(folder / "journal"), _resident(), _files()
        records = [JournalRecord(journal, rank) for rank in range(load.n_ranks)]
        orders = assignments_of(platform, None, Surroundings.here().without_environ())
        began = time.process_time(), time.perf_counter()
        run = Attempts("sizing", platform, loop, nodes, orders, records)
        run.begin()
        outcomes = run.run().outcomes
        ended = time.process_time(), time.perf_counter()
        kept = {"files_per_rank": (_files() - before + load.n_nodes) / load.n_ranks}
        kept["memory_kb_per_rank"] = (_resident() - memory) / 1e3 / load.n_ranks
        parcels = {rank: each.value for rank, each in outcomes.items() if isinstance(each, Returned)}
        assert len(parcels) == load.n_ranks
        put_at = time.process_time()
        parcels = {rank: each.put(folder / f"parcel-{rank}") for rank, each in parcels.items()}
        opened_at = time.process_time()
        for each in parcels.values():
            each.open()
        times = {"put_s": opened_at - put_at, "open_s": time.process_time() - opened_at}
        journal.close()
    finally:
        front.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(folder)
    watch_s, wall_s = (end - start for start, end in zip(began, ended, strict=True))
    return {
        "n_ranks": load.n_ranks,
        "watch_s": watch_s,
        "wall_s": wall_s,
        "files_per_node": files_per_node,
        **kept,
        **times,
    }


def _answer(load: _Load, address: Address) -> None:
    """Answer for all nodes: report each rank as started, and then send its output and its result."""
    result = packed(b"x" * int(load.result_mb * _MB), "result", "the result")
    size = os.fstat(result).st_size
    pieces = [os.pread(result, 1 << 16, start) for start in range(0, size, 1 << 16)]
    wires, selector = [], selectors.DefaultSelector()
    for number in range(load.n_nodes):
        wire = dial(address)
        assert wire is not None
        wire.send("hello", (number, "node"))
        selector.register(wire, selectors.EVENT_READ, wire)
        wires.append(wire)
    waiting = load.n_ranks
    left = {id(wire): PER_NODE for wire in wires}
    while True:
        for key, _ in selector.select():
            message: Message | None = key.data.receive()
            if message is None:
                os._exit(0)
            if message.word == "start":
                rank = message.body.place.global_rank
                key.data.send("started", (rank, 1))
                waiting -= 1
                if waiting == 0:
                    _return_all(load, wires, pieces)
            elif message.word == "tell" and message.body[1] == "bye":
                key.data.send("end", (message.body[0], 0))
                left[id(key.data)] -= 1
                if left[id(key.data)] == 0:
                    key.data.send("over", PER_NODE)


def _return_all(load: _Load, wires: Sequence[Channel], pieces: Sequence[bytes]) -> None:
    for number, wire in enumerate(wires):
        for rank in range(number * PER_NODE, (number + 1) * PER_NODE):
            for _ in range(load.lines):
                wire.send("output", (rank, 1, _LINE))
            for piece in pieces:
                wire.send("piece", (rank, piece))
            wire.send("word", (rank, "returned", {"at": 0.0}, None))


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
