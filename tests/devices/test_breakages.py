"""The tests of this folder see a broken engine: each breakage here makes an answer wrong."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from parawrap import GatherError, engine, parallel
from parawrap.replicas._mirror import Mirror
from parawrap.replicas._refresh import ReplicaSet
from parawrap.shards import ShardPlan
from tests.devices.zoo import SIMS, assert_same_training_step, mlp, rows

session_module = importlib.import_module(engine.Session.gather.__module__)


def equals_plain() -> bool:
    """Whether the common comparison passes."""
    try:
        assert_same_training_step(mlp().to("sim:0"), rows())
    except AssertionError:
        return False
    return True


def follows_a_change() -> bool:
    """Whether a call after a change of the parameters has the plain answer."""
    model = mlp().to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model[2].bias.add_(1)
        return torch.allclose(model(x), copy.deepcopy(model)(x.to("sim:0")))


def test_the_checks_pass_on_the_engine_as_it_is():
    """Unbroken, the engine passes both checks."""
    assert equals_plain()
    assert follows_a_change()


@pytest.mark.parametrize("broken", ["refresh", "stale", "mirror"])
def test_refresh_that_does_nothing(broken, monkeypatch):
    """Replicas that are not refreshed answer with old parameters, and the check sees it."""
    if broken == "refresh":
        refresh = ReplicaSet.refresh
        monkeypatch.setattr(ReplicaSet, "refresh", lambda self: None if self._replicas else refresh(self))
    elif broken == "stale":
        monkeypatch.setattr(ReplicaSet, "stale", lambda self: not self._replicas)
    else:
        monkeypatch.setattr(Mirror, "write", lambda self, originals, parcel: None)
    assert not follows_a_change()


@pytest.mark.parametrize(
    ("options", "calls", "says"),
    [
        ({}, 0, r"the lanes had 4, 2, 2 rows .* of shapes \(3, 3\), \(2, 3\), \(2, 3\).* rows do not lie on dim 0"),
        ({}, 1, r"the lanes had 2, 2, 2, 2 rows .* shapes \(1, 3\), \(2, 3\), .* without the rows on dim 0"),
        ({"out_dims": 0}, 0, r"the lanes had 2, 2, 2, 2 rows .* shapes \(1, 3\), \(2, 3\), .* without the rows on dim 0"),
    ],
    ids=["first call", "later call", "declared"],
)
def test_scatter_that_drops_a_row(options, calls, says, monkeypatch):
    """A scatter that loses the last row of a shard is refused by the engine itself, when it joins the outputs."""
    cut = ShardPlan.cut

    def dropping(self, flat):
        pieces = cut(self, flat)
        return [pieces[0]._replace(leaves=[leaf[:-1] for leaf in pieces[0].leaves]), *pieces[1:]]

    model = mlp().to("sim:0")
    with parallel(model, SIMS, **options):
        for _ in range(calls):
            model(rows(8))
        monkeypatch.setattr(ShardPlan, "cut", dropping)
        with pytest.raises(GatherError, match=says):
            model(rows(8))


def test_gather_in_swapped_order(monkeypatch):
    """A gather that swaps two lanes' outputs gives the rows in another order, and the check sees it."""
    join = session_module.join

    def swapped(outputs, *rest):
        return join([outputs[1], outputs[0], *outputs[2:]], *rest)

    monkeypatch.setattr(session_module, "join", swapped)
    assert not equals_plain()


def test_gradients_that_stay_on_a_device(monkeypatch):
    """Replicas whose gradients do not come home learn too little, and the check sees it."""
    monkeypatch.setattr(Mirror, "linked", lambda self, original: self._copies[id(original)])
    assert not equals_plain()
