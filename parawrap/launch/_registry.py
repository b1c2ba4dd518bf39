"""Launchers by name: a module path each, imported at first use."""

from __future__ import annotations

__all__ = ["LAUNCHERS"]

LAUNCHERS = {
    "env": "parawrap.launch.env",
    "local": "parawrap.launch.local",
    "ray": "parawrap.launch.ray",
    "slurm": "parawrap.launch.slurm",
}
