"""Sessions with workers, and models that the tests of workers share."""

from __future__ import annotations

import pytest
import torch

from parawrap import launch
from parawrap.shards import Cutter, JoinRules, balanced, uneven
from parawrap.workers import _ray_workers, open_session
from tests.workers.kept_actors import KeptActors

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def _actors(ray_cluster):
    import ray

    return KeptActors(ray)


@pytest.fixture
def kept_actors(_actors, monkeypatch):
    """A Ray cluster whose actors serve the blocks of many tests."""

    def joined(platform):
        launch.joined(platform)
        return _actors

    monkeypatch.setattr(_ray_workers, "joined", joined)


@pytest.fixture
def opened():
    """Open sessions with two workers, and close them at the end of the test."""
    sessions = []

    def open_one(target, workers=2, *, retries=1, methods=(None,), **options):
        rules = JoinRules(**options)
        cutters = {method: Cutter(sizes=uneven if rules.needs_proof else balanced) for method in methods}
        session = open_session(target, [CPU] * workers, cutters=cutters, rules=rules, retries=retries)
        sessions.append(session)
        return session

    with torch.no_grad():
        yield open_one
    for session in sessions:
        session.close()
