"""`ReplicaSet`: one copy of the module's structure per lane, refreshed in place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parawrap import ReplicaError
from parawrap.replicas import PlainView, ReplicaSet, StandIn, home_of, put, restore
from parawrap.replicas._private_names import uses_cuda_graphs

CPU = torch.device("cpu")


class Holds(nn.Module):
    """A model with a child under two names, a bound method, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.BatchNorm1d(2)
        self.alias = self.child
        self.bound = self.helper
        self.register_buffer("count", torch.zeros(()))

    def helper(self):
        return self

    def forward(self, x):
        return self.child(x)


def replicas(module, lanes=3):
    made = ReplicaSet(module, [CPU] * lanes)
    made.refresh()
    return made


def modules(made):
    return [replica.module for replica in made.current]


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_each_replica_has_its_own_attributes_and_buffers(lane):
    """An attribute or buffer that one lane writes, also lane 0, does not change in the module or in other lanes."""
    model = Holds()
    made = modules(replicas(model))
    writer = made.pop(lane)
    writer.flag = 1
    writer.count += 5
    for other in (model, *made):
        assert not hasattr(other, "flag")
        assert other.count.item() == 0


def test_write_back_copies_lane_0s_buffers_to_the_module():
    """After `write_back` of lane 0, the module has the buffers that the lane wrote."""
    model = Holds()
    made = replicas(model)
    made.current[0].module.count += 5
    made.current[0].write_back()
    assert model.count.item() == 5


def test_every_replica_shares_the_parameters():
    """On the module's device, replicas use the memory of the module's parameters."""
    model = Holds()
    for replica in modules(replicas(model)):
        assert replica is not model
        assert replica.child.weight.data_ptr() == model.child.weight.data_ptr()


def test_shared_submodules_stay_shared_in_a_replica():
    """A submodule with two names is also one submodule with two names in every replica."""
    for replica in modules(replicas(Holds())):
        assert replica.child is replica.alias


def test_bound_methods_are_bound_to_the_replica():
    """If an attribute is a bound method of the module, the replica's attribute is bound to the replica."""
    for replica in modules(replicas(Holds())):
        assert replica.bound() is replica


def test_replicas_are_stale_only_after_a_change():
    """Changing a buffer, an attribute, a child, a mode, or a parameter makes replicas stale until the next refresh."""
    model = Holds().eval()
    made = replicas(model)
    changes = [
        lambda: model.count.add_(1),
        lambda: setattr(model, "flag", 2),
        lambda: setattr(model, "alias", nn.BatchNorm1d(2).eval()),
        lambda: model.child.train(),
        lambda: model.child.eval(),
        lambda: setattr(model.child, "weight", nn.Parameter(torch.zeros(2))),
    ]
    assert not made.stale()
    for change in changes:
        change()
        assert made.stale()
        made.refresh()
        assert not made.stale() or model.child.training


def test_a_changed_value_makes_no_new_replica():
    """After a refresh, the replicas are the same objects with the new value."""
    model = Holds().eval()
    made = replicas(model)
    before = modules(made)
    model.count.fill_(4)
    made.refresh()
    assert list(map(id, modules(made))) == list(map(id, before))
    assert [module.count.item() for module in modules(made)] == [4, 4, 4]
    assert made.freshness.refreshes == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "step", 7),
        lambda model: setattr(model, "note", "other"),
        lambda model: setattr(model, "plain", torch.ones(2)),
        lambda model: setattr(model, "count", torch.ones(())),
        lambda model: model.child.train(),
        lambda model: setattr(model.config, "scale", 5.0),
    ],
    ids=["number", "string", "tensor", "buffer", "mode", "object"],
)
def test_new_values_are_set_in_the_replicas(change):
    """The replicas are the same objects with the new value; a tensor is the lane's own copy."""
    model = Holds().eval()
    model.step, model.note, model.plain, model.config = 1, "one", torch.zeros(2), SimpleNamespace(scale=1.0)
    made = replicas(model)
    before = modules(made)
    for _ in range(2):
        change(model)
        made.refresh()
        assert list(map(id, modules(made))) == list(map(id, before))
        for replica in modules(made):
            assert (replica.step, replica.note, replica.config.scale) == (model.step, model.note, model.config.scale)
            assert replica.child.training == model.child.training
            for mine, theirs in ((replica.plain, model.plain), (replica.count, model.count)):
                assert mine is not theirs
                assert torch.equal(mine, theirs)
    before[0].count.add_(3)
    made.current[0].write_back()
    assert torch.equal(model.count, before[1].count + 3)


def test_one_tensor_in_two_new_places_is_one_tensor_in_the_replicas():
    """The replica keeps the tie, as `copy.deepcopy` does."""
    model = Holds().eval()
    model.one, model.other = torch.zeros(2), torch.zeros(2)
    made = replicas(model)
    model.one = model.other = torch.ones(2)
    made.refresh()
    for replica in modules(made):
        assert replica.one is replica.other
        assert torch.equal(replica.one, model.one)


def test_a_set_learns_if_a_tensor_requires_gradients():
    """`learns` follows the model at each refresh."""
    model = Holds()
    made = replicas(model)
    for learns in (True, False, True):
        model.requires_grad_(learns)
        made.refresh()
        assert made.learns == learns


def test_home_of_a_module():
    """`home_of` returns the device of the module's tensors, or None without tensors. Two devices raise ReplicaError."""
    assert home_of(nn.Linear(2, 2)) == CPU
    assert home_of(nn.ReLU()) is None
    with pytest.raises(ReplicaError, match=r"0\.weight.*1\.weight"):
        home_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_put_and_restore_leave_no_trace():
    """After `restore`, the module has the attributes that it had before `put`."""
    model = Holds()
    before = dict(vars(model))
    stand_in = StandIn(model.forward, lambda wrapped, instance, args, kwargs: "stood in")
    replaced = [("forward", stand_in, put(model, PlainView(), "forward", stand_in))]
    assert model(torch.zeros(2, 2)) == "stood in"
    restore(model, replaced)
    assert vars(model).keys() == before.keys()


@pytest.mark.parametrize(
    ("mode", "has_graphs"),
    [("default", False), ("max-autotune-no-cudagraphs", False), ("reduce-overhead", True), ("max-autotune", True)],
)
def test_cuda_graphs_of_compiled_models(mode, has_graphs):
    """Lanes on GPUs refuse a model that is compiled to run as CUDA graphs; tests/cuda has the error."""
    assert uses_cuda_graphs(torch.compile(nn.Linear(4, 4), mode=mode)) == has_graphs
