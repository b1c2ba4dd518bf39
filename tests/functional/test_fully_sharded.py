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
    data = TensorDataset(torch.randn(22, 3), torch.randn(22, 2))
    loader = functional.shard_loader(DataLoader(data, batch_size, shuffle=True))
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


def size_of(net):
    """Return how many numbers this rank holds."""
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in net.parameters())


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Observations of two ranks that train with "ddp" and "fsdp2", and load the checkpoint of "fsdp2"."""

    def train(path):
        rank = current_rank().global_rank
        found = {}
        for strategy in ("ddp", "fsdp2"):
            net, model, optimiser, losses = trained(strategy, 4, seed=rank)
            weights = get_model_state_dict(net, options=WHOLE)
            is_same = model is net, functional.to(model, strategy=strategy) is model
            found[strategy] = losses, weights, is_same, size_of(net)
        saved = {"model": weights, "optimiser": get_optimizer_state_dict(net, optimiser, options=WHOLE)}
        if rank == 0:
            torch.save(saved, path)
        torch.manual_seed(rank + 5)
        model = functional.to(Net(), strategy="fsdp2")
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        checkpoint = torch.load(path) if rank == 0 else {"model": {}, "optimiser": {}}
        set_model_state_dict(model, checkpoint["model"], options=FROM_RANK_0)
        set_optimizer_state_dict(model, optimiser, checkpoint["optimiser"], options=FROM_RANK_0)
        steps = {float(state["step"]) for state in optimiser.state.values()}
        return found, model(torch.ones(2, 3)).detach(), net(torch.ones(2, 3)).detach(), steps

    path = tmp_path_factory.mktemp("fsdp") / "checkpoint.pt"
    return path, on(2, train, path)


def test_training_equals_plain_training(trainings):
    """Two ranks with half the batch each have the losses and weights of one process. Each holds half of the numbers."""
    _, ((one, *_), (other, *_)) = trainings
    net, _, _, plain_losses = trained("fsdp2", 8)
    for strategy, is_same in (("fsdp2", (True, True)), ("ddp", (False, True))):
        losses, weights, found, _ = one[strategy]
        assert (losses, found) == (other[strategy][0], is_same)
        torch.testing.assert_close(losses, plain_losses)
        torch.testing.assert_close(weights, dict(net.state_dict()))
    held = one["fsdp2"][3], other["fsdp2"][3]
    assert other["fsdp2"][1] == {}
    assert sum(held) == size_of(net)
    assert max(held) < 0.6 * sum(held)


def test_checkpoint_loads_anywhere(trainings):
    """The full state of a sharded model loads into a plain model, and with the optimiser into a new sharded model."""
    path, results = trainings
    plain = Net()
    plain.load_state_dict(torch.load(path)["model"])
    for _, loaded, trained_answer, steps in results:
        torch.testing.assert_close(loaded, trained_answer)
        torch.testing.assert_close(plain(torch.ones(2, 3)), trained_answer)
        assert steps == {6.0}


def test_options_and_buffers(ranks):
    """Options are passed to fully_shard, ranks get rank 0's buffers, and one rank gets the plain module."""

    def shard():
        rank = current_rank().global_rank
        net = Net()
        net.seen.fill_(rank + 1)
        model = functional.to(net, strategy="fsdp2", reshard_after_forward=False)
        model(torch.ones(2, 3))
        kept = not hasattr(model.blocks[0].layers[0].weight, "to_local")
        moved = functional.to(Net(), strategy="fsdp2", sync_modules=False)
        frozen = functional.to(nn.Linear(2, 2).requires_grad_(False), strategy="fsdp2")
        return model.seen.tolist(), kept, type(moved).__name__, type(frozen).__name__

    assert ranks(shard) == (([1, 1], True, "Net", "FSDPLinear"),) * 2
    assert type(functional.to(Net(), strategy="fsdp2")) is Net


def test_other_modules_are_refused(ranks):
    """So are modules on the meta device, and unknown strategies. The error names the parameter or the strategies."""

    def shard():
        differs = "rank 0's module has weight torch.float32 (2, 2), but rank 1's has weight torch.float32 (3, 2)"
        width = 2 + current_rank().global_rank
        for module, words in ((nn.Linear(2, width), differs), (nn.Linear(2, 2, device="meta"), "weight is on the meta")):
            with pytest.raises(ValueError) as error:
                functional.to(module, strategy="fsdp2")
            assert words in str(error.value)

    ranks(shard)
    with pytest.raises(ValueError, match=r"strategy='fsdp' is not a known value\. Use 'ddp' or 'fsdp2'"):
        functional.to(nn.Linear(1, 1), strategy="fsdp")
