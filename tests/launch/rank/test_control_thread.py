"""The thread of a rank that answers the launching process."""

from __future__ import annotations

import linecache
import sys
import threading

import pytest

from parawrap import RankDiedError, wrapper
from parawrap.launch.coordinator import _standstill
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S, eventually


def test_no_rank_outlives_its_thread():
    """An error of the thread ends the rank and is shown. Nothing could end the rank otherwise."""

    def spoil():
        sys._current_frames = None
        threading.Event().wait()

    with pytest.raises(RankDiedError, match="is not callable"):
        wrapper(ranks(1))(spoil)()


def test_unreadable_lines_end_no_rank(monkeypatch, caplog, tmp_path):
    """Another thread, or the user's code, may leave an odd entry in the cache of source lines."""
    monkeypatch.setattr(_standstill, "STILL_S", 0.5)

    def spoil(go):
        linecache.cache[spoil.__code__.co_filename] = (0, None, None, "")
        while not go.exists():
            threading.Event().wait(5)
        return "done"

    launch = wrapper(ranks(1))(spoil).submit(tmp_path / "go")
    eventually(lambda: "in spoil" in caplog.text, "the hint")
    assert "its source cannot be read: TypeError" in launch.stacks()[0]
    (tmp_path / "go").touch()
    assert launch.results(PATIENCE_S) == ("done",)
