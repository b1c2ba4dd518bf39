"""The hint that shows the position of every rank when a rank makes no progress."""

from __future__ import annotations

import re
import time

import pytest
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper
from parawrap.launch.coordinator import _standstill
from tests.helpers.waiting import eventually


@pytest.fixture
def _short_delays(monkeypatch):
    """Shorten the delay before a hint to half a second."""
    monkeypatch.setattr(_standstill, "STILL_S", 0.5)


def hints_of(caplog):
    return [record.getMessage() for record in caplog.records if "no progress" in record.getMessage()]


def ranks(n_cpus=2):
    return wrapper(Platform(device="cpu", n_cpus=n_cpus, verbose=False))


@pytest.mark.usefixtures("_short_delays")
def test_a_hint_names_the_lines_at_which_ranks_wait(caplog, tmp_path):
    """The hint appears once, shows file, function, and source line of each rank, and does not end the launch."""

    def lopsided(go):
        if current_rank().global_rank == 1:
            while not go.exists():
                time.sleep(0.01)
        dist.barrier()
        return "done"

    launch = ranks()(lopsided).submit(tmp_path / "go")
    eventually(lambda: hints_of(caplog), "the hint")
    (tmp_path / "go").touch()
    assert launch.results(timeout=60) == ("done", "done")
    (hint,) = hints_of(caplog)
    assert "the launch continues" in hint
    # A rank on a busy machine may use so much processor time that it "is at" a line where it waits.
    assert re.search(r"rank 0 (waits|is) at test_hints\.py:\d+ in lopsided: dist\.barrier\(\)", hint)
    assert "rank 1" in hint
    assert "time.sleep(0.01)" in hint or "while not go.exists()" in hint


@pytest.mark.usefixtures("_short_delays")
def test_a_rank_that_cannot_answer_is_named(caplog, tmp_path):
    """The hint names a rank that holds the GIL and cannot answer."""

    def locked(go):
        if current_rank().global_rank == 1:
            import ctypes

            (go.parent / "held").touch()
            ctypes.PyDLL(None).sleep(3)  # without releasing the lock
        dist.barrier()

    launch = ranks()(locked).submit(tmp_path / "go")
    eventually(lambda: hints_of(caplog), "the hint")
    launch.results(timeout=60)
    (hint,) = hints_of(caplog)
    assert "rank 1 does not answer" in hint


@pytest.mark.usefixtures("_short_delays")
def test_a_busy_rank_gets_no_hint(caplog):
    """Computing in Python counts as progress."""

    def works():
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            sum(range(1000))

    ranks()(works)()
    assert hints_of(caplog) == []
