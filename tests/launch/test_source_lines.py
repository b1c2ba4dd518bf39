"""Tracebacks from ranks show source lines of functions without a file: notebook cells, doctests, exec."""

from __future__ import annotations

import doctest
import linecache

import pytest

from parawrap import LaunchTimeoutError, wrapper
from tests.helpers.processes import SILENT_S, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S

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
    """The namespace of executed notebook cells. Their source is in linecache, not in a file."""
    namespace, names = {}, []
    for number, source in enumerate((HELPER, FUNCTION, "import time", SLEEPER)):
        name = f"<ipython-input-{number}-of-test-source-lines>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
        names.append(name)
    yield namespace
    for name in names:
        del linecache.cache[name]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_traceback_shows_lines_of_notebook_cells(method, cells):
    """The note on an exception has the source line of each frame, including a helper from another cell."""
    with pytest.raises(KeyError) as caught:
        wrapper(ranks(1, spawn_method=method))(cells["function"])("value")
    assert "return helper(value)  # the line of the second cell" in notes_of(caught.value)
    assert "raise KeyError(value)  # the line of the first cell" in notes_of(caught.value)


def test_stacks_show_lines_of_notebook_cells(cells):
    """The stacks of LaunchTimeoutError have source lines."""
    with pytest.raises(LaunchTimeoutError) as caught:
        wrapper(ranks(1, hang_timeout_s=SILENT_S))(cells["sleeper"]).submit().results(timeout=PATIENCE_S)
    assert "time.sleep(600)  # the line of the sleeper's cell" in caught.value.stacks[0]


def test_a_traceback_shows_lines_of_a_doctest():
    """The traceback has the source line of a doctest example, which only doctest's patched linecache has."""
    example = """
    >>> def function():
    ...     raise KeyError("x")  # the example's line
    >>> try:
    ...     launched(function)()
    ... except KeyError as error:
    ...     notes = "".join(error.__notes__)
    """
    namespace = {"launched": wrapper(ranks(1))}
    test = doctest.DocTestParser().get_doctest(example, namespace, "example", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, clear_globs=False).failed == 0
    assert 'raise KeyError("x")  # the example\'s line' in test.globs["notes"]
