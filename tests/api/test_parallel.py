"""Inside a block the same model object is parallel; after the block it is unchanged."""

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
    """After these tests, exclude the compiler's modules from garbage collection. Later tests collect faster."""
    yield
    gc.collect()
    gc.freeze()


class Net(nn.Module):
    """A model with a buffer, a plain attribute, and a second method."""

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
    """A model that holds another model as a submodule."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return self.encoder(x) + 1


class Sizes(nn.Module):
    """Records the row count of each call."""

    def __init__(self) -> None:
        super().__init__()
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.seen.append(len(x))
        return x * 2


def snapshot(module: nn.Module):
    """Record the class of every module, the identity of each value in its `vars`, and its hooks."""
    return [
        (type(part), {key: id(value) for key, value in vars(part).items()}, list(part._forward_hooks))
        for part in module.modules()
    ]


def traced_linear():
    return torch.jit.trace(nn.Linear(4, 3), torch.zeros(2, 4))


# -- the model after the block -----------------------------------------------------------------------------------------


def test_a_model_is_unchanged_after_the_block():
    """The type and the `vars` of every submodule hold the same objects as before the block."""
    model = Net()
    before = snapshot(model)
    with parallel(model, THREE):
        model(torch.randn(7, 4)).sum()
    assert snapshot(model) == before


def test_a_model_is_unchanged_after_an_exception_in_the_block():
    """An exception that leaves the block is raised unchanged, and the model is restored."""
    model = Net()
    before = snapshot(model)

    def use():
        with parallel(model, THREE):
            model(torch.randn(7, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert snapshot(model) == before


def test_a_model_is_unchanged_after_an_exception_in_a_lane():
    """If the model itself raises, the block restores it."""
    model = Net()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), parallel(model, THREE):
        model(torch.randn(7, 5))
    assert snapshot(model) == before


def test_a_forward_on_the_instance_is_restored():
    """A `forward` set on the instance before the block is parallel inside the block and restored after it."""
    model = Net()
    model.forward = types.MethodType(lambda self, x: self.linear(x) - 1, model)
    own = model.forward
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE) as p:
        assert_close(model(x), plain)
        assert p.stats().shards == (3, 2, 2)
    assert vars(model)["forward"] is own


def test_a_forward_set_inside_the_block_stays():
    """The end of the block does not remove a `forward` that the user set inside it."""
    model = Net()

    def mine(x):
        return x

    with parallel(model, TWO):
        model.forward = mine
    assert vars(model)["forward"] is mine


def test_inside_the_block_type_and_keys_are_unchanged():
    """Inside the block, the type, the state_dict keys, the parameter names, and the repr are those of the model."""
    model = Net()
    keys, names = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    with parallel(model, TWO) as p:
        model(torch.randn(5, 4))
        assert isinstance(p, Parallel)
        assert type(model) is Net
        assert list(model.state_dict()) == keys
        assert [n for n, _ in model.named_parameters()] == names
        assert "Linear" in repr(model)


def test_a_parallel_method_keeps_its_signature():
    """Code that inspects the method, as trainers do, finds its parameters."""
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


def test_a_bound_method_from_before_the_block_is_plain():
    """`model.forward` from before the block is the plain method and has the same output inside it."""
    model = Net()
    forward = model.forward
    x = torch.randn(5, 4)
    with parallel(model, TWO):
        assert_close(forward(x), model(x))


def test_a_bound_method_from_inside_the_block_works_after_it():
    """`model.forward` from inside the block calls the model plainly after the block."""
    model = Net()
    with parallel(model, TWO):
        forward = model.forward
    x = torch.randn(5, 4)
    assert_close(forward(x), model(x))


def test_other_methods_can_be_parallel():
    """With methods=("generate",), `generate` is parallel, and `forward` is plain."""
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
    """With methods=("forward", "generate"), calls of both are cut. Calls of forward inside generate stay in their lane."""
    model = Net()
    x = torch.randn(7, 4)
    plain = model(x), model.generate(x)
    with parallel(model, THREE, methods=("forward", "generate")) as p:
        assert_close((model(x), model.generate(x)), plain)
        assert p.stats().shards == (3, 2, 2)


def test_a_method_can_be_named_twice():
    """Naming a method twice is the same as naming it once."""
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


def test_the_decorator_of_forward_runs_in_every_lane():
    """A wrapt decorator on forward, which looks like a bound method, runs in every lane."""
    model = _Decorated()
    with parallel(model, THREE):
        assert model(torch.zeros(7, 1))[:, 0].tolist() == [1.0] * 7


class _Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def _run(self, x, factor):
        self.rows += len(x)
        return x * factor

    forward = functools.partialmethod(_run, factor=2)


def test_a_partialmethod_forward_runs_on_each_lanes_own_replica():
    """A partialmethod as forward is bound to the replica, so the model keeps only lane 0's buffer update."""
    model = _Partial()
    with parallel(model, THREE):
        assert model(torch.ones(7, 1)).tolist() == [[2.0]] * 7
    assert model.rows.item() == 3


def test_a_static_and_a_class_method_can_be_parallel():
    """Calls of static methods and class methods are cut like calls of other methods."""

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
    """The model's own hooks run once per call, on the whole batch, in the calling thread."""
    model = Net()
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(("pre", len(args[0]), threading.get_ident(), m is model)))
    model.register_forward_hook(lambda m, args, out: seen.append(("post", len(out), threading.get_ident(), m is model)))
    with parallel(model, THREE):
        model(torch.randn(7, 4))
    me = threading.get_ident()
    assert seen == [("pre", 7, me, True), ("post", 7, me, True)]


def test_return_values_of_root_hooks_are_used():
    """The arguments that a pre-hook returns are cut, and the value that a forward hook returns is the output."""
    model = Net()
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(lambda m, args, out: {"out": out})
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE):
        assert_close(model(x), plain)


def test_hooks_on_a_submodule_run_in_every_lane():
    """A submodule's hooks run once per shard, and their return values are used."""
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
    """Hooks can be registered and removed while the block is open."""
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
    """A full backward hook on the model gets the gradient of the whole output."""
    model = Net()
    rows = []
    model.register_full_backward_hook(lambda m, gi, go: rows.append(len(go[0])))
    with parallel(model, THREE):
        model(torch.randn(7, 4, requires_grad=True)).sum().backward()
    assert rows == [7]


def test_backward_hooks_on_a_submodule_see_every_row_once():
    """A full backward hook on a submodule runs once per shard."""
    model = Net()
    rows = []
    model.linear.register_full_backward_hook(lambda m, gi, go: rows.append(len(go[0])))
    with parallel(model, THREE):
        model(torch.randn(7, 4, requires_grad=True)).sum().backward()
    assert sorted(rows) == [2, 2, 3]


# -- other types of target -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: torch.jit.script(nn.Linear(4, 3)), traced_linear], ids=["scripted", "traced"])
def test_a_torchscript_module_is_parallel(make):
    """Calls of scripted and traced modules are cut, have the plain output and gradients, and leave the module unchanged."""
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
    """A frozen module, which has no train mode and no parameters, works in calls and in map."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    """Opening a block adds nothing to the `vars` of a scripted module."""
    model = torch.jit.script(nn.Linear(4, 3))
    before = set(vars(model))
    with parallel(model, TWO):
        pass
    assert set(vars(model)) == before


def test_a_torchscript_submodule_is_replicated():
    """A plain model with a scripted submodule has the plain output."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU())))
    x = torch.randn(7, 4)
    plain = model(x)
    with parallel(model, THREE):
        assert_close(model(x), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler reads .grad of all tensors
def test_a_compiled_module_is_parallel():
    """Calls of a module from torch.compile are cut, and the module is unchanged after the block."""
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
    """After `module.compile()`, calls are cut inside the block, and the compiled call is restored after it."""
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
def test_any_callable_is_parallel(target):
    """A callable other than a module is called through the object that `with ... as p` returns."""
    with parallel(target, THREE) as p:
        assert p(torch.ones(7, 2)).tolist() == [[2.0, 2.0]] * 7
        assert p.stats().shards == (3, 2, 2)


@pytest.mark.parametrize("builtin", [torch.relu, torch.sigmoid, torch.nn.functional.gelu, torch.Tensor.abs])
def test_a_builtin_is_parallel(builtin):
    """Calls of builtins, which may have no signature, are cut too."""
    x = torch.randn(7, 2)
    with parallel(builtin, THREE) as p:
        assert_close(p(x), builtin(x))


def test_p_calls_the_model_in_parallel_without_a_with_block():
    """`p(x)` works without a `with` block; close() ends the lanes."""
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
    """The copy has its own parameters, runs plainly, and works after the block."""
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
    """Pickle and torch.save inside the block give plain models with their own parameters."""
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
def test_a_copy_made_in_the_block_has_the_vars_of_a_plain_model(duplicate):
    """The copy has no `forward` on the instance, so it follows later patches of its class."""
    model = Net()
    with parallel(model, TWO):
        clone = duplicate(model)
    assert set(vars(clone)) == set(vars(model))


def test_a_shallow_copy_made_in_the_block_calls_itself():
    """The forward of a shallow copy uses the copy's attributes."""
    model = Net()
    x = torch.randn(7, 4)
    with parallel(model, TWO):
        clone = copy.copy(model)
        clone.scale = 0.0
        inside = clone(x)
    assert_close(inside, model.shift.expand(7, 3))
    assert_close(clone(x), model.shift.expand(7, 3))


def test_a_copy_made_in_the_block_can_be_parallel_itself():
    """Inside a block, a deep copy of the model can have its own block."""
    model = Net()
    x = torch.randn(7, 4)
    with parallel(model, TWO):
        clone = copy.deepcopy(model)
        with parallel(clone, THREE) as p:
            assert_close(clone(x), model(x))
            assert p.stats().shards == (3, 2, 2)


# -- the decorator -------------------------------------------------------------------------------------------------------


def test_a_decorated_function_is_parallel_during_each_call():
    """`@parallel(model)` opens a block for each call of the function, and keeps its name and docstring."""
    model = Sizes()
    p = parallel(model, THREE)

    @p
    def evaluate(x, *, factor):
        """Evaluate the model."""
        return model(x) * factor

    assert evaluate(torch.ones(7, 1), factor=2).tolist() == [[4.0]] * 7
    assert evaluate(torch.ones(7, 1), factor=1).tolist() == [[2.0]] * 7
    assert sorted(model.seen) == [2, 2, 2, 2, 3, 3]
    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Evaluate the model.")
    assert "forward" not in vars(model)


def test_a_decorated_function_can_recurse():
    """The block ends with the outermost call."""
    model = Sizes()

    @parallel(model, TWO)
    def descend(x, depth):
        y = model(x)
        return descend(y, depth - 1) if depth else y

    assert descend(torch.ones(5, 1), 3).tolist() == [[16.0]] * 5
    assert sorted(model.seen) == [2] * 4 + [3] * 4
    assert "forward" not in vars(model)


def test_a_decorated_function_restores_the_model_after_an_exception():
    """The exception is raised, and the model is plain again."""
    model = Net()

    @parallel(model, TWO)
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "forward" not in vars(model)


def test_a_decorated_function_can_run_in_many_threads():
    """Concurrent calls each return their own output, and the model is plain after the last call."""
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
    """A decorated method is bound to its instance."""
    model = Sizes()

    class Trainer:
        factor = 3

        @parallel(model, TWO)
        def step(self, x):
            return model(x) * self.factor

    assert Trainer().step(torch.ones(5, 1)).tolist() == [[6.0]] * 5
    assert sorted(model.seen) == [2, 3]


# -- invalid arguments ---------------------------------------------------------------------------------------------------


def test_absent_devices_are_refused():
    """parallel() raises for absent and unknown devices, and the error names them."""
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        parallel(Net(), ["cuda:7"])
    with pytest.raises(DeviceUnavailableError, match="nonsense"):
        parallel(Net(), ["nonsense"])


def test_a_second_cpu_is_refused():
    """The device "cpu:1" does not exist. The error shows how to get two CPU lanes."""
    with pytest.raises(DeviceUnavailableError, match=r'\["cpu", "cpu"\]'):
        parallel(Net(), ["cpu:0", "cpu:1"])


def test_cpu_zero_is_the_cpu():
    """The device "cpu:0" is normalised to "cpu"."""
    assert parallel(Net(), ["cpu:0", torch.device("cpu", 0)]).devices == (torch.device("cpu"),) * 2


@pytest.mark.parametrize("devices", [[], (), 0, -1, True, 1.5, [None], [1.5], ["cpu:x"]])
def test_invalid_device_lists_are_refused(devices):
    """An empty list, a number below 1, or a value that is not a device raises DeviceListError, which is a ValueError."""
    with pytest.raises(DeviceListError) as caught:
        parallel(Net(), devices)
    assert isinstance(caught.value, ValueError)


def test_devices_of_mixed_types_are_refused():
    """All lanes of a block need the same type of device."""
    with pytest.raises((DeviceListError, DeviceUnavailableError)):
        parallel(Net(), ["cpu", "cuda:0"])


def test_a_number_is_the_number_of_lanes():
    """On a machine without an accelerator, `devices=3` gives three CPU lanes."""
    assert parallel(Net(), 3).devices == (torch.device("cpu"),) * 3


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("devices", [None, "auto"])
def test_without_an_accelerator_the_default_is_the_plain_call(devices):
    """Without an accelerator, None and "auto" give a single CPU lane, and every call is plain."""
    model = Sizes()
    p = parallel(model, devices)
    assert p.devices == (torch.device("cpu"),)
    with p:
        assert model(torch.ones(7, 1)).tolist() == [[2.0]] * 7
        assert (p.stats().calls, p.stats().plain) == (1, 1)
    assert model.seen == [7]


def test_one_cpu_lane_is_the_plain_call():
    """With a single CPU lane, calls run on the model itself in the calling thread."""
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


def test_a_device_type_gives_at_least_one_lane():
    """A device type, such as "cpu", gives at least one lane."""
    assert len(parallel(Net(), "cpu").devices) >= 1


@pytest.mark.parametrize("methods", ["forward", (), ("nothing",), ("linear_",), ("scale",)])
def test_invalid_methods_are_refused(methods):
    """A string, an empty tuple, and names of missing or non-callable attributes raise ShardError."""
    with pytest.raises(ShardError, match="methods"):
        parallel(Net(), TWO, methods=methods)


@pytest.mark.parametrize(
    "in_dims", [{"nothing": 0}, {"x": 1.5}, {"x": True}, 0, ("x",)], ids=["no parameter", "float", "bool", "int", "tuple"]
)
def test_invalid_in_dims_are_refused(in_dims):
    """`in_dims` must map parameter names of the target to valid values."""
    with pytest.raises(ShardError, match="in_dims"):
        parallel(Net(), TWO, in_dims=in_dims)


def test_the_error_for_an_unknown_name_in_in_dims_lists_the_parameters():
    """The error names the target's parameters."""
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
def test_invalid_joining_options_are_refused(rules, match):
    """parallel() raises for unknown values of `reduce`, `join`, and `out_dims`."""
    with pytest.raises(GatherError, match=match):
        parallel(Net(), TWO, **rules)


@pytest.mark.parametrize("option", ["plan", "window"])
def test_removed_options_are_refused(option):
    """`plan` and `window` are not options of `parallel` or `map`."""
    with pytest.raises(TypeError, match=option):
        parallel(Net(), TWO, **{option: 2})
    with parallel(Net(), TWO) as p, pytest.raises(TypeError, match=option):
        p.map([], **{option: 2})


@pytest.mark.parametrize("device", ["cuda:3", "cpu:1"])
def test_an_absent_output_device_is_refused(device):
    """parallel() raises before the block starts."""
    with pytest.raises(DeviceUnavailableError):
        parallel(Net(), TWO, output_device=device)


def test_a_model_on_the_meta_device_is_refused():
    """Meta tensors have no data to copy. The ReplicaError names a parameter."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    with pytest.raises(ReplicaError, match=r"0\.weight"), parallel(model, TWO):
        model(torch.randn(5, 4))
    assert "forward" not in vars(model)


def test_a_model_partly_on_the_meta_device_is_refused():
    """The ReplicaError names the parameter on the meta device."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ReplicaError, match=r"1\.weight.*meta"), parallel(model, TWO):
        model(torch.randn(5, 4))
    assert "forward" not in vars(model)


def test_a_distributed_model_is_refused(tmp_path):
    """A model that contains DistributedDataParallel is already parallel. The ReplicaError names the submodule."""
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


def test_a_module_that_cannot_be_copied_is_refused():
    """A submodule that holds an iterator over layers raises ReplicaError, which names the attribute."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model[1].layers = iter([model[0]])
    with pytest.raises(ReplicaError, match=r"1\.layers is an iterator"), parallel(model, TWO):
        model(torch.randn(5, 2))


def test_a_closed_block_is_refused():
    """Calls, submit, map, and trace on a closed block raise SessionError."""
    model = Net()
    with parallel(model, TWO) as p:
        pass
    x = torch.randn(5, 4)
    for use in (lambda: p(x), lambda: p.submit(x), lambda: list(p.map([x])), lambda: p.trace("t.json")):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_a_closed_block_can_be_entered_again():
    """Entering a closed block makes the model parallel again."""
    model = Sizes()
    p = parallel(model, TWO)
    for _ in range(3):
        with p:
            model(torch.ones(5, 1))
    assert sorted(model.seen) == [2] * 3 + [3] * 3


def test_close_can_be_called_twice():
    """close() can be called inside the block, after it, and more than once."""
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


class Applies(nn.Module):
    """Applies a function that it gets."""

    def forward(self, function):
        return function(torch.ones(3))


def test_a_call_with_a_function_inside_the_block_is_a_call():
    """A model that takes a function gets it. Before the block is open, a call with a function decorates it."""
    model = Applies()
    with parallel(model, TWO) as p:
        assert p(torch.sum) == model(torch.sum) == 3
    block = parallel(model, TWO)

    @block
    def total():
        return model(torch.sum)

    assert total() == 3
    assert total.__name__ == "total"


def test_parallel_is_the_class_parallel():
    """`parallel(...)` returns an instance of the class that `Parallel` names."""
    assert parallel is Parallel
    with parallel(Net(), TWO) as p:
        assert isinstance(p, parallel)


def test_functions_that_run_later_are_not_decorated():
    """A coroutine or a generator would run after its block has ended."""
    block = parallel(Net(), TWO)

    async def later():
        return None

    def items():
        yield 1

    for function in (later, items):
        with pytest.raises(ShardError, match="Open the block inside it"):
            block(function)
