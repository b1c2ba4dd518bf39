"""Parameters of replicas are linked to the model's: gradients keep their layout, and writes in place keep the links."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.replicas import ReplicaSet
from parawrap.replicas._gradients import Mirror, link_view, send

CPU, TWO = torch.device("cpu"), ["cpu"] * 2
SGD = partial(torch.optim.SGD, lr=0.1)
WRITERS = {
    "loop": partial(SGD, foreach=False),
    "foreach": partial(SGD, foreach=True),
    "fused": partial(SGD, fused=True),
    "momentum": partial(SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}


class TwoTables(nn.Module):
    """Looks up the same rows in a sparse and in a dense table, and one row twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4)

    def forward(self, x):
        return self.sparse(x) * self.dense(x) + self.sparse(x[:, :1])


@pytest.mark.parametrize("make", [TwoTables, lambda: nn.EmbeddingBag(9, 4, sparse=True)], ids=["tables", "bag"])
@pytest.mark.parametrize("zeroes", [True, False])
def test_sparse_gradients_stay_sparse(make, zeroes):
    """Gradients and weights equal the plain ones after every step, and without zero_grad, gradients add up."""
    model = make()
    plain = copy.deepcopy(model)
    optimizers = [SGD(each.parameters()) for each in (model, plain)]
    with parallel(model, ["cpu"] * 3):
        for _ in range(3):
            x = torch.randint(9, (11, 3))
            for each, steps in zip((model, plain), optimizers, strict=True):
                each(x).square().sum().backward()
                steps.step()
                if zeroes:
                    steps.zero_grad()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(mine, theirs)
                if not zeroes:
                    assert mine.grad.is_sparse == theirs.grad.is_sparse
                    assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("optimizer", WRITERS.values(), ids=WRITERS)
def test_views_keep_their_node(optimizer):
    """After a step, a lane's parameter has the same object, the same autograd node, and the new values."""
    model = nn.Linear(4, 4)
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    parameters = [parameter for replica in made.current for parameter in replica.module.parameters()]
    nodes = [parameter.grad_fn for parameter in parameters]
    assert None not in nodes
    steps = optimizer(list(model.parameters()))
    for _ in range(2):
        before = model.weight.detach().clone()
        model(torch.randn(9, 4)).square().sum().backward()
        steps.step()
        made.refresh()
        assert not torch.equal(model.weight, before)
        now = [parameter for replica in made.current for parameter in replica.module.parameters()]
        assert all(mine is first for mine, first in zip(now, parameters, strict=True))
        assert all(mine.grad_fn is node for mine, node in zip(now, nodes, strict=True))
        for replica in made.current:
            assert_close(dict(replica.module.named_parameters()), dict(model.named_parameters()))


def test_a_weight_written_before_backward():
    """As in a plain call, it is refused if the graph saved the weight, and accepted if not."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4, requires_grad=True)
    plain = copy.deepcopy(model)
    with parallel(model, TWO):
        for each in (model, plain):
            loss = each(x).square().sum()
            with torch.no_grad():
                each.bias.add_(1)
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad)
        loss = model(x).sum()
        SGD(model.parameters()).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(x).sum().backward()  # the next call works


# Copies on other devices. These mirrors lie on the CPU, too.


def test_a_mirror_has_linked_copies():
    """Gradients of a copy reach the parameter; stale copies are kept until they are written again."""
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    mirror = Mirror(CPU)
    assert mirror.take([weight, frozen]) == []
    copied = mirror.linked(weight)
    assert mirror.linked(weight) is copied
    assert copied.data_ptr() != weight.data_ptr()
    (copied * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3]
    assert not mirror.linked(frozen).requires_grad
    with torch.no_grad():
        weight.fill_(5)
    assert list(map(id, mirror.take([weight]))) == [id(weight)]
    assert copied.tolist() == [1, 1]
    assert send([mirror], [weight]) == 8
    assert copied.tolist() == [5, 5]
    assert (len([*mirror.held()]), send([mirror], []), send([], [weight])) == (1, 0, 0)
    version = copied._version
    mirror.advance([weight, frozen])
    assert copied._version == version + 1
    mirror.unlink()
    assert mirror.linked(weight) is not copied


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda data: data[:1], None], ids=["dtype", "shape", "frozen"])
def test_a_mirror_copies_other_forms_again(change):
    weight, mirror = nn.Parameter(torch.ones(2)), Mirror(CPU)
    mirror.take([weight])
    mirror.linked(weight)
    if change is None:
        weight.requires_grad_(False)
    else:
        weight.data = change(weight.data)
    assert mirror.take([weight]) == []
    copied = mirror.linked(weight)
    assert (copied.dtype, copied.shape, copied.requires_grad) == (weight.dtype, weight.shape, weight.requires_grad)


def test_link_view_keeps_memory_and_version():
    weight = nn.Parameter(torch.ones(2))
    view = link_view(weight, nn.Parameter)
    assert (type(view), view.data_ptr()) == (nn.Parameter, weight.data_ptr())
    (view * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2]
    with torch.no_grad():
        weight.add_(1)
    assert view._version == weight._version == 1
    assert not link_view(weight.requires_grad_(False), nn.Parameter).requires_grad
