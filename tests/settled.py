"""Plans whose choice is made before anything is measured, for tests of what a way gives."""

from __future__ import annotations

from typing import Any

import pytest

from parawrap.engine.plan import PLAIN, Way
from parawrap.engine.plan._candidates import Candidates
from parawrap.engine.plan._race import Race

__all__ = ["settle_on"]


class _Settled(Race):
    """A race that is over before it begins."""

    def __init__(self, way: Way) -> None:
        super().__init__(list(dict.fromkeys([PLAIN, way])))
        self.settle(way)

    def note(self, *_: Any) -> None: ...

    def enter(self, *_: Any) -> None: ...

    def restart(self) -> None: ...


def settle_on(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """Settle every choice of the test's on one way."""
    monkeypatch.setattr(Candidates, "race", lambda *_: _Settled(way))
