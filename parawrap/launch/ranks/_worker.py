"""A rank's life, from a connected socket to the end of its process.

However the process was started (forked from a warm one, from the parent, as a fresh interpreter), from
here on it is the same. This file knows the order of things; what each of them is lies in the files it imports.
"""

from __future__ import annotations

import atexit
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
from dataclasses import replace
from typing import Any, NoReturn

import torch

from parawrap.launch import _job
from parawrap.launch._devices import Device, core_of, cores
from parawrap.launch._job import Job, unpacked_call
from parawrap.launch._platform import Platform
from parawrap.launch._rank import IN_RANK, Rank, being
from parawrap.launch.parcels import _failures as failures
from parawrap.launch.parcels._outcomes import Died
from parawrap.launch.parcels._packing import packed
from parawrap.launch.parcels._wire import Wire
from parawrap.launch.ranks._assignment import Assignment
from parawrap.launch.ranks._control import Control, ToldToEnd
from parawrap.launch.ranks._groups import Rendezvous, open_store
from parawrap.launch.ranks._preemption import Preemption, RequeueWanted
from parawrap.launch.ranks._setup import Place, set_up
from parawrap.launch.ranks._signals import heed_signals
from parawrap.launch.ranks._watchdog import start_watchdog

__all__ = ["PRELOADABLE", "run_rank"]

# What ranks import sooner or later (every torch optimizer does), at a second each, and a warm process may import for them.
PRELOADABLE = ("torch._dynamo",)

_LINGER_S = 1.0
_LEFT_BY_ITSELF = 0
_FAILED = 1
_OWN_FILES = (__file__, _job.__file__)

_replaced: list[Any] = []

Report = tuple[str, dict[str, Any], int | None]


def run_rank(sock: socket.socket, *, has_guardian: bool = False) -> NoReturn:
    """Be the rank at this end of the line, and never return.

    Args:
        sock: the line to the parent.
        has_guardian: whether the process that this one was forked from ends it when the parent is gone.
    """
    gc.enable()
    wire = Wire(sock)
    parent = os.getppid()
    _own_session()
    streams = _streams()
    wire.send("hello", None, streams)
    for stream in streams:
        os.close(stream)
    message = wire.receive()
    if message is None:  # the parent is gone, or has given up
        os._exit(_FAILED)
    orders: Assignment = message.body
    if not has_guardian:
        start_watchdog(parent, orders.grace_s)
    control = Control(wire, orders)
    control.start()
    word, body, file = _report(orders, message.files[0], control)
    body |= {"loaded": [name for name in PRELOADABLE if name in sys.modules]}
    wire.send(word, body, () if file is None else (file,))
    left_by_itself = word in ("returned", "requeued")
    if left_by_itself:
        control.linger(_LINGER_S)
    _leave(_LEFT_BY_ITSELF if left_by_itself else body.get("code") or _FAILED)


def _own_session() -> None:
    """A session of its own: no Ctrl-C from the parent's terminal, and one group to kill with all that the rank started."""
    heed_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getpid() != os.getsid(0):
        os.setsid()


def _streams() -> tuple[int, int]:
    """Turn standard output and error into pipes; gives the ends that the parent reads."""
    ends = []
    for name, number in (("stdout", 1), ("stderr", 2)):
        reader, writer = os.pipe()
        os.dup2(writer, number)
        os.close(writer)
        os.set_inheritable(number, True)
        ends.append(reader)
        _replaced.append(getattr(sys, name))  # kept: freed, it would write what a forked parent had not written yet
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    return ends[0], ends[1]


def _report(orders: Assignment, payload: int, control: Control) -> Report:
    """Run the function; how it ended, in the words that the parent is told."""
    try:
        try:
            result = _run(orders, payload, control.preemption)
        finally:
            control.function_ended()
        return "returned", {"at": time.time()}, result
    except ToldToEnd:
        return "ended", {"at": time.time()}, None
    except RequeueWanted:
        return "requeued", {"at": time.time()}, None
    except SystemExit as error:
        died = Died.by_exit(error, pid=os.getpid())
        return "left", {"at": died.at, "code": died.exit_code, "said": died.last_words}, None
    except BaseException as error:  # noqa: BLE001 (a rank must report whatever ended it)
        return "raised", _description(error), failures.pack_exception(error)


def _description(error: BaseException) -> dict[str, Any]:
    return {
        "at": time.time(),
        "summary": failures.summary_of(error),
        "traceback": failures.traceback_of(error, *_OWN_FILES),
        "is_echo": failures.is_echo(error),
    }


def _run(orders: Assignment, payload: int, preemption: Preemption) -> int:
    """Settle in, call the function, and pack what it returns; gives the file it is in."""
    orders.surroundings.take_over()
    faulthandler.enable()
    job = _unpacked(payload)
    with being(replace(_set_up_process(orders, job.platform), preemption=preemption)):
        result = job.call()
        _join_threads()
        return packed(result, "result", "the result")


def _unpacked(payload: int) -> Job:
    try:
        return unpacked_call(payload)
    except BaseException as error:
        error.add_note("this happened while the rank was unpacking the function and its arguments, before it could call it")
        raise
    finally:
        os.close(payload)


def _set_up_process(orders: Assignment, platform: Platform) -> Rank:
    """Make this process, which is the rank's own, the rank: its logging and threads too, which `set_up` leaves alone."""
    place = orders.place
    logging.basicConfig(level=logging.INFO if place.global_rank == 0 else logging.WARNING)
    if platform.device == Device.NEURON:
        os.environ["NEURON_RT_VISIBLE_CORES"] = core_of(place.local_rank)
    torch.set_num_threads(_threads_per_rank(platform, place.ranks_per_node))
    os.environ |= _variables(place, orders.meeting)
    if orders.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", orders.interface)
    store = None
    if orders.meeting is not None:
        store = torch.distributed.PrefixStore(f"{place.restart}", open_store(orders.meeting, place.world_size))
    return set_up(place, platform, store)


def _variables(place: Place, meeting: Rendezvous | None) -> dict[str, str]:
    """What tells libraries of the world, as torchrun tells them."""
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
        variables |= {"MASTER_ADDR": meeting.host, "MASTER_PORT": str(meeting.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return variables


def _threads_per_rank(platform: Platform, ranks_per_node: int) -> int:
    """Torch's threads: what the user said, else an equal share of the cores, so that ranks do not fight for them."""
    if platform.spawn_method == "fork":  # OpenMP's threads did not survive the fork, and it would wait for them
        return 1
    if platform.device != Device.CPU and platform.n_cpus > 1:
        return platform.n_cpus
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, cores() // ranks_per_node)


def _join_threads() -> None:
    """The function has not returned before the threads that it started have ended, but for daemons."""
    threading._shutdown()  # type: ignore[attr-defined]  # pyright: ignore  # wakes the idle workers of thread pools too


def _leave(code: int) -> NoReturn:
    """What an interpreter does at its end, without taking torch apart: the kernel does that faster."""
    for step in (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        try:
            step()
        except Exception:  # noqa: BLE001 (an exit handler's own affair, told as the interpreter tells it)
            traceback.print_exc()
    os._exit(code & 0xFF or int(code != 0))
