"""The clusters as fixtures, which the root's conftest offers to all: from the first test that asks to the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import require

if TYPE_CHECKING:  # every run of tests loads this file, also where what clusters need is not installed
    from tests.clusters.ray_cluster import RayCluster
    from tests.clusters.slurm import SlurmCluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two nodes under Slurm, to which this process submits; `settle` it after a test that leaves jobs or kills a node."""
    from tests.clusters.slurm import SlurmCluster, missing

    require("slurm", missing())
    with SlurmCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two nodes under Ray, which this process has not joined: RAY_ADDRESS says where they are."""
    from tests.clusters.ray_cluster import RayCluster, missing

    require("ray", missing())
    with RayCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster
