"""`collect` returns the outputs of layers in the order of the rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import GatherError, ShardError, collect, parallel

TWO = ["cpu"] * 2


class Net(nn.Module):
    """Two layers; the second runs twice, and the third never."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return self.second(self.second(self.first(x) * scale).tanh())


def test_outputs_are_in_row_order():
    """The joined outputs of a layer are those of the plain call, with keyword arguments."""
    model, x = Net(), torch.randn(9, 3)
    features = collect(model, ["first", ""])
    plain = features(x, scale=2.0)
    with torch.no_grad(), parallel(features, TWO, out_dims=0):
        assert_close(features(x, scale=2.0), plain)
    assert_close(plain, {"first": model.first(x), "": model(x, scale=2.0)})
    assert not model.first._forward_hooks


def test_gradients_flow_from_a_layer():
    """A loss on the output of a layer gives the parameters before it the plain gradients."""
    model, x = Net(), torch.randn(9, 3)
    features = collect(model, ["first"])
    features(x)["first"].square().sum().backward()
    plain = model.first.weight.grad.clone()
    model.zero_grad()
    with parallel(features, TWO, out_dims=0):
        features(x)["first"].square().sum().backward()
    assert_close(model.first.weight.grad, plain)


@pytest.mark.parametrize(("layer", "times"), [("second", 2), ("third", 0)])
def test_a_layer_must_run_once(layer, times):
    """A layer that does not run, or runs twice, has no single output. No hook stays."""
    model = Net()
    with pytest.raises(GatherError, match=f"'{layer}' ran {times} times"):
        collect(model, [layer])(torch.randn(4, 3))
    assert not model.get_submodule(layer)._forward_hooks


def test_an_unknown_layer_is_refused():
    """The error names the layer, before any call."""
    with pytest.raises(ShardError, match="Net has no submodule 'fourth'"):
        collect(Net(), ["fourth"])


def test_the_modes_of_layers_stay():
    """A frozen layer stays in eval mode, and the model in training mode."""
    model = Net().train()
    model.second.eval()
    features = collect(model, ["first"])
    assert [features.training, model.training, model.first.training, model.second.training] == [True, True, True, False]


def test_one_name_is_refused():
    """A text is not a sequence of names."""
    with pytest.raises(ShardError, match=r"Give a sequence of names: \['first'\]"):
        collect(Net(), "first")


def test_an_output_that_a_later_layer_overwrites():
    """The output of a layer before ReLU(inplace=True) is refused; in inference mode, which counts no writes, it is kept."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), torch.randn(9, 3)
    with pytest.raises(GatherError, match=r"wrote the output of '0' in place.*Name the later layer"):
        collect(model, ["0"])(x)
    assert_close(collect(model, ["1"])(x)["1"], model(x))
    with torch.inference_mode(), parallel(collect(model, ["0"]), TWO, out_dims=0) as p:
        assert_close(p(x)["0"], model[0](x))
