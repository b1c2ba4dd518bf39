"""`average_params_grads`: the mean of parameters and gradients over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import Platform, current_rank, functional, wrapper
from tests.helpers.ranks import on


class Parameters(nn.Module):
    def __init__(self, *tensors, gradients=()):
        super().__init__()
        for i, tensor in enumerate(tensors):
            floating = tensor.is_floating_point() or tensor.is_complex()
            self.register_parameter(f"p{i}", nn.Parameter(tensor, requires_grad=floating))
        for parameter, gradient in zip(self.parameters(), gradients, strict=False):
            parameter.grad = gradient


@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("grads", [False, True])
def test_options_of_averages(ranks, params, grads):
    def average():
        rank = float(current_rank().global_rank)
        grad = torch.tensor([10 * rank])
        module = Parameters(torch.tensor([rank]), gradients=[grad])
        functional.average_params_grads(module, params=params, grads=grads)
        assert module.p0.grad is grad  # in place
        return module.p0.item(), grad.item()

    expected = zip([0.5, 0.5] if params else [0, 1], [5, 5] if grads else [0, 10], strict=True)
    assert ranks(average) == tuple(expected)


def test_means_are_equal_on_every_rank():
    """Means are bitwise equal on every rank, also with frozen and tied parameters.

    A gradient keeps its strides, which may differ by rank.
    """

    def average():
        torch.manual_seed(current_rank().global_rank)
        sizes = [(1,), (300,), (0,), (8, 9), (1000,)]
        module = Parameters(*map(torch.zeros, sizes), gradients=map(torch.randn, sizes))
        if current_rank().global_rank == 0:
            module.p3.grad = torch.randn(9, 8).t()
        module.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        module.tied = module.p3
        gradients = [module.get_parameter(f"p{i}").grad for i in range(5)]
        before = [each[-100:].clone() for each in gradients]
        stride = module.p3.grad.stride()
        functional.average_params_grads(module)
        assert module.p3.grad.stride() == stride
        assert module.tied is module.p3
        assert module.frozen.grad is None
        return before, [each[-100:].clone() for each in gradients]

    results = on(3, average)
    for i, mean in enumerate(results[0][1]):
        assert all(torch.equal(mean, after[i]) for _, after in results)
        torch.testing.assert_close(mean, torch.stack([before[i] for before, _ in results]).mean(0))


def test_dtypes_are_kept(ranks):
    """Integer parameters keep their values, frozen ones are averaged, and large numbers in float16
    do not overflow.
    """
    dtypes = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.int64,
    ]

    def average():
        rank = current_rank().global_rank
        tensors = [torch.tensor([rank, 2 * rank, 4], dtype=dtype) for dtype in dtypes]
        module = Parameters(torch.tensor([40000.0]).half(), *tensors)
        module.p3.requires_grad_(False)
        functional.average_params_grads(module, params=True)
        return [parameter.detach() for parameter in module.parameters()]

    for rank, (large, *floating, integers) in enumerate(ranks(average)):
        assert large.item() == 40000.0
        for dtype, value in zip(dtypes, floating, strict=False):
            torch.testing.assert_close(value, torch.tensor([0.5, 1.0, 4.0], dtype=dtype))
        assert integers.tolist() == [rank, 2 * rank, 4]


def test_other_tensors_are_refused(ranks):
    """The error says how to make a sparse gradient dense, and that a sharded module needs no
    averages.
    """

    def average():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        embedding = nn.Embedding(4, 2, sparse=True)
        embedding(torch.tensor([0, 3])).sum().backward()
        sharded = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
        nested = Parameters(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        for module, cure in (
            (embedding, "use sparse=False"),
            (nested, "takes whole, dense tensors"),
            (sharded, "fully_shard averages gradients over the ranks"),
        ):
            with pytest.raises(TypeError, match=cure):
                functional.average_params_grads(module)

    ranks(average)


def test_missing_gradients_are_zeros(ranks):
    """A gradient that no rank has stays None. A module without parameters stays."""

    def average():
        rank = current_rank().global_rank
        module = Parameters(torch.zeros(2), torch.zeros(3), torch.zeros(1))
        module.p1.grad = torch.full((3,), 8.0)
        if rank == 0:
            module.p0.grad = torch.full((2,), 4.0)
        functional.average_params_grads(module)
        functional.average_params_grads(nn.ReLU(), params=True)
        return module.p0.grad.tolist(), module.p1.grad.tolist(), module.p2.grad

    assert ranks(average) == (([2.0] * 2, [8.0] * 3, None),) * 2


def test_without_other_ranks(lone_ranks):
    """Values stay bitwise equal with one rank, without a process group, inline, and outside a
    launch.
    """

    def average():
        module = Parameters(torch.tensor([0.1]), gradients=[torch.tensor([0.3])])
        functional.average_params_grads(module, params=True)
        return torch.equal(module.p0, torch.tensor([0.1])) and torch.equal(
            module.p0.grad, torch.tensor([0.3])
        )

    inline = wrapper(Platform(device="cpu", n_cpus=2))(average).inline()
    assert (*on(1, average), *lone_ranks(average), *inline, average()) == (True,) * 5
