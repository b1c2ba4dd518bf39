"""What functions of a model capture, the globals that they read, and its classes: they travel with the model."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from operator import is_
from types import CellType, CodeType, FunctionType
from typing import Any

__all__ = ["CapturedValues"]

_ABSENT = object()


class CapturedValues:
    """The code, closures, and globals of some functions, and the attributes of some classes, at one moment, by identity."""

    def __init__(self, sent: Iterable[FunctionType | type]) -> None:
        sent = [*sent]
        functions = [each for each in sent if isinstance(each, FunctionType)]
        self._functions = functions
        self._classes = [each for each in sent if isinstance(each, type)]
        self._cells = [cell for function in functions for cell in function.__closure__ or ()]
        self._globals = [(each.__globals__, name) for each in functions for name in set(_globals_read(each.__code__))]
        self._before = self._now()

    def intact(self) -> bool:
        """True if no variable has another value."""
        now = self._now()
        return len(now) == len(self._before) and all(map(is_, now, self._before))

    def _now(self) -> list[Any]:
        return [
            *map(_content, self._cells),
            *(names.get(name, _ABSENT) for names, name in self._globals),
            *(part for each in self._functions for part in (each.__code__, each.__defaults__, each.__kwdefaults__)),
            *(part for each in self._classes for part in vars(each).values()),
        ]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # no value yet
        return _ABSENT


def _globals_read(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, also in its inner functions."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_read(constant)
