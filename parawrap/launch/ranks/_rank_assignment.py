"""The settings that a rank receives, including the state of the launching process that it adopts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

from parawrap.launch.ranks._process_groups import Rendezvous
from parawrap.launch.ranks._set_up_rank import Place
from parawrap.launch.ranks._torch_settings import TorchSettings

__all__ = ["Assignment", "Surroundings"]

_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Surroundings:
    """The process state that a function may rely on: environment, folder, import path, arguments, and torch's settings."""

    environ: dict[str, str] | None  # None: ranks on other machines keep their own environment
    cwd: str | None
    path: list[str]
    argv: list[str]
    main_file: str | None
    settings: TorchSettings

    @classmethod
    def here(cls) -> Surroundings:
        """Return the surroundings of this process."""
        try:
            cwd: str | None = str(Path.cwd())
        except FileNotFoundError:
            _log.warning("the working folder of this process no longer exists: the ranks run in the root folder")
            cwd = None
        main_file = getattr(sys.modules.get("__main__"), "__file__", None)
        return cls(dict(os.environ), cwd, list(sys.path), list(getattr(sys, "argv", [""])), main_file, TorchSettings.here())

    def take_over(self) -> None:
        """Apply the surroundings to this process."""
        if self.environ is None:
            self._take_over_elsewhere()
        else:
            _become(self.environ)
            if self.cwd is not None:
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                    os.chdir(self.cwd)
            sys.path[:] = self.path
        sys.argv[:] = self.argv
        self.settings.take_over()
        sys.modules["__main__"] = types.ModuleType("__main__")
        if self.main_file is not None:
            sys.modules["__main__"].__file__ = self.main_file

    def without_environ(self) -> Surroundings:
        """Return the part to send to other machines. Environment variables stay here: they may hold secrets."""
        return replace(self, environ=None)

    def _take_over_elsewhere(self) -> None:
        """Apply the folder and import path on another machine, as far as they exist there."""
        if self.cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.cwd)
        sys.path[:0] = [each for each in self.path if each not in sys.path]


@dataclass(frozen=True)
class Assignment:
    """One rank's place and settings. The pickled call accompanies it in a file.

    Attributes:
        reports_progress: True if the rank reports progress of its main thread.
        stuck_s: Seconds until the rank reports that it waits for ranks that have exited.
        still_s: Seconds until the rank reports that its main thread is idle.
        on_cluster: True if the rank must ignore the signals that a cluster sends to all processes of a job.
        interface: The network interface that leads to the other nodes.
    """

    place: Place
    meeting: Rendezvous | None
    surroundings: Surroundings
    grace_s: float
    reports_progress: bool
    stuck_s: float
    still_s: float = float("inf")
    on_cluster: bool = False
    interface: str | None = None


def _become(environ: dict[str, str]) -> None:
    """Replace this process's environment. Change only variables that differ."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
