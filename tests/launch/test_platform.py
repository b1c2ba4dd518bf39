"""Platform: allowed values, and the errors for other values, with the field, its value, and a cure
that works.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parawrap import Device, Platform, current_rank, wrapper
from parawrap.errors import PlatformError

INF, NAN = float("inf"), float("nan")
TWO = Platform(device="cpu", n_cpus=2, verbose=False)


def place():
    """Return the rank, the number of ranks, and the size of the rank's process group."""
    rank = current_rank()
    return rank.global_rank, rank.world_size, rank.group.size()


def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def a_mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.fixture(name="four_gpus")
def _four_gpus(monkeypatch):
    four_gpus(monkeypatch)


def on_cpu(**fields):
    return Platform(**{"device": "cpu", **fields})


def refusal(**fields):
    with pytest.raises(PlatformError) as caught:
        on_cpu(**fields)
    return str(caught.value)


# -- refused values, and the cures that the messages name

NO_GROUPS = ["01", ["01"], [0, 1], [[0, 1], []], {0: [0]}, [[0.0]]]
VALUES = [
    # the field, refused values, the message, and the values that it names
    ("device", ["tpu", None], "give auto, cpu, gpu, mps, neuron, slurm or ray", ["cpu", "auto"]),
    ("launcher", ["kubernetes"], "give env, local, ray or slurm, or None", ["local", None]),
    ("n_nodes", [0, "2", 1.5], "give a number of machines, at least 1", [1]),
    ("n_cpus", [0, None], "give a number of ranks or threads, at least 1", [2]),
    (
        "master_port",
        [-1, 1 << 16, "29500", None],
        "give a port number below 65536, or 0 for any free one",
        [0, 29500],
    ),
    (
        "seed",
        ["abc", 1.5, 2**70],
        "give a whole number of 64 bits, 'script', or None",
        [0, None, "script"],
    ),
    ("max_restarts", [-1, None], "give a number of restarts, at least 0", [0, 1]),
    ("ipc_protocol", ["udp", 1], "give tcp or file, or None", ["tcp", "file", None]),
    ("grace_s", [-0.1, NAN, None, INF], "give a number of seconds, at least 0", [9, 1]),
    ("timeout_min", [0, NAN, "60"], "give a number of minutes above 0, or None", [60, None]),
    ("hang_timeout_s", [0, NAN], "give a number of seconds above 0, or None", [600, None]),
    ("ipc_timeout_min", [0], "give a number of minutes above 0, or None", [60, None]),
    ("ram", [0, NAN, "16"], "give a number of GB above 0, or None", [16, None]),
    (
        "print_ranks",
        [(2,), (-1,), "0", 0],
        r"give None, or global ranks from 0 to 1, such as \(0,\)",
        [(0,), (1,), None],
    ),
    (
        "ipc_groups",
        [[[0, 0]]],
        "rank 0 appears twice: put each rank into one group at most",
        [[[0, 1]]],
    ),
    ("ipc_groups", [((0, 2),)], "rank 2 does not exist: give ranks from 0 to 1", [[[0, 1]]]),
    (
        "ipc_groups",
        NO_GROUPS,
        r"give None, .. or lists of global ranks, such as \[\[0, 1\], \[2, 3\]\]",
        [[[1, 0]], []],
    ),
]


@pytest.mark.parametrize("choice", [0, -1], ids=["first", "last"])
def test_cures_of_values(choice):
    """Two ranks meet on a platform with the first values that the messages name, and with the last
    ones.
    """
    fields = {"device": "cpu", "n_cpus": 2}
    for field, refused, says, values in VALUES:
        for value in refused:
            with pytest.raises(
                PlatformError, match=f"^{re.escape(f'{field}={value!r}: ')}.*{says}"
            ):
                replace(TWO, **{field: value})
        fields[field] = values[choice]
    assert list(wrapper(Platform(**fields))(place)()) == [(0, 2, 2), (1, 2, 2)]


PLATFORMS = [
    # the machine, the refused fields, the message, the fields with its cures, and the number of
    # ranks
    (
        no_cuda,
        {"device": "cpu", "n_gpus": 2},
        "leave n_gpus out, and set n_cpus to",
        [{"device": "cpu", "n_cpus": 2}],
        2,
    ),
    (
        no_cuda,
        {"device": "auto", "n_gpus": 2},
        "leave n_gpus out, and set n_cpus to",
        [{"device": "auto", "n_cpus": 2}],
        2,
    ),
    (
        no_cuda,
        {"device": "gpu", "n_gpus": 2},
        "'cpu', with n_cpus as the number",
        [{"device": "cpu", "n_cpus": 2}],
        2,
    ),
    (
        four_gpus,
        {"device": "gpu", "n_gpus": 5},
        "4 are visible",
        [{"device": "gpu", "n_gpus": 4}],
        4,
    ),
    (
        four_gpus,
        {"device": "gpu", "n_gpus": 0},
        "at least 1, or None for all",
        [{"device": "gpu", "n_gpus": None}],
        4,
    ),
    (
        four_gpus,
        {"device": "slurm", "n_nodes": 2, "n_gpus": 4, "launcher": "local"},
        "give at most 4 on all nodes together",
        [{"device": "slurm", "n_nodes": 2, "n_gpus": 2, "launcher": "local"}],
        4,
    ),
    (
        a_mac,
        {"device": "mps", "n_gpus": 2},
        "1 is visible here: give at most 1",
        [{"device": "mps", "n_gpus": 1}],
        1,
    ),
    (
        no_cuda,
        {"device": "cpu", "n_nodes": 2},
        "give 1, or launcher='local' to start those of all nodes here, or the launcher 'slurm' or",
        [
            {"device": "cpu", "n_nodes": 2, "launcher": launcher}
            for launcher in ("local", "slurm", "ray")
        ],
        2,
    ),
    (
        no_cuda,
        {"device": "gpu", "launcher": "slurm"},
        "give a number per node",
        [{"device": "slurm", "n_gpus": 2}],
        2,
    ),
    (
        no_cuda,
        {"device": "ray", "ipc_protocol": "file"},
        "give 'tcp'",
        [{"device": "ray", "ipc_protocol": "tcp"}],
        1,
    ),
    (
        no_cuda,
        {"device": "slurm", "launcher": "ray"},
        "device='slurm' names the launcher already: leave one of them out, or give 'local'",
        [
            {"device": "slurm"},
            {"launcher": "ray"},
            *({"device": "slurm", "launcher": name} for name in ("slurm", "local")),
        ],
        1,
    ),
]


@pytest.mark.parametrize(
    ("machine", "refused", "says", "cures", "size"), PLATFORMS, ids=range(len(PLATFORMS))
)
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


# -- devices


@pytest.mark.usefixtures("four_gpus")
def test_device_names_ignore_case():
    """`device` is a `Device`, which equals its lower-case name; "cuda" is gpu, and "auto" is the
    best device.
    """
    spellings = {
        Device.CPU: ["cpu", "CPU"],
        Device.GPU: ["gpu", "Gpu", "cuda", "CUDA", "auto", "AUTO", Device.AUTO],
    }
    for kind, names in spellings.items():
        assert [Platform(device=name).device for name in names] == [kind] * len(names)
        assert Platform(device=kind).device == kind.value


def test_auto_is_the_best_device(monkeypatch):
    """The device "auto" is the GPU of a Mac, or else one CPU rank.

    A device that is missing is an error that names the CPU.
    """
    no_cuda(monkeypatch)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert (Platform().device, Platform().world_size) == (Device.CPU, 1)
    for device in "gpu", "cuda", "GPU", "mps", "neuron":
        message = refusal(device=device)
        assert message.startswith(f"device={device!r}: ")
        assert "'cpu'" in message
    a_mac(monkeypatch)
    assert (Platform().device, Platform(n_cpus=4).world_size) == (Device.MPS, 1)


@pytest.mark.usefixtures("four_gpus")
def test_ranks_of_a_cluster_run_here():
    """With launcher="local", the ranks of all nodes are ranks of this machine."""
    for device in "slurm", "ray", "cpu":
        here = Platform(device=device, n_nodes=2, n_cpus=3, launcher="local")
        assert (here.device, here.launcher, here.n_nodes, here.world_size) == ("cpu", "local", 1, 6)
    here = replace(Platform(device="slurm", n_nodes=2, n_gpus=2, n_cpus=4), launcher="local")
    assert (here.device, here.n_nodes, here.n_gpus, here.n_cpus) == ("gpu", 1, 4, 4)


@pytest.mark.usefixtures("four_gpus")
def test_world_size_counts_devices(monkeypatch):
    """In a world of another launcher, this machine does not need to have the ranks' GPUs."""
    assert Platform(device="gpu").world_size == 4
    assert Platform(device="gpu", n_gpus=3, n_cpus=8).world_size == 3
    platform = Platform(device="cpu", n_cpus=3, n_nodes=2, launcher="env")
    assert (platform.ranks_per_node, platform.world_size) == (3, 6)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Platform(device="gpu", n_gpus=8, n_nodes=2).world_size == 16


@pytest.mark.usefixtures("four_gpus")
def test_backend_follows_device():
    """GPUs use NCCL, with gloo for CPU tensors; other devices use gloo; the field overrides."""
    platforms = [Platform(device="cpu"), Platform(device="gpu"), on_cpu(backend="cpu:gloo")]
    assert [each.process_group_backend for each in platforms] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo",
    ]


@pytest.mark.usefixtures("four_gpus")
def test_fields_take_iterators():
    """Fields that take several values take them from an iterator too."""
    on_gpus = Platform(device="gpu", device_ids=map(int, ["2", "3"]))
    assert (on_gpus.device_ids, on_gpus.world_size) == ((2, 3), 2)
    groups = on_cpu(n_cpus=4, ipc_groups=zip([0, 1], [2, 3], strict=True), print_ranks=iter([1]))
    assert (groups.ipc_groups, groups.print_ranks) == (((0, 2), (1, 3)), (1,))
    assert "rank 9 does not exist" in refusal(ipc_groups=iter([[9]]))


def test_platform_is_frozen_value():
    """A platform equals its pickle and other spellings; `replace` returns a new platform, and
    validates it.
    """
    platform = on_cpu(
        n_cpus=4, ipc_groups=[[0, 1], [2, 3]], upon_finish=os.getpid, console_logs=Path("logs")
    )
    assert pickle.loads(pickle.dumps(platform)) == platform
    assert on_cpu(ipc_groups=[[0]]) == Platform(device=Device.CPU, ipc_groups=((0,),))
    assert Platform("mine", "cpu").name == "mine"
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.n_cpus = 2
    larger = replace(platform, n_cpus=5)
    assert (larger.n_cpus, larger.ipc_groups, platform.n_cpus) == (5, platform.ipc_groups, 4)
