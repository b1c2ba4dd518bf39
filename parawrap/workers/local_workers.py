"""Workers on this machine: ranks that stay, without process groups, each called alone.

::

    lanes ── data wire of each worker ──► worker: `serve`
                                            │
    thread of the block ◄── status, output ─┘

A lane reads and writes the data wire of its worker. The thread knows how processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import select
import signal
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.errors import LaunchError, RankDiedError, SessionError, add_note
from parawrap.launch import Platform, RankPlace
from parawrap.launch.set_up import RankSetUp
from parawrap.processes.events import Events
from parawrap.processes.fork_server import fork_server
from parawrap.processes.held_signals import HeldSignals
from parawrap.processes.latch import Latch
from parawrap.processes.members import Member, Members
from parawrap.processes.outcomes import Died, Outcome, Returned
from parawrap.processes.output import Printer, Transcript
from parawrap.processes.packing import Packer
from parawrap.processes.pickling import Packed
from parawrap.processes.rank_process import Assignment
from parawrap.processes.settings import Settings
from parawrap.processes.wire import LOST, Message, Wire
from parawrap.workers.worker import Form, ModelServer, ReceivedAnswers

# For the end of a process with a closed connection. A guess that no test has contradicted
_CLOSE_S = 5.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # in malloc.h
_log = logging.getLogger("parawrap.workers")


# -- in this process


class LocalWorkers:
    """Starts the workers of one block on this machine, and supervises them.

    They share its cores.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._threads = backend_of(devices[0].type).intra_op_threads(len(devices)) or 1
        self._starting = threading.Lock()  # of `_supervision`: two threads must not replace it
        # For `close`. Weak, because a worker that has ended belongs to its lane alone
        self._started: weakref.WeakSet[LocalWorker] = weakref.WeakSet()
        self._supervision: _Supervision | None = None  # the last one

    def start(self, lane: int, seed: int) -> LocalWorker:
        """Start the worker of a lane."""
        label = f"worker {lane} on {self.devices[lane]}"
        name = f"worker-{lane}"
        platform = Platform(
            device="cpu", n_cpus=1, launcher="local", ipc_groups=None, seed=None, name=name
        )
        set_up = RankSetUp(platform, RankPlace.of(0, ranks_per_node=1, n_nodes=1), store=None)
        serving = functools.partial(serve, str(self.devices[lane]), self._threads, seed)
        settings = Settings.here()
        assignment = Assignment(
            settings,
            set_up.enter,
            regroup=set_up.regroup,
            grace_s=_CLOSE_S,
            stays=True,
            serve=serving,
        )
        # Ctrl-C must not leave a process that is half noted. A start takes milliseconds, and the
        # first one the time to import torch
        held = HeldSignals(lambda: None)
        try:
            return self._start(lane, label, assignment)
        finally:
            held.end()

    def _start(self, lane: int, label: str, assignment: Assignment) -> LocalWorker:
        while True:  # the thread may end between the look and the start
            with self._starting:
                if self._supervision is None or self._supervision.has_ended:
                    self._supervision = _Supervision()
                worker = self._supervision.start(lane, label, assignment, self._started)
            if worker is not None:
                return worker

    def poll(self, workers: Sequence[Any], timeout_s: float) -> Collection[int]:
        """Wait until a worker has answered or ended, for a moment at most.

        Return the positions of such workers.
        """
        poll, positions = select.poll(), {}
        for position, worker in enumerate(workers):
            file = worker.fileno()
            if file < 0:  # its connection was closed here
                return [position]
            positions[file] = position
            poll.register(file, select.POLLIN | (select.POLLOUT if worker.has_unsent else 0))
        return [positions[file] for file, _ in poll.poll(1000 * timeout_s)]

    def end(self) -> None:
        """Do nothing: no thread waits long for a start."""

    def close(self) -> None:
        """End workers that no lane has: Ctrl-C may have come just after the start of one."""
        for worker in list(self._started):
            worker.stop(at_once=True)


class _Supervision:
    """The thread of one block, from its first worker until none is alive.

    It gets no messages of workers.

    Attributes:
        has_ended: True once it takes no more workers. The lock of the events guards it.
    """

    def __init__(self) -> None:
        self.events = Events()
        self.members = Members(fork_server(), self.events, self, _CLOSE_S)
        self.has_ended = False
        self._workers: dict[int, LocalWorker] = {}  # by the id of the member
        self.thread = threading.Thread(target=self._run, name="parawrap-workers", daemon=True)

    def start(
        self, lane: int, label: str, assignment: Assignment, started: weakref.WeakSet[LocalWorker]
    ) -> LocalWorker | None:
        """Start a worker, and note it in `started`. Return None if the thread is about to end."""
        with self.events.lock:
            if self.has_ended:
                return None
            printer = Printer()
            transcript = Transcript(printer, "", None)
            member = self.members.start(lane, assignment, transcript, is_read_elsewhere=True)
            worker = self._workers[id(member)] = LocalWorker(label, member, printer, self)
            started.add(worker)
            try:
                if not self.thread.is_alive():
                    self.thread.start()
            except RuntimeError as error:
                self.has_ended = True
                self.members.close()
                msg = f"the thread that supervises workers cannot be started: {error}"
                raise LaunchError(msg) from error
        return worker

    def on_message(self, _: Member, __: Message, /) -> None:
        """Do nothing: a worker is not asked over its control wire."""

    def on_end(self, member: Member, outcome: Outcome, /) -> None:
        """Note how a process has ended."""
        self._workers[id(member)].note_end(outcome)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                self._forget_gone()
                if self.has_ended:
                    break
                self.events.turn()
            self.members.close()
        except BaseException as reason:  # noqa: BLE001 (each worker has it)
            error = reason
            _log.exception(
                "the workers of a block are ended, because the thread that supervises them failed"
            )
            with contextlib.suppress(BaseException):
                self.members.close()  # kills what is left
        finally:
            self.has_ended = True
            # After any error too: threads wait for these notes without a limit
            for worker in self._workers.values():
                worker.note_end(error)
                worker.note_gone()

    def _forget_gone(self) -> None:
        """Forget workers that are gone. Take no more if that were all."""
        with self.events.lock:
            for member in [each for each in self.members.all if not each.is_alive]:
                self.members.all.remove(member)
                self._workers.pop(id(member)).note_gone()
            self.has_ended = not self.members.all


class LocalWorker:
    """A process that answers messages in the order of sending. One thread at a time uses it.

    It owns the data wire of the process.
    """

    def __init__(
        self, label: str, member: Member, printer: Printer, supervision: _Supervision
    ) -> None:
        self._label = label
        self._member = member
        self._wire = member.wire
        self._printer = printer
        self._supervision = supervision
        self._end: Outcome | BaseException | None = None  # how the process has ended
        self._set_up: Outcome | None = None
        self._has_exited = Latch()
        self._is_gone = Latch()  # also the processes that it has started

    def fileno(self) -> int:
        """Return the descriptor of the wire; -1 once closed."""
        return self._wire.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if a part of a message has not left yet."""
        return self._wire.has_unsent

    def send(self, body: tuple[Any, ...], packer: Packer, model: Packed | None) -> None:
        """Send calls, and before them the model that they need if it is another one.

        Raises:
            SessionError: If memory lacks room for their tensors. The calls are not sent then; the
                model may have been.
            OSError: If this process has reached a limit. The same holds.
            ConnectionError: If the process has ended.
        """
        is_open = model is None or self._wire.send("model", None, model)
        if not (is_open and self._wire.send("calls", body, packer)):
            msg = "the worker has ended"
            raise ConnectionError(msg)

    def receive(self) -> list[ReceivedAnswers] | None:
        """Return the answers that have arrived, with their blocks; None if the process has ended.

        An error of this process stands in place of the block that it could not take.
        """
        if self._wire.has_unsent:
            self._wire.flush()
        try:
            messages = self._wire.read()
        except EOFError:
            return None
        found: list[ReceivedAnswers] = []
        for message in messages:
            if message.word == "answers":
                number, answers = message.body
                found.append((number, answers, message.block, message.error))
            # Its number is lost too. The lane sends all messages again, to another worker
            elif message.word == LOST:
                self.stop(at_once=True)
            # The answer to the set-up of the rank, which has no number of the lanes
            elif message.word == "answer" and not isinstance(message.body.outcome, Returned):
                self._set_up = message.body.outcome
        return found

    def death(self) -> RankDiedError:
        """Wait for the end of the process, and return the error that says how it ended."""
        self.stop(at_once=False)
        self._has_exited.wait(2 * _CLOSE_S)  # it is killed after the half
        died = self._end
        if self._set_up is not None or not isinstance(died, Died):
            # The set-up failed, which explains the death, or the supervising thread did
            how: Any = self._set_up or died
            if isinstance(how, Outcome):
                how = how.summary
            return RankDiedError(f"{self._label} ended: {self._supervision.members.lost or how}")
        code = None if died.signal is not None else died.code
        error = RankDiedError(f"{self._label} {died.summary}", signal=died.signal, exit_code=code)
        if died.last_words:
            add_note(error, f"its last output:\n{died.last_words}")
        return error

    def stop(self, *, at_once: bool) -> None:
        """Begin to end the process. Unless `at_once`, it has time to exit on its own.

        A process that is late is killed.
        """
        # Not `close` alone: a forked child may hold a copy of the socket
        self._wire.shut()
        self._wire.close()
        events, members = self._supervision.events, self._supervision.members
        with events.lock:
            if self._supervision.has_ended or self._member.has_exited:
                return
            if at_once:
                members.tell(self._member, "end")
            late = functools.partial(members.kill, self._member)
            events.timers[late] = time.monotonic() + _CLOSE_S
            events.wake_in_time()

    def join(self) -> None:
        """Wait for the end of the process, and of those that it has started."""
        # The garbage collector may end a block in the thread of its supervision
        if self._supervision.thread is not threading.current_thread():
            self._is_gone.wait(2 * _CLOSE_S)

    def note_end(self, how: Outcome | BaseException | None) -> None:
        """Note how the process has ended. The first note holds."""
        if self._end is None:
            self._end = how
        self._has_exited.set()

    def note_gone(self) -> None:
        """Note that no process is alive."""
        try:
            self._member.transcript.finish()
            self._printer.finish()
        finally:
            self._is_gone.set()


# -- in the worker


def serve(device: str, threads: int, seed: int, wire: Wire) -> None:
    """Answer messages until the wire closes. Runs in place of the calls of a rank."""
    # It ends the process also during a call, without unwinding
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    _keep_memory()
    wire.lend_all()
    server = ModelServer(torch.device(device))
    model_error: Exception | None = None  # why this process could not take the model
    while (message := wire.receive()) is not None:
        if message.word == LOST:  # its number too, so that no answer is possible: end
            return
        if message.word == "model":
            model_error = message.error
            if model_error is None:
                server.take_model(message.block)
            continue
        number, fields, items = message.body
        form = Form(*fields)
        error = model_error or message.error
        if error is None:
            answers, packer = server.answer(form, items, message.block)
        else:
            if form.prepare:
                server.take_prepare(form.prepare)
            answers, packer = server.fail(items, error)
        try:
            wire.send("answers", (number, answers), packer)
        except (OSError, SessionError) as reason:  # memory lacks room, or a limit is reached
            answers, packer = server.fail(items, reason)
            wire.send("answers", (number, answers), packer)
        # The tensors lie in a slab of shared memory. Without them, the next message may use it
        del message, answers, packer


def _keep_memory() -> None:
    """Have malloc keep freed memory: large outputs then need no new pages from the kernel."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
