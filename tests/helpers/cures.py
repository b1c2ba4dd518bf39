"""Try the cure of an error: a row has the code that fails, the message, the code with the cure, and its result."""

from __future__ import annotations

import pytest

from tests.helpers.same import assert_same


def table(rows):
    """Parametrize a test by the rows of a table, whose keys say what is wrong."""
    return pytest.mark.parametrize("row", [pytest.param(row, id=name.replace(" ", "-")) for name, row in rows.items()])


def check(row):
    """Run the code that fails, then the code with the cure, and compare. Warnings are errors in tests."""
    fails, says, cured, result = row
    with pytest.raises((Exception, Warning), match=says):
        fails()
    assert_same(cured(), result)


def run(block, *args, **kwargs):
    """Call a block, and close it."""
    with block:
        return block(*args, **kwargs)
