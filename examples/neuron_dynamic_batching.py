"""Batches of any size through a model that is compiled for one size.

A core always computes the compiled number of rows. A batch is cut into as many inferences as that takes. The last one, if
rows are missing, is filled up with rows of the batch itself, and what these give is dropped. A batch that is too small to
keep every core busy is told of in a warning.

Run it on any machine, on emulated cores, and without the variable on inf2 and trn1, where torch_neuronx is installed::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_dynamic_batching.py
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet

from parawrap import neuron


def main() -> None:
    """Batches of 2 to 6 images through a model for one image, and of 3 to 6 through one for two."""
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
