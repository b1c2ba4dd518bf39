"""Sessions with workers, and models that the tests of workers share."""

from __future__ import annotations

import pytest
import torch

from parawrap.shards import Cutter, JoinRules
from parawrap.workers import open_session

CPU = torch.device("cpu")


@pytest.fixture
def opened():
    """Open sessions with two workers, and close them at the end of the test."""
    sessions = []

    def open_one(target, workers=2, *, retries=1, verify=False, methods=(None,), **rules):
        session = open_session(
            target,
            [CPU] * workers,
            cutters={method: Cutter() for method in methods},
            rules=JoinRules(**rules),
            verify=verify,
            retries=retries,
        )
        sessions.append(session)
        return session

    with torch.no_grad():
        yield open_one
    for session in sessions:
        session.close()
