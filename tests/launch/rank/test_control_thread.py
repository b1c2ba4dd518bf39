"""The thread of a rank that answers the launching process."""

from __future__ import annotations

import sys
import threading

import pytest

from parawrap import RankDiedError, wrapper
from tests.helpers.processes import ranks


def test_no_rank_outlives_its_thread():
    """An error of the thread ends the rank and is shown. Nothing could end the rank otherwise."""

    def spoil():
        sys._current_frames = None
        threading.Event().wait()

    with pytest.raises(RankDiedError, match="is not callable"):
        wrapper(ranks(1))(spoil)()
