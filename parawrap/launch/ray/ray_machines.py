"""The nodes of a Ray cluster as machines of a launch.

Ray reserves the resources and starts an actor per node. The server of the actor forks the ranks.
Each rank has five TCP connections to the launching process, in place of the sockets and pipes that
a rank has on one machine. A random token, which Ray carries to the nodes, protects the port. If the
launching process dies, Ray ends the actors, and their servers end the ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from parawrap.errors import LaunchError
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.machines import Hosts, Machines
from parawrap.launch.ray._node_actor import CONNECTIONS, RANK_BYTES
from parawrap.launch.ray.reservation import Reservation
from parawrap.processes.fork_server import Connections
from parawrap.processes.settings import Settings
from parawrap.processes.torch_groups import LOOPBACK, open_tcp_store

_TOKEN_BYTES = 32  # 256 bits cannot be guessed
_HELLO_BYTES = _TOKEN_BYTES + RANK_BYTES + 1  # the token, the rank, and the kind of connection
_ARRIVAL_S = 60.0  # until all connections have arrived; a guess that no test has contradicted
_POLL_S = 0.2  # between two looks for a cancel, while connections arrive
_NOTICE_S = 8.0  # until Ray reports a lost node, which takes it about five seconds
_SERVER_EXIT_S = 10.0  # until the servers have ended, which have no ranks left
# Ray may place an actor on a lost node, because it notices a loss only after some seconds
_MOST_TRIES = 3
_log = logging.getLogger("parawrap.launch")


class RayMachines(Machines):
    """Nodes of a Ray cluster.

    Raises:
        LaunchError: If Ray is missing, or the cluster is too small for the platform, even when
            idle.
    """

    def __init__(self, platform: PlatformFields) -> None:
        super().__init__(platform)
        self.reservation = Reservation(platform)

    @contextlib.contextmanager
    def open(self, is_cancelled: Callable[[], bool]) -> Iterator[Hosts | None]:
        platform, reservation, ray = self.platform, self.reservation, self.reservation.ray
        while not reservation.request_and_wait():  # each turn waits, so this loop is not busy
            if is_cancelled():
                yield None
                return
        nodes: list[_Node] = []
        try:
            # Start the actors. Not a comprehension: after an error, those before it are closed
            for number in range(platform.n_nodes):
                nodes.append(_Node(reservation, number))  # noqa: PERF401
            for node in nodes:
                if not node.await_start(is_cancelled):
                    yield None
                    return

            # Open the port of the ranks' connections, and the store where they meet. If all ranks
            # are on this machine, no other machine can reach them
            here = str(ray.util.get_node_ip_address())
            is_local = platform.master_addr is None and all(node.address == here for node in nodes)
            own_address = LOOPBACK if is_local else here
            store = open_tcp_store(
                platform.master_addr or own_address,
                platform.master_port,
                on_all_interfaces=not is_local,
            )
            starting = _ActorStarter(ray, platform, nodes, own_address, is_cancelled)
            with store as store_address, starting as starter:
                yield Hosts(starter, store_address)
        finally:
            if nodes and ray.is_initialized():  # after a shutdown, a call would start Ray again
                closed = [node.actor.close.remote() for node in nodes]
                ray.wait(closed, num_returns=len(nodes), timeout=_SERVER_EXIT_S)
                for node in nodes:
                    ray.kill(node.actor)

    def close(self) -> None:
        self.reservation.end()

    def settings(self) -> Settings:
        return Settings.for_other_machines()


class _Node:
    """One node of an attempt, and the actor that starts its ranks."""

    def __init__(self, reservation: Reservation, number: int) -> None:
        self.number = number
        self._reservation = reservation
        self.actor = reservation.start_actor(number)
        self.host = ""  # the hostname, for messages
        self.address = ""  # the IP address, for connections
        # Set once Ray reports the end of its actor
        self.is_lost = threading.Event()

    def await_start(self, is_cancelled: Callable[[], bool]) -> bool:
        """Wait until the server of the node can fork. Start the actor again if it ends.

        Return False if `is_cancelled` returns True before.

        Raises:
            LaunchError: If the server cannot start, or if the actor ends again and again.
        """
        ray = self._reservation.ray
        tries = 1
        while True:
            started = self.actor.started.remote()
            while not self._reservation.wait_briefly(started):
                if is_cancelled():
                    return False
            try:
                self.host, self.address, failure = ray.get(started)
                break
            except ray.exceptions.RayError as error:
                if tries == _MOST_TRIES:
                    msg = f"node {self.number}: its actor ended: {error}"
                    raise LaunchError(msg) from error
                tries += 1
                self.actor = self._reservation.start_actor(self.number)
        if failure:
            msg = f"node {self.number}: {failure}"
            raise LaunchError(msg)
        return True


class _ActorStarter:
    """Starts the ranks of one attempt, which connect to a port.

    Implements `RankStarter` of the pool.
    """

    def __init__(
        self,
        ray: Any,
        platform: PlatformFields,
        nodes: list[_Node],
        own_address: str,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._ray = ray
        self._is_cancelled = is_cancelled
        # When all connections must be here. The time limit of the launch counts from here, too
        limit_s = math.inf if platform.timeout_min is None else 60 * platform.timeout_min
        self._until = time.monotonic() + min(_ARRIVAL_S, limit_s)
        self._per_node = platform.ranks_per_node
        self._nodes = nodes
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        backlog = CONNECTIONS * platform.world_size  # all may arrive at once
        self._listener = socket.create_server((own_address, 0), backlog=backlog)
        self._listener.setblocking(False)
        # New connections, and the bytes that each has sent. This object owns the sockets in it and
        # in the next two
        self._hellos: dict[socket.socket, bytes] = {}
        # Connections that have sent the token, by rank, and by kind as `start` names the kinds
        self._arrived: dict[int, dict[int, socket.socket]] = {}
        # Duplicates of the status connections that `start` hands over, by rank. They can end the
        # connections of a lost node
        self._status: dict[int, socket.socket] = {}
        self._is_closed = False  # set before the actors end: their end is no loss then

    def __enter__(self) -> Self:
        for node in self._nodes:
            ranks = range(node.number * self._per_node, (node.number + 1) * self._per_node)
            node.actor.start.remote(self._listener.getsockname()[:2], self._token, ranks)
            name = f"parawrap-ray-node-{node.number}"
            threading.Thread(target=self._await_end, args=(node,), name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._listener.close()
        for each in (*self._hellos, *self._status.values()):
            each.close()
        for by_kind in self._arrived.values():
            for each in by_kind.values():
                each.close()

    def start(self, rank: int) -> Connections:
        node = self._nodes[rank // self._per_node]
        place = f"node {node.number}, {node.host}"
        while len(self._arrived.get(rank, ())) < CONNECTIONS:
            if self._is_cancelled():
                msg = f"the launch was cancelled before rank {rank} had connected"
                raise LaunchError(msg)
            if node.is_lost.is_set():
                msg = f"{place} was lost before rank {rank} had connected: its actor died"
                raise LaunchError(msg)
            if time.monotonic() >= self._until:
                msg = (
                    f"rank {rank} on {place} did not connect to this process in time: a firewall "
                    "between the nodes may be the reason, or a very busy node"
                )
                raise LaunchError(msg)
            self._accept(_POLL_S)
        # Hand the connections over to the pool
        by_kind = self._arrived.pop(rank)
        status, data, control, *streams = [by_kind[kind] for kind in range(CONNECTIONS)]
        self._status[rank] = status.dup()
        # `_await_end` may have looked at `_status` before this rank was in it
        if node.is_lost.is_set():
            with contextlib.suppress(OSError):  # the connection has ended already
                status.shutdown(socket.SHUT_RDWR)
        outputs = tuple(each.detach() for each in streams)
        return Connections(place, data, control, status.detach(), outputs)

    def _accept(self, wait_s: float) -> None:
        """Accept connections, and read from those before, for at most this time.

        A connection counts once it has sent the token. Other connections, such as those of a port
        scanner, delay no rank.
        """
        poll = select.poll()
        waiting = {each.fileno(): each for each in (self._listener, *self._hellos)}
        for file in waiting:
            poll.register(file, select.POLLIN)
        for file, _event in poll.poll(1000 * wait_s):
            if waiting[file] is not self._listener:
                self._read_hello(waiting[file])
                continue
            with contextlib.suppress(OSError):  # the connection has gone again
                connection, _address = self._listener.accept()
                connection.setblocking(False)
                self._hellos[connection] = b""

    def _read_hello(self, connection: socket.socket) -> None:
        """Read the token, the rank, and the kind of a connection, as far as they have come.

        Close it if the token is wrong, or if the connection ends before.
        """
        hello = self._hellos[connection]
        data = b""  # also after an error
        with contextlib.suppress(OSError):
            data = connection.recv(_HELLO_BYTES - len(hello))
        hello += data
        if data and len(hello) < _HELLO_BYTES:
            self._hellos[connection] = hello
            return
        del self._hellos[connection]
        # Not ==, whose time would help to guess the token
        has_token = hmac.compare_digest(hello[:_TOKEN_BYTES], self._token)
        if not (data and has_token):
            connection.close()
            return
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank, kind = int.from_bytes(hello[_TOKEN_BYTES:-1], "little"), hello[-1]
        self._arrived.setdefault(rank, {})[kind] = connection

    def _await_end(self, node: _Node) -> None:
        """Wait for the end of an actor. If Ray has lost it, end the connections of its ranks.

        TCP would keep them open for minutes. Runs in a thread of its own.
        """
        try:
            self._ray.get(node.actor.stay.remote())  # raises when the actor ends
        except Exception as error:  # noqa: BLE001 (also a shutdown of Ray)
            if self._is_closed:
                return
            node.is_lost.set()
            _log.warning("node %d of a launch is lost: its actor died: %s", node.number, error)
            for rank, status in list(self._status.items()):  # a copy: `start` may add to it
                if rank // self._per_node == node.number:
                    with contextlib.suppress(OSError):
                        status.shutdown(socket.SHUT_RDWR)

    def kill(self, rank: int, pid: int) -> None:
        with contextlib.suppress(Exception):  # Ray was shut down
            if pid:  # 0 before the rank has reported it
                self._nodes[rank // self._per_node].actor.kill.remote(pid)

    def describe(self, rank: int) -> str:
        """Return what a rank was lost with. Ray reports the loss of a node some seconds later."""
        node = self._nodes[rank // self._per_node]
        if node.is_lost.wait(_NOTICE_S):
            return "its node, which no longer answers"
        return f"the process on node {node.number} that forks its ranks, while Ray kept the node"
