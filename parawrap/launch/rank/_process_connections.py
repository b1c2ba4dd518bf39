"""Break the collectives that block ranks, by closing the connections between the ranks of a world.

torch offers this for NCCL only (`ProcessGroup.abort`). A thread that waits in gloo returns when its connections close. They
are the TCP connections between processes of the same world.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parawrap.launch._private_names import groups_of_process, number_of_groups, sequence_number_of

__all__ = [
    "MESSAGES",
    "Connection",
    "break_connections",
    "connections_between",
    "connections_here",
    "count_messages",
    "forget_messages",
    "sequence_numbers",
]

MESSAGES = "messages"
_GROUPS = "groups"
_OPEN_FILES = Path("/dev/fd")
_messages = 0

Connection = tuple[tuple[str, int], tuple[str, int]]
"""The addresses of the two ends of a TCP connection: that of this process, and that of the other one."""


def connections_here() -> list[Connection]:
    """Return the TCP connections of this process."""
    return [ends for _, ends in _tcp_sockets()]


def connections_between(ranks: Iterable[Iterable[Connection]]) -> set[Connection]:
    """Return the connections between ranks, given those of each rank. Each one counts from both ends."""
    ends = {connection for connections in ranks for connection in connections}
    return {(here, there) for here, there in ends if (there, here) in ends}


def break_connections(broken: set[Connection]) -> None:
    """Shut down these connections of this process, and abort its collectives on accelerators."""
    if torch.cuda.is_initialized():
        for group in groups_of_process():
            with contextlib.suppress(Exception):  # a group without a backend for the device
                group.abort()
    for sock, ends in _tcp_sockets():
        if ends in broken:
            with contextlib.suppress(OSError):  # the rank at the other end was faster
                sock.shutdown(socket.SHUT_RDWR)


def sequence_numbers() -> Mapping[str, int]:
    """Return the number of operations that each process group of this process has begun, by the name of the group.

    Also return the number of groups, and of messages from rank to rank in the call that runs: those of a failed call may
    wait for a receiver, and counts do not show it.
    """
    numbers = {_GROUPS: number_of_groups(), MESSAGES: _messages}
    for group in groups_of_process():
        with contextlib.suppress(RuntimeError):  # its backend does not count
            numbers[str(group.group_name)] = sequence_number_of(group)
    return numbers


def count_messages() -> None:
    """Count the messages from rank to rank that this process sends or receives from now on."""
    for name in ("send", "recv", "recv_anysource"):
        setattr(dist.ProcessGroup, name, _count_calls(getattr(dist.ProcessGroup, name)))


def forget_messages() -> None:
    """Start to count from 0."""
    global _messages
    _messages = 0


def _count_calls(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _messages
        _messages += 1
        return operation(*args, **kwargs)

    return counted


def _tcp_sockets() -> Iterator[tuple[socket.socket, Connection]]:
    """Yield the connected TCP sockets of this process, each as a copy that is closed afterwards."""
    for number in [int(each.name) for each in _OPEN_FILES.iterdir()]:
        with contextlib.suppress(OSError):  # closed since, not a socket, or not connected
            copy = os.dup(number)
            try:
                sock = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock, (sock.getsockname()[:2], sock.getpeername()[:2])
