"""The private names of torch and Python that launches use. CONTRIBUTING.md lists them."""

from __future__ import annotations

import weakref
from typing import Any

from parawrap._private_name import private_name

__all__ = [
    "REGISTERED_BY_MODULES",
    "TEMPORARY_FILE",
    "forget_exit_handlers",
    "forget_finalizers",
    "join_threads",
    "run_exit_handlers",
]


def _name(path: str) -> Any:
    return private_name(path, "launches")


REGISTERED_BY_MODULES = ("_modules", "_parameters", "_buffers")  # attributes of torch.nn.Module

forget_exit_handlers = _name("atexit._clear")
run_exit_handlers = _name("atexit._run_exitfuncs")
join_threads = _name("threading._shutdown")  # waits for non-daemon threads, and ends idle workers of thread pools
TEMPORARY_FILE = _name("tempfile._TemporaryFileWrapper")  # the class of tempfile.NamedTemporaryFile's results


def forget_finalizers() -> None:
    """Drop the finalizers that weakref.finalize runs at exit, such as those of tempfile.TemporaryDirectory."""
    _name("weakref.finalize._registry").clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # pyright: ignore
