"""Values that travel with the functions and classes of a model: closures, globals, code, and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from types import CellType, FunctionType
from typing import Any

from parawrap.engine.survey import names_of_globals

_ABSENT = object()


class CapturedValues:
    """The code, closures, and globals of some functions, and the attributes of some classes, at one moment, by identity."""

    def __init__(self, sent: Iterable[FunctionType | type]) -> None:
        sent = [*sent]
        functions = [each for each in sent if isinstance(each, FunctionType)]
        self._functions = functions
        self._classes = [each for each in sent if isinstance(each, type)]
        self._cells = [cell for function in functions for cell in function.__closure__ or ()]
        self._globals = [(each.__globals__, name) for each in functions for name in names_of_globals(each.__code__)]
        self._before = self._read()

    def intact(self) -> bool:
        """True if no variable has another value."""
        now = self._read()
        return len(now) == len(self._before) and all(map(is_, now, self._before))

    def _read(self) -> list[Any]:
        return [
            *map(_read_cell, self._cells),
            *(names.get(name, _ABSENT) for names, name in self._globals),
            *(part for each in self._functions for part in (each.__code__, each.__defaults__, each.__kwdefaults__)),
            *(part for each in self._classes for part in vars(each).values()),
        ]


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # no value yet
        return _ABSENT
