"""The state that ranks take over: environment, folder, import path, and settings of torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from typing import NamedTuple

import torch

from parawrap._private_names import raw_environ


@dataclass(frozen=True)
class Settings:
    """The settings of a process that a function may rely on."""

    environ: dict[str, str] | None  # None for ranks on other machines, which keep their own
    # The key of multiprocessing, so that proxies of the script's managers, such as queues, work in
    # ranks. It is a secret of this machine: None for ranks on others
    authkey: bytes | None = field(repr=False)
    cwd: str
    path: list[str]  # sys.path
    argv: list[str]
    # The file of ``__main__``, or None. Processes that a rank spawns import the script's classes
    # from it
    main_file: str | None
    # The name of the module if the script runs with ``python -m``, for relative imports; or None
    main_name: str | None
    seed: int  # of torch's default generator
    dtype: torch.dtype  # torch's default
    is_deterministic: bool  # True if deterministic algorithms are on
    only_warns: bool  # True if other algorithms then cause a warning, and no error
    # The precision of float32 matrix products. None if newer flags of torch set the precision
    precision: str | None
    cudnn_benchmark: bool  # True: cuDNN chooses algorithms by measurement

    @classmethod
    def here(cls) -> Settings:
        """Return the settings of this process."""
        main = sys.modules.get("__main__")
        file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        return cls(
            environ=dict(os.environ),
            authkey=bytes(multiprocessing.current_process().authkey),
            cwd=os.getcwd(),  # noqa: PTH109 (a str, not a Path)
            path=list(sys.path),
            argv=list(getattr(sys, "argv", [""])),
            main_file=None if file == "<stdin>" else file,  # multiprocessing opens this file
            main_name=getattr(spec, "name", None),
            seed=torch.initial_seed(),
            dtype=torch.get_default_dtype(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            only_warns=torch.is_deterministic_algorithms_warn_only_enabled(),
            precision=_precision(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
        )

    @classmethod
    def for_other_machines(cls) -> Settings:
        """Return the settings of this process that hold on any machine."""
        return replace(cls.here(), environ=None, authkey=None)

    def apply(self) -> None:
        """Apply the settings to this process, with an empty ``__main__``."""
        if self.authkey is not None:
            multiprocessing.current_process().authkey = self.authkey
        if self.environ is None:  # on another machine
            with contextlib.suppress(OSError):  # the folder is not there
                os.chdir(self.cwd)
            sys.path[:0] = [each for each in self.path if each not in sys.path]
        else:
            changed = _changes_between(os.environ, self.environ)
            ChangedSettings(changed, self.cwd, self.path).apply()
        sys.argv[:] = self.argv
        main = types.ModuleType("__main__")
        # Also under the name by which processes that the rank spawns pickle classes of the script
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        if self.main_file is not None:
            main.__file__ = self.main_file
        if self.main_name is not None:  # workers of a loader import this module by its name
            main.__spec__ = ModuleSpec(self.main_name, None, origin=self.main_file)
            main.__package__ = main.__spec__.parent
        torch.default_generator.manual_seed(self.seed)  # the other generators are seeded from it
        torch.set_default_dtype(self.dtype)
        if self.is_deterministic or self.only_warns:  # not otherwise: the first call takes a second
            torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        if self.precision not in (None, _precision()):
            torch.set_float32_matmul_precision(self.precision)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


@dataclass(frozen=True)
class ChangedSettings:
    """Changes of a script between two calls of ranks that stay."""

    environ: dict[str, str | None]  # the variables that changed; None for those that are gone
    cwd: str | None  # None without a change
    path: list[str] | None  # None without a change

    def apply(self) -> None:
        """Apply the changes to this process."""
        for name, value in self.environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.environ:
            time.tzset()  # C code then reads the variable TZ again
        if self.cwd is not None:
            with contextlib.suppress(OSError):  # the folder was deleted, or is not on this machine
                os.chdir(self.cwd)
        if self.path is not None:
            sys.path[:] = self.path


class Surroundings(NamedTuple):
    """The environment, the folder, and the import path of a process."""

    raw: dict[bytes, bytes]  # the environment as bytes, which is compared without decoding
    environ: dict[str, str]
    cwd: str
    path: list[str]

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        # os.getcwd takes a tenth of the time of Path.cwd
        return cls(dict(raw_environ), dict(os.environ), os.getcwd(), list(sys.path))  # noqa: PTH109


class SentSurroundings:
    """The environment, the folder, and the import path that ranks had at their last call."""

    def __init__(self) -> None:
        # What the ranks have, and what they get if the last changes are sent
        self._sent = self._next = Surroundings.here()

    def changes(self) -> ChangedSettings | None:
        """Return what changed since the last call; None if nothing did, which takes 2 us."""
        sent = self._sent
        cwd = os.getcwd()  # noqa: PTH109 (a tenth of the time of Path.cwd)
        if raw_environ == sent.raw and cwd == sent.cwd and sys.path == sent.path:
            return None
        self._next = now = Surroundings.here()
        changed = _changes_between(sent.environ, now.environ)
        cwd_now = None if now.cwd == sent.cwd else now.cwd
        path_now = None if now.path == sent.path else now.path
        return ChangedSettings(changed, cwd_now, path_now)

    def note_sent(self, changes: ChangedSettings | None) -> None:
        """Note that the ranks get these changes, from the last call of `changes`."""
        if changes is not None:
            self._sent = self._next


def _changes_between(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ now, with their new values; None for those that are gone."""
    return {
        name: now.get(name)
        for name in before.keys() | now.keys()
        if now.get(name) != before.get(name)
    }


def _precision() -> str | None:
    """Return the precision of float32 matrix products; None if newer flags of torch set it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
