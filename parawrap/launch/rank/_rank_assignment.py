"""The settings that a rank receives, including the state of the launching process that it adopts."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.process
import os
import sys
import time
import types
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from parawrap.launch.rank._process_groups import StoreAddress
from parawrap.launch.rank._set_up_rank import Place
from parawrap.launch.rank._torch_settings import TorchSettings

__all__ = ["Assignment", "Surroundings"]

_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Surroundings:
    """The process state that a function may rely on: environment, folder, import path, arguments, and torch's settings.

    Attributes:
        environ: The environment variables. None: ranks on other machines keep their own.
        authkey: The key of multiprocessing. Processes need it to use a manager's objects. None on other machines.
        start_folder: The working folder at the start of the script. multiprocessing resolves relative import paths with it.
        main_file: The script's file.
        main_module: The script's module if it was started with ``python -m``. With both, multiprocessing makes the script's
            classes available in the processes that it spawns.
    """

    environ: dict[str, str] | None
    cwd: str | None
    start_folder: str | None
    path: list[str]
    argv: list[str]
    main_file: str | None
    main_module: str | None
    settings: TorchSettings
    authkey: bytes | None = field(default=None, repr=False)

    @classmethod
    def here(cls) -> Surroundings:
        """Return the surroundings of this process."""
        try:
            cwd: str | None = str(Path.cwd())
        except FileNotFoundError:
            _log.warning("the working folder of this process no longer exists: the ranks run in the root folder")
            cwd = None
        main = sys.modules.get("__main__")
        file = getattr(main, "__file__", None)
        return cls(
            environ=dict(os.environ),
            cwd=cwd,
            start_folder=_process_module().ORIGINAL_DIR,
            path=list(sys.path),
            argv=list(getattr(sys, "argv", [""])),
            main_file=None if file == "<stdin>" else file,  # multiprocessing would open it
            main_module=getattr(getattr(main, "__spec__", None), "name", None),
            settings=TorchSettings.here(),
            authkey=bytes(multiprocessing.process.current_process().authkey),
        )

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
        if self.authkey is not None:
            multiprocessing.process.current_process().authkey = self.authkey
        sys.argv[:] = self.argv
        self.settings.take_over()
        _process_module().ORIGINAL_DIR = self.start_folder
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        if self.main_file is not None:
            main.__file__ = self.main_file
        if self.main_module is not None:
            main.__spec__ = ModuleSpec(self.main_module, None, origin=self.main_file)
            main.__package__ = main.__spec__.parent

    def without_environ(self) -> Surroundings:
        """Return the part to send to other machines. Secrets stay here: environment variables and multiprocessing's key."""
        return replace(self, environ=None, authkey=None)

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
        report_s: Seconds between two reports of the main thread's state. Infinite for ranks that may be idle.
        on_cluster: True if the rank must ignore the signals that a cluster sends to all processes of a job.
        interface: The network interface that leads to the other nodes.
        stays: True if the rank answers calls. Its function then gets a socket, its `Control`, and this assignment.
    """

    place: Place
    meeting: StoreAddress | None
    surroundings: Surroundings
    grace_s: float
    report_s: float
    on_cluster: bool = False
    interface: str | None = None
    stays: bool = False


def _process_module() -> Any:
    """Return the module with multiprocessing's ``ORIGINAL_DIR``, which its type stubs lack."""
    return multiprocessing.process


def _become(environ: dict[str, str]) -> None:
    """Replace this process's environment, and apply its time zone. Change only variables that differ."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
    time.tzset()
