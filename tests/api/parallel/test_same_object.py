"""Inside a block the same model object is parallel, also compiled; after the block it is what it
was.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import threading
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import Parallel, SessionError, parallel

# Which the compiler reads after a break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Net(nn.Module):
    """A model with a buffer, a plain attribute, and a second method.

    It counts the rows of each call.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("shift", torch.arange(3.0))
        self.scale = 2.0
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.seen.append(len(x))
        return self.linear(x) * self.scale + self.shift

    def generate(self, x, steps=2):
        for _ in range(steps):
            x = x + self(x).mean(1, keepdim=True)
        return x


def state_of(module):
    """Return the class of every module, and the identity of each value in its `vars`."""
    return [
        (type(part), {key: id(value) for key, value in vars(part).items()})
        for part in module.modules()
    ]


@pytest.mark.parametrize("columns", [4, 5], ids=["after a call", "after an error"])
def test_the_model_is_unchanged(columns):
    model = Net()
    before = state_of(model)
    with (
        pytest.raises(RuntimeError) if columns == 5 else contextlib.nullcontext(),
        parallel(model, THREE),
    ):
        model(torch.randn(7, columns))
    assert state_of(model) == before


def test_the_model_inside_the_block():
    """The type, the state_dict, the names of parameters, the `vars`, and the methods' signatures
    are those of the model.

    Copies of its `vars` are plain dicts.
    """
    model = Net()
    plain = dict(vars(model))
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    signature = inspect.signature(model.generate)
    with parallel(model, TWO, methods=("forward", "generate")) as p:
        model(torch.randn(5, 4))
        assert isinstance(p, Parallel)
        assert type(model) is Net
        assert (list(model.state_dict()), [name for name, _ in model.named_parameters()]) == (
            keys,
            names,
        )
        assert (inspect.signature(model.generate), model.generate.__name__) == (
            signature,
            "generate",
        )
        assert (model.forward.__self__, model.forward.__func__) == (model, Net.forward)
        own = vars(model)
        assert ([*own], [*own.items()], own["training"]) == ([*plain], [*plain.items()], True)
        assert ([*own.keys()], [*own.values()]) == ([*plain.keys()], [*plain.values()])
        for made in (own.copy(), copy.copy(own), dict(own), {**own}):
            assert (type(made), made) == (dict, plain)


def test_a_forward_on_the_instance():
    """A forward that is set on the instance before the block is parallel and restored.

    One that is set inside, or between two blocks, stays.
    """
    model, x = Net(), torch.randn(7, 4)
    own = model.forward = types.MethodType(lambda self, x: self.linear(x) - 1, model)
    plain = model(x)
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
    assert vars(model)["forward"] is own
    with parallel(model, TWO) as p:
        new = model.forward = lambda x: x
        with parallel(model, THREE) as inner:
            p.close()
            assert_close(model(x), x)
            assert inner.stats().shards == (3, 2, 2)
    assert vars(model)["forward"] is new


def test_every_reference_is_parallel():
    """A submodule elsewhere is, too.

    `model.forward` of before the block works inside it, and of inside after it.
    """
    model, x = Net(), torch.randn(7, 4)
    outer, before, plain = nn.Sequential(model, nn.Identity()), model.forward, model(x)
    model.seen.clear()
    with parallel(model, THREE):
        assert_close(outer(x), plain)
        assert sorted(model.seen) == [2, 2, 3]
        assert_close(before(x), plain)
        inside = model.forward
    assert_close(inside(x), plain)


def test_methods_are_parallel_by_name():
    """The named methods are cut, and no others. Calls of forward inside generate stay in their
    lane.
    """
    model, x = Net(), torch.randn(7, 4)
    plain = model(x), model.generate(x, steps=3)
    with parallel(model, THREE, methods=("generate", "generate")) as p:
        assert_close(model.generate(x, steps=3), plain[1])
        assert p.stats().shards == (3, 2, 2)
        model(x)
        assert p.stats().calls == 1
    assert "generate" not in vars(model)
    with parallel(model, THREE, methods=("forward", "generate")) as p:
        assert_close((model(x), model.generate(x, steps=3)), plain)
        assert (p.stats().calls, p.stats().shards) == (2, (3, 2, 2))


def test_root_hooks_see_the_whole_batch():
    """Hooks of the root run in the caller's thread, and their return values are used.

    Hooks of submodules run in the lanes.
    """
    model, seen, rows = Net(), [], []
    model.linear.register_forward_hook(lambda m, args, out: rows.append(len(out)))
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(
        lambda m, args, out: seen.append((len(out), threading.get_ident(), m is model))
    )
    model.register_forward_hook(lambda m, args, out: (out, out))
    model.register_full_backward_hook(lambda m, gi, go: seen.append(len(go[0])))
    x = torch.randn(7, 4, requires_grad=True)
    plain = model(x)
    seen.clear()
    rows.clear()
    with parallel(model, THREE):
        output = model(x)
        assert_close(output, plain)
        assert sorted(rows) == [2, 2, 3]
        output[0].sum().backward()
    assert seen == [(7, threading.get_ident(), True), 7]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_plain_models(duplicate):
    """Copies of a parallel model have their own parameters, no parallel `forward`, and can have
    their own block.
    """
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(7, 4)
    plain, keys = model(x), set(vars(duplicate(model)))
    with parallel(model, THREE) as p:
        model(x)
        clone = duplicate(model)
        with parallel(clone, TWO) as own:
            assert_close(clone(x), model(x))
            assert (p.stats().calls, own.stats().shards) == (2, (4, 3))
    assert set(vars(clone)) == keys
    with torch.no_grad():
        clone.get_submodule("0").weight.zero_()
    assert_close(model(x), plain)
    assert not torch.equal(clone(x), plain)


def test_a_decorated_function():
    """Each call of a decorated function is a block, which ends with the outermost call or its
    exception.
    """
    model = Net()

    @parallel(model, TWO)
    def evaluate(x, *, depth):
        """Evaluate the model."""
        result = evaluate(x, depth=depth - 1) if depth else 1 / len(x)
        model(x)
        return result

    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Evaluate the model.")
    assert evaluate(torch.ones(5, 4), depth=3) == 0.2
    assert sorted(model.seen) == [2] * 4 + [3] * 4
    with pytest.raises(ZeroDivisionError):
        evaluate(torch.ones(0, 4), depth=0)
    assert "forward" not in vars(model)


@torch.no_grad()
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_closed_blocks_refuse_calls(workers):
    """A closed block refuses calls, and can be entered again. close() may be called at any time and
    more than once.
    """
    model, x = nn.Linear(4, 3), torch.ones(5, 4)
    p = parallel(model, TWO, workers=workers)
    p.close()
    for _ in range(2):
        model.weight.mul_(2)
        with p:
            assert_close(model(x), x @ model.weight.T + model.bias)
            assert p.stats().shards == (3, 2)
            p.close()
            p.close()
            assert "forward" not in vars(model)
        for use in (
            lambda: p(x),
            lambda: p.submit(x),
            lambda: list(p.map([x])),
            lambda: p.trace("t.json"),
        ):
            with pytest.raises(
                SessionError, match=r"is closed\. Use it inside its `with` block, or make a new one"
            ):
                use()


compiled = partial(torch.compile, backend="eager")


@pytest.mark.parametrize(
    "form", [compiled, torch.jit.script, lambda layer: nn.Sequential(compiled(layer), nn.ReLU())]
)
def test_compiled_models_are_parallel(form):
    """Outputs and gradients are the plain ones, and the `vars` hold the same objects after the
    block.
    """
    model, x = form(nn.Linear(4, 3)), torch.randn(7, 4, requires_grad=True)

    def outcome():
        y = model(x)
        return y, torch.autograd.grad(y.sum(), [x, *model.parameters()])

    plain = outcome()
    before = {key: id(value) for key, value in vars(model).items()}
    with parallel(model, THREE) as p:
        for _ in range(2):
            assert_close(outcome(), plain)
        assert p.stats().shards == (3, 2, 2)
        assert_close(list(p.map([x, x])), [plain[0]] * 2)
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert_close(model(x), plain[0])


def test_a_compiled_function_around():
    """A compiled function around the model has the plain output before, inside, and after the
    block.

    Inside, the call is part of the graph.
    """
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    plain = model(x) + 1
    function = compiled(lambda x: model(x) + 1)
    full = compiled(lambda x: model(x) + 2, fullgraph=True)
    assert_close(function(x), plain)
    with parallel(model, THREE):
        assert_close((function(x), full(x)), (plain, plain + 1))
        function(x).sum().backward()
    assert_close(model.weight.grad, x.sum(0).expand(3, 4))
    assert_close((function(x), full(x)), (plain, plain + 1))
