"""Run batches of any size with a model that is compiled for one size.

A core always computes the compiled number of rows, so a batch is cut into inferences of that size.
If the last inference has too few rows, it is filled with other rows of the batch, and their outputs
are dropped.

On inf2 and trn1 with torch_neuronx, run it as it is. On another machine, use emulated cores::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_dynamic_batching.py
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet

from parawrap import neuron


def main() -> None:
    """Run 2 to 6 images with a model for one image, and 3 to 6 images with a model for two."""
    model = small_resnet()
    for compiled_rows, batches in ((1, (2, 3, 4, 5, 6)), (2, (3, 4, 5, 6))):
        compiled = neuron.trace(model, torch.rand(compiled_rows, *IMAGE))
        net = neuron.DataParallel(compiled)
        print(f"compiled for {compiled_rows}:")
        for batch in batches:
            images = torch.rand(batch, *IMAGE)
            report(images, net(images), model(images))
        net.close()


if __name__ == "__main__":
    main()
