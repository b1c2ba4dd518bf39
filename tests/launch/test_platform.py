"""Platform: allowed values, and the errors for other values."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from parawrap import Device, Platform
from parawrap.errors import PlatformError
from parawrap.launch._world import _TABLES

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Remove the variables of a surrounding world."""
    for table in _TABLES:
        for name in (table.global_rank, table.world_size):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def on_cpu(**fields) -> Platform:
    return Platform(**{"device": "cpu", **fields})


def refusal(**fields) -> str:
    with pytest.raises(PlatformError) as caught:
        on_cpu(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", ["train it"]),
        ("launcher", [None, "local", "env"]),
        ("partition", [None, "gpu-short"]),
        ("n_nodes", [1]),
        ("n_gpus", [None]),
        ("n_cpus", [64]),
        ("ram", [None, 0.5, 16]),
        ("spawn_method", ["forkserver", "spawn", "fork"]),
        ("ipc_protocol", ["tcp", "file", None]),
        ("master_addr", [None, "10.0.0.1"]),
        ("master_port", [0, 65535]),
        ("ipc_groups", [None, ()]),
        ("backend", [None, "gloo", "cpu:gloo"]),
        ("seed", ["script", None, 0, 2**32 - 1]),
        ("timeout_min", [None, 0.01]),
        ("slurm_additional_parameters", [None, {"account": "me"}]),
        ("console_logs", [None, "logs", Path("logs")]),
        ("trace", [None, "launch.html", Path("folder/launch.json")]),
        ("verbose", [False]),
        ("upon_finish", [None, print]),
        ("max_restarts", [0, 3]),
        ("grace_s", [0, 0.5]),
        ("hang_timeout_s", [None, 60]),
    ],
)
def test_an_allowed_value_is_kept(field, values):
    """An allowed value is kept unchanged."""
    assert [getattr(on_cpu(**{field: value}), field) for value in values] == values


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("name", [""], "non-empty"),
        ("name", [3, None], "string"),
        ("device", ["tpu", "", 0, None, torch.device("cpu")], "cpu, gpu, mps, neuron, slurm or ray"),
        ("launcher", [["local"]], "env, local, ray or slurm"),  # unhashable
        ("launcher", ["kubernetes", "Local", 1], "env, local, ray or slurm"),
        ("partition", [""], "non-empty"),
        ("partition", [1], "string"),
        ("n_nodes", [True, 1.0, "1", None], "at least 1"),
        ("n_nodes", [0, -1], "at least 1"),
        ("n_nodes", [2], "this machine"),
        ("n_gpus", [0, -2, True, 1.5, "1"], "at least 1"),
        ("n_cpus", [0, -4, True, 2.0, None, NAN], "at least 1"),
        ("ram", [0, -1, NAN, True, "16"], "GB above 0"),
        ("spawn_method", ["thread", None, ["fork"]], "forkserver, spawn or fork"),
        ("ipc_protocol", ["udp", 1], "tcp or file, or None"),
        ("master_addr", [""], "non-empty"),
        ("master_addr", [127], "string"),
        ("master_port", [-1, 65536, True, 29500.0, None, "http"], "at most 65535"),
        ("backend", [3, ["gloo"]], "gloo"),
        ("backend", ["smoke", "", "cpu:gloo,cuda:smoke"], "gloo"),
        ("seed", [-1, 2**32, True, 0.5, "0", "scripts"], "from 0 to 4294967295"),
        ("timeout_min", [0, -1, NAN, True, "60"], "minutes above 0"),
        ("slurm_additional_parameters", ["account=me", [("account", "me")]], "dict"),
        ("console_logs", ["", 1, True], "folder"),
        ("trace", ["", 1, True, "launch", "launch.png", Path("launch.HTML")], ".html or .json"),
        ("verbose", [1, None], "True or False"),
        ("upon_finish", ["notify"], "callable"),
        ("max_restarts", [-1, True, 1.0, None], "at least 0"),
        ("grace_s", [-0.1, NAN, None, False], "at least 0"),
        ("hang_timeout_s", [0, -1, NAN, True], "seconds above 0"),
    ],
)
def test_an_invalid_value_raises(field, values, allowed):
    """PlatformError starts with the field and its value and says which values are allowed."""
    for value in values:
        message = refusal(**{field: value})
        assert message.startswith(f"{field}={value!r}: ")
        assert allowed in message


@pytest.mark.parametrize("field", ["timeout_min", "hang_timeout_s", "grace_s", "ram"])
def test_a_huge_number_raises(field):
    """Values that would overflow a timer raise when the platform is created."""
    for value in (1e300, 10**400):
        assert refusal(**{field: value}).startswith(f"{field}=")


def test_an_infinite_grace_raises():
    """``grace_s`` must be finite, because ranks must end after it."""
    assert refusal(grace_s=INF).startswith("grace_s=inf: ")


def test_a_port_may_be_a_string_of_digits():
    """A port from `os.environ` is converted to an int."""
    assert on_cpu(master_port="29500").master_port == 29500


@pytest.mark.parametrize(
    ("mistaken", "meant"),
    [
        ("n_gpu", "n_gpus"),
        ("gpus", "n_gpus"),
        ("n_cpu", "n_cpus"),
        ("devices", "device"),
        ("timeout", "timeout_min"),
        ("nodes", "n_nodes"),
        ("spawn", "spawn_method"),
        ("hang_timeout", "hang_timeout_s"),
    ],
)
def test_an_unknown_field_raises_with_the_nearest_field(mistaken, meant):
    """PlatformError has the unknown field, its value, and the field with the nearest name."""
    message = refusal(**{mistaken: 7})
    assert message.startswith(f"{mistaken}=7: ")
    assert meant in message


def test_an_unknown_field_without_a_near_name_lists_all_fields():
    """If no field has a similar name, PlatformError lists all fields."""
    message = refusal(zzzzzz=1)
    assert all(field.name in message for field in dataclasses.fields(Platform))


@pytest.mark.parametrize(
    ("kind", "spellings"),
    [
        (Device.CPU, ["cpu", "CPU", Device.CPU]),
        (Device.GPU, ["gpu", "Gpu", "cuda", "CUDA", "auto", "AUTO", Device.AUTO]),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_device_names_ignore_case(kind, spellings):
    """`device` is a `Device`, which equals its lower-case name; "cuda" is gpu, and "auto" is the best device."""
    for given in spellings:
        platform = Platform(device=given)
        assert platform.device is kind
        assert platform.device == kind.value


def test_type_checkers_know_every_device_name():
    """The type of `device` lists the names of all kinds, and the alias "cuda"."""
    _, names = get_args(get_type_hints(Platform)["device"])
    assert set(get_args(names)) == {*(kind.value for kind in Device), "cuda"}


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_without_an_accelerator():
    """Without an accelerator, "auto" is one CPU rank."""
    assert (Platform().device, Platform().world_size) == (Device.CPU, 1)


@pytest.mark.usefixtures("no_gpu")
def test_auto_prefers_mps_to_the_cpu(monkeypatch):
    """On a Mac, "auto" is its GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (Platform().device, Platform(n_cpus=4).world_size) == (Device.MPS, 1)


@pytest.mark.parametrize("name", ["slurm", "ray", "SLURM", "Ray"])
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize(("n_gpus", "device"), [(None, Device.CPU), (2, Device.GPU)])
def test_a_launcher_may_be_named_as_the_device(name, also, n_gpus, device):
    """``device="slurm"`` sets the launcher; the device is the GPU if `n_gpus` is given, otherwise the CPU."""
    platform = Platform(device=name, launcher=name.lower() if also else None, n_gpus=n_gpus)
    assert (platform.launcher, platform.device) == (name.lower(), device)


def test_two_different_launchers_raise():
    """If `device` and `launcher` name different launchers, PlatformError says to leave one of them out."""
    message = refusal(device="slurm", launcher="local")
    assert message.startswith("launcher='local': device='slurm' names the launcher already")
    assert "leave one of them out" in message


@pytest.mark.parametrize("device", ["gpu", "cuda", "GPU", "mps", "neuron"])
@pytest.mark.usefixtures("no_gpu")
def test_a_missing_device_raises(device):
    """PlatformError names the device as the user wrote it, and the alternative 'cpu'."""
    message = refusal(device=device)
    assert message.startswith(f"device={device!r}: ")
    assert "'cpu'" in message


@pytest.mark.parametrize(("visible", "text"), [(1, "1 is visible"), (4, "4 are visible")])
def test_more_gpus_than_visible_raise(monkeypatch, visible, text):
    """PlatformError has the number of visible GPUs; the world never becomes smaller than requested."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    message = refusal(device="gpu", n_gpus=8)
    assert message.startswith("n_gpus=8: ")
    assert text in message


@pytest.mark.usefixtures("no_gpu")
def test_gpus_are_not_checked_within_a_world(monkeypatch):
    """In a world of another launcher, this machine does not need to have the ranks' GPUs."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Platform(device="gpu", n_gpus=4, n_nodes=2).world_size == 8


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"device": "gpu"}, 4),
        ({"device": "gpu", "n_gpus": 3}, 3),
        ({"device": "gpu", "n_gpus": 3, "n_cpus": 8}, 3),
        ({"device": "cpu"}, 1),
        ({"device": "cpu", "n_cpus": 3}, 3),
        ({"device": "cpu", "n_cpus": 3, "n_nodes": 2, "launcher": "env"}, 6),
        ({"device": "gpu", "n_gpus": 3, "n_nodes": 2, "launcher": "env"}, 6),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_world_size_is_the_number_of_devices_on_all_nodes(fields, size):
    """`n_cpus` counts only CPU ranks; ``n_gpus=None`` means all visible GPUs."""
    platform = Platform(**fields)
    assert platform.world_size == size
    assert platform.ranks_per_node * platform.n_nodes == size


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        ([[0, 1], [2, 3]], ((0, 1), (2, 3))),
        (((3,), (0,)), ((3,), (0,))),
        ([range(2)], ((0, 1),)),
        ([], ()),
        (None, None),
    ],
)
def test_groups_are_lists_of_ranks(groups, kept):
    """Groups are kept as tuples, so they cannot change later."""
    assert on_cpu(n_cpus=4, ipc_groups=groups).ipc_groups == kept


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([[0, 1], [1, 2]], "rank 1"),
        ([[0, 0]], "rank 0"),
        ([[0, 4]], "rank 4 does not exist: give ranks from 0 to 3"),
        ([[-1, 0]], "rank -1 does not exist"),
        ("01", "[[0, 1], [2, 3]]"),
        (b"01", "[[0, 1], [2, 3]]"),
        (["01"], "[[0, 1], [2, 3]]"),
        ([b"\0\1"], "[[0, 1], [2, 3]]"),
        ([0, 1], "[[0, 1], [2, 3]]"),
        ([[]], "[[0, 1], [2, 3]]"),
        ([[0, 1], []], "[[0, 1], [2, 3]]"),
        ([[True, False]], "[[0, 1], [2, 3]]"),
        ([[0.0]], "[[0, 1], [2, 3]]"),
        ([[None]], "[[0, 1], [2, 3]]"),
        ([None], "[[0, 1], [2, 3]]"),
        ({0: [0]}, "[[0, 1], [2, 3]]"),
        (0, "[[0, 1], [2, 3]]"),
    ],
)
def test_invalid_groups_raise(groups, text):
    """For overlapping groups, unknown ranks, and other shapes, PlatformError names the rank or shows an example."""
    message = refusal(n_cpus=4, ipc_groups=groups)
    assert message.startswith("ipc_groups=")
    assert text in message


def test_groups_are_copied():
    """Changing the user's list later does not change the platform."""
    groups = [[0], [1]]
    platform = on_cpu(n_cpus=2, ipc_groups=groups)
    groups[0].append(7)
    assert platform.ipc_groups == ((0,), (1,))


def test_a_platform_is_frozen():
    """Assigning to a field raises FrozenInstanceError."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        on_cpu().n_cpus = 2


def test_a_platform_survives_pickling():
    """The unpickled platform equals the original."""
    platform = on_cpu(n_cpus=4, ipc_groups=[[0, 1], [2, 3]], upon_finish=os.getpid, console_logs=Path("logs"))
    assert pickle.loads(pickle.dumps(platform)) == platform


def test_replace_changes_one_field():
    """`dataclasses.replace` returns a new platform and keeps the original unchanged."""
    platform = on_cpu(n_cpus=2, seed=7)
    larger = dataclasses.replace(platform, n_cpus=3)
    assert (larger.n_cpus, larger.seed, platform.n_cpus) == (3, 7, 2)


def test_replace_validates_the_new_platform():
    """`dataclasses.replace` raises PlatformError for an invalid value."""
    with pytest.raises(PlatformError, match=r"^n_cpus=0: "):
        dataclasses.replace(on_cpu(), n_cpus=0)


def test_fields_can_be_positional():
    """The first field is `name`, the second is `device`."""
    assert (Platform("mine", "cpu").name, Platform("mine", "cpu").device) == ("mine", Device.CPU)


def test_platforms_with_equal_fields_are_equal():
    """Different spellings of the same value, such as a list and a tuple, are equal."""
    assert on_cpu(ipc_groups=[[0]]) == Platform(device=Device.CPU, ipc_groups=((0,),))


@pytest.mark.parametrize(("groups", "needs"), [((), True), ([[0]], True), (None, False)])
def test_only_none_disables_the_process_group(groups, needs):
    """An empty `ipc_groups` means one group of all ranks; None means no process group."""
    assert on_cpu(ipc_groups=groups).requires_ipc is needs


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("gpu", "cpu:gloo,cuda:nccl")])
@pytest.mark.usefixtures("four_gpus")
def test_the_backend_follows_the_device(device, backend):
    """GPUs use NCCL, with gloo for CPU tensors; other devices use gloo."""
    assert Platform(device=device).process_group_backend == backend


def test_a_given_backend_is_kept():
    """The `backend` field overrides the device's default."""
    assert on_cpu(backend="cpu:gloo").process_group_backend == "cpu:gloo"
