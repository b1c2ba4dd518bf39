"""`collect` returns the outputs of layers in the order of the rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing import assert_close

from parawrap import collect, parallel

TWO = ["cpu"] * 2


class Net(nn.Module):
    """Two layers; the second runs twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return self.second(self.second(self.first(x) * scale).tanh())


def test_outputs_of_layers():
    """Outputs of layers are those of the plain call. No hook stays, and the modes of layers do not
    change.
    """
    model, x = Net(), torch.randn(9, 3)
    model.second.eval()
    features = collect(model, ["first", ""])

    def step():
        model.zero_grad()
        outputs = features(x, scale=2.0)
        outputs["first"].square().sum().backward()
        return outputs, model.first.weight.grad.clone()

    plain = step()
    with parallel(features, TWO, out_dims=0):
        assert_close(step(), plain)
    assert_close(plain[0], {"first": model.first(x), "": model(x, scale=2.0)})
    assert not model.first._forward_hooks
    assert [features.training, model.training, model.first.training, model.second.training] == [
        True,
        True,
        True,
        False,
    ]


def test_names_from_an_iterator():
    """`layers` may be an iterator, such as a generator over the names of modules."""
    model, x = Net(), torch.randn(9, 3)
    features = collect(model, (name for name, _ in model.named_modules() if name == "first"))
    assert_close(features(x), {"first": model.first(x)})


def test_an_output_that_is_overwritten():
    """The output before ReLU(inplace=True) is kept, with its gradients, also in inference mode."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(9, 3)
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode(), parallel(collect(model, ["0", "1"]), TWO, out_dims=0) as p:
            assert_close(p(x), {"0": model[0](x), "1": model(x)})
