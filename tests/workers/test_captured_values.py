"""Values that travel with functions and classes: each call has those of its moment."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

from tests.helpers.pools import outputs_of, processes
from tests.helpers.same import assert_same


def scaled_by(namespace):
    """Return a module of a class that reads a global of that namespace."""
    source = "class Scaled(Module):\n    def forward(self, x):\n        return x * SCALE\n"
    exec(source, namespace)
    return namespace["Scaled"]()


def test_closures_are_current():
    """A variable of a hook's closure, a global of the script, and a container that a function reads."""
    offset, table, x = 1.0, {"offset": 1.0}, torch.ones(9, 2)
    script = {"__name__": "__main__", "Module": nn.Module, "SCALE": 1.0}
    model = nn.Sequential(scaled_by(script), nn.Identity())
    model[1].register_forward_hook(lambda module, args, output: output + offset)
    with processes(model) as p, processes(lambda x: x + table["offset"]) as q:
        for number in range(1, 4):
            offset, script["SCALE"], table["offset"] = 10.0 * number, float(number), 5.0 * number
            assert_same(outputs_of(p, model, x), [x * number + 10 * number] * 3)
            assert_same(outputs_of(q, q, x), [x + 5 * number] * 3)


def test_functions_are_current():

    class Scaled(nn.Module):
        def forward(self, x, by=1):
            return x * by

    model, x = Scaled(), torch.ones(9, 1)
    with processes(model) as p:
        assert_close(p(x), x)
        Scaled.forward.__defaults__ = (2,)
        assert_close(p(x), x * 2)
        Scaled.forward = lambda self, x: x * 3
        assert_close(p(x), x * 3)


def test_modules_of_torch_are_captured():
    """Some modules and operators of torch have classes of their own, which pickle refuses."""
    mkldnn, double = torch.backends.mkldnn, torch.ops.aten.mul.Scalar
    with processes(lambda x: x + 0 * int(mkldnn.is_available())) as p:
        (output,) = p.map([torch.arange(3.0)], prepare=lambda x: double(x, 2))
    assert output.tolist() == [0, 2, 4]
