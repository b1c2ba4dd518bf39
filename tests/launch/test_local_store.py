"""Promise 4 on one machine: a launch opens no port to other users, and MASTER_PORT stays free for the user's own store."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import current_rank, wrapper
from tests.helpers.processes import ranks, warm_processes
from tests.helpers.waiting import PATIENCE_S, eventually

LOOPBACK = "127.0.0.1"


def listening():
    """Return the TCP ports that this process and the warm process listen on."""
    found = [each for process in (psutil.Process(), *warm_processes()) for each in process.net_connections(kind="inet")]
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


@contextmanager
def sampled(sample):
    """Call `sample` repeatedly in a thread until the block ends, and yield the growing list of samples."""
    samples, is_over = [], threading.Event()

    def watch():
        while not is_over.is_set():
            samples.append(sample())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        is_over.set()
        watcher.join()


def waiting_function():
    """Return a function that runs an all_reduce and then waits for a file."""

    def waits(go):
        total = torch.ones(1)
        dist.all_reduce(total)
        while not go.exists():
            time.sleep(0.01)
        return total.item(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    return waits


def test_the_parent_opens_no_port(tmp_path):
    """A launch on one machine listens on no port, so no other user can disturb it; ranks still have a master address."""
    launchable = wrapper(ranks())(waiting_function())
    (tmp_path / "first").touch()
    launchable(tmp_path / "first")  # starts the warm process
    before = listening()
    with sampled(listening) as samples:
        launch = launchable.submit(tmp_path / "go")
        eventually(lambda: len(samples) > 20, "20 samples of the ports")
        (tmp_path / "go").touch()
        results = launch.results(timeout=PATIENCE_S)
    assert set().union(*samples) <= before
    assert [(total, host) for total, host, _ in results] == [(2.0, LOOPBACK)] * 2
    assert len({port for *_, port in results}) == 1


@pytest.mark.parametrize("fields", [{"ipc_protocol": "tcp"}, {"master_addr": LOOPBACK}], ids=["protocol", "address"])
def test_a_requested_port_is_opened(fields, tmp_path):
    """With ``ipc_protocol="tcp"`` or a master address, a store listens on MASTER_PORT."""
    launch = wrapper(ranks(**fields))(waiting_function()).submit(tmp_path / "go")
    eventually(listening, "an open port")
    open_now = listening()
    (tmp_path / "go").touch()
    (_, _, port), *_ = launch.results(timeout=PATIENCE_S)
    assert port in open_now


def test_user_code_can_open_its_own_store(tmp_path):
    """MASTER_ADDR and MASTER_PORT are free for the user's own store and process group, even in two launches at once."""

    def meets(folder):
        rank, size = current_rank().global_rank, current_rank().world_size
        (folder / f"{os.getpid()}.up").touch()
        while len(list(folder.glob("*.up"))) < 4:  # both launches run
            time.sleep(0.01)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, size, is_master=rank == 0)
        store.set(f"rank {rank}", f"value of {rank}")
        value = store.get(f"rank {1 - rank}").decode()
        dist.barrier()
        dist.destroy_process_group()
        del store
        return value, port

    def initializes(folder):
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # from the environment
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    first, second = (wrapper(ranks(timeout_min=0.2))(meets).submit(tmp_path) for _ in range(2))
    found = [*first.results(timeout=PATIENCE_S), *second.results(timeout=PATIENCE_S)]
    assert [value for value, _ in found] == ["value of 1", "value of 0"] * 2
    ports = [port for _, port in found]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert wrapper(ranks(timeout_min=0.2))(initializes)(tmp_path) == (2.0, 2.0)


# -- strangers at a requested port


def free_port():
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def connected(port):
    """Connect to a port as soon as it is open."""

    def connection():
        try:
            return socket.create_connection((LOOPBACK, port))
        except ConnectionRefusedError:
            return None

    return eventually(connection, f"port {port}")


def send_bytes(port, is_over):
    """Send bytes that are not a message of the store, and open a connection that sends nothing."""
    with connected(port) as line, connected(port):
        line.sendall(bytes(range(256)) * 64)
        is_over.wait()


def overwrite_keys(port, is_over):
    """Connect as a client of the store and replace all its values."""
    connected(port).close()
    try:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        while not is_over.is_set():
            for key in store.list_keys():
                store.set(key, "garbage")
    except dist.DistError:  # the store was closed
        pass


@pytest.mark.parametrize("disturb", [send_bytes, overwrite_keys])
def test_a_stranger_at_the_store_is_named_or_harmless(disturb):
    """A launch with a listening store returns right results, or its error names the store and its address."""

    def adds():
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    wrapper(ranks())(adds)()  # starts the warm process
    port, is_over = free_port(), threading.Event()
    stranger = threading.Thread(target=disturb, args=(port, is_over))
    stranger.start()
    launch = wrapper(ranks(ipc_protocol="tcp", master_port=port, timeout_min=0.1))(adds).submit()
    try:
        assert launch.results(timeout=PATIENCE_S) == (2.0, 2.0)
    except Exception as error:
        texts = [str(error), *getattr(error, "__notes__", ())]
        assert any("store" in each and f"{LOOPBACK}:{port}" in each for each in texts), texts
    finally:
        is_over.set()
        stranger.join()


def test_no_rank_leaves_before_all_have_joined(tmp_path):
    """On busy cores, a rank may connect seconds later than another one. It would lose a rank that had returned."""
    pid_file = tmp_path / "pid"

    class JoinsLate:
        def __reduce__(self):
            def patched():  # when the rank unpickles its argument, before it joins
                join = dist.init_process_group

                def late(*args, **options):
                    join(*args, **options)
                    if os.environ["RANK"] == "1":
                        time.sleep(2)
                        assert psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE

                dist.init_process_group = late

            return patched, ()

    def function(_):
        rank = current_rank().global_rank
        if rank == 0:
            pid_file.write_text(str(os.getpid()))
        return rank

    assert wrapper(ranks(2))(function)(JoinsLate()) == (0, 1)
