"""The life of a rank's process: connect to the launch, set up, call the function, report the outcome, and exit."""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import torch

from parawrap.backends import neuron_is_device
from parawrap.errors import LaunchError
from parawrap.launch._devices import Device, core_of
from parawrap.launch._packed_call import Job, unpack_call
from parawrap.launch._platform import Platform
from parawrap.launch._private_names import join_threads, run_exit_handlers
from parawrap.launch._rank import IN_RANK, Rank, being
from parawrap.launch.messages import _pack_exception as failures
from parawrap.launch.messages._channel import Channel
from parawrap.launch.messages._first_rank_failure import Died
from parawrap.launch.messages._pickle_values import packed
from parawrap.launch.rank._cluster_signals import heed_signals
from parawrap.launch.rank._control_thread import Control, EndOrdered
from parawrap.launch.rank._flush_files import flush_files
from parawrap.launch.rank._preemption import RequeueRequested
from parawrap.launch.rank._process_groups import StoreAddress, open_store, stay_on_loopback
from parawrap.launch.rank._rank_assignment import Assignment
from parawrap.launch.rank._set_up_rank import Place, set_up
from parawrap.launch.rank._share_cores import share_cores

__all__ = ["run_rank"]

_LINGER_S = 1.0  # as docs/launching.md promises
_SPARE_FILES = 4  # descriptors reserved for the report of a function that has used up all others
_SUCCEEDED = 0  # the exit code
_FAILED = 1  # the exit code

_CONSOLES = ("cmd", "code", "IPython")  # packages whose prompts call `input`; pdb's is in the module cmd

_GUARD = (
    "a worker that is spawned, or started by multiprocessing's forkserver, runs the main script again: put the script's "
    'actions under `if __name__ == "__main__":`, and put what a notebook or `python -c` defines into a module'
)
_REMEDIES = {  # parts of messages, and notes for them
    "initialize the default process group twice": (
        "parawrap has made the default process group before the function: leave out init_process_group, or give "
        "Platform(ipc_groups=None) to make it in the function"
    ),
    "DataLoader worker (pid": _GUARD,
    "A process in the process pool was terminated abruptly": _GUARD,
}
_RISK = ". Any program that can connect to it can disturb it"

_kept: list[Any] = []  # until the process exits

Report = tuple[str, dict[str, Any], int | None]


def run_rank(sock: socket.socket) -> NoReturn:
    """Run as the rank at this end of a connection, then exit. Never returns."""
    gc.enable()
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE_FILES)]
    channel = Channel(sock)
    _start_session()
    streams = _streams()
    channel.send("hello", None, streams)
    for stream in streams:
        os.close(stream)
    message = channel.receive()
    if message is None:  # the launching process died, or ended the launch before its start
        os._exit(_FAILED)
    control = Control(channel, message.body)
    word, body, file = _report(message.body, message.files, control, spare)
    channel.send(word, body, () if file is None else (file,))
    has_succeeded = word in ("returned", "requeued")
    if has_succeeded:
        control.linger(_LINGER_S)
    _leave(_SUCCEEDED if has_succeeded else body.get("code") or _FAILED)


def _start_session() -> None:
    """Start a new session: Ctrl-C in the terminal then does not reach the rank, and its process group can be killed.

    The rank ignores SIGINT, but processes that it starts do not: with SIG_IGN they would.
    """
    heed_signals()
    signal.signal(signal.SIGINT, _ignore)
    signal.siginterrupt(signal.SIGINT, False)
    os.register_at_fork(after_in_child=_heed_sigint)
    if os.getpid() != os.getsid(0):
        os.setsid()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


def _heed_sigint() -> None:
    if signal.getsignal(signal.SIGINT) is _ignore:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _streams() -> tuple[int, int]:
    """Redirect standard output and error into pipes. Return the ends that the launching process reads.

    Standard input is empty: with ``spawn_method="fork"``, it would be that of the launching process.
    """
    ends = []
    null = os.open(os.devnull, os.O_RDONLY)
    if null != 0:
        os.dup2(null, 0)
        os.close(null)
    _kept.append(sys.stdin)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(writer)
        os.set_inheritable(number, True)
        ends.append(reader)
        _kept.append(getattr(sys, name))  # a freed stream writes text that the parent had buffered before the fork
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    return ends[0], ends[1]


def _report(assignment: Assignment, files: Sequence[int], control: Control, spare: list[int]) -> Report:
    """Call the function. Return the message that reports its outcome."""
    try:
        try:
            control.start()
            result = _run(assignment, files, control, spare)
        finally:
            control.function_ended()
            _free(spare)
        return "returned", {"at": time.time()}, result
    except EndOrdered:
        return "ended", {"at": time.time()}, None
    except RequeueRequested:
        return "requeued", {"at": time.time()}, None
    except SystemExit as error:
        died = Died.by_exit(error, pid=os.getpid())
        return "left", {"at": died.at, "code": died.exit_code, "said": died.last_words}, None
    except BaseException as error:  # noqa: BLE001 (a rank reports every exception)
        return "raised", failures.description_of(error), failures.pack_exception(error)


def _free(spare: list[int]) -> None:
    """Close the reserved descriptors, so that the report can use them."""
    while spare:
        os.close(spare.pop())


def _run(assignment: Assignment, files: Sequence[int], control: Control, spare: list[int]) -> int:
    """Set up the process, call the function, and return a file with the pickled result."""
    payload, *line = files
    assignment.surroundings.take_over()
    faulthandler.enable()
    job = _unpack(payload)
    _refuse_prompts("function" if assignment.stays else job.name)
    _kept.append(job)  # with the function's globals: to free an open file may block, and `flush_files` limits that
    with being(replace(_set_up_process(assignment, job.platform, control), preemption=control.preemption)):
        control.note_phase("run")
        try:
            result = _call(job, *line, *((control, assignment) if assignment.stays else ()))
        except Exception as error:
            _explain(error, job)
            raise
        _await_threads()
        _free(spare)
        return packed(result, "result", "the result")


def _call(job: Job, *before: Any) -> Any:
    """Call the function. Leave its garbage to `flush_files`: a collection may lose the buffers of files in a cycle."""
    try:
        return job.call(*before)
    finally:
        gc.disable()


def _await_threads() -> None:
    """Wait for the threads that the function started. They may need the collector."""
    if any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate()):
        gc.enable()
    join_threads()
    gc.disable()


def _explain(error: Exception, job: Job) -> None:
    if job.names is not None:
        job.names.explain(error)
    with contextlib.suppress(Exception):  # classes may raise anything
        for part, remedy in _REMEDIES.items():
            if part in str(error):
                failures.add_note(error, remedy)


def _unpack(payload: int) -> Job:
    try:
        return unpack_call(payload)
    except BaseException as error:
        error.add_note("raised while the rank unpickled the function and its arguments, before the call")
        if isinstance(error, ModuleNotFoundError):
            error.add_note(f"ranks import from sys.path, and have no import hooks of the script. It is {sys.path}")
        raise
    finally:
        os.close(payload)


def _refuse_prompts(name: str) -> None:
    """Have breakpoints and `input` raise an error that names ``inline``, because a rank has no terminal.

    Debuggers with their own connection, and those of PYTHONBREAKPOINT, still work.
    """
    short = name.rpartition("<locals>.")[2]
    msg = (
        f"a rank has no terminal. Call {short}.inline(...) of a decorated function instead: it runs the function in the "
        "launching process, for a debugger"
    )

    def refuse_breakpoint(*_: object, **__: object) -> NoReturn:
        raise LaunchError(msg)

    def read_or_refuse(prompt: object = "", /) -> str:
        sys.stdout.write(str(prompt))
        sys.stdout.flush()
        if line := sys.stdin.readline():  # the function may have replaced it
            return line.removesuffix("\n")
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] in _CONSOLES:  # they take EOFError for the end of the session
            raise LaunchError(msg)
        error = EOFError("EOF when reading a line")
        error.add_note(msg)
        raise error

    builtins.input = read_or_refuse
    if os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace") and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = refuse_breakpoint


def _set_up_process(assignment: Assignment, platform: Platform, control: Control) -> Rank:
    """Set up logging, threads, and environment variables of this process, then the rank itself (`set_up`)."""
    place = assignment.place
    logging.basicConfig(level=logging.INFO if place.global_rank == 0 else logging.WARNING)
    if platform.device == Device.NEURON and not neuron_is_device():  # a torch device is chosen by its index
        os.environ["NEURON_RT_VISIBLE_CORES"] = core_of(place.local_rank)
    share_cores(platform, place.ranks_per_node)
    os.environ |= _variables(place, assignment.meeting, has_store=platform.requires_ipc)
    if assignment.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", assignment.interface)
    meeting = assignment.meeting
    if meeting is None or not platform.requires_ipc:
        if place.ranks_per_node == place.world_size:
            stay_on_loopback()
        return set_up(place, platform, None)
    control.note_phase("meeting")
    store = torch.distributed.PrefixStore(f"{place.restart}", open_store(meeting, place.world_size))
    try:
        return set_up(place, platform, store)
    except Exception as error:
        error.add_note(f"raised while the ranks met at the store {meeting}{_RISK if meeting.path is None else ''}")
        raise


def _variables(place: Place, meeting: StoreAddress | None, *, has_store: bool) -> dict[str, str]:
    """Return the environment variables that torchrun sets, because libraries read them."""
    variables = {
        "TORCHELASTIC_RESTART_COUNT": str(place.restart),
        "RANK": str(place.global_rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.ranks_per_node),
        "GROUP_RANK": str(place.node),
        IN_RANK: str(os.getpid()),
    }
    if meeting is not None and meeting.host is not None:
        variables |= {
            "MASTER_ADDR": meeting.host,
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(has_store and meeting.path is None),
        }
    return variables


def _leave(code: int) -> NoReturn:
    """Exit like an interpreter, but without unloading torch: the kernel frees its memory faster."""
    for step in (run_exit_handlers, sys.stdout.flush, sys.stderr.flush, flush_files):
        try:
            step()
        except Exception:  # noqa: BLE001 (reported as the interpreter reports it)
            traceback.print_exc()
    os._exit(code & 0xFF or int(code != 0))
