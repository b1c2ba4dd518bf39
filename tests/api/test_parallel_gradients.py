"""Parameters and inputs get the plain gradients, and BatchNorm behaves as in torch.nn.DataParallel."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from parawrap import parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.one, self.two = mlp(), nn.Linear(3, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.two(checkpoint(self.one, x, use_reentrant=self.reentrant))


class Scaled(nn.Module):
    """A model with a buffer that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4) + 1)

    def forward(self, x):
        return self.linear(x) * self.scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


class Normed(nn.Module):
    """A linear layer followed by a norm."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm or nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def gradients(model, x, *, times=1):
    """Return the gradients of the parameters and of the input."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    for _ in range(times):
        model(x).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], x.grad


MODELS = {
    "mlp": mlp,
    "tied": Tied,
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "batch norm in eval": lambda: Normed(nn.BatchNorm1d(4).eval()),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm in eval": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)).eval()),
    "buffer": Scaled,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "gru": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), First(nn.GRU(2, 3, batch_first=True))),
    "scripted": lambda: torch.jit.script(nn.Linear(4, 3)),
}


class First(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


@pytest.mark.parametrize("name", MODELS)
@given(rows=st.integers(1, 17), lanes=st.integers(1, 5), times=st.integers(1, 2))
@few
@pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
def test_gradients_equal_the_plain_ones(name, rows, lanes, times):
    """Gradients of parameters and inputs equal the plain ones, also if they accumulate."""
    model = MODELS[name]()
    x = torch.randn(rows, 4)
    plain = gradients(model, x, times=times)
    with parallel(model, ["cpu"] * lanes):
        for _ in range(2):
            # Lanes add in another order. A norm over few values divides by a small deviation, so rounding counts more.
            assert_close(gradients(model, x, times=times), plain, rtol=1e-3, atol=1e-4)


def test_frozen_parameters_get_no_gradient():
    """Frozen parameters get no gradient, also if they are frozen or unfrozen inside the block."""
    model = mlp()
    x = torch.randn(7, 4)
    model[0].requires_grad_(requires_grad=False)
    with parallel(model, THREE):
        model(x).sum().backward()
        assert model[0].weight.grad is None
        assert model[2].weight.grad is not None
        model[0].requires_grad_()
        model[2].requires_grad_(requires_grad=False)
        model.zero_grad()
        model(x).sum().backward()
        assert model[0].weight.grad is not None
        assert model[2].weight.grad is None


def test_a_wholly_frozen_model_gives_no_graph():
    """If no parameter or input requires a gradient, the output has no graph."""
    model = mlp().requires_grad_(requires_grad=False)
    with parallel(model, TWO):
        assert not model(torch.randn(9, 4)).requires_grad


def test_gradients_of_gradients_are_the_plain_ones():
    """With create_graph=True, a gradient penalty through the parallel call has the plain gradients."""
    model = mlp()
    x = torch.randn(7, 4, requires_grad=True)

    def penalty():
        model.zero_grad()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = penalty()
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(penalty(), plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_parallel_call(reentrant):
    """A parallel model inside torch.utils.checkpoint has the plain gradients."""
    model = mlp()
    x = torch.randn(7, 4)

    def run():
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        checkpoint(model, leaf, use_reentrant=reentrant).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()], leaf.grad

    plain = run()
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(run(), plain)


def test_backward_after_the_block():
    """A loss computed inside the block can run backward after it."""
    model = mlp()
    x = torch.randn(7, 4)
    plain = gradients(model, x)[0]
    with parallel(model, THREE):
        model(x)
        model.zero_grad()
        loss = model(x).square().sum()
    loss.backward()
    assert_close([p.grad for p in model.parameters()], plain)


def test_two_calls_share_one_backward_with_a_buffer():
    """A loss over two outputs of a model with a buffer that backward needs has the plain gradients."""
    model = Scaled()
    x = torch.randn(7, 4)

    def run():
        model.zero_grad()
        (model(x).square().sum() + model(-x).sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = run()
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(run(), plain)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, None], ids=["batch norm", "spectral"])
def test_two_calls_share_one_backward_with_running_statistics(norm):
    """Updates of running statistics do not break the graphs of two calls with one backward, as in training a GAN."""
    model = Normed(norm(4)) if norm else parametrizations.spectral_norm(nn.Linear(4, 4))
    x = torch.randn(10, 4)
    with parallel(model, THREE):
        model(x)
        (model(x).square().sum() + model(-x).square().sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_hooks_on_a_parameter_run_once_with_the_whole_gradient():
    """A hook on a parameter runs once per backward and gets the sum of the lanes' gradients."""
    model = nn.Linear(4, 1, bias=False)
    x = torch.randn(7, 4)
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with parallel(model, THREE):
        for calls in (1, 2, 3):
            model(x).sum().backward()
            assert len(seen) == calls
            assert_close(seen[-1], x.sum(0, keepdim=True))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["sgd", "adamw"])
def test_thirty_steps_of_training_equal_plain_training(optimizer):
    """Thirty optimizer steps through one block give the weights of plain training."""
    torch.manual_seed(0)
    plain = mlp()
    model = copy.deepcopy(plain)
    batches = [(torch.randn(11, 4), torch.randn(11, 3)) for _ in range(30)]

    def train(net):
        steps = optimizer(net.parameters(), lr=0.01)
        for x, y in batches:
            steps.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            steps.step()

    train(plain)
    with parallel(model, THREE):
        train(model)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), atol=1e-5, rtol=1e-4)


def test_training_a_loss_inside_the_model_equals_plain_training():
    """With reduce="mean", a model that returns its mean loss has the plain gradients, also with uneven shards."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            return nn.functional.mse_loss(self.net(x), y)

    model = WithLoss()
    x, y = torch.randn(11, 4), torch.randn(11, 3)
    model(x, y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with parallel(model, THREE, reduce="mean"):
        for _ in range(2):
            model.zero_grad()
            loss = model(x, y)
            assert loss.ndim == 0
            loss.backward()
            assert_close([p.grad for p in model.parameters()], plain)


def test_a_functional_call_uses_and_trains_the_given_parameters():
    """torch.func.functional_call swaps the parameters for one call. The given parameters get the gradients."""
    model = nn.Linear(4, 2)
    x = torch.randn(7, 4)
    with parallel(model, THREE) as p:
        model(x)
        replaced = {"weight": torch.randn(2, 4, requires_grad=True), "bias": torch.zeros(2)}
        y = torch.func.functional_call(model, replaced, (x,))
        assert_close(y, x @ replaced["weight"].T)
        y.sum().backward()
        assert p.stats().shards == (3, 2, 2)
        assert replaced["weight"].grad is not None
        assert model.weight.grad is None
        assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))


def test_function_transforms_of_the_model_have_the_plain_values():
    """`torch.func.grad`, `vmap`, and `jvp` of a parallel model have the plain values."""
    model = mlp()
    x = torch.randn(7, 4)

    def transforms():
        return (
            torch.func.grad(lambda x: model(x).sum())(x),
            torch.func.vmap(model)(x),
            torch.func.jvp(lambda x: model(x), (x,), (x,)),
        )

    plain = transforms()
    with parallel(model, THREE):
        assert_close(transforms(), plain)


def test_forward_mode_tangents_equal_the_plain_ones():
    """In forward-mode autograd, dual inputs give outputs with the plain tangents."""
    import torch.autograd.forward_ad as fw

    model = mlp()
    x = torch.randn(7, 4)

    def tangent():
        with fw.dual_level():
            return fw.unpack_dual(model(fw.make_dual(x, torch.ones_like(x)))).tangent

    plain = tangent()
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(tangent(), plain)


# -- BatchNorm -----------------------------------------------------------------------------------------------------------


def test_batch_norm_in_training_keeps_the_statistics_of_lane_0():
    """As in torch.nn.DataParallel, only the first shard updates the statistics."""
    model = Normed()
    first = copy.deepcopy(model)
    with parallel(model, THREE):
        for _ in range(3):
            x = torch.randn(8, 4)
            model(x)
            first(x[:3])
    assert_close(dict(model.state_dict()), dict(first.state_dict()))
    assert model.norm.num_batches_tracked.item() == 3


def test_batch_norm_in_training_normalises_each_shard():
    """In train mode, each lane normalises with the statistics of its own shard."""
    model = Normed()
    x = torch.randn(8, 4)
    want = torch.cat([copy.deepcopy(model)(part) for part in x.split([3, 3, 2])])
    with parallel(model, THREE):
        for _ in range(2):
            assert_close(model(x), want)


@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm1d(4), lambda: nn.BatchNorm1d(4, momentum=None), lambda: nn.BatchNorm1d(4, affine=False)]
)
def test_eval_after_training_uses_the_new_statistics_in_every_lane(norm):
    """After training calls, an eval call equals the plain one, because every lane has lane 0's new statistics."""
    model = Normed(norm())
    x = torch.randn(10, 4)
    with parallel(model, THREE):
        for _ in range(3):
            model(torch.randn(10, 4) * 3 + 1)
            model.eval()
            with torch.no_grad():
                assert_close(model(x), model.norm(model.linear(x)))
            model.train()
            model(torch.randn(10, 4) - 2)


def test_a_norm_in_eval_mode_keeps_its_statistics_in_a_training_model():
    """Training calls do not change the statistics of a norm that is in eval mode."""
    model = Normed()
    model.norm.eval()
    before = model.norm.running_mean.clone()
    with parallel(model, THREE):
        model(torch.randn(10, 4)).sum().backward()
    assert torch.equal(model.norm.running_mean, before)


def test_a_user_defined_buffer_keeps_the_value_of_lane_0():
    """A buffer that forward writes in place or replaces keeps lane 0's value. Every lane starts the next call from it."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("added", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(2, 2))

        def forward(self, x):
            before = self.added + self.replaced.sum()
            self.added += 1
            self.replaced = self.replaced + 1
            return x + before

    model = Counts()
    with parallel(model, THREE):
        assert model(torch.zeros(7)).tolist() == [0.0] * 7
        assert model(torch.zeros(7)).tolist() == [5.0] * 7
        assert model(torch.zeros(7)).tolist() == [10.0] * 7
    assert model.added.item() == 3
    assert model.replaced.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_scripted_batch_norm_keeps_the_statistics_of_lane_0():
    """In eval mode, every lane uses the statistics that lane 0 wrote in training."""
    model = torch.jit.script(Normed())
    first = copy.deepcopy(model)
    x = torch.randn(8, 4)
    with parallel(model, THREE):
        for _ in range(3):
            model(x)
            first(x[:3])
        model.eval()
        with torch.no_grad():
            inside = model(x)
    assert_close(dict(model.state_dict()), dict(first.state_dict()))
    assert_close(inside, model(x))


def test_a_functional_call_keeps_the_tangents_of_parameters():
    """In forward-mode autograd, dual parameters of functional_call give outputs with the plain tangents."""
    import torch.autograd.forward_ad as fw

    model, x = nn.Linear(3, 2), torch.ones(9, 3)

    def tangent():
        with fw.dual_level():
            dual = {name: fw.make_dual(each.detach(), torch.ones_like(each)) for name, each in model.named_parameters()}
            return fw.unpack_dual(torch.func.functional_call(model, dual, (x,))).tangent

    plain = tangent()
    with parallel(model, ["cpu", "cpu"]):
        assert torch.equal(tangent(), plain)


def test_a_model_with_a_sparse_buffer_trains():
    """Each step after the first copies the buffer again."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mixing", torch.eye(3).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.mixing, (x * self.weight).T).T

    model, x = Mixing(), torch.randn(9, 3)
    with parallel(model, ["cpu", "cpu"]):
        for step in range(1, 4):
            model(x).sum().backward()
            torch.testing.assert_close(model.weight.grad, step * x.sum(0))
