"""What a launch tells a rank, and the surroundings of the parent that a rank takes over."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from parawrap.launch._groups import Meeting
from parawrap.launch._settling import Place

__all__ = ["Orders", "Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """What a function may rely on beside its arguments: environment, folder, import path, command line."""

    environ: dict[str, str]
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
        for name in set(os.environ) - set(self.environ):
            del os.environ[name]
        os.environ.update({name: value for name, value in self.environ.items() if os.environ.get(name) != value})
        if self.cwd is not None:
            os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        sys.modules["__main__"] = types.ModuleType("__main__")
        if self.main_file is not None:
            sys.modules["__main__"].__file__ = self.main_file


@dataclass(frozen=True)
class Orders:
    """One rank's place, and all it needs to take it. What the function is comes in a file beside the orders."""

    place: Place
    meeting: Meeting | None
    surroundings: Surroundings
    grace_s: float
    tells_of_life: bool
    stuck_s: float
