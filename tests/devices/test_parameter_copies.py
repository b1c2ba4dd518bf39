"""Lanes on other devices have linked copies of the parameters, which follow the model whatever
wrote it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from parawrap import ReplicaError, parallel
from tests.helpers.device_models import SIMS, Recurrent, Tied, assert_same_gradients, mlp, rows

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


class Net(nn.Sequential):
    """Notes the flags and the kind of the parameters that each lane has."""

    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.0), nn.Linear(7, 3))
        self.register_parameter("unused", nn.Parameter(torch.ones(2)))
        self.double()
        type(self).seen = set()  # on the class, because a replica has its own attributes

    def forward(self, x):
        flags = tuple(each.requires_grad for each in self.parameters())
        kinds = all(isinstance(each, nn.Parameter) for each in self.parameters())
        self.seen.add((str(x.device), flags, kinds))
        return super().forward(x)


@pytest.mark.parametrize("between", ["no grad", "map", "nothing"])
def test_every_step_is_seen(between):
    """Each step of an optimizer is seen, also by the calls without gradients that follow it, and if
    one step has several calls before it.

    Fused optimizers leave the versions of the parameters alone.
    """
    model = Net()
    plain = copy.deepcopy(model)
    pairs = [(each, torch.optim.SGD(each.parameters(), 0.1, fused=True)) for each in (model, plain)]
    with parallel(model, SIMS, out_dims=0) as p:
        for _ in range(4):
            x = rows(8)
            for each, stepper in pairs:
                each.zero_grad()
                each(x).square().sum().backward()
                each(x * 2).sin().sum().backward()
                stepper.step()
            with torch.no_grad():
                outputs = {
                    "no grad": lambda x: [model(x)],
                    "map": lambda x: list(p.map([x] * 5)),
                    "nothing": lambda x: [],
                }
                for output in outputs[between](x):
                    torch.testing.assert_close(output, plain(x))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


CHANGES = {
    "one frozen": lambda model: model[0].requires_grad_(requires_grad=False),
    "unfrozen": lambda model: model.requires_grad_(),
    "new data": lambda model: setattr(model[3].weight, "data", model[3].weight.data * 2),
    "all frozen": lambda model: model.requires_grad_(requires_grad=False),
    "filled data": lambda model: setattr(model[3].bias, "data", torch.ones_like(model[3].bias)),
    "unfrozen again": lambda model: model.requires_grad_(),
}


@HOMES
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_flags_and_data_of_copies(first, home):
    """A copy that is made without gradients, or frozen, is linked later.

    Lanes see the flags of the model.

    Without gradients, new ``.data`` on other devices needs `refresh`.
    """
    model, x = Net().to(home), rows(8)
    with parallel(model, SIMS, out_dims=0) as p:
        for name, change in CHANGES.items():
            change(model)
            if "data" in name and first is not torch.enable_grad:
                p.refresh()
            flags = tuple(each.requires_grad for each in model.parameters())
            for mode in (first, torch.enable_grad):
                plain = copy.deepcopy(model)
                model.seen.clear()
                with mode():
                    output, expected = model(x), Net.forward(plain, x.to(home))
                    torch.testing.assert_close(output, expected)
                    assert output.requires_grad == expected.requires_grad
                    if output.requires_grad:
                        model.zero_grad()
                        plain.zero_grad()
                        output.square().sum().backward()
                        expected.square().sum().backward()
                        assert_same_gradients(model, plain)
                assert {kinds for _, _, kinds in model.seen} == {True}
                if mode is torch.enable_grad:
                    assert {each for _, each, _ in model.seen} == {flags}


def penalty(model, x):
    """Double backward, through the gradients of the input and of a weight."""
    gradient, of_weight = torch.autograd.grad(
        model(x).sin().sum(), (x, model[3].weight), create_graph=True
    )
    ((gradient.norm(dim=1) - 1).square().sum() + of_weight.square().sum()).backward()


def two_and_two(model, x):
    first, second = model(x).square().sum(), model(x * 2).sin().sum()
    with torch.no_grad():
        model(x)
    first.backward()
    second.backward()


WAYS = {
    "penalty": penalty,
    "two and two": two_and_two,
    "retained": lambda model, x: [
        (loss := model(x).square().sum()).backward(retain_graph=True),
        loss.backward(),
    ],
    "checkpoint": lambda model, x: (
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
    ),
    "reentrant": lambda model, x: (
        checkpoint(model, x, use_reentrant=True).square().sum().backward()
    ),
    "segments": lambda model, x: (
        checkpoint(model, x, use_reentrant=True).sub(model(x * 2)).square().sum().backward()
    ),
}


@HOMES
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run_backward(way, home):
    """All ways to run backward give the plain gradients, and a hook on a parameter runs as often,
    with the whole gradient.
    """
    model, leaf = Net().to(home), rows(8).to(home)
    model[0].bias.requires_grad_(requires_grad=False)

    def outcome(each):
        seen, x = [], leaf.clone().requires_grad_()
        handle = each[3].weight.register_hook(lambda gradient: seen.append(gradient.cpu().clone()))
        WAYS[way](each, x)
        handle.remove()
        return x.grad, len(seen), sum(seen)

    expected = outcome(plain := copy.deepcopy(model))
    with parallel(model, SIMS, out_dims=0):
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(outcome(model), expected)
            assert_same_gradients(model, plain)


@HOMES
def test_inputs_of_frozen_models(home):
    """Inputs of frozen models get their gradient through the lanes' copies."""
    model, leaf = Net().to(home).requires_grad_(requires_grad=False), rows(8)
    x, plain_x = leaf.clone().requires_grad_(), leaf.to(home).requires_grad_()
    with parallel(model, SIMS, out_dims=0):
        model(x).square().sum().backward()
    model(plain_x).square().sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad.cpu())


def linear() -> nn.Module:
    return nn.Linear(5, 3, dtype=torch.float64)


MODELS = {
    "mlp": mlp,
    "tied": Tied,
    "recurrent": Recurrent,
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()
    ).double(),
    "old weight norm": lambda: nn.Sequential(old_weight_norm(linear())),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear())).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@HOMES
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_equals_plain_training(make, home):
    """Training in a block gives the weights of plain training."""
    model, plain = make().to(home), make()
    plain.load_state_dict(model.state_dict())
    data = rows(200)
    pairs = [(each, torch.optim.Adam(each.parameters(), lr=0.01)) for each in (model, plain)]
    with parallel(model, SIMS, out_dims=0):
        for step in range(6):
            x = data[torch.randperm(200)[: 1 + (7 * step) % 23]]
            for each, optimizer in pairs:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                output = each(x)
                (output - x.to(output.device).sin().sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x).cpu(), plain(x), rtol=1e-6, atol=1e-8)
    ours = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(ours, dict(plain.state_dict()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "form",
    [torch.jit.script, lambda model: torch.jit.trace(model, rows(2))],
    ids=["script", "trace"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lanes_share_torchscript(form):
    """Lanes on its device share a TorchScript module.

    Lanes elsewhere have copies, without gradients.
    """
    model, x = form(mlp()).to("sim:0"), rows(9).to("sim:0")
    with torch.no_grad():
        plain = model(x)
        with parallel(model, ["sim:0", "sim:0"], out_dims=0):
            torch.testing.assert_close(model(x), plain)
        with parallel(model, SIMS, out_dims=0):
            torch.testing.assert_close(model(x), plain)
            next(model.parameters()).mul_(2)
            changed = model(x)
            assert not torch.equal(changed, plain)
        torch.testing.assert_close(model(x), changed)
    with (
        parallel(model, SIMS, out_dims=0),
        pytest.raises(ReplicaError, match="gradients do not flow"),
    ):
        model(x)


class Scripted(nn.Module):
    """TorchScript modules inside another module: one that learns nothing, and a part of it under a
    second name.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.encoder = torch.jit.script(
            nn.Sequential(linear_of_five(), nn.Tanh(), linear_of_five())
        )
        self.head = self.encoder._modules["2"]

    def forward(self, x):
        return self.head(self.encoder(self.linear(x)))


def linear_of_five() -> nn.Module:
    return nn.Linear(5, 5, dtype=torch.float64).requires_grad_(requires_grad=False)


@HOMES
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchscript_inside_a_model(home):
    """Gradients flow through copies of TorchScript modules without parameters that learn."""
    model, x = Scripted().to(home), rows(9).to(home)
    plain = copy.deepcopy(model)
    with parallel(model, SIMS, out_dims=0) as p:
        for _ in range(2):
            for each in (model, plain):
                each(x).square().sum().backward()
        assert_same_gradients(model, plain)
        with torch.no_grad():
            torch.testing.assert_close([model(x), *p.map([x])], [plain(x)] * 2)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


@HOMES
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_writes_of_torchscript(home):
    """A write is refused in each kind of call, also if each lane would write a copy of its own."""
    model, x = (
        nn.Sequential(linear(), torch.jit.script(Counting())).eval().to(home),
        rows(9).to(home),
    )
    with parallel(model, SIMS, out_dims=0) as p:
        for call in (model, p, lambda x: p.submit(x).result(), lambda x: [*p.map([x])]):
            with pytest.raises(ReplicaError, match=r"'1\.calls' of a scripted module was written"):
                call(x)


class Experts(nn.Module):
    """Each row goes to one of a few layers, so a device uses only some of them; some are used by no
    row.
    """

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.double()

    def forward(self, x):
        chosen = (x[:, 0] * 1e6).long() % 4
        output = x
        for index in chosen.unique().tolist():
            of_expert = torch.where((chosen == index)[:, None], self.experts[index](x), 0)
            output = output + of_expert
        return output


class Odd(nn.Module):
    """Parameters of many kinds: without dims, without elements, complex, large, not contiguous, of
    several dtypes.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 4, 2, padding=1, dtype=torch.float64).to(
            memory_format=torch.channels_last
        )
        self.number = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())
        self.gaps = nn.Parameter(torch.randn(4, 6, dtype=torch.float64)[:, ::2])
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.large = nn.Parameter(torch.randn(400, 400, dtype=torch.float64))
        self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x):
        images = x[:, :, None, None].to(memory_format=torch.channels_last)
        features = self.conv(images).mean((2, 3)) * self.number + self.empty.sum()
        features = features @ self.turned + (features * self.complex).real @ self.gaps
        return features * self.large.mean() + (self.short.double() * self.frozen * self.flags).sum()


def accumulate(model, x):
    for part in (x, x * 2):
        model(part).square().sum().backward()


def graph_of_gradients(model, x):
    model(x).sin().sum().backward(create_graph=True)
    found = [each.grad for each in model.parameters() if each.grad is not None]
    torch.stack(
        [each.abs().square().sum() for each in found if each.requires_grad]
    ).sum().backward()
    for each in model.parameters():
        each.grad = None if each.grad is None else each.grad.detach()  # else a cycle keeps both


STEPS = {"two": accumulate, "graph": graph_of_gradients}


@HOMES
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("make", [Experts, Odd])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_odd_parameters(make, step, home):
    """Gradients of odd parameters are the plain ones, in the same layout, and None where no device
    uses a parameter.
    """
    model, plain = make().to(home), make()
    plain.load_state_dict(model.state_dict())
    with parallel(model, SIMS, out_dims=0):
        for _ in range(2):
            x = rows(9)
            for each in (model, plain):
                each.zero_grad()
                step(each, x.to(next(each.parameters()).device))
            assert_same_gradients(model, plain)
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if mine.grad is not None and mine.numel():
                    assert mine.grad.stride() == theirs.grad.stride()


@pytest.mark.parametrize("make", [Experts, Odd])
def test_batches_of_gradients(make):
    """Gradients of several outputs in one pass are right for a model on the CPU: torch has no rule
    for their way off a stream.
    """
    model = make()
    plain, x = copy.deepcopy(model), rows(9)

    def gradients(each):
        output = each(x)
        weights = torch.stack([torch.ones_like(output), x[:, : output.shape[1]]])
        learning = [parameter for parameter in each.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(
            output, learning, weights, is_grads_batched=True, allow_unused=True
        )
        return dict(enumerate(found))

    with parallel(model, SIMS, out_dims=0):
        torch.testing.assert_close(gradients(model), gradients(plain))


@HOMES
def test_memory_of_gradients(home):
    """Each gradient has its memory alone: one gradient that is kept does not keep those that
    traveled with it.
    """
    model = Odd().to(home)
    with parallel(model, SIMS, out_dims=0):
        model(rows(9).to(home)).square().sum().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert len(gradients) == 9
    for gradient in gradients:
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        version = gradient._version
        for other in gradients:
            if other is not gradient:
                other.add_(1)
        assert gradient._version == version
