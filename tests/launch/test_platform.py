"""Platform: what is allowed, and what it says where something is not."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
import torch

from parawrap import Device, Platform
from parawrap.errors import PlatformError
from parawrap.launch._world import _TABLES

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """This process is in no world that something else started."""
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
        ("seed", [None, 0, 2**32 - 1]),
        ("timeout_min", [None, 0.01]),
        ("slurm_additional_parameters", [None, {"account": "me"}]),
        ("console_logs", [None, "logs", Path("logs")]),
        ("verbose", [False]),
        ("upon_finish", [None, print]),
        ("max_restarts", [0, 3]),
        ("grace_s", [0, 0.5]),
        ("hang_timeout_s", [None, 60]),
    ],
)
def test_an_allowed_value_is_kept(field, values):
    """What is allowed stands in the field as it was given."""
    assert [getattr(on_cpu(**{field: value}), field) for value in values] == values


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("name", [""], "not empty"),
        ("name", [3, None], "text"),
        ("device", ["tpu", "", 0, None, torch.device("cpu")], "cpu, gpu, mps, neuron, slurm or ray"),
        ("launcher", [["local"]], "env, local, ray or slurm"),  # unhashable
        ("launcher", ["kubernetes", "Local", 1], "env, local, ray or slurm"),
        ("partition", [""], "not empty"),
        ("partition", [1], "text"),
        ("n_nodes", [True, 1.0, "1", None], "at least 1"),
        ("n_nodes", [0, -1], "at least 1"),
        ("n_nodes", [2], "this machine"),
        ("n_gpus", [0, -2, True, 1.5, "1"], "at least 1"),
        ("n_cpus", [0, -4, True, 2.0, None, NAN], "at least 1"),
        ("ram", [0, -1, NAN, True, "16"], "GB above 0"),
        ("spawn_method", ["thread", None, ["fork"]], "forkserver, spawn or fork"),
        ("ipc_protocol", ["udp", 1], "tcp or file, or None"),
        ("master_addr", [""], "not empty"),
        ("master_addr", [127], "text"),
        ("master_port", [-1, 65536, True, 29500.0, None, "http"], "at most 65535"),
        ("backend", [3, ["gloo"]], "gloo"),
        ("backend", ["smoke", "", "cpu:gloo,cuda:smoke"], "gloo"),
        ("seed", [-1, 2**32, True, 0.5, "0"], "from 0 to 4294967295"),
        ("timeout_min", [0, -1, NAN, True, "60"], "minutes above 0"),
        ("slurm_additional_parameters", ["account=me", [("account", "me")]], "dict"),
        ("console_logs", ["", 1, True], "folder"),
        ("verbose", [1, None], "True or False"),
        ("upon_finish", ["notify"], "callable"),
        ("max_restarts", [-1, True, 1.0, None], "at least 0"),
        ("grace_s", [-0.1, NAN, None, False], "at least 0"),
        ("hang_timeout_s", [0, -1, NAN, True], "seconds above 0"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_field_value_and_cure(field, values, allowed):
    """The message begins with the field and its value as they were written, and says what is allowed."""
    for value in values:
        message = refusal(**{field: value})
        assert message.startswith(f"{field}={value!r}: ")
        assert allowed in message


@pytest.mark.parametrize("field", ["timeout_min", "hang_timeout_s", "grace_s", "ram"])
def test_a_number_that_no_clock_can_wait_for_is_refused(field):
    """Found when the platform is made, and not by an OverflowError in the middle of a launch."""
    for value in (1e300, 10**400):
        assert refusal(**{field: value}).startswith(f"{field}=")


def test_an_endless_grace_is_refused():
    """A rank that ends by itself at the latest after its grace would stay for ever."""
    assert refusal(grace_s=INF).startswith("grace_s=inf: ")


def test_a_port_written_as_digits_is_a_number():
    """os.environ holds texts: those of digits are understood."""
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
def test_an_unknown_field_is_refused_with_the_nearest(mistaken, meant):
    """What was meant stands in the message, beside what was written and its value."""
    message = refusal(**{mistaken: 7})
    assert message.startswith(f"{mistaken}=7: ")
    assert meant in message


def test_an_unknown_field_like_no_other_is_refused_with_all_there_are():
    """Where nothing is near, every field is listed."""
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
def test_a_device_is_understood_in_whatever_case(kind, spellings):
    """The field holds the kind, equal to its lower-case name; cuda is gpu, and auto the best there is."""
    for given in spellings:
        platform = Platform(device=given)
        assert platform.device is kind
        assert platform.device == kind.value


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_where_there_is_nothing_else():
    """No accelerator: one CPU rank."""
    assert (Platform().device, Platform().world_size) == (Device.CPU, 1)


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_mps_before_the_cpu(monkeypatch):
    """A Mac's GPU is better than its CPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (Platform().device, Platform(n_cpus=4).world_size) == (Device.MPS, 1)


@pytest.mark.parametrize("name", ["slurm", "ray", "SLURM", "Ray"])
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize(("n_gpus", "device"), [(None, Device.CPU), (2, Device.GPU)])
def test_a_launcher_may_be_named_as_the_device(name, also, n_gpus, device):
    """Users write launchers where devices belong; the device is the GPU then where GPUs are asked for, else the CPU."""
    platform = Platform(device=name, launcher=name.lower() if also else None, n_gpus=n_gpus)
    assert (platform.launcher, platform.device) == (name.lower(), device)


def test_a_launcher_named_as_the_device_is_not_another_one():
    """The message names the field to leave out."""
    message = refusal(device="slurm", launcher="local")
    assert message.startswith("launcher='local': device='slurm' names the launcher already")
    assert "leave one of them out" in message


@pytest.mark.parametrize("device", ["gpu", "mps", "neuron"])
@pytest.mark.usefixtures("no_gpu")
def test_a_device_that_is_not_there_is_refused(device):
    """Never an empty world: the message says what to give instead."""
    message = refusal(device=device)
    assert message.startswith(f"device={device!r}: ")
    assert "'cpu'" in message


@pytest.mark.parametrize(("visible", "told"), [(1, "1 is visible"), (4, "4 are visible")])
def test_more_gpus_than_are_visible_are_refused(monkeypatch, visible, told):
    """Never a smaller world than asked for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    message = refusal(device="gpu", n_gpus=8)
    assert message.startswith("n_gpus=8: ")
    assert told in message


@pytest.mark.usefixtures("no_gpu")
def test_gpus_of_other_machines_are_not_counted_here(monkeypatch):
    """Inside a world that something else started, this machine need not show what the ranks will have."""
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
def test_the_world_is_as_large_as_its_devices_on_all_nodes(fields, size):
    """n_cpus counts ranks on the CPU only; None GPUs are all that are visible."""
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
    """They are kept as tuples, so that nobody changes them afterwards."""
    assert on_cpu(n_cpus=4, ipc_groups=groups).ipc_groups == kept


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([[0, 1], [1, 2]], "rank 1"),
        ([[0, 0]], "rank 0"),
        ([[0, 4]], "no rank 4 in a world of 4"),
        ([[-1, 0]], "no rank -1"),
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
def test_groups_that_make_no_sense_are_refused(groups, told):
    """Overlaps, strangers and other shapes: the message names the rank or shows the shape."""
    message = refusal(n_cpus=4, ipc_groups=groups)
    assert message.startswith("ipc_groups=")
    assert told in message


def test_groups_taken_from_a_list_do_not_change_with_it():
    """What the user does to his list afterwards is nothing to the platform."""
    groups = [[0], [1]]
    platform = on_cpu(n_cpus=2, ipc_groups=groups)
    groups[0].append(7)
    assert platform.ipc_groups == ((0,), (1,))


def test_a_platform_is_frozen():
    """Launches and threads share it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        on_cpu().n_cpus = 2


def test_a_platform_survives_pickling():
    """The copy is equal to it."""
    platform = on_cpu(n_cpus=4, ipc_groups=[[0, 1], [2, 3]], upon_finish=os.getpid, console_logs=Path("logs"))
    assert pickle.loads(pickle.dumps(platform)) == platform


def test_replace_changes_one_field():
    """dataclasses.replace gives a new platform, and leaves the old one."""
    platform = on_cpu(n_cpus=2, seed=7)
    larger = dataclasses.replace(platform, n_cpus=3)
    assert (larger.n_cpus, larger.seed, platform.n_cpus) == (3, 7, 2)


def test_replace_refuses_as_the_platform_does():
    """The new platform is validated."""
    with pytest.raises(PlatformError, match=r"^n_cpus=0: "):
        dataclasses.replace(on_cpu(), n_cpus=0)


def test_fields_may_be_given_in_order():
    """The name first, then the device."""
    assert (Platform("mine", "cpu").name, Platform("mine", "cpu").device) == ("mine", Device.CPU)


def test_platforms_with_equal_fields_are_equal():
    """A list or a tuple of groups, a name or a kind of device: what is written differently and means the same is equal."""
    assert on_cpu(ipc_groups=[[0]]) == Platform(device=Device.CPU, ipc_groups=((0,),))


@pytest.mark.parametrize(("groups", "needs"), [((), True), ([[0]], True), (None, False)])
def test_only_none_makes_no_process_group(groups, needs):
    """An empty list is one group of all."""
    assert on_cpu(ipc_groups=groups).requires_ipc is needs


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("gpu", "cpu:gloo,cuda:nccl")])
@pytest.mark.usefixtures("four_gpus")
def test_the_backend_follows_the_device(device, backend):
    """NCCL on GPUs, with gloo beside it; else gloo."""
    assert Platform(device=device).process_group_backend == backend


def test_a_backend_that_is_given_is_taken():
    """Whatever the device would have made of it."""
    assert on_cpu(backend="cpu:gloo").process_group_backend == "cpu:gloo"
