"""Rows that do not lie on dim 0: the frames of a clip, shared out over two NeuronCores on dim 1.

Dynamic batching works on dim 0 alone. On another dim a call has the compiled size times the number of cores, no more and no
less; ``set_dynamic_batching=False`` agrees to that, and spares the warning that would say so.

Run it on any machine, on emulated cores, and without the variable on inf2 and trn1, where torch_neuronx is installed::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_dim.py
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet
from torch import Tensor, nn

from parawrap import ShapeError, neuron

FRAMES = 4  # of an inference


class Frames(nn.Module):
    """The scores of every frame of a clip: (1, frames, 3, 32, 32) gives (1, frames, 10)."""

    def __init__(self, frame: nn.Module) -> None:
        super().__init__()
        self.frame = frame

    def forward(self, clip: Tensor) -> Tensor:
        scores: Tensor = self.frame(clip[0])
        return scores.unsqueeze(0)


def main() -> None:
    """Eight frames on two cores work, seven are refused."""
    model = Frames(small_resnet())
    compiled = neuron.trace(model, torch.rand(1, FRAMES, *IMAGE))
    net = neuron.DataParallel(compiled, device_ids=[0, 1], dim=1, set_dynamic_batching=False)

    clip = torch.rand(1, 2 * FRAMES, *IMAGE)
    report(clip, net(clip), model(clip), dim=1)
    try:
        net(clip[:, 1:])
    except ShapeError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
