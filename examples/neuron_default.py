"""Run a compiled model on every NeuronCore of the process, with any number of rows per call.

On inf2 and trn1 with torch_neuronx, run it as it is. On another machine, use emulated cores::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_default.py

NEURON_RT_NUM_CORES=4 gives the process four cores, real or emulated.
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet

from parawrap import neuron


def main() -> None:
    """Compile for one image, then give each core two images, and one core a third."""
    model = small_resnet()
    compiled = neuron.trace(model, torch.rand(1, *IMAGE))
    net = neuron.DataParallel(compiled)
    print(f"{neuron.core_count()} NeuronCores in this process, replicas on {net.device_ids}")

    images = torch.rand(2 * len(net.device_ids) + 1, *IMAGE)
    report(images, net(images), model(images))


if __name__ == "__main__":
    main()
