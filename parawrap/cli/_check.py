"""One line of ``parawrap doctor``."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Check"]


class Check(NamedTuple):
    """The state of one part of a machine.

    Attributes:
        name: The part.
        state: "ok"; "missing", if an optional part is not there; "warning", if parawrap works, but this part is limited or
            cannot be used; "problem", if something that should work does not.
        detail: What was found.
        cure: What to do; empty if there is nothing to do.
        milliseconds: The time of a trial.
        traceback: The traceback of a trial that failed.
    """

    name: str
    state: Literal["ok", "missing", "warning", "problem"]
    detail: str
    cure: str = ""
    milliseconds: float | None = None
    traceback: str = ""
