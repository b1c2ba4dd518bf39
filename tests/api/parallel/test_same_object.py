"""Inside a block the same model object is parallel; after the block it is what it was."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import threading
import types

import pytest
import torch
import wrapt
from torch import nn
from torch.testing import assert_close

from parawrap import Parallel, SessionError, ShardError, parallel
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Net(nn.Module):
    """A model with a buffer, a plain attribute, and a second method."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("shift", torch.arange(3.0))
        self.scale = 2.0

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift

    def generate(self, x, steps=2):
        for _ in range(steps):
            x = x + self(x).mean(1, keepdim=True)
        return x


class Sizes(nn.Module):
    """Doubles its input, and records the row count of each call."""

    def __init__(self):
        super().__init__()
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.seen.append(len(x))
        return x * 2


def state_of(module):
    """Return the class of every module, the identity of each value in its `vars`, and its hooks."""
    return [
        (type(part), {key: id(value) for key, value in vars(part).items()}, list(part._forward_hooks))
        for part in module.modules()
    ]


# -- the model


@pytest.mark.parametrize("end", ["normal", "error of the block", "error of a lane"])
def test_the_model_is_unchanged_after(end):
    model = Net()
    before = state_of(model)

    def use():
        with parallel(model, THREE):
            model(torch.randn(7, 4)).sum()
            if end == "error of the block":
                raise ZeroDivisionError
            if end == "error of a lane":
                model(torch.randn(7, 5))

    if end == "normal":
        use()
    else:
        with pytest.raises(ZeroDivisionError if end == "error of the block" else RuntimeError):
            use()
    assert state_of(model) == before


def test_the_model_inside_the_block():
    """The type, the keys of the state_dict, the names of parameters, and the signature are those of the model."""
    model = Net()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    signature = inspect.signature(model.generate)
    with parallel(model, TWO, methods=("forward", "generate")) as p:
        model(torch.randn(5, 4))
        assert isinstance(p, Parallel)
        assert type(model) is Net
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == names
        assert inspect.signature(model.generate) == signature
        assert model.generate.__name__ == "generate"
        assert (model.forward.__self__, model.forward.__func__) == (model, Net.forward)


def test_a_forward_on_the_instance():
    """A `forward` set before the block is parallel and restored. A `forward` set inside the block stays."""
    model, x = Net(), torch.randn(7, 4)
    own = model.forward = types.MethodType(lambda self, x: self.linear(x) - 1, model)
    plain = model(x)
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
    assert vars(model)["forward"] is own
    with parallel(model, TWO):
        new = model.forward = lambda x: x
    assert vars(model)["forward"] is new


def test_references_in_other_modules():
    """A model that is a submodule elsewhere is parallel when it is called from there."""
    encoder = Sizes()
    outer = nn.Sequential(encoder, nn.Identity())
    with parallel(encoder, THREE):
        assert outer(torch.ones(7, 1)).tolist() == [[2.0]] * 7
    assert sorted(encoder.seen) == [2, 2, 3]


def test_bound_methods_cross_the_block():
    """`model.forward` from before the block works inside it, and from inside the block works after it."""
    model, x = Net(), torch.randn(5, 4)
    before, plain = model.forward, model(x)
    with parallel(model, TWO):
        assert_close(before(x), plain)
        inside = model.forward
    assert_close(inside(x), plain)


# -- methods


def test_methods_are_parallel_by_name():
    """Only the named methods are cut. Calls of forward inside generate stay in their lane."""
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


class _Unusual(nn.Module):
    """Has a decorated forward that looks like a bound method, and static, class, and partial methods."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    @wrapt.decorator
    def _plus_one(wrapped, _instance, args, kwargs):
        return wrapped(*args, **kwargs) + 1

    @_plus_one
    def forward(self, x):
        return x * 2

    @staticmethod
    def double(x):
        return x * 2

    @classmethod
    def triple(cls, x):
        return x * 3

    def _times(self, x, factor):
        self.rows += len(x)
        return x * factor

    times_four = functools.partialmethod(_times, factor=4)


@pytest.mark.parametrize(("method", "value"), [("forward", 3), ("double", 2), ("triple", 3), ("times_four", 4)])
def test_unusual_methods_run_in_every_lane(method, value):
    model = _Unusual()
    with parallel(model, THREE, methods=(method,)) as p:
        assert getattr(model, method)(torch.ones(7, 1)).tolist() == [[value]] * 7
        assert p.stats().shards == (3, 2, 2)
    assert model.rows == (3 if method == "times_four" else 0)  # of lane 0, as in torch
    assert method not in vars(model)


# -- hooks


def test_root_hooks_run_once_on_the_whole_batch():
    """They run in the caller's thread, and what they return is used."""
    model, seen = Net(), []
    model.register_forward_pre_hook(lambda m, args: seen.append((len(args[0]), threading.get_ident(), m is model)))
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(lambda m, args, out: seen.append((len(out), threading.get_ident(), m is model)))
    model.register_forward_hook(lambda m, args, out: (out, out))
    model.register_full_backward_hook(lambda m, gi, go: seen.append(len(go[0])))
    x = torch.randn(7, 4, requires_grad=True)
    plain = model(x)
    seen.clear()
    with parallel(model, THREE):
        output = model(x)
        assert_close(output, plain)
        assert seen == [(7, threading.get_ident(), True)] * 2
        output[0].sum().backward()
    assert seen[2:] == [7]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_submodule_hooks_run_in_every_lane(grad):
    """Also if they are registered or removed inside the block. Each call has the same hooks on the same shards."""
    model, rows, backward_rows = Net(), [], []

    def hook(module, args, out):
        rows.append(len(out))
        return out * 0

    with torch.set_grad_enabled(grad), parallel(model, THREE):
        x = torch.randn(7, 4, requires_grad=grad)
        model(x)
        handle = model.linear.register_forward_hook(hook)
        model.linear.register_full_backward_hook(lambda m, gi, go: backward_rows.append(len(go[0])))
        for calls in (1, 2, 3):
            output = model(x)
            assert_close(output, model.shift.expand(7, 3))
            assert sorted(rows) == sorted([3, 2, 2] * calls)
        if grad:
            output.sum().backward()
            assert sorted(backward_rows) == [2, 2, 3]
        handle.remove()
        model(x)
        assert len(rows) == 9


# -- copies made in the block


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.filterwarnings("ignore:.*torch.package:UserWarning")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("make", [Net, lambda: torch.fx.symbolic_trace(Net())], ids=["module", "fx"])
def test_copies_are_plain_models(make, duplicate):
    """They have their own parameters, no parallel `forward`, and can have a block of their own."""
    model, x = make(), torch.randn(7, 4)
    plain, keys = model(x), set(vars(duplicate(model)))
    with parallel(model, THREE) as p:
        model(x)
        clone = duplicate(model)
        assert_close(clone(x), plain)
        assert p.stats().calls == 1
        with parallel(clone, TWO) as own:
            assert_close(clone(x), model(x))
            assert own.stats().shards == (4, 3)
    assert set(vars(clone)) == keys
    with torch.no_grad():
        clone.linear.weight.zero_()
    assert_close(model(x), plain)
    assert not torch.equal(clone(x), plain)


def test_a_shallow_copy_calls_itself():
    model, x = Net(), torch.randn(7, 4)
    with parallel(model, TWO):
        clone = copy.copy(model)
        clone.scale = 0.0
        assert_close(clone(x), model.shift.expand(7, 3))
    assert_close(clone(x), model.shift.expand(7, 3))


# -- other targets


class _Callable:
    def __call__(self, x):
        return x.abs()


@pytest.mark.parametrize(
    "target",
    [lambda x: x.abs(), functools.partial(torch.abs), _Callable(), _Callable().__call__, torch.abs, torch.Tensor.abs],
    ids=["lambda", "partial", "object", "method", "builtin", "descriptor"],
)
def test_any_callable_is_parallel(target):
    x = torch.randn(7, 2)
    with parallel(target, THREE) as p:
        assert torch.equal(p(x), x.abs())
        assert p.stats().shards == (3, 2, 2)


def test_p_without_a_with_block():
    """`p(x)` opens the lanes, and close() ends them."""
    model = Sizes()
    p = parallel(model, THREE)
    p(torch.ones(7, 1))
    assert sorted(model.seen) == [2, 2, 3]
    assert "forward" not in vars(model)
    p.close()


def test_one_cpu_lane_is_the_plain_call():
    """The model itself runs in the caller's thread."""
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append((self, len(x), threading.get_ident()))
            return x.mean()

    model, before = Model(), set(threading.enumerate())
    with parallel(model, ["cpu"]) as p:
        assert model(torch.ones(7)).item() == 1
        assert set(threading.enumerate()) == before
        assert p.stats().plain == 1
    assert seen == [(model, 7, threading.get_ident())]


# -- the decorator


def test_a_decorated_function_opens_the_block():
    """Each call of the function is a block, which ends with the outermost call or its exception."""
    model = Sizes()

    @parallel(model, TWO)
    def evaluate(x, *, depth):
        """Evaluate the model."""
        y = model(x)
        return evaluate(y, depth=depth - 1) if depth else {}[y] if depth < 0 else y

    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Evaluate the model.")
    assert evaluate(torch.ones(5, 1), depth=3).tolist() == [[16.0]] * 5
    assert sorted(model.seen) == [2] * 4 + [3] * 4
    assert "forward" not in vars(model)

    @parallel(model, TWO)
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "forward" not in vars(model)


def test_a_decorated_method_keeps_its_self():
    model = Sizes()

    class Trainer:
        factor = 3

        @parallel(model, TWO)
        def step(self, x):
            return model(x) * self.factor

    assert Trainer().step(torch.ones(5, 1)).tolist() == [[6.0]] * 5
    assert sorted(model.seen) == [2, 3]


def test_a_decorated_function_in_many_threads():
    """Each call returns its own output, and the model is plain after the last call."""
    model, barrier, wrong = Net(), threading.Barrier(8), []

    @parallel(model, TWO)
    def evaluate(x):
        return model(x)

    def work(seed):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        barrier.wait(PATIENCE_S)
        for _ in range(10):
            if not torch.allclose(evaluate(x), model.linear(x) * model.scale + model.shift, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    assert "forward" not in vars(model)


class Applies(nn.Module):
    """Applies a function that it gets."""

    def forward(self, function):
        return function(torch.ones(3))


def test_a_function_as_the_only_argument():
    """Inside the block it is the model's argument. Before the block, it is decorated."""
    model = Applies()
    with parallel(model, TWO) as p:
        assert p(torch.sum) == model(torch.sum) == 3

    @parallel(model, TWO)
    def total():
        return model(torch.sum)

    assert total() == 3


def test_functions_that_run_later_are_refused():
    """A coroutine or a generator would run after its block has ended."""
    block = parallel(Net(), TWO)

    async def later():
        return None

    def items():
        yield 1

    for function in (later, items):
        with pytest.raises(ShardError, match="Open the block inside it"):
            block(function)


# -- closed blocks


def test_a_closed_block_is_refused():
    with parallel(Net(), TWO) as p:
        pass
    x = torch.randn(5, 4)
    for use in (lambda: p(x), lambda: p.submit(x), lambda: list(p.map([x])), lambda: p.trace("t.json")):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_a_block_can_be_entered_again():
    """Also after close(), which may be called at any time and more than once."""
    model = Sizes()
    p = parallel(model, TWO)
    p.close()
    for calls in (1, 2):
        with p:
            model(torch.ones(5, 1))
            assert sorted(model.seen) == [2] * calls + [3] * calls
            p.close()
            p.close()
            assert "forward" not in vars(model)
        assert "forward" not in vars(model)
