"""Platform: allowed values, and the errors for other values, with the field, its value, and the cure."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
import torch

from parawrap import Device, Platform
from parawrap.errors import PlatformError

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def on_cpu(**fields):
    return Platform(**{"device": "cpu", **fields})


def refusal(**fields):
    with pytest.raises(PlatformError) as caught:
        on_cpu(**fields)
    return str(caught.value)


NUMBERS = {"ram": 0.5, "master_port": 65535, "seed": 2**32 - 1, "timeout_min": 0.01, "grace_s": 0, "hang_timeout_s": 60}
WORDS = {"launcher": "env", "partition": "gpu-short", "backend": "cpu:gloo", "console_logs": "logs"}
PATHS = {"console_logs": Path("logs")}
NOTHING = dict.fromkeys(["ipc_protocol", "seed", "timeout_min", "hang_timeout_s", "ram", "upon_finish", "backend"])


@pytest.mark.parametrize("fields", [NUMBERS, WORDS, PATHS, NOTHING], ids=["numbers", "words", "paths", "None"])
def test_allowed_values_are_kept(fields):
    platform = on_cpu(**fields)
    assert {name: getattr(platform, name) for name in fields} == fields
    assert on_cpu(master_port="29500").master_port == 29500


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("name", [3], "string"),
        ("device", ["tpu", None, torch.device("cpu")], "cpu, gpu, mps, neuron, slurm or ray"),
        ("launcher", [["local"], "kubernetes"], "env, local, ray or slurm"),
        ("partition", [""], "non-empty"),
        ("n_nodes", [True, 1.0, "1", 0], "at least 1"),
        ("n_nodes", [2], "this machine"),
        ("n_gpus", [0, True, "1"], "at least 1"),
        ("n_cpus", [0, None, NAN], "at least 1"),
        ("ram", [0, NAN, "16", 1e300], "GB above 0"),
        ("ipc_protocol", ["udp", 1], "tcp or file, or None"),
        ("master_addr", [127], "string"),
        ("master_port", [-1, 65536, True, "http"], "at most 65535"),
        ("backend", [["gloo"], "smoke", "cpu:gloo,cuda:smoke"], "gloo"),
        ("seed", [-1, 2**32, True, 0.5, "scripts"], "from 0 to 4294967295"),
        ("timeout_min", [0, NAN, True, "60", 10**400], "minutes above 0"),
        ("slurm_additional_parameters", ["account=me", [("account", "me")]], "dict"),
        ("console_logs", ["", 1, True], "folder"),
        ("verbose", [1, None], "True or False"),
        ("print_ranks", [(2,), (-1,), (0.5,), "0", 0, (True,)], "rank"),
        ("upon_finish", ["notify"], "callable"),
        ("max_restarts", [-1, True, None], "at least 0"),
        ("grace_s", [-0.1, NAN, None, False, INF], "at least 0"),
        ("hang_timeout_s", [0, NAN, 1e300], "seconds above 0"),
    ],
)
def test_an_invalid_value_raises(field, values, allowed):
    for value in values:
        message = refusal(**{field: value})
        assert message.startswith(f"{field}={value!r}: ")
        assert allowed in message


def test_unknown_field_is_refused():
    """PlatformError names the most similar field, or lists all fields."""
    for mistaken, meant in ("gpus", "n_gpus"), ("timeout", "timeout_min"):
        message = refusal(**{mistaken: 7})
        assert message.startswith(f"{mistaken}=7: ")
        assert meant in message
    message = refusal(zzzzzz=1)
    assert all(field.name in message for field in dataclasses.fields(Platform))


@pytest.mark.usefixtures("four_gpus")
def test_device_names_ignore_case():
    """`device` is a `Device`, which equals its lower-case name; "cuda" is gpu, and "auto" is the best device."""
    spellings = {Device.CPU: ["cpu", "CPU"], Device.GPU: ["gpu", "Gpu", "cuda", "CUDA", "auto", "AUTO", Device.AUTO]}
    for kind, names in spellings.items():
        assert [Platform(device=name).device for name in names] == [kind] * len(names)
        assert Platform(device=kind).device == kind.value


def test_auto_is_the_best_device(monkeypatch):
    """The GPU of a Mac, or else one CPU rank. A device that is missing is an error that names the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert (Platform().device, Platform().world_size) == (Device.CPU, 1)
    for device in "gpu", "cuda", "GPU", "mps", "neuron":
        message = refusal(device=device)
        assert message.startswith(f"device={device!r}: ")
        assert "'cpu'" in message
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (Platform().device, Platform(n_cpus=4).world_size) == (Device.MPS, 1)


def test_unreadable_core_numbers_raise(monkeypatch):
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "first")
    assert "NEURON_RT_VISIBLE_CORES='first': 'first' is neither a core nor a range" in refusal(device="neuron")


def test_device_may_name_launcher():
    for name, n_gpus, device in ("slurm", None, Device.CPU), ("Ray", 2, Device.GPU):
        platform = Platform(device=name, launcher=name.lower(), n_gpus=n_gpus)
        assert (platform.launcher, platform.device) == (name.lower(), device)
        assert Platform(device=name, n_gpus=n_gpus) == platform
    message = refusal(device="slurm", launcher="env")
    assert message.startswith("launcher='env': device='slurm' names the launcher already")
    assert "leave one of them out" in message


@pytest.mark.usefixtures("four_gpus")
def test_ranks_of_a_cluster_run_here():
    """With launcher="local", the ranks of all nodes are ranks of this machine. The cure of too many GPUs works."""
    for device, launcher in ("slurm", "local"), ("ray", "local"), ("cpu", "local"):
        here = Platform(device=device, n_nodes=2, n_cpus=3, launcher=launcher)
        assert (here.device, here.launcher, here.n_nodes, here.world_size) == ("cpu", "local", 1, 6)
    there = Platform(device="slurm", n_nodes=2, n_gpus=2, n_cpus=4)
    here = dataclasses.replace(there, launcher="local")
    assert (here.device, here.n_nodes, here.n_gpus, here.n_cpus) == ("gpu", 1, 4, 4)
    assert "give at most 4 on all nodes together" in refusal(device="slurm", n_nodes=2, n_gpus=4, launcher="local")


@pytest.mark.usefixtures("four_gpus")
def test_too_many_gpus_raise(monkeypatch):
    """In a world of another launcher, this machine does not need to have the ranks' GPUs."""
    message = refusal(device="gpu", n_gpus=8)
    assert message.startswith("n_gpus=8: ")
    assert "4 are visible" in message
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Platform(device="gpu", n_gpus=8, n_nodes=2).world_size == 16


@pytest.mark.usefixtures("four_gpus")
def test_world_size_counts_devices():
    assert Platform(device="gpu").world_size == 4
    assert Platform(device="gpu", n_gpus=3, n_cpus=8).world_size == 3
    platform = Platform(device="cpu", n_cpus=3, n_nodes=2, launcher="env")
    assert (platform.ranks_per_node, platform.world_size) == (3, 6)


@pytest.mark.usefixtures("four_gpus")
def test_backend_follows_device():
    """GPUs use NCCL, with gloo for CPU tensors; other devices use gloo; the field overrides."""
    platforms = [Platform(device="cpu"), Platform(device="gpu"), on_cpu(backend="cpu:gloo")]
    assert [each.process_group_backend for each in platforms] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo"]


def test_groups_are_kept_as_tuples():
    """So they cannot change later. Only None makes no process group."""
    for groups, kept in ([[0, 1], [2, 3]], ((0, 1), (2, 3))), ([range(2)], ((0, 1),)), ([], ()), (None, None):
        platform = on_cpu(n_cpus=4, ipc_groups=groups)
        assert (platform.ipc_groups, platform.requires_ipc) == (kept, groups is not None)


EXAMPLE = "[[0, 1], [2, 3]]"


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([[0, 1], [1, 2]], "rank 1"),
        ([[0, 0]], "rank 0"),
        ([[0, 4]], "rank 4 does not exist: give ranks from 0 to 3"),
        *((groups, EXAMPLE) for groups in ("01", ["01"], [0, 1], [[0, 1], []], {0: [0]}, [[True, False]], [[0.0]])),
    ],
)
def test_invalid_groups_raise(groups, text):
    message = refusal(n_cpus=4, ipc_groups=groups)
    assert message.startswith("ipc_groups=")
    assert text in message


def test_platform_is_frozen_value():
    """It equals its pickle and other spellings; `replace` returns a new platform, and validates it."""
    platform = on_cpu(n_cpus=4, ipc_groups=[[0, 1], [2, 3]], upon_finish=os.getpid, console_logs=Path("logs"))
    assert pickle.loads(pickle.dumps(platform)) == platform
    assert on_cpu(ipc_groups=[[0]]) == Platform(device=Device.CPU, ipc_groups=((0,),))
    assert Platform("mine", "cpu").name == "mine"
    with pytest.raises(dataclasses.FrozenInstanceError):
        platform.n_cpus = 2
    larger = dataclasses.replace(platform, n_cpus=5)
    assert (larger.n_cpus, larger.ipc_groups, platform.n_cpus) == (5, platform.ipc_groups, 4)
    with pytest.raises(PlatformError, match=r"^n_cpus=0: "):
        dataclasses.replace(platform, n_cpus=0)
