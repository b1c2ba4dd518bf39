"""Stand-ins for methods of a module: inside a block, copies of the module are plain; after it, no trace is left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import SessionError, parallel
from parawrap.replicas import PlainView, StandIn, original_method, put, restore

X = torch.ones(9, 4)


def stood_in(model, view, text):
    stand_in = StandIn(model.forward, lambda wrapped, instance, args, kwargs: text)
    return [("forward", stand_in, put(model, view, "forward", stand_in))]


def test_put_and_restore_leave_no_trace():
    """Attributes that were set in the meantime stay, and so does a method that the user had set."""
    for own in (None, lambda x: "mine"):
        model, view = nn.Linear(4, 4), PlainView()
        if own is not None:
            model.forward = own
        before = vars(model)
        names = [*before]
        replaced = stood_in(model, view, "stood in")
        assert model(X) == "stood in"
        assert original_method(model.forward) == (own or nn.Linear.forward.__get__(model))
        model.flag = 1
        del model.training
        restore(model, replaced)
        assert vars(model) is before
        assert {*before} == {*names, "flag"} - {"training"}
        assert getattr(model.forward, "__func__", model.forward) is (own or nn.Linear.forward)


def test_blocks_nest_in_order():
    """An outer one cannot be restored first. A method that other code put over a stand-in stays."""
    model, view = nn.Linear(4, 4), PlainView()
    outer, inner = stood_in(model, view, "outer"), stood_in(model, view, "inner")
    with pytest.raises(SessionError, match=r"this block on Linear\.forward is not the innermost one"):
        restore(model, outer)
    assert model(X) == "inner"
    restore(model, inner)
    assert model(X) == "outer"
    model.forward = lambda x: "user"
    restore(model, outer)
    assert model(X) == "user"


def test_a_plain_view_reads_like_the_plain_dict():
    model, view = nn.Linear(4, 4), PlainView()
    plain = dict(vars(model))
    replaced = stood_in(model, view, "stood in")
    own = vars(model)
    assert type(own) is PlainView
    assert (own == plain, len(own), [*own], [*own.keys()]) == (True, len(plain), [*plain], [*plain])
    assert ([*own.values()], [*own.items()], repr(own)) == ([*plain.values()], [*plain.items()], repr(plain))
    for made in (own | {}, {} | own, own.copy(), copy.copy(own), dict(own.items())):
        assert type(made) is dict
        assert made == plain
    assert own["training"] is True
    restore(model, replaced)


def test_a_clone_with_the_dict_of_the_model():
    """A module made from `vars(model)` inside the block runs plainly with its own weights."""
    model = nn.Linear(4, 4)
    with parallel(model, ["cpu"] * 2) as p:
        model(X)
        clone = nn.Linear.__new__(nn.Linear)
        clone.__dict__.update(vars(model))
        clone._parameters = {"weight": nn.Parameter(torch.zeros(4, 4)), "bias": None}
        assert not clone(X).any()
        assert not clone.forward(X).any()
        assert p.stats().calls == 1
