"""Cut calls and join outputs, all on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from parawrap.engine.cut import Cutter
from parawrap.engine.in_dims import Parameters
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.errors import GatherError, ShardError

CPU = torch.device("cpu")


@dataclasses.dataclass
class Output:
    logits: Any = None
    loss: Any = None


def rows(*sizes):
    """Return one tensor per size, with different numbers in each row."""
    return torch.arange(float(sum(sizes) * 2)).view(-1, 2).split(sizes)


def forward(x, y=None, *rest, texts=None, mask=None):
    """A target with every kind of parameter but `**kwargs`."""


def cutter(**options):
    """Return a cutter that knows the parameters of `forward`."""
    return Cutter(parameters=Parameters(forward), **options)


def planned(used, *args, lanes=2, **kwargs):
    """Return the plan of a call, and the call taken apart."""
    flat = used.flatten(args, kwargs)
    return used.plan(flat, lanes), flat


def cut(used, *args, lanes=2, **kwargs):
    plan, flat = planned(used, *args, lanes=lanes, **kwargs)
    return plan.scatter(flat, [CPU] * len(plan.sizes))


def uncut(used, *args, **options):
    """Return the message of the ShardError of a call."""
    with pytest.raises(ShardError) as caught:
        cut(used, *args, **options)
    return str(caught.value)


def joined(*outputs, sizes=(3, 1), device=None, originals=None, **rules):
    """Return the joined outputs of shards of 3 rows and 1 row, or of other sizes."""
    return join(list(outputs), sizes, JoinRules(**rules), device, originals)


def refusal(*outputs, **options):
    """Return the message of the GatherError of these outputs."""
    with pytest.raises(GatherError) as caught:
        joined(*outputs, **options)
    return str(caught.value)
