"""`wrapper` and `Wrapper`: run a function once per rank of a platform.

This module checks, binds, and pickles functions. `parawrap.launch` starts the processes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from parawrap._private_names import goes_by_name, imports_main
from parawrap._public import public
from parawrap.api._decorated import Decorated, is_global, look_up
from parawrap.api.sweep import Sweep, run_job
from parawrap.displays import spell_count
from parawrap.errors import LaunchError, PlatformError, add_note
from parawrap.launch import (
    DECORATED,
    Job,
    Launch,
    Platform,
    RankResults,
    cancel_runs,
    check_function,
    check_signature,
    current_rank,
    inside_a_rank,
    launch,
    launcher_name,
    preview,
    run_inline,
    running,
)
from parawrap.processes.pickling import is_importable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")
R = TypeVar("R", covariant=True)
T = TypeVar("T")


class Launchable(Decorated, Generic[P, R]):
    """A function or bound method decorated with ``@wrapper(platform)``.

    It has no state that changes, and is thread-safe.
    """

    @property
    def platform(self) -> Platform:
        """The platform of the decorator."""
        platform: Platform = self._setting  # the argument of the decorator
        return platform

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> RankResults[R]:
        """Run the function once per rank, wait, and return the value of each rank."""
        job = self._job(args, kwargs)
        _check(job)
        return run_job(job)

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Launch[R]:
        """Start the ranks and return a handle without waiting."""
        job = self._job(args, kwargs)
        _check(job)
        try:
            return launch(job)
        except BaseException:  # after Ctrl-C, the caller has no handle to cancel the launch
            cancel_runs(running(job))
            raise

    def map(self, configs: Iterable[Any], /, *, max_parallel: int | None = None) -> Sweep[R]:
        """Launch ``function(item)`` once per item, and yield the results of each launch in order.

        If a launch fails, the iterator yields its exception in place of results, and continues.

        Args:
            configs: The items. All are read before the first launch.
            max_parallel: The number of launches that run at the same time. By default one on this
                machine, and all of them on a cluster. On Slurm, the launches form one job array. In
                the processes of torchrun, srun, or mpirun, they run one after another. On this
                machine, launches that run at the same time have different accelerators, or on
                the CPU different cores. The next launch gets those of a launch that has ended.
                ``map(...).dry_run()`` shows them.

        Raises:
            ValueError: If `max_parallel` is not an int of 1 or more.
            PlatformError: If launches that run on this machine at the same time have one
                ``master_port``.

        >>> from parawrap import Platform, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def train(lr):
        ...     return 1 / lr
        >>> list(train.map([0.5, 0, 0.1]))
        [RankResults(2.0, 2.0), ZeroDivisionError('division by zero'), RankResults(10.0, 10.0)]
        """
        is_number = isinstance(max_parallel, int) and max_parallel >= 1
        if max_parallel is not None and not is_number:
            msg = f"max_parallel={max_parallel!r}: use an int of 1 or more, or None for the default"
            raise ValueError(msg)
        jobs = []
        for number, config in enumerate(configs):
            job = self._job((config,), {})
            jobs.append(replace(job, number=number))
            # Checked before the first launch: a wrong item costs no work
            try:
                _check(job)
            except TypeError as error:
                note = (
                    "map passes each item as the one argument. To unpack dicts, decorate a "
                    "function that does: lambda config: train.__wrapped__(**config)"
                )
                add_note(error, note)
                raise
        _check_port(self.platform, max_parallel)
        return Sweep(jobs, max_parallel)

    def dry_run(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Describe the launch without starting it: its ranks, and on Slurm the script.

        Raises:
            UnsendableError: If the function or an argument cannot be sent.

        >>> from parawrap import Platform, wrapper
        >>> train = wrapper(Platform(device="cpu", n_cpus=1))(print)
        >>> print(train.dry_run("hello"))
        print on launcher 'local': 1 process on this machine, forked from one with torch loaded
        ...
        rank 0: node 0, local rank 0, cpu
        """
        return preview(self._job(args, kwargs))

    def inline(self, /, *args: P.args, **kwargs: P.kwargs) -> RankResults[R]:
        """Run the function in this process as rank 0 of 1, for use with a debugger."""
        job = self._job(args, kwargs)
        # Without `_check`: the call of the function itself raises the error of wrong arguments
        _refuse_in_a_rank(job)
        return run_inline(job)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Launchable[P, R]: ...
    @overload
    def __get__(
        self: Launchable[Concatenate[S, Q], R], instance: S, owner: Any = None
    ) -> Launchable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return super().__get__(instance, owner)

    def __repr__(self) -> str:
        name = getattr(self.__wrapped__, "__qualname__", repr(self.__wrapped__))
        ranks = spell_count(self.platform.world_size, "rank")
        return f"<{name} on {ranks} of {self.platform.device}>"

    def _job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        """Return the job of one call.

        A bound method is sent as its function and its object. By its name, a rank would find the
        decorated method, and launch again.
        """
        function: Any = self.__wrapped__
        bound_to: tuple[Any, ...] = ()
        if isinstance(function, types.MethodType):
            bound_to = (function.__self__,)
            function = function.__func__
        # Of a bound method, only the decorated function in the class has a name that leads to it
        stand_in = _Undecorated.of(self._defined or self)
        return Job(self.platform, function, args, kwargs, sent_as=stand_in, bound_to=bound_to)


class _Undecorated:
    """A stand-in for the function inside a global decorated function. It unpickles as the former.

    Pickled by value, the function would take along every global that it uses, such as locks and
    open files.
    """

    def __init__(self, decorated: Decorated) -> None:
        self._place = (decorated.__module__, decorated.__qualname__)

    @classmethod
    def of(cls, decorated: Decorated) -> _Undecorated | None:
        """Return a stand-in; None if another process cannot import the function.

        The function is then sent by value.
        """
        module = decorated.__module__
        # In a rank, __main__ is another script
        if module == "__main__" or not is_global(decorated):
            return None
        # The user may have told cloudpickle to send the module by value
        if not goes_by_name(sys.modules[module]) or not is_importable(module):
            return None
        return cls(decorated)

    def __reduce__(self) -> tuple[Any, ...]:
        return _look_up_undecorated, self._place


def _look_up_undecorated(module: str, qualname: str) -> Any:
    """Return the function inside the decorated function with this name."""
    wrapped = look_up(module, qualname).__wrapped__
    return getattr(wrapped, "__func__", wrapped)  # the function of a classmethod or staticmethod


# Ranks that stay run decorated functions too. `launch`, which must not import this module, looks up
# here how a call of one becomes a job
DECORATED[Launchable] = Launchable._job


@public
def wrapper(platform: Platform) -> Callable[[Callable[P, T]], Launchable[P, T]]:
    """Run the decorated function once per rank of `platform`, and return the value of each rank.

    Any function works: global or local, a lambda, a method, a function of a notebook cell.
    cloudpickle sends the function, its arguments, and its results. Tensors arrive on the CPU.

    Inside the function, ``current_rank()`` describes the rank, and torch.distributed works. When a
    rank fails, parawrap ends the other ranks. The exception of the rank that failed first is raised
    here with its own type, and with the remote traceback in its notes.

    The decorated function has these methods and attributes:

    - ``submit(...)`` starts the ranks and returns a handle without waiting.
    - ``map(items)`` launches the function once per item.
    - ``dry_run(...)`` describes the launch without starting it.
    - ``inline(...)`` runs the function in this process, for use with a debugger.
    - ``__wrapped__`` is the original function.

    Args:
        platform: The devices, the number of ranks, and the launcher.

    Raises:
        PlatformError: If `platform` is not a `Platform`.
        TypeError: If the decorated object is not callable, or is a coroutine or generator function.
        UnsendableError: At the call, if the function, an argument, or a result cannot be sent. The
            message names the part that cannot.
        RankDiedError: At the call, if a rank was killed, or exited without returning.
        LaunchTimeoutError: At the call, if ranks exceed the platform's ``timeout_min`` or
            ``hang_timeout_s``.
        LaunchError: At the call, if it is made inside a rank, or the ranks cannot be started.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from parawrap import Platform, current_rank, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def total(start, step=1):
        ...     value = torch.tensor(start + step * current_rank().global_rank)
        ...     dist.all_reduce(value)
        ...     return value.item()
        >>> total(10, step=5)
        RankResults(25, 25)
    """
    _check_platform(platform, "wrapper")

    def decorate(function: Callable[P, T]) -> Launchable[P, T]:
        # The function of a classmethod or staticmethod
        bare = getattr(function, "__func__", function)
        check_function(bare, "wrapper cannot decorate")
        if isinstance(bare, Launchable):
            name = getattr(bare.__wrapped__, "__qualname__", "function")
            msg = (
                f"{name} is decorated with @wrapper already. To launch it on another platform, "
                f"decorate the function in it: wrapper(platform)({name}.__wrapped__)"
            )
            raise TypeError(msg)
        return Launchable(function, platform)

    return decorate


@public
class Wrapper:
    """Launcher of functions that get their rank as arguments. Immutable and thread-safe.

    Args:
        platform: The devices, the number of ranks, and the launcher.

    Raises:
        PlatformError: If `platform` is not a `Platform`.

    Example:
        >>> from parawrap import Platform, Wrapper
        >>> def task(global_rank, local_rank, process_group, args):
        ...     return f"{args[0]} in rank {global_rank}"
        >>> Wrapper(Platform(device="cpu", n_cpus=2)).start(task, ("example",))
        RankResults('example in rank 0', 'example in rank 1')
    """

    def __init__(self, platform: Platform) -> None:
        _check_platform(platform, "Wrapper")
        self.platform = platform

    def __repr__(self) -> str:
        return f"Wrapper({self.platform!r})"

    def start(
        self,
        task: Callable[[int, int, ProcessGroup | None, tuple[Any, ...] | None], T],
        args: tuple[Any, ...] | None = None,
    ) -> RankResults[T]:
        """Run the task once per rank, and return the value of each rank.

        Args:
            task: The function to run. It gets the global rank, the local rank, the process group
                (None without one), and `args`.
            args: A tuple for the task, or None.

        Raises:
            TypeError: If `task` is not callable, or `args` is neither a tuple nor a list.
            LaunchError: As for a function decorated with `wrapper`.
        """
        check_function(task, "Wrapper.start cannot run")
        if args is not None and not isinstance(args, (tuple, list)):
            msg = (
                f"args={args!r} is not a tuple. Give Wrapper.start the task's arguments as a "
                f"tuple: ({args!r},)"
            )
            raise TypeError(msg)
        job = Job(self.platform, _as_function(task, has_args=args is not None), tuple(args or ()))
        _refuse_in_a_rank(job, f"{job.name}(...)")
        check_signature(task, (0, 0, None, args), {})
        return run_job(job)


def _as_function(task: Callable[..., T], *, has_args: bool) -> Callable[..., T]:
    """Return a function that takes the items of `args` as its arguments, and calls the task.

    The items are arguments of the function, so that an error names the item that cannot be sent.
    Without `has_args`, the task gets None.
    """

    def run(*args: Any) -> T:
        rank = current_rank()
        return task(rank.global_rank, rank.local_rank, rank.group, args if has_args else None)

    run.__qualname__ = getattr(task, "__qualname__", type(task).__qualname__)
    return run


def _check(job: Job) -> None:
    """Raise if a call cannot succeed, before any rank starts."""
    _refuse_in_a_rank(job)
    check_signature(job.function, (*job.bound_to, *job.args), job.kwargs)


def _refuse_in_a_rank(job: Job, plain_call: str | None = None) -> None:
    """Raise if a rank, or a child of multiprocessing that starts, launches a job.

    `plain_call` is the code that runs the function in the rank; by default, of a decorated
    function.
    """
    if imports_main():
        msg = (
            f"{job.name} was launched while a process of multiprocessing, such as a spawned loader "
            "worker, ran the main script again. Put the script's code under "
            "if __name__ == '__main__':"
        )
        raise LaunchError(msg)
    if inside_a_rank():
        rank = current_rank()
        call = plain_call or f"{job.name}.__wrapped__(...)"
        msg = (
            f"{job.name} was launched within rank {rank.global_rank} of {rank.world_size}: a rank "
            f"cannot launch ranks. Call {call} to run it in this rank only"
        )
        raise LaunchError(msg)


def _check_port(platform: Platform, max_parallel: int | None) -> None:
    """Refuse one port for several launches that run on this machine at the same time."""
    if max_parallel in (None, 1) or launcher_name(platform) != "local":
        return
    if platform.master_port:
        msg = (
            f"master_port={platform.master_port}: each of max_parallel={max_parallel} launches "
            "needs a port of its own. Leave master_port out, or use max_parallel=1"
        )
        raise PlatformError(msg)


def _check_platform(platform: object, caller: str) -> None:
    """Refuse a decorator or class that got another value than a platform."""
    if not isinstance(platform, Platform):
        cure = f"Write {caller}(Platform(device=...))"
        msg = f"{caller} got {platform!r} instead of a platform. {cure}"
        raise PlatformError(msg)
