"""The last words of a rank name the cause of its death."""

from __future__ import annotations

import pytest

from parawrap.launch.messages._last_words import LAST_WORDS, last_words_of

BEFORE = "long ago\n" * 500 + "just before\n"
REPORT = "Fatal Python error: Aborted\n\n"
OTHER = "Thread 0x01 (most recent call first):\n" + '  File "a.py", line 1 in waits\n' * 60 + "\n"
INNERMOST = 'Current thread 0x02 (most recent call first):\n  File "b.py", line 2 in crash\n'
CRASHED = INNERMOST + '  File "c.py", line 3 in calls\n' * 200 + "\n"
MODULES = "Extension modules: " + "numpy.core, " * 900 + "(total: 900)\n"
AFTER = "a child has died too\n"


@pytest.mark.parametrize(
    "report", [CRASHED, OTHER + CRASHED, CRASHED + OTHER, CRASHED + MODULES, OTHER + CRASHED + MODULES]
)
@pytest.mark.parametrize("after", ["", AFTER])
def test_long_report_keeps_the_cause(report, after):
    """Other threads, outer frames, and modules give way to the line before, the first line, and the innermost frames."""
    words = last_words_of(BEFORE + REPORT + report + after, LAST_WORDS)
    assert "\njust before\nFatal Python error: Aborted\n" in words
    assert INNERMOST in words
    assert words.endswith(after)
    assert "numpy" not in words
    assert len(words) <= LAST_WORDS


def test_other_text_keeps_its_end():
    """It is cut in whole lines if possible."""
    assert last_words_of("short", 20) == "short"
    assert last_words_of("first line\nsecond line\n", 15) == "second line\n"
    assert last_words_of("first line\n" + "x" * 50 + "\n", 20) == "x" * 19 + "\n"


def test_report_without_a_stack():
    """A report without known threads keeps its first line and its end."""
    words = last_words_of(BEFORE + REPORT + "  File one\n" * 400 + "  File last\n", 300)
    assert "just before\nFatal Python error: Aborted\n...\n" in words
    assert words.endswith("  File last\n")
