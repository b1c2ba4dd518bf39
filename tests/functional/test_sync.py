"""`sync`: one rank's parameters, buffers, and optimizer state in all ranks."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from parawrap import GatherError, Platform, PlatformError, current_rank, functional, wrapper
from tests.helpers.processes import ranks
from tests.helpers.ranks import my_rank, on

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
}


def step(model, optimizer, seed=0):
    """Make one step of this rank alone."""
    torch.manual_seed(seed)
    x = torch.randn(3, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def values_of(model, optimizer):
    """Return a copy of all values that may differ between ranks."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_equal_values(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [(1, 0), (0, 1), (2, 1)], ids=str)
def test_ranks_that_are_apart_agree(ranks, kind, steps):
    """All ranks have the values of `src`, whichever rank is ahead, and train on equally."""

    def train():
        torch.manual_seed(my_rank())
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = OPTIMIZERS[kind](model.parameters())
        for number in range(steps[my_rank()]):
            step(model, optimizer, number)
        before = values_of(model, optimizer)
        functional.sync(model, optimizer)
        after = values_of(model, optimizer)
        step(model, optimizer, 7)
        return before, after, values_of(model, optimizer)

    (before, after, later), (_, after_of_other, later_of_other) = ranks(train)
    assert_equal_values(after, before)  # rank 0 is the source
    assert_equal_values(after_of_other, before)
    assert_equal_values(later_of_other, later)
    assert not torch.equal(later[0]["0.weight"], before[0]["0.weight"])


def test_state_keeps_its_place(ranks):
    """Parameters, and state that this rank has already, are written in place.

    Counters stay on the CPU.
    """

    def train():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer, seed=my_rank())
        parameter, average = model.weight, optimizer.state[model.weight]["exp_avg"]
        functional.sync(model, optimizer, src=1)
        state = optimizer.state[model.weight]
        return (
            model.weight is parameter,
            state["exp_avg"] is average,
            str(state["step"].device),
            average,
        )

    one, other = ranks(train)
    assert one[:3] == other[:3] == (True, True, "cpu")
    assert torch.equal(one[3], other[3])


def test_options_of_groups(ranks):
    """The learning rate of each group is that of the source, also as a tensor.

    An option of other ranks only goes.
    """

    def train():
        model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))
        groups = [
            {"params": each.parameters(), "lr": 1.0 + my_rank() + number}
            for number, each in enumerate(model)
        ]
        optimizer = torch.optim.SGD(groups)
        optimizer.param_groups[1]["lr"] = rate = torch.tensor(5.0 + my_rank())
        if my_rank() == 0:
            optimizer.param_groups[0]["initial_lr"] = 3.0
        functional.sync(model, optimizer, src=1)
        options = optimizer.param_groups[0]
        return (
            options["lr"],
            "initial_lr" in options,
            optimizer.param_groups[1]["lr"].item(),
            rate.item(),
        )

    assert ranks(train) == ((2.0, False, 6.0, 6.0),) * 2


class Odd(nn.Module):
    """A model with every kind of dense tensor."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.tied = self.scalar
        dtypes = [
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
        ]
        for number, dtype in enumerate(dtypes):
            self.register_buffer(
                f"b{number}", torch.randn(2, 3).to(dtype), persistent=number % 2 == 0
            )
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("count", torch.randint(1 << 40, ()))
        self.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("nothing", None)

    def tensors(self):
        return [*self.parameters(), *self.buffers()]


def test_every_kind_of_tensor(ranks):
    """0-d, empty, transposed, frozen, and tied parameters; buffers of every dtype, not persistent,
    and expanded.
    """

    def run(src):
        model = Odd(my_rank())
        before = [tensor.data_ptr() for tensor in model.tensors()]
        strides = [tensor.stride() for tensor in model.tensors()]
        functional.sync(model, src=src)
        assert model.tied is model.scalar
        assert before == [tensor.data_ptr() for tensor in model.tensors()]
        assert strides == [tensor.stride() for tensor in model.tensors()]
        expected = Odd(src).tensors()
        pairs = list(zip(model.tensors(), expected, strict=True))
        return [
            (each.double() if each.dtype is torch.float8_e4m3fn else each).equal(
                like.double() if like.dtype is torch.float8_e4m3fn else like
            )
            for each, like in pairs
        ]

    for src in 0, 1:
        found = ranks(run, src)
        assert all(found[0]), found[0]
        assert all(found[1]), found[1]


def test_large_models_take_many_collectives(ranks):
    """A tensor may be larger than one collective."""

    def run():
        model = nn.Module()
        for number, size in enumerate([3, 20 << 20, 5, 7 << 20, 1]):
            model.register_buffer(f"b{number}", torch.full((size,), float(my_rank() * 10 + number)))
        functional.sync(model, src=1)
        return [(each[0].item(), each[-1].item()) for each in model.buffers()]

    assert ranks(run) == ([(10.0 + number,) * 2 for number in range(5)],) * 2


def test_wrappers_may_differ_by_rank(ranks):
    """The wrappers of DistributedDataParallel and torch.compile may differ between ranks."""

    def run():
        torch.manual_seed(my_rank())
        bare = nn.Linear(4, 1)
        wrapped = functional.to(bare)
        torch.nn.init.constant_(bare.weight, my_rank())
        functional.sync(torch.compile(wrapped) if my_rank() == 0 else wrapped, src=1)
        wrapped(torch.ones(1, 4)).sum().backward()
        return bare.weight.tolist()

    assert ranks(run) == ([[1.0] * 4],) * 2


def test_gradients_are_dropped(ranks):
    """Gradients are dropped, since they may be those of half a step.

    Several optimizers, and parameters that only they have, are copied too.
    """

    def train():
        model, temperature = nn.Linear(4, 1), nn.Parameter(torch.tensor(float(my_rank())))
        one, other = (
            torch.optim.SGD(model.parameters(), lr=1.0 + my_rank()),
            torch.optim.Adam([temperature]),
        )
        (model(torch.ones(1, 4)).sum() * temperature).backward()
        if my_rank() == 1:
            other.step()
        functional.sync(model, [one, other], src=1)
        gradients = [each.grad for each in (*model.parameters(), temperature)]
        return (
            gradients,
            temperature.item(),
            one.param_groups[0]["lr"],
            other.state[temperature]["step"].item(),
        )

    one, other = ranks(train)
    assert one == other
    assert (one[0], one[2:]) == ([None] * 3, (2.0, 1.0))


def test_state_under_other_keys(ranks):
    """Some optimizers keep state under a text, nested, and one tensor in two places."""

    class Counting(torch.optim.SGD):
        def count(self, value):
            shared = torch.tensor(value)
            self.state["total"] = {"history": [shared, (value, None)], "again": shared}

    def run(src):
        model = nn.Linear(1, 1)
        optimizer = Counting(model.parameters())
        if my_rank() == 0:
            optimizer.count(7.0)
        else:
            optimizer.count(3.0)
            optimizer.state["total"]["again"] = torch.tensor(0.0)
            optimizer.state["more"] = 1
        functional.sync(model, optimizer, src)
        state = optimizer.state["total"]
        (first, others), again = state["history"], state["again"]
        return first.item(), others, again.item(), again is first, len(optimizer.state)

    assert ranks(run, 0) == ((7.0, (7.0, None), 7.0, True, 1),) * 2
    assert ranks(run, 1) == ((3.0, (3.0, None), 0.0, False, 2),) * 2


# --- refusals ---


def build(how):
    """Return a model, an optimizer, and a source: those of the two ranks cannot be synchronized."""
    rank = my_rank()
    model, src = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), 0
    if how == "shape" and rank == 1:
        model[1] = nn.Linear(3, 2)
    elif how == "dtype" and rank == 1:
        model[1].half()
    elif how == "more" and rank == 1:
        model.append(nn.Linear(1, 1))
    elif how == "tied":
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if rank == 1:
            model[1].weight = model[0].weight
    elif how == "src":
        src = rank
    elif how == "sparse":
        model.register_buffer("adjacency", torch.eye(3).to_sparse())
    elif how == "meta" and rank == 1:
        model[1].to("meta")
    elif how == "lazy":
        model.append(nn.LazyLinear(2))
    elif how == "parts":
        model.register_buffer("two", TwoTensor(torch.ones(2), torch.ones(2)))
    elif how == "quantized":
        model.register_buffer("q", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    optimizer = torch.optim.Adam(model[0].parameters())
    if how == "kind" and rank == 1:
        optimizer = torch.optim.SGD(model[0].parameters())
    elif how == "groups" and rank == 1:
        optimizer.add_param_group({"params": model[1].parameters()})
    elif how == "lock" and rank == 0:
        optimizer.param_groups[0]["lock"] = threading.Lock()
    return model, optimizer, src


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        (
            "shape",
            GatherError,
            r"rank 0 has 1\.weight: torch\.float32 \(1, 3\) on cpu; but rank 1 has .* \(2, 3\)",
        ),
        ("dtype", GatherError, r"but rank 1 has 1\.weight: torch\.float16"),
        ("more", GatherError, r"rank 0 has .*; but rank 1 has 2\.weight"),
        ("tied", GatherError, r"rank 1 has 1\.weight: .*, the same tensor as 0\.weight"),
        ("src", GatherError, r"rank 0 has src=0, but rank 1 has src=1"),
        (
            "sparse",
            TypeError,
            r"in rank 0, adjacency is a Tensor .* torch\.sparse_coo.*Load a checkpoint",
        ),
        ("meta", TypeError, r"in rank 1, 1\.weight is a Parameter on meta"),
        ("lazy", TypeError, r"2\.weight has no shape yet\. Run the model once in all ranks"),
        ("parts", TypeError, r"two is a TwoTensor on cpu .*Load a checkpoint"),
        ("quantized", TypeError, r"q is a Tensor .* torch\.qint8"),
        (
            "kind",
            GatherError,
            r"rank 0 has optimizer 0: Adam with .*; but rank 1 has optimizer 0: SGD",
        ),
        ("groups", GatherError, r"rank 0 has optimizer 0|rank 1 has parameter 2 of optimizer 0"),
        ("lock", TypeError, r"in rank 0, a state cannot be sent: .*lock"),
    ],
)
def test_ranks_that_differ_are_refused(ranks, how, error, text):
    """All ranks raise the same error, and have their values still."""

    def refuse():
        model, optimizer, src = build(how)
        own = [each.detach().clone() for each in model[0].parameters()]
        with pytest.raises(error, match=text) as caught:
            functional.sync(model, optimizer, src)
        assert all(map(torch.equal, own, model[0].parameters()))
        return str(caught.value)

    one, other = ranks(refuse)
    assert one == other


def test_sharded_models_are_refused(ranks):
    """Each rank has other values by design: those of fully_shard, FullyShardedDataParallel, and
    ZeroRedundancyOptimizer.
    """

    def refuse():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        with pytest.raises(
            TypeError, match=r"weight is a DTensor, a shard .*Load a checkpoint in all ranks"
        ):
            functional.sync(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,))))
        flat = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(TypeError, match="model is sharded by FullyShardedDataParallel"):
            functional.sync(flat)
        model = nn.Linear(2, 2)
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(TypeError, match="the state of ZeroRedundancyOptimizer is sharded"):
            functional.sync(model, sharded)

    ranks(refuse)


def test_wrong_arguments(ranks, lone_ranks):
    """The error names the value, and the ranks that there are."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for src in 2, -1, None, True, 1.0:
        with pytest.raises(ValueError, match=rf"src={src!r} is not a rank .*has 2\. Use 0 to 1"):
            ranks(functional.sync, model, None, src)
    with pytest.raises(ValueError, match=r"src=1 is not a rank .*has 1\. Use 0\."):
        functional.sync(model, src=1)
    with pytest.raises(TypeError, match=r"model is a list.*Call sync once per model"):
        functional.sync([model])
    with pytest.raises(TypeError, match="optimizer is a Linear"):
        functional.sync(model, model)
    with pytest.raises(TypeError, match="optimizer is a dict"):
        functional.sync(model, [optimizer, optimizer.state_dict()])

    def use_no_group():
        with pytest.raises(PlatformError, match=r"sync exchanges values between 2 ranks"):
            functional.sync(nn.Linear(1, 1))

    lone_ranks(use_no_group)


def test_without_other_ranks():
    """Nothing changes, and gradients stay."""

    def keep():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 1)).sum().backward()
        before = model.weight.item()
        functional.sync(model, optimizer)
        return (
            model.weight.item() == before and model.weight.grad is not None and not optimizer.state
        )

    inline = wrapper(Platform(device="cpu", n_cpus=2))(keep).inline()
    assert (*on(1, keep), *inline, keep()) == (True,) * 3


def test_three_ranks_get_the_values(ranks):
    """All ranks get the values, also those of groups of their own."""

    def run():
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, current_rank().global_rank)
        functional.sync(model, src=2)
        return model.weight.item()

    assert on(3, run, ipc_groups=[[0, 1], [2]]) == (2.0,) * 3


def test_schedulers_and_scalers_follow():
    """Objects with a state_dict get that of the source, so that ranks train on alike."""

    @wrapper(ranks(2))
    def train():
        rank = current_rank().global_rank
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (1 + rank))
        for _ in range(3 - rank):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        functional.sync(model, optimizer, src=1, stateful=[scheduler, scaler])
        return scheduler.last_epoch, optimizer.param_groups[0]["lr"], scaler.get_scale()

    one, other = train()
    assert one == other
    assert (one[0], one[2]) == (2, 16.0)


@pytest.mark.parametrize(
    ("stateful", "says"),
    [
        ([torch.nn.Linear(1, 1)], "stateful holds a Linear. Give modules as model"),
        ([3], "stateful holds a int, which has no state_dict"),
        (torch.optim.lr_scheduler.StepLR, r"Give a list of objects, as in stateful=\[scheduler\]"),
    ],
    ids=["module", "number", "no list"],
)
def test_other_objects_are_refused(stateful, says):
    with pytest.raises(TypeError, match=says):
        functional.sync(torch.nn.Linear(1, 1), stateful=stateful)


def test_ranks_of_other_objects_are_refused():
    """The error names the first difference, in all ranks."""

    @wrapper(ranks(2))
    def train():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        functional.sync(model, optimizer, stateful=[scheduler][current_rank().global_rank :])

    with pytest.raises(GatherError, match="stateful: StepLR; but rank 1 has nothing more"):
        train()
