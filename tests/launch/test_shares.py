"""Launches that run at the same time on one machine: devices and cores of their own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from parawrap import Platform, current_rank, wrapper
from parawrap.errors import PlatformError
from parawrap.launch import _devices, _platform_fields, shares
from parawrap.launch._devices import Device, variables_for
from parawrap.launch.shares import share_out
from tests.helpers.processes import ranks
from tests.helpers.scripts import read_script
from tests.helpers.waiting import eventually

ALL_CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(name="four_gpus")
def _four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture(name="four_cores")
def _four_cores(monkeypatch):
    """Let this process and its ranks see four emulated NeuronCores, the last ones of a machine."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")


def on_gpus(**fields):
    return Platform(device="gpu", verbose=False, **fields)


def on_cores(**fields):
    return wrapper(Platform(device="neuron", verbose=False, **fields))


def visible_cores():
    """Return the function that ranks run: the NeuronCore that a rank and its programs see."""

    def visible(_=None):
        program = [sys.executable, "-c", "import os; print(os.environ['NEURON_RT_VISIBLE_CORES'])"]
        seen = subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()
        assert os.environ["NEURON_RT_VISIBLE_CORES"] == seen
        return seen

    return visible


def together(folder, count):
    """Return the function of launches: the first `count` of them wait for each other."""

    def meets(number):
        if number < count:
            (folder / str(number)).touch()
            eventually(lambda: len(list(folder.iterdir())) >= count, "all launches")
        return os.environ.get("NEURON_RT_VISIBLE_CORES"), sorted(os.sched_getaffinity(0))

    return meets


# -- accelerators


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"n_gpus": 1}, [["4"], ["5"], ["6"], ["7"]]),
        ({"n_gpus": 2}, [["4", "5"], ["6", "7"]]),
        ({"n_gpus": 1, "device_ids": [3, 1]}, [["7"], ["5"]]),
        ({"n_gpus": 1, "device_ids": [2, 2]}, [["6"], ["6"]]),
        ({"n_gpus": 2, "device_ids": [0, 0, 2, 2]}, [["4", "6"], ["4", "6"]]),
    ],
    ids=str,
)
def test_launches_have_devices_of_their_own(fields, first, tmp_path):
    """Launches that run at the same time have different devices; later ones get those again."""
    count = len(first)
    sweep = on_cores(**fields)(together(tmp_path, count)).map(range(count + 2), max_parallel=9)
    found = [[cores for cores, _ in outcome] for outcome in sweep]
    assert sorted(found[:count]) == sorted(first)
    assert all(devices in first for devices in found)


@pytest.mark.usefixtures("four_cores")
def test_device_ids_name_devices_of_launches():
    """`device_ids` names devices by local rank, also for ranks that stay. By default, a launch has
    all that it names.
    """
    visible = visible_cores()
    assert list(on_cores(device_ids=[3, 0])(visible)()) == ["7", "4"]
    assert list(on_cores(device_ids=[3, 0, 3], n_gpus=1)(visible)()) == ["7"]
    with Platform(device="neuron", device_ids=(1, 2), verbose=False).open() as opened:
        assert list(opened(visible)) == ["5", "6"]
        assert list(opened(lambda: current_rank().platform.device_ids)) == [None, None]


@pytest.mark.usefixtures("four_cores")
def test_inline_calls_see_the_first_device():
    """The function runs here as rank 0, and the variable is restored."""
    assert list(on_cores(device_ids=[3, 0])(visible_cores()).inline()) == ["7,4"]
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "4-7"


@pytest.mark.usefixtures("four_cores")
def test_ranks_import_their_platforms_module(tmp_path, monkeypatch):
    """A rank sees fewer devices than its platform names, and still makes the same platform."""
    (tmp_path / "jobs_of_ranks.py").write_text(read_script("jobs_on_named_devices"))
    monkeypatch.syspath_prepend(tmp_path)
    jobs = importlib.import_module("jobs_of_ranks")
    assert [*jobs.of_two(), *jobs.of_named()] == ["4", "5", "7", "6"]
    del sys.modules["jobs_of_ranks"]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, "2,0"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "6,4"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a, GPU-2b,MIG-3c"}, "MIG-3c,GPU-1a"),
        ({"CUDA_VISIBLE_DEVICES": " "}, "2,0"),
    ],
    ids=str,
)
def test_numbers_count_visible_gpus(environ, found):
    """CUDA_VISIBLE_DEVICES of the launching process says which GPUs the numbers mean."""
    assert variables_for(Device.GPU, [2, 0], environ) == {"CUDA_VISIBLE_DEVICES": found}


def test_rocm_prefers_its_own_variable(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2,3"}
    assert variables_for(Device.GPU, [1], environ) == {"HIP_VISIBLE_DEVICES": "3"}
    del environ["HIP_VISIBLE_DEVICES"]
    assert variables_for(Device.GPU, [1], environ) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.usefixtures("four_gpus")
def test_ranks_number_their_gpus_from_0(monkeypatch):
    """`dry_run` shows the name in the rank, and the one in this process."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    platform = on_gpus(device_ids=[2, 3])
    assert platform.world_size == 2
    assert platform.device_variables == {"CUDA_VISIBLE_DEVICES": "2,3"}
    sent = platform.as_sent()
    assert [str(sent.device_of(rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    lines = wrapper(platform)(print).dry_run().splitlines()
    assert lines[-2:] == [
        "rank 0: node 0, local rank 0, cuda:0 (cuda:2 of this process)",
        "rank 1: node 0, local rank 1, cuda:1 (cuda:3 of this process)",
    ]
    assert on_gpus(n_gpus=2).device_variables == {}  # as without parawrap


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("fields", "says", "cure"),
    [
        ({"device_ids": [4]}, "give a list of numbers of visible devices, from 0 to 3", [0, 3]),
        ({"device_ids": [-1]}, "from 0 to 3", [1]),
        ({"device_ids": []}, "give a list of numbers", [1]),
        ({"device_ids": "01"}, "give a list of numbers", [0, 1]),
        ({"device_ids": 2}, "give a list of numbers", [2]),
        ({"device_ids": ["cuda:1"]}, "give a list of numbers", [1]),
        ({"device_ids": [1, 1], "n_gpus": 2}, "names 1 different devices", [1, 0]),
        ({"device_ids": [1], "device": "cpu"}, "the CPU is one device: leave device_ids out", None),
        ({"device_ids": [1], "launcher": "slurm", "n_gpus": 1}, "leave device_ids out", None),
        ({"device_ids": [1], "launcher": "ray", "n_gpus": 1}, "the cluster gives each rank", None),
    ],
    ids=str,
)
def test_refused_devices(fields, says, cure):
    """The message has a cure that works."""
    fields = {"device": "gpu"} | fields
    with pytest.raises(PlatformError, match=says):
        Platform(**fields)
    assert Platform(**fields | {"device_ids": cure}).device_ids == (cure and tuple(cure))


@pytest.mark.usefixtures("four_gpus")
def test_torchrun_gives_the_devices(monkeypatch):
    """The libraries in its processes choose a device by LOCAL_RANK."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        PlatformError, match=r"started by torchrun: .* set CUDA_VISIBLE_DEVICES=2,3"
    ):
        on_gpus(device_ids=[2, 3])
    for no_devices in [], [-1]:
        with pytest.raises(PlatformError, match="started by torchrun: leave device_ids out for"):
            on_gpus(device_ids=no_devices)
    assert on_gpus(n_gpus=2).world_size == 2


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("fields", "number", "says"),
    [
        (
            {},
            1,
            "1 of the 2 launches that max_parallel allows at the same time can run, as each has 4",
        ),
        ({"n_gpus": 3}, 1, "repeat its number: device_ids=[0, 0, 1, 1, 2, 2]"),
        ({"n_gpus": 1, "device_ids": [2]}, 1, "repeat its number: device_ids=[2, 2]"),
    ],
    ids=str,
)
def test_too_few_devices(fields, number, says, caplog):
    """Fewer launches run than `max_parallel` allows, and a line of the log says why."""
    # The launches themselves fail, as this machine has no GPU
    sweep = wrapper(on_gpus(**fields))(print).map(range(2), max_parallel=2)
    assert f"2 launches of print, {number} at the same time" in sweep.dry_run()
    assert not caplog.records
    assert len(list(sweep)) == 2
    assert says in caplog.text


# -- cores


@pytest.mark.parametrize("count", [1, 2])
def test_cores_are_divided(count, tmp_path):
    """All ranks of a launch are pinned to its cores. Other launches run on other cores."""
    launches = min(2, len(ALL_CORES))
    sweep = wrapper(ranks(count))(together(tmp_path, launches)).map(range(4), max_parallel=launches)
    outcomes = [{tuple(cores) for _, cores in outcome} for outcome in sweep]
    assert all(len(outcome) == 1 for outcome in outcomes)
    found = [core for outcome in outcomes[:launches] for cores in outcome for core in cores]
    assert sorted(found) == ALL_CORES
    assert sorted(os.sched_getaffinity(0)) == ALL_CORES


def test_threads_follow_the_cores(monkeypatch):
    """The operators of all ranks together use as many threads as the launch has cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for count in 1, 2:
        sweep = wrapper(ranks(count))(lambda _: torch.get_num_threads()).map([0, 1], max_parallel=2)
        share = max(1, len(ALL_CORES) // 2 // count)
        assert {threads for outcome in sweep for threads in outcome} == {share}


def on_machine(monkeypatch, *, cores, usable=None, siblings=1):
    """Let `share_out` see cores whose hardware threads have distant numbers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(shares, "usable_cores", lambda: usable or len(cores))
    physical = len(cores) // siblings
    monkeypatch.setattr(shares, "_place_of", lambda core: (0, core % physical, core))


@pytest.mark.parametrize(
    ("machine", "launches", "pinned", "count"),
    [
        ({"cores": range(8)}, 2, [(0, 1, 2, 3), (4, 5, 6, 7)], 4),
        ({"cores": range(8)}, 3, [(0, 1), (2, 3, 4), (5, 6, 7)], 2),
        ({"cores": range(8), "siblings": 2}, 2, [(0, 4, 1, 5), (2, 6, 3, 7)], 4),
        ({"cores": [3, 4, 5]}, 3, [(3,), (4,), (5,)], 1),
        ({"cores": range(2)}, 3, [(), (), ()], 1),
        ({"cores": range(8), "usable": 2}, 2, [(0, 1, 2, 3), (4, 5, 6, 7)], 1),
    ],
    ids=str,
)
def test_division_of_cores(machine, launches, pinned, count, monkeypatch):
    """Hardware threads of a core stay together. No launch is pinned if the cores are too few."""
    on_machine(monkeypatch, **machine)
    found = share_out(ranks(1), launches)
    assert [share.cores.pinned for share in found] == pinned
    assert {share.cores.count for share in found} == {count}


@pytest.mark.usefixtures("four_gpus")
def test_launches_on_gpus_may_use_every_core(monkeypatch):
    """Launches on GPUs divide only the threads, not the cores: which cores are near a GPU is known
    to the system alone.
    """
    on_machine(monkeypatch, cores=range(8))
    found = share_out(on_gpus(n_gpus=1), 4)
    assert [share.platform.device_ids for share in found] == [(0,), (1,), (2,), (3,)]
    assert {(share.cores.pinned, share.cores.count) for share in found} == {((), 2)}


def test_places_of_cores():
    """The places of cores are read from the system, and are the numbers of the cores where it has
    none.
    """
    places = [shares._place_of(core) for core in ALL_CORES]
    assert [core for _, _, core in places] == ALL_CORES
    assert shares._place_of(123456) == (0, 123456, 123456)


# -- dry_run


@pytest.mark.usefixtures("four_gpus")
def test_dry_run_of_a_sweep(monkeypatch):
    """The dry run of a sweep says how many launches run at the same time, and who has which
    devices.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shares, "usable_cores", lambda: 8)
    sweep = wrapper(on_gpus(n_gpus=2))(print).map(range(3), max_parallel=4)
    assert sweep.dry_run().splitlines()[:4] == [
        "3 launches of print, 2 at the same time",
        "launch 0: cuda:0, cuda:1; 4 CPU threads",
        "launch 1: cuda:0 (cuda:2 of this process), cuda:1 (cuda:3 of this process); 4 CPU threads",
        "later launches: the share of the first launch that ends",
    ]
    on_machine(monkeypatch, cores=range(4))
    on_cpu = wrapper(ranks(1))(print)
    lines = on_cpu.map(range(2), max_parallel=2).dry_run().splitlines()
    assert lines[1:3] == ["launch 0: CPU cores 0, 1", "launch 1: CPU cores 2, 3"]
    lines = on_cpu.map(range(5), max_parallel=5).dry_run().splitlines()
    assert lines[1] == "launch 0: 1 CPU thread, on any core"
    assert on_cpu.map([1]).dry_run().startswith("1 launches of print, one after another\n")
    assert on_cpu.map([]).dry_run() == "no launches"


@pytest.mark.usefixtures("four_cores")
def test_dry_run_names_neuron_cores():
    """A dry run names the NeuronCores that the variable of the machine names."""
    text = on_cores(device_ids=[1, 3])(print).dry_run()
    last = "rank 1: node 0, local rank 1, NeuronCore 7 (tensors on the CPU)"
    assert text.splitlines()[-1] == last


def test_platforms_keep_device_ids_as_tuple(monkeypatch):
    """Platforms with equal devices are equal, and `replace` returns one with other devices."""
    monkeypatch.setattr(_devices, "count_visible", lambda _: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    platform = on_gpus(device_ids=[2, 3])
    assert platform == on_gpus(device_ids=(2, 3))
    assert replace(platform, device_ids=[1]).own_device_ids == (1,)
    assert "device_ids=(2, 3)" in repr(platform)


@pytest.mark.usefixtures("four_cores")
def test_devices_that_a_variable_hides(monkeypatch):
    """A variable that changes after the platform was made is named, and the launch is refused."""
    function = on_cores(n_gpus=1, device_ids=[2, 3])(print)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4")
    says = r"device 2 was visible .* NEURON_RT_VISIBLE_CORES lists only 4 now"
    with pytest.raises(PlatformError, match=says):
        function()
    with pytest.raises(PlatformError, match="give a list of numbers of visible devices, 0"):
        next(function.map([1, 2], max_parallel=2))
    pairs = on_cores(n_gpus=1)(print)
    every = on_cores()(print)
    monkeypatch.setattr(shares, "count_visible", lambda _: 0)
    monkeypatch.setattr(_platform_fields, "count_visible", lambda _: 0)
    for each in pairs, every:
        assert len(share_out(each.platform, 2)) == 1
    with pytest.raises(PlatformError, match="visible when the platform was made, but none is now"):
        every()
