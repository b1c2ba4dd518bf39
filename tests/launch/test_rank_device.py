"""The device of a rank on a node without the requested device."""

from __future__ import annotations

import pytest
import torch

from parawrap import Platform, PlatformError
from parawrap.launch.rank._set_up_rank import Place, set_up


def test_a_node_without_cuda_is_named_with_what_to_install(monkeypatch):
    """A GPU rank on a node with a CPU build of torch raises PlatformError, which names CUDA and the package to install."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    platform = Platform(device="slurm", n_gpus=1)
    place = Place(global_rank=0, local_rank=0, node=0, world_size=1, ranks_per_node=1)
    with pytest.raises(PlatformError) as caught:
        set_up(place, platform, None)
    message = str(caught.value)
    assert "CUDA" in message
    assert "torch" in message
    assert "install" in message
