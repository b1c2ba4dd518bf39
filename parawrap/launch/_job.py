"""The call that a launch makes, and the preview of a launch."""

from __future__ import annotations

import copy
import inspect
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from parawrap._public import public
from parawrap.displays import Table
from parawrap.launch._devices import Device, rank_device
from parawrap.launch._platform import Platform
from parawrap.processes.pickling import Packed
from parawrap.processes.script import SentScript

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
        number: The number of the launch among those of `map`. It stands in front of the output.
        beside: The number of launches that run on this machine at the same time, and share its cores.
    """

    platform: Platform
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    sent_as: Any = None
    bound_to: tuple[Any, ...] = ()
    number: int | None = None
    beside: int = 1

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    @property
    def sent_platform(self) -> Platform:
        """The platform as ranks see it, without the fields that only the launching process uses."""
        sent = copy.copy(self.platform)
        object.__setattr__(sent, "upon_finish", None)
        object.__setattr__(sent, "slurm_additional_parameters", None)
        if sent.device in (Device.GPU, Device.NEURON):  # fixed here: a rank may see only its own device
            object.__setattr__(sent, "n_gpus", self.platform.ranks_per_node)
        return sent

    def call(self) -> Any:
        """Call the function in this process."""
        return self.function(*self.bound_to, *self.args, **(self.kwargs or {}))

    def pack(self, script: SentScript | None = None) -> Packed:
        """Pickle the call, with the globals that its ranks lack.

        Raises:
            UnsendableError: If the function or an argument cannot be pickled. The message names the unpicklable part.
        """
        function = self.function if self.sent_as is None else self.sent_as
        return (script or SentScript()).pack_call(function, self.args, self.kwargs or {}, self.bound_to)

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

    @classmethod
    def of(cls, job: Job, launcher: str, command: str, meeting: str | None, script: str = "") -> Preview:
        """Describe a launch. Pickle the call, so that an unpicklable argument raises here too."""
        platform = job.platform
        groups = ", ".join(str(list(group)) for group in platform.ipc_groups or ())
        ranks = []
        for rank in range(platform.world_size):
            node, local_rank = divmod(rank, platform.ranks_per_node)
            device = rank_device(Device(platform.device), local_rank)
            ranks.append(f"rank {rank}: node {node}, local rank {local_rank}, {device}")
        groups = f"process groups {groups}" if groups else "one process group"
        return cls(launcher, job.name, command, meeting, groups, tuple(ranks), job.pack().size, script)

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
