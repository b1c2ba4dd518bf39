"""The hint on ranks without progress, and the end of ranks that wait for ranks that have returned."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parawrap import LaunchError, current_rank, wrapper
from parawrap.launch.coordinator import _standstill
from parawrap.launch.rank._control_thread import _MainThread, _waits_in
from tests.helpers.processes import failure_of, ranks
from tests.helpers.waiting import PATIENCE_S, eventually


@pytest.fixture
def hints(monkeypatch, caplog):
    """Shorten the time until a hint, and return a function that reads the hints."""
    monkeypatch.setattr(_standstill, "STILL_S", 0.5)
    monkeypatch.setattr(_standstill, "_IDLE_S", 0.2)
    return lambda: [record.getMessage() for record in caplog.records if "no progress" in record.getMessage()]


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
    # A rank on a busy machine may use so much processor time that it counts as busy at a line where it waits.
    assert re.search(r"rank 0 (idle for \d+ s|busy) at test_standstill\.py:\d+ in lopsided: dist\.barrier\(\)", hint)
    assert re.search(r"rank 1 .*(time\.sleep\(0\.01\)|while not go\.exists)", hint)


def test_hint_names_rank_without_answer(hints):
    """A rank that holds the GIL cannot answer."""

    def holds():
        if current_rank().global_rank == 1:
            import ctypes

            ctypes.PyDLL(None).sleep(600)
        dist.barrier()

    launch = wrapper(ranks(grace_s=0.2))(holds).submit()
    (hint,) = eventually(hints, "the hint")
    launch.cancel()
    assert "rank 1 does not answer" in hint


def test_wait_for_returned_rank_raises(monkeypatch):
    """If no connection breaks, LaunchError names the returned rank and has the stack of the waiting rank."""
    monkeypatch.setattr(_standstill, "STUCK_S", 0.5)

    def returns():
        if current_rank().global_rank == 1:
            dist.new_group([0, 1])

    error, _ = failure_of(returns)
    assert type(error) is LaunchError
    for text in ("rank(s) 0 have returned", "every rank of the group has to take part", "in new_group"):
        assert text in str(error)


def test_wait_for_busy_rank_is_allowed(monkeypatch, tmp_path):
    """After one rank has returned, a second rank can wait for a third rank that is busy."""
    monkeypatch.setattr(_standstill, "STUCK_S", 0.3)

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
    """It may wait for a disk."""
    assert _waits_in(dist.distributed_c10d.__file__)
    assert not _waits_in(dcp.__file__)


def test_backward_of_ddp_counts_as_wait():
    """A rank that waits in the backward of DistributedDataParallel is seen to wait, while the other computes."""

    def train():
        rank = current_rank().global_rank
        store = dist.distributed_c10d._get_default_store()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            waited_s = float(store.get("waited"))
            loss.backward()
            return waited_s
        observed = _MainThread()

        def observe():
            until = time.monotonic() + 60
            while observed.waits_s < 0.3 and time.monotonic() < until:
                time.sleep(0.05)
                observed.look()
            store.set("waited", str(observed.waits_s))

        threading.Thread(target=observe).start()
        loss.backward()
        return None

    assert wrapper(ranks())(train)()[1] >= 0.3
