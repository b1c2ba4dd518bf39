"""The simulated accelerator behaves as several separate devices do."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from . import _exclusive, available, install, reset_stats, stats


@pytest.fixture(autouse=True)
def _no_races(sim: ModuleType) -> Iterator[None]:
    """Fail a test that leaves a race behind: these use one stream per device."""
    yield
    assert stats().races == ()


def conv_net() -> nn.Module:
    """A small convolutional classifier with batch normalisation."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def encoder() -> nn.Module:
    """A small transformer encoder with dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def recurrent() -> nn.Module:
    """Both kinds of recurrent layer."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
            self.gru = nn.GRU(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.gru(self.lstm(x)[0])[0]
            return output[:, -1]

    return Last()


# ---------------------------------------------------------------- installing


def test_devices_are_listed(sim: ModuleType) -> None:
    """Torch lists four devices of type sim, by its device module and as the current accelerator."""
    assert torch.get_device_module("sim") is sim
    assert (sim.device_count(), sim.is_available(), sim.current_device()) == (4, True, 0)
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 4
    assert [torch.zeros(1, device=f"sim:{i}").device.index for i in range(4)] == [0, 1, 2, 3]


def test_install_twice(sim: ModuleType) -> None:
    """A second install returns the same module, and raises when asked for another number of devices."""
    assert install() is sim
    assert available() is None
    with pytest.raises(ValueError, match="4 simulated devices are installed, not 2"):
        install(2)


def test_lock_of_killed_process(tmp_path: Path) -> None:
    """The lock on a build is free again once the process that held it was killed."""
    path = tmp_path / "build.lock"
    hold = """if True:
        import fcntl, sys
        file = open(sys.argv[1], "a")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
        with _exclusive(path):
            pass


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("other", ["sim:1", "cpu"])
@pytest.mark.parametrize(
    "operator",
    [torch.add, torch.mm, torch.Tensor.add_, nn.functional.linear, lambda a, b: torch.cat([a, b])],
    ids=["add", "mm", "add_", "linear", "cat"],
)
def test_mixed_devices_raise(operator: Callable[[Tensor, Tensor], Tensor], other: str) -> None:
    """An operator over tensors of two devices raises, naming both."""
    a, b = torch.ones(2, 2, device="sim:0"), torch.ones(2, 2, device=other)
    for x, y in ((a, b), (b, a)):
        with pytest.raises(RuntimeError, match="same device, but found at least two devices") as error:
            operator(x, y)
        assert str(a.device) in str(error.value)
        assert str(b.device) in str(error.value)


def test_cpu_scalars_and_indices_mix() -> None:
    """A CPU tensor without dimensions, or one used as an index, may meet a device tensor."""
    x = torch.arange(4.0, device="sim:2")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]


def test_invalid_ordinal_raises(sim: ModuleType) -> None:
    """A device past the last one cannot be allocated on, copied to or made current."""
    attempts: list[Callable[[], object]] = [
        lambda: torch.empty(1, device="sim:4"),
        lambda: torch.ones(1).to("sim:4"),
        lambda: nn.Linear(1, 1).to("sim:9"),
        lambda: sim.set_device(4),
        lambda: torch.accelerator.set_device_index(4),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            attempt()
    assert sim.current_device() == 0


def test_current_device_per_thread(sim: ModuleType) -> None:
    """The current device takes what names no ordinal, and each thread has its own."""
    seen: list[int] = []
    with sim.device("sim:3"):
        seen.append(torch.empty(1, device="sim").device.index)
        thread = threading.Thread(target=lambda: seen.append(torch.empty(1, device="sim").device.index))
        thread.start()
        thread.join()
    seen.append(sim.current_device())
    assert seen == [3, 0, 0]


# ---------------------------------------------------------------- counters


def test_copies_are_counted_exactly() -> None:
    """Each copy across devices counts once, with the bytes that arrive, and nothing else counts."""
    host = torch.ones(3, 5)
    reset_stats()
    x = host.to("sim:0")  # 60 bytes in
    y = x.to("sim:1", non_blocking=True)  # 60 across
    y.to("sim:2", torch.float64)  # 120 across
    y.cpu()  # 60 out
    y.t()[:2].cpu()  # 24 out
    y.clone().add_(1).mul(y).sum()
    y.to("sim:1")
    torch.empty(0).to("sim:0")
    assert y.sum().item() == 15
    now = stats()
    assert (now.h2d, now.h2d_bytes) == (1, 60)
    assert (now.d2d, now.d2d_bytes) == (2, 180)
    assert (now.d2h, now.d2h_bytes) == (2, 84)
    assert now.scalar_reads == 1
    reset_stats()
    now = stats()
    assert (now.h2d, now.d2h_bytes, now.d2d, now.scalar_reads, now.operators) == (0, 0, 0, 0, 0)


def test_model_copies_are_counted_exactly() -> None:
    """A model moved to a device costs a copy per parameter and buffer; its training step costs none."""
    model = conv_net()
    tensors = [*model.parameters(), *model.buffers()]
    x = torch.randn(2, 2, 6, 6, device="sim:1")
    reset_stats()
    model.to("sim:1")
    now = stats()
    assert (now.h2d, now.h2d_bytes) == (len(tensors), sum(t.nbytes for t in tensors))
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
    assert (stats().h2d, stats().d2h, stats().d2d) == (len(tensors), 0, 0)


def test_foreach_copies() -> None:
    """A foreach copy between devices counts every tensor, and foreach arithmetic runs on the device."""
    source = [torch.full((n,), float(n), device="sim:0") for n in (1, 2, 3)]
    target = [torch.empty_like(t, device="sim:3") for t in source]
    reset_stats()
    torch._foreach_copy_(target, source, non_blocking=True)
    torch._foreach_add_(target, target)
    assert (stats().d2d, stats().d2d_bytes, stats().h2d, stats().d2h) == (3, 24, 0, 0)
    assert [t.tolist() for t in target] == [[2], [4, 4], [6, 6, 6]]


def test_live_memory() -> None:
    """Live allocations are counted on their device, from their making to their end."""
    before = stats()
    x = torch.empty(100, device="sim:2")
    y = x[10:].view(9, 10)
    during = stats()
    assert during.live - before.live == 1
    assert during.live_bytes_by_device[2] - before.live_bytes_by_device[2] == 400
    del x
    assert stats().live == during.live
    del y
    assert stats() == before


# ---------------------------------------------------------------- operators


def test_views_share_memory() -> None:
    """A view of a device tensor writes through to it, and a resized output keeps its identity."""
    x = torch.zeros(2, 6, device="sim:1")
    x.view(3, 4)[0].fill_(1)
    x.unfold(1, 2, 2)[1, 2].fill_(2)
    part = torch.split(x, 3, dim=1)[1]
    part.add_(1)
    assert x.tolist() == [[1, 1, 1, 2, 1, 1], [0, 0, 0, 1, 3, 3]]
    out = torch.empty(0, device="sim:1")
    assert torch.cat([x, x], out=out) is out
    assert out.shape == (4, 6)


def test_gradient_flows_across_devices() -> None:
    """A backward pass follows the copies between devices back to each leaf's own."""
    a = torch.tensor([2.0, 3.0], device="sim:0", requires_grad=True)
    b = torch.tensor([5.0, 7.0], requires_grad=True)
    reset_stats()
    torch.autograd.backward(((a * a).to("sim:1") * b.to("sim:1")).to("sim:2").sum())
    now = stats()
    assert (now.h2d, now.d2h, now.d2d) == (1, 1, 4)
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.device == a.device
    assert a.grad.tolist() == [20, 42]
    assert b.grad.tolist() == [4, 9]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("make", "shape"), [(conv_net, (4, 2, 6, 6)), (encoder, (3, 5, 8)), (recurrent, (3, 5, 3))])
def test_training_equals_cpu(
    make: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: type[torch.optim.Optimizer]
) -> None:
    """Training steps on a device lead to the CPU's parameters, buffers and loss."""
    torch.manual_seed(0)
    on_cpu = make().double()
    on_sim = copy.deepcopy(on_cpu).to("sim:3")
    x = torch.randn(shape, dtype=torch.float64)
    losses = []
    for model in (on_cpu, on_sim):
        torch.manual_seed(1)
        steps = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        inputs = x.to(next(model.parameters()).device)
        for _ in range(3):
            steps.zero_grad()
            output = model(inputs)
            loss = (output - torch.linspace(-1, 1, output.shape[-1]).to(output)).square().mean()
            loss.backward()
            steps.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    expected, actual = on_cpu.state_dict(), on_sim.state_dict()
    assert {t.device for t in actual.values()} == {torch.device("sim:3")}
    torch.testing.assert_close({name: t.cpu() for name, t in actual.items()}, dict(expected), rtol=1e-6, atol=1e-9)


def test_batch_norm_updates_running_statistics() -> None:
    """Batch normalisation in training updates the buffers on the device as it does on the CPU."""
    expected, actual = nn.BatchNorm1d(3), nn.BatchNorm1d(3).to("sim:1")
    x = torch.randn(8, 3)
    expected(x)
    actual(x.to("sim:1"))
    assert expected.running_mean is not None
    assert actual.running_mean is not None
    assert actual.running_mean.abs().sum() > 0
    torch.testing.assert_close(actual.running_mean.cpu(), expected.running_mean)


def test_encoder_inference_with_padding() -> None:
    """An encoder in evaluation mode takes a padding mask on the device."""
    on_cpu = encoder().eval()
    on_sim = copy.deepcopy(on_cpu).to("sim:1")
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        layers = [on_cpu(x[:1]), on_cpu(x[1:, :2])]
        actual = on_sim(x.to("sim:1"), src_key_padding_mask=mask.to("sim:1")).cpu()
    torch.testing.assert_close(actual[:1], layers[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[1:, :2], layers[1], rtol=1e-4, atol=1e-5)


def test_autocast() -> None:
    """Autocast gives products in bfloat16, softmax in float32 and gradients in the parameter's dtype."""
    model = nn.Linear(4, 3).to("sim:2")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = model(torch.ones(2, 4, device="sim:2"))
        result = product.softmax(-1)
    assert (product.dtype, result.dtype) == (torch.bfloat16, torch.float32)
    result.square().sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced_module() -> None:
    """A module traced on a device runs and trains there."""
    model, x = conv_net().to("sim:1"), torch.randn(2, 2, 6, 6, device="sim:1")
    model.eval()
    traced = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    for _ in range(3):
        torch.testing.assert_close(traced(x), model(x))
    traced(x).sum().backward()
    assert all(p.grad is not None and p.grad.device == x.device for p in model.parameters())


def test_threads_train_on_their_devices() -> None:
    """Four threads run fifty forward and backward passes, each on its device, and agree on the gradients."""
    torch.manual_seed(0)
    model, x = conv_net(), torch.randn(4, 2, 6, 6)
    gradients: list[list[Tensor]] = [[] for _ in range(4)]
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        try:
            replica = copy.deepcopy(model).to(f"sim:{index}")
            inputs = x.to(f"sim:{index}")
            start.wait()
            for _ in range(50):
                replica.zero_grad()
                replica(inputs).square().sum().backward()
            gradients[index] = [p.grad.cpu() for p in replica.parameters() if p.grad is not None]
        except BaseException as error:
            start.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(gradients[0]) == len(list(model.parameters()))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


# ---------------------------------------------------------------- modules


def test_module_moves_in_place() -> None:
    """A module moved to a device and back keeps its parameter objects."""
    model = nn.Linear(2, 2)
    weight = model.weight
    for device in ("sim:1", "sim:3", "cpu"):
        model.to(device)
        assert model.weight is weight
        assert weight.device == torch.device(device)


def test_deepcopy_and_state_dict_round_trip(tmp_path: Path) -> None:
    """A deep copy stays on its device in separate memory, and its state can be saved and loaded."""
    model = conv_net().to("sim:2")
    twin = copy.deepcopy(model)
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert other.device == torch.device("sim:2")
        assert other.data_ptr() != one.data_ptr()
        assert torch.equal(one, other)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for location in (None, "cpu", "sim:0"):
        state = torch.load(tmp_path / "state.pt", map_location=location)
        assert {t.device for t in state.values()} == {torch.device(location or "sim:2")}
        target = conv_net().to("sim:1")
        target.load_state_dict(state)
        for one, other in zip(model.state_dict().values(), target.state_dict().values(), strict=True):
            assert other.device == torch.device("sim:1")
            assert torch.equal(one.cpu(), other.cpu())
