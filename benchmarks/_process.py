"""Functions in fresh processes, to measure the memory and the allocator of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ALLOCATOR", "in_process"]

# By default glibc returns large buffers to the kernel, and a comparison could measure nothing but
# page faults.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}

_CALL = """
import importlib, json, sys
module, name, arguments = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(arguments))))
"""


def in_process(function: str, env: Mapping[str, str | None] | None = None, **arguments: Any) -> Any:
    """Return the result of ``module:function`` from a new interpreter.

    Arguments and result travel as JSON.

    Args:
        function: The module and the name of the function.
        env: Changes to the environment; None removes a variable.
        arguments: The function's keyword arguments.
    """
    module, _, name = function.partition(":")
    variables = {**os.environ, **(env or {})}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            _CALL,
            module,
            name,
            json.dumps(arguments),
        ],
        stdout=subprocess.PIPE,
        env={key: value for key, value in variables.items() if value is not None},
        cwd=Path(__file__).parents[1],
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
