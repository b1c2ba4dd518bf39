"""The device of a rank on a node that lacks what the platform asks for."""

from __future__ import annotations

import pytest
import torch

from parawrap import Platform, PlatformError
from parawrap.launch.ranks._setup import Place, set_up


def test_a_node_without_cuda_is_named_with_what_to_install(monkeypatch):
    """A GPU rank raises PlatformError where torch was built for CPUs: what the node lacks, and what to install."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    platform = Platform(device="slurm", n_gpus=1)
    place = Place(global_rank=0, local_rank=0, node=0, world_size=1, ranks_per_node=1)
    with pytest.raises(PlatformError) as caught:
        set_up(place, platform, None)
    said = str(caught.value)
    assert "CUDA" in said
    assert "torch" in said
    assert "install" in said
