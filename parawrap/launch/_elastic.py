"""The watch over ranks that an elastic agent starts, and starts anew when one of them fails.

torch.distributed.elastic decides when the group is restarted, and how often. The ranks it starts call the parent, and are
from then on watched, told and heard like any others; the last attempt is what counts.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from parawrap.launch._charge import Charge
from parawrap.launch._leftovers import kill_group
from parawrap.launch._orders import Orders
from parawrap.launch._outcomes import Died, Ended, Outcome, Raised, first_failure
from parawrap.launch._output import Transcript
from parawrap.launch._platform import Platform
from parawrap.launch._server import STATUS
from parawrap.launch._starters import interpreter, status_pipe_of
from parawrap.launch._supervisor import Supervisor
from parawrap.launch._wire import Message, Wire, close_in_forked_children

__all__ = ["ElasticSupervisor"]

_LAST_WORDS = 4000


class ElasticSupervisor(Supervisor):
    """Watches the attempts of one launch, one after the other; lives as long as the launch.

    Args:
        platform: of the launch.
        folder: a private one, for the socket that ranks call and for the agent's own rendezvous.
        payload: the packed call.
        orders: gives the orders of a rank at a restart.
        transcripts: one a rank; all attempts write into it.
    """

    def __init__(
        self,
        platform: Platform,
        folder: Path,
        payload: int,
        orders: Callable[[int, int], Orders],
        transcripts: list[Transcript],
    ) -> None:
        super().__init__(platform, lambda _: None)
        self._payload = payload
        self._orders = orders
        self._transcripts = transcripts
        self._attempt = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "line"))
        self._listener.listen(platform.world_size)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_call)
        self._agent = _Agent(platform, folder)
        self._selector.register(self._agent.wire, selectors.EVENT_READ, self._on_agent_message)
        self._selector.register(self._agent.status, selectors.EVENT_READ, self._on_agent_end)

    def _is_over(self) -> bool:
        return self._agent.has_ended and super()._is_over()

    def end(self) -> None:
        super().end()
        if not self.all_returned():
            self._agent.hang_up()

    def _kill(self) -> None:
        super()._kill()
        self._agent.kill()

    # -- what happens

    def _on_call(self) -> None:
        """A rank calls. Which one, it says as soon as it can."""
        line, _ = self._listener.accept()
        wire = Wire(line)
        close_in_forked_children(wire)
        self._selector.register(wire, selectors.EVENT_READ, partial(self._on_greeting, wire))

    def _on_greeting(self, wire: Wire) -> None:
        message = wire.receive()
        self._selector.unregister(wire)
        if message is None or message.word != "hello" or self._kill_at is not None:
            wire.close()  # the rank ends when nobody gives it orders
            for file in () if message is None else message.files:
                os.close(file)
        else:
            self._take(wire, message)

    def _take(self, wire: Wire, hello: Message) -> None:
        rank, restart = hello.body["rank"], hello.body["restart"]
        if restart > self._attempt:
            self._begin_attempt(restart)
        charge = Charge(rank, wire, self._transcripts[rank], hello.body["pid"])
        self.watch(charge)
        self._on_hello(charge, hello.files)
        wire.send("orders", self._orders(rank, restart), (self._payload,))

    def _begin_attempt(self, restart: int) -> None:
        """The agent has ended the last attempt; what is not known of its end yet does not matter any more."""
        for charge in list(self._charges.values()):
            if charge.wire.fileno() >= 0:
                self._hang_up(charge)
        self.history.append(_told(self._attempt, self.outcomes()))
        self._attempt = restart
        self._last_sign = time.monotonic()
        self._end_at = None
        with self._access:
            self._charges.clear()

    def _hang_up(self, charge: Charge) -> None:
        """The agent waits for the rank's process; here, the end of its line is its end."""
        super()._hang_up(charge)
        self._bury(charge, None)

    def _settle(self, charge: Charge, outcome: Outcome) -> None:
        told_by_agent = isinstance(outcome, Died) and outcome.signal is not None and not charge.told_to_end
        super()._settle(charge, Ended(outcome.at) if told_by_agent else outcome)

    def _on_failure(self, first: Outcome) -> None:
        """End the others of this attempt; the agent sees to the next. Echoes are left to it altogether."""
        if isinstance(first, Raised) and first.is_echo:
            return
        for rank in self._alive:
            if not self._charges[rank].told_to_end:
                self._charges[rank].tell_to_end()

    def _on_agent_message(self) -> None:
        message = self._agent.wire.receive()
        if message is None:
            self._selector.unregister(self._agent.wire)
            return
        with self._access:
            for rank, code in message.body.items():
                outcome = self._charges[rank].outcome if rank in self._charges else None
                if isinstance(outcome, Died) and not outcome.by_sys_exit:
                    known = Died.of(code, at=outcome.at, pid=outcome.pid, last_words=outcome.last_words)
                    self._charges[rank].outcome = known

    def _on_agent_end(self) -> None:
        self._selector.unregister(self._agent.status)
        while self._agent.wire in self._selector.get_map():
            self._on_agent_message()
        code = self._agent.reap()
        if first_failure(self.outcomes()) is None and not self.all_returned():
            self.broken = f"the elastic agent ended with {code}; it wrote:\n{self._agent.last_words()}"

    def _close(self) -> None:
        self._agent.kill()
        if self._agent.wire in self._selector.get_map():
            self._selector.unregister(self._agent.wire)
        self._agent.close()
        self._selector.unregister(self._listener)
        self._listener.close()
        super()._close()


class _Agent:
    """torchrun in a process of its own; belongs to the thread that watches."""

    def __init__(self, platform: Platform, folder: Path) -> None:
        rank = interpreter(f"from parawrap.launch._elastic_rank import call; call({str(folder / 'line')!r})")
        arguments = [
            "--nnodes=1",
            f"--nproc-per-node={platform.world_size}",
            f"--max-restarts={platform.max_restarts}",
            "--monitor-interval=0.1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={folder / 'rendezvous'}",
            "--rdzv-conf=store_type=file",
            f"--log-dir={folder / 'logs'}",
            "--no-python",
            *rank,
        ]
        ours, its = socket.socketpair()
        self.wire = Wire(ours)
        close_in_forked_children(self.wire)
        self._written = tempfile.TemporaryFile()  # noqa: SIM115
        with its:
            process = subprocess.Popen(
                interpreter(f"from parawrap.launch._agent import serve; serve({arguments!r}, {platform.grace_s!r})"),
                stdin=its.fileno(),
                stdout=self._written,
                stderr=self._written,
                start_new_session=True,
            )
        self._pid = process.pid
        self.status = status_pipe_of(process.wait)
        self.has_ended = False

    def hang_up(self) -> None:
        """Have it end its ranks, and itself."""
        self.wire.send("end")

    def kill(self) -> None:
        if not self.has_ended:
            kill_group(self._pid)

    def reap(self) -> int:
        """How it ended, once its status can be read."""
        data = os.read(self.status, STATUS.size)
        self.has_ended = True
        return int(STATUS.unpack(data)[0]) if len(data) == STATUS.size else 1

    def last_words(self) -> str:
        """The end of what it wrote."""
        size = self._written.seek(0, os.SEEK_END)
        self._written.seek(max(0, size - _LAST_WORDS))
        return self._written.read().decode(errors="replace")

    def close(self) -> None:
        self.wire.close()
        os.close(self.status)
        self._written.close()


def _told(attempt: int, outcomes: dict[int, Outcome]) -> str:
    failed = first_failure(outcomes)
    if failed is None:
        return f"attempt {attempt} was given up"
    outcome = outcomes[failed]
    assert isinstance(outcome, (Raised, Died))
    return f"attempt {attempt} failed: rank {failed} {'raised ' if isinstance(outcome, Raised) else ''}{outcome.summary}"
