"""Try the cure of an error: the code that fails is in a block of `says`, and the code with the cure follows it."""

from __future__ import annotations

import pytest

from tests.helpers.same import assert_same


def says(message):
    """Expect an error, or a warning, which is an error in tests, with this message."""
    return pytest.raises((Exception, Warning), match=message)


def try_values(use, wrong, message, cures, result):
    """Use each wrong value, which is refused, and each value of the cure, which gives the result."""
    for value in wrong:
        with says(message):
            use(value)
    for value in cures:
        assert_same(use(value), result)


def run(block, *args, **kwargs):
    """Call a block, and close it."""
    with block:
        return block(*args, **kwargs)
