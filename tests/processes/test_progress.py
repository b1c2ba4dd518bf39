"""The hint on ranks without progress, and the end of ranks that wait for ranks
that have returned.
"""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parawrap import current_rank, wrapper
from parawrap.processes import pool
from parawrap.processes.main_thread import Status, _waits_in
from parawrap.processes.pool import Pool
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S, eventually


@pytest.fixture
def hints(monkeypatch, caplog):
    """Shorten the time until a hint, and return a function that reads the hints."""
    monkeypatch.setattr(pool, "STILL_S", 0.5)
    return lambda: [
        record.getMessage() for record in caplog.records if "no progress" in record.getMessage()
    ]


def test_hint_names_waiting_ranks(hints, tmp_path):
    """The hint appears once, shows the source line of each rank, and does not end the launch."""

    def lopsided(go):
        if current_rank().global_rank == 1:
            while not go.exists():
                time.sleep(0.01)
        dist.barrier()
        return "done"

    launch = wrapper(ranks())(lopsided).submit(tmp_path / "go")
    eventually(hints, "the hint")
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == ("done", "done")
    (hint,) = hints()
    assert "the launch continues" in hint
    assert re.search(
        r"rank 0 idle for \d+ s at test_progress\.py:\d+ in lopsided: dist\.barrier\(\)", hint
    )
    assert re.search(r"rank 1 .*(time\.sleep\(0\.01\)|while not go\.exists)", hint)


def test_wait_for_busy_rank_is_allowed(monkeypatch):
    """After one rank has returned, a second rank can wait for a third rank that is busy."""
    monkeypatch.setattr(pool, "STUCK_S", 0.3)

    def waits():
        rank = current_rank().global_rank
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            return store.get("key")
        if rank == 2:
            time.sleep(1.5)  # longer than STUCK_S, and than the process of a returned rank stays
            store.set("key", "value")
        return rank

    assert wrapper(ranks(3))(waits).submit().results(timeout=PATIENCE_S) == (0, b"value", 2)


def test_checkpoint_is_no_wait():
    """A rank that checkpoints may wait for a disk, which is no wait for other ranks."""
    assert _waits_in(dist.distributed_c10d.__file__)
    assert not _waits_in(dcp.__file__)


def test_lines_while_the_next_call_begins(monkeypatch):
    """The begin of a call, in the thread of the pool, forgets what the ranks have answered."""
    monkeypatch.setattr(pool, "_LINES_S", 0)
    answers = [Status(0.0, 0.0, "script.py:1 in f: x", -1), None, None]

    class MemberOfTheNextCall:
        rank = 3
        looked = property(lambda _: answers.pop(0))

    asked = SimpleNamespace(
        events=SimpleNamespace(post=lambda _: None),
        _ask_for_lines=lambda _: None,
        _running=lambda: [MemberOfTheNextCall()],
    )
    assert Pool.lines(asked) == {3: "script.py:1 in f: x"}
    assert Pool.lines(asked) == {3: "an unknown place"}
