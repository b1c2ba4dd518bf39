"""Try the cure of an error: the code that fails is in a block of `says`, and the code with the cure
follows it.
"""

from __future__ import annotations

import ast
import re

import pytest
import torch


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


_NAME = re.compile(r"(?:out_dims|reduce|pad_value|join|in_dims)=")
_WORD = re.compile(r'"[^"]*"|[\w.-]*\w')


def options_of(message, after="se "):
    """Return the options that an error says to use, as a user would paste them into the call.

    `after` is the text before them: "Use" and "use" by default.
    """
    start = re.search(rf"{after}(?:parallel\(model, devices, )?(?={_NAME.pattern})", message)
    assert start is not None, f"no options in {message}"
    at, options = start.end(), {}
    while named := _NAME.match(message, at):
        end = _end_of_value(message, named.end())
        value = eval(message[named.end() : end], {"torch": torch})
        options[named.group()[:-1]] = value
        at = end + 2 if message[end : end + 2] == ", " else end
    return options


def _end_of_value(text, start):
    if text[start] not in "{(":
        word = _WORD.match(text, start)
        assert word is not None, text
        return word.end()
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "{(") - (text[at] in "})")
        if depth == 0:
            return at + 1
    raise AssertionError(text)


def options_in_error(call):
    """Return the options that the error of a call says to use."""
    with pytest.raises(Exception) as caught:
        call()
    return options_of(str(caught.value))
