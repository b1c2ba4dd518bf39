"""Tracebacks from ranks show the source lines of functions that no file holds: notebook cells, doctests, exec."""

from __future__ import annotations

import doctest
import linecache

import pytest

from parawrap import LaunchTimeoutError, wrapper
from tests.launch.processes import PATIENCE_S, notes_of, ranks

HELPER = """
def helper(value):
    raise KeyError(value)  # the line of the first cell
"""
FUNCTION = """
def function(value):
    return helper(value)  # the line of the second cell
"""
SLEEPER = """
def sleeper():
    time.sleep(600)  # the line of the sleeper's cell
"""


@pytest.fixture
def cells():
    """The names that these cells define, as a notebook runs them: their source is in linecache, and in no file."""
    place, names = {}, []
    for number, source in enumerate((HELPER, FUNCTION, "import time", SLEEPER)):
        name = f"<ipython-input-{number}-of-test-source-lines>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), place)
        names.append(name)
    yield place
    for name in names:
        del linecache.cache[name]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_lines_of_cells_stand_in_the_traceback_of_a_rank(method, cells):
    """The note on an exception has each frame's line, also of a helper from another cell."""
    with pytest.raises(KeyError) as caught:
        wrapper(ranks(1, spawn_method=method))(cells["function"])("value")
    assert "return helper(value)  # the line of the second cell" in notes_of(caught.value)
    assert "raise KeyError(value)  # the line of the first cell" in notes_of(caught.value)


def test_lines_of_cells_stand_in_stacks(cells):
    """What ranks were doing when their time was up is told with its source line."""
    with pytest.raises(LaunchTimeoutError) as caught:
        wrapper(ranks(1, hang_timeout_s=0.3))(cells["sleeper"]).submit().results(timeout=PATIENCE_S)
    assert "time.sleep(600)  # the line of the sleeper's cell" in caught.value.stacks[0]


def test_lines_of_a_doctest_stand_in_the_traceback_of_a_rank():
    """An example's source is known to doctest's linecache alone."""
    example = """
    >>> def function():
    ...     raise KeyError("x")  # the example's line
    >>> try:
    ...     launched(function)()
    ... except KeyError as error:
    ...     notes = "".join(error.__notes__)
    """
    place = {"launched": wrapper(ranks(1))}
    test = doctest.DocTestParser().get_doctest(example, place, "example", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, clear_globs=False).failed == 0
    assert 'raise KeyError("x")  # the example\'s line' in test.globs["notes"]
