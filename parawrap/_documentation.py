"""Where messages find the documentation."""

from __future__ import annotations

import re

ADDRESS = ""  # setup.py sets it in a build: the address of the site, or nothing
_TITLES = {"errors": "Errors", "neuron_hardware": "Test parawrap on NeuronCore hardware", "versions": "Tested releases"}
_CITATIONS = re.compile(r' \((?:the page "Errors" of the documentation, \w+|\S+/errors\.html#\w+)\)')


def cite(page: str, section: str = "") -> str:
    """Return the address of a page, or its title if this build has no address of the documentation.

    >>> cite("errors", "GatherError")
    'the page "Errors" of the documentation, GatherError'
    """
    if ADDRESS:
        return f"{ADDRESS}/{page}.html{f'#{section.lower()}' if section else ''}"
    return f'the page "{_TITLES[page]}" of the documentation{f", {section}" if section else ""}'


def without_citations(text: str) -> str:
    """Return a message without the places of errors in the documentation."""
    return _CITATIONS.sub("", text)
