"""Launchers by name: a module path each, imported when a platform first asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from parawrap.launch._launcher import Launcher

__all__ = ["LAUNCHERS", "launcher_named"]

LAUNCHERS = {
    "env": "parawrap.launch.env",
    "local": "parawrap.launch.local",
}


def launcher_named(name: str) -> Launcher:
    """The launcher with this name, one of LAUNCHERS."""
    return cast("Launcher", importlib.import_module(LAUNCHERS[name]).launcher)
