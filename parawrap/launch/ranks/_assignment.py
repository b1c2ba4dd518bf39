"""What a launch tells a rank, and the surroundings of the parent that a rank takes over."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

from parawrap.launch.ranks._groups import Rendezvous
from parawrap.launch.ranks._setup import Place

__all__ = ["Assignment", "Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """What a function may rely on beside its arguments: environment, folder, import path, command line."""

    environ: dict[str, str] | None  # None: the ranks are on other machines, which have an environment of their own
    cwd: str | None
    path: list[str]
    argv: list[str]
    main_file: str | None

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        try:
            cwd: str | None = str(Path.cwd())
        except FileNotFoundError:  # somebody removed it: the ranks stay where they start
            cwd = None
        main_file = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls(dict(os.environ), cwd, list(sys.path), list(getattr(sys, "argv", [""])), main_file)

    def take_over(self) -> None:
        """Make them this process's own."""
        if self.environ is None:
            self._take_over_elsewhere()
        else:
            _become(self.environ)
            if self.cwd is not None:
                os.chdir(self.cwd)
            sys.path[:] = self.path
        sys.argv[:] = self.argv
        sys.modules["__main__"] = types.ModuleType("__main__")
        if self.main_file is not None:
            sys.modules["__main__"].__file__ = self.main_file

    def without_environ(self) -> Surroundings:
        """The part of them that means something on other machines. What stands in variables may be secret."""
        return replace(self, environ=None)

    def _take_over_elsewhere(self) -> None:
        """On another machine: what is there of them."""
        if self.cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.cwd)
        sys.path[:0] = [each for each in self.path if each not in sys.path]


@dataclass(frozen=True)
class Assignment:
    """One rank's place, and all it needs to take it. What the function is comes in a file beside the orders.

    Attributes:
        tells_of_life: whether it is to tell when its main thread gets on.
        stuck_s: how long its wait for ranks that have left may take before it tells of it.
        on_cluster: whether signals come from a cluster too, and are not meant for it.
        interface: the network interface by which other nodes are reached.
    """

    place: Place
    meeting: Rendezvous | None
    surroundings: Surroundings
    grace_s: float
    tells_of_life: bool
    stuck_s: float
    on_cluster: bool = False
    interface: str | None = None


def _become(environ: dict[str, str]) -> None:
    """Change what differs, and nothing else."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
