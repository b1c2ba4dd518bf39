"""The checks in this folder detect a broken engine: each test here breaks one part and expects a failed check."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from parawrap import GatherError, engine, parallel
from parawrap.replicas._gradients import Mirror
from parawrap.replicas._replica_set import ReplicaSet
from parawrap.shards import ShardPlan
from tests.devices.zoo import SIMS, assert_same_training_step, mlp, rows

session_module = importlib.import_module(engine.Session.call.__module__)


def plain_comparison_passes() -> bool:
    """True if a training step in a block equals a plain one."""
    try:
        assert_same_training_step(mlp().to("sim:0"), rows())
    except AssertionError:
        return False
    return True


def parameter_change_is_seen() -> bool:
    """True if a call after an in-place parameter change equals the plain call."""
    model = mlp().to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model[2].bias.add_(1)
        return torch.allclose(model(x), copy.deepcopy(model)(x.to("sim:0")), atol=1e-6)


def test_the_unmodified_engine_passes_the_checks():
    """The unmodified engine passes both checks."""
    assert plain_comparison_passes()
    assert parameter_change_is_seen()


@pytest.mark.parametrize("broken", ["refresh", "stale", "mirror"])
def test_a_refresh_that_does_nothing_fails_the_check(broken, monkeypatch):
    """Replicas that are never refreshed compute with stale parameters, and the check fails."""
    if broken == "refresh":
        refresh = ReplicaSet.refresh
        monkeypatch.setattr(ReplicaSet, "refresh", lambda self: None if self._replicas else refresh(self))
    elif broken == "stale":
        monkeypatch.setattr(ReplicaSet, "stale", lambda self: not self._replicas)
    else:
        monkeypatch.setattr(Mirror, "write", lambda self, originals, parcel: None)
    assert not parameter_change_is_seen()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"the lanes had 3, 3, 2, 2 rows .* shapes \(2, 3\), \(3, 3\), .* without the rows on dim 0"),
        ({"out_dims": 0}, r"the lanes had 3, 3, 2, 2 rows .* shapes \(2, 3\), \(3, 3\), .* without the rows on dim 0"),
    ],
    ids=["undeclared", "declared"],
)
def test_a_scatter_that_drops_a_row_raises(options, says, monkeypatch):
    """If scatter loses the last row of a shard, the engine raises when it joins the outputs."""
    cut = ShardPlan.cut

    def dropping(self, flat):
        pieces = cut(self, flat)
        return [pieces[0]._replace(leaves=[leaf[:-1] for leaf in pieces[0].leaves]), *pieces[1:]]

    model = mlp().to("sim:0")
    with parallel(model, SIMS, **options):
        monkeypatch.setattr(ShardPlan, "cut", dropping)
        with pytest.raises(GatherError, match=says):
            model(rows(10))


def test_a_gather_in_swapped_order_fails_the_check(monkeypatch):
    """If gather swaps the outputs of two lanes, the rows are out of order, and the check fails."""
    join = session_module.join

    def swapped(outputs, *rest):
        return join([outputs[1], outputs[0], *outputs[2:]], *rest)

    monkeypatch.setattr(session_module, "join", swapped)
    assert not plain_comparison_passes()


def test_gradients_that_stay_on_a_device_fail_the_check(monkeypatch):
    """If replicas do not return their gradients to the model, the model's gradients are wrong, and the check fails."""
    monkeypatch.setattr(Mirror, "linked", lambda self, original: self._copies[id(original)])
    assert not plain_comparison_passes()
