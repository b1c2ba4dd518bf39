"""The error of a wrong command line."""

from __future__ import annotations


class UsageError(Exception):
    """The command line is wrong. Its text is shown without a traceback, and the exit code is 2."""
