"""The text that a terminal shows for the output of a program."""

from __future__ import annotations

import re

_LINE_END = re.compile(r"\n|\x1b\[\d*A")  # progress bars move the cursor up to write an earlier line again
_ERASE = re.compile(r"\x1b\[[02]?K")
_UNSEEN = re.compile(
    r"\x1b\[[0-?]*[ -/]*(?:[@-~]|$)"  # colors and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # window titles and links
    r"|\x1b[ -/]*(?:[0-~]|$)"
    r"|[\x00-\x08\x0b-\x1f\x7f]"
)


def last_shown_line(output: str) -> str:
    r"""Return the last line that is not blank, as a terminal shows it, without escape codes.

    >>> last_shown_line("epoch 1\n 50%\r100% \x1b[32mdone\x1b[0m\r\n")
    '100% done'
    """
    lines = map(_overwrite, reversed(_LINE_END.split(output)))
    return next((line for line in lines if line), "")


def _overwrite(line: str) -> str:
    """Return a line as a terminal shows it: each part after a carriage return overwrites the start."""
    shown = ""
    for part in line.split("\r"):
        text = _UNSEEN.sub("", part)
        shown = text if _ERASE.search(part) else text + shown[len(text) :]
    return shown.rstrip()
