"""Promises 1, 2, 4, 7, and 8 on this machine: functions, results, groups, the ranks' environment, and output."""

from __future__ import annotations

import bz2
import contextlib
import gc
import gzip
import io
import json
import logging
import lzma
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, Platform, RankResults, UnsendableError, Wrapper, current_rank, functional, wrapper
from tests.helpers.processes import (
    assert_gone,
    descendant_pids,
    pids_in,
    ranks,
    report_pid_function,
    run_script,
    running_scripts,
)
from tests.helpers.waiting import PATIENCE_S, eventually

METHODS = ["forkserver", "spawn", "fork"]
LOCK = threading.Lock()
OFFSET = 5


def sum_over_ranks(value):
    """Return the sum of a value over all ranks."""
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return total.item()


# -- functions


@wrapper(ranks())
def guarded(number):
    with LOCK:
        return number + OFFSET + current_rank().global_rank


class Model:
    def __init__(self, bias):
        self.bias = bias

    @wrapper(ranks())
    def method(self, number):
        return number + self.bias + current_rank().global_rank

    @classmethod
    @wrapper(ranks())
    def of_class(cls, number):
        return cls.__name__, number + current_rank().global_rank

    @staticmethod
    @wrapper(ranks())
    def static(number):
        return number + current_rank().global_rank

    def __call__(self, number):
        return number + self.bias + current_rank().global_rank


def closures():
    bias = 5

    def closure(number):
        return number + bias + current_rank().global_rank

    def recursive(number):
        return recursive(number - 1) + 1 if number else bias + current_rank().global_rank

    return closure, recursive


def generic(number, /, bias=0, *more, scale=1, **rest):
    return scale * (number + bias + sum(more) + sum(rest.values())) + current_rank().global_rank


@pytest.mark.parametrize(
    "launch",
    [
        lambda: wrapper(ranks())(lambda number: number + 5 + current_rank().global_rank)(1),
        lambda: wrapper(ranks())(closures()[0])(1),
        lambda: wrapper(ranks())(closures()[1])(1),
        lambda: guarded(1),
        lambda: Model(5).method(1),
        lambda: wrapper(ranks())(Model(5))(1),
        lambda: wrapper(ranks())(Model(5).__call__)(1),
        lambda: Model.static(6),
        lambda: wrapper(ranks())(generic)(1, 2, 3),
        lambda: wrapper(ranks())(generic)(1, scale=2, other=2),
    ],
    ids=["lambda", "closure", "recursive", "global_lock", "method", "callable", "bound", "static", "positional", "keyword"],
)
def test_any_function_launches(launch):
    """The function runs once per rank with the arguments of the call, and results have the order of ranks."""
    results = launch()
    assert type(results) is RankResults
    assert results == (6, 7)


def test_a_classmethod_launches():
    """A classmethod receives its class."""
    assert Model.of_class(1) == (("Model", 1), ("Model", 2))


def test_results_come_in_rank_order(tmp_path):
    """Results have the order of ranks, even if the last rank returns first."""

    def returns(folder):
        rank = current_rank().global_rank
        while rank < 3 and not Path(folder, str(rank + 1)).exists():  # the last rank first
            time.sleep(0.01)
        Path(folder, str(rank)).touch()
        return rank

    assert wrapper(ranks(4))(returns)(tmp_path) == (0, 1, 2, 3)


GUARD = 'if __name__ == "__main__": '
DEFINING = """
    from parawrap import Platform, current_rank, wrapper

    print("script")
    SCALE = 3

    class Point:
        def __init__(self, x):
            self.x = x

    class Failure(Exception):
        pass

    def scaled(x):
        return SCALE * x

    @wrapper(Platform(device="cpu", n_cpus=2, spawn_method="{method}"))
    def function(point):
        return Point(scaled(point.x) + current_rank().global_rank), Failure("text")

    def main():
        for point, failure in function(Point(2)):
            print(type(point) is Point, point.x, type(failure) is Failure, failure)

    {guard}main()
"""
DEFINED = ["script", "True 6 True text", "True 7 True text"]


@pytest.fixture(scope="module")
def defining(tmp_path_factory):
    """Running scripts that define and launch functions and classes, by spawn method."""
    scripts = {method: lambda _, method=method: (DEFINING.format(method=method, guard=""),) for method in METHODS}
    with running_scripts(tmp_path_factory.mktemp("defining"), scripts) as started:
        yield started


@pytest.mark.parametrize("method", METHODS)
def test_functions_and_classes_of_a_script_launch(method, defining):
    """Functions and classes of ``__main__`` work in ranks and in results, and the script's own code runs once."""
    script, _ = defining[method]
    output, _ = script.communicate(PATIENCE_S)
    assert output.splitlines() == DEFINED


def test_functions_and_classes_of_a_guarded_script_launch(tmp_path):
    """A script with a ``__main__`` guard works in a new interpreter."""
    text = DEFINING.format(method="forkserver", guard=GUARD)
    assert run_script(tmp_path, text, fresh=True).splitlines() == DEFINED


@pytest.mark.parametrize("method", METHODS)
def test_every_spawn_method_forms_a_world(method):
    """Ranks have their numbers, and collectives work."""

    def place():
        rank = current_rank()
        return (
            rank.global_rank,
            rank.local_rank,
            rank.node,
            rank.world_size,
            rank.restart,
            sum_over_ranks(rank.global_rank + 1),
        )

    count, total = (2, 3.0) if method == "spawn" else (3, 6.0)  # spawn: each rank is a slow new interpreter
    assert wrapper(ranks(count, spawn_method=method))(place)() == tuple((r, r, 0, count, 0, total) for r in range(count))


add = torch.ops.aten.add.Tensor


def use_settings_of_torch():
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.cache_size_limit = 9


class Trainer:
    def run(self, number):
        use_settings_of_torch()
        return add(torch.ones(()), number).item(), torch.backends.cudnn.benchmark, torch._dynamo.config.cache_size_limit


def test_functions_that_use_modules_of_any_class_launch():
    """Functions, their helpers, and classes may use torch.backends, torch.ops, and torch._dynamo.config."""

    class Local(Trainer):
        def run(self, number):
            use_settings_of_torch()
            torch.backends.cudnn.deterministic = True
            return super().run(number)

    def train(number):
        torch.backends.mkldnn.flags(enabled=False)
        return (Local().run(number),)

    launched = wrapper(ranks(1))(train)
    assert launched.dry_run(2).payload > 0
    assert launched(2) == (((3.0, True, 9),),)
    assert list(launched.map([2])) == [(((3.0, True, 9),),)]


def test_a_task_gets_its_ranks_and_arguments():
    """``Wrapper.start`` calls ``task(global_rank, local_rank, process_group, args)``."""

    def task(global_rank, local_rank, process_group, args):
        value = torch.tensor(args[0])
        dist.all_reduce(value, group=process_group)
        return global_rank, local_rank, value.item()

    assert Wrapper(ranks()).start(task, (4,)) == ((0, 0, 8), (1, 1, 8))
    assert Wrapper(ranks(ipc_groups=None)).start(lambda *given: given) == ((0, 0, None, None), (1, 1, None, None))


# -- results


def test_values_of_every_kind_come_back():
    """Scalars, nested containers, arrays, and tensors of many kinds come back unchanged."""

    def values():
        base = torch.arange(12.0).reshape(3, 4)
        return {
            "none": None,
            "nested": [(1, "a"), {2: {3.5}}],
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "strided": base.t()[1:],
            "half": torch.ones(2, dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 2j]).conj(),
            "bool": torch.tensor([True, False]),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3),
            "sparse": torch.eye(3).to_sparse(),
            "grad": torch.ones(2, requires_grad=True),
            "computed": torch.ones(2, requires_grad=True) * 2,
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "module": torch.nn.Linear(2, 1),
            "device": torch.device("cpu"),
            "dtype": torch.float16,
            "generator": torch.Generator().manual_seed(3).initial_seed(),
        }

    here = values()
    for there in wrapper(ranks())(values)():
        assert there.keys() == here.keys()
        assert (there["none"], there["nested"], there["device"], there["dtype"]) == (
            None, here["nested"], here["device"], here["dtype"]
        )  # fmt: skip
        assert np.array_equal(there["array"], here["array"])
        assert there["array"].dtype == np.int16
        for name in ("strided", "half", "complex", "bool", "empty", "scalar", "grad", "computed", "parameter"):
            assert torch.equal(there[name], here[name])
            assert there[name].dtype == here[name].dtype
        assert torch.equal(there["sparse"].to_dense(), torch.eye(3))
        assert there["strided"].stride() == here["strided"].stride()
        assert there["grad"].requires_grad
        assert type(there["parameter"]) is torch.nn.Parameter
        assert there["module"](torch.ones(1, 2)).shape == (1, 1)


@pytest.mark.parametrize("size", [4, 1 << 20], ids=["small", "big"])
def test_tensors_that_share_memory_still_do(size):
    """A tensor and its view share writable memory in arguments and in results."""

    def shares(both):
        whole, part = both
        part += 1
        return whole, whole[1:3], {"again": whole}

    whole = torch.zeros(size)
    for got, view, more in wrapper(ranks())(shares)((whole, whole[:2])):
        assert got[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
        view.fill_(7)
        assert got[:4].tolist() == [1.0, 7.0, 7.0, 0.0]
        assert more["again"].data_ptr() == got.data_ptr()
    assert not whole.any()


def test_empty_tensors_stay_apart():
    """A function can write different results into two empty arguments, with `out`."""

    def statistics(x, mean, deviation):
        torch.mean(x, 0, out=mean)
        torch.std(x, 0, out=deviation)
        return mean, deviation

    ((mean, deviation),) = wrapper(ranks(1))(statistics)(torch.tensor([1.0, 3.0, 5.0]), torch.empty(0), torch.empty(0))
    assert (mean.item(), deviation.item()) == (3, 2)
    ((first, second),) = wrapper(ranks(1))(lambda: (torch.empty(0), torch.empty(0)))()
    statistics(torch.tensor([1.0, 4.0, 7.0]), first, second)
    assert (first.item(), second.item()) == (4, 3)


def test_results_of_ranks_share_no_memory():
    """Writing into one rank's result does not change another rank's result."""
    first, second = wrapper(ranks())(torch.zeros)(1 << 20)
    first.fill_(1)
    assert not second.any()


BIG = 64 << 20


def test_big_results_come_back():
    """Results of 64 MB per rank arrive complete."""

    def big():
        return torch.full((BIG // 4,), current_rank().global_rank + 1.0)

    results = wrapper(ranks())(big)()
    assert [each.numel() for each in results] == [BIG // 4] * 2
    assert [(each.min().item(), each.max().item()) for each in results] == [(1.0, 1.0), (2.0, 2.0)]


def test_big_results_and_many_small_ones_come_back_with_few_descriptors(tmp_path):
    """Under ``ulimit -n 1024``, 64 MB per rank and 2,000 tensors per rank arrive, and few files stay open."""
    text = f"""
    import os, resource, torch
    from parawrap import Platform, current_rank, wrapper

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    @wrapper(Platform(device="cpu", n_cpus=2))
    def big():
        return torch.full(({BIG // 4},), current_rank().global_rank + 1.0)

    @wrapper(Platform(device="cpu", n_cpus=2))
    def many():
        return [torch.full((200,), float(i)) for i in range(2000)]

    print([(each.min().item(), each.max().item()) for each in big()])
    kept = [many() for _ in range(2)]
    print(all(tensor[-1] == i for each in kept for rank in each for i, tensor in enumerate(rank)))
    print(len(os.listdir("/proc/self/fd")) < 64)
    """

    assert run_script(tmp_path, text).splitlines() == ["[(1.0, 1.0), (2.0, 2.0)]", "True", "True"]


def test_each_rank_has_its_own_copy_of_big_arguments():
    """A write to an argument in one rank does not change the other ranks' or the parent's copy."""

    def writes(array):
        array += current_rank().global_rank
        dist.barrier()
        return array[0].item(), array.sum().item()

    array = torch.ones(1 << 21)
    assert wrapper(ranks())(writes)(array) == ((1.0, float(1 << 21)), (2.0, float(1 << 22)))
    assert array.sum() == 1 << 21


# -- groups and rendezvous


@pytest.mark.parametrize(
    ("groups", "sums", "members"),
    [
        ([], [6.0] * 4, [4] * 4),
        ([[0, 1], [2, 3]], [1.0, 1.0, 5.0, 5.0], [2] * 4),
        ([[0, 2]], [2.0, None, 2.0, None], [2, None, 2, None]),
        ([[3, 1, 0]], [4.0, 4.0, None, 4.0], [3, 3, None, 3]),
        ([[1]], [None, 1.0, None, None], [None, 1, None, None]),
    ],
)
def test_groups_are_those_of_the_platform(groups, sums, members):
    """Each rank's group has the ranks of its list; the group of a rank in no list is None."""

    def total():
        rank = current_rank()
        world = sum_over_ranks(1)
        if rank.group is None:
            return None, None, world
        value = torch.tensor(float(rank.global_rank))
        dist.all_reduce(value, group=rank.group)
        return value.item(), dist.get_world_size(rank.group), world

    expected = [(value, size, 4.0) for value, size in zip(sums, members, strict=True)]
    assert list(wrapper(ranks(4, ipc_groups=groups))(total)()) == expected


def test_without_ipc_groups_there_is_no_process_group():
    """With ``ipc_groups=None``, torch.distributed is not initialised."""
    assert wrapper(ranks(ipc_groups=None))(lambda: (current_rank().group, dist.is_initialized()))() == ((None, False),) * 2


@pytest.mark.parametrize("groups", [[], [[0], [1]]])
def test_ranks_can_meet_in_a_file(groups, tmp_path, monkeypatch):
    """``ipc_protocol="file"`` makes the same world in a private folder and removes the folder afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def looks(folder):
        (place,) = Path(folder).glob("parawrap-*")
        return place.stat().st_mode & 0o777, sum_over_ranks(1)

    platform = ranks(ipc_protocol="file", ipc_groups=groups)
    assert wrapper(platform)(looks)(str(tmp_path)) == ((0o700, 2.0),) * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("protocol", ["tcp", "file"])
def test_processes_listen_only_on_loopback(protocol, tmp_path):
    """Neither the parent nor a rank is reachable from another machine while a launch runs."""
    report_pid = report_pid_function()

    def waits(folder):
        dist.barrier()
        report_pid(folder)
        while not Path(folder, "go").exists():
            time.sleep(0.01)

    launch = wrapper(ranks(ipc_protocol=protocol))(waits).submit(tmp_path)
    processes = [psutil.Process(), *map(psutil.Process, pids_in(tmp_path, 2))]
    listening = {
        (each.pid, connection.laddr.ip)
        for each in processes
        for connection in each.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    talking = {
        connection.raddr.ip.removeprefix("::ffff:")
        for each in processes
        for connection in each.net_connections("inet")
        if connection.raddr
    }
    (tmp_path / "go").touch()
    launch.results(timeout=PATIENCE_S)
    assert {ip for _, ip in listening} <= {"127.0.0.1", "::1"}
    assert talking == {"127.0.0.1"}
    assert protocol == "file" or os.getpid() in {pid for pid, _ in listening}


def test_a_port_in_use_raises():
    """LaunchError has the address, the reason, and the fields to leave out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"cannot listen on 127.0.0.1:{port}.*in use.*leave out master_addr and master_port"
        ):
            wrapper(ranks(master_port=port))(lambda: None)()


def test_a_fixed_port_can_be_reused():
    """Consecutive launches can use the same `master_port` without a pause."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launchable = wrapper(ranks(master_port=port))(lambda: (os.environ["MASTER_PORT"], sum_over_ranks(1)))
    for _ in range(3):
        assert launchable() == ((str(port), 2.0),) * 2


# -- the environment of ranks


def drawn():
    return random.random(), torch.rand(1).item(), np.random.rand()


def test_seeds_are_equal_across_ranks_and_launches():
    """With a seed, every rank draws the same numbers as a plain process with that seed."""
    random.seed(3)
    torch.manual_seed(3)
    np.random.seed(3)
    here = drawn()
    assert wrapper(ranks(seed=3))(drawn)() == (here, here)
    assert wrapper(ranks(seed=4))(drawn)()[0] != here


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_without_a_seed_every_rank_draws_its_own(method):
    """With ``seed=None``, no generator draws the same numbers in two ranks or two launches."""
    launchable = wrapper(ranks(seed=None, spawn_method=method))(drawn)
    draws = [*launchable(), *launchable()]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == 4


@pytest.fixture
def restored_torch():
    """Restore the settings of torch that these tests change."""
    dtype, tf32 = torch.get_default_dtype(), torch.backends.cudnn.allow_tf32
    with torch.random.fork_rng([]):
        yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.allow_tf32 = tf32
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize("seed", [3, -3, 2**63 + 5])
def test_ranks_have_the_seed_of_the_script(method, seed, restored_torch):
    """Every launch starts from the script's last seed, in all ranks and all generators; so does `inline`."""
    torch.manual_seed(seed)
    launchable = wrapper(ranks(spawn_method=method))(drawn)
    first, second = launchable()
    assert first == second
    assert first[1] == torch.rand(1).item()
    assert launchable() == (first, first)  # also after the script has drawn
    assert launchable.inline() == (first,)
    assert wrapper(ranks(seed=4, spawn_method=method))(drawn)()[0] != first
    torch.manual_seed(4)
    assert launchable() == wrapper(ranks(seed=4))(drawn)()


def test_ranks_of_a_script_without_a_seed_start_equal(tmp_path):
    """Without `torch.manual_seed`, torch draws a random seed, and all launches of the script start from it."""
    text = """
    from parawrap import Platform, wrapper
    import random, torch

    draw = wrapper(Platform(device="cpu", n_cpus=2))(lambda: (torch.rand(1).item(), random.random()))
    print(*{*draw(), *draw(), *draw.inline()})
    """
    printed = {run_script(tmp_path, text, fresh=True) for _ in range(2)}
    assert len(printed) == 2  # another run draws another seed
    assert all(each.count("(") == 1 for each in printed)


def settings_of_torch():
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.is_anomaly_enabled(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("method", METHODS)
def test_ranks_have_the_settings_of_torch_of_the_script(method, restored_torch):
    """Default dtype, determinism, precision, cuDNN's flags, and the grad mode are those of the script at the launch."""
    launchable = wrapper(ranks(1, spawn_method=method))(settings_of_torch)
    before = settings_of_torch()
    assert launchable() == (before,)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    with torch.autograd.set_detect_anomaly(True), torch.no_grad():
        after = settings_of_torch()
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert launchable() == launchable.inline() == (after,)
    assert wrapper(ranks(1))(lambda: torch.ones(1).dtype)() == (torch.float64,)


def test_ranks_have_the_precision_of_the_script(tmp_path):
    """The newer flags of torch reach ranks too. They make the older ones unreadable, there as in the script."""
    text = """
    import torch
    from parawrap import Platform, wrapper

    def read():
        try:
            older = torch.get_float32_matmul_precision()
        except RuntimeError:
            older = None
        backends = torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
        return older, *(each.fp32_precision for each in backends)

    torch.backends.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    print(read(), *wrapper(Platform(device="cpu"))(read)())
    """
    first, second = run_script(tmp_path, text, fresh=True).strip().split(") (")
    assert first.strip("()") == second.strip("()")
    assert first == "(None, 'ieee', 'tf32', 'ieee', 'bf16'"


@pytest.mark.parametrize("method", METHODS)
def test_ranks_have_the_surroundings_of_the_call(method, tmp_path, monkeypatch):
    """Environment, working directory, import path, and `sys.argv` are those of the parent at the call."""
    (tmp_path / "user_module.py").write_text("VALUE = 'imported'")

    def looks():
        import user_module

        return user_module.VALUE, os.environ.get("MINE"), os.environ.get("GONE"), Path.cwd(), sys.argv, Path.cwd().exists()

    launchable = wrapper(ranks(1, spawn_method=method))(looks)
    monkeypatch.setenv("GONE", "not yet")
    monkeypatch.setenv("MINE", "first")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "--lr", "0.1"])
    assert launchable() == (("imported", "first", "not yet", tmp_path, ["script.py", "--lr", "0.1"], True),)
    monkeypatch.setenv("MINE", "zweit\u00e9\udc80")
    monkeypatch.delenv("GONE")
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    monkeypatch.setattr(sys, "argv", [""])
    assert launchable() == (("imported", "zweit\u00e9\udc80", None, tmp_path / "deeper", [""], True),)


def test_ranks_see_modules_as_they_are_now(tmp_path, monkeypatch):
    """A module that was edited between two launches is imported again."""
    monkeypatch.syspath_prepend(tmp_path)

    def looks():
        import changing

        return changing.VALUE

    for value in (1, 22):
        (tmp_path / "changing.py").write_text(f"VALUE = {value}")
        assert wrapper(ranks())(looks)() == (value, value)


def test_a_parent_in_a_removed_folder_can_launch(tmp_path, monkeypatch):
    """A parent can launch after its working directory was removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_ranks_have_the_variables_of_torchrun():
    """RANK, LOCAL_RANK, WORLD_SIZE, and so on are set in ranks, but not in the parent."""

    def looks():
        return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]

    assert wrapper(ranks())(looks)() == (["0", "0", "2", "2", "127.0.0.1"], ["1", "1", "2", "2", "127.0.0.1"])
    assert "RANK" not in os.environ


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_torch_threads_of_ranks_share_the_cores(method, monkeypatch):
    """Each rank has its share of the cores, at least one thread, and a parallel sum does not hang after the fork."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    torch.rand(1 << 22).sum()  # starts this process's own threads

    def threads():
        total = torch.ones(1 << 22).sum().item()
        return torch.get_num_threads(), total

    for count in (1, 2, 2 * cores):
        launch = wrapper(ranks(count, spawn_method=method))(threads).submit()
        try:
            found = launch.results(timeout=PATIENCE_S)
        finally:
            launch.cancel()
        share = 1 if method == "fork" else max(1, cores // count)  # OpenMP's threads do not survive a fork
        assert found == ((share, float(1 << 22)),) * count


def test_omp_num_threads_is_kept(monkeypatch):
    """Ranks use the user's OMP_NUM_THREADS, even if it changes between launches."""
    for number in ("3", "1"):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        assert wrapper(ranks())(torch.get_num_threads)() == (int(number),) * 2


def test_a_rank_can_start_loader_workers():
    """A DataLoader with worker processes works in a rank."""

    def loads():
        from torch.utils.data import DataLoader

        return [batch.sum().item() for batch in DataLoader(torch.arange(8.0), batch_size=4, num_workers=2)]

    assert wrapper(ranks())(loads)() == ([6.0, 22.0],) * 2


STARTING = """
import sys
from torch.utils.data import DataLoader
from parawrap import Platform, wrapper

print("script", __name__, file=sys.stderr)

class Own:
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return float(i)

@wrapper(Platform(device="cpu", n_cpus=1))
def loads(method, has_own):
    import rows

    datasets = [rows.ROWS, *([Own()] if has_own else [])]
    options = {"batch_size": 4, "num_workers": 1, "multiprocessing_context": method}
    return [batch.sum().item() for dataset in datasets for batch in DataLoader(dataset, **options)]

if __name__ == "__main__":
    for method in sys.argv[2:]:
        print(*loads(method, sys.argv[1] == "own"))
"""
STARTS = {
    "script": ["train.py", "own", "spawn"],
    "-m": ["-m", "job.train", "own", "forkserver"],
    "-c": ["-c", STARTING, "none", "forkserver"],
    "stdin": ["-", "none", "spawn"],
    "-c own": ["-c", STARTING, "own", "spawn"],
}


def run_start(start, folder):
    """Run an interpreter, started in one of these ways, that launches a rank whose loader spawns workers."""
    (folder / "job").mkdir()
    (folder / "job" / "near.py").touch()
    (folder / "job" / "train.py").write_text(f"from . import near\n{STARTING}")
    (folder / "train.py").write_text(STARTING)
    (folder / "rows.py").write_text("class Rows(list): pass\nROWS = Rows([1.0, 2.0])")
    command = [sys.executable, *STARTS[start]]
    given = STARTING if start == "stdin" else ""
    return subprocess.run(
        command, input=given, cwd=folder, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
    )


@pytest.mark.parametrize("start", ["script", "-m", "-c", "stdin"])
def test_a_rank_can_spawn_loader_workers(start, tmp_path):
    """However the script was started, spawned workers find its datasets, and modules of the working folder."""
    ended = run_start(start, tmp_path)
    assert ended.stdout == ("[3.0, 6.0]\n" if "own" in STARTS[start] else "[3.0]\n"), ended.stderr
    assert ended.stderr.count("script __main__") == 1  # ranks and workers do not run the guarded part again


UNGUARDED = """
import sys
from torch.utils.data import DataLoader
from parawrap import Platform, wrapper

class Own(list):
    pass

@wrapper(Platform(device="cpu", verbose=False))
def loads(method):
    options = {"num_workers": 1, "multiprocessing_context": method}
    return list(DataLoader(Own([1.0, 2.0]), **options))

try:
    loads(sys.argv[1])
except RuntimeError as error:
    print(error.__notes__[0])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_of_an_unguarded_script_name_the_guard(method, tmp_path):
    """The error of the loader has a note that says to guard the main script."""
    note = run_script(tmp_path, UNGUARDED, method, fresh=True)
    assert 'put the script\'s actions under `if __name__ == "__main__":`' in note


def test_spawned_workers_lack_a_dataset_of_a_command(tmp_path):
    """A dataset that ``python -c`` defines fails in a rank with the messages of plain Python."""
    ended = run_start("-c own", tmp_path)
    assert ended.stdout == ""
    assert "Can't get attribute 'Own' on <module '__main__' (built-in)>" in ended.stderr
    assert "RuntimeError: DataLoader worker (pid" in ended.stderr


def test_a_launch_within_a_rank_raises():
    """LaunchError names ``__wrapped__``, which runs the function in the rank."""

    def recurses(bare):
        inner = wrapper(ranks())(lambda: "inner")
        if bare:
            return inner.__wrapped__()
        for call in (inner, inner.submit, inner.inline):
            with contextlib.suppress(LaunchError):
                call()
                return call
        return inner()

    launchable = wrapper(ranks())(recurses)
    assert launchable(bare=True) == ("inner", "inner")
    with pytest.raises(LaunchError, match=r"launched within rank \d of 2: a rank cannot launch ranks.*__wrapped__"):
        launchable(bare=False)


# -- the handle


def test_submit_returns_a_handle(tmp_path):
    """`submit` does not wait; `state`, `done`, `logs`, and `results` follow the launch."""

    def waits(folder):
        print("in rank", current_rank().global_rank, flush=True)
        while not Path(folder, "go").exists():
            time.sleep(0.01)
        return current_rank().global_rank

    launch = wrapper(ranks())(waits).submit(tmp_path)
    assert (launch.state, launch.done()) == ("running", False)
    eventually(lambda: [launch.logs(rank) for rank in (0, 1)] == ["in rank 0\n", "in rank 1\n"], "both lines")
    with pytest.raises(TimeoutError, match=r"still run after 0\.01 seconds"):
        launch.results(timeout=0.01)
    assert "running" in repr(launch)
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (0, 1)
    assert launch.results() is launch.results()
    assert (launch.state, launch.done()) == ("finished", True)
    assert launch.logs(1) == "in rank 1\n"
    for rank in (-1, 2):
        with pytest.raises(IndexError, match=f"rank={rank}: this launch has the ranks 0 to 1"):
            launch.logs(rank)


def test_a_failed_launch_has_state_failed():
    """The state is "failed" before and after `results`, which raises at every call."""
    launch = wrapper(ranks())(lambda: 1 / 0).submit()
    eventually(launch.done, "the end of the launch")
    assert launch.state == "failed"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            launch.results()
    assert launch.state == "failed"


def test_concurrent_launches_do_not_collide():
    """Eight launches from eight threads each have their own world and results."""

    def total(number):
        return number, sum_over_ranks(number)

    launchable = wrapper(ranks())(total)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(launchable, range(8)))
    assert results == [((number, 2.0 * number),) * 2 for number in range(8)]


def test_launches_overlap():
    """Two submitted launches run at the same time: each waits for the other to start."""

    def meets(mine, other):
        Path(mine).touch()
        while not Path(other).exists():
            time.sleep(0.01)
        return mine

    launchable = wrapper(ranks(1))(meets)
    launches = [launchable.submit(*names) for names in (("a", "b"), ("b", "a"))]
    assert [launch.results(timeout=PATIENCE_S) for launch in launches] == [("a",), ("b",)]


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_thread_that_blocks_signals_can_launch(method, tmp_path):
    """If the launching thread blocks all signals, as in many servers, ranks still run, clean up, and end."""
    text = f"""
    import os, signal, threading, time
    from parawrap import LaunchCancelledError, Platform, wrapper

    platform = Platform(device="cpu", n_cpus=2, spawn_method="{method}", grace_s=15)

    @wrapper(platform)
    def returns():
        return 1

    @wrapper(platform)
    def waits():
        try:
            print("begun", flush=True)
            time.sleep(600)
        finally:
            print("cleaned up", flush=True)

    def launches():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        print(returns.submit().results(timeout=10), flush=True)
        launch = waits.submit()
        while "begun" not in launch.logs(0):
            time.sleep(0.01)
        threading.Timer(10, os._exit, [1]).start()
        launch.cancel()
        print(launch.state, flush=True)
        os._exit(0)

    launching = threading.Thread(target=launches)
    launching.start()
    launching.join()  # Python 3.12 starts no threads after the main thread has ended
    """
    lines = run_script(tmp_path, text).splitlines()
    assert lines[0] == "RankResults(1, 1)"
    assert "[rank 0] cleaned up" in lines
    assert lines[-1] == "cancelled"


def test_dry_run_starts_nothing():
    """`dry_run` shows launcher, ranks, groups, and payload size, finds unsendable arguments, and starts no process."""
    before = descendant_pids()
    preview = wrapper(ranks(4, ipc_groups=[[0, 1], [2, 3]]))(lambda data: data).dry_run(torch.zeros(1 << 18))
    assert preview.launcher == "local"
    assert len(preview.ranks) == 4
    assert preview.payload > 1 << 20
    assert "[0, 1], [2, 3]" in str(preview)
    assert "in a new private folder" in str(preview)
    # A process of an earlier, cancelled launch may still start and end.
    eventually(lambda: descendant_pids() <= before, "no new process")
    with pytest.raises(TypeError, match=r"args\[0\] cannot be sent"):
        wrapper(ranks())(lambda data: data).dry_run(threading.Lock())


# -- upon_finish


def test_upon_finish_is_called_once():
    """The parent calls `upon_finish` once, after all ranks have finished."""
    calls = []
    launch = wrapper(ranks(upon_finish=lambda: calls.append(os.getpid())))(lambda: 1).submit()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)
    launch.results()
    assert calls == [os.getpid()]


@pytest.mark.parametrize("end", ["raises", "exits", "cancelled", "hangs"])
def test_upon_finish_is_not_called_after_a_failure(end):
    """`upon_finish` is not called after an exception, a death, a cancel, or a timeout."""
    calls = []

    def fails():
        if end == "raises":
            raise ValueError
        if end == "exits":
            os._exit(1)
        time.sleep(600)

    limit = {"hang_timeout_s": 0.3} if end == "hangs" else {}
    launch = wrapper(ranks(upon_finish=lambda: calls.append(1), grace_s=1, **limit))(fails).submit()
    if end == "cancelled":
        launch.cancel()
    with pytest.raises((ValueError, LaunchError)):
        launch.results(timeout=PATIENCE_S)
    assert calls == []


def test_an_error_in_upon_finish_is_logged(caplog):
    """The error is logged, the results are returned, and the launch counts as finished."""

    def fails():
        raise LookupError("in upon_finish")

    launch = wrapper(ranks(upon_finish=fails))(lambda: 1).submit()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)
    assert launch.state == "finished"
    assert "LookupError: in upon_finish" in caplog.text


def test_upon_finish_can_use_launches(tmp_path):
    """`upon_finish` can get the results of its launch, cancel it without effect, or start another launch."""
    text = """
    import os, threading
    from parawrap import Platform, wrapper

    @wrapper(Platform(device="cpu", n_cpus=2))
    def works():
        return 1

    def results():
        print(launch.results(timeout=5), flush=True)

    def cancel():
        launch.cancel()
        results()

    def launch_another():
        print(works(), flush=True)

    threading.Timer(15, os._exit, [1]).start()
    for use in (results, cancel, launch_another):
        ready = threading.Event()
        finish = lambda use=use, ready=ready: (ready.wait(), use())
        launch = wrapper(Platform(device="cpu", n_cpus=2, upon_finish=finish))(works.__wrapped__).submit()
        ready.set()
        print(launch.results(timeout=10), flush=True)
    os._exit(0)
    """
    assert run_script(tmp_path, text).splitlines() == ["RankResults(1, 1)"] * 6


# -- output


def lines_of(capfd):
    out, err = capfd.readouterr()
    return sorted(out.splitlines()), sorted(err.splitlines())


def writes():
    print("out", current_rank().global_rank)
    print("err", current_rank().global_rank, file=sys.stderr)
    os.write(1, b"raw\n")


@pytest.mark.parametrize("method", METHODS)
def test_lines_are_shown_with_a_rank_prefix(method, capfd):
    """Lines appear on the same stream as in the rank, including output of C code."""
    wrapper(ranks(verbose=True, spawn_method=method))(writes)()
    out, err = lines_of(capfd)
    assert out == ["[rank 0] out 0", "[rank 0] raw", "[rank 1] out 1", "[rank 1] raw"]
    assert err == ["[rank 0] err 0", "[rank 1] err 1"]


def test_one_rank_needs_no_prefix(capfd):
    """The lines of a single rank are shown as they are."""
    wrapper(ranks(1, verbose=True))(writes)()
    assert lines_of(capfd) == (["out 0", "raw"], ["err 0"])


def test_quiet_launches_show_nothing(capfd):
    """With ``verbose=False``, no output is shown, but `logs` keeps it."""
    launch = wrapper(ranks())(writes).submit()
    launch.results(timeout=PATIENCE_S)
    assert lines_of(capfd) == ([], [])
    assert sorted(launch.logs(1).splitlines()) == ["err 1", "out 1", "raw"]


@pytest.mark.parametrize("text", ["a\u2028b", "a\x0cb", "a\x1cb", "a\x85b", "é €", "a\tb"])
def test_only_newlines_end_lines(text, capfd):
    """A line with other Unicode line separators gets its prefix once."""
    wrapper(ranks(verbose=True))(print)(text)
    out, _ = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", f"[rank 0] {text}", f"[rank 1] {text}"]


def test_a_progress_bar_is_shown(capfd):
    """Text that ends in a carriage return is shown, and a last line without a newline is not lost."""

    def draws():
        sys.stdout.write("50%\r")
        sys.stdout.write("100%\r\n")
        sys.stdout.write("end")

    wrapper(ranks(1, verbose=True))(draws)()
    out = capfd.readouterr()[0]
    assert out.replace("\r\n", "\n") == "50%\r100%\nend\n"


def test_lines_of_ranks_never_mix(capfd):
    """2,000 lines from each of two ranks, written in pieces, are shown complete."""

    def pours():
        rank = current_rank().global_rank
        for i in range(2000):
            os.write(1, f"{rank} {i}".encode())
            os.write(1, b" end\n")

    wrapper(ranks(verbose=True))(pours)()
    lines = capfd.readouterr()[0].splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {rank} {i} end" for i in range(2000)]
    assert len(lines) == 4000


def test_output_beyond_memory_is_kept():
    """``logs`` returns 8 MB of output complete."""
    launch = wrapper(ranks(1))(lambda: print("x" * (8 << 20))).submit()
    launch.results(timeout=PATIENCE_S)
    assert launch.logs(0) == "x" * (8 << 20) + "\n"


def test_the_first_rank_logs_more_than_the_others(capfd):
    """Rank 0 logs from INFO, the other ranks from WARNING."""

    def logs():
        logger = logging.getLogger("mine")
        logger.debug("debug")
        logger.info("info")
        logger.warning("warning")

    wrapper(ranks(verbose=True))(logs)()
    assert lines_of(capfd)[1] == [
        "[rank 0] INFO:mine:info",
        "[rank 0] WARNING:mine:warning",
        "[rank 1] WARNING:mine:warning",
    ]


def test_console_logs_has_a_file_per_rank(tmp_path):
    """Each launch makes a new folder with one file per rank, which has all output of the rank."""
    logs = tmp_path / "deep" / "logs"
    launchable = wrapper(ranks(console_logs=logs))(lambda text: print(text, current_rank().global_rank))
    launches = {text: launchable.submit(text) for text in ("first", "second")}
    for text, launch in launches.items():
        launch.results()
        assert launch.log_folder.parent == logs
        assert {path.name: path.read_text() for path in launch.log_folder.iterdir()} == {
            "rank-0.log": f"{text} 0\n",
            "rank-1.log": f"{text} 1\n",
        }
    assert len(list(logs.iterdir())) == 2


@pytest.mark.parametrize("obstacle", ["file", "below_a_file"])
def test_an_unwritable_log_folder_raises(obstacle, tmp_path):
    """LaunchError names the folder before any rank runs the function."""
    (tmp_path / "file").touch()
    folder = {"file": "file", "below_a_file": "file/logs"}[obstacle]
    ran = tmp_path / "ran"
    with pytest.raises(LaunchError, match=re.escape(str(tmp_path / folder))):
        wrapper(ranks(console_logs=tmp_path / folder))(lambda: ran.touch())()
    assert not ran.exists()


def test_an_unencodable_character_does_not_lose_the_line(tmp_path):
    """If the parent's encoding lacks a character, the character is replaced, and all lines are shown."""
    text = """
    import sys
    from parawrap import Platform, wrapper

    sys.stdout.reconfigure(encoding="ascii", errors="strict")

    @wrapper(Platform(device="cpu", n_cpus=1))
    def writes():
        print("before")
        print("caf\\u00e9")
        print("after", flush=True)

    writes()
    """
    lines = run_script(tmp_path, text).splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("caf")
    assert lines[2:] == ["after"]


CLOSING = """
    import json, os, sys
    for number in {closed!r}:
        os.close(number)
    import torch, torch.distributed as dist
    from parawrap import Platform, current_rank, wrapper

    @wrapper(Platform(device="cpu", n_cpus=2, spawn_method="{method}"))
    def works():
        print("out")
        os.write(2, b"err")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), sys.stdin is None or sys.stdin.read()

    launch = works.submit()
    results = launch.results(timeout=20)
    with open("found", "w") as file:
        json.dump([results, sorted(launch.logs(1).split())], file)
    os._exit(0)  # the interpreter could not flush its output
"""
CLOSED = [((0,), "forkserver"), ((0, 1, 2), "spawn"), ((1, 2), "fork"), ((0, 1, 2), "fork")]


@pytest.fixture(scope="module")
def closing(tmp_path_factory):
    """Running scripts that close some standard streams and launch, by streams and spawn method."""
    scripts = {case: lambda _, case=case: (CLOSING.format(closed=case[0], method=case[1]),) for case in CLOSED}
    with running_scripts(tmp_path_factory.mktemp("closing"), scripts) as started:
        yield started


@pytest.mark.parametrize("case", CLOSED, ids=["stdin-forkserver", "all-spawn", "outputs-fork", "all-fork"])
def test_a_parent_with_closed_streams_can_launch(case, closing):
    """With any standard streams closed, ranks run, their output is kept, and collectives work."""
    script, folder = closing[case]
    output = script.communicate(PATIENCE_S)
    assert script.returncode == 0, output
    results, words = json.loads((folder / "found").read_text())
    assert [total for total, _ in results] == [2.0, 2.0]
    assert sorted("".join(words)) == sorted("outerr")


# -- many descriptors


@contextlib.contextmanager
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(Path(os.devnull).open())
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_parent_with_many_open_files_can_launch(method, tmp_path):
    """With more than 1,024 open descriptors, launches run, ranks clean up, and forks of ranks are ended."""
    report_pid = report_pid_function()

    def fails(folder):
        if current_rank().global_rank == 1:
            pid = os.fork()
            if pid == 0:
                while True:
                    time.sleep(600)
            report_pid(folder, pid)
            os._exit(3)
        try:
            time.sleep(600)
        finally:
            Path(folder, "cleaned").touch()

    with many_descriptors():
        assert wrapper(ranks(spawn_method=method))(lambda: sum_over_ranks(1))() == (2.0, 2.0)
        with pytest.raises(LaunchError, match="rank 1 of 2 exited with code 3"):
            wrapper(ranks(spawn_method=method))(fails)(tmp_path)
    assert (tmp_path / "cleaned").exists()
    assert_gone(pids_in(tmp_path, 1))


def test_functions_can_share_a_platform():
    """One platform object works for several functions."""
    platform = Platform(device="cpu", n_cpus=2, verbose=False)
    assert wrapper(platform)(lambda: 1)() == wrapper(platform)(lambda: 1)() == (1, 1)


def test_classes_of_a_script_can_be_pickled_by_name_in_a_rank(tmp_path):
    """A rank's `__main__` has the script's classes, so torch.save and all_gather_object can pickle them."""
    text = """
    import dataclasses, io, warnings
    import torch
    import torch.distributed as dist
    from parawrap import Platform, wrapper

    warnings.simplefilter("error")

    class Net(torch.nn.Linear):
        pass

    @dataclasses.dataclass
    class Config:
        lr: float

    @wrapper(Platform(device="cpu", n_cpus=2))
    def train(config):
        torch.save({"model": Net(1, 1), "config": config}, io.BytesIO())
        gathered = [None, None]
        dist.all_gather_object(gathered, config)
        return gathered

    print(train(Config(0.5))[1] == [Config(0.5), Config(0.5)])
    """
    assert run_script(tmp_path, text) == "True\n"


def test_a_launch_in_a_process_started_by_a_rank_raises():
    """Such a process inherits the variables of the rank's world but is not a rank of it."""

    def starts_another():
        code = "from parawrap import *; wrapper(Platform(device='cpu'))(len)([])"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr

    (stderr,) = wrapper(ranks(1))(starts_another)()
    assert "LaunchError: len was launched in a process that a rank started" in stderr
    assert "__main__" in stderr


def test_a_distributed_model_cannot_be_returned():
    """UnsendableError says to send ``model.module`` instead."""
    with pytest.raises(UnsendableError, match=r"the result cannot be sent.*send model\.module"):
        wrapper(ranks())(lambda: functional.to(torch.nn.Linear(1, 1)))()


# -- files that the function leaves open


class Tee:
    """Writes into a file and to the standard output that it replaces, like the loggers of many training scripts."""

    def __init__(self, path):
        self.file, self.stream = path.open("w"), sys.stdout

    def write(self, text):
        self.file.write(text)
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()


def leave_files_open(folder):
    """Leave files of many kinds open, in globals, in a module, and in a cycle."""
    gc.collect()  # so that none follows before the function returns: Python itself would lose the buffer of the cycle
    kept = globals()["_kept"] = {
        "text": (folder / "text").open("w"),
        "binary": (folder / "binary").open("wb"),
        "update": (folder / "update").open("w+b"),
        "gzip": gzip.open(folder / "gzip", "wt"),  # noqa: SIM115
        "bz2": bz2.open(folder / "bz2", "wt"),  # noqa: SIM115
        "lzma": lzma.open(folder / "lzma", "wb"),  # noqa: SIM115
        "gzip on a file": gzip.GzipFile(fileobj=(folder / "outer").open("wb"), mode="wb"),
    }
    for name, file in kept.items():
        file.write(name if isinstance(file, io.TextIOBase) else name.encode())
    archive = json.archive_of_a_test = zipfile.ZipFile(folder / "zip", "w")
    archive.writestr("member", "zip")
    cycle = [(folder / "cycle").open("w")]
    cycle.append(cycle)
    cycle[0].write("cycle")
    sys.stdout = Tee(folder / "tee")
    print("tee")


def contents(folder):
    """Return the text of each file in a folder, decompressed."""
    opened = {"gzip": gzip.open, "outer": gzip.open, "bz2": bz2.open, "lzma": lzma.open}
    found = {}
    for path in folder.iterdir():
        if path.name == "zip":
            with zipfile.ZipFile(path) as archive:
                found["zip"] = archive.read("member").decode()
        else:
            with opened.get(path.name, open)(path, "rt") as file:
                found[path.name] = file.read()
    return found


@pytest.mark.parametrize("end", ["return", "exception", "exit"])
@pytest.mark.parametrize("method", METHODS)
def test_open_files_keep_what_was_written(method, end, tmp_path):
    """Buffers of files that the function leaves open are written, however it ends, and compressed files are complete."""

    def works():
        leave_files_open(tmp_path)
        if end == "exception":
            raise KeyError
        if end == "exit":
            sys.exit(3)

    with contextlib.nullcontext() if end == "return" else pytest.raises(KeyError if end == "exception" else LaunchError):
        wrapper(ranks(1, spawn_method=method))(works)()
    names = ["text", "binary", "update", "gzip", "bz2", "lzma", "zip", "cycle"]
    assert contents(tmp_path) == {name: name for name in names} | {"outer": "gzip on a file", "tee": "tee\n"}


def test_open_files_are_written_if_another_rank_fails(tmp_path):
    """A rank that ends because of another rank's failure writes its files too."""

    def works():
        if current_rank().global_rank == 0:
            leave_files_open(tmp_path)
            (tmp_path.parent / "left open").touch()
            time.sleep(600)
        eventually((tmp_path.parent / "left open").exists, "the files of rank 0")
        raise KeyError

    with pytest.raises(KeyError):
        wrapper(ranks(grace_s=PATIENCE_S))(works)()
    assert contents(tmp_path)["gzip"] == "gzip"


def test_a_buffer_of_the_parent_is_not_written_by_a_rank(tmp_path):
    """What this process had not yet written when it forked a rank is written once, by this process."""
    with (tmp_path / "log").open("w") as log:
        log.write("line\n")
        assert wrapper(ranks(spawn_method="fork"))(lambda: gc.collect() >= 0)() == (True, True)
    assert (tmp_path / "log").read_text() == "line\n"


class Broken(io.RawIOBase):
    """A file that cannot be closed, and that raises again when it is deleted."""

    name = "broken"

    def close(self):
        raise SystemExit

    def __del__(self):
        raise KeyboardInterrupt


def test_files_that_cannot_be_written_are_named(tmp_path):
    """A full disk, a pipe without a reader, and a blocked pipe do not keep the rank from ending or writing other files."""

    def works():
        from parawrap.launch.rank import _flush_files

        _flush_files.WAIT_S = 0.5
        (reader, writer), (gone, into_gone) = os.pipe(), os.pipe()
        os.close(gone)
        globals()["_kept"] = blocked, into_nothing, full, disk, _ = [
            os.fdopen(writer, "wb", buffering=1 << 20),
            os.fdopen(into_gone, "w"),
            Path("/dev/full").open("w"),  # noqa: SIM115
            (tmp_path / "disk").open("w"),
            Broken(),
        ]
        blocked.write(bytes(1 << 19))
        into_nothing.write("x")
        full.write("x")
        disk.write("on disk")
        return reader, writer, into_gone

    launch = wrapper(ranks(1))(works).submit()
    _, writer, into_gone = launch.results(timeout=PATIENCE_S)[0]
    assert (tmp_path / "disk").read_text() == "on disk"
    lines = [line for line in launch.logs(0).splitlines() if line.startswith("the file ")]
    assert sorted(lines) == sorted(
        f"the file {name!r}, which the function left open, is incomplete: {why}. Close it in the function"
        for name, why in [
            ("broken", "SystemExit: "),
            ("/dev/full", "OSError: [Errno 28] No space left on device"),
            (into_gone, "BrokenPipeError: [Errno 32] Broken pipe"),
            (writer, "its buffer was not written in 0.5 s"),
        ]
    )


def test_an_idle_thread_pool_does_not_block_the_return_of_a_rank():
    """Idle pool threads are ended, as at the exit of any program."""

    def works():
        import concurrent.futures

        globals()["_kept"] = pool = concurrent.futures.ThreadPoolExecutor(1)
        return pool.submit(lambda: 7).result()

    assert wrapper(ranks())(works).submit().results(timeout=PATIENCE_S) == (7, 7)
