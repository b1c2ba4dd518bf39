"""The tests in this folder run on four XLA devices, each test in a separate interpreter.

An operator that meets two XLA devices ends the process: so it ends with one test, which then fails with what was said.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.tiers import require

_IN_CHILD = "PARAWRAP_XLA_CHILD"
_LIMIT_S = 100
_missing = None if importlib.util.find_spec("torch_xla") else "torch_xla is not installed; `make test-xla` has it"


@pytest.fixture(autouse=True)
def _xla():
    """Skip or fail if torch_xla is missing, and set the seed."""
    require("xla", _missing)
    if _IN_CHILD in os.environ:
        importlib.import_module("torch_xla")
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in a child process, unless this process is the child."""
    if _IN_CHILD in os.environ:
        return None
    environment = {**os.environ, _IN_CHILD: "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-s", "--no-header", pyfuncitem.nodeid]
    child = subprocess.run(
        command,
        env=environment,
        cwd=pyfuncitem.config.rootpath,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if child.returncode != 0:
        pytest.fail(f"it ended with {child.returncode}:\n{child.stdout}\n{child.stderr}", pytrace=False)
    return True
