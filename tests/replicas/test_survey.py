"""The walk over a target: parts that are copied, shared by every lane, or refused with their path."""

from __future__ import annotations

import gc
import logging
import operator
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from parawrap import ReplicaError, parallel
from parawrap.replicas import ReplicaSet, Survey
from parawrap.replicas._parts import Kind
from tests.fuzz.models import SlottedBox

CPU = torch.device("cpu")


def replica_of(model):
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    return made.current[1].module


def test_opaque_objects_are_refused():
    outside = nn.Module()
    for hold, place in (
        (lambda layer: [setattr(outside, "it", iter([layer])), weakref.ref(outside)][1], r"held\(\)\.it is an iterator"),
        (lambda layer: iter([layer]), r"held is an iterator \(list_iterator\).*Keep its items in a list"),
        (lambda layer: (each for each in [layer]), r"held is an iterator \(generator\)"),
        (lambda layer: types.MappingProxyType({"a": layer}), r"held \(mappingproxy\) leads to a \(Linear\)"),
    ):
        model = nn.Module()
        model.a = nn.Linear(4, 4)
        model.held = hold(model.a)
        with pytest.raises(ReplicaError, match=place):
            ReplicaSet(model, [CPU] * 2)


def test_parallel_modules_are_refused(monkeypatch):
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    for model, place in ((nn.Sequential(Sharded(4, 4)), "submodule '0'"), (Sharded(4, 4), "the module")):
        with pytest.raises(ReplicaError, match=f"no replica of {place} can be made: Sharded is parallel already"):
            replica_of(model)


class Sentinel:
    """A class that holds one of its instances, which code compares by identity."""


Sentinel.first = Sentinel()


def test_objects_that_lanes_share():
    """Locks, loggers, getters, arrays, singletons, and a container that only a closure holds."""
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model.held = [threading.Lock(), logging.getLogger(), operator.itemgetter(1), object(), torch.ones(2).numpy()]
    model.held += [Sentinel.first, Kind.LIST, ...]
    assert all(mine is theirs for mine, theirs in zip(replica_of(model).held, model.held, strict=True))
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    with parallel(model, ["cpu"] * 2) as p:
        p(torch.randn(9, 4))
    assert seen == [5, 4]


def test_deep_models_need_no_recursion():
    """The deepest of 1,500 modules is copied first. A chain of lists is refused with a cure."""
    model = nn.Module()
    model.chain, inner = [], model
    for _ in range(1500):
        inner.child = inner = nn.Module()
    inner, count = replica_of(model), 0
    while inner is not None:
        inner, count = getattr(inner, "child", None), count + 1
    assert count == 1501
    chain = model.chain
    for _ in range(5000):
        chain.append([])
        chain = chain[0]
    with pytest.raises(ReplicaError, match=r"too long for copy\.deepcopy.*setrecursionlimit"):
        replica_of(model)


@pytest.mark.parametrize("hold", [lambda model: [model], lambda model: None, SlottedBox], ids=["list", "none", "slot"])
def test_replicas_are_freed_at_once(hold):
    """At the end of the block, and when the model changes, also if objects refer to each other."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.held = hold(model)
    assert Survey(model).has_cycle == (model.held is not None)
    gc.collect()
    gc.disable()
    try:
        with parallel(model, ["cpu"] * 2) as p:
            model(torch.randn(9, 4)).sum().backward()
            found = [weakref.ref(replica.module[0]) for replica in p._session.pool.refresh()]
            model.note = [1]
            model(torch.randn(9, 4))
            assert [reference() for reference in found] == [None, None]
            found = [weakref.ref(replica.module[0]) for replica in p._session.pool.refresh()]
        assert [reference() for reference in found] == [None, None]
    finally:
        gc.enable()
