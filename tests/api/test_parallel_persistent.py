"""Replicas last as long as the block and follow every change of the model without being rebuilt."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.backends import backend_of

THREE = ["cpu"] * 3


class Net(nn.Module):
    """Records the modules that run, and has one of each thing that tests change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(1.0)
        self.tail = nn.Sequential(nn.Tanh())
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("matrix", torch.eye(4))
        self.scale = 2.0
        self.table = torch.ones(4)
        type(self).ran = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.ran.append(self)
        return self.tail(self.dropout(self.linear(x)) @ self.matrix * self.scale + self.shift) * self.table


def new_weight(model):
    model.linear.weight = nn.Parameter(torch.ones(4, 4))


def edit_weight(model):
    with torch.no_grad():
        model.linear.weight.mul_(3)


def edit_data(model):
    model.linear.weight.data = torch.ones(4, 4)


def load(model):
    model.load_state_dict({name: torch.rand_like(value) for name, value in model.state_dict().items()})


def load_assigned(model):
    model.load_state_dict({name: torch.rand_like(value) for name, value in model.state_dict().items()}, assign=True)


def edit_buffer(model):
    model.shift.add_(1)


def edit_matrix(model):
    model.matrix[0, 1] = 5


def new_buffer(model):
    model.shift = torch.full((4,), 7.0)


def resize_buffer(model):
    model.shift = torch.ones(1)


def drop_bias(model):
    model.linear.bias = None


def new_attribute(model):
    model.scale = -1.0


def new_table(model):
    model.table = torch.full((4,), 2.0)


def edit_table(model):
    model.table.mul_(3)


def new_submodule(model):
    model.linear = nn.Linear(4, 4, bias=False)


def more_layers(model):
    model.tail.append(nn.Linear(4, 2))
    model.table = torch.ones(1)


def fewer_layers(model):
    del model.tail[0]


def patched(model):
    model.linear.forward = lambda x: x * model.linear.weight.sum()


def hooked(model):
    model.linear.register_forward_hook(lambda module, args, out: out + 100)


def parametrized(model):
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    nn.utils.parametrize.register_parametrization(model.linear, "weight", Double())


def other_class(model):
    model.tail[0].__class__ = nn.Sigmoid


CHANGES = [
    new_weight, edit_weight, edit_data, load, load_assigned, edit_buffer, edit_matrix, new_buffer, resize_buffer, drop_bias,
    new_attribute, new_table, edit_table, new_submodule, more_layers, fewer_layers, patched, hooked, parametrized,
    other_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_lane_follows_a_change_inside_the_block(change):
    """After a change, outputs and gradients are those of the changed model."""
    model = Net()
    model.dropout.eval()
    x = torch.randn(7, 4)
    with parallel(model, THREE) as p:
        for _ in range(2):
            model(x)
        change(model)
        inside = model(x)
        inside.sum().backward()
        assert p.stats().shards == (3, 2, 2)
    grads = [None if q.grad is None else q.grad.clone() for q in model.parameters()]
    model.zero_grad()
    plain = model(x)
    plain.sum().backward()
    assert_close(inside, plain)
    assert_close(grads, [q.grad for q in model.parameters()])


def test_every_lane_follows_train_and_eval():
    """Calling train() and eval() inside the block sets the dropout of every lane."""
    model = Net()
    x = torch.randn(7, 4)
    dropped = torch.tanh(model.shift).expand(7, 4)
    with torch.no_grad(), parallel(model, THREE):
        assert_close(model(x), dropped)
        model.eval()
        kept = model(x)
        model.train()
        assert_close(model(x), dropped)
        model.dropout.eval()
        assert_close(model(x), kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_lane_follows_a_change_of_dtype(dtype):
    """The model's dtype can change inside the block, and change back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(7, 4)
    with torch.no_grad(), parallel(model, THREE):
        model(x)
        model.to(dtype)
        assert_close(model(x.to(dtype)), model[1](model[0](x.to(dtype))))
        model.float()
        assert model(x).dtype == torch.float32


def test_lanes_follow_requires_grad():
    """Calling requires_grad_() on a frozen parameter inside the block gives it a gradient."""
    norm = nn.BatchNorm1d(4).eval().requires_grad_(requires_grad=False)
    model = nn.Sequential(norm)
    x = torch.randn(7, 4)
    with parallel(model, THREE):
        assert not model(x).requires_grad
        norm.weight.requires_grad_()
        model(x).sum().backward()
        assert norm.weight.grad is not None


def test_an_optimizer_step_copies_nothing_on_the_models_device():
    """Lanes on the model's device share its parameters, so training copies nothing."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, THREE) as p:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(7, 4)).square().mean().backward()
            optimizer.step()
        x = torch.randn(7, 4)
        assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
        assert (p.stats().refreshes, p.stats().copied_bytes) == (0, 0)


def test_replicas_are_made_once():
    """Every lane runs the same replica object in every call, even if the model changes."""
    model = Net().eval()
    x = torch.randn(7, 4)
    with torch.no_grad(), parallel(model, THREE):
        model(x)
        first = {id(module) for module in model.ran}
        ran = list(model.ran)
        for _ in range(5):
            model(x)
        edit_weight(model)
        edit_buffer(model)
        model.scale = 5.0
        model(x)
        assert {id(module) for module in model.ran} == first
    assert len(first) == 3
    assert all(module is not model for module in ran)


def test_a_changed_buffer_is_copied_once():
    """A changed buffer causes one refresh; without changes there is none."""
    model = nn.BatchNorm1d(4).eval()
    x = torch.randn(7, 4)
    with torch.no_grad(), parallel(model, THREE) as p:
        for _ in range(3):
            model(x)
        assert p.stats().refreshes == 0
        model.running_mean.add_(1)
        for _ in range(3):
            model(x)
        assert p.stats().refreshes == 1
        assert_close(model(x), nn.functional.batch_norm(x, model.running_mean, model.running_var, model.weight, model.bias))


def test_submit_and_map_follow_changes():
    """Calls from submit and map run the changed model."""
    model = Net().eval()
    x = torch.randn(7, 4)
    with parallel(model, THREE) as p:
        p.submit(x).result(20)
        new_submodule(model)
        edit_buffer(model)
        want = model.forward.__wrapped__(x)
        assert_close(p.submit(x).result(20), want)
        for y in p.map([x] * 6):
            assert_close(y, want)


def test_lanes_follow_an_attribute_of_a_scripted_module():
    """Setting an attribute of a scripted module inside the block sets it in every lane."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x):
            return x * self.scale

    model = torch.jit.script(Scaled())
    with parallel(model, THREE):
        model(torch.ones(7))
        model.scale = 5.0
        assert model(torch.ones(7)).tolist() == [5.0] * 7


def test_lanes_follow_a_parameter_of_a_scripted_module():
    """Every lane uses a scripted module's parameter after it was replaced or written in place."""
    model = torch.jit.script(nn.Linear(2, 2, bias=False))
    x = torch.ones(7, 2)
    with parallel(model, THREE):
        model(x)
        model.weight = nn.Parameter(torch.zeros(2, 2))
        assert model(x).abs().sum().item() == 0
        with torch.no_grad():
            model.weight.fill_(1)
        assert model(x).tolist() == [[2.0, 2.0]] * 7


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler reads .grad of all tensors
def test_lanes_follow_a_submodule_of_a_compiled_module():
    """Every lane uses changed parameters and submodules of the module inside torch.compile's module."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    model = torch.compile(inner, backend="eager")
    x = torch.randn(7, 4)
    with parallel(model, THREE):
        model(x)
        with torch.no_grad():
            inner[0].weight.zero_()
            inner[0].bias.fill_(3)
        assert_close(model(x), torch.full((7, 4), 3.0))
        inner[1] = nn.Threshold(10, 8)
        assert_close(model(x), torch.full((7, 4), 8.0))


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_an_attribute_that_forward_sets_does_not_rebuild_replicas():
    """The replicas stay the same, and each call starts without the attribute."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            type(self).ran = []  # on the class, because a replica has its own attributes

        def forward(self, x):
            self.ran.append((self, hasattr(self, "last")))
            self.last = x.sum().item()
            return self.linear(x) * self.last

    model = Remembers()
    x = torch.arange(28.0).reshape(7, 4)
    with parallel(model, THREE):
        for _ in range(4):
            model(x)
    assert len({id(module) for module, _ in model.ran}) == 3
    assert not any(has_last for _, has_last in model.ran)
    assert not hasattr(model, "last")


@pytest.mark.parametrize(("rows", "sizes"), [(8, (4, 4)), (5, (3, 2)), (4, (2, 2)), (2, (1, 1))])
def test_shards_are_equal_where_each_size_is_compiled(rows, sizes, monkeypatch):
    """If each shard size costs a compilation, all shards but the last are equal, and outputs have their rows on `dim`."""
    monkeypatch.setattr(type(backend_of("cpu")), "compiles_each_shape", True)
    model = nn.Linear(3, 2)
    x = torch.randn(rows, 3)
    with parallel(model, ["cpu", "cpu"]) as p:
        for _ in range(2):
            assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
            assert p.stats().shards == sizes
