"""The process of a rank: what it shares with the launching process, and how it differs from it."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchError, Platform, PlatformError, current_rank, wrapper
from parawrap.launch import RankPlace
from parawrap.launch.set_up import set_up
from tests.helpers.processes import failure_of, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S


def test_a_node_without_cuda(monkeypatch):
    """A GPU rank on a node without GPUs raises PlatformError with what to install."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    place = RankPlace(global_rank=0, local_rank=0, node=0, world_size=1, ranks_per_node=1)
    with pytest.raises(
        PlatformError, match=r"rank 0 needs cuda:0 .* sees 0 device.*install a torch"
    ):
        set_up(place, Platform(device="slurm", n_gpus=1))


# -- one launch for several tests


def interrupt_subprocess():
    """Return the exit code of a subprocess that got SIGINT. The rank gets it too."""
    # A long sleep would miss a signal
    code = "import time; print(flush=True)\nwhile True: time.sleep(0.05)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    return child.returncode


def count_threads():
    """Return the number of threads of torch and of a subprocess."""
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return {torch.get_num_threads(), int(child)}


KEPT = []


def leave_open(folder):
    """Leave files, exit handlers, and finalizers, and return the name of a temporary folder."""
    owner = type("Owner", (), {})()
    temporary = tempfile.TemporaryDirectory()
    text, update = Path(folder, "text").open("w"), Path(folder, "update").open("w+b")  # noqa: SIM115 (left open)
    text.write("text")
    update.write(b"update")
    KEPT.extend([temporary, owner, text, update])
    current_rank.kept = KEPT  # in a module, like the globals of a script
    weakref.finalize(owner, Path(folder, "finalized").touch)
    Finalize(None, Path(folder, "finalized by multiprocessing").touch, exitpriority=1)
    atexit.register(Path(folder, "exited").touch)
    return temporary.name


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """Observations of one rank, and the folder that it wrote into."""
    folder = tmp_path_factory.mktemp("rank")

    def observe():
        return {"subprocess": interrupt_subprocess(), "temporary": leave_open(folder)}

    (found,) = wrapper(ranks(1))(observe)()
    return found | {"folder": folder}


def test_sigint_ends_a_subprocess(observed):
    """The rank ignores it: the launching process decides."""
    assert observed["subprocess"] == -signal.SIGINT


def test_ranks_exit_as_interpreters_do(observed):
    """A rank runs its exit handlers and finalizers, completes open files, and removes temporary
    folders.
    """
    written = {each.name: each.read_text() for each in observed["folder"].iterdir()}
    ran = dict.fromkeys(["finalized", "finalized by multiprocessing", "exited"], "")
    assert written == ran | {"text": "text", "update": "update"}
    assert not Path(observed["temporary"]).exists()


def test_omp_num_threads_holds(monkeypatch):
    assert wrapper(ranks(2 * len(os.sched_getaffinity(0))))(count_threads)()[0] == {1}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert wrapper(ranks(3))(count_threads)() == ({2},) * 3


def test_programs_inherit_no_connections():
    """They get the standard streams alone."""

    def list_files():
        return os.system("test $(exec ls /proc/self/fd | wc --words) = 4")  # `ls` opens the fourth

    # Without groups, whose sockets belong to torch
    assert wrapper(ranks(1, ipc_groups=None))(list_files)() == (0,)


# -- prompts


def test_no_rank_waits_for_a_terminal():
    """The error of a debugger says to call ``inline``, and `input` raises EOFError."""
    error = failure_of(lambda: breakpoint())
    assert type(error) is LaunchError
    assert "a rank has no terminal. Call .inline(...) of the decorated function" in str(error)
    error = failure_of(lambda: input("continue? "))
    assert type(error) is EOFError


# -- process groups that the function makes


def init_group():
    """Make the default process group with the variables of torchrun, and return the sum of the
    ranks.
    """
    dist.init_process_group("gloo")
    total = torch.tensor(current_rank().global_rank)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_function_makes_own_groups():
    """A function makes process groups of its own, also in launches at the same time. If the
    platform has made groups, torch refuses it.
    """
    launches = [wrapper(ranks(3, ipc_groups=None))(init_group).submit() for _ in range(2)]
    assert [launch.results(PATIENCE_S) for launch in launches] == [(3, 3, 3)] * 2
    error = failure_of(init_group)
    assert type(error) is ValueError


def test_a_failed_meeting_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing")
    error = failure_of(int)
    assert "raised while the ranks met at the store file " in notes_of(error)


# -- memory


def test_memory_of_arguments_is_shared():
    """Reading a tensor of 64 MiB costs a rank a part of that in private memory, and writing it
    costs its size.
    """

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
        # Half: some pages may be private already, and other memory may be freed
        assert written > 1 << 25
