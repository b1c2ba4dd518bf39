"""The process of a rank: what it shares with the launching process, and how it differs from it."""

from __future__ import annotations

import atexit
import io
import json
import logging
import multiprocessing
import os
import pdb
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, current_rank, wrapper
from tests.helpers.processes import failure_of, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S

METHODS = ["forkserver", "spawn", "fork"]


# -- multiprocessing


class PutRow(torch.utils.data.Dataset):
    """A dataset that puts each row it loads into a queue."""

    def __init__(self, queue):
        self.queue = queue

    def __len__(self):
        return 2

    def __getitem__(self, row):
        self.queue.put(row)
        return row


@pytest.fixture(scope="module")
def manager():
    """A running manager of multiprocessing."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.mark.parametrize("method", METHODS)
def test_ranks_can_use_the_objects_of_a_manager(method, manager):
    """Ranks put into a queue of the launching process, and read its dict."""
    queue, settings = manager.Queue(), manager.dict(lr=0.5)

    def report(queue, settings):
        queue.put((current_rank().global_rank, settings["lr"]))

    wrapper(ranks(spawn_method=method))(report)(queue, settings)
    assert sorted([queue.get(timeout=PATIENCE_S), queue.get(timeout=PATIENCE_S)]) == [(0, 0.5), (1, 0.5)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader_workers_of_ranks_can_use_the_objects_of_a_manager(method, manager):
    """A queue reaches the launching process from the workers of a rank, also in `map`."""
    queue = manager.Queue()

    def load(queue):
        return len(list(torch.utils.data.DataLoader(PutRow(queue), num_workers=1, multiprocessing_context=method)))

    assert [list(each) for each in wrapper(ranks(1))(load).map([queue, queue], max_parallel=2)] == [[2], [2]]
    assert sorted(queue.get(timeout=PATIENCE_S) for _ in range(4)) == [0, 0, 1, 1]


# -- prompts


def call_breakpoint():
    breakpoint()


def set_trace():
    pdb.set_trace()
    return current_rank()


def examine_exception():
    try:
        raise KeyError
    except KeyError:
        pdb.post_mortem()


def interact():
    import code

    code.interact()


def embed():
    import IPython

    IPython.embed()


def break_in_rank_0():
    if current_rank().global_rank == 0:
        breakpoint()
    dist.barrier()


def break_with_torch():
    dist.breakpoint(1)


@pytest.mark.parametrize(
    "function", [call_breakpoint, set_trace, examine_exception, interact, embed, break_in_rank_0, break_with_torch]
)
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_debugger_in_a_rank_fails_and_names_inline(function, method):
    """LaunchError says to call ``inline``, and no rank waits for a terminal."""
    if function is embed:
        pytest.importorskip("IPython")
    error, _ = failure_of(function, platform=ranks(spawn_method=method))
    assert type(error) is LaunchError
    assert f"a rank has no terminal. Call {function.__name__}.inline(...)" in str(error)
    assert f"in {function.__name__}" in notes_of(error)


def test_the_debugger_of_the_user_is_called(monkeypatch):
    """The callable that PYTHONBREAKPOINT names runs in the rank, because it may have its own connection."""
    monkeypatch.setenv("PYTHONBREAKPOINT", "os.getpid")
    assert all(wrapper(ranks())(lambda: breakpoint())())


@pytest.fixture
def open_stdin(monkeypatch):
    """Make standard input a pipe that stays open, like a terminal."""
    saved, (reader, writer) = os.dup(0), os.pipe()
    os.dup2(reader, 0)
    with open(0, closefd=False) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield
    os.dup2(saved, 0)
    for file in saved, reader, writer:
        os.close(file)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_in_a_rank_fails_and_names_inline(method, open_stdin):
    """`input` raises EOFError with a note that says to call ``inline``, although the script has a terminal."""

    def confirm():
        return input("continue? ")

    error, _ = failure_of(confirm, platform=ranks(spawn_method=method))
    assert type(error) is EOFError
    assert "Call confirm.inline(...)" in notes_of(error)


def test_a_function_can_replace_standard_input(monkeypatch):
    """`input` reads from the stream that the function puts in the place of standard input, which is empty."""

    def read():
        found = [sys.stdin.read()]
        sys.stdin = io.StringIO("yes\nno")
        return [*found, input("first? "), input()]

    assert wrapper(ranks(1))(read)() == (["", "yes", "no"],)


# -- options of the interpreter, and variables that libraries read at import

OPTIONS = """
import json, sys, warnings
from parawrap import Platform, wrapper

def look():
    import torch
    def warns(category):
        with warnings.catch_warnings(record=True) as caught:
            try:
                warnings.warn("seen", category)
            except Warning:
                return "error"
        return len(caught)

    names = "optimize", "dev_mode", "bytes_warning", "utf8_mode", "dont_write_bytecode"
    flags = [getattr(sys.flags, name) for name in names]
    return [__debug__, *flags, warns(UserWarning), warns(DeprecationWarning), sys._xoptions.get("own")]

if __name__ == "__main__":
    found = [wrapper(Platform(device="cpu", spawn_method=each))(look)()[0] for each in ("forkserver", "spawn", "fork")]
    print(json.dumps([look(), *found]))
"""


@pytest.mark.parametrize(
    "options",
    [
        ["-OO", "-B", "-W", "error::DeprecationWarning"],
        ["-W", "error"],
        ["-X", "dev", "-bb", "-X", "utf8", "-X", "own=1"],
    ],
    ids=" ".join,
)
def test_ranks_have_the_options_of_the_interpreter(options, tmp_path):
    """Flags, warning filters, and ``-X`` options of the script hold in ranks of every spawn method."""
    (tmp_path / "script.py").write_text(OPTIONS)
    command = [sys.executable, *options, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S)
    script, *of_ranks = json.loads(ended.stdout or ended.stderr)
    assert of_ranks == [script] * 3


def test_ranks_have_the_time_zone_of_the_launch(monkeypatch):
    """The local time of ranks follows a change of TZ between launches."""
    for zone, hour in ("UTC", 0), ("Asia/Tokyo", 9), ("UTC", 0):
        monkeypatch.setenv("TZ", zone)
        assert wrapper(ranks(1))(lambda: time.localtime(0).tm_hour)() == (hour,)


def test_ranks_have_the_settings_of_the_compiler_of_the_launch(monkeypatch):
    """Variables of torch.compile hold in the next launch, although the warm process may have loaded the compiler."""

    def read():
        from torch._inductor import config

        return config.max_autotune

    for value in "1", "0", "1":
        monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", value)
        launchable = wrapper(ranks(1))(read)
        assert launchable() == launchable() == (value == "1",)


# -- signals and threads


@pytest.mark.parametrize("method", METHODS)
def test_children_of_ranks_heed_sigint(method):
    """SIGINT ends a subprocess of a rank, and raises KeyboardInterrupt in a forked child. The rank ignores it."""

    def interrupt_children():
        code = "import time; print(flush=True)\nwhile True: time.sleep(0.05)"  # a long sleep would miss a signal
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
            child.stdout.readline()
            child.send_signal(signal.SIGINT)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.write(writer, b"1")
                while True:
                    time.sleep(0.05)
            except KeyboardInterrupt:
                os._exit(7)
            finally:
                os._exit(1)
        os.read(reader, 1)
        os.kill(pid, signal.SIGINT)
        _, status = os.waitpid(pid, 0)
        os.kill(os.getpid(), signal.SIGINT)
        return child.returncode, os.waitstatus_to_exitcode(status)

    assert wrapper(ranks(spawn_method=method))(interrupt_children)() == ((-signal.SIGINT, 7),) * 2


def count_threads():
    """Return the number of threads of torch, of each BLAS, and of a subprocess."""
    import scipy.linalg  # noqa: F401 (it has its own BLAS)
    import threadpoolctl

    blas = {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return torch.get_num_threads(), *blas, int(child)


@pytest.mark.parametrize("method", METHODS)
def test_blas_and_subprocesses_of_ranks_share_the_cores(method, monkeypatch):
    """numpy, scipy, and subprocesses get the threads that torch gets, also if the warm process has loaded numpy."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    np.ones((200, 200)) @ np.ones((200, 200))  # starts the BLAS threads of this process
    for count in 1, 2 * cores:
        share = 1 if method == "fork" else max(1, cores // count)
        assert set(wrapper(ranks(count, spawn_method=method))(count_threads)()) == {(share,) * 3}


def test_blas_and_subprocesses_keep_omp_num_threads(monkeypatch):
    """The user's OMP_NUM_THREADS holds everywhere."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert wrapper(ranks(3))(count_threads)() == ((2, 2, 2),) * 3


# -- process groups that the function makes


def init_group():
    """Make the default process group with the variables of torchrun, and return the sum of the ranks."""
    dist.init_process_group("gloo")
    total = torch.tensor(current_rank().global_rank)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def init_mesh():
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    total = torch.tensor(current_rank().global_rank)
    dist.all_reduce(total, group=mesh.get_group())
    return total.item()


def init_rpc():
    from torch.distributed import rpc

    rank = current_rank()
    rpc.init_rpc(f"rank{rank.global_rank}", rank=rank.global_rank, world_size=rank.world_size)
    total = rpc.rpc_sync("rank0", sum, ([1, 2],))
    rpc.shutdown()
    return total


@pytest.mark.parametrize("function", [init_group, init_mesh, init_rpc])
def test_without_ipc_groups_the_function_can_make_its_own(function):
    """The variables of torchrun lead to a free port of the loopback interface, also for launches at the same time."""
    launches = [wrapper(ranks(3, ipc_groups=None))(function).submit() for _ in range(2)]
    assert [launch.results(PATIENCE_S) for launch in launches] == [(3, 3, 3)] * 2


def test_a_second_default_group_names_the_remedy():
    """The error of a function that makes the default group again says to give ``ipc_groups=None``."""
    error, _ = failure_of(init_group)
    assert type(error) is ValueError
    assert "Platform(ipc_groups=None)" in notes_of(error)


# -- logging


def configure_basically():
    level = logging.DEBUG if current_rank().global_rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="own %(levelname)s %(message)s", force=True)


def configure_by_dict():
    from logging import config

    handlers = {"stream": {"class": "logging.StreamHandler", "formatter": "own", "stream": "ext://sys.stdout"}}
    formatters = {"own": {"format": "own %(levelname)s %(message)s"}}
    root = {"handlers": ["stream"], "level": "DEBUG" if current_rank().global_rank == 0 else "ERROR"}
    config.dictConfig({"version": 1, "formatters": formatters, "handlers": handlers, "root": root})


@pytest.mark.parametrize("configure", [configure_basically, configure_by_dict])
def test_a_function_can_configure_logging(configure, capfd):
    """Lines appear once, in the format and with the levels that the function chose."""

    def log():
        configure()
        logging.getLogger("train").debug("detail")
        logging.getLogger("train").error("fault")

    wrapper(ranks(verbose=True))(log)()
    out, err = capfd.readouterr()
    lines = ["[rank 0] own DEBUG detail", "[rank 0] own ERROR fault", "[rank 1] own ERROR fault"]
    assert sorted([*out.splitlines(), *err.splitlines()]) == lines


# -- exit handlers and temporary files


@pytest.mark.parametrize("method", METHODS)
def test_exit_handlers_run_and_temporary_files_are_removed(method, tmp_path):
    """A rank runs its exit handlers and finalizers, and removes the temporary files that its function left open."""
    of_parent = tempfile.TemporaryDirectory()
    kept = []

    def leave_open(folder):
        owner = type("Owner", (), {})()
        files = [tempfile.TemporaryDirectory(), *map(tempfile.NamedTemporaryFile, ("wb", "w"))]
        kept.extend([*files, owner])
        current_rank.kept = kept  # in a module, like the globals of a script
        files[2].write("text")
        weakref.finalize(owner, Path(folder, "finalized").touch)
        Finalize(None, Path(folder, "finalized by multiprocessing").touch, exitpriority=1)
        atexit.register(Path(folder, "exited").touch)
        return [each.name for each in files]

    (names,) = wrapper(ranks(1, spawn_method=method))(leave_open)(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"finalized", "finalized by multiprocessing", "exited"}
    assert [Path(name).exists() for name in names] == [False] * 3
    assert Path(of_parent.name).exists()
    of_parent.cleanup()


# -- memory


def test_ranks_share_the_memory_of_arguments():
    """Reading a tensor of 64 MiB costs a rank less than 8 MiB of private memory, and writing it costs its size."""

    def measure(rows):
        def private_bytes():
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))

        before = private_bytes()
        rows.sum()
        dist.barrier()
        read = private_bytes()
        rows.add_(1)
        return read - before, private_bytes() - read

    for read, written in wrapper(ranks(2))(measure)(torch.ones(1 << 24)):
        assert read < 1 << 23
        assert written > 7 << 23  # seven eighths: a few pages may be private already
