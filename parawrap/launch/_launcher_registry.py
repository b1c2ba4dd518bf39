"""The module of each launcher, by name. Modules are imported on first use."""

from __future__ import annotations

LAUNCHERS = {
    "env": "parawrap.launch.env",
    "local": "parawrap.launch.local",
    "ray": "parawrap.launch.ray._ray_launcher",
    "slurm": "parawrap.launch.slurm.slurm_launcher",
}
