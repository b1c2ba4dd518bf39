"""Answer the calls of a rank that stays. Runs in the rank's main thread, as its function.

While a call runs, the control thread can interrupt it. Between two calls the rank is idle.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch.distributed as dist

from parawrap.errors import LaunchError, UnsendableError, add_note
from parawrap.launch._rank import become, current_rank
from parawrap.launch.messages import _pack_exception as failures
from parawrap.launch.messages._channel import close_in_forked_children
from parawrap.launch.messages._global_contents import state_of
from parawrap.launch.messages._line import Arrival, Line, Message
from parawrap.launch.messages._script_pickler import pickle_with_names
from parawrap.launch.rank._control_thread import Control, EndOrdered
from parawrap.launch.rank._interrupts import CallHalted
from parawrap.launch.rank._preemption import RequeueRequested
from parawrap.launch.rank._process_connections import count_messages, forget_messages
from parawrap.launch.rank._process_groups import StoreAddress, enter_groups, leave_groups, open_store
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["serve_calls"]

_MISSING = object()


def serve_calls(file: int, control: Control, assignment: Assignment) -> None:
    """Answer the calls that arrive at a socket, until it is closed."""
    sock = socket.socket(fileno=file)
    close_in_forked_children(sock)
    control.interrupts.install()
    count_messages()
    line = Line(sock, copies_small=True)
    server = _CallServer(line, control, assignment.meeting)
    try:
        while (request := line.receive()) is not None:
            server.answer(request)
            del request  # its tensors may lie in a slab that the next request uses
    except ConnectionError:
        pass  # the launching process has exited
    finally:
        line.close()


class _CallServer:
    """Answers the requests of one rank.

    The globals of ``__main__`` that this rank has received are known. All others were assigned by functions, and belong to
    the ranks.
    """

    def __init__(self, line: Line, control: Control, meeting: StoreAddress | None) -> None:
        self._line = line
        self._interrupts = control.interrupts
        self._meeting = meeting
        self._main = vars(sys.modules["__main__"])
        self._main["__getattr__"] = _refuse_name
        self._received = dict(self._main)
        self._contents: dict[str, Any] = {}  # of received plain values, as they were then
        self._owned: set[str] = set()
        self._regrouped_after = ""
        self._not_loaded = ""  # why the globals of an earlier call are missing

    def answer(self, request: Arrival) -> None:
        """Answer one request."""
        if request.word == "call":
            self._answer_call(request)
        elif request.word == "names":
            self._receive_names(request)
        else:
            self._regroup(request)

    # -- calls

    def _answer_call(self, request: Arrival) -> None:
        number = request.number
        try:
            try:
                forget_messages()
                self._interrupts.begin(number)
                result, pickled = self._result_of(request)
            finally:
                self._interrupts.end()
        except (EndOrdered, SystemExit):  # they end the process
            raise
        except CallHalted:
            self._report_owned(number)
            self._send("halted", number, time.time())
        except RequeueRequested:
            msg = "requeue() was called in ranks that stay, which cannot restart: use @wrapper(Platform(...)) instead"
            self._send_exception(LaunchError(msg), number)
        except BaseException as error:  # noqa: BLE001 (a rank reports every exception)
            self._send_exception(error, number)
        else:
            self._send_result(number, pickled)
            del result  # its tensors lend their memory until here

    def _result_of(self, request: Arrival) -> tuple[Any, tuple[memoryview, list[memoryview]]]:
        """Call the function. Return the result and its pickle, which share memory."""
        function, args, kwargs = self._load(request)
        result = function(*args, **kwargs)
        return result, pickle_with_names(result, "the result", self._is_shared)

    def _send_result(self, number: int, pickled: tuple[memoryview, list[memoryview]]) -> None:
        self._report_owned(number)
        _flush()
        try:
            self._line.send_pickled(Message("returned", None, number), *pickled)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 (no room for its tensors)
            self._send_exception(error, number)

    def _send_exception(self, error: BaseException, number: int) -> None:
        if self._regrouped_after and failures.is_echo(error):
            note = (
                f"the process groups of these ranks were made again after the call of {self._regrouped_after} had failed: "
                "groups from before, and models in DistributedDataParallel, no longer work. Make them again"
            )
            add_note(error, note)
        if self._not_loaded and isinstance(error, NameError):
            add_note(error, f"the rank could not load the globals of an earlier call: {self._not_loaded}")
        self._report_owned(number)
        file = failures.pack_exception(error)
        try:
            self._send("raised", number, failures.description_of(error), file)
        finally:
            os.close(file)

    def _send(self, word: str, number: int, value: Any, file: int | None = None) -> None:
        _flush()
        self._line.send(Message(word, value, number, file=file), "the answer")

    # -- the globals of __main__

    def _load(self, request: Arrival) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the function and the arguments of a call. Set the globals that came with it."""
        stream = io.BytesIO(request.pickled)
        try:
            definitions, sources = pickle.load(stream)
            linecache.cache.update((name, (0, None, lines, name)) for name, lines in sources.items())
            for names, pickled, attributes in definitions:
                self._define(names, pickled, attributes)
            call = pickle.load(stream, buffers=request.buffers)
            self._receive(call["the globals"])
            if definitions or call["the globals"]:
                self._not_loaded = ""
            function = call["the function"]
            if isinstance(function, tuple):
                module, name = function
                function = self._main[name] if module == "__main__" else resolve_name(f"{module}:{name}")
        except BaseException as error:
            self._send("owned", request.number, None)
            self._not_loaded = failures.summary_of(error)
            if isinstance(error, Exception):
                add_note(error, "raised while the rank unpickled the function, its arguments, and its globals")
            if isinstance(error, ModuleNotFoundError):
                add_note(error, f"ranks that stay import from the sys.path of their start. It is {sys.path}")
            raise
        return function, call["args"], call["kwargs"]

    def _define(self, names: Sequence[str], pickled: bytes, attributes: Mapping[str, Sequence[str]]) -> None:
        """Set definitions. A class that is here already gets its new attributes, and loses those that it has no more."""
        self._check_unchanged(names)
        loaded = pickle.loads(pickled)
        values = {names[0]: loaded} if len(names) == 1 else loaded
        for name, kept in attributes.items():
            for gone in [each for each in vars(values[name]) if each not in kept and not each.startswith("_")]:
                delattr(values[name], gone)
        self._set(values)

    def _receive(self, names: Mapping[str, Any]) -> None:
        self._check_unchanged(names)
        self._set(names)

    def _check_unchanged(self, names: Iterable[str]) -> None:
        """Raise UnsendableError if functions have assigned one of these globals, or have changed its value in place."""
        for name in names:
            value, before = self._main.get(name, _MISSING), self._contents.get(name)
            is_own = value is not _MISSING and value is not self._received.get(name, _MISSING)
            if is_own or (before is not None and state_of(value) != before):
                msg = (
                    f"the global {name!r} was changed in this rank, and the launching process has changed it too: it is "
                    "unclear which value is meant. Rename one of the two, pass the value as an argument, or delete it in a "
                    f"function that the ranks call (global {name}; del {name}) to send it again"
                )
                raise UnsendableError(msg)

    def _set(self, names: Mapping[str, Any]) -> None:
        self._main.update(names)
        self._received.update(names)
        self._contents.update((name, state_of(value)) for name, value in names.items())

    def _receive_names(self, request: Arrival) -> None:
        try:
            self._load(request)
        except Exception:  # noqa: BLE001 (the next call gets them again, and reports it)
            return

    def _report_owned(self, number: int) -> None:
        """Report the globals that functions have assigned or deleted since the last report."""
        main, received = self._main, self._received
        deleted = [name for name in (*received, *self._owned) if name not in main]
        for name in deleted:
            received.pop(name, None)
            self._contents.pop(name, None)
            self._owned.discard(name)
        assigned = [
            name
            for name, value in list(main.items())  # threads may change it
            if received.get(name, _MISSING) is not value and name not in self._owned and not name.startswith("__")
        ]
        if assigned or deleted:
            self._owned.update(assigned)
            self._line.send(Message("owned", (assigned, deleted), number), "the answer")

    def _is_shared(self, name: str) -> bool:
        """True for a global that the launching process has too."""
        return name in self._received and self._main.get(name) is self._received[name]

    # -- process groups

    def _regroup(self, request: Arrival) -> None:
        """Leave all process groups, and join new ones."""
        generation, self._regrouped_after = request.load()
        rank = current_rank()
        try:
            leave_groups()
            assert self._meeting is not None
            store = dist.PrefixStore(f"{generation}", open_store(self._meeting, rank.world_size))
            one_machine = rank.platform.n_nodes == 1
            group = enter_groups(
                rank.platform, store, rank.global_rank, rank.world_size, rank.device, one_machine=one_machine
            )
            become(replace(rank, group=group))
            self._send("regrouped", request.number, None)
        except Exception as error:  # noqa: BLE001 (torch raises many types)
            self._send("regrouped", request.number, failures.summary_of(error))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the function has closed or replaced it
            continue


def _refuse_name(name: str) -> NoReturn:
    main = sys.modules["__main__"]
    msg = (
        f"module '__main__' has no attribute {name!r} in this rank: ranks that stay have the globals that the functions "
        f"sent to them use. Use {name} in the function, or import it there from a module"
    )
    raise AttributeError(msg, name=name, obj=main)
