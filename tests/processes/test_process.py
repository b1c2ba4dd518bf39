"""The process of a rank: what it shares with the launching process, and how it differs from it."""

from __future__ import annotations

import atexit
import io
import json
import os
import pdb
import signal
import subprocess
import sys
import tempfile
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

METHODS = ["forkserver", "fork"]


def test_a_node_without_cuda(monkeypatch):
    """A GPU rank on a node with a CPU build of torch raises PlatformError with what to install."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    place = Place(global_rank=0, local_rank=0, node=0, world_size=1, ranks_per_node=1)
    with pytest.raises(PlatformError, match=r"CUDA.*[Ii]nstall.*torch"):
        set_up(place, Platform(device="slurm", n_gpus=1), None)


# -- one launch per spawn method, for several tests


def interrupt_subprocess():
    """Return the exit code of a subprocess that got SIGINT. The rank gets it too."""
    code = "import time; print(flush=True)\nwhile True: time.sleep(0.05)"  # a long sleep would miss a signal
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    return child.returncode


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


@pytest.fixture(scope="module", params=METHODS)
def observed(request, tmp_path_factory):
    """Observations of one rank of a launch with a spawn method, and the folder that it wrote into."""
    method, folder = request.param, tmp_path_factory.mktemp("rank")
    np.ones((200, 200)) @ np.ones((200, 200))  # starts the BLAS threads of this process

    def observe():
        return {"threads": count_threads(), "subprocess": interrupt_subprocess(), "files": leave_open(folder)}

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        (found,) = wrapper(ranks(1, spawn_method=method))(observe)()
    return found | {"folder": folder, "method": method}


def test_sigint_ends_a_subprocess(observed):
    """The rank ignores it: the launching process decides."""
    assert observed["subprocess"] == -signal.SIGINT


def test_libraries_share_the_cores(observed):
    """numpy, scipy, and subprocesses get the threads that torch gets, also if the warm process has loaded numpy."""
    assert observed["threads"] == {1 if observed["method"] == "fork" else len(os.sched_getaffinity(0))}


def test_ranks_exit_as_interpreters_do(observed):
    """A rank runs its exit handlers and finalizers, and removes the temporary files that its function left open."""
    written = {each.name for each in observed["folder"].iterdir()}
    assert written == {"finalized", "finalized by multiprocessing", "exited"}
    assert [Path(name).exists() for name in observed["files"]] == [False] * 3


def test_omp_num_threads_holds(monkeypatch):
    assert wrapper(ranks(2 * len(os.sched_getaffinity(0))))(count_threads)()[0] == {1}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert wrapper(ranks(3))(count_threads)() == ({2},) * 3


# -- prompts


@pytest.mark.parametrize("debug", [breakpoint, pdb.set_trace, pdb.post_mortem, lambda: dist.breakpoint(1)])
def test_a_debugger_names_inline(debug):
    """LaunchError says to call ``inline``, and no rank waits for a terminal."""

    def examine():
        try:
            raise KeyError
        except KeyError:
            debug()

    error, _ = failure_of(examine)
    assert type(error) is LaunchError
    assert "a rank has no terminal. Call examine.inline(...)" in str(error)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_names_inline(method, monkeypatch):
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


# -- options of the interpreter

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


def test_options_of_the_interpreter(tmp_path):
    """Flags, warning filters, and ``-X`` options of the script hold in ranks with new interpreters."""
    (tmp_path / "script.py").write_text(OPTIONS)
    options = "-B", "-W", "error", "-X", "dev", "-bb", "-X", "utf8", "-X", "own=1"
    command = [sys.executable, *options, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    script, *of_ranks = json.loads(ended.stdout or ended.stderr)
    assert of_ranks == [script] * 2


# -- process groups that the function makes


def init_group():
    """Make the default process group with the variables of torchrun, and return the sum of the ranks."""
    dist.init_process_group("gloo")
    total = torch.tensor(current_rank().global_rank)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_function_makes_own_groups():
    """Also launches at the same time. If the platform has made groups, the error names the cure."""
    launches = [wrapper(ranks(3, ipc_groups=None))(init_group).submit() for _ in range(2)]
    assert [launch.results(PATIENCE_S) for launch in launches] == [(3, 3, 3)] * 2
    error, _ = failure_of(init_group)
    assert type(error) is ValueError
    assert "Platform(ipc_groups=None)" in notes_of(error)


def test_a_failed_meeting_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing")
    error, _ = failure_of(int)
    assert "raised while the ranks met at the store file " in notes_of(error)


# -- memory


def test_memory_of_arguments_is_shared():
    """Reading a tensor of 64 MiB costs a rank a part of that in private memory, and writing it costs its size."""

    def measure(rows):
        def private_bytes():
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))

        rows[: 1 << 18].sum()  # starts torch's threads
        dist.barrier()
        before = private_bytes()
        rows.sum()
        dist.barrier()
        read = private_bytes()
        rows.add_(1)
        return read - before, private_bytes() - read

    for read, written in wrapper(ranks(2))(measure)(torch.ones(1 << 24)):
        assert read < 1 << 24
        assert written > 7 << 23  # seven eighths: a few pages may be private already
