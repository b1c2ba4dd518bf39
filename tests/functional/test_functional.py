"""`functional`: seeds, averages over ranks, optimiser state, modules, samplers, and devices."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from parawrap import Platform, PlatformError, current_rank, functional, wrapper
from parawrap.functional import _averages, _seeds_and_modules
from tests.helpers.ranks import on


def with_gradients(module, *gradients):
    """Set the gradient of each parameter, and return the module."""
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return module


class Parameters(nn.Module):
    """Holds the given tensors as parameters."""

    def __init__(self, *tensors):
        super().__init__()
        for i, tensor in enumerate(tensors):
            floating = tensor.is_floating_point() or tensor.is_complex()
            self.register_parameter(f"p{i}", nn.Parameter(tensor, requires_grad=floating))


# --- seed_generators ---


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(1))


@pytest.fixture
def _generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("_generators")
@pytest.mark.parametrize("seed", [7, 2**32])
def test_the_same_seed_gives_the_same_numbers(seed):
    """After the same seed, Python, NumPy, and torch draw the same numbers."""
    functional.seed_generators(seed)
    first = draws()
    functional.seed_generators(seed)
    assert draws() == first


@pytest.mark.usefixtures("_generators")
def test_an_offset_is_added_to_the_seed():
    """For each generator, a seed with an offset is the same as their sum."""
    functional.seed_generators(5)
    plain = draws()
    functional.seed_generators(3, offset=2)
    assert draws() == plain
    functional.seed_generators(3, offset=3)
    assert all(one != other for one, other in zip(draws(), plain, strict=True))


def test_ranks_start_with_equal_generators_and_offsets_make_them_differ():
    """With the platform's seed, ranks draw equal numbers. With the rank as offset, they draw different numbers."""

    def draw():
        alike = random.random(), float(np.random.rand()), float(torch.rand(1))
        functional.seed_generators(0, offset=current_rank().global_rank)
        return alike, (random.random(), float(np.random.rand()), float(torch.rand(1)))

    (alike_0, own_0), (alike_1, own_1) = on(2, draw, seed=0)
    assert alike_0 == alike_1 == own_0
    assert all(one != other for one, other in zip(own_0, own_1, strict=True))


# --- average_params_grads ---


def test_params_and_grads_choose_what_is_averaged():
    """`params` and `grads` choose whether parameters, gradients, both, or neither become the mean over ranks."""
    choices = [(params, grads) for params in (False, True) for grads in (False, True)]

    def average(choices):
        rank = current_rank().global_rank
        values = []
        for params, grads in choices:
            module = with_gradients(Parameters(torch.tensor([float(rank)])), torch.tensor([10.0 * rank]))
            functional.average_params_grads(module, params, grads)
            values.append((module.p0.item(), module.p0.grad.item()))
        return values

    for rank, values in enumerate(on(2, average, choices)):
        assert values == [(0.5 if params else rank, 5.0 if grads else 10.0 * rank) for params, grads in choices]


def test_only_gradients_are_averaged_by_default():
    """Without options, gradients are averaged and parameters are not."""

    def average():
        rank = float(current_rank().global_rank)
        module = with_gradients(Parameters(torch.tensor([rank])), torch.tensor([rank]))
        functional.average_params_grads(module)
        return module.p0.item(), module.p0.grad.item()

    assert on(2, average) == ((0.0, 0.5), (1.0, 0.5))


@pytest.mark.parametrize("ranks", [2, 3])
def test_means_are_identical_on_every_rank(ranks):
    """Every rank has bitwise the same values, which are the mean up to rounding."""

    def average():
        torch.manual_seed(current_rank().global_rank)
        module = Parameters(*(torch.randn(size) for size in (1, 7, 64, 1000)))
        with_gradients(module, *(torch.randn_like(parameter) for parameter in module.parameters()))
        before = [tensor.detach().clone() for each in module.parameters() for tensor in (each, each.grad)]
        functional.average_params_grads(module, params=True)
        return before, [tensor.detach().clone() for each in module.parameters() for tensor in (each, each.grad)]

    results = on(ranks, average)
    for i, mean in enumerate(results[0][1]):
        assert all(torch.equal(mean, after[i]) for _, after in results)
        torch.testing.assert_close(mean, torch.stack([before[i] for before, _ in results]).mean(0))


def test_averaging_in_buckets_equals_averaging_one_by_one():
    """Buckets give the same means as one all_reduce per parameter."""

    def average():
        torch.manual_seed(current_rank().global_rank)
        module = Parameters(*(torch.randn(size, size) for size in range(1, 9)))
        with_gradients(module, *(torch.randn_like(parameter) for parameter in module.parameters()))
        one_by_one = [parameter.grad.clone() for parameter in module.parameters()]
        for gradient in one_by_one:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        functional.average_params_grads(module)
        return one_by_one, [parameter.grad for parameter in module.parameters()]

    for one_by_one, together in on(3, average):
        torch.testing.assert_close(together, one_by_one)


def test_dtypes_are_kept_in_averaging():
    """Floating-point and complex parameters keep their dtypes, and integer parameters keep their values."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64]

    def average(dtypes):
        rank = current_rank().global_rank
        module = Parameters(*(torch.tensor([rank, 2 * rank, 4], dtype=dtype) for dtype in dtypes))
        functional.average_params_grads(module, params=True)
        return [parameter.detach() for parameter in module.parameters()]

    for rank, values in enumerate(on(2, average, dtypes)):
        *floating, integers = values
        for dtype, value in zip(dtypes, floating, strict=False):
            torch.testing.assert_close(value, torch.tensor([0.5, 1.0, 4.0], dtype=dtype))
        assert integers.tolist() == [rank, 2 * rank, 4]


def test_sparse_gradients_are_averaged_and_stay_sparse():
    """Sparse gradients of different rows become a sparse mean over the rows of all ranks."""

    def average():
        embedding = nn.Embedding(4, 2, sparse=True)
        embedding(torch.tensor([current_rank().global_rank, 3])).sum().backward()
        functional.average_params_grads(embedding)
        return embedding.weight.grad.is_sparse, embedding.weight.grad.to_dense()

    for is_sparse, mean in on(2, average):
        assert is_sparse
        assert mean[:, 0].tolist() == [0.5, 0.5, 0.0, 1.0]


def test_a_sparse_gradient_missing_on_one_rank_counts_as_zeros():
    """If one of two ranks did not use an embedding, both get half of the other rank's gradient."""

    def average():
        embedding = nn.Embedding(4, 2, sparse=True)
        if current_rank().global_rank == 1:
            embedding(torch.tensor([1, 3])).sum().backward()
        functional.average_params_grads(embedding)
        return embedding.weight.grad.to_dense()[:, 0]

    for mean in on(2, average, timeout_min=0.05):
        assert mean.tolist() == [0.0, 0.5, 0.0, 0.5]


def test_a_gradient_that_is_dense_on_one_rank_and_sparse_on_another():
    """If one rank's gradient is dense, all ranks send dense gradients, and the mean is correct."""

    def average():
        weight = nn.Parameter(torch.zeros(3, 1))
        if current_rank().global_rank == 0:
            weight.grad = torch.tensor([[1.0], [10.0], [100.0]])
        else:
            weight.grad = torch.sparse_coo_tensor([[0]], [[1.0]], (3, 1), check_invariants=False)
        functional.average_params_grads(nn.ParameterList([weight]))
        return weight.grad.flatten().tolist()

    assert on(2, average, timeout_min=0.05) == ([1.0, 5.0, 50.0], [1.0, 5.0, 50.0])


def test_a_gradient_missing_on_some_ranks_counts_as_zeros():
    """A gradient that only some ranks have is averaged with zeros. Without any gradient, it stays None."""
    cases = [[0], [1], [0, 1], []]

    def average(cases):
        values = []
        for ranks_with_one in cases:
            module = Parameters(torch.zeros(2), torch.zeros(3))
            module.p1.grad = torch.full((3,), 8.0)
            if current_rank().global_rank in ranks_with_one:
                module.p0.grad = torch.full((2,), 4.0)
            functional.average_params_grads(module)
            values.append((module.p0.grad, module.p1.grad.tolist()))
        return values

    for values in on(2, average, cases):
        for ranks_with_one, (lacking, complete) in zip(cases, values, strict=True):
            assert complete == [8.0, 8.0, 8.0]
            assert lacking is None if not ranks_with_one else lacking.tolist() == [2.0 * len(ranks_with_one)] * 2


def test_frozen_parameters_have_no_gradient_and_are_averaged_as_parameters():
    """A frozen parameter's gradient stays None, and its value is averaged with `params=True`."""

    def average():
        rank = float(current_rank().global_rank)
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        with torch.no_grad():
            module[0].weight.fill_(rank)
        module[0].requires_grad_(False)
        module(torch.ones(1, 2)).sum().backward()
        functional.average_params_grads(module, params=True)
        return module[0].weight.grad, module[0].weight.tolist(), module[0].weight.requires_grad

    assert on(2, average) == ((None, [[0.5, 0.5], [0.5, 0.5]], False),) * 2


def test_tied_parameters_are_averaged_once_and_stay_tied():
    """A parameter that two layers share is averaged once and stays shared."""

    def average():
        rank = float(current_rank().global_rank)
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        module[0].weight.grad = torch.full((2, 2), rank)
        functional.average_params_grads(module)
        return module[0].weight is module[1].weight, module[1].weight.grad.flatten().tolist()

    assert on(2, average) == ((True, [0.5] * 4),) * 2


def test_gradients_with_any_strides_are_averaged_element_by_element():
    """Transposed, strided, and channels-last gradients keep their strides, and each element is the correct mean."""

    def average():
        rank = current_rank().global_rank
        transposed = (torch.arange(6.0).reshape(3, 2) + rank).t()
        if rank == 1:  # the same values with other strides than on rank 0
            transposed = transposed.contiguous()
        strided = (torch.arange(8.0) + rank)[::2]
        last = (torch.arange(24.0).reshape(1, 2, 3, 4) + rank).to(memory_format=torch.channels_last)
        gradients = [transposed, strided, last]
        module = with_gradients(Parameters(*(torch.zeros(each.shape) for each in gradients)), *gradients)
        strides = [each.stride() for each in gradients]
        functional.average_params_grads(module)
        assert [parameter.grad.stride() for parameter in module.parameters()] == strides
        return [parameter.grad.contiguous() for parameter in module.parameters()]

    for transposed, strided, last in on(2, average):
        assert torch.equal(transposed, torch.arange(6.0).reshape(3, 2).t() + 0.5)
        assert torch.equal(strided, torch.arange(8.0)[::2] + 0.5)
        assert torch.equal(last, torch.arange(24.0).reshape(1, 2, 3, 4) + 0.5)


def test_gradients_are_averaged_in_place():
    """The mean is written into the existing gradient tensor."""

    def average():
        module = with_gradients(Parameters(torch.zeros(2)), torch.full((2,), float(current_rank().global_rank)))
        gradient = module.p0.grad
        functional.average_params_grads(module)
        return module.p0.grad is gradient, gradient.tolist()

    assert on(2, average) == ((True, [0.5, 0.5]),) * 2


def test_the_number_of_collectives_follows_the_bucket_size():
    """There is one collective per bucket, and one to agree on which gradients exist. The means do not change."""
    sizes = [5, 1, 0, 5, 9, 5, 5, 20, 5]  # in elements of four bytes
    collectives = {64 << 20: 2, 40: 7, 8: 9, 1: 10}

    def average(sizes, limits):
        calls = []
        plain = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: (calls.append(args), plain(*args, **kwargs))[1]
        rank = float(current_rank().global_rank)
        answers = []
        for _averages._BUCKET_BYTES in limits:
            module = Parameters(*(torch.zeros(size) for size in sizes))
            with_gradients(module, *(torch.full((size,), i + rank) for i, size in enumerate(sizes)))
            calls.clear()
            functional.average_params_grads(module)
            answers.append((len(calls), [parameter.grad.tolist() for parameter in module.parameters()]))
        return answers

    for answers in on(2, average, sizes, list(collectives)):
        assert [calls for calls, _ in answers] == list(collectives.values())
        assert all(means == [[i + 0.5] * size for i, size in enumerate(sizes)] for _, means in answers)


def test_many_parameters_need_one_collective_per_dtype():
    """300 parameters of two dtypes need two collectives, and one to agree on which gradients exist."""

    def average():
        calls = []
        plain = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: (calls.append(args), plain(*args, **kwargs))[1]
        dtypes = [torch.float32, torch.float64]
        module = Parameters(*(torch.zeros(3, dtype=dtypes[i % 2]) for i in range(300)))
        with_gradients(module, *(torch.ones_like(parameter) for parameter in module.parameters()))
        functional.average_params_grads(module)
        return len(calls)

    assert on(2, average) == (3, 3)


def test_half_gradients_do_not_overflow():
    """The mean of two large numbers in float16 is finite, although their sum is not."""

    def average():
        module = with_gradients(Parameters(torch.zeros(1, dtype=torch.float16)), torch.tensor([40000.0]).half())
        functional.average_params_grads(module)
        return module.p0.grad.item()

    assert on(2, average) == (40000.0, 40000.0)


def test_sharded_modules_are_not_averaged():
    """A module that fully_shard has sharded is refused, because its gradients are averaged already."""

    def average():
        model = functional.to(nn.Linear(2, 2), strategy="fsdp2")
        with pytest.raises(TypeError, match="fully_shard averages gradients over the ranks itself"):
            functional.average_params_grads(model)

    on(2, average)


def test_averaging_keeps_no_graph():
    """Gradients from a backward with create_graph are averaged like others."""

    def average():
        weight = nn.Parameter(torch.tensor([2.0 + current_rank().global_rank]))
        module = Parameters()
        module.weight = weight
        (weight**3).sum().backward(create_graph=True)
        functional.average_params_grads(module)
        return weight.grad.item()

    assert on(2, average, verbose=False) == (19.5, 19.5)  # the mean of 3 * 2**2 and 3 * 3**2


def test_a_module_without_parameters_is_not_changed():
    """Averaging an activation does nothing."""

    def average():
        functional.average_params_grads(nn.ReLU(), params=True)
        return "done"

    assert on(2, average) == ("done", "done")


@pytest.mark.parametrize("how", ["one rank", "no group", "inline", "outside a launch"])
def test_without_other_ranks_nothing_is_averaged(how):
    """Values stay bitwise equal with one rank, without a process group, inline, and outside a launch."""

    def average():
        module = with_gradients(Parameters(torch.tensor([0.1])), torch.tensor([0.3]))
        functional.average_params_grads(module, params=True)
        return torch.equal(module.p0, torch.tensor([0.1])) and torch.equal(module.p0.grad, torch.tensor([0.3]))

    ways = {
        "one rank": lambda: on(1, average),
        "no group": lambda: on(2, average, ipc_groups=None),
        "inline": lambda: wrapper(Platform(device="cpu", n_cpus=2))(average).inline(),
        "outside a launch": lambda: (average(),),
    }
    assert all(ways[how]())


def test_averaged_gradients_train_like_the_whole_batch():
    """Two ranks that average the gradients of half a batch each have the weights of one process with the whole batch."""
    batch = torch.arange(12.0).reshape(6, 2) / 10

    def train(rows):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        for _ in range(3):
            model.zero_grad()
            model(rows[current_rank().global_rank]).pow(2).mean().backward()
            functional.average_params_grads(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return model.weight.detach(), model.bias.detach()

    one, other = on(2, train, batch.chunk(2))
    (whole,) = on(1, train, [batch])
    torch.testing.assert_close(one, whole)
    assert all(map(torch.equal, one, other))


# --- optimiser_to ---


def stepped(make, **options):
    """Return a model and its optimiser after two steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimiser = make(model.parameters(), **options)

    def closure():
        optimiser.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimiser.step(closure)
    return model, optimiser


def tensors_of(value, name=""):
    """Return every tensor in an optimiser's state by its address."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {}
    return {place: found for key, item in items for place, found in tensors_of(item, f"{name}.{key}").items()}


def devices_of(optimiser):
    return {
        f"{i}{place}": tensor.device.type
        for i, state in enumerate(optimiser.state.values())
        for place, tensor in tensors_of(state).items()
    }


OPTIMISERS = [
    pytest.param(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, id="SGD"),
    pytest.param(torch.optim.Adam, {"amsgrad": True}, id="Adam"),
    pytest.param(torch.optim.LBFGS, {"max_iter": 4}, id="LBFGS"),
    pytest.param(torch.optim.Adagrad, {}, id="Adagrad"),
    pytest.param(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, id="RMSprop"),
]


@pytest.mark.parametrize(("make", "options"), OPTIMISERS)
def test_an_optimisers_state_moves(make, options):
    """All tensors of the state are moved to the device, except step counters, which stay on the CPU."""
    _, optimiser = stepped(make, **options)
    before = devices_of(optimiser)
    functional.optimiser_to(optimiser, "meta")
    after = devices_of(optimiser)
    assert before
    assert after == {place: "cpu" if place.endswith(".step") else "meta" for place in before}


@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}])
def test_a_step_counter_of_a_capturable_or_fused_optimiser_moves(options):
    """If the optimiser keeps its step on the parameters' device, the step moves too."""
    _, optimiser = stepped(torch.optim.Adam)
    for name, value in options.items():
        optimiser.param_groups[0][name] = value
    functional.optimiser_to(optimiser, "meta")
    assert set(devices_of(optimiser).values()) == {"meta"}


@pytest.mark.parametrize(("make", "options"), OPTIMISERS[:3])
def test_moving_an_optimiser_to_its_own_device_changes_nothing(make, options):
    """The next step is the same as without the move."""
    models = []
    for move in (False, True):
        model, optimiser = stepped(make, **options)
        if move:
            functional.optimiser_to(optimiser, torch.device("cpu"))
        optimiser.step(lambda model=model: model(torch.ones(4, 3)).pow(2).sum())
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_loaded_state_moves():
    """State from load_state_dict is moved."""
    _, saved = stepped(torch.optim.Adam)
    model = nn.Linear(3, 2)
    optimiser = torch.optim.Adam(model.parameters())
    optimiser.load_state_dict(saved.state_dict())
    functional.optimiser_to(optimiser, "meta")
    state = optimiser.state[model.weight]
    assert (state["exp_avg"].device.type, state["step"].device.type, state["step"].item()) == ("meta", "cpu", 2.0)


def test_nested_state_moves():
    """Tensors in nested dicts, lists, tuples, and named tuples are moved; other values stay the same."""
    pair = namedtuple("Pair", "left right")
    model, optimiser = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    here = torch.zeros(1)
    optimiser.state[model.weight]["mine"] = {"a": [here, (here, "text", None)], "b": pair(here, 3)}
    functional.optimiser_to(optimiser, "meta")
    mine = optimiser.state[model.weight]["mine"]
    assert (mine["a"][1][1:], type(mine["b"]), mine["b"].right) == (("text", None), pair, 3)
    assert set(devices_of(optimiser).values()) == {"meta"}


def test_containers_of_state_keep_their_type():
    """Ordered dicts, default dicts, and deques of tensors are moved and keep their type."""
    model, optimiser = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    kept = {
        "ordered": OrderedDict(a=torch.zeros(1)),
        "default": defaultdict(list, a=torch.zeros(1)),
        "deque": deque([torch.zeros(1)]),
    }
    optimiser.state[model.weight].update(kept)
    functional.optimiser_to(optimiser, "meta")
    moved = optimiser.state[model.weight]
    assert all(type(moved[name]) is type(value) for name, value in kept.items())
    assert [moved["ordered"]["a"].device.type, moved["default"]["a"].device.type, moved["deque"][0].device.type] == [
        "meta"
    ] * 3


def test_step_counters_move_by_group():
    """In one optimiser, the step counters of a capturable group move, and those of another group do not."""
    layers = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimiser = torch.optim.Adam([{"params": layer.parameters()} for layer in layers])
    layers[1](layers[0](torch.ones(1, 2))).sum().backward()
    optimiser.step()
    optimiser.param_groups[1]["capturable"] = True
    functional.optimiser_to(optimiser, "meta")
    assert [optimiser.state[layer.weight]["step"].device.type for layer in layers] == ["cpu", "meta"]


def test_an_optimiser_without_state_is_not_changed():
    """Before the first step, there is no state to move."""
    optimiser = torch.optim.Adam(nn.Linear(1, 1).parameters())
    functional.optimiser_to(optimiser, "meta")
    assert not optimiser.state


# --- has_batch_norm ---


def test_batch_normalisation_is_found():
    """Every kind of batch normalisation is found, at any depth."""
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
    lazy = [nn.LazyBatchNorm1d(), nn.LazyBatchNorm2d(), nn.LazyBatchNorm3d()]
    for layer in (*(kind(2) for kind in kinds), *lazy):
        assert functional.has_batch_norm(layer)
        assert functional.has_batch_norm(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), layer)))


def test_other_normalisations_are_not_batch_normalisation():
    """Layer, group, and instance normalisation do not count."""
    layers = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1), nn.GroupNorm(1, 1), nn.InstanceNorm2d(1), nn.Sequential())
    assert not functional.has_batch_norm(layers)


# --- to ---


def test_to_wraps_the_module_in_distributed_data_parallel():
    """Every rank gets a DistributedDataParallel with rank 0's parameters, and gradients are averaged."""

    def train():
        rank = current_rank().global_rank
        torch.manual_seed(rank)
        module = nn.Linear(2, 1, bias=False)
        own = module.weight.detach().clone()
        model = functional.to(module)
        model(torch.full((1, 2), float(rank))).sum().backward()
        name = type(model).__name__
        return name, model.module is module, own, module.weight.detach(), module.weight.grad.flatten().tolist()

    (name_0, same_0, own_0, weight_0, grad_0), (name_1, same_1, own_1, weight_1, grad_1) = on(2, train)
    assert (name_0, name_1, same_0, same_1) == ("DistributedDataParallel",) * 2 + (True,) * 2
    assert not torch.equal(own_0, own_1)
    assert torch.equal(weight_0, own_0)
    assert torch.equal(weight_1, own_0)
    assert grad_0 == grad_1 == [0.5, 0.5]


@pytest.mark.parametrize(
    ("ranks", "options", "frozen"),
    [(1, {}, False), (2, {"sync_modules": False}, False), (2, {}, True)],
    ids=["one rank", "sync_modules=False", "nothing to train"],
)
def test_a_module_that_needs_no_synchronisation_is_returned(ranks, options, frozen):
    """With one rank, with sync_modules=False, and for a frozen module, `to` returns the module itself."""

    def move():
        module = nn.Linear(2, 2).requires_grad_(not frozen)
        return functional.to(module, **options) is module

    assert on(ranks, move) == (True,) * ranks


def test_ranks_without_a_group_get_the_module_itself():
    """Without a process group, `to` returns the module itself."""

    def move():
        module = nn.Linear(2, 2)
        return functional.to(module) is module

    assert on(2, move, ipc_groups=None) == (True, True)


def test_batch_normalisation_on_the_cpu_is_not_converted():
    """SyncBatchNorm does not work on the CPU, so `to` keeps the BatchNorm layer."""

    def train():
        model = functional.to(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model(torch.randn(4, 2)).sum().backward()
        return type(model).__name__, type(model.module[1]).__name__, model.module[0].weight.grad is not None

    assert on(2, train) == (("DistributedDataParallel", "BatchNorm1d", True),) * 2


def test_options_are_passed_to_distributed_data_parallel():
    """Keyword arguments are passed to DistributedDataParallel, including `device_ids`."""

    def wrap():
        model = functional.to(nn.Linear(2, 2), find_unused_parameters=True, gradient_as_bucket_view=True, device_ids=None)
        return model.find_unused_parameters, model.gradient_as_bucket_view, model.device_ids

    assert on(2, wrap) == ((True, True, None),) * 2


@pytest.mark.parametrize("device", ["cpu", "CPU", "auto", None], ids=str)
def test_a_device_is_named_by_its_type_in_any_case(device, monkeypatch):
    """Outside a launch, `device` accepts the names that Platform accepts."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    module = nn.Linear(1, 1)
    assert functional.to(module, 1, device=device) is module
    assert module.weight.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu:1", "cuda:1", "GPU:1"])
def test_a_gpu_is_named_by_its_index(device):
    """Both "gpu" and "cuda" name a GPU, also with an index."""
    assert _seeds_and_modules._target(0, device) == torch.device("cuda", 1)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_a_torch_device_is_accepted(device):
    """`device` may be any torch.device or device name of torch."""
    assert functional.to(nn.Linear(1, 1), device=device).weight.device.type == "meta"


def test_an_unknown_device_is_refused():
    """The error names the unknown device."""
    with pytest.raises((ValueError, RuntimeError), match="banana"):
        functional.to(nn.Linear(1, 1), device="banana")


# --- unwrap ---


def test_unwrap_returns_the_users_module_in_ranks_and_inline():
    """After `to`, unwrap returns the module itself in two ranks, inline, and with fully_shard."""

    def unwrap():
        modules = [nn.Linear(2, 2) for _ in range(3)]
        moved = [
            functional.to(modules[0]),
            functional.to(modules[1], sync_modules=False),
            functional.to(modules[2], strategy="fsdp2"),
        ]
        return [functional.unwrap(model) is module for model, module in zip(moved, modules, strict=True)]

    assert on(2, unwrap) == ([True] * 3,) * 2
    assert wrapper(Platform(device="cpu", n_cpus=2))(unwrap).inline() == ([True] * 3,)


def test_unwrap_removes_nested_wrappers():
    """Wrappers of torch.compile, DistributedDataParallel, and DataParallel are removed in any order."""

    def unwrap():
        module = nn.Linear(2, 2)
        compiled = functional.to(torch.compile(module, backend="eager"))
        around = torch.compile(functional.to(module), backend="eager")
        return [functional.unwrap(each) is module for each in (compiled, around, nn.DataParallel(around))]

    assert on(2, unwrap) == ([True] * 3,) * 2


def test_unwrap_removes_the_wrapper_of_fsdp():
    """The wrapper FullyShardedDataParallel is removed, with a module of its own inside."""

    def unwrap():
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        return type(functional.unwrap(model)) is nn.Linear

    assert on(2, unwrap) == (True, True)


def test_unwrap_keeps_other_modules():
    """A module with an attribute `module`, which is none of torch's wrappers, is the user's own."""
    own = nn.Sequential()
    own.module = nn.Linear(1, 1)
    assert functional.unwrap(own) is own


# --- get_dataset_sampler ---


def platform_of(ranks):
    return Platform(device="cpu", n_cpus=ranks)


def test_unpadded_shares_have_every_row_exactly_once():
    """The shares of all ranks together are the rows in order, and their lengths differ by at most one."""
    for world_size in range(2, 8):
        platform = platform_of(world_size)
        for length in range(41):
            shares = [
                functional.get_dataset_sampler(range(length), rank, platform, pad=False) for rank in range(world_size)
            ]
            rows = [list(share) for share in shares]
            assert [row for share in rows for row in share] == list(range(length))
            assert [len(share) for share in shares] == [len(share) for share in rows]
            assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_padded_shares_equal_those_of_torch():
    """A padded share equals that of DistributedSampler in every epoch."""
    for world_size in range(2, 8):
        for length in (1, 2, 7, 13, 40):
            for rank in range(world_size):
                ours = functional.get_dataset_sampler(range(length), rank, platform_of(world_size))
                torchs = DistributedSampler(range(length), world_size, rank)
                assert isinstance(ours, DistributedSampler)
                for epoch in (0, 3):
                    ours.set_epoch(epoch)
                    torchs.set_epoch(epoch)
                    assert list(ours) == list(torchs)


def test_an_unpadded_share_has_set_epoch():
    """`set_epoch` exists, so a training loop can use either sampler, but does not change the order."""
    share = functional.get_dataset_sampler(range(5), 1, platform_of(2), pad=False)
    share.set_epoch(3)
    assert list(share) == list(share) == [3, 4]


def test_ranks_take_their_own_share():
    """Inside a rank, rank and platform are known, and a DataLoader with the sampler reads the rank's share."""

    def rows():
        data = TensorDataset(torch.arange(7))
        loader = DataLoader(data, batch_size=2, sampler=functional.get_dataset_sampler(data, pad=False))
        padded = functional.get_dataset_sampler(data)
        return [batch.tolist() for (batch,) in loader], len(padded), padded.num_replicas, padded.rank

    assert on(3, rows) == (([[0, 1], [2]], 3, 3, 0), ([[3, 4]], 3, 3, 1), ([[5, 6]], 3, 3, 2))


def test_one_rank_gets_no_sampler():
    """With one rank, the function returns None, so that DataLoader's own `shuffle` applies."""
    take = [lambda pad=pad: functional.get_dataset_sampler(range(5), pad=pad) is None for pad in (False, True)]
    assert all(each() for each in take)
    assert all(on(1, each) == (True,) for each in take)
    assert functional.get_dataset_sampler(range(5), 0, platform_of(1), pad=False) is None


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize("pad", [False, True])
def test_a_dataset_without_a_length_is_refused(pad):
    """The error names the dataset and suggests `current_rank()`, also with one rank."""
    for world_size in (1, 2):
        with pytest.raises(TypeError, match=r"Stream has no length.*current_rank\(\)"):
            functional.get_dataset_sampler(Stream(), 0, platform_of(world_size), pad=pad)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (1, 1)])
def test_a_rank_out_of_range_is_refused(rank, world_size):
    """The error names the rank and the world size."""
    for pad in (False, True):
        with pytest.raises(PlatformError, match=rf"global_rank={rank}\b.*world of {world_size}"):
            functional.get_dataset_sampler(range(5), rank, platform_of(world_size), pad=pad)


# --- device, set_default_device ---


class Buffers(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, device=device))


def test_the_device_of_a_module():
    """`device` returns the device of the first parameter, else of the first buffer, else the CPU."""
    assert functional.device(nn.Linear(1, 1, device="meta")).type == "meta"
    assert functional.device(Buffers("meta")).type == "meta"
    assert functional.device(nn.Sequential(Buffers("meta"), nn.Linear(1, 1))).type == "cpu"
    assert functional.device(nn.ReLU()).type == "cpu"


def test_the_device_of_a_module_without_tensors_in_a_rank():
    """Inside a rank, `device` returns the rank's device for a module without tensors."""
    assert on(2, lambda: functional.device(nn.ReLU()) == current_rank().device) == (True, True)


@pytest.fixture
def _default_device():
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_default_device")
@pytest.mark.parametrize("arguments", [{}, {"local_rank": 1}], ids=str)
def test_set_default_device_uses_the_platforms_device(arguments):
    """After set_default_device, new tensors without a `device` argument lie on the platform's device."""
    torch.set_default_device("meta")
    functional.set_default_device(platform=Platform(device="cpu"), **arguments)
    assert torch.empty(1).device.type == "cpu"


def test_set_default_device_in_a_rank():
    """Inside a rank, the rank's device becomes the default."""

    def where():
        torch.set_default_device("meta")
        functional.set_default_device()
        return torch.empty(1).device == current_rank().device

    assert on(2, where) == (True, True)


def test_a_default_device_stays_within_its_rank():
    """The default device of the parent and of the next launch does not change."""

    def spoil():
        torch.set_default_device("meta")
        functional.set_default_device()
        torch.set_default_device("meta")

    on(2, spoil)
    assert torch.empty(1).device.type == "cpu"
    assert on(2, lambda: torch.empty(1).device.type) == ("cpu", "cpu")
