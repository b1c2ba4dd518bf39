"""Stand-ins for methods of a module: inside a block, copies of the module are plain; after it, no trace is left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import SessionError
from parawrap.replicas import PlainView, StandIn, original_method, put, restore

X = torch.ones(9, 4)


def stood_in(model, view, text):
    stand_in = StandIn(model.forward, lambda wrapped, instance, args, kwargs: text)
    return [("forward", stand_in, put(model, view, "forward", stand_in))]


@pytest.mark.parametrize("own", [None, lambda x: "mine"], ids=["class", "instance"])
def test_put_and_restore_leave_no_trace(own):
    """Attributes that were set in the meantime stay, and so does a method that the user had set."""
    model, view = nn.Linear(4, 4), PlainView()
    if own is not None:
        model.forward = own
    before, names = vars(model), {*vars(model)}
    replaced = stood_in(model, view, "stood in")
    assert model(X) == "stood in"
    assert original_method(model.forward) == (own or nn.Linear.forward.__get__(model))
    model.flag = 1
    del model.training
    restore(model, replaced)
    assert vars(model) is before
    assert {*before} == (names | {"flag"}) - {"training"}
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


def test_a_plain_view_reads_like_a_dict():
    model, view = nn.Linear(4, 4), PlainView()
    plain = dict(vars(model))
    stood_in(model, view, "stood in")
    own = vars(model)
    assert type(own) is PlainView
    assert (own == plain, len(own), own["training"]) == (True, len(plain), True)
    assert ([*own], [*own.items()]) == ([*plain], [*plain.items()])
    assert ([*own.keys()], [*own.values()], repr(own)) == ([*plain.keys()], [*plain.values()], repr(plain))
    for made in (own | {}, {} | own, own.copy(), copy.copy(own), dict(own.items())):
        assert (type(made), made) == (dict, plain)
