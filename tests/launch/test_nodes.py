"""Nodes on other machines: results of their ranks, broken connections, and attackers on the network."""

from __future__ import annotations

import os
import pickle
import re
import socket
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from parawrap.errors import LaunchError
from parawrap.launch._packed_call import Job
from parawrap.launch._platform import Platform
from parawrap.launch.clusters import _connections, _remote_node
from parawrap.launch.clusters._connections import Address, Front, dial, interface_of, own_addresses
from parawrap.launch.clusters._node_agent import NodeAgent
from parawrap.launch.clusters._remote_node import await_nodes
from parawrap.launch.clusters._send_queue import SendQueue
from parawrap.launch.coordinator._attempts import Attempts
from parawrap.launch.coordinator._attempts_backend import assignments_of
from parawrap.launch.coordinator._ending import results_or_error
from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.guard._start_methods import starter_named
from parawrap.launch.messages._channel import receive_exactly
from parawrap.launch.rank._rank_assignment import Surroundings
from tests.launch.processes import PATIENCE_S, assert_gone, eventually, is_gone, pids_in, report_pid_function

LOOPBACK = "127.0.0.1"
TOKEN = b"t" * 32


def cluster(**fields):
    """Return a platform of two nodes with two ranks each, without a process group."""
    return Platform(launcher="slurm", device="cpu", n_nodes=2, n_cpus=2, ipc_groups=None, **fields)


def quiet_transcripts():
    return [Transcript(rank, prefix="", shown=False, folder=None) for rank in range(4)]


class Nodes:
    """Two node agents in threads of this process, connected to a front."""

    def __init__(self, job, cleanup):
        self.job = job
        self._payload = job.packed()
        cleanup.callback(os.close, self._payload)
        self.front = cleanup.enter_context(closing(Front([LOOPBACK], TOKEN)))
        self.wires = [connect(self.front) for _ in range(2)]
        self._agents = [threading.Thread(target=self._run_agent, args=(number,)) for number in range(2)]
        cleanup.callback(self._end)

    def _run_agent(self, number):
        wire = self.wires[number][0]
        NodeAgent(wire, number, starter_named("forkserver"), self._payload, self.job.platform.grace_s).run()

    def _end(self):
        for _, ours in self.wires:
            ours.close()
        for agent in self._agents:
            agent.join(PATIENCE_S)
            assert not agent.is_alive()

    def run(self, transcripts=None):
        """Return a run of the job on the nodes, not yet started."""
        for agent in self._agents:
            agent.start()
        lines = iter([ours for _, ours in self.wires])
        loop = Loop()
        nodes = await_nodes(Lines(lines), loop, range(2), lambda: None)
        platform = self.job.platform
        written = transcripts or [
            Transcript(rank, prefix="", shown=False, folder=None) for rank in range(platform.world_size)
        ]
        orders = assignments_of(platform, None, Surroundings.here().without_environ())
        return Attempts(self.job.name, platform, loop, nodes, orders, written)


class Lines:
    """A front with callers that are already authenticated."""

    def __init__(self, lines):
        self._lines = lines

    def accept(self, patience_s):
        return next(self._lines, None)


def connect(front):
    """Connect to a front, and return the caller's end and the front's end of the line."""
    theirs = dial_in_thread(front.address)
    ours = eventually(lambda: front.accept(0.1), "a caller")
    return theirs.result(PATIENCE_S), ours


def dial_in_thread(address):
    """Dial an address in a thread, and return a future of the caller's end of the line."""
    called = Future()
    threading.Thread(target=lambda: called.set_result(dial(address))).start()
    return called


def is_closed_by_peer(line):
    """Wait until the other end has closed a line, and return True."""
    line.settimeout(PATIENCE_S)
    try:
        while line.recv(1024):
            pass
    except ConnectionResetError:
        pass
    return True


@contextmanager
def nodes_for(function, *args, **fields):
    with ExitStack() as cleanup:
        yield Nodes(Job(cluster(**fields), function, args), cleanup)


def outcome_of(nodes, transcripts=None):
    """Run the launch and return its results or its error."""
    run = nodes.run(transcripts)
    run.begin()
    return results_or_error(nodes.job.name, nodes.job.platform, run.run())


def test_ranks_of_other_nodes_run_and_return():
    """Each rank has its node and local rank, and its output and large results arrive."""

    def place(big):
        from parawrap import current_rank

        rank = current_rank()
        print("in rank", rank.global_rank)
        return (rank.global_rank, rank.node, rank.local_rank), big + rank.global_rank

    transcripts = quiet_transcripts()
    with nodes_for(place, torch.zeros(1_000_000)) as nodes:
        results = outcome_of(nodes, transcripts)
    assert [result[0] for result in results] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert all(torch.equal(result[1], torch.full((1_000_000,), float(rank))) for rank, result in enumerate(results))
    assert [transcript.text() for transcript in transcripts] == [f"in rank {rank}\n" for rank in range(4)]


def test_an_exception_on_another_node_names_the_node():
    """The other ranks end, and a note names the node."""

    def fails():
        from parawrap import current_rank

        if current_rank().global_rank == 3:
            raise KeyError("three")
        threading.Event().wait()

    with nodes_for(fails) as nodes:
        error = outcome_of(nodes)
    assert repr(error) == "KeyError('three')"
    assert f"raised in rank 3 of 4 (node 1, {socket.gethostname()})" in error.__notes__[0]


def test_a_broken_connection_loses_the_ranks_of_its_node(tmp_path):
    """The error names the node's first rank, all other ranks end, and the node ends its own ranks."""
    report_pid = report_pid_function()

    def waits():
        report_pid(tmp_path)
        threading.Event().wait()

    with nodes_for(waits, grace_s=0.5) as nodes:
        run = nodes.run()
        run.begin()
        watching = threading.Thread(target=lambda: endings.append(run.run()))
        endings = []
        watching.start()
        pids = pids_in(tmp_path, 4)
        nodes.wires[1][0]._socket.shutdown(socket.SHUT_RDWR)
        watching.join(PATIENCE_S)
        assert_gone(pids, PATIENCE_S)
    error = results_or_error("waits", nodes.job.platform, endings[0])
    assert str(error).startswith("rank 2 of 4 was lost with its node, which no longer answers (node 1, ")


def test_ranks_end_when_the_watching_process_hangs_up(tmp_path):
    """The agent ends its ranks and kills the ranks that do not end within ``grace_s``."""
    report_pid = report_pid_function()

    def stays():
        report_pid(tmp_path)
        while True:
            with suppress(BaseException):
                threading.Event().wait()

    with nodes_for(stays, grace_s=0.2) as nodes:
        run = nodes.run()
        run.begin()
        pids = pids_in(tmp_path, 4)
        run.close()
        assert_gone(pids, PATIENCE_S)


def test_a_rank_that_cannot_start_ends_the_launch(monkeypatch):
    """The error names the node and the reason."""

    def refuse(*_):
        msg = "no more processes"
        raise LaunchError(msg)

    with nodes_for(int) as nodes:
        run = nodes.run()
        monkeypatch.setattr("parawrap.launch.guard._guard.LocalGuard.start", refuse)
        run.begin()
        error = results_or_error("int", nodes.job.platform, run.run())
    assert isinstance(error, LaunchError)
    assert re.match(r"on node [01] \(.+\), the process of rank [0-3] cannot be started: no more processes", str(error))


def test_a_caller_without_the_token_is_dropped():
    """A wrong answer, a short answer, and silence are rejected, and the next caller is accepted."""
    with closing(Front([LOOPBACK], TOKEN)) as front, ExitStack() as strangers:
        for answer in (b"x" * 64, b"short", b""):
            stranger = strangers.enter_context(socket.create_connection((LOOPBACK, front.address.port)))
            stranger.sendall(answer)
            if answer == b"short":
                stranger.shutdown(socket.SHUT_WR)
        wrong_token = dial_in_thread(replace(front.address, token=b"x" * 32))
        assert front.accept(0.5) is None
        assert wrong_token.result(PATIENCE_S) is None
        theirs, ours = connect(front)
        theirs.close()
        ours.close()


@contextmanager
def impostor(act):
    """Start a listener that runs `act(line)` for its first caller; yield its port and a future of the result of `act`."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        result = Future()

        def serve():
            line, _ = listener.accept()
            with line:
                line.settimeout(PATIENCE_S)
                result.set_result(act(line))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], result
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_an_impostor_learns_nothing_from_a_caller():
    """A process at the front's address gets neither the token nor an answer that the front would accept."""

    def record(line):
        line.sendall(bytes(64))
        answer = receive_exactly(line, 64)
        line.sendall(bytes(64))
        return answer

    with impostor(record) as (port, answer), closing(Front([LOOPBACK], TOKEN)) as front:
        assert dial(replace(front.address, port=port)) is None
        assert TOKEN not in answer.result(PATIENCE_S)
        with socket.create_connection((LOOPBACK, front.address.port)) as stranger:
            stranger.sendall(answer.result())
            assert front.accept(0.5) is None
            assert is_closed_by_peer(stranger)


def test_a_pickle_from_an_impostor_is_not_loaded(tmp_path):
    """A caller that reaches an impostor closes the line before it reads a message."""
    message = pickle.dumps(("start", Touch(tmp_path / "touched")))

    def pose(line):
        line.sendall(b"!" + struct.pack("<QB", len(message), 0) + message + bytes(64))
        return b""

    with impostor(pose) as (port, _):
        wire = dial(Address((LOOPBACK,), port, TOKEN))
        if wire is not None:
            wire.receive()
    assert wire is None
    assert not (tmp_path / "touched").exists()


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


class Relay:
    """A man in the middle between a caller and the front: it relays the handshake; the test controls all later messages."""

    def __init__(self, front, cleanup):
        self._listener = cleanup.enter_context(socket.create_server((LOOPBACK, 0)))
        called = dial_in_thread(replace(front.address, port=self._listener.getsockname()[1]))
        self.caller_side, _ = self._listener.accept()
        self.front_side = socket.create_connection((LOOPBACK, front.address.port))
        for side in (self.caller_side, self.front_side):
            side.settimeout(PATIENCE_S)
            cleanup.enter_context(side)
        assert front.accept(0) is None  # the front's nonce
        self.caller_side.sendall(receive_exactly(self.front_side, 32))
        self.front_side.sendall(receive_exactly(self.caller_side, 64))
        self.ours = cleanup.enter_context(closing(front.accept(PATIENCE_S)))
        self.caller_side.sendall(receive_exactly(self.front_side, 32))
        self.theirs = cleanup.enter_context(closing(called.result(PATIENCE_S)))

    def from_caller(self):
        """Return the bytes of the caller's next message."""
        return self._read(self.caller_side)

    def from_front(self):
        """Return the bytes of the front's next message."""
        return self._read(self.front_side)

    def _read(self, side):
        head = receive_exactly(side, 9 + 32)
        return head + receive_exactly(side, struct.unpack_from("<Q", head)[0] + 32)


@pytest.fixture
def relay():
    with closing(Front([LOOPBACK], TOKEN)) as front, ExitStack() as cleanup:
        yield Relay(front, cleanup)


def test_messages_pass_a_relay_unchanged(relay):
    """Messages arrive through a relay that changes nothing."""
    for number in range(3):
        relay.theirs.send("hello", number)
        relay.front_side.sendall(relay.from_caller())
        assert relay.ours.receive()[:2] == ("hello", number)
        relay.ours.send("tell", number)
        relay.caller_side.sendall(relay.from_front())
        assert relay.theirs.receive()[:2] == ("tell", number)


def test_a_changed_message_is_refused(relay, caplog):
    """A changed byte closes the line, and an error is logged."""
    relay.theirs.send("hello", 0)
    message = bytearray(relay.from_caller())
    message[len(message) // 2] ^= 1
    relay.front_side.sendall(message)
    assert relay.ours.receive() is None
    assert "wrong authentication code" in caplog.text


def test_the_length_of_a_message_is_checked_first(relay, caplog):
    """A changed length closes the line; the front does not wait for a message of that size."""
    relay.theirs.send("hello", 0)
    relay.front_side.sendall(struct.pack("<QB", 1 << 60, 0) + relay.from_caller()[9:])
    assert relay.ours.receive() is None
    assert "wrong authentication code" in caplog.text


def test_a_pickle_from_a_relay_is_not_loaded(relay, tmp_path, caplog):
    """A relay cannot add a message to an authenticated line."""
    data = pickle.dumps(("word", Touch(tmp_path / "touched")))
    relay.front_side.sendall(struct.pack("<QB", len(data), 0) + data + bytes(64))
    assert relay.ours.receive() is None
    assert "wrong authentication code" in caplog.text
    assert not (tmp_path / "touched").exists()


def test_repeated_and_reflected_messages_are_refused(relay):
    """A message that a relay repeats or sends back to its sender closes the line."""
    relay.theirs.send("hello", 0)
    message = relay.from_caller()
    relay.front_side.sendall(2 * message)
    assert relay.ours.receive().word == "hello"
    assert relay.ours.receive() is None
    relay.caller_side.sendall(message)
    assert relay.theirs.receive() is None


def test_silent_callers_do_not_delay_a_node(monkeypatch):
    """A node connects at once, although 20 connected strangers send nothing."""
    monkeypatch.setattr(_connections, "_DIAL_S", PATIENCE_S)
    with closing(Front([LOOPBACK], TOKEN)) as front, ExitStack() as strangers:
        for _ in range(20):
            strangers.enter_context(socket.create_connection((LOOPBACK, front.address.port)))
        theirs = dial_in_thread(front.address)
        began = time.monotonic()
        ours = front.accept(PATIENCE_S)
        took_s = time.monotonic() - began
        theirs.result().close()
        ours.close()
    assert took_s < PATIENCE_S / 2


def test_a_flood_of_callers_uses_few_descriptors(monkeypatch):
    """The front drops the oldest callers above a limit, and all callers after a timeout; a node can still connect."""
    monkeypatch.setattr(_connections, "_MOST_CALLERS", 8)
    monkeypatch.setattr(_connections, "_DIAL_S", 1.0)
    with closing(Front([LOOPBACK], TOKEN)) as front, ExitStack() as strangers:
        port = front.address.port
        flood = [strangers.enter_context(socket.create_connection((LOOPBACK, port))) for _ in range(100)]
        before = psutil.Process().num_fds()
        assert front.accept(0.2) is None
        assert psutil.Process().num_fds() - before <= 8
        theirs, ours = connect(front)
        theirs.close()
        ours.close()
        assert front.accept(1.5) is None
        assert psutil.Process().num_fds() <= before
        for stranger in flood:
            assert is_closed_by_peer(stranger)


def test_a_caller_uses_the_first_address_that_works():
    """Addresses without a front are skipped; if no address works, `dial` returns None."""
    with closing(Front([LOOPBACK], TOKEN)) as front, socket.create_server((LOOPBACK, 0)) as other:
        port = front.address.port
        assert dial(Address((LOOPBACK,), other.getsockname()[1], TOKEN)) is None
        called = []
        hosts = ("127.0.0.2", LOOPBACK)  # the front listens only on the second
        caller = threading.Thread(target=lambda: called.append(dial(Address(hosts, port, TOKEN))))
        caller.start()
        ours = eventually(lambda: front.accept(0.1), "a caller")
        caller.join()
        assert called[0].addresses()[1] == LOOPBACK
        called[0].close()
        ours.close()


def test_an_unread_line_stays_open(monkeypatch):
    """Unread bytes fit into the buffers, so a reader that stops for longer than the silence limit loses nothing."""
    monkeypatch.setattr(_connections, "_SILENCE_S", 1)
    monkeypatch.setattr(_connections, "_PROBE_S", 1)
    monkeypatch.setattr(_connections, "_PROBES", 1)
    with closing(Front([LOOPBACK], TOKEN)) as front:
        theirs, ours = connect(front)
    queue = SendQueue(theirs)
    while not queue.is_full:
        queue.send("output", bytes(65536), 65536)
    threading.Event().wait(6)
    queue.send("end", None)
    words = []
    while words[-1:] != ["end"]:
        message = ours.receive()
        words.append(message.word)
        queue.acknowledge(65536)
    assert len(words) > 3
    theirs.close()
    ours.close()


def test_waiting_for_nodes_raises_the_error_of_its_check(monkeypatch):
    """An error of `check` closes the open lines. After the timeout, LaunchError names the missing nodes."""
    loop = Loop()
    with closing(Front([LOOPBACK], TOKEN)) as front:
        theirs, ours = connect(front)
        theirs.send("hello", (0, "here"))
        calls = iter([None, KeyError("in the way")])

        def check():
            error = next(calls)
            if error is not None:
                raise error

        with pytest.raises(KeyError, match="in the way"):
            await_nodes(Lines(iter([ours])), loop, range(2), check)
        assert theirs.receive() is None
        monkeypatch.setattr(_remote_node, "ARRIVAL_S", 0.0)
        with pytest.raises(LaunchError, match=r"node\(s\) 0, 1 did not connect within 0 seconds"):
            await_nodes(front, loop, range(2), lambda: None)
        theirs.close()
    loop.close()


def test_own_addresses_are_those_of_interfaces():
    """Each address belongs to an interface; loopback is included only if it is the only address."""
    addresses = own_addresses()
    assert addresses
    assert all(interface_of(address) is not None for address in addresses)
    assert addresses == [LOOPBACK] or LOOPBACK not in addresses
    assert interface_of("192.0.2.1") is None


def test_no_process_outlives_a_launch_on_nodes(tmp_path):
    """All ranks have ended when the launch ends."""
    report_pid = report_pid_function()

    with nodes_for(lambda: report_pid(tmp_path)) as nodes:
        outcome_of(nodes)
    assert all(map(is_gone, pids_in(tmp_path, 4)))
