"""Choose NeuronCores by name. They are counted from zero within the process.

On inf2 and trn1 with torch_neuronx, run it as it is. On another machine, use emulated cores::

    PARAWRAP_NEURON_RUNTIME=host python examples/neuron_specify_cores.py
"""

from __future__ import annotations

import torch
from small_resnet import IMAGE, report, small_resnet

from parawrap import DeviceUnavailableError, neuron, parallel


def main() -> None:
    """Use two cores by name, the same in a ``parallel`` block, and a core that does not exist."""
    model = small_resnet()
    compiled = neuron.trace(model, torch.rand(1, *IMAGE))
    images = torch.rand(5, *IMAGE)
    expected = model(images)

    net = neuron.DataParallel(compiled, device_ids=["nc:0", "nc:1"])  # the same as [0, 1]
    print(f"replicas on {net.device_ids}")
    report(images, net(images), expected)
    net.close()  # frees the cores' memory, as does the end of the block below

    with parallel(compiled, ["nc:0", "nc:1"]) as p:
        report(images, compiled(images), expected)
        for lane in p.stats().lanes:
            print(f"  a lane of {lane.label}: rows {lane.rows}")

    try:
        neuron.DataParallel(compiled, device_ids=[neuron.core_count()])
    except DeviceUnavailableError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
