"""Models that each worker builds itself."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import RankDiedError, SessionError, build
from tests.helpers.calling import Calls
from tests.helpers.pools import over, processes


class Factor(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        if (x < 0).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x * self.factor


def test_workers_build_equal_models():
    """Equal rows have equal outputs. Random numbers of calls differ."""
    with processes(build(nn.Linear, 4, 2)) as p:
        assert p(torch.ones(9, 4)).unique().numel() == 2
    with processes(build(Calls, lambda x: x + torch.rand(x.shape))) as p:
        assert p(torch.zeros(9, 1)).unique().numel() == 9


def test_replacement_builds_the_same():
    """The arguments are those of the first start, until `refresh`."""
    factors, x = [2], torch.ones(9, 1)
    with processes(build(lambda *, factors: Factor(factors[0]), factors=factors), retries=0) as p:
        assert_close([p(x), p(x[:1]), p.submit(x).result()], [x * 2, x[:1] * 2, x * 2])
        factors[0] = 5
        with pytest.raises(RankDiedError, match="was killed by SIGKILL"):
            p.submit(-torch.ones(1)).result()
        assert_close(p(x), x * 2)
        p.refresh()
        assert_close(p(x), x * 5)


def test_worker_that_cannot_build():
    """The exception or the death of a worker that cannot build its model is the error of the first
    call.
    """
    with (
        processes(build(os._exit, 7)) as p,
        pytest.raises(RankDiedError, match="exited with code 7"),
    ):
        p(torch.ones(9, 4))
    with processes(build(nn.Linear, 0, "x")) as p, pytest.raises(TypeError):
        p(torch.ones(9, 4))


def test_build_needs_processes():
    with (
        over("thread", build(nn.Linear, 2, 2)) as p,
        pytest.raises(SessionError, match='workers="process"'),
    ):
        p(torch.ones(9, 2))
