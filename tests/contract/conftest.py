"""The launchers of the contract suite, from the first test that asks for one to the end of a run."""

from __future__ import annotations

import pytest

from tests.contract.harness import Handled, Inline, OnSlurm, Torchrun
from tests.contract.table import SEEN

_PARAMS = [
    "inline",
    "local",
    "torchrun",
    pytest.param("slurm", marks=pytest.mark.slurm),
    pytest.param("ray", marks=pytest.mark.ray),
]


@pytest.fixture(scope="session", params=_PARAMS)
def launcher(request, tmp_path_factory):
    """One of the launchers, with what it needs."""
    made = _made(request, tmp_path_factory)
    yield made
    made.stop()


def _made(request, tmp_path_factory):
    if request.param == "inline":
        return Inline()
    if request.param == "local":
        return Handled("local", 1, device="cpu", launcher="local")
    if request.param == "torchrun":
        return Torchrun(tmp_path_factory.mktemp("torchrun"))
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return Handled("ray", 2, device="ray")
    return OnSlurm(request.getfixturevalue("slurm_launches"))


@pytest.fixture(scope="session")
def slurm_launches(slurm, tmp_path_factory):
    """The Slurm cluster, with a folder for launches that all its nodes share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path_factory.mktemp("launches")))
        yield slurm


@pytest.fixture
def seen_by_user(launcher):
    """Note what a user of this launcher sees of a failure, for the table in the docs."""
    return lambda situation, seen: SEEN.note(situation, launcher.name, seen)
