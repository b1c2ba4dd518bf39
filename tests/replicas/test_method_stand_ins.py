"""Stand-ins for methods of a module: inside a block, copies of the module are plain; after it, no trace is left."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from parawrap.replicas import PlainView, StandIn, original_method, put, restore

X = torch.ones(9, 4)


def stood_in(model, view, text):
    stand_ins = {"forward": StandIn(model.forward, lambda wrapped, instance, args, kwargs: text)}
    put(model, view, stand_ins, hidden=["hidden"])
    return stand_ins


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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_stand_ins_leave_in_any_order(order):
    """The topmost of those that are left is called, and hidden attributes return with the last one."""
    model, hidden = nn.Linear(4, 4), object()
    model.hidden = hidden
    before = dict(vars(model))
    stood = [stood_in(model, PlainView(), text) for text in range(3)]
    left = [0, 1, 2]
    for number in order:
        assert (model(X), model.hidden) == (left[-1], None)
        left.remove(number)
        restore(model, stood[number])
    assert (vars(model), model.hidden) == (before, hidden)


def test_a_method_of_the_user_stays():
    """It was put over a stand-in, or between two."""
    model, view = nn.Linear(4, 4), PlainView()
    outer = stood_in(model, view, "outer")
    model.forward = lambda x: "user"
    inner = stood_in(model, view, "inner")
    restore(model, outer)
    assert model(X) == "inner"
    restore(model, inner)
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
