"""`functional.to(module, strategy="fsdp2")`: training and checkpoints with parameters sharded over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader, TensorDataset

from parawrap import current_rank, functional
from parawrap.functional._fsdp import blocks_of
from tests.helpers.ranks import on

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.layers(x)


class Net(nn.Module):
    """A network with a stem, a list of blocks, a head, and a buffer."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("seen", torch.randint(100, (2,)))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(strategy, batch_size, seed=0):
    """Train a net on 22 rows for two epochs. Return the net, the sharded model, the optimiser, and each step's loss."""
    torch.manual_seed(seed)
    net = Net()
    torch.manual_seed(7)
    loader = functional.shard_loader(
        DataLoader(TensorDataset(torch.randn(22, 3), torch.randn(22, 2)), batch_size, shuffle=True)
    )
    model = functional.to(net, strategy=strategy)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimiser.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimiser.step()
            losses.append(functional.reduce_metrics(loss.item(), weight=len(x)))
    return net, model, optimiser, losses


def test_sharded_training_equals_plain_training():
    """Two ranks with half the batch each have the losses and weights of one process, with "fsdp2" and with "ddp"."""

    def train(strategy, seeds):
        net, model, _, losses = trained(strategy, 4, seeds[current_rank().global_rank])
        weights = get_model_state_dict(net, options=WHOLE)
        again = functional.to(model, strategy=strategy)
        is_same = (model is net, again is model)
        held = sum(
            parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
            for parameter in net.parameters()
        )
        return losses, weights, is_same, held

    (losses, weights, same, held), (other_losses, others, _, other_held) = on(2, train, "fsdp2", [0, 1])
    (ddp_losses, ddp_weights, ddp_same, _), _ = on(2, train, "ddp", [0, 1])
    net, _, _, plain_losses = trained("fsdp2", 8)
    assert (same, ddp_same, others) == ((True, True), (False, True), {})
    assert losses == other_losses
    torch.testing.assert_close(losses, plain_losses)
    torch.testing.assert_close(ddp_losses, plain_losses)
    torch.testing.assert_close(weights, dict(net.state_dict()))
    torch.testing.assert_close(ddp_weights, dict(net.state_dict()))
    total = sum(parameter.numel() for parameter in net.parameters())
    assert held + other_held == total
    assert max(held, other_held) < 0.6 * total


def test_a_checkpoint_loads_into_plain_and_sharded_models(tmp_path):
    """A full state dict of a sharded model loads into a plain model, and with the optimiser into a new sharded model."""

    def train(folder):
        net, _, optimiser, _ = trained("fsdp2", 4)
        checkpoint = {
            "model": get_model_state_dict(net, options=WHOLE),
            "optimiser": get_optimizer_state_dict(net, optimiser, options=WHOLE),
        }
        if current_rank().global_rank == 0:
            torch.save(checkpoint, folder / "checkpoint.pt")
        return net(torch.ones(2, 3)).detach()

    def load(folder):
        torch.manual_seed(current_rank().global_rank + 5)
        model = functional.to(Net(), strategy="fsdp2")
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        is_first = current_rank().global_rank == 0
        checkpoint = torch.load(folder / "checkpoint.pt") if is_first else {"model": {}, "optimiser": {}}
        set_model_state_dict(model, checkpoint["model"], options=FROM_RANK_0)
        set_optimizer_state_dict(model, optimiser, checkpoint["optimiser"], options=FROM_RANK_0)
        steps = {float(state["step"]) for state in optimiser.state.values()}
        return model(torch.ones(2, 3)).detach(), steps

    answer, _ = on(2, train, tmp_path)
    plain = Net()
    plain.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["model"])
    torch.testing.assert_close(plain(torch.ones(2, 3)), answer)
    for found, steps in on(2, load, tmp_path):
        torch.testing.assert_close(found, answer)
        assert steps == {6.0}


def test_options_and_buffers():
    """Options are passed to fully_shard, ranks get rank 0's buffers, and one rank gets the plain module."""

    def shard():
        rank = current_rank().global_rank
        net = Net()
        net.seen.fill_(rank + 1)
        half = nn.Linear(2, 2)
        half.register_buffer("odd", torch.tensor([rank == 0]))
        options = {"reshard_after_forward": False}
        model = functional.to(net, strategy="fsdp2", **options)
        model(torch.ones(2, 3))
        kept = not hasattr(model.blocks[0].layers[0].weight, "to_local")
        moved = functional.to(Net(), strategy="fsdp2", sync_modules=False)
        frozen = functional.to(half.requires_grad_(False), strategy="fsdp2")
        return model.seen.tolist(), kept, type(moved).__name__, type(frozen).__name__, frozen.odd.item()

    assert on(2, shard) == (([1, 1], True, "Net", "FSDPLinear", True),) * 2
    assert on(1, lambda: type(functional.to(Net(), strategy="fsdp2")).__name__) == ("Net",)


def test_modules_that_differ_between_ranks_are_refused():
    """A module that differs between ranks, or is on the meta device, raises an error that names the parameter."""

    def shard():
        messages = []
        for module in (nn.Linear(2, 2 + current_rank().global_rank), nn.Linear(2, 2, device="meta")):
            with pytest.raises(ValueError) as error:
                functional.to(module, strategy="fsdp2")
            messages.append(str(error.value))
        return messages

    for differs, meta in on(2, shard):
        assert "rank 0's module has weight torch.float32 (2, 2), but rank 1's has weight torch.float32 (3, 2)" in differs
        assert "weight is on the meta device" in meta


def test_an_unknown_strategy_is_refused():
    """The error names the known strategies, also with one rank."""
    with pytest.raises(ValueError, match=r"strategy='fsdp' is not a known value\. Use 'ddp' or 'fsdp2'"):
        functional.to(nn.Linear(1, 1), strategy="fsdp")


class Tied(nn.Module):
    """Two of three blocks share a weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.blocks[1].weight = self.blocks[0].weight


def test_blocks_are_the_repeated_modules_of_lists():
    """A block has a sibling of its class in a ModuleList or Sequential, and shares no parameter with other modules."""
    net = Net()
    assert blocks_of(net) == list(net.blocks)
    plain = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.ReLU())
    assert blocks_of(plain) == [plain[0], plain[2], plain[3]]
    stages = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert blocks_of(stages) == [*stages[1], *stages[2]]
    tied = Tied()
    assert blocks_of(tied) == [tied.blocks[2]]
    twice = nn.Sequential(block := Block(), block, Block())
    assert blocks_of(twice) == [twice[0], twice[2]]
    assert blocks_of(nn.Linear(1, 1)) == []
