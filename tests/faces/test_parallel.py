"""Promise 1: inside the block the same object is parallel, and afterwards it is what it was."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
import types
import warnings

import pytest
import torch
import wrapt
from torch import nn
from torch.testing import assert_close

from parawrap import (
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    Parallel,
    ReplicaError,
    SessionError,
    ShardError,
    parallel,
)

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


@pytest.fixture(scope="module", autouse=True)
def _compiler_frozen():
    """The compiler's modules are loaded here; every later test's garbage collection need not walk them again."""
    yield
    gc.collect()
    gc.freeze()


class Net(nn.Module):
    """A model with a buffer, a plain attribute and a second method."""

    def __init__(self) -> None:
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


class Outer(nn.Module):
    """A model that holds somebody else's encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return self.encoder(x) + 1


class Sizes(nn.Module):
    """Tells how many rows it is given in each call."""

    def __init__(self) -> None:
        super().__init__()
        type(self).seen = []  # on the class: a replica has its own attributes

    def forward(self, x):
        self.seen.append(len(x))
        return x * 2


def snapshot(module: nn.Module):
    """Every module's class, and its vars by key and by identity of value."""
    return [
        (type(part), {key: id(value) for key, value in vars(part).items()}, list(part._forward_hooks))
        for part in module.modules()
    ]


def traced_linear():
    return torch.jit.trace(nn.Linear(4, 3), torch.zeros(2, 4))


# -- restored ----------------------------------------------------------------------------------------------------------


def test_a_model_is_what_it_was_after_the_block():
    """Type and vars, by key and by identity, are those from before, in every submodule."""
    model = Net()
    before = snapshot(model)
    with parallel(model, THREE):
        model(torch.randn(7, 4)).sum()
    assert snapshot(model) == before


def test_a_model_is_what_it_was_after_an_exception_in_the_block():
    """An exception that leaves the block restores the model, and is the one that arrives."""
    model = Net()
    before = snapshot(model)

    def use():
        with parallel(model, THREE):
            model(torch.randn(7, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert snapshot(model) == before


def test_a_model_is_what_it_was_after_an_exception_in_a_lane():
    """An exception of the model itself restores it too."""
    model = Net()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), parallel(model, THREE):
        model(torch.randn(7, 5))
    assert snapshot(model) == before


def test_a_forward_of_its_own_is_put_back():
    """A forward that was put on the instance before the block is parallel in it, and is there again after it."""
    model = Net()
    model.forward = types.MethodType(lambda self, x: self.linear(x) - 1, model)
    own = model.forward
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
    assert vars(model)["forward"] is own


def test_a_forward_that_the_user_sets_in_the_block_stays():
    """What the user puts over the parallel forward is theirs, and is left to them."""
    model = Net()

    def mine(x):
        return x

    with parallel(model, TWO):
        model.forward = mine
    assert vars(model)["forward"] is mine


def test_inside_the_block_type_and_keys_are_unchanged():
    """isinstance, type, the state_dict's keys and named_parameters are those of the model."""
    model = Net()
    keys, names = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    with parallel(model, TWO) as p:
        model(torch.randn(5, 4))
        assert isinstance(p, Parallel)
        assert type(model) is Net
        assert list(model.state_dict()) == keys
        assert [n for n, _ in model.named_parameters()] == names
        assert "Linear" in repr(model)


def test_the_signature_of_a_parallel_method_is_the_plain_one():
    """Code that inspects forward, as trainers do, sees its parameters."""
    import inspect

    model = Net()
    before = inspect.signature(model.generate)
    with parallel(model, TWO, methods=("generate",)):
        assert inspect.signature(model.generate) == before
        assert model.generate.__name__ == "generate"


# -- every reference ---------------------------------------------------------------------------------------------------


def test_a_reference_in_another_module_is_parallel():
    """A model that is a submodule elsewhere is parallel when it is called from there."""
    encoder = Sizes()
    outer = Outer(encoder)
    with parallel(encoder, THREE):
        y = outer(torch.ones(7, 1))
    assert sorted(encoder.seen) == [2, 2, 3]
    assert y.tolist() == [[3.0]] * 7


def test_a_bound_method_taken_before_the_block_is_plain_and_right():
    """``forward`` taken before the block is the plain one; the answer is the same."""
    model = Net()
    forward = model.forward
    x = torch.randn(5, 4)
    with parallel(model, TWO):
        assert_close(forward(x), model(x))


def test_a_bound_method_kept_beyond_the_block_is_plain_and_right():
    """``forward`` taken inside the block and used after it calls the model plainly."""
    model = Net()
    with parallel(model, TWO):
        forward = model.forward
    x = torch.randn(5, 4)
    assert_close(forward(x), model(x))


def test_other_methods_can_be_parallel():
    """methods=("generate",) makes generate parallel and leaves forward plain."""
    model = Net()
    x = torch.randn(7, 4)
    plain = model.generate(x, steps=3)
    with parallel(model, THREE, methods=("generate",)) as p:
        assert_close(model.generate(x, steps=3), plain)
        assert p.stats().shards == (3, 2, 2)
        calls = p.stats().calls
        model(x)
        assert p.stats().calls == calls
    assert "generate" not in vars(model)


def test_several_methods_are_parallel_at_once():
    """methods=("forward", "generate"): each is cut, and generate's own calls of forward stay in their lane."""
    model = Net()
    x = torch.randn(7, 4)
    plain = model(x), model.generate(x)
    with parallel(model, THREE, methods=("forward", "generate")) as p:
        assert_close((model(x), model.generate(x)), plain)
        assert p.stats().shards == (3, 2, 2)


def test_a_method_named_twice_does_no_harm():
    """methods=("forward", "forward") is the same as naming it once, and the block can be left."""
    model = Net()
    with parallel(model, TWO, methods=("forward", "forward")):
        model(torch.randn(5, 4))
    assert "forward" not in vars(model)


class _Decorated(nn.Module):
    @wrapt.decorator
    def _plus_one(wrapped, _instance, args, kwargs):
        return wrapped(*args, **kwargs) + 1

    @_plus_one
    def forward(self, x):
        return x * 2


def test_a_decorated_forward_is_decorated_in_every_lane():
    """A decorator on forward (wrapt's keep the look of a bound method) runs in every lane."""
    model = _Decorated()
    with parallel(model, THREE):
        assert model(torch.zeros(6, 1))[:, 0].tolist() == [1.0] * 6


class _Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def _run(self, x, factor):
        self.rows += len(x)
        return x * factor

    forward = functools.partialmethod(_run, factor=2)


def test_a_partialmethod_forward_runs_on_each_lanes_own_replica():
    """A forward that is not a plain function is bound to the replica: only lane 0's buffer update is kept."""
    model = _Partial()
    with parallel(model, THREE):
        assert model(torch.ones(7, 1)).tolist() == [[2.0]] * 7
    assert model.rows.item() == 3


def test_a_static_and_a_class_method_can_be_parallel():
    """Methods without self are cut like any other."""

    class Model(nn.Module):
        @staticmethod
        def double(x):
            return x * 2

        @classmethod
        def triple(cls, x):
            return x * 3

    model = Model()
    with parallel(model, THREE, methods=("double", "triple")) as p:
        assert model.double(torch.ones(5)).tolist() == [2.0] * 5
        assert model.triple(torch.ones(7)).tolist() == [3.0] * 7
        assert p.stats().shards == (3, 2, 2)
    assert not {"double", "triple"} & set(vars(model))


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_on_the_root_run_once_on_the_whole_batch():
    """Pre-hook and hook of the model see the whole batch, once, in the calling thread."""
    model = Net()
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(("pre", len(args[0]), threading.get_ident(), m is model)))
    model.register_forward_hook(lambda m, args, out: seen.append(("post", len(out), threading.get_ident(), m is model)))
    with parallel(model, THREE):
        model(torch.randn(7, 4))
    me = threading.get_ident()
    assert seen == [("pre", 7, me, True), ("post", 7, me, True)]


def test_what_a_root_hook_returns_is_used():
    """A pre-hook's arguments are what is cut, and a hook's return is the output."""
    model = Net()
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(lambda m, args, out: {"out": out})
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE):
        assert_close(model(x), plain)


def test_hooks_on_a_submodule_run_in_every_lane():
    """A submodule's hooks run once a shard, on the shard, and their returns are used."""
    model = Net()
    rows = []

    def hook(module, args, out):
        rows.append(len(out))
        return out * 0

    model.linear.register_forward_hook(hook)
    with parallel(model, THREE):
        assert_close(model(torch.randn(7, 4)), model.shift.expand(7, 3))
    assert sorted(rows) == [2, 2, 3]


def test_a_hook_registered_inside_the_block_runs():
    """Hooks may come and go while the block is open."""
    model = Net()
    rows = []
    x = torch.randn(7, 4)
    with parallel(model, THREE):
        model(x)
        handle = model.linear.register_forward_hook(lambda m, args, out: rows.append(len(out)))
        model(x)
        handle.remove()
        model(x)
    assert sorted(rows) == [2, 2, 3]


def test_a_backward_hook_on_the_root_runs_once_on_the_whole_batch():
    """register_full_backward_hook sees the gradient of the whole output."""
    model = Net()
    rows = []
    model.register_full_backward_hook(lambda m, gi, go: rows.append(len(go[0])))
    with parallel(model, THREE):
        model(torch.randn(7, 4, requires_grad=True)).sum().backward()
    assert rows == [7]


def test_backward_hooks_on_a_submodule_see_every_row_once():
    """register_full_backward_hook of a submodule runs once a shard."""
    model = Net()
    rows = []
    model.linear.register_full_backward_hook(lambda m, gi, go: rows.append(len(go[0])))
    with parallel(model, THREE):
        model(torch.randn(7, 4, requires_grad=True)).sum().backward()
    assert sorted(rows) == [2, 2, 3]


# -- other kinds of target -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: torch.jit.script(nn.Linear(4, 3)), traced_linear], ids=["scripted", "traced"])
def test_a_torchscript_module_is_parallel(make):
    """Scripted and traced modules are cut, give the plain answer, and are restored."""
    model = make()
    x = torch.randn(7, 4)
    plain = model(x)
    before = dict(vars(model))
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
        model(x).sum().backward()
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[key] is value for key, value in before.items())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert_close(grads, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("freeze", [torch.jit.freeze, torch.jit.optimize_for_inference])
def test_a_frozen_torchscript_module_is_parallel(freeze):
    """A frozen module, which has no train mode and no parameters, is cut and mapped like any other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = freeze(torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).eval())
    x = torch.randn(7, 4)
    with torch.no_grad():
        plain = model(x)
        with parallel(model, THREE) as p:
            for _ in range(5):
                assert_close(model(x), plain)
            assert p.stats().shards == (3, 2, 2)
            assert all(torch.equal(output, plain) for output in p.map([x, x]))


def test_a_torchscript_module_that_was_never_called_is_restored():
    """Opening a block leaves no cached forward in the vars of a fresh scripted module."""
    model = torch.jit.script(nn.Linear(4, 3))
    before = set(vars(model))
    with parallel(model, TWO):
        pass
    assert set(vars(model)) == before


def test_a_torchscript_submodule_is_replicated():
    """A plain model with a scripted part is parallel, gradients included."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU())))
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE):
        assert_close(model(x), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler reads .grad of all tensors
def test_a_compiled_module_is_parallel():
    """torch.compile's module is cut, and is what it was afterwards."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = torch.compile(inner, backend="eager")
    x = torch.randn(7, 4)
    plain = model(x)
    before = {key: id(value) for key, value in vars(model).items()}
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert_close(model(x), plain)


def test_a_module_that_compiled_itself_is_parallel():
    """After module.compile() the calls are cut, and the compiled call is there again afterwards."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.compile(backend="eager")
    x = torch.randn(7, 4)
    plain = model(x)
    compiled = model._compiled_call_impl
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
    assert model._compiled_call_impl is compiled


def _double(x, k=2):
    return x * k


class _Callable:
    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize(
    "target",
    [_double, lambda x: x * 2, functools.partial(_double, k=2), _Callable(), _Callable().__call__],
    ids=["function", "lambda", "partial", "object", "method"],
)
def test_any_callable_is_parallel_through_as(target):
    """A callable that is no module is called through what ``as`` gives."""
    with parallel(target, THREE) as p:
        assert p(torch.ones(7, 2)).tolist() == [[2.0, 2.0]] * 7
        assert p.stats().shards == (3, 2, 2)


@pytest.mark.parametrize("builtin", [torch.relu, torch.sigmoid, torch.nn.functional.gelu, torch.Tensor.abs])
def test_a_builtin_is_parallel(builtin):
    """Builtins have no signature to read and are cut all the same."""
    x = torch.randn(7, 2)
    with parallel(builtin, THREE) as p:
        assert_close(p(x), builtin(x))


def test_p_calls_the_model_in_parallel_without_a_with_block():
    """``p(x)`` works before any block is entered; close() ends it."""
    model = Sizes()
    p = parallel(model, THREE)
    try:
        p(torch.ones(7, 1))
        assert sorted(model.seen) == [2, 2, 3]
        assert "forward" not in vars(model)
    finally:
        p.close()


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_deepcopy_made_in_the_block_is_a_plain_working_model():
    """The copy has its own parameters, calls itself, and outlives the block."""
    model = Net()
    x = torch.randn(7, 4)
    with parallel(model, THREE) as p:
        clone = copy.deepcopy(model)
        calls = p.stats().calls
        with torch.no_grad():
            clone.linear.weight.zero_()
            clone.linear.bias.zero_()
        assert_close(clone(x), clone.shift.expand(7, 3))
        assert p.stats().calls == calls
    assert_close(clone(x), clone.shift.expand(7, 3))
    assert copy.deepcopy(clone)(x).shape == (7, 3)


def test_a_pickle_made_in_the_block_is_a_plain_working_model():
    """Pickle and torch.save take the model inside the block."""
    model = Net()
    x = torch.randn(7, 4)
    plain = model(x)
    buffer = io.BytesIO()
    with parallel(model, THREE):
        model(x)
        clone = pickle.loads(pickle.dumps(model))
        torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert_close(clone(x), plain)
    assert_close(loaded(x), plain)
    with torch.no_grad():
        clone.linear.weight.zero_()
    assert not torch.equal(clone(x), plain)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_made_in_the_block_has_the_vars_of_a_plain_one(duplicate):
    """A copy carries no forward of its own: one that patches the class afterwards reaches it."""
    model = Net()
    with parallel(model, TWO):
        clone = duplicate(model)
    assert set(vars(clone)) == set(vars(model))


def test_a_shallow_copy_made_in_the_block_calls_itself():
    """copy.copy gives a model whose forward sees the copy's own attributes."""
    model = Net()
    x = torch.randn(7, 4)
    with parallel(model, TWO):
        clone = copy.copy(model)
        clone.scale = 0.0
        inside = clone(x)
    assert_close(inside, model.shift.expand(7, 3))
    assert_close(clone(x), model.shift.expand(7, 3))


def test_a_copy_made_in_the_block_can_be_parallel_itself():
    """A deepcopy may be given to parallel inside the first block."""
    model = Net()
    x = torch.randn(7, 4)
    with parallel(model, TWO):
        clone = copy.deepcopy(model)
        with parallel(clone, THREE) as p:
            assert_close(clone(x), model(x))
            assert p.stats().shards == (3, 2, 2)


# -- the decorator -------------------------------------------------------------------------------------------------------


def test_decorated_the_block_is_the_call():
    """@parallel(model) makes the model parallel for the length of each call, and keeps the function's name."""
    model = Sizes()
    p = parallel(model, THREE)

    @p
    def evaluate(x, *, factor):
        """Say."""
        return model(x) * factor

    assert evaluate(torch.ones(7, 1), factor=2).tolist() == [[4.0]] * 7
    assert evaluate(torch.ones(7, 1), factor=1).tolist() == [[2.0]] * 7
    assert sorted(model.seen) == [2, 2, 2, 2, 3, 3]
    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Say.")
    assert "forward" not in vars(model)


def test_a_decorated_function_may_recurse():
    """The block nests with the recursion and ends with the outermost call."""
    model = Sizes()

    @parallel(model, TWO)
    def descend(x, depth):
        y = model(x)
        return descend(y, depth - 1) if depth else y

    assert descend(torch.ones(5, 1), 3).tolist() == [[16.0]] * 5
    assert sorted(model.seen) == [2] * 4 + [3] * 4
    assert "forward" not in vars(model)


def test_a_decorated_function_restores_the_model_after_an_exception():
    """The user's exception arrives and the model is plain again."""
    model = Net()

    @parallel(model, TWO)
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "forward" not in vars(model)


def test_a_decorated_function_runs_in_many_threads():
    """Threads that call it at once share one block, each gets its own answer, and the model is plain at the end."""
    model = Net()
    barrier = threading.Barrier(8)
    wrong = []

    @parallel(model, TWO)
    def evaluate(x):
        return model(x)

    def work(seed):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        barrier.wait(10)
        for _ in range(20):
            if not torch.allclose(evaluate(x), model.linear(x) * model.scale + model.shift, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert "forward" not in vars(model)


def test_a_decorated_method_keeps_its_self():
    """The decorator works on methods."""
    model = Sizes()

    class Trainer:
        factor = 3

        @parallel(model, TWO)
        def step(self, x):
            return model(x) * self.factor

    assert Trainer().step(torch.ones(5, 1)).tolist() == [[6.0]] * 5
    assert sorted(model.seen) == [2, 3]


# -- bad input -----------------------------------------------------------------------------------------------------------


def test_devices_that_are_not_there_are_named():
    """A device that this machine lacks is refused when the block is made, naming it."""
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        parallel(Net(), ["cuda:7"])
    with pytest.raises(DeviceUnavailableError, match="nonsense"):
        parallel(Net(), ["nonsense"])


def test_cpu_with_another_index_is_refused_with_the_cure():
    """The name "cpu:1" is not a second device; the message says how to get two lanes."""
    with pytest.raises(DeviceUnavailableError, match=r'\["cpu", "cpu"\]'):
        parallel(Net(), ["cpu:0", "cpu:1"])


def test_cpu_zero_is_the_cpu():
    """The name "cpu:0" is normalised to "cpu"."""
    assert parallel(Net(), ["cpu:0", torch.device("cpu", 0)]).devices == (torch.device("cpu"),) * 2


@pytest.mark.parametrize("devices", [[], (), 0, -1, True, 1.5, [None], [1.5], ["cpu:x"]])
def test_lists_of_devices_that_make_no_sense_are_refused(devices):
    """Empty, below one, or no device: DeviceListError, which is a ValueError."""
    with pytest.raises(DeviceListError) as caught:
        parallel(Net(), devices)
    assert isinstance(caught.value, ValueError)


def test_devices_of_mixed_types_are_refused():
    """The lanes of one block share one type."""
    with pytest.raises((DeviceListError, DeviceUnavailableError)):
        parallel(Net(), ["cpu", "cuda:0"])


def test_a_number_is_that_many_lanes():
    """devices=3 on a machine without accelerator is three lanes on the CPU."""
    assert parallel(Net(), 3).devices == (torch.device("cpu"),) * 3


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("devices", [None, "auto"])
def test_without_an_accelerator_the_default_is_the_plain_call(devices):
    """None and "auto" are a single CPU lane where there is no accelerator, and every call is the plain call."""
    model = Sizes()
    p = parallel(model, devices)
    assert p.devices == (torch.device("cpu"),)
    with p:
        assert model(torch.ones(7, 1)).tolist() == [[2.0]] * 7
        assert (p.stats().calls, p.stats().plain) == (1, 1)
    assert model.seen == [7]


def test_one_cpu_lane_is_the_plain_call():
    """A single CPU lane runs the whole call on the model itself, in the calling thread, and starts no thread."""
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append((self, len(x), threading.get_ident()))
            return x.mean()

    model = Model()
    before = set(threading.enumerate())
    with parallel(model, ["cpu"]) as p:
        assert model(torch.ones(7)).item() == 1
        assert set(threading.enumerate()) == before
        assert p.stats().plain == 1
    assert seen == [(model, 7, threading.get_ident())]


def test_a_kind_names_at_least_one_lane():
    """The name of a kind, such as "cpu", gives at least one lane."""
    assert len(parallel(Net(), "cpu").devices) >= 1


@pytest.mark.parametrize("methods", ["forward", (), ("nothing",), ("linear_",), ("scale",)])
def test_methods_that_are_none_are_refused(methods):
    """A string, nothing, and names that cannot be called are ShardErrors naming them."""
    with pytest.raises(ShardError, match="methods"):
        parallel(Net(), TWO, methods=methods)


@pytest.mark.parametrize(
    "in_dims", [{"nothing": 0}, {"x": 1.5}, {"x": True}, 0, ("x",)], ids=["no parameter", "float", "bool", "int", "tuple"]
)
def test_in_dims_that_mean_nothing_are_refused(in_dims):
    """in_dims names parameters of the target and gives dims or None."""
    with pytest.raises(ShardError, match="in_dims"):
        parallel(Net(), TWO, in_dims=in_dims)


def test_in_dims_that_name_no_parameter_list_those_there_are():
    """The message says what the target's parameters are."""
    with pytest.raises(ShardError, match=r"'y'.*Net.*\bx\b"):
        parallel(Net(), TWO, in_dims={"y": 0})


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"reduce": "median"}, "reduce='median'"),
        ({"join": "stack"}, "join='stack'"),
        ({"out_dims": "rows"}, "out_dims.*'rows'"),
        ({"out_dims": True}, "out_dims.*True"),
        ({"out_dims": (0, {"a": 1.5})}, "out_dims.*1.5"),
    ],
    ids=["reduce", "join", "out_dims", "bool", "nested"],
)
def test_rules_that_do_not_exist_are_refused(rules, match):
    """Unknown values of reduce, join, and out_dims are refused when the block is made."""
    with pytest.raises(GatherError, match=match):
        parallel(Net(), TWO, **rules)


@pytest.mark.parametrize("option", ["plan", "window"])
def test_options_that_are_gone_are_refused(option):
    """`plan` is not an option of parallel, and `window` is not one of map."""
    with pytest.raises(TypeError, match=option):
        parallel(Net(), TWO, **{option: 2})
    with parallel(Net(), TWO) as p, pytest.raises(TypeError, match=option):
        p.map([], **{option: 2})


@pytest.mark.parametrize("device", ["cuda:3", "cpu:1"])
def test_an_output_device_that_is_not_there_is_refused(device):
    """output_device is checked when the block is made."""
    with pytest.raises(DeviceUnavailableError):
        parallel(Net(), TWO, output_device=device)


def test_a_model_on_the_meta_device_is_refused_by_name():
    """There is no data to copy: ReplicaError names the submodule."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    with pytest.raises(ReplicaError, match=r"0\.weight"), parallel(model, TWO):
        model(torch.randn(5, 4))
    assert "forward" not in vars(model)


def test_a_model_that_is_partly_on_the_meta_device_is_refused_by_name():
    """The message names the tensor that lies elsewhere."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ReplicaError, match=r"1\.weight.*meta"), parallel(model, TWO):
        model(torch.randn(5, 4))
    assert "forward" not in vars(model)


def test_a_distributed_model_is_refused_by_name(tmp_path):
    """DistributedDataParallel is parallel already; ReplicaError names the submodule that is one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.ReLU(), nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(ReplicaError, match="'1'"), parallel(model, TWO):
            model(torch.randn(5, 2))
        assert "forward" not in vars(model)
        del model
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_that_cannot_be_copied_is_named():
    """A submodule with an iterator over its layers is a ReplicaError with its name."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model[1].layers = iter([model[0]])
    with pytest.raises(ReplicaError, match=r"1\.layers is an iterator"), parallel(model, TWO):
        model(torch.randn(5, 2))


def test_p_after_close_is_refused():
    """Calling, submitting, mapping and tracing on a closed block are SessionErrors."""
    model = Net()
    with parallel(model, TWO) as p:
        pass
    x = torch.randn(5, 4)
    for use in (lambda: p(x), lambda: p.submit(x), lambda: list(p.map([x])), lambda: p.trace("t.json")):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_a_closed_block_may_be_entered_again():
    """A block that is entered after its end is parallel again."""
    model = Sizes()
    p = parallel(model, TWO)
    for _ in range(3):
        with p:
            model(torch.ones(5, 1))
    assert sorted(model.seen) == [2] * 3 + [3] * 3


def test_close_twice_does_no_harm():
    """close() may be called inside the block, after it, and twice."""
    model = Net()
    p = parallel(model, TWO)
    p.close()
    with p:
        model(torch.randn(5, 4))
        p.close()
        p.close()
        assert "forward" not in vars(model)
    p.close()
    assert "forward" not in vars(model)
