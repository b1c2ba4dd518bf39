"""The private names of torch and Python that launches use. CONTRIBUTING.md lists them."""

from __future__ import annotations

from typing import Any

from parawrap._private_name import private_name

__all__ = ["REGISTERED_BY_MODULES", "forget_exit_handlers", "join_threads", "run_exit_handlers"]


def _name(path: str) -> Any:
    return private_name(path, "launches")


REGISTERED_BY_MODULES = ("_modules", "_parameters", "_buffers")  # attributes of torch.nn.Module

forget_exit_handlers = _name("atexit._clear")
run_exit_handlers = _name("atexit._run_exitfuncs")
join_threads = _name("threading._shutdown")  # waits for non-daemon threads, and ends idle workers of thread pools
