"""Split the frames of a clip, which lie on dim 1, over two NeuronCores.

Dynamic batching works only on dim 0. On another dim, each call must have exactly the compiled size
times the number of cores. ``set_dynamic_batching=False`` silences the warning about it.

On inf2 and trn1 with torch_neuronx, run it as it is. On another machine, use emulated cores::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_dim.py
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet
from torch import Tensor, nn

from parawrap import ShapeError, neuron

FRAMES = 4  # per inference


class Frames(nn.Module):
    """A classifier of each frame of a clip: (1, frames, 3, 32, 32) to (1, frames, 10)."""

    def __init__(self, frame: nn.Module) -> None:
        super().__init__()
        self.frame = frame

    def forward(self, clip: Tensor) -> Tensor:
        scores: Tensor = self.frame(clip[0])
        return scores.unsqueeze(0)


def main() -> None:
    """Run eight frames on two cores, then show the error for seven frames."""
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
