"""What lanes share, and what they must not: gradients, objects of the user's, contexts, and odd
classes.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import types

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.calling import Stateful

THREE = ["cpu"] * 3
X = torch.randn(24, 8)


def decorated(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapped


class Scores(nn.Linear):
    """Computes the norm of a gradient per row, inside forward."""

    def __init__(self, how):
        super().__init__(8, 8)
        self.how = how

    def forward(self, x):
        found = []
        with torch.enable_grad():
            for row in x:
                loss = nn.functional.linear(row, self.weight, self.bias).relu().sum()
                ways = {"backward": self.by_backward, "grad": self.by_grad, "freeze": self.by_flags}
                found.append(ways[self.how](loss))
        return torch.stack(found)

    def by_backward(self, loss):
        self.zero_grad()
        loss.backward()
        return self.weight.grad.norm()

    def by_grad(self, loss):
        return torch.autograd.grad(loss, self.weight)[0].norm()

    def by_flags(self, loss):
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return loss.detach()


@torch.no_grad()
@pytest.mark.parametrize("how", ["backward", "grad", "freeze"])
def test_gradients_inside_forward(how):
    """Lanes share gradients and flags of parameters, so code that writes them runs in turns, also
    in streams.
    """
    net = Scores(how)
    expected = net(X)
    with parallel(net, THREE, out_dims=0) as p:
        for _ in range(3):
            assert_close(net(X), expected)
        assert_close(torch.cat([*p.map(X.split(4))]), expected)


class Common:
    """A global object without attributes of its own. Layers write into it."""


COMMON = Common()


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.common = COMMON

    def forward(self, x):
        self.common.mask = x.sum(1, keepdim=True)
        torch.randn(100, 100) @ torch.randn(100, 100)
        return super().forward(x) * self.common.mask


class Doubles(nn.Linear):
    """Writes its weights for a moment, past autograd, in a decorated forward."""

    @decorated
    def forward(self, x):
        self.weight.data.mul_(2)
        y = super().forward(x)
        self.weight.data.div_(2)
        return y


@torch.no_grad()
def test_a_decorated_forward():
    """The function that a decorator wraps is code of the model too."""
    model = Doubles(8, 4)
    expected = model(X)
    with parallel(model, THREE) as p:
        assert_close([model(X) for _ in range(20)], [expected] * 20)
        assert_close(torch.cat([*p.map(X.split(6))]), expected)


@torch.no_grad()
def test_another_class_in_the_block():
    """The next call sees that the model itself has another class."""

    class Thrice(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3

    model = nn.Linear(8, 4)
    expected = model(X)
    with parallel(model, THREE):
        assert_close(model(X), expected)
        model.__class__ = Thrice
        assert_close(model(X), expected * 3)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the model wrote", "ignore:lanes that share a random generator")
def test_a_global_object_that_layers_write():
    """Each lane has its own copy of a global object that layers write, and the object itself stays
    as it was.
    """
    net = nn.Sequential(Masked(), Masked()).eval()
    expected = net(X)
    del COMMON.mask
    with parallel(net, THREE, out_dims=0):
        for _ in range(10):
            assert_close(net(X), expected)
    assert vars(COMMON) == {}


@torch.no_grad()
def test_attributes_with_names_of_hooks():
    """An attribute `h` beside parameters `h_v` and `h_orig` is no weight norm,
    and has its warning.
    """

    def run(model, x):
        model.h = x * 2
        return model.h

    model = Stateful(
        run, {}, h=None, h_v=nn.Parameter(torch.ones(1)), h_orig=nn.Parameter(torch.ones(1))
    )

    def use():
        with parallel(model.eval(), THREE, out_dims=0) as p:
            p(X)

    (message,) = warnings_of(use)
    assert "'h'" in message


def test_a_file_with_the_name_of_a_library(tmp_path, monkeypatch):
    """A file of the user with the name of a library is read as code of the user's: a write through
    .data puts its lanes into turns.
    """
    (tmp_path / "statistics_of_rows.py").write_text("")
    source = """
import torch
class Doubled(torch.nn.Linear):
    def forward(self, x):
        kept = self.weight.data.clone()
        self.weight.data.mul_(2)
        torch.randn(100, 100) @ torch.randn(100, 100)
        y = super().forward(x)
        self.weight.data.copy_(kept)
        return y
"""
    file = tmp_path / "timm.py"
    file.write_text(source)
    module = types.ModuleType("timm")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "timm", module)
    exec(compile(source, str(file), "exec"), vars(module))
    net = module.Doubled(8, 8).eval()
    with torch.no_grad():
        expected = net(X)
        with parallel(net, THREE, out_dims=0) as p:
            for _ in range(5):
                assert_close(net(X), expected)
            assert_close(torch.cat([*p.map(X.split(4))]), expected)


def _doubled(layer, x):
    layer.weight.data.mul_(2)
    return nn.functional.linear(x, layer.weight, layer.bias)


@torch.no_grad()
@pytest.mark.parametrize("way", ["call", "map", "submit"])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_weights_written_for_good(way, workers):
    """A write through .data is refused in streams and in workers as in calls."""
    net = Stateful(lambda model, x: _doubled(model.layer, x), {}, layer=nn.Linear(8, 8))
    with (
        parallel(net.eval(), THREE, out_dims=0, workers=workers) as p,
        pytest.raises(ReplicaError, match="was written"),
    ):
        {
            "call": lambda: net(X),
            "map": lambda: [*p.map([X, X])],
            "submit": lambda: p.submit(X).result(),
        }[way]()


class Namespace(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Dotted(dict):
    __getattr__ = dict.__getitem__


@torch.no_grad()
@pytest.mark.parametrize("kind", [Namespace, Dotted])
def test_dicts_with_attributes(kind):
    """Copies of a dict that is its own ``__dict__``, or whose ``__getattr__`` raises KeyError."""
    cfg = kind(scale=2.0, shift={"by": 1})
    net = Stateful(lambda model, x: x * model.cfg.scale + model.cfg["shift"]["by"], {}, cfg=cfg)
    with parallel(net.eval(), THREE, out_dims=0) as p:
        assert_close(net(X), X * 2 + 1)
        net.cfg["scale"] = 3.0
        assert_close(net(X), X * 3 + 1)
        assert_close([*p.map([X])], [X * 3 + 1])


class Generated(nn.Module):
    """As modules of e3nn do, it makes a submodule from code when it is unpickled or copied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.made = nn.Sequential(nn.Identity())

    def __getstate__(self):
        state = self.__dict__.copy()
        state["_modules"] = {}
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._modules = {"made": nn.Sequential(nn.Identity())}

    def forward(self, x):
        return self.made(x) * self.weight


class Copies(nn.Linear):
    """Copies itself, in the modes of the caller."""

    def __init__(self):
        super().__init__(8, 8)
        self.table = torch.ones(8)

    def __deepcopy__(self, memo):
        made = Copies.__new__(Copies)
        memo[id(self)] = made
        nn.Module.__init__(made)
        made.weight, made.bias = (
            memo.get(id(self.weight), self.weight),
            memo.get(id(self.bias), self.bias),
        )
        made.table, made.extra = self.table.clone(), torch.zeros(8)
        return made

    def forward(self, x):
        return super().forward(x) * self.table + getattr(self, "extra", 0)


@pytest.mark.parametrize("kind", [Generated, Copies])
def test_classes_with_copies_of_their_own(kind):
    """The first call is in inference mode, and training works after it."""
    net = kind()
    with parallel(net, THREE, out_dims=0):
        with torch.inference_mode():
            inferred = net(X)
        net(X).square().sum().backward()
    assert_close(inferred, net(X))
    assert net.weight.grad is not None


@torch.no_grad()
def test_max_norm_set_in_the_block():
    """Embeddings with max_norm write their weights, so lanes run in turns from then on."""
    net = nn.Embedding(10, 4).eval()
    rows = torch.randint(10, (12,))
    with parallel(net, THREE, out_dims=0) as p:
        net(rows)
        net.max_norm = 0.5
        found = net(rows)
        assert p._session.replicas.state.survey.in_turns
    assert_close(found, net(rows))
    assert found.norm(dim=1).max() <= 0.5 + 1e-6


VARIABLE = contextvars.ContextVar("VARIABLE", default="outside")


@pytest.mark.parametrize("grad", [False, True])
def test_context_variables_stay_in_the_call(grad):
    """Context variables that forward sets stay in the call, also in the part that the caller runs.

    A plain call is the plain call.
    """
    net = Stateful(
        lambda model, x: (VARIABLE.set("inside"), x * model.w)[1], {}, w=nn.Parameter(torch.ones(8))
    )
    with torch.set_grad_enabled(grad), parallel(net, THREE, out_dims=0):
        net(X)
        assert VARIABLE.get() == "outside"
