"""Each error of a platform and of a launch names a cure. The code with the cure gives the right result."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from parawrap import LaunchError, Platform, RankDiedError, current_rank, wrapper
from parawrap.errors import LaunchCancelledError, PlatformError, UnsendableError
from parawrap.launch.slurm.launch_folder import Folder
from tests.helpers.ranks import all_sum, my_rank
from tests.helpers.waiting import PATIENCE_S, eventually
from tests.helpers.worlds import environment

LONGEST = 1e7
TWO = Platform(device="cpu", n_cpus=2, verbose=False)


def place():
    """Return the rank, the number of ranks, and the size of the rank's process group."""
    rank = current_rank()
    return rank.global_rank, rank.world_size, None if rank.group is None else rank.group.size()


@pytest.fixture(scope="module")
def ranks():
    with TWO.open() as opened:
        yield opened


# -- platforms

VALUES = [
    # the refused field, the message, and the values that it names
    ({"name": ""}, "give a non-empty string", ["training"]),
    ({"device": "tpu"}, "give auto, cpu, gpu, mps, neuron, slurm or ray", ["cpu", "auto"]),
    ({"launcher": "kubernetes"}, "give env, local, ray or slurm, or None", ["local", None]),
    ({"partition": ""}, "give a non-empty string, or None", ["short", None]),
    ({"n_nodes": 0}, "give a number of machines, at least 1", [1]),
    ({"max_restarts": -1}, "give a number of restarts, at least 0", [0, 1]),
    ({"master_addr": 1}, "give a non-empty string, or None", ["127.0.0.1", None]),
    ({"master_port": -1}, "give a port, at most 65535, or 0 for any free one", [0]),
    ({"seed": "scripts"}, "give a number from 0 to 4294967295, 'script' .*, or None", [2**32 - 1, "script", None]),
    ({"verbose": 1}, "give True or False", [False]),
    ({"upon_finish": 1}, "give a callable, or None", [os.getpid, None]),
    ({"slurm_additional_parameters": [1]}, "give a dict, or None", [{"account": "me"}, None]),
    ({"backend": "smoke"}, "this build of torch supports .*gloo", ["gloo", "cpu:gloo"]),
    ({"ipc_protocol": "udp"}, "give tcp or file, or None", ["tcp", "file", None]),
    ({"grace_s": -1}, r"give a number of seconds, at least 0, at most 1e\+07", [LONGEST, 0]),
    ({"timeout_min": 0}, r"give a number of minutes above 0, at most 1e\+07, or None", [LONGEST, None]),
    ({"hang_timeout_s": 0}, r"give a number of seconds above 0, at most 1e\+07, or None", [LONGEST, None]),
    ({"ipc_timeout_min": 0}, r"give a number of minutes above 0, at most 1e\+07, or None", [LONGEST, None]),
    ({"ram": 0}, r"give a number of GB above 0, at most 1e\+07, or None", [LONGEST, None]),
    ({"print_ranks": (2,)}, r"give None, or global ranks from 0 to 1, such as \(0,\)", [(0,), (1,), None]),
    ({"ipc_groups": [[0, 0]]}, "rank 0 appears twice: put each rank into one group at most", [[[0, 1]]]),
    ({"ipc_groups": [[0, 2]]}, "rank 2 does not exist: give ranks from 0 to 1", [[[0, 1]]]),
    ({"ipc_groups": [0, 1]}, "give None, .. or lists of global ranks", [[[1, 0]], []]),
]


@pytest.mark.parametrize("choice", [0, -1], ids=["first", "last"])
def test_cures_of_values(choice):
    """Two ranks meet on a platform with the first values that the messages name, and with the last ones."""
    fields = {"device": "cpu", "n_cpus": 2}
    for refused, says, values in VALUES:
        with pytest.raises(PlatformError, match=f"^{next(iter(refused))}=.*: {says}"):
            replace(TWO, **refused)
        fields |= dict.fromkeys(refused, values[choice])
    assert list(wrapper(Platform(**fields))(place)()) == [(0, 2, 2), (1, 2, 2)]


def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def a_mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


PLATFORMS = [
    # the machine, the refused fields, the message, the fields with its cures, and the number of ranks
    (no_cuda, {"n_cpu": 2}, "give n_cpus or n_gpus", [{"n_cpus": 2, "device": "cpu"}], 2),
    (no_cuda, {"device": "cpu", "n_gpus": 2}, "leave n_gpus out, and set n_cpus to", [{"device": "cpu", "n_cpus": 2}], 2),
    (no_cuda, {"device": "auto", "n_gpus": 2}, "leave n_gpus out, and set n_cpus to", [{"device": "auto", "n_cpus": 2}], 2),
    (no_cuda, {"device": "gpu"}, "give 'cpu'", [{"device": "cpu"}], 1),
    (no_cuda, {"device": "gpu", "n_gpus": 2}, "'cpu', with n_cpus as the number", [{"device": "cpu", "n_cpus": 2}], 2),
    (four_gpus, {"device": "gpu", "n_gpus": 5}, "give at most 4", [{"device": "gpu", "n_gpus": 4}], 4),
    (four_gpus, {"device": "gpu", "n_gpus": 0}, "at least 1, or None for all", [{"device": "gpu", "n_gpus": None}], 4),
    (
        a_mac,
        {"device": "mps", "n_gpus": 2},
        "give 1, or None",
        [{"device": "mps", "n_gpus": each} for each in (1, None)],
        1,
    ),
    (no_cuda, {"device": "gpu", "launcher": "slurm"}, "give a number per node", [{"device": "slurm", "n_gpus": 2}], 2),
    (no_cuda, {"device": "ray", "ipc_protocol": "file"}, "give 'tcp'", [{"device": "ray", "ipc_protocol": "tcp"}], 1),
    (
        no_cuda,
        {"device": "slurm", "launcher": "ray"},
        "leave one of them out, or give 'local'",
        [{"device": "slurm"}, {"launcher": "ray"}, {"device": "slurm", "launcher": "local"}],
        1,
    ),
]


@pytest.mark.parametrize(("machine", "refused", "says", "cures", "size"), PLATFORMS, ids=range(len(PLATFORMS)))
def test_cures_of_platforms(machine, refused, says, cures, size, monkeypatch):
    """Platforms of this machine run. Other platforms are made."""
    machine(monkeypatch)
    with pytest.raises(PlatformError, match=re.escape(says)):
        Platform(**refused)
    for cure in cures:
        platform = Platform(**cure, verbose=False)
        assert platform.world_size == size
        if platform.device == "cpu" and platform.launcher in (None, "local"):
            assert list(wrapper(platform)(place)()) == [(rank, size, size) for rank in range(size)]


def test_too_many_gpus_of_all_nodes(monkeypatch):
    four_gpus(monkeypatch)
    with pytest.raises(PlatformError, match="give at most 4 on all nodes together"):
        Platform(device="slurm", n_nodes=2, n_gpus=4, launcher="local")
    assert Platform(device="slurm", n_nodes=2, n_gpus=2, launcher="local").world_size == 4


def test_counts_that_slurm_gets_twice():
    pytest.importorskip("submitit")
    platform = replace(TWO, launcher="slurm", slurm_additional_parameters={"nodes": 3, "account": "me"})
    says = "leave nodes out, as n_nodes, n_cpus, and n_gpus set it"
    with pytest.raises(PlatformError, match=says):
        wrapper(platform)(place).dry_run()
    cured = replace(platform, n_nodes=3, slurm_additional_parameters={"account": "me"})
    script = wrapper(cured)(place).dry_run().script
    assert "#SBATCH --nodes=3" in script
    assert "#SBATCH --account=me" in script


def test_a_launch_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="set PARAWRAP_LAUNCH_DIR to a folder that all nodes share"):
        Folder.new("place", 1)
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "shared"))
    (folder,) = Folder.new("place", 1)
    assert (folder.root, folder.path.is_dir()) == (tmp_path / "shared", True)


# -- launches


def test_a_log_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    refused = replace(TWO, console_logs=tmp_path / "file")
    with pytest.raises(LaunchError, match=r"cannot be written to: .*; give another folder, or None"):
        wrapper(refused)(print)("hello")
    wrapper(replace(refused, console_logs=tmp_path / "logs"))(print)("hello")
    assert [path.read_text() for path in (tmp_path / "logs").glob("*/rank-*.log")] == ["hello\n", "hello\n"]
    assert list(wrapper(replace(refused, console_logs=None))(my_rank)()) == [0, 1]


def wait_for(path):
    eventually(path.exists, "the file")
    return my_rank()


def test_results_that_are_late(tmp_path):
    """The message names two ways to continue."""
    function = wrapper(TWO)(wait_for)
    says = r"still run after 0 seconds, and they continue: call results\(\) again, or cancel\(\)"
    for cure in "results", "cancel":
        launch = function.submit(tmp_path / cure)
        with pytest.raises(TimeoutError, match=says):
            launch.results(0)
        if cure == "results":
            (tmp_path / cure).touch()
            assert list(launch.results(PATIENCE_S)) == [0, 1]
        else:
            launch.cancel()
            with pytest.raises(LaunchCancelledError):
                launch.results(0)


def test_a_call_outside_of_a_rank():
    with pytest.raises(LaunchError) as caught:
        place()
    for cure in "function decorated with @wrapper(Platform(...))", ".inline(...) to run it here as rank 0 of 1":
        assert cure in str(caught.value)
    assert list(wrapper(TWO)(place)()) == [(0, 2, 2), (1, 2, 2)]
    assert list(wrapper(TWO)(place).inline()) == [(0, 1, 1)]


def numbers():
    yield 1


def test_cures_of_calls(ranks):
    """Of calls of ranks that stay, and of handles."""
    launch = ranks.submit(my_rank)
    assert list(launch.results()) == [0, 1]
    for fails, says, cured, result in [
        (lambda: ranks(3), "ranks cannot run 3, .*Give it a function", lambda: [*ranks(my_rank)], [0, 1]),
        (lambda: ranks(numbers), "Return values instead", lambda: [*ranks(lambda: list(numbers()))], [[1], [1]]),
        (lambda: ranks[2], "rank=2: there are the ranks 0 to 1", lambda: [ranks[0](my_rank), ranks[1](my_rank)], [0, 1]),
        (lambda: ranks.logs(2), "rank=2: there are the ranks 0 to 1", lambda: [ranks.logs(0), ranks.logs(1)], ["", ""]),
        (lambda: launch.logs(2), "rank=2: this launch has the ranks 0 to 1", lambda: launch.logs(1), ""),
        (lambda: ranks(sum, launch), "send its results instead", lambda: [*ranks(sum, launch.results())], [1, 1]),
        (lambda: ranks(len, ranks), "ranks belong to the process that opened them: call them there", lambda: len(ranks), 2),
    ]:
        with pytest.raises((LaunchError, TypeError, IndexError, UnsendableError), match=says):
            fails()
        assert cured() == result


def test_ranks_that_have_ended():
    """After `close`, and after the death of a rank."""
    closed = TWO.open()
    closed.close()
    died = TWO.open()
    with pytest.raises(RankDiedError):
        died[1](os._exit, 3)
    for ended in closed, died:
        with pytest.raises(LaunchError, match=r"cannot call my_rank\. Open new ones: Platform\(\.\.\.\)\.open\(\)"):
            ended(my_rank)
        with TWO.open() as ranks:
            assert list(ranks(my_rank)) == [0, 1]


def test_ranks_that_cannot_restart():
    with pytest.raises(PlatformError, match="Leave max_restarts out, and open new ranks after a failure"):
        replace(TWO, max_restarts=1).open()
    for _ in "a failure", "new ranks":
        with TWO.open() as ranks:
            assert ranks(all_sum) == (2.0, 2.0)
            with pytest.raises(RankDiedError):
                ranks[0](os._exit, 3)


KEPT = {}


def make_model():
    torch.manual_seed(0)
    KEPT["model"] = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))


def train():
    """Return the gradient, averaged over the ranks."""
    model = KEPT["model"]
    model.zero_grad()
    model(torch.full((1, 1), float(my_rank()))).sum().backward()
    return model.module.weight.grad.item()


def all_sum_in_one_rank():
    return all_sum() if my_rank() else None


def test_models_of_broken_groups(ranks, monkeypatch):
    """The note of a deadlocked call says to make DistributedDataParallel again."""
    monkeypatch.setattr("parawrap.processes.pool.STUCK_S", 0.5)
    ranks(make_model)
    assert ranks(train) == (0.5, 0.5)
    with pytest.raises(LaunchError, match="is deadlocked") as caught:
        ranks.submit(all_sum_in_one_rank).results()
    assert "models in DistributedDataParallel that the ranks keep must be, too" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError) as caught:
        ranks(train)
    assert "Make them again" in "".join(caught.value.__notes__)
    ranks(make_model)
    assert ranks(train) == (0.5, 0.5)


# -- a world of torchrun


@pytest.fixture
def world_of_one(monkeypatch):
    """The variables of a world whose only rank is this process. A call sets the last one, which its children inherit."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "PARAWRAP_IN_RANK": os.getpid()}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return monkeypatch


def test_another_number_of_ranks(world_of_one):
    with pytest.raises(PlatformError, match="start 2, or leave n_nodes, n_cpus, and n_gpus out of the platform"):
        wrapper(TWO)(place)()
    assert list(wrapper(Platform(device="cpu"))(place)()) == [(0, 1, 1)]


def test_ranks_that_stay_in_a_world(world_of_one):
    with pytest.raises(PlatformError) as caught:
        Platform(device="cpu").open()
    for cure in "Call the function directly", "decorate it with @wrapper(Platform(...))", "give launcher='local' to start":
        assert cure in str(caught.value)
    assert my_pid() == os.getpid()
    assert list(wrapper(Platform(device="cpu"))(place)()) == [(0, 1, 1)]
    with replace(TWO, launcher="local").open() as ranks:
        assert list(ranks(my_rank)) == [0, 1]


def my_pid():
    return os.getpid()
