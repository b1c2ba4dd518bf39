"""The call that a launch makes, pickled once for all ranks, and the preview of a launch."""

from __future__ import annotations

import contextlib
import copy
import inspect
import linecache
import logging
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from parawrap._public import public
from parawrap.displays import Table
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._platform import Platform
from parawrap.launch.messages._pack_exception import add_note
from parawrap.launch.messages._pickle_values import ScriptNotes, pack_with_script, unpack_with_script
from parawrap.launch.rank._process_groups import plan_store

if TYPE_CHECKING:
    from parawrap.launch.coordinator._calls import Calls

__all__ = ["DECORATED", "Job", "Preview", "check_function", "check_signature", "preview", "unpack_call"]

_SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE

DECORATED: dict[type, Callable[..., Job]] = {}
"""Classes of functions that are decorated for launches, with a function that makes the job of a call."""

_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Job:
    """One call of a function on a platform. Frozen; may be launched any number of times.

    Attributes:
        bound_to: The object of a bound method, as a tuple of one; empty for a function.
        sent_as: An object to send instead of the function. Unpickling it gives the function.
        names: In a rank, further names of the script.
        calls: The calls of ranks that stay. Their function serves these calls.
        label: The name for messages, if it is not that of the function.
        line: A socket for a function that serves requests. The rank gets its descriptor as the first argument, and may be
            idle for long. Local launches of one rank only.
        number: The number of the launch among those of `map`. It stands in front of the output, and in the trace's name.
    """

    platform: Platform
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    sent_as: Any = None
    bound_to: tuple[Any, ...] = ()
    line: int | None = None
    number: int | None = None
    names: _ScriptNames | None = None
    calls: Calls | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return self.label or str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    @property
    def sent_platform(self) -> Platform:
        """The platform as ranks see it, without the fields that only the launching process uses."""
        sent = copy.copy(self.platform)
        object.__setattr__(sent, "upon_finish", None)
        object.__setattr__(sent, "slurm_additional_parameters", None)
        if sent.device in (Device.GPU, Device.NEURON):  # fixed here: a rank may see only its own device
            object.__setattr__(sent, "n_gpus", self.platform.ranks_per_node)
        return sent

    def call(self, *before: Any) -> Any:
        """Call the function in this process, with further arguments in front of its own."""
        return self.function(*self.bound_to, *before, *self.args, **(self.kwargs or {}))

    def packed(self) -> int:
        """Return an open file with everything that a rank needs to make the call.

        Raises:
            UnsendableError: If the function or an argument cannot be pickled. The message names the unpicklable part.
        """
        call = {
            "the platform": self.sent_platform,
            "the function": self.function if self.sent_as is None else self.sent_as,
            "the object": self.bound_to,
            "args": self.args,
            "kwargs": self.kwargs or {},
            "script": ScriptNotes(),
        }
        return pack_with_script(call, "call")

    def finish(self) -> None:
        """Call ``upon_finish`` after all ranks have returned. Log its exception, so that the results are not lost."""
        try:
            if self.platform.upon_finish is not None:
                self.platform.upon_finish()
        except Exception:  # noqa: BLE001 (user code may raise anything)
            _log.exception("upon_finish failed after all ranks of %s had returned; their results are kept", self.name)


def check_function(function: Any, face: str = "ranks cannot run") -> None:
    """Raise TypeError if ranks cannot run this object, or cannot send what it returns. `face` begins the message."""
    if type(function) is types.FunctionType and not function.__code__.co_flags & _SUSPENDS and not function.__dict__:
        return  # the usual case, without the cost of `inspect`
    if not callable(function):
        msg = f"{face} {function!r}, which is not callable. Give it a function"
        raise TypeError(msg)
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        msg = f"{function.__qualname__} returns a coroutine or a generator, which a rank cannot send. Return values instead"
        raise TypeError(msg)


def _fits_plainly(function: types.FunctionType, args: int, kwargs: int) -> bool:
    """True if a function without keyword-only arguments and decorations takes this number of positional arguments."""
    code = function.__code__
    if kwargs or code.co_kwonlyargcount or function.__dict__:
        return False
    return code.co_argcount - len(function.__defaults__ or ()) <= args <= code.co_argcount


def check_signature(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise Python's TypeError if the arguments do not match the signature, before any rank starts."""
    if type(function) is types.FunctionType and _fits_plainly(function, len(args), len(kwargs)):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        msg = f"{getattr(function, '__name__', function)}() {error}"
        if next(iter(signature.parameters), "") == "cls" and not isinstance(next(iter(args), type), type):
            msg += ". Since Python 3.13, write @wrapper(...) above @classmethod to use submit, map, dry_run, and inline"
        raise TypeError(msg) from None


def unpack_call(file: int) -> Job:
    """Return the job from a file of `Job.packed`. Called in a rank.

    Functions and classes of the user's script are added to this process's ``__main__``. torch.save, all_gather_object, and
    other code that pickles by name finds them there.
    """
    call, load_names = unpack_with_script(file)
    script = call["script"]
    main = vars(sys.modules["__main__"])
    main |= script["objects"] | main  # a name may stand for a decorated function
    linecache.cache.update((name, (0, None, lines, name)) for name, lines in script["sources"].items())
    names = _ScriptNames(load_names)
    if script["reads_names"]:
        names.load()
    main["__getattr__"] = names.find
    return Job(
        call["the platform"], call["the function"], call["args"], call["kwargs"], bound_to=call["the object"], names=names
    )


class _ScriptNames:
    """Further names of the script, in a rank. They are loaded when one of them is used."""

    def __init__(self, load: Callable[[], tuple[dict[str, Any], dict[str, str]]]) -> None:
        self._load: Callable[[], tuple[dict[str, Any], dict[str, str]]] | None = load
        self._unsent: dict[str, str] = {}
        self._loading = threading.RLock()

    def load(self) -> None:
        """Add the names to this process's ``__main__``. Names that it has keep their values."""
        with self._loading:
            load, self._load = self._load, None
            if load is not None:
                main = vars(sys.modules["__main__"])
                before = dict(main)
                names, self._unsent = load()
                main |= names | before

    def find(self, name: str) -> Any:
        """Return the value of a name that ``__main__`` lacks. Called as its ``__getattr__``."""
        main = sys.modules["__main__"]
        if not name.startswith("_"):
            self.load()
        if name in vars(main):
            return vars(main)[name]
        msg = f"module {main.__name__!r} has no attribute {name!r}"
        raise AttributeError(msg, name=name, obj=main)

    def explain(self, error: BaseException) -> None:
        """Add a note to an exception that reports one of the names as missing."""
        if not isinstance(error, (NameError, LookupError, AttributeError)):
            return
        with contextlib.suppress(Exception):
            self.load()
            for name in sorted(each for each in self._unsent if f"'{each}'" in str(error)):
                msg = (
                    f"the rank lacks the name {name!r} of the script, because {self._unsent[name]}: use the name "
                    "itself in the function, pass the value as an argument, or put the definition into a module"
                )
                add_note(error, msg)


@public
@dataclass(frozen=True, repr=False)
class Preview:
    """A description of a launch that is not started; ``print`` shows it.

    Attributes:
        launcher: The name of the launcher.
        function: The name of the function.
        command: How the ranks would be started.
        meeting: The address of the store where the ranks would meet; None if they form no process group.
        groups: The process groups that the ranks would form.
        ranks: One line per rank.
        payload: The number of bytes that each rank would receive.
        script: The batch script for the cluster; empty for other launchers.

    >>> from parawrap import Platform, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def train(lr):
    ...     return lr
    >>> preview = train.dry_run(0.1)
    >>> preview.launcher, preview.ranks
    ('local', ('rank 0: node 0, local rank 0, cpu', 'rank 1: node 0, local rank 1, cpu'))
    """

    launcher: str
    function: str
    command: str
    meeting: str | None
    groups: str
    ranks: tuple[str, ...]
    payload: int
    script: str = ""

    def __repr__(self) -> str:
        return f"<Preview of {self.function}: {len(self.ranks)} ranks on launcher {self.launcher!r}>"

    def __str__(self) -> str:
        return "\n".join([*self._facts(), *self.ranks, *([self.script] if self.script else [])])

    def _repr_html_(self) -> str:
        rows = [each.split(": ", 1) for each in self.ranks]
        table = Table("\n".join(self._facts()), ("rank", "place"), rows, texts=("rank", "place"))
        return table.html() + (f"<pre>{escape(self.script)}</pre>" if self.script else "")

    def _facts(self) -> list[str]:
        return [
            f"{self.function} on launcher {self.launcher!r}: {self.command}",
            f"meeting at {self.meeting}; {self.groups}" if self.meeting else "no process group",
            f"{self.payload:,} bytes of function and arguments for each of {len(self.ranks)} ranks",
        ]


def preview(job: Job, launcher: str, command: str, *, host: str | None = None, script: str = "") -> Preview:
    """Return the preview of a launch. Pickle the call, so that an unpicklable argument raises here too."""
    platform = job.platform
    file = job.packed()
    try:
        payload = os.fstat(file).st_size
    finally:
        os.close(file)
    meeting = plan_store(platform, host)
    groups = ", ".join(str(list(group)) for group in platform.ipc_groups or ())
    return Preview(
        launcher=launcher,
        function=job.name,
        command=command,
        meeting=None if meeting is None else str(meeting),
        groups=f"process groups {groups}" if groups else "one process group",
        ranks=tuple(f"rank {rank}: {_place(platform, rank)}" for rank in range(platform.world_size)),
        payload=payload,
        script=script,
    )


def _place(platform: Platform, rank: int) -> str:
    node, local_rank = divmod(rank, platform.ranks_per_node)
    return f"node {node}, local rank {local_rank}, {rank_device(Device(platform.device), local_rank)}"
