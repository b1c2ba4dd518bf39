"""One line of ``parawrap doctor``, and commands that it runs with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

__all__ = ["Check", "run_command"]


class Check(NamedTuple):
    """The state of one part of a machine.

    Attributes:
        name: The part.
        state: "ok"; "missing", if an optional part is not there; "warning", if parawrap works, but this part is limited or
            cannot be used; "problem", if something that should work does not.
        detail: The finding.
        cure: The remedy; empty if there is nothing to do.
        traceback: The traceback of a check that failed.
    """

    name: str
    state: Literal["ok", "missing", "warning", "problem"]
    detail: str
    cure: str = ""
    traceback: str = ""


def run_command(command: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Return the exit code, output, and errors of a command. After `limit_s` seconds, kill it and its process group."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            start_new_session=True,
        )
    except OSError as error:  # no such command, or the system allows no further process
        return 1, "", f"the process did not start: {error}"
    with process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return 1, "", f"not done after {limit_s:g} seconds"
            raise
    return process.returncode, output, errors
