"""A function for a cluster where no cluster is: each cure that a message names leads to a run that
works.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

from parawrap import LaunchError, Platform, current_rank, wrapper
from parawrap.errors import PlatformError
from tests.contract.table import check_cell
from tests.helpers.torchrun_world import ROOT

LOCAL = re.compile(r"launcher='local'")


def place():
    rank = current_rank()
    return rank.global_rank, rank.world_size


def refusal_of(make, *cell):
    """Return the message of a refusal; fail if docs/launch_failures.md has another one in this
    cell.
    """
    with pytest.raises((LaunchError, PlatformError)) as raised:
        make()
    if cell:
        check_cell(*cell, raised.value)
    return str(raised.value)


def follow(platform, message, size):
    assert LOCAL.search(message), message
    cured = replace(platform, launcher="local", verbose=False)
    assert list(wrapper(cured)(place)()) == [(rank, size) for rank in range(size)]


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_no_commands_of_slurm(no_slurm):
    platform = Platform(device="slurm", n_nodes=2, n_cpus=1)
    message = refusal_of(lambda: wrapper(platform)(place)(), "no cluster", "slurm")
    assert message.startswith("sbatch is not installed here")
    follow(platform, message, 2)


def test_no_folder_for_the_launch(no_slurm, monkeypatch):
    """The message names the variable that selects another folder."""
    (no_slurm / "file").touch()
    (no_slurm / "sbatch").touch(0o755)
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(no_slurm / "file"))
    platform = Platform(device="slurm", n_nodes=2, n_cpus=1)
    message = refusal_of(lambda: wrapper(platform)(place)(), "launch folder", "slurm")
    assert message.startswith(f"{no_slurm}/file cannot be written to")
    assert "set PARAWRAP_LAUNCH_DIR to a folder that all nodes share" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_no_slurm_and_no_gpus(no_slurm):
    """The first cure leads to a second one."""
    platform = Platform(device="slurm", n_nodes=2, n_gpus=2)
    assert LOCAL.search(refusal_of(lambda: wrapper(platform)(place)()))
    message = refusal_of(lambda: replace(platform, launcher="local"))
    assert "give device='cpu', with n_cpus as the number of ranks instead of n_gpus" in message
    cured = replace(platform, launcher="local", device="cpu", n_gpus=None, n_cpus=2, verbose=False)
    assert list(wrapper(cured)(place)()) == [(rank, 4) for rank in range(4)]
    message = refusal_of(lambda: wrapper(platform)(place).inline())
    assert "give Platform(device='cpu')" in message
    assert list(wrapper(Platform(device="cpu"))(place).inline()) == [(0, 1)]


def test_slurm_refuses_the_job(no_slurm):
    for name in ("sbatch", "srun", "scontrol", "scancel"):
        (no_slurm / name).write_text(
            "#!/bin/sh\necho 'sbatch: error: invalid partition specified: nowhere' >&2\nexit 1\n"
        )
        (no_slurm / name).chmod(0o755)
    platform = Platform(device="slurm", n_nodes=2, partition="nowhere")
    message = refusal_of(lambda: wrapper(platform)(place)())
    assert "Slurm refused the job: invalid partition specified: nowhere" in message
    follow(platform, message, 2)


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_launchers_without_their_package(name, package, monkeypatch):
    for module in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    platform = Platform(device=name, n_nodes=2, n_cpus=1)
    message = refusal_of(lambda: wrapper(platform)(place)(), "no extra", name)
    extra = re.search(r"pip install 'parawrap-torch\[(\w+)\]'", message)
    assert f"\n{extra[1]} =" in (ROOT / "setup.cfg").read_text()
    follow(platform, message, 2)


def test_no_cluster_of_ray(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    platform = Platform(device="ray", n_nodes=2)
    message = refusal_of(lambda: wrapper(platform)(place)())
    assert message.startswith("the Ray cluster at RAY_ADDRESS=127.0.0.1:1 cannot be joined: ")
    follow(platform, message, 2)


def test_no_surrounding_world():
    function = wrapper(Platform(device="cpu", n_cpus=1, launcher="env"))(place)
    for call in function, function.dry_run:
        message = refusal_of(call)
        assert message.startswith(
            "launcher='env' needs a process that torchrun, srun, or mpirun started"
        )
        assert "leave launcher out" in message
    assert list(wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(place)()) == [(0, 1)]
