"""Collect warnings that must point at the caller's line."""

from __future__ import annotations

import warnings


def warnings_of(use):
    """Return the messages of all warnings that `use` causes.

    Each must point at the file that defines `use`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    for each in caught:
        assert (each.category, each.filename) == (UserWarning, use.__code__.co_filename), str(each)
    return [str(each.message) for each in caught]
