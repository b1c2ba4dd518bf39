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

from parawrap import LaunchError, Platform, PlatformError, current_rank, wrapper
from parawrap.launch.rank._set_up_rank import Place, set_up
from tests.helpers.processes import failure_of, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S

METHODS = ["forkserver", "spawn", "fork"]


def test_a_node_without_cuda_names_the_cure(monkeypatch):
    """A GPU rank on a node with a CPU build of torch raises PlatformError with what to install."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    place = Place(global_rank=0, local_rank=0, node=0, world_size=1, ranks_per_node=1)
    with pytest.raises(PlatformError, match=r"CUDA.*[Ii]nstall.*torch"):
        set_up(place, Platform(device="slurm", n_gpus=1), None)


# -- one launch per spawn method, for several tests


class PutRow(torch.utils.data.Dataset):
    """A dataset that puts each row it loads into a queue."""

    def __init__(self, queue):
        self.queue = queue

    def __len__(self):
        return 2

    def __getitem__(self, row):
        self.queue.put(row)
        return row


def interrupt_children():
    """Return the exit codes of a subprocess and a forked child that got SIGINT."""
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


def count_threads():
    """Return the number of threads of torch, of each BLAS, and of a subprocess."""
    import scipy.linalg  # noqa: F401 (it has its own BLAS)
    import threadpoolctl

    blas = {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return {torch.get_num_threads(), *blas, int(child)}


KEPT = []


def leave_open(folder):
    """Leave temporary files, exit handlers, and finalizers, and return the names of the files."""
    owner = type("Owner", (), {})()
    files = [tempfile.TemporaryDirectory(), *map(tempfile.NamedTemporaryFile, ("wb", "w"))]
    KEPT.extend([*files, owner])
    current_rank.kept = KEPT  # in a module, like the globals of a script
    files[2].write("text")
    weakref.finalize(owner, Path(folder, "finalized").touch)
    Finalize(None, Path(folder, "finalized by multiprocessing").touch, exitpriority=1)
    atexit.register(Path(folder, "exited").touch)
    return [each.name for each in files]


@pytest.fixture(scope="module")
def manager():
    """A running manager of multiprocessing."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.fixture(scope="module", params=METHODS)
def observed(request, manager, tmp_path_factory):
    """What one rank of a launch with a spawn method saw, and the folder that it wrote into."""
    method, folder = request.param, tmp_path_factory.mktemp("rank")
    queue, settings = manager.Queue(), manager.dict(lr=0.5)
    np.ones((200, 200)) @ np.ones((200, 200))  # starts the BLAS threads of this process

    def observe():
        queue.put(settings["lr"])
        loader = torch.utils.data.DataLoader(PutRow(queue), num_workers=1, multiprocessing_context=method)
        return {
            "rows": len(list(loader)),
            "threads": count_threads(),
            "children": interrupt_children(),
            "files": leave_open(folder),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        (found,) = wrapper(ranks(1, spawn_method=method))(observe)()
    return found | {"folder": folder, "queue": queue, "method": method}


def test_ranks_use_objects_of_a_manager(observed):
    """Ranks and their loader workers put into a queue of the launching process; ranks read its dict."""
    assert observed["rows"] == 2
    assert [observed["queue"].get(timeout=PATIENCE_S) for _ in range(3)] == [0.5, 0, 1]


def test_children_of_ranks_heed_sigint(observed):
    """It ends a subprocess of a rank, and raises KeyboardInterrupt in a forked child. The rank ignores it."""
    assert observed["children"] == (-signal.SIGINT, 7)


def test_libraries_of_ranks_share_the_cores(observed):
    """numpy, scipy, and subprocesses get the threads that torch gets, also if the warm process has loaded numpy."""
    assert observed["threads"] == {1 if observed["method"] == "fork" else len(os.sched_getaffinity(0))}


def test_ranks_exit_as_interpreters_do(observed):
    """A rank runs its exit handlers and finalizers, and removes the temporary files that its function left open."""
    written = {each.name for each in observed["folder"].iterdir()}
    assert written == {"finalized", "finalized by multiprocessing", "exited"}
    assert [Path(name).exists() for name in observed["files"]] == [False] * 3


def test_omp_num_threads_of_the_user_holds(monkeypatch):
    assert wrapper(ranks(2 * len(os.sched_getaffinity(0))))(count_threads)()[0] == {1}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert wrapper(ranks(3))(count_threads)() == ({2},) * 3


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


def break_with_torch():
    dist.breakpoint(1)


@pytest.mark.parametrize("function", [call_breakpoint, set_trace, examine_exception, break_with_torch])
def test_a_debugger_in_a_rank_names_inline(function):
    """LaunchError says to call ``inline``, and no rank waits for a terminal."""
    error, _ = failure_of(function)
    assert type(error) is LaunchError
    assert f"a rank has no terminal. Call {function.__name__}.inline(...)" in str(error)
    assert f"in {function.__name__}" in notes_of(error)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_in_a_rank_names_inline(method, monkeypatch):
    """`input` raises EOFError, although the script has a terminal."""

    def confirm():
        return input("continue? ")

    saved, (reader, writer) = os.dup(0), os.pipe()
    os.dup2(reader, 0)  # stays open, like a terminal
    with open(0, closefd=False) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        error, _ = failure_of(confirm, platform=ranks(spawn_method=method))
    os.dup2(saved, 0)
    for file in saved, reader, writer:
        os.close(file)
    assert type(error) is EOFError
    assert "Call confirm.inline(...)" in notes_of(error)


def test_standard_input_can_be_replaced(monkeypatch):
    """`input` reads from the stream that the function sets. The callable that PYTHONBREAKPOINT names runs in the rank."""
    monkeypatch.setenv("PYTHONBREAKPOINT", "os.getpid")

    def read():
        found = [sys.stdin.read()]
        sys.stdin = io.StringIO("yes\nno")
        return [*found, input("first? "), input(), breakpoint() == os.getpid()]

    assert wrapper(ranks(1))(read)() == (["", "yes", "no", True],)


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

    names = "dev_mode", "bytes_warning", "utf8_mode", "dont_write_bytecode"
    flags = [getattr(sys.flags, name) for name in names]
    return [*flags, warns(UserWarning), warns(DeprecationWarning), sys._xoptions.get("own")]

if __name__ == "__main__":
    found = [wrapper(Platform(device="cpu", spawn_method=each))(look)()[0] for each in ("forkserver", "spawn")]
    print(json.dumps([look(), *found]))
"""


def test_ranks_have_the_interpreters_options(tmp_path):
    """Flags, warning filters, and ``-X`` options of the script hold in ranks with interpreters of their own."""
    (tmp_path / "script.py").write_text(OPTIONS)
    options = "-B", "-W", "error", "-X", "dev", "-bb", "-X", "utf8", "-X", "own=1"
    command = [sys.executable, *options, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    script, *of_ranks = json.loads(ended.stdout or ended.stderr)
    assert of_ranks == [script] * 2


def test_variables_change_between_launches(monkeypatch):
    """The local time and the compiler's settings follow, although the warm process may have loaded the compiler."""

    def read():
        from torch._inductor import config

        return time.localtime(0).tm_hour, config.max_autotune

    launched = wrapper(ranks(1))(read)
    for zone, hour, value in ("UTC", 0, "1"), ("Asia/Tokyo", 9, "0"):
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", value)
        assert launched() == ((hour, value == "1"),)


# -- process groups that the function makes


def init_group():
    """Make the default process group with the variables of torchrun, and return the sum of the ranks."""
    dist.init_process_group("gloo")
    total = torch.tensor(current_rank().global_rank)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_function_can_make_its_own_groups():
    """The variables of torchrun lead to a free port of the loopback interface, also for launches at the same time."""
    launches = [wrapper(ranks(3, ipc_groups=None))(init_group).submit() for _ in range(2)]
    assert [launch.results(PATIENCE_S) for launch in launches] == [(3, 3, 3)] * 2


def test_a_second_default_group_names_the_cure():
    error, _ = failure_of(init_group)
    assert type(error) is ValueError
    assert "Platform(ipc_groups=None)" in notes_of(error)


# -- logging and memory


def test_a_function_can_configure_logging(capfd):
    """Lines appear once, in the format and with the levels that the function chose."""

    def log():
        level = "DEBUG" if current_rank().global_rank == 0 else "ERROR"
        logging.basicConfig(level=level, format="own %(levelname)s %(message)s", force=True)
        logging.getLogger("train").debug("detail")
        logging.getLogger("train").error("fault")

    wrapper(ranks(verbose=True))(log)()
    out, err = capfd.readouterr()
    lines = ["[rank 0] own DEBUG detail", "[rank 0] own ERROR fault", "[rank 1] own ERROR fault"]
    assert sorted([*out.splitlines(), *err.splitlines()]) == lines


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
