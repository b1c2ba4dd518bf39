"""The store of a launch: no open port on one machine unless requested, and no harm from strangers
at a port.
"""

from __future__ import annotations

import os
import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, current_rank, wrapper
from parawrap.processes.torch_groups import INTERFACE_VARIABLES, stay_on_loopback
from tests.helpers.processes import failure_of, pids_in, ranks, warm_processes
from tests.helpers.ranks import all_sum
from tests.helpers.waiting import PATIENCE_S, eventually

LOOPBACK = "127.0.0.1"


def connections_of(processes):
    return [
        (process.pid, each) for process in processes for each in process.net_connections("inet")
    ]


@pytest.mark.parametrize("fields", [{}, {"ipc_protocol": "tcp"}], ids=["default", "tcp"])
def test_ports_open_only_on_request(fields, tmp_path):
    """No process is reachable from another machine, and by default not even from this one."""

    def waits(folder):
        dist.barrier()
        (folder / f"{os.getpid()}.pid").touch()
        eventually((folder / "go").exists, "go")
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    earlier = connections_of([psutil.Process()])  # of process groups in other tests
    launch = wrapper(ranks(**fields))(waits).submit(tmp_path)
    processes = [psutil.Process(), *warm_processes()]
    of_ranks = [psutil.Process(pid) for pid in pids_in(tmp_path, 2)]
    found = [each for each in connections_of(processes + of_ranks) if each not in earlier]
    (tmp_path / "go").touch()
    (place, port), _ = places = launch.results(timeout=PATIENCE_S)
    assert places == ((LOOPBACK, port),) * 2
    assert place == LOOPBACK
    listening = {
        (pid, each.laddr)
        for pid, each in found
        if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    assert {address.ip for _, address in listening} <= {LOOPBACK, "::1"}
    assert {each.raddr.ip.removeprefix("::ffff:") for _, each in found if each.raddr} == {LOOPBACK}
    of_parent = {
        address.port for pid, address in listening if pid in {process.pid for process in processes}
    }
    assert of_parent == ({port} if fields else set())


def test_a_port_in_use_is_named():
    """The error names a port in use, which is free afterwards."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        launchable = wrapper(ranks(master_port=port, timeout_min=0.1))(all_sum)
        with pytest.raises(
            LaunchError, match=f"cannot listen on {LOOPBACK}:{port}.*in use.*leave out master_addr"
        ):
            launchable()
    assert launchable() == launchable() == (2.0, 2.0)


def sum_over(group, value):
    total = torch.tensor(float(value))
    dist.all_reduce(total, group=group)
    return total.item()


@pytest.mark.parametrize(
    ("groups", "sums"), [([[0, 1], [2, 3]], [1, 1, 5, 5]), ([[3, 1, 0]], [4, 4, None, 4])]
)
def test_ipc_groups_are_made(groups, sums):
    """The group of a rank in no list is None."""

    def total():
        rank = current_rank()
        return rank.group and sum_over(rank.group, rank.global_rank), sum_over(None, 1)

    assert wrapper(ranks(4, ipc_groups=groups))(total)() == tuple((value, 4.0) for value in sums)


@pytest.mark.parametrize("groups", [[], [[0, 1]]], ids=["world", "ipc_groups"])
def test_ipc_timeout_min_limits_a_wait(groups):
    def reduces():
        if current_rank().global_rank == 0:
            sum_over(current_rank().group, 1)
        else:
            time.sleep(600)

    error = failure_of(reduces, platform=ranks(ipc_groups=groups, ipc_timeout_min=0.01))
    assert "600ms" in str(error)


@pytest.mark.parametrize(
    ("names", "expected"), [(["lo0", "lo"], "lo"), (["lo0", "en0"], "lo0"), (["eth0"], "lo")]
)
def test_the_loopback_interface(monkeypatch, names, expected):
    """Linux may have an interface lo0 besides lo, and macOS has lo0 alone."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    for variable in INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    stay_on_loopback()
    assert {os.environ[variable] for variable in INTERFACE_VARIABLES} == {expected}
