"""Try the cure of an error: the code that fails is in a block of `says`, and the code with the cure
follows it.
"""

from __future__ import annotations

import ast
import re

import pytest


def says(message):
    """Expect an error, or a warning, which is an error in tests, with this message."""
    return pytest.raises((Exception, Warning), match=message)


def run(block, *args, **kwargs):
    """Call a block, and close it."""
    with block:
        return block(*args, **kwargs)


def cures_of(message):
    """Return the values of `in_dims` that an error names."""
    found = re.findall(r"in_dims=(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})", message)
    return [ast.literal_eval(each) for each in found]
