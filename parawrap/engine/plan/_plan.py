"""The plan of a block as its user has it: what may be tried, what was measured and chosen, as a table and as a file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from parawrap.engine.plan._book import Book
from parawrap.engine.plan._case import machine, structure_of
from parawrap.engine.plan._file import default_path, merged, read, write
from parawrap.engine.plan._record import Record, check
from parawrap.engine.plan._way import Way
from parawrap.errors import PlanError

__all__ = ["Plan", "Rule", "plan_of"]

Rule = Literal["default", "auto", "lanes"]

_saving = threading.Lock()


class Plan:
    """In which way the calls of a parallel block are run; `print` shows what was measured and what was chosen.

    Every way gives the same answer up to rounding. Where it could be otherwise (0-d outputs, which lanes reduce; norms in
    train mode, which see the rows of one lane) calls are cut over all lanes, and nothing is tried.

    Args:
        rule: "auto" tries the ways that there are on the first real calls of each kind, and keeps the fastest. "default"
            compares two on the CPU, all lanes and the plain call, and elsewhere cuts every call over all lanes. "lanes"
            cuts every call over all lanes.
        keep_memory: with "auto", the process may be told to keep the memory that it frees (glibc's mallopt), where page
            faults cost time, until the block ends. That holds for all of the process.
        traced: with "auto", the module may be traced (`torch.jit.trace`), for calls in eval mode without gradients. A trace
            holds no interpreter lock; control flow that depends on values is lost in it, so this is to be said.

    Raises:
        PlanError: of a rule that there is not.

    Example:
        >>> import torch
        >>> from parawrap import Plan, parallel
        >>> model = torch.nn.Linear(64, 64).eval()
        >>> with torch.no_grad(), parallel(model, ["cpu", "cpu"], plan=Plan("auto", keep_memory=False)) as p:
        ...     for _ in range(30):
        ...         y = model(torch.randn(32, 64))
        >>> p.plan.extra_calls
        0
    """

    def __init__(self, rule: Rule = "auto", *, keep_memory: bool = True, traced: bool = False) -> None:
        if rule not in get_args(Rule):
            raise PlanError(_no_plan(rule))
        self.rule = rule
        self.keep_memory = keep_memory
        self.traced = traced
        self._access = threading.Lock()
        self._books: dict[str, Book] = {}
        self._stored: Sequence[Record] = ()

    @property
    def extra_calls(self) -> int:
        """How often the model was run beyond the calls that the user made: to trace it, and to check the trace."""
        return sum(book.extra_calls for book in self._in_order())

    def save(self, path: str | PathLike[str] | None = None) -> Path:
        """Write what was chosen to a file, beside what it has of other machines, devices, targets and releases of torch.

        Args:
            path: the file; by default plans.json in PARAWRAP_CACHE_DIR, or in ``~/.cache/parawrap``.

        Returns:
            The file's path.

        Raises:
            PlanError: it cannot be written, or is a file of something else.
        """
        where = default_path() if path is None else Path(path)
        with _saving:
            old = read(where) if where.exists() else []
            write(where, merged(old, [book.record() for book in self._in_order()]))
        return where

    @classmethod
    def load(cls, path: str | PathLike[str] | None = None, *, keep_memory: bool = True, traced: bool = False) -> Plan:
        """A plan of rule "auto" that takes its choices from a file, for what the file has been measured for.

        What was saved on another machine, with another release of torch, on other devices or of a model of another
        structure is left aside, and so is what is not allowed here, or was found by the default rule, which compares two
        ways only: such calls are measured as if there were no file.

        Raises:
            PlanError: the file cannot be read, or is no file of plans.
        """
        plan = cls("auto", keep_memory=keep_memory, traced=traced)
        where = default_path() if path is None else Path(path)
        plan._stored = read(where)
        try:
            for stored in plan._stored:
                for case in stored["cases"]:
                    check(case, len(stored["devices"]))
        except (KeyError, TypeError, AttributeError) as error:
            msg = f"{where} is a file of plans that lacks some of its parts, or has others ({error!r}); save it again"
            raise PlanError(msg) from error
        return plan

    def book(self, target: Any, devices: Sequence[str]) -> Book:
        """What is known of a target on these devices."""
        key = {
            "machine": machine(),
            "torch": torch.__version__,
            "devices": list(devices),
            "target": structure_of(target),
            "rule": self.rule,
        }
        with self._access:
            book = self._books.get(repr(key))
            if book is None:
                cases = [
                    case for one in self._stored if all(one[name] == key[name] for name in key) for case in one["cases"]
                ]
                name = getattr(target, "__name__", type(target).__name__)
                book = self._books[repr(key)] = Book(name, key, cases, self._allows)
            return book

    def __str__(self) -> str:
        books = self._in_order()
        lines = [f"plan {self.rule!r}, {self.extra_calls} extra calls"]
        for book in books:
            lines += book.table()
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan({self.rule!r}, keep_memory={self.keep_memory}, traced={self.traced})"

    def _allows(self, way: Way) -> bool:
        return (self.traced or not way.traced) and (self.keep_memory or not way.memory_kept)

    def _in_order(self) -> list[Book]:
        with self._access:
            return list(self._books.values())


def plan_of(given: Plan | str | None) -> Plan:
    """The plan that a user means: None is the default rule.

    Raises:
        PlanError: it is none.
    """
    if isinstance(given, Plan):
        return given
    if given is None or isinstance(given, str):
        return Plan(cast("Rule", "default" if given is None else given))
    raise PlanError(_no_plan(given))


def _no_plan(given: Any) -> str:
    return f"plan={given!r} is none of {', '.join(map(repr, get_args(Rule)))}, None, or a Plan"
