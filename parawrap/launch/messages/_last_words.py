"""The end of a rank's output, as errors show it."""

from __future__ import annotations

import re

__all__ = ["LAST_WORDS", "last_words_of"]

LAST_WORDS = 2500  # characters: about thirty lines, enough for a traceback
_LEFT_OUT = "\n...\n"
# the parts of faulthandler's report: its first line, the stack of the thread that crashed, and the last line
_CRASH = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
_STACK = re.compile(r"^Current thread .*(?:\n.+)*", re.MULTILINE)
_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)


def last_words_of(text: str, at_most: int) -> str:
    """Return the end of a text, in whole lines if possible.

    Of a crash report that is too long, keep what names the cause: its first line, the lines before it, and the innermost
    frames of the thread that crashed. The list of extension modules, thousands of characters in some programs, is left
    out.
    """
    if len(text) <= at_most:
        return text
    text = _MODULES.sub("", text)
    crash = _CRASH.search(text)
    if crash is None or len(text) <= at_most:
        return _last_lines(text, at_most)
    parts = [_last_lines(text[: crash.end()], max(at_most // 4, len(crash[0])))]
    rest = text[crash.end() :]
    if stack := _STACK.search(rest):
        parts.append(_first_lines(stack[0], at_most // 2))
        rest = rest[stack.end() :]
    left = at_most - sum(len(part) + len(_LEFT_OUT) for part in parts)
    return _LEFT_OUT.join([*parts, _last_lines(rest, max(0, left))])


def _last_lines(text: str, at_most: int) -> str:
    end = text[max(0, len(text) - at_most) :]
    _, newline, rest = end.partition("\n")
    return rest if newline and rest and len(end) < len(text) else end


def _first_lines(text: str, at_most: int) -> str:
    start = text[:at_most]
    return start if len(start) == len(text) else start.rpartition("\n")[0] or start
