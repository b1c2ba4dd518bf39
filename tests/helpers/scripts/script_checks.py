"""Checks of the sections of `globals_of_a_script`, which import this module in their folder."""

from parawrap import UnsendableError


def error_of(call, *args):
    """Return the exception that a call raises."""
    try:
        found = call(*args)
    except Exception as error:
        return error
    raise AssertionError(found)


def refuses(call, *args, texts):
    error = error_of(call, *args)
    assert type(error) is UnsendableError, repr(error)
    for text in texts:
        assert text in str(error), (text, str(error))


def same(value, expected):
    assert value == expected, (value, expected)
