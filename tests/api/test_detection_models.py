"""Models that return lists of dicts: the auxiliary outputs of DETR, the stacks of CenterNet, and the boxes of images.

Such a list has one item per row, or the rows in each item. No batch size decides which.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, GatherError, ShardError, TupleParallel, cat, default_collate, parallel, tp_collate
from parawrap.backends import ignore_speed_warnings

TWO = ["cpu"] * 2
ROWS = [4, 5, 6, 8, 10]


class Detr(nn.Module):
    """Returns the outputs of its last layer, and those of the other layers in a list."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))

    def forward(self, images):
        x, found = images[:, None].repeat(1, 4, 1), []
        for layer in self.layers:
            x = layer(x).tanh()
            found.append({"pred_logits": x, "pred_boxes": x[..., :2].sigmoid()})
        return {**found[-1], "aux_outputs": found[:-1]}


@pytest.mark.parametrize("layers", [3, 4, 5, 6])
@pytest.mark.parametrize("rows", ROWS)
def test_auxiliary_outputs(rows, layers):
    """They are joined item by item, also with as many layers as rows in a lane."""
    model, images = Detr(layers), torch.randn(rows, 3)
    plain = model(images)
    parts = default_collate(2)(list(images))
    tuples = TupleParallel(model, TWO)
    for outputs in DataParallel(model, TWO)(images), TupleParallel(model, TWO, reduction=cat)(parts), cat(tuples(parts)):
        assert_close(outputs, plain)
    with parallel(model, TWO, out_dims=0):
        assert_close(model(images), plain)


def test_boxes_next_to_other_boxes():
    """Items that differ in shape from the tensors next to the list are not its auxiliary outputs."""
    x = torch.arange(8.0).view(4, 2)
    model = Outputs(lambda x: {"boxes": x[:, :1], "images": [{"boxes": row.repeat(2, 1)} for row in x]})
    with pytest.raises(GatherError, match="one item per row, or parts of every row"):
        DataParallel(model, TWO)(x)
    with pytest.raises(GatherError, match="one item per row, or all rows in each item"):
        TupleParallel(model, TWO, reduction=cat)(x.split(2))
    with ignore_speed_warnings(), parallel(model, TWO) as p:
        assert_close(p(x), model(x))


class Outputs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class CenterNet(nn.Module):
    """Returns one dict per stack, and with targets also a dict of losses."""

    def __init__(self, stacks, kind=list):
        super().__init__()
        self.stacks, self.kind = nn.ModuleList(nn.Linear(3, 3) for _ in range(stacks)), kind

    def forward(self, images, targets=None):
        layers = self.kind({"hm": stack(images), "wh": stack(images)[:, :2]} for stack in self.stacks)
        if targets is None:
            return layers
        centers = torch.stack([target["center"] for target in targets])
        return layers, {"hm": sum((layer["hm"] - centers).square().mean() for layer in layers)}


def images_and_targets(rows):
    """Return samples with an image and its target. The tensors of a target do not have the rows."""
    return [(torch.randn(3), {"center": torch.randn(3)}) for _ in range(rows)]


def collate(samples):
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


@pytest.mark.parametrize("rows", ROWS)
def test_stacks(rows):
    """A list with as many dicts as rows is refused. The cures of the message work with any number of rows."""
    model, images = CenterNet(2), collate(images_and_targets(rows))[0]
    parts = images.tensor_split(2)
    for call in lambda: DataParallel(model, TWO)(images), lambda: TupleParallel(model, TWO, reduction=cat)(parts):
        if rows == 4:
            with pytest.raises(GatherError, match=r"(?i)return a tuple"):
                call()
        else:
            assert_close(call(), model(images))
    as_tuple = CenterNet(2, tuple)
    assert_close(DataParallel(as_tuple, TWO)(images), as_tuple(images))
    assert_close(TupleParallel(as_tuple, TWO, reduction=cat)(parts), as_tuple(images))
    with ignore_speed_warnings(), parallel(model, TWO) as p:
        assert_close(p(images), model(images))


@pytest.mark.parametrize("rows", ROWS)
def test_losses_of_lists_of_targets(rows):
    """The rows of the images show that the stacks have the rows. A block takes the list of targets with `in_dims`."""
    model, samples = CenterNet(3), images_and_targets(rows)
    images, targets = collate(samples)
    plain, losses = model(images, targets)
    if rows != 6:  # as many stacks as rows in a lane
        layers, parts = TupleParallel(model, TWO, reduction=cat)(*tp_collate(2)(collate)(samples))
        assert_close(layers, plain)
        sizes = torch.tensor([len(each) for each in images.tensor_split(2)])
        assert_close((parts["hm"] * sizes).sum() / rows, losses["hm"])
    with pytest.raises(ShardError, match='for a list with one tensor per row, give "items"'):
        DataParallel(model, TWO)(images, targets)
    with ignore_speed_warnings(), parallel(model, TWO, in_dims={"targets": "items"}, reduce="mean") as p:
        assert_close(p(images, targets), (plain, losses))
