"""The exceptions of parawrap: their texts, and copies of them."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch.utils.data import DataLoader

from parawrap import errors
from tests.helpers.worlds import ROOT

EVERY = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.ParawrapError)
]


@pytest.mark.parametrize("kind", EVERY)
def test_text_ends_with_a_place(kind):
    """The place is the section of the exception's class.

    `message` is the text without it. A quoted error has no place.
    """
    error, place = (
        kind("dim=9: too large"),
        f' (the page "Errors" of the documentation, {kind.__name__})',
    )
    assert str(error) == f"dim=9: too large{place}"
    assert error.message == error.args[0] == "dim=9: too large"
    quoting = kind(f"{errors.UnsendableError('args[0] cannot be sent')}. Build it")
    assert str(quoting) == f"args[0] cannot be sent. Build it{place}"


@pytest.mark.parametrize("kind", EVERY)
def test_copies_have_the_same_text(kind):
    """A pickled copy, as it comes from a rank, has the place once."""
    error = kind("no")
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(copied) == str(error)


def refuse(_):
    raise errors.ShardError("no")


def test_error_in_a_data_loader_worker():
    """Torch raises it again with the worker's traceback as its message."""
    loader = DataLoader([1, 2], collate_fn=refuse, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(errors.ShardError, match=r"(?s)DataLoader worker process 0.*ShardError: no"):
        next(iter(loader))


def test_sections_of_other_pages(monkeypatch):
    """An error may name a section that exists, by its titles or by its address."""
    lines = (ROOT / "docs" / "losses.md").read_text().splitlines()
    assert lines[0].startswith("# Compute a loss in a block")
    assert "## Contrastive losses" in lines
    section = "losses", "Compute a loss in a block", "Contrastive losses"
    titles = (
        'the page "Compute a loss in a block" of the documentation, section "Contrastive losses"'
    )
    assert errors.name_section(*section) == titles
    monkeypatch.setattr(errors, "ADDRESS", "https://example.org")
    assert errors.name_section(*section) == "https://example.org/losses.html#contrastive-losses"
