"""Workers on this machine: ranks that stay, without process groups, each called alone.

::

    lanes ── data wire of each worker ──► worker: `serve`
                                            │
    thread of the block ◄── status, output ─┘

A lane reads and writes the data wire of its worker. The thread, which all workers of the block
share, notes how their processes end.
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

# A process is killed if it has not exited this time after its connection was closed. A guess that
# no test has contradicted
_CLOSE_S = 5.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # the constants of these names in malloc.h
_log = logging.getLogger("parawrap.workers")


# -- in this process


class LocalWorkers:
    """Starts the workers of one block on this machine, and supervises them.

    torch gets an equal number of threads in each.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._threads = backend_of(devices[0].type).intra_op_threads(len(devices))
        # Guards `_supervision`: two threads must not replace it at the same time
        self._starting = threading.Lock()
        # For `close`. Weak: a worker that its lane has dropped is gone
        self._started: weakref.WeakSet[LocalWorker] = weakref.WeakSet()
        self._supervision: _Supervision | None = None  # the last one; it may have ended

    def start(self, lane: int, seed: int) -> LocalWorker:
        """Start the worker of a lane.

        Raises:
            LaunchError: If this process has too many threads to supervise it.
        """
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
        # Ctrl-C must not leave a process that is not noted. A start takes milliseconds, the first
        # one as long as an import of torch
        held = HeldSignals(lambda: None)
        try:
            return self._start(lane, label, assignment)
        finally:
            held.end()

    def _start(self, lane: int, label: str, assignment: Assignment) -> LocalWorker:
        # Again if the thread ends between the look at `has_ended` and the start
        while True:
            with self._starting:
                if self._supervision is None or self._supervision.has_ended:
                    self._supervision = _Supervision()
                worker = self._supervision.start(lane, label, assignment, self._started)
            if worker is not None:
                return worker

    def poll(self, workers: Sequence[Any], timeout_s: float) -> Collection[int]:
        """Wait until a worker has answered or ended, or until the time is over.

        Return the positions of such workers.
        """
        poll = select.poll()
        positions = {}  # by the descriptor of the worker
        for position, worker in enumerate(workers):
            file = worker.fileno()
            if file < 0:  # its connection was closed here
                return [position]
            positions[file] = position
            poll.register(file, select.POLLIN | (select.POLLOUT if worker.has_unsent else 0))
        return [positions[file] for file, _ in poll.poll(1000 * timeout_s)]

    def end(self) -> None:
        """Do nothing: no thread waits long for the start of a worker."""

    def close(self) -> None:
        """End workers that no lane has: Ctrl-C may have come just after a worker was started."""
        for worker in list(self._started):
            worker.stop(at_once=True)


class _Supervision:
    """The thread that supervises workers, from its start until none of them is alive.

    The next worker of the block then gets another one.

    Attributes:
        events: What the thread waits for. Their lock guards all that other threads use.
        has_ended: True once the thread takes no more workers.
        members: The processes that the thread supervises.
        thread: The thread, which the first worker starts.
    """

    def __init__(self) -> None:
        self.events = Events()
        self.members = Members(fork_server(), self.events, self, _CLOSE_S)
        self.has_ended = False
        self._workers: dict[int, LocalWorker] = {}  # by the id of the member, which is kept alive
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
        """Do nothing: lanes read the answers of workers from the data wire."""

    def on_end(self, member: Member, outcome: Outcome, /) -> None:
        """Note how a process has ended."""
        self._workers[id(member)].note_end(outcome)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._supervise()
        except BaseException as reason:  # noqa: BLE001 (each worker has it)
            error = reason
            _log.exception(
                "the workers of a block are ended, because the thread that supervises them failed"
            )
            with contextlib.suppress(BaseException):
                self.members.close()  # kills the processes that are alive
        finally:
            self.has_ended = True
            # After any error too: other threads wait for these notes
            for worker in self._workers.values():
                worker.note_end(error)
                worker.note_gone()

    def _supervise(self) -> None:
        self._forget_gone()
        while not self.has_ended:
            self.events.turn()
            self._forget_gone()
        self.members.close()

    def _forget_gone(self) -> None:
        """Forget workers whose processes are gone. Set `has_ended` if none is left."""
        with self.events.lock:
            for member in [each for each in self.members.all if not each.is_alive]:
                self.members.all.remove(member)
                self._workers.pop(id(member)).note_gone()
            self.has_ended = not self.members.all


class LocalWorker:
    """A process that answers messages in the order of sending.

    It owns the data wire of the process. One thread at a time sends and receives. Any thread may
    end it, and wait for its end.
    """

    def __init__(
        self, label: str, member: Member, printer: Printer, supervision: _Supervision
    ) -> None:
        self._label = label
        self._member = member
        self._wire = member.wire
        self._printer = printer
        self._supervision = supervision
        # How the process has ended, or why its supervision failed; None before
        self._end: Outcome | BaseException | None = None
        self._set_up: Outcome | None = None  # why the set-up of the process failed
        self._has_exited = Latch()
        self._is_gone = Latch()  # set when the processes that it has started are gone too

    def fileno(self) -> int:
        """Return the descriptor of the wire; -1 once it is closed."""
        return self._wire.fileno()

    @property
    def has_unsent(self) -> bool:
        """True if a part of a message has not left yet."""
        return self._wire.has_unsent

    def send(self, body: tuple[Any, ...], packer: Packer, model: Packed | None) -> None:
        """Send calls, and before them their model, unless it is None: the worker has it already.

        Raises:
            SessionError: If memory lacks room for their tensors. The model may have been sent, the
                calls have not.
            OSError: If this process has reached a limit. The same holds.
            ConnectionError: If the process has ended.
        """
        is_open = model is None or self._wire.send("model", None, model)
        if not (is_open and self._wire.send("calls", body, packer)):
            msg = "the worker has ended"
            raise ConnectionError(msg)

    def receive(self) -> list[ReceivedAnswers] | None:
        """Return the answers that have arrived; None if the process has ended."""
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
            # This process could not read a message. With it, its number is lost: the lane sends all
            # messages again, to another worker
            elif message.word == LOST:
                self.stop(at_once=True)
            # The answer to the set-up of the rank
            elif message.word == "answer" and not isinstance(message.body.outcome, Returned):
                self._set_up = message.body.outcome
        return found

    def death(self) -> RankDiedError:
        """Wait for the end of the process, and return the error that says how it ended.

        Call `stop` before.
        """
        self._has_exited.wait(2 * _CLOSE_S)  # the process is killed after half of it
        died = self._end
        if self._set_up is not None or not isinstance(died, Died):
            # A failed set-up explains the death. Without one, the supervision failed
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
        """Close the connection. The process then exits on its own, or is killed some seconds later.

        Args:
            at_once: End the process now, also within a call.
        """
        # Not `close` alone: a forked child may hold a copy of the socket, and keep it open
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
        """Note how the process has ended, unless that is noted already."""
        if self._end is None:
            self._end = how
        self._has_exited.set()

    def note_gone(self) -> None:
        """Note that the process, and those that it has started, are gone."""
        try:
            self._member.transcript.finish()
            self._printer.finish()
        finally:
            self._is_gone.set()


# -- in the worker


def serve(device: str, threads: int, seed: int, wire: Wire) -> None:
    """Answer messages until the wire closes. Runs in place of the calls of a rank."""
    # After `stop(at_once=True)`, the control thread sends SIGTERM. It ends the process without
    # unwinding, also during a call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    _keep_memory()
    wire.lend_all()
    server = ModelServer(torch.device(device))
    model_error: Exception | None = None  # why this process could not take the model
    while (message := wire.receive()) is not None:
        if message.word == LOST:  # the number of the message too: no answer is possible
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
        # Their tensors lie in a slab of shared memory, which the next message may use then
        del message, answers, packer


def _keep_memory() -> None:
    """Have malloc keep freed memory: large outputs then need no new pages from the kernel."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
