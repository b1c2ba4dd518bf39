"""The build of Python that runs the benchmarks."""

from __future__ import annotations

import sys
import sysconfig

__all__ = ["build"]


def build() -> str:
    """Return the release of Python, with a t if it was built without the interpreter lock."""
    build = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    return f"{sys.version_info[0]}.{sys.version_info[1]}{build}"
