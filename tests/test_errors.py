"""The exceptions of parawrap: their texts, and copies of them."""

from __future__ import annotations

import copy
import pickle

import pytest

from parawrap import errors

EVERY = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.ParawrapError)]


@pytest.mark.parametrize("kind", EVERY)
def test_the_text_ends_with_the_place_in_the_documentation(kind):
    """The place names the section of the exception's class. `message` is the text without it."""
    error = kind("dim=9: too large")
    assert str(error) == f'dim=9: too large (the page "Errors" of the documentation, {kind.__name__})'
    assert error.message == error.args[0] == "dim=9: too large"


def test_a_quoted_error_has_no_place_of_its_own():
    """A text that quotes another error ends with one place."""
    quoted = errors.UnsendableError("args[0] cannot be sent")
    error = errors.LaunchError(f"{quoted}. Let each worker build its own model")
    assert str(error) == (
        'args[0] cannot be sent. Let each worker build its own model (the page "Errors" of the documentation, LaunchError)'
    )


@pytest.mark.parametrize("kind", EVERY)
def test_copies_have_the_same_text(kind):
    """A pickled copy, as it comes from a rank, has the place once."""
    error = kind("no")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(copied) == str(error)
