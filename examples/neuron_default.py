"""A compiled model on every NeuronCore of the process, and any number of rows through it.

Run it on any machine, on emulated cores, and without the variable on inf2 and trn1, where torch_neuronx is installed::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_default.py

NEURON_RT_NUM_CORES=4 gives the process four cores, here and there.
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet

from parawrap import neuron


def main() -> None:
    """Compile for one image, then give each core two images, and one of them a third."""
    model = small_resnet()
    compiled = neuron.trace(model, torch.rand(1, *IMAGE))
    net = neuron.DataParallel(compiled)
    print(f"{neuron.core_count()} NeuronCores in this process, replicas on {net.device_ids}")

    images = torch.rand(2 * len(net.device_ids) + 1, *IMAGE)
    report(images, net(images), model(images))


if __name__ == "__main__":
    main()
