"""The private names of torch, Python, and cloudpickle that this package uses. CONTRIBUTING.md lists them."""

from __future__ import annotations

import os
import weakref
from typing import Any

from parawrap._private_name import private_name


def _name(path: str) -> Any:
    return private_name(path, "launches")


run_exit_handlers = _name("atexit._run_exitfuncs")
join_threads = _name("threading._shutdown")  # waits for non-daemon threads, and ends idle workers of thread pools
names_in_code = _name("cloudpickle.cloudpickle._extract_code_globals")  # the globals that a code object uses
goes_by_name = _name("cloudpickle.cloudpickle._should_pickle_by_reference")
make_class = _name("cloudpickle.cloudpickle._make_skeleton_class")  # in the reduction of a class by value
id_of_class = _name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS")
class_of_id = _name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID")
interpreter_options = _name("subprocess._args_from_interpreter_flags")  # flags and warning filters of this interpreter
raw_environ: Any = getattr(os.environ, "_data", os.environ)  # compared at each call, and decoded only if it changed
_finalizers: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})  # without it, ranks exit later


def keep_finalizers_from_exits() -> None:
    """Do not run the finalizers that exist now at the exit of this process and of its forks."""
    for finalizer in list(_finalizers):
        finalizer.atexit = False


def sequence_number_of(group: Any) -> int:
    """Return the number of operations that this process has begun in a process group."""
    return int(group._get_sequence_number_for_group())
