"""Session fixtures that start the clusters. The root conftest loads them for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import require

if TYPE_CHECKING:  # every test run loads this file, even without the packages that clusters need
    from tests.clusters.ray_cluster import RayCluster
    from tests.clusters.slurm import SlurmCluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two Slurm nodes that take jobs from this process. Call `settle` after a test that leaves jobs or kills a node."""
    from tests.clusters.slurm import SlurmCluster, missing

    require("slurm", missing())
    with SlurmCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two Ray nodes that this process has not joined. RAY_ADDRESS has their address."""
    from tests.clusters.ray_cluster import RayCluster, missing

    require("ray", missing())
    with RayCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster
