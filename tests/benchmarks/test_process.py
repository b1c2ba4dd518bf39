"""Functions in fresh processes: arguments, environment, and failures."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks._process import in_process


def test_function_in_a_process(monkeypatch):
    """Variables are set, and None removes one. Printed output is not mistaken for the result."""
    monkeypatch.setenv("PARAWRAP_B", "inherited")
    given = {"PARAWRAP_A": "set", "PARAWRAP_B": None}
    assert in_process("os:getenv", given, key="PARAWRAP_A") == "set"
    assert in_process("os:getenv", given, key="PARAWRAP_B", default="removed") == "removed"
    assert in_process("builtins:print", end="output\n") is None


def test_a_failure_raises():
    """The function's traceback goes to stderr."""
    with pytest.raises(subprocess.CalledProcessError):
        in_process("json:loads", s="not JSON")
