"""Replicas on other devices follow every change of the module, and only changed tensors are copied."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

from parawrap import DataParallel, ReplicaError, parallel
from parawrap.lanes import Modes
from tests import simdevice
from tests.devices.zoo import (
    SIMS,
    Average,
    Holder,
    Listed,
    Locked,
    Masked,
    Recurrent,
    Tied,
    assert_same_gradients,
    assert_same_training_step,
    mlp,
    parameter_bytes,
    rows,
)

OTHERS = 3  # number of devices other than the model's

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    """Output of a plain copy of the model, on the model's device."""
    return copy.deepcopy(model)(x.to(next(model.parameters()).device)).detach()


# ---------------------------------------------------------------- what is copied


def test_nothing_is_copied_when_nothing_changed():
    """The second inference call copies inputs and outputs, but no parameters."""
    model = mlp().to("sim:0").requires_grad_(False)
    x = rows(9)
    with torch.no_grad(), parallel(model, SIMS, output_device="cpu") as p:
        model(x)
        simdevice.reset_stats()
        output = model(x)
        stats = simdevice.stats()
        assert (stats.d2d_bytes, stats.h2d_bytes, stats.d2h_bytes) == (0, x.nbytes, output.nbytes)
        assert p.stats().refreshes == 0


def test_the_first_call_copies_parameters_once_per_device():
    """The first call copies the parameters once to each other device, even if two lanes share a device."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, [*SIMS, "sim:3", "sim:0"], output_device="cpu"):
        simdevice.reset_stats()
        model(rows(13))
        assert simdevice.stats().d2d_bytes == OTHERS * parameter_bytes(model)


def test_an_optimizer_step_copies_the_parameters_once_per_device():
    """After optimizer.step(), the next call copies the parameters once to each other device and counts one refresh."""
    model = mlp().to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows(9)
    with parallel(model, SIMS, output_device="cpu") as p:
        for step in range(1, 4):
            model(x).square().sum().backward()
            optimizer.step()
            simdevice.reset_stats()
            model(x)
            assert simdevice.stats().d2d_bytes == OTHERS * parameter_bytes(model)
            refreshes = 3 * step - 2  # three calls per step copy, except that the very first makes the replicas
            assert p.stats().refreshes == refreshes
            assert p.stats().copied_bytes == refreshes * OTHERS * parameter_bytes(model)
            with torch.no_grad():
                model(x)
                simdevice.reset_stats()
                model(x)
                assert simdevice.stats().d2d_bytes == 0


def test_only_what_changed_is_copied():
    """If one parameter was written, the next call copies only that parameter."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS, output_device="cpu"):
        model(rows(9))
        model[2].bias.fill_(1)
        simdevice.reset_stats()
        torch.testing.assert_close(model(x := rows(9)), plainly(model, x).cpu())
        assert simdevice.stats().d2d_bytes == OTHERS * model[2].bias.nbytes


def test_backward_copies_gradients_once_per_device():
    """Backward copies each gradient once from each other device, whatever the number of lanes on it."""
    model = mlp().to("sim:0")
    with parallel(model, [*SIMS, *SIMS[1:]], out_dims=0):
        loss = model(rows(14).to("sim:0")).square().sum()
        simdevice.reset_stats()
        loss.backward()
        outputs = 6 * 2 * 3 * 8  # bytes of the output gradients that go to six lanes with two rows each
        assert simdevice.stats().d2d_bytes == OTHERS * parameter_bytes(model) + outputs


def test_a_call_reads_no_scalar_from_a_device():
    """Reading a scalar would block the caller until the device is done."""
    model = mlp().to("sim:0")
    with parallel(model, SIMS):
        model(rows())
        simdevice.reset_stats()
        model(rows()).sum().backward()
        assert simdevice.stats().scalar_reads == 0


# ---------------------------------------------------------------- grad modes between calls


@HOMES
@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_switching_grad_modes(first, home):
    """Calls in inference mode, without gradients, and with gradients work in any order."""
    model = mlp().to(home)
    x = rows()
    with parallel(model, SIMS):
        for mode in [first, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad, torch.no_grad]:
            expected = plainly(model, x)
            with mode():
                output = model(x)
                torch.testing.assert_close(output.detach(), expected)
                assert output.requires_grad == torch.is_grad_enabled()
            if output.requires_grad:
                plain = copy.deepcopy(model)
                plain.zero_grad()
                model.zero_grad()
                plain(x.to(home)).square().sum().backward()
                output.square().sum().backward()
                assert_same_gradients(model, plain)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad


def test_block_opened_in_inference_mode():
    """A block that is opened and first called under inference_mode still trains after inference_mode ends."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows()
    with torch.inference_mode():
        p = parallel(model, SIMS).__enter__()
        model(x)
    model(x).sum().backward()
    p.close()
    plain(x.to("sim:0")).sum().backward()
    assert_same_gradients(model, plain)


def test_model_made_in_inference_mode():
    """A model made under inference_mode can be called there, and calls use its changed parameters."""
    with torch.inference_mode():
        model = mlp().to("sim:0")
        x = rows()
        with parallel(model, SIMS):
            model(x)
            model[0].bias.add_(1)
            torch.testing.assert_close(model(x), model[2](model[1](model[0](x.to("sim:0")))))


# ---------------------------------------------------------------- which parameters require gradients


@HOMES
def test_frozen_parameters(home):
    """Frozen parameters get no gradient; other parameters get the plain gradient."""
    model = mlp().to(home)
    model[0].requires_grad_(False)
    assert_same_training_step(model, rows())


@HOMES
def test_all_frozen(home):
    """If all parameters are frozen, the input still gets its gradient."""
    model = mlp().to(home).requires_grad_(False)
    x = rows().requires_grad_()
    with parallel(model, SIMS):
        model(x).sum().backward()
        parallel_grad, x.grad = x.grad, None
    model(x.to(home)).sum().backward()
    torch.testing.assert_close(parallel_grad, x.grad)


@HOMES
@pytest.mark.parametrize("between", [torch.no_grad, torch.enable_grad])
def test_requires_grad_toggled(between, home):
    """If requires_grad changes between calls, a call gives gradients only to parameters that require them."""
    model = mlp().to(home)
    x = rows()
    with parallel(model, SIMS):
        for learns in (False, True, False, True):
            model[0].requires_grad_(learns)
            with between():
                model(x)
            model.zero_grad()
            model(x).square().sum().backward()
            plain = copy.deepcopy(model)
            plain.zero_grad()
            plain(x.to(home)).square().sum().backward()
            assert_same_gradients(model, plain)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_requires_grad_set_on_a_buffer_or_attribute(kind):
    """If a buffer or plain attribute starts to require grad, later calls give it the gradients of every lane."""
    model = Masked().to("sim:0") if kind == "buffer" else Holder()
    x = rows()
    with parallel(model, SIMS):
        model(x).sum().backward()
        model.scale.requires_grad_()
        model(x).sum().backward()
    gradient, model.scale.grad = model.scale.grad, None
    model(x.to("sim:0")).sum().backward()
    torch.testing.assert_close(gradient, model.scale.grad)


def test_gradient_hooks_run_once():
    """A hook on a parameter runs once per backward, gets the whole gradient, and can change it."""
    model = nn.Linear(5, 3, dtype=torch.float64).to("sim:0")
    plain = copy.deepcopy(model)
    seen = []
    for each in (model, plain):
        each.weight.register_hook(lambda gradient: (seen.append(gradient.clone()), gradient * 2)[1])
    x = rows()
    with parallel(model, SIMS):
        model(x).sum().backward()
    plain(x.to("sim:0")).sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(*seen)
    assert_same_gradients(model, plain)


# ---------------------------------------------------------------- kinds of module


@HOMES
@pytest.mark.parametrize(
    "make",
    [
        Tied,
        Listed,
        Masked,
        Recurrent,
        Locked,
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True, dtype=torch.float64)
        ),
        lambda: old_weight_norm(nn.Linear(5, 3, dtype=torch.float64)),
        lambda: parametrizations.weight_norm(nn.Linear(5, 3, dtype=torch.float64)),
        lambda: old_spectral_norm(nn.Linear(5, 3, dtype=torch.float64)).eval(),
        lambda: parametrizations.spectral_norm(nn.Linear(5, 3, dtype=torch.float64)).eval(),
        lambda: parametrizations.orthogonal(nn.Linear(5, 3, dtype=torch.float64)),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double(),
        lambda: nn.ModuleDict({"a": nn.Linear(5, 3)}).double()["a"],
    ],
    ids=[
        "tied",
        "listed",
        "masked",
        "recurrent",
        "locked",
        "transformer",
        "old_weight_norm",
        "weight_norm",
        "old_spectral_norm",
        "spectral_norm",
        "orthogonal",
        "conv",
        "dict",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_kinds_of_module(make, home):
    """Modules that keep their parameters in unusual ways have the plain outputs and gradients."""
    model, plain = make().to(home), make().to(home)
    plain.load_state_dict(model.state_dict())
    assert_same_training_step(model, rows(), plain=plain)


@HOMES
def test_lazy_module(home):
    """The first call of a lazy module runs plainly and sets its shapes. Later calls use replicas."""
    model = nn.Sequential(nn.LazyLinear(3, dtype=torch.float64)).to(home)
    x = rows()
    with parallel(model, SIMS) as p:
        first = model(x.to(home))
        assert (p.stats().plain, p.stats().shards) == (1, ())
        torch.testing.assert_close(model(x), first)
        assert p.stats().shards == (3, 3, 2, 2)
    assert_same_training_step(model, x)


@HOMES
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "norm", [old_weight_norm, parametrizations.weight_norm, old_spectral_norm, parametrizations.spectral_norm]
)
def test_reparametrized_training(norm, nested, home):
    """A reparametrized module trains over several steps and runs under no_grad between them, also as a submodule."""

    def make():
        linear = norm(nn.Linear(5, 3, dtype=torch.float64))
        return (nn.Sequential(linear) if nested else linear).to(home).eval()

    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    x = rows()
    with parallel(model, SIMS):
        for _ in range(3):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                each(x if each is model else x.to(home)).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x.to(home)))


def test_parametrization_registered_and_removed_inside_a_block():
    """Every lane follows a parametrization that is registered, then removed, between calls."""

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = nn.Sequential(nn.Linear(5, 3, dtype=torch.float64)).to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        parametrize.register_parametrization(model[0], "weight", Double())
        torch.testing.assert_close(model(x), plainly(model, x))
        parametrize.remove_parametrizations(model[0], "weight")
        torch.testing.assert_close(model(x), plainly(model, x))


@HOMES
def test_tied_weights_are_copied_once(home):
    """Weights tied under two names have one copy per device."""
    model = Tied().to(home)
    before = simdevice.stats().live_bytes
    with torch.no_grad(), parallel(model, SIMS, output_device="cpu") as p:
        model(rows())
        pool = p._session.pool._lanes
        for lane in pool.lanes:
            # A lane may hold a call's tensors until it runs its next task.
            pool.submit(lane, int, Modes.capture("sim")).result()
        gc.collect()
        copies = OTHERS if home == "sim:0" else 4
        assert simdevice.stats().live_bytes - before == copies * model.up.weight.nbytes


def test_plain_tensor_attributes():
    """Lanes have copies of tensors in plain attributes and containers, and follow in-place writes to them."""
    model = Holder()
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        for change in (lambda: None, lambda: model.scale.mul_(3), lambda: model.held["shift"][0].add_(5)):
            change()
            torch.testing.assert_close(model(x), plainly(model, x))


def test_plain_attributes_replaced():
    """Every lane uses a plain attribute that was replaced between calls."""
    model = Holder()
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model.scale = torch.full_like(model.scale, 7)
        torch.testing.assert_close(model(x), plainly(model, x))
        model.held = {"shift": [torch.ones_like(model.scale)]}
        torch.testing.assert_close(model(x), plainly(model, x))


def test_item_of_a_container_replaced():
    """Every lane uses a tensor that was replaced inside an attribute's list or dict."""
    model = Holder()
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model.held["shift"][0] = torch.full_like(model.scale, 9)
        torch.testing.assert_close(model(x), plainly(model, x))


def test_cpu_attribute_of_a_model_on_a_device_stays_on_the_cpu():
    """If a model on a device holds a CPU tensor, the tensor is on the CPU in every lane."""

    class Table(nn.Linear):
        def __init__(self):
            super().__init__(5, 3, dtype=torch.float64)
            self.lengths = torch.tensor([1, 2])

        def forward(self, x):
            return super().forward(x)[:, : int(self.lengths.numpy().sum())]

    model = Table().to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        torch.testing.assert_close(model(x), plainly(model, x))


# ---------------------------------------------------------------- the module changes


@HOMES
@pytest.mark.parametrize("called", [torch.enable_grad, torch.no_grad])
def test_parameter_replaced(called, home):
    """The next call uses a replaced parameter and gives it gradients."""
    model = mlp().to(home)
    x = rows()
    with parallel(model, SIMS):
        with called():
            model(x)
        model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
        plain = copy.deepcopy(model)
        expected = plain(x.to(home))
        output = model(x)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)


@HOMES
def test_submodule_replaced(home):
    """The next call uses a replaced submodule and gives it gradients."""
    model = mlp().to(home)
    x = rows()
    with parallel(model, SIMS):
        model(x)
        model[2] = nn.Linear(7, 4, dtype=torch.float64, device=home)
        plain = copy.deepcopy(model)
        expected = plain(x.to(home))
        output = model(x)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)


@HOMES
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign, home):
    """After load_state_dict, with or without `assign`, all lanes use and train the loaded parameters."""
    model, other = mlp().to(home), mlp().to(home)
    x = rows()
    with parallel(model, SIMS):
        model(x)
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
        output = model(x)
        torch.testing.assert_close(output, other(x.to(home)))
        output.square().sum().backward()
        other(x.to(home)).square().sum().backward()
        assert_same_gradients(model, other)


@HOMES
@pytest.mark.parametrize("first", [torch.no_grad, torch.enable_grad])
def test_dtype_changed_inside_the_block(first, home):
    """After model.half() or model.double() inside the block, outputs and gradients have that dtype."""
    model = nn.Linear(5, 3).to(home)
    with parallel(model, SIMS):
        for change, dtype in ((nn.Module.half, torch.float16), (nn.Module.double, torch.float64)):
            with first():
                model(torch.randn(9, 5, dtype=model.weight.dtype))
            change(model)
            model.zero_grad()
            x = torch.randn(9, 5).to(dtype)
            output = model(x)
            assert output.dtype == dtype
            output.sum().backward()
            torch.testing.assert_close(model.weight.grad, x.sum(0).expand(3, -1).to(home), rtol=1e-2, atol=1e-2)


@HOMES
@pytest.mark.parametrize("outputs", [3, 4])
def test_data_assigned(outputs, home):
    """Every lane uses a tensor assigned to `p.data`, of the same or another shape, and gives it gradients."""
    model = nn.Linear(5, 3, bias=False, dtype=torch.float64).to(home)
    x = rows()
    with parallel(model, SIMS):
        model(x)
        model.weight.data = torch.randn(outputs, 5, dtype=torch.float64, device=home)
        model.zero_grad()
        torch.testing.assert_close(model(x).detach(), plainly(model, x))
        model(x).sum().backward()
        torch.testing.assert_close(model.weight.grad, x.sum(0).expand(outputs, -1).to(home))


@pytest.mark.parametrize("away", ["sim:1", "sim:3", "cpu"])
def test_model_moved_inside_the_block(away):
    """If the model moves inside the block, later outputs and gradients lie on its new device."""
    model = mlp().to("sim:0")
    x = rows()
    with parallel(model, SIMS):
        model(x).sum().backward()
        model.to(away)
        model.zero_grad()
        plain = copy.deepcopy(model)
        expected = plain(x.to(away))
        output = model(x)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        expected.sum().backward()
        assert_same_gradients(model, plain)


def test_parameters_replaced_on_another_device():
    """Assigning a state dict from another device moves the model. The next call runs on the moved parameters."""
    model, other = mlp().to("sim:0"), mlp().to("sim:1")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        model.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(model(x), other(x.to("sim:1")).detach())


def test_parameter_added_and_removed():
    """Every lane follows a parameter that is registered, then deleted, between calls."""

    class Shifted(nn.Linear):
        def forward(self, x):
            shift = getattr(self, "shift", None)
            return super().forward(x) if shift is None else super().forward(x) + shift

    model = Shifted(5, 3, dtype=torch.float64).to("sim:0")
    x = rows()
    with parallel(model, SIMS):
        model(x)
        model.register_parameter("shift", nn.Parameter(torch.ones(3, dtype=torch.float64, device="sim:0")))
        model(x).sum().backward()
        torch.testing.assert_close(model.shift.grad, torch.full_like(model.shift, len(x)))
        del model.shift
        torch.testing.assert_close(model(x), Shifted.forward(model, x.to("sim:0")))


@HOMES
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_buffers_changed(how, home):
    """Every lane uses buffers that were written in place, or replaced, between calls."""
    model = Masked().to(home)
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(2):
            model(x)
            if how == "in place":
                model.mask.logical_not_()
                model.scale.add_(1)
            else:
                model.mask = ~model.mask
                model.scale = model.scale + 1
            torch.testing.assert_close(model(x), plainly(model, x))


def test_train_and_eval():
    """model.eval() and model.train() reach every lane's submodules."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(1.0)).to("sim:0")
    x = torch.randn(9, 5)
    with torch.no_grad(), parallel(model, SIMS):
        assert model(x).abs().sum() == 0
        model.eval()
        torch.testing.assert_close(model(x), model[0](x.to("sim:0")))
        model.train()
        assert model(x).abs().sum() == 0


# ---------------------------------------------------------------- buffers that forward writes


@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:0"], ["sim:1", "sim:1"]], ids=str)
@HOMES
def test_batch_norm_keeps_the_statistics_of_lane_0(home, devices):
    """In train mode, BatchNorm keeps lane 0's statistics. In eval mode, every lane uses them."""
    model = nn.BatchNorm1d(5, dtype=torch.float64).to(home)
    plain = nn.BatchNorm1d(5, dtype=torch.float64)
    with parallel(model, devices) as p:
        for _ in range(3):
            x = rows(13) * 3 + 1
            model(x)
            plain(x[: p.stats().shards[0]])
            torch.testing.assert_close({k: v.cpu() for k, v in model.state_dict().items()}, plain.state_dict())
        model.eval()
        plain.eval()
        torch.testing.assert_close(model(x).cpu(), plain(x))
        assert model.running_mean.device == model.weight.device


@HOMES
def test_batch_norm_output_is_that_of_each_shard(home):
    """In train mode, BatchNorm normalizes each shard separately, as in torch.nn.DataParallel."""
    model = nn.BatchNorm1d(5, dtype=torch.float64).to(home)
    with parallel(model, SIMS) as p:
        for count in (13, 13, 10):
            x = rows(count)
            output = model(x)
            parts = x.split(p.stats().shards)
            torch.testing.assert_close(output, torch.cat([copy.deepcopy(model)(part.to(home)) for part in parts]))
        assert p.stats().shards == (3, 3, 2, 2)


@HOMES
def test_batch_norm_train_eval_train(home):
    """Statistics, outputs, and the batch count stay correct when the model switches between train and eval mode."""
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double().to(home)
    plain = copy.deepcopy(model).cpu()
    with parallel(model, SIMS) as p:
        for _ in range(3):
            x = rows(9) + 2
            model.train()(x)
            plain.train()(x[: p.stats().shards[0]])
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x).cpu(), plain.eval()(x))
    assert model[0].num_batches_tracked == 3


def fused_step(model):
    model.train()[0](rows()).square().sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def reestimate(model):
    with torch.no_grad():
        model.train()[0](rows() * 3 + 1)


@pytest.mark.parametrize("change", [fused_step, reestimate])
def test_writes_without_a_version(change):
    """Fused optimizers and batch norm write tensors in C++ and leave the versions of these tensors alone."""
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))).double().eval()
    with parallel(model, SIMS) as p:
        for _ in range(3):
            x = rows()
            with torch.no_grad():
                for output in (model(x), p.submit(x).result(), *p.map([x])):
                    torch.testing.assert_close(output, model[0](x))
            change(model)
            model.eval()


def test_step_of_another_optimizer_before_backward():
    """The step of an optimizer of another model leaves graphs that wait for their backward pass usable."""
    model, other = mlp(), nn.Linear(2, 2)
    with parallel(model, SIMS):
        loss = model(rows()).sum()
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1, fused=True).step()
        with torch.no_grad():
            model(rows())
        loss.backward()


@HOMES
def test_batch_norm_of_two_forwards_before_a_backward(home):
    """Two training calls of a model with BatchNorm can share one backward, as two plain calls can."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().to(home)
    x, y = rows(9), rows(9)
    with parallel(model, SIMS):
        (model(x).square().sum() + model(y).pow(3).sum()).backward()
    assert model[0].weight.grad is not None


@HOMES
def test_batch_norm_trained_and_evaluated_before_backward(home):
    """An eval call between the forward and the backward of a training call does not break the backward."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double().to(home)
    x = rows(9)
    with parallel(model, SIMS):
        loss = model(x).square().sum()
        with torch.no_grad():
            model.eval()(x)
        model.train()
        loss.backward()


@HOMES
@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_forward_writes(in_place, home):
    """Every lane starts a call with the buffers that lane 0 wrote in the call before, in place or by replacement."""
    model = Average(in_place=in_place).to(home)
    plain = Average(in_place=in_place)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad(), parallel(model, SIMS) as p:
        for _ in range(4):
            x = rows(9)
            expected = plain.linear(x) - plain.mean
            output = model(x)
            plain(x[: p.stats().shards[0]])
            torch.testing.assert_close(output.cpu(), expected)
            torch.testing.assert_close(model.mean.cpu(), plain.mean)


@HOMES
@pytest.mark.parametrize("in_place", [True, False])
def test_buffer_written_in_one_lane_only(in_place, home):
    """Buffer writes in lanes other than lane 0 are discarded before the next call."""

    class Latch(nn.Linear):
        def __init__(self):
            super().__init__(1, 1, bias=False)
            self.register_buffer("tripped", torch.zeros(()))

        def forward(self, x):
            before = self.tripped.clone()
            if (x > 6).any():
                if in_place:
                    self.tripped.fill_(1)
                else:
                    self.tripped = torch.ones_like(self.tripped)
            return before.expand(len(x))

    model = Latch().to(home)
    x = torch.arange(9.0)[:, None]
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(3):
            assert model(x).tolist() == [0.0] * 9
    assert model.tripped.item() == 0


class Counter(nn.Linear):
    """A layer that counts its calls in a frozen parameter."""

    def __init__(self, write):
        super().__init__(5, 5, dtype=torch.float64)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.write = write

    def forward(self, x):
        self.write(self.calls)
        return super().forward(x)


@HOMES
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "write",
    [lambda calls: calls.add_(1), lambda calls: calls.data.add_(1), lambda calls: setattr(calls, "data", calls + 1)],
    ids=["in place", "through data", "other memory"],
)
def test_parameter_that_forward_writes(write, grad, home):
    """It is refused, also in lanes that would write a copy of their own."""
    model = Counter(write).to(home)
    with torch.set_grad_enabled(grad), parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(ReplicaError, match="the parameter 'calls' was written during a call"):
                model(rows())


@HOMES
@pytest.mark.filterwarnings("ignore:the model wrote 'last':UserWarning")
def test_memory_of_attributes_that_forward_writes_stays_bounded(home):
    """Memory does not grow over calls if forward stores its last activation in an attribute or buffer."""

    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.register_buffer("ema", torch.zeros(3))

        def forward(self, x):
            y = super().forward(x)
            self.last = y.detach()
            self.ema = 0.9 * self.ema + 0.1 * self.last.mean(0)
            return y

    model = Keeps().to(home)
    x = torch.randn(9, 5)
    levels = []
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(12):
            model(x)
            gc.collect()
            levels.append(simdevice.stats().live)
    assert levels[-1] <= levels[3], levels


def test_memory_of_a_parameter_replaced_often_stays_bounded():
    """Memory does not grow if a parameter is replaced before every call."""
    model = nn.Linear(5, 3).to("sim:0")
    levels = []
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(8):
            model.weight = nn.Parameter(torch.randn(3, 5, device="sim:0"))
            model(torch.randn(9, 5))
            gc.collect()
            levels.append(simdevice.stats().live_bytes)
    assert levels[-1] <= levels[2], levels


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_memory_of_old_weight_norm_stays_bounded():
    """Memory does not grow with the old weight_norm, which sets an attribute before each forward."""
    model = old_weight_norm(nn.Linear(5, 3)).to("sim:0")
    levels = []
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(8):
            model(torch.randn(9, 5))
            gc.collect()
            levels.append(simdevice.stats().live_bytes)
    assert levels[-1] <= levels[2], levels


# ---------------------------------------------------------------- scripted and compiled modules


def _scripted(how: str) -> torch.nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return torch.jit.script(model) if how == "script" else torch.jit.trace(model, rows(2))


@HOMES
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_inference(how, home):
    """A scripted or traced module has the plain output in four lanes, and lanes use its changed parameters."""
    model = _scripted(how).to(home)
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(2):
            torch.testing.assert_close(model(x), plainly(model, x))
            output = model(x)
            for parameter in model.parameters():
                parameter.add_(0.5)
            assert not torch.equal(model(x), output)


@HOMES
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_training(how, home):
    """A scripted or traced module trains like the same module without scripting."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    torch.manual_seed(3)
    model = _scripted(how).to(home)
    x = rows()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    with parallel(model, SIMS):
        for _ in range(3):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
            torch.testing.assert_close(model(x).cpu(), plain(x))
            assert_same_gradients(model, plain)


def test_scripted_with_batch_norm():
    """A scripted BatchNorm keeps lane 0's statistics and uses them in eval mode."""
    model = torch.jit.script(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()).to("sim:0")
    plain = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    plain.load_state_dict(model.state_dict())
    with parallel(model, SIMS) as p:
        for _ in range(2):
            x = rows(9) + 1
            model(x)
            plain(x[: p.stats().shards[0]])
        model.eval()
        torch.testing.assert_close(model(x).cpu(), plain.eval()(x))


def test_scripted_parameter_replaced():
    """Every lane uses a parameter that was replaced in a scripted module."""
    model = _scripted("script").to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS):
        model(x)
        setattr(getattr(model, "2"), "bias", nn.Parameter(torch.full((3,), 9.0, dtype=torch.float64, device="sim:0")))  # noqa: B010
        output = model(x)
    torch.testing.assert_close(output, model(x.to("sim:0")).detach())


@HOMES
@pytest.mark.parametrize("warned", ["default", "error"])
def test_compiled_module(warned, home):
    """A compiled module (eager backend) has the plain outputs and gradients, also if warnings are errors."""
    warnings.simplefilter(warned)
    plain = mlp().to(home)
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    x = rows()
    with parallel(model, SIMS):
        output = model(x)
        output.square().sum().backward()
    expected = plain(x.to(home))
    torch.testing.assert_close(output, expected)
    expected.square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# ---------------------------------------------------------------- copies of the model


def test_deepcopy_inside_a_block():
    """A deep copy made inside the block is an independent, plain model."""
    model = mlp().to("sim:0")
    x = rows()
    with parallel(model, SIMS) as p:
        model(x)
        calls = p.stats().calls
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin[0].weight.zero_()
        output = twin(x.to("sim:0"))
        assert p.stats().calls == calls
    assert output.device == torch.device("sim:0")
    assert not torch.equal(output, model(x.to("sim:0")))
    assert not twin[0].weight.any()
    assert model[0].weight.any()


def test_pickle_inside_a_block():
    """A pickle made inside the block is a plain model."""
    model = mlp().to("sim:0")
    x = rows()
    with parallel(model, SIMS):
        model(x)
        twin = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(twin(x.to("sim:0")), model(x.to("sim:0")))


def test_state_dict_inside_a_block():
    """state_dict inside the block has the same keys and the same tensor objects as before."""
    model = Masked().to("sim:0")
    before = model.state_dict(keep_vars=True)
    with parallel(model, SIMS):
        model(rows())
        inside = model.state_dict(keep_vars=True)
    assert list(inside) == list(before)
    assert all(inside[name] is before[name] for name in before)


def test_replicas_have_parameters():
    """A replica's parameters and buffers have the model's names and shapes and lie on the replica's device."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).to("sim:0")
    dp = DataParallel(model, SIMS)
    dp(torch.randn(9, 5))
    for index, replica in enumerate(dp.replicate(model, SIMS)):
        for kind in ("named_parameters", "named_buffers"):
            mine, theirs = dict(getattr(replica, kind)()), dict(getattr(model, kind)())
            assert {k: v.shape for k, v in mine.items()} == {k: v.shape for k, v in theirs.items()}
            assert {v.device.index for v in mine.values()} == {index}
    dp.close()


# ---------------------------------------------------------------- memory


@HOMES
def test_memory_returns_after_close(home):
    """After the block, all device memory that it allocated is free, except for gradients."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(home)
    model(torch.randn(9, 5, device=home)).sum().backward()  # allocates the gradients
    gc.collect()
    before = simdevice.stats()
    with parallel(model, SIMS) as p:
        for _ in range(3):
            model(torch.randn(9, 5)).sum().backward()
        assert simdevice.stats().live_bytes > before.live_bytes
    gc.collect()
    after = simdevice.stats()
    assert (after.live_by_device, after.live_bytes) == (before.live_by_device, before.live_bytes)
    assert p.stats().calls == 3


def test_memory_is_steady_while_training():
    """Device memory does not grow over training steps in the block."""
    model = mlp().to("sim:0")
    optimizer = torch.optim.Adam(model.parameters())
    levels = []
    with parallel(model, SIMS):
        for _ in range(8):
            optimizer.zero_grad()
            model(rows(9)).square().mean().backward()
            optimizer.step()
            gc.collect()
            levels.append(simdevice.stats().live_bytes)
    assert levels[-1] <= levels[1], levels


def test_memory_returns_after_an_error():
    """A block that ends in an error frees its device memory."""
    model = mlp().to("sim:0")
    gc.collect()
    before = simdevice.stats().live_bytes

    def fail() -> None:
        with parallel(model, SIMS):
            model(rows())
            model(rows(9, 6))

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fail()
    gc.collect()
    assert simdevice.stats().live_bytes <= before


def test_an_error_while_making_a_replica():
    """The ReplicaError names the module, the device, and the cause."""

    class Stubborn(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is Tensor.clone:
                raise TypeError("never")
            return super().__torch_function__(func, types, args, kwargs)

    model = nn.Sequential(nn.Linear(5, 3)).to("sim:0")
    model[0].register_buffer("scale", torch.ones(3, device="sim:0").as_subclass(Stubborn))
    with parallel(model, SIMS), pytest.raises(ReplicaError, match=r"no replica of Sequential .* on sim:0: .*never"):
        model(torch.randn(9, 5))
