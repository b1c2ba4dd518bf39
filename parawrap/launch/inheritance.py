"""The rank and its variables, as the children of a rank find them.

| child of a rank | finds the rank, and its variables |
|---|---|
| by fork | yes: it has the memory of the rank |
| by multiprocessing (fork, forkserver, spawn), as the workers of a DataLoader | yes |
| another program: subprocess, sbatch, tmux | no: it may launch ranks |
| another program that gets a copy of ``os.environ`` | `is_inherited` is true for the variables |

torchrun sets variables such as RANK for libraries, and so does a rank. But programs that it starts
must not take them for their own: a launch in such a program would wait for ranks that never come.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from parawrap._private_names import process_configuration, set_in_python, update_in_python

_MARK = "PARAWRAP_RANK"
_OF_A_PLACE = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)
"""Variables that name the place of a rank.

If a program of a rank starts a launcher, the launcher sets some of them again.
"""

_OF_A_TASK = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables by which programs find that they are a task of srun or mpirun."""

# Keys of the configuration that multiprocessing hands to children
_RANK, _VARIABLES = "parawrap_rank", "parawrap_variables"


class _ByName:
    """A function that pickles as its name, such as "os:environ.update", with no class of parawrap.

    A process that unpickles it does not import parawrap and torch.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    # pickle accepts only callables as the first part of a reduction. Nothing else calls it here
    def __call__(self, *args: Any) -> Any:
        return resolve_name(self._name)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_name, (self._name,)


class _Variables:
    """Variables that a child of multiprocessing sets while it unpickles its configuration.

    It pickles as a call of the function that sets them. Nothing uses the value of this call.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._function, self._argument = update_in_python(variables)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ByName(self._function), (self._argument,)


def show_variables(variables: Mapping[str, str]) -> None:
    """Set variables for code of this process, and for its children of multiprocessing.

    ``os.environ`` is a dict and the environment of the C library, which `subprocess` hands to other
    programs. Only the dict is written here.
    """
    for name, value in variables.items():
        set_in_python(name, value)
    mark = _place_in(os.environ)  # of the variables that were set above
    set_in_python(_MARK, mark)
    for name in _OF_A_TASK:
        # In the C library only: code of this process still finds the task that it is
        os.unsetenv(name)
    process_configuration()[_VARIABLES] = _Variables({**variables, _MARK: mark})


def is_inherited(environ: Mapping[str, str]) -> bool:
    """True if the variables of a world are those of a rank that parawrap has started.

    A program that the rank starts may have copies of them. If a launcher has started the program,
    it has set some variables again, and the mark does not fit them any more.
    """
    mark = environ.get(_MARK)
    return mark is not None and mark == _place_in(environ)


def _place_in(environ: Mapping[str, str]) -> str:
    return "/".join(environ.get(name, "") for name in _OF_A_PLACE)


def pass_on_rank(pickled: bytes | None) -> None:
    """Hand the pickled rank of this process to its children of multiprocessing; None for no rank.

    Each new process gets a copy of the configuration of its parent.
    """
    if pickled is None:
        process_configuration().pop(_RANK, None)
    else:
        process_configuration()[_RANK] = pickled


def passed_on_rank() -> bytes | None:
    """Return the pickled rank that this process, or its parent, hands to children."""
    return process_configuration().get(_RANK)


@contextmanager
def restored_variables(*names: str) -> Iterator[None]:
    """Give variables the values that they had before the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
