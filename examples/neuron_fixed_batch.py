"""Disable dynamic batching: every core must get exactly the compiled number of rows.

On inf2 and trn1 with torch_neuronx, run it as it is. On another machine, use emulated cores::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_fixed_batch.py
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet

from parawrap import ShapeError, neuron


def main() -> None:
    """Run a model for one image on two cores: four images raise an error, two images work."""
    model = small_resnet()
    compiled = neuron.trace(model, torch.rand(1, *IMAGE))
    net = neuron.DataParallel(compiled, device_ids=[0, 1])
    net.disable_dynamic_batching()

    images = torch.rand(4, *IMAGE)
    try:
        net(images)
    except ShapeError as error:
        print(f"refused: {error}")
    report(images[:2], net(images[:2]), model(images[:2]))


if __name__ == "__main__":
    main()
