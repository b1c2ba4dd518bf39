"""A rank's assignment, and the state of the launching process that the rank takes over."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

from parawrap.launch.ranks._groups import Rendezvous
from parawrap.launch.ranks._setup import Place

__all__ = ["Assignment", "Surroundings"]

_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Surroundings:
    """The state that a function may rely on next to its arguments: environment, folder, import path, command line."""

    environ: dict[str, str] | None  # None: the ranks run on other machines, which have their own environment
    cwd: str | None
    path: list[str]
    argv: list[str]
    main_file: str | None

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        try:
            cwd: str | None = str(Path.cwd())
        except FileNotFoundError:
            _log.warning("the working folder of this process was deleted: the ranks run in the root folder")
            cwd = None
        main_file = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls(dict(os.environ), cwd, list(sys.path), list(getattr(sys, "argv", [""])), main_file)

    def take_over(self) -> None:
        """Apply them to this process."""
        if self.environ is None:
            self._take_over_elsewhere()
        else:
            _become(self.environ)
            if self.cwd is not None:
                with contextlib.suppress(FileNotFoundError):  # deleted since
                    os.chdir(self.cwd)
            sys.path[:] = self.path
        sys.argv[:] = self.argv
        sys.modules["__main__"] = types.ModuleType("__main__")
        if self.main_file is not None:
            sys.modules["__main__"].__file__ = self.main_file

    def without_environ(self) -> Surroundings:
        """Return the part that is valid on other machines. Variables may hold secrets."""
        return replace(self, environ=None)

    def _take_over_elsewhere(self) -> None:
        """Apply what exists on this machine."""
        if self.cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.cwd)
        sys.path[:0] = [each for each in self.path if each not in sys.path]


@dataclass(frozen=True)
class Assignment:
    """One rank's place, and all that it needs to take it. The packed call comes with it in a file.

    Attributes:
        tells_of_life: True if the rank reports that its main thread makes progress.
        stuck_s: seconds after which a wait for ranks that have left is reported.
        still_s: seconds after which an idle main thread is reported.
        on_cluster: True if a cluster sends signals to the rank that are not meant for it.
        interface: the network interface by which the other nodes are reached.
    """

    place: Place
    meeting: Rendezvous | None
    surroundings: Surroundings
    grace_s: float
    tells_of_life: bool
    stuck_s: float
    still_s: float = float("inf")
    on_cluster: bool = False
    interface: str | None = None


def _become(environ: dict[str, str]) -> None:
    """Make these the variables of this process, and touch only those that differ."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
