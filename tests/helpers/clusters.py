"""Session fixtures that start the clusters. The root conftest loads them for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.tiers import require

if TYPE_CHECKING:  # every test run loads this file, even without the packages that clusters need
    from tests.helpers.ray_cluster import RayCluster
    from tests.helpers.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Two Slurm nodes that take jobs from this process.

    Call `settle` after a test that leaves jobs or kills a node.
    """
    from tests.helpers.slurm_cluster import SlurmCluster, missing

    require("slurm", missing())
    with SlurmCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two Ray nodes that this process has not joined. RAY_ADDRESS has their address."""
    from tests.helpers.ray_cluster import RayCluster, missing

    require("ray", missing())
    with RayCluster() as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster
