"""Session fixtures with the launchers of the contract suite."""

from __future__ import annotations

import pytest

from tests.contract.harness import InlineLauncher, SlurmLauncher, SubmitLauncher, TorchrunLauncher
from tests.contract.table import RECORDED

_PARAMS = [
    "inline",
    "local",
    "torchrun",
    pytest.param("slurm", marks=pytest.mark.slurm),
    pytest.param("ray", marks=pytest.mark.ray),
]


@pytest.fixture(scope="session", params=_PARAMS)
def launcher(request, tmp_path_factory):
    """Each launcher in turn, with the cluster or the processes that it needs."""
    made = _make_launcher(request, tmp_path_factory)
    yield made
    made.stop()


def _make_launcher(request, tmp_path_factory):
    if request.param == "inline":
        return InlineLauncher()
    if request.param == "local":
        return SubmitLauncher("local", 1, device="cpu", launcher="local")
    if request.param == "torchrun":
        return TorchrunLauncher(tmp_path_factory.mktemp("torchrun"))
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return SubmitLauncher("ray", 2, device="ray")
    return SlurmLauncher(request.getfixturevalue("slurm_launches"))


@pytest.fixture(scope="session")
def slurm_launches(slurm, tmp_path_factory):
    """The Slurm cluster, with a launch folder that all its nodes share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path_factory.mktemp("launches")))
        yield slurm


@pytest.fixture
def note_for_page(launcher):
    """Record how this launcher behaves in a situation, for the table in the docs."""
    return lambda situation, behaviour: RECORDED.note(situation, launcher.name, behaviour)
