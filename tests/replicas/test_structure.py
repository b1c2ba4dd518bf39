"""Replicas copy structure by identity: models with an unusual structure have the plain outputs and gradients."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import operator
import pickle
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from parawrap import ReplicaError, parallel
from parawrap.replicas import ReplicaSet
from tests.helpers.odd_models import CASES, MODELS, check

quiet = pytest.mark.filterwarnings(
    "ignore:the model wrote:UserWarning",
    "ignore:Calling .zero_grad:UserWarning",
    "ignore:The .grad attribute:UserWarning",
)


@quiet
@pytest.mark.parametrize(("event", "grad"), CASES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_awkward_models_equal_a_plain_copy(make, event, grad):
    """Outputs and gradients equal those of a plain copy, with 2 to 4 lanes and 2 to 17 rows."""
    for lanes, rows, options in ((2, 17, {}), (3, 5, {}), (4, 2, {"out_dims": 0})):
        check(make, event, functools.partial(parallel, devices=["cpu"] * lanes, **options), rows, grad=grad)


@quiet
def test_zero_grad_in_forward_keeps_the_gradients_of_the_caller():
    """If forward calls zero_grad, lanes warn as torch's replicas do, and the caller's gradients accumulate."""
    model = MODELS["zero_grad"]()
    x = torch.randn(9, 4, dtype=torch.float64)
    with parallel(model, ["cpu"] * 4):
        with pytest.warns(UserWarning, match="nn.DataParallel"):
            model(x).sum().backward()
        for _ in range(29):
            model(x).sum().backward()
    torch.testing.assert_close(model.a.bias.grad, torch.full((4,), 270.0, dtype=torch.float64))


def test_parameters_of_replicas_are_not_leaves():
    """Parameters of replicas are views of the model's parameters, and modules are marked like torch's replicas."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = ReplicaSet(model, [torch.device("cpu")] * 2)
    made.refresh()
    for replica in made.current:
        for parameter, original in zip(replica.module.parameters(), model.parameters(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            assert not parameter.is_leaf
            assert parameter.data_ptr() == original.data_ptr()
            assert replica.original_of(parameter) is original
        assert all(module._is_replica for module in replica.module.modules())


@pytest.mark.parametrize(
    ("hold", "place"),
    [
        (lambda model: iter([model.a]), r"held is an iterator \(list_iterator\)"),
        (lambda model: (layer for layer in [model.a]), r"held is an iterator \(generator\)"),
        (lambda model: iter([1]), r"held is an iterator \(list_iterator\)"),
        (lambda model: types.MappingProxyType({"a": model.a}), r"held \(mappingproxy\) leads to a \(Linear\)"),
    ],
    ids=["iterator", "generator", "iterator over numbers", "object of C"],
)
def test_objects_that_cannot_be_searched_are_refused(hold, place):
    """An iterator, or a C object that refers to a module, raises ReplicaError with its path."""
    model = nn.Module()
    model.a = nn.Linear(4, 4)
    model.held = hold(model)
    with pytest.raises(ReplicaError, match=place):
        ReplicaSet(model, [torch.device("cpu")] * 2)


def test_objects_without_references_to_the_model_are_shared():
    """Replicas share locks, loggers, getters, arrays, and plain objects with the model."""
    model = nn.Linear(4, 4)
    model.held = [threading.Lock(), logging.getLogger(), operator.itemgetter(1), object(), torch.ones(2).numpy()]
    made = ReplicaSet(model, [torch.device("cpu")] * 2)
    made.refresh()
    for replica in made.current:
        assert all(mine is theirs for mine, theirs in zip(replica.module.held, model.held, strict=True))


def test_a_container_that_only_a_closure_holds_is_shared():
    """A hook that appends to the user's list does so once per lane."""
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    with parallel(model, ["cpu"] * 2):
        model(torch.randn(9, 4))
        seen.clear()
        model(torch.randn(9, 4))
    assert seen == [5, 4]


def test_deep_models_need_no_recursion():
    """A chain of 3,000 modules is copied: the deepest module first."""
    model = inner = nn.Module()
    for _ in range(3000):
        inner.child = nn.Module()
        inner = inner.child
    made = ReplicaSet(model, [torch.device("cpu")] * 2)
    made.refresh()
    inner, count = made.current[1].module, 0
    while inner is not None:
        inner, count = getattr(inner, "child", None), count + 1
    assert count == 3001


def behind_a_method(model):
    return model.forward


def behind_a_closure(model):
    return lambda x: model(x)


def behind_a_partial(model):
    return functools.partial(torch.nn.Module.__call__, model)


def behind_an_object(model):
    class Caller:
        def __init__(self, model):
            self.model = model

        def __call__(self, x):
            return self.model(x)

    return Caller(model)


BEHIND = [behind_a_method, behind_a_closure, behind_a_partial, behind_an_object]


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_later_calls_do_not_change_returned_containers():
    """A dict that forward fills and returns belongs to the caller."""
    model, x = MODELS["extractor"](), torch.randn(9, 4, dtype=torch.float64)
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        outputs = [*p.map([x] * 8), p.submit(x).result(), model(x), model(x)]
        expected = copy.deepcopy(model)(x)
    for output in outputs:
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("behind", BEHIND)
def test_a_model_behind_a_callable_is_replicated(behind):
    """Each lane has its own copy of the model, so outputs and gradients are the plain ones."""
    model = MODELS["extractor"]()
    plain = copy.deepcopy(model)
    x = torch.randn(10, 4, dtype=torch.float64)
    with parallel(behind(model), ["cpu"] * 3) as p:
        for _ in range(3):
            output, expected = p(x), plain(x)
            torch.testing.assert_close(output, expected)
            output["2"].sum().backward()
            expected["2"].sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Counts(nn.Module):
    """Keeps a step counter in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.steps = torch.zeros(())

    def forward(self, x):
        self.steps = self.steps + 1
        return self.linear(x) * self.steps


def test_state_that_lanes_write_and_lose_warns_once():
    """The first call warns and names the attribute that lanes wrote."""
    model = Counts()
    with torch.no_grad(), parallel(model, ["cpu"] * 2):
        with pytest.warns(UserWarning, match="wrote 'steps' during"):
            model(torch.randn(9, 4))
        for _ in range(3):
            model(torch.randn(9, 4))


class Caches(nn.Module):
    """Caches values computed from its weight until `train` clears them, like timm's LeViT."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.cache: dict[str, torch.Tensor] = {}
        self.listed: list[torch.Tensor] = []
        self.kinds: set[str] = set()

    def train(self, mode=True):
        if mode:
            self.cache.clear()
            self.listed.clear()
            self.kinds.clear()
        return super().train(mode)

    def forward(self, x):
        if "scale" not in self.kinds:
            self.kinds.add("scale")
            self.cache["scale"] = self.scale * 2
            self.listed.append(self.scale * 3)
        return x * self.cache["scale"] + self.listed[0]


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_each_call_starts_from_the_state_of_the_model():
    """State that a lane wrote in an earlier call is discarded, so lanes never use a stale cache."""
    model, x = Caches().eval(), torch.rand(9, 4)
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        for _ in range(3):
            torch.testing.assert_close(model(x), x * model.scale * 2 + model.scale * 3)
            torch.testing.assert_close(p.submit(x).result(), x * model.scale * 2 + model.scale * 3)
            model.train()
            model.scale.add_(1)
            model.eval()


def test_a_clone_with_the_dict_of_the_model_is_a_plain_module():
    """A module made from `vars(model)` inside the block runs plainly with its own weights."""
    model = nn.Linear(4, 4)
    with parallel(model, ["cpu"] * 2) as p:
        model(torch.ones(9, 4))
        calls = p.stats().calls
        clone = nn.Linear.__new__(nn.Linear)
        clone.__dict__.update(vars(model))
        clone._parameters = {"weight": nn.Parameter(torch.zeros(4, 4)), "bias": None}
        assert not clone(torch.ones(9, 4)).any()
        assert not clone.forward(torch.ones(9, 4)).any()
        assert p.stats().calls == calls


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), nn.Module._replicate_for_data_parallel],
    ids=["copy", "deepcopy", "pickle", "replicate"],
)
def test_copies_made_inside_the_block_are_plain(clone):
    """A copy has a plain `__dict__` without the parallel `forward`."""
    model = nn.Linear(4, 4)
    with parallel(model, ["cpu"] * 2):
        model(torch.ones(9, 4))
        assert type(vars(clone(model))) is dict
        assert "forward" not in vars(clone(model))


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Counts], ids=["norm", "state"])
@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_the_end_of_a_block_frees_model_and_replicas(make):
    """Model and replicas are freed without garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = make()
        with parallel(model, ["cpu"] * 3) as p:
            model(torch.randn(10, 4)).sum().backward()
            found = [weakref.ref(replica.module) for replica in p._session.pool.refresh()]
        found.append(weakref.ref(model))
        del model, p
        assert [reference() for reference in found] == [None] * 4
    finally:
        gc.enable()


def test_the_end_of_a_block_frees_replicas_with_cycles():
    """A replica with a child that refers to its parent is freed without garbage collection."""
    model = MODELS["child with parent"]()
    gc.collect()
    gc.disable()
    try:
        with parallel(model, ["cpu"] * 3) as p:
            model(torch.randn(10, 4, dtype=torch.float64))
            found = [weakref.ref(replica.module.child) for replica in p._session.pool.refresh()]
        assert [reference() for reference in found] == [None] * 3
    finally:
        gc.enable()
