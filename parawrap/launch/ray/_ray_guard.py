"""The launching process's view of a node's guard on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from parawrap.launch.coordinator._event_loop import Loop
from parawrap.launch.guard._guard import CallWatcher, Watcher
from parawrap.launch.messages._line import Arrival, Message
from parawrap.launch.messages._pickle_values import memory_file
from parawrap.launch.rank._rank_assignment import Assignment
from parawrap.launch.ray._node_messages import Inbox, pack_message

__all__ = ["RayGuard"]

_log = logging.getLogger("parawrap.launch")

_LOST = "its node, which no longer answers"
_MOST_TRIES = 3  # Ray may place an actor on a lost node, because it notices a loss only after some seconds


class RayGuard:
    """The ranks of one node, which the actor of the node guards. Used by the thread of its loop.

    If Ray reports that the actor died, the ranks of the node are lost. The next `start` then starts another actor for the
    node's share of the resources. Ray chooses the machine. Until the actor has started, messages to ranks are held back.

    Args:
        ray: The ray module.
        loop: The loop that handles the events of the node.
        number: The node's number.
        start_actor: Returns a new actor for this node.

    Attributes:
        host: The node's hostname; empty until the actor has started.
        address: The node's address in the Ray cluster; empty until the actor has started.
        has_started: True if the actor and the guard process have started.
        failure: The reason why the actor ended; None while it runs.
        ending: A Ray reference that is ready once the guard process has ended. None before `close`.
    """

    def __init__(self, ray: Any, loop: Loop, number: int, start_actor: Callable[[int], Any]) -> None:
        self._ray = ray
        self._loop = loop
        self._number = number
        self._start_actor = start_actor
        self._watchers: dict[int, Watcher] = {}
        self._held: dict[int, list[bytes]] = {}
        self._files: dict[int, int] = {}
        self.host = self.address = ""
        self.ending: Any = None
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        self._tries += 1
        self._started = self._over = 0
        self.has_started = False
        self.failure: str | None = None
        self._actor = self._start_actor(self._number)
        events = self._actor.events.options(concurrency_group="events", num_returns="streaming").remote()
        read = partial(_read, self._ray, events, self._loop, partial(self._on_event, self._actor))
        threading.Thread(target=read, name=f"parawrap-launch-node-{self._number}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return not self._watchers and (self._over == self._started or self.failure is not None)

    @property
    def is_lost(self) -> bool:
        return self.failure is not None and not self._ray.is_initialized()  # otherwise `start` replaces it

    def start(self, assignment: Assignment, watcher: Watcher) -> None:
        """Start a rank on the node."""
        rank = assignment.place.global_rank
        if self.failure is not None and self._ray.is_initialized():
            self._tries = 0
            self._begin()
        self._watchers[rank] = watcher
        if self.failure is not None:
            self._loop.call_soon(partial(self._end, rank, None, _LOST))
        elif self.has_started:
            self._post_start(pack_message("start", assignment))
        else:
            self._held[rank] = [pack_message("start", assignment)]

    def send(self, rank: int, word: str, body: Any = None) -> None:
        if rank not in self._watchers:
            return
        if rank not in self._held:
            self._post("send", rank, word, body)
        elif word == "end":
            self._drop_held(rank)
        else:
            self._held[rank].append(pack_message("send", rank, word, body))

    def call(self, rank: int, message: Message, pickled: memoryview, buffers: list[memoryview]) -> None:
        """Send a request to a rank that stays. Its tensors travel as bytes."""
        if rank in self._watchers:
            self._post("call", rank, message.word, message.number, bytes(pickled), [bytes(each) for each in buffers])

    def end_calls(self, rank: int) -> None:
        if rank in self._watchers:
            self._post("end calls", rank)

    def kill(self, rank: int) -> None:
        if rank in self._held:
            self._drop_held(rank)
        elif rank in self._watchers:
            self._post("kill", rank)

    def give_up(self) -> None:
        if not self.is_over:
            self._lose("it did not report the end of its ranks")

    def close(self) -> None:
        """Order the guard process to end, and to kill the ranks that still run. `ending` is ready once it has."""
        if self.failure is None and self.has_started and self._ray.is_initialized():
            self._post("close")
            self.ending = self._actor.close.remote()
            self._close_files()
        else:
            self._lose("the launch ended")

    def _post_start(self, message: bytes) -> None:
        self._started += 1
        self._post_bytes(message)

    def _post(self, *message: Any) -> None:
        self._post_bytes(pack_message(*message))

    def _post_bytes(self, data: bytes) -> None:
        if self.failure is None and self._ray.is_initialized():  # after a shutdown, any call would start Ray again
            self._actor.send.remote(data)

    def _drop_held(self, rank: int) -> None:
        """Cancel a rank before its node has started. Report it later, because the coordinator does not expect it now."""
        del self._held[rank]
        self._loop.call_soon(partial(self._end, rank, None))

    # -- reports from the node

    def _on_event(self, actor: Any, messages: list[tuple[str, tuple[Any, ...]]], failure: str | None) -> None:
        if actor is not self._actor or self.failure is not None:  # from an actor that was lost or killed
            return
        for word, values in messages:
            self._on_message(word, *values)
        if failure is not None and not self.has_started and self._tries < _MOST_TRIES and self._ray.is_initialized():
            self._begin()
        elif failure is not None:
            _log.warning("node %d (%s) of a launch is lost: %s", self._number, self.host, failure)
            self._lose(failure)
        elif self.failure is None and self._ray.is_initialized():
            actor.acknowledge.remote()

    def _on_message(self, word: str, *values: Any) -> None:
        if word == "hello":
            self._on_hello(*values)
        elif word == "over":
            (self._over,) = values
        elif word == "unable":
            self._report_trouble(f"node {self._number}: {values[0]}")
            self._lose(values[0])
        elif word == "trouble":
            self._report_trouble(f"on node {self._number} ({self.host}), {values[0]}")
        elif values[0] in self._watchers:
            self._on_report(word, *values)

    def _on_hello(self, host: str, address: str) -> None:
        self.host, self.address, self.has_started = host, address, True
        self._tries = 0
        for start, *others in self._held.values():
            self._post_start(start)
            for message in others:
                self._post_bytes(message)
        self._held.clear()

    def _on_report(self, word: str, rank: int, *values: Any) -> None:
        watcher = self._watchers[rank]
        if word == "started":
            watcher.on_start(rank, *values)
        elif word == "output":
            watcher.on_output(rank, *values)
        elif word == "piece":
            self._append_piece(rank, *values)
        elif word == "answer":
            self._on_answer(rank, *values)
        elif word == "word":
            name, body = values
            watcher.on_word(rank, name, body, self._files.pop(rank, None))
        else:
            self._end(rank, *values)

    def _on_answer(self, rank: int, word: str, number: int, pickled: bytes, buffers: list[bytearray]) -> None:
        file, memory = self._files.pop(rank, None), [memoryview(each) for each in buffers]
        answer = Arrival(word, number, 0, 0, file, memoryview(pickled), memory)
        cast("CallWatcher", self._watchers[rank]).on_answer(rank, answer)

    def _append_piece(self, rank: int, data: bytes) -> None:
        """Append to the file that is attached to the rank's next message."""
        if rank not in self._files:
            self._files[rank] = memory_file("parcel")
        with open(self._files[rank], "ab", closefd=False) as file:
            file.write(data)

    def _report_trouble(self, what: str) -> None:
        for watcher in set(self._watchers.values()):
            watcher.on_trouble(what)

    # -- the end of ranks and of the node

    def _end(self, rank: int, code: int | None, lost_with: str = "") -> None:
        if rank in self._watchers:
            self._watchers.pop(rank).on_end(rank, code, lost_with)

    def _lose(self, failure: str) -> None:
        """Kill the actor. Its guard process then ends the ranks, if the machine still runs."""
        if self.failure is not None:
            return
        self.failure = failure
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):  # it has ended
                self._ray.kill(self._actor)
        self._held.clear()
        self._close_files()
        for rank in list(self._watchers):
            self._end(rank, None, _LOST)

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _read(ray: Any, events: Any, loop: Loop, report: Callable[[list[Any], str | None], None]) -> None:
    """Read the stream of a node's actor, and report messages, then the reason why the stream ended. Runs in a thread."""
    inbox = Inbox()
    try:
        for reference in events:
            loop.call_soon(partial(report, inbox.take(ray.get(reference)), None))
        failure = "its guard process ended"
    except BaseException as error:  # noqa: BLE001 (Ray raises many types: also SystemExit, after a shutdown)
        failure = f"its actor died: {error}"
    loop.call_soon(partial(report, [], failure))
