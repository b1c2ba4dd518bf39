"""The private names of torch and Python that launches use. CONTRIBUTING.md lists them."""

from __future__ import annotations

import atexit
import sys
import tempfile
import weakref
from typing import Any

from parawrap._private_name import private_name, private_reader

__all__ = [
    "REGISTERED_BY_MODULES",
    "TEMPORARY_FILE",
    "forget_exit_handlers",
    "forget_finalizers",
    "groups_of_process",
    "join_threads",
    "keep_finalizers_from_exits",
    "number_of_groups",
    "run_exit_handlers",
    "sequence_number_of",
    "version_of",
]


def _name(path: str) -> Any:
    return private_name(path, "launches")


REGISTERED_BY_MODULES = ("_modules", "_parameters", "_buffers")  # attributes of torch.nn.Module

forget_exit_handlers = _name("atexit._clear")
run_exit_handlers = _name("atexit._run_exitfuncs")
join_threads = _name("threading._shutdown")  # waits for non-daemon threads, and ends idle workers of thread pools
version_of = private_reader("torch.Tensor._version", "ranks that stay")
# The class of the files of tempfile.NamedTemporaryFile. Without it, such files of ranks stay.
TEMPORARY_FILE: Any = getattr(tempfile, "_TemporaryFileWrapper", ())
_finalizers: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})  # without it, ranks exit later


def groups_of_process() -> list[Any]:
    """Return the process groups that this process has joined."""
    return list(private_name("torch.distributed.distributed_c10d._world", "ranks that stay").pg_names)


def number_of_groups() -> int:
    """Return the number of process groups that this process has made; torch names them by it."""
    return int(private_name("torch.distributed.distributed_c10d._world", "ranks that stay").group_count)


def sequence_number_of(group: Any) -> int:
    """Return the number of operations that this process has begun in a process group."""
    return int(group._get_sequence_number_for_group())


def keep_finalizers_from_exits() -> None:
    """Do not run the finalizers that exist now at the exit of this process and of its forks."""
    for finalizer in list(_finalizers):
        finalizer.atexit = False


def forget_finalizers() -> None:
    """Drop the finalizers of weakref.finalize, such as those of temporary folders, and those of multiprocessing."""
    _name("weakref.finalize._registry").clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # pyright: ignore
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:  # as the forked processes of multiprocessing
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)
