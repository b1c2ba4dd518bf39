"""Functions with platforms that a rank makes again when it imports this module."""

import os

from parawrap import Platform, wrapper

GROUPS = [[0], [1]]
TWO = wrapper(Platform(device="neuron", n_gpus=2, ipc_groups=GROUPS, verbose=False))
Platform(device="neuron", ipc_groups=[[0, 1], [2, 3]], print_ranks=[3])
NAMED = wrapper(Platform(device="neuron", device_ids=[3, 2], verbose=False))


@TWO
def of_two():
    return os.environ["NEURON_RT_VISIBLE_CORES"]


@NAMED
def of_named():
    return os.environ["NEURON_RT_VISIBLE_CORES"]
