"""A session: the four verbs one by one, and what a call does of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

from parawrap.engine import Entry, Session
from parawrap.shards import Cutter, GatherRules


def session(target, lanes=3, **rules):
    devices = [torch.device("cpu")] * lanes
    return Session(target, devices, cutters={None: Cutter()}, rules=GatherRules(**rules))


def test_the_four_verbs_make_up_a_call():
    """scatter, replicate, apply and gather in turn give what call gives."""
    model = nn.Linear(4, 2)
    one = session(model)
    x = torch.randn(7, 4)
    plan, shards = one.scatter((x,), {})
    replicas = [replica.module for replica in one.replicate(len(shards))]
    outputs = one.apply([lambda r=r, s=s: r(*s.args) for r, s in zip(replicas, shards, strict=True)])
    assert plan.sizes == (3, 2, 2)
    assert_close(one.gather(outputs, plan.sizes), one.call(Entry(model), (x,), {}))
    one.close()


def test_replicas_share_the_parameters_of_a_model_on_their_own_device():
    """Lane 0 runs the original, the others shells whose parameters are the original's."""
    model = nn.Linear(4, 2)
    one = session(model)
    first, second, third = (replica.module for replica in one.replicate())
    assert first is model
    assert second.weight is model.weight
    assert len({id(second), id(third), id(model)}) == 3
    assert type(second) is nn.Linear
    one.close()


def test_replicate_does_nothing_twice():
    """Without a change the same replicas come back and nothing is counted."""
    one = session(nn.BatchNorm1d(4).eval())
    assert [id(r.module) for r in one.replicate()] == [id(r.module) for r in one.replicate()]
    assert one.stats().refreshes == 0
    one.close()


def test_a_session_that_is_closed_runs_plainly():
    """After close a call that somebody kept is the plain one."""
    model = nn.Linear(4, 2)
    one = session(model)
    one.close()
    one.close()
    x = torch.randn(3, 4)
    assert_close(one.call(Entry(model), (x,), {}), model(x))
