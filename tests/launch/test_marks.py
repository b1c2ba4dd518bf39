"""What a rank is found by reaches its children of multiprocessing, and no other program or later
code.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset

from parawrap import Platform, current_rank, wrapper
from parawrap.launch import inheritance
from parawrap.launch._world import find_world
from parawrap.processes import pool
from tests.helpers.processes import ranks, run_script
from tests.helpers.scripts import read_script
from tests.helpers.waiting import PATIENCE_S

LAUNCHES = """
import os
from parawrap import Platform, wrapper, current_rank
if __name__ == "__main__":
    two = Platform(device="cpu", n_cpus=2, verbose=False)
    print(list(wrapper(two)(lambda: current_rank().global_rank)()))
"""
SHOWS = "import json, os; print(json.dumps(dict(os.environ)))"


def run_program(code, **options):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("copies", [False, True], ids=["inherits", "copies"])
def test_a_program_of_a_rank_may_launch(copies):
    """A program of a rank may launch, also if it gets a copy of `os.environ` with the variables of
    the rank in it.
    """

    def start():
        options = {"env": {**os.environ, "OTHER": "1"}} if copies else {}
        return run_program(LAUNCHES, **options)

    assert wrapper(ranks())(start)() == ("[0, 1]",) * 2


def test_programs_see_no_variables_of_ranks():
    """Libraries in the rank see what torchrun sets. Programs see what the script set."""

    def start():
        return os.environ["RANK"], os.environ["WORLD_SIZE"], json.loads(run_program(SHOWS))

    before = dict(os.environ)
    for rank, (own, size, seen) in enumerate(wrapper(ranks())(start)()):
        assert (own, size) == (str(rank), "2")
        assert {name for name in seen if name not in before} <= {
            *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LC_CTYPE"),
            *("OPENBLAS_NUM_THREADS",),
        }


def test_launchers_in_programs_of_ranks():
    """The variables of a launcher in a program of a rank replace the copies of the rank's."""
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    inherited = {**environ, inheritance._MARK: inheritance._place_in(environ)}
    assert find_world(inherited) is None
    assert find_world({**inherited, "MASTER_PORT": "29501"}).global_rank == 1
    assert find_world(environ).global_rank == 1


class Ranks(IterableDataset):
    def __iter__(self):
        yield current_rank().global_rank, int(os.environ["RANK"])


def first_row(method):
    loader = DataLoader(Ranks(), batch_size=None, num_workers=1, multiprocessing_context=method)
    return tuple(next(iter(loader)))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_loader_workers_find_the_rank(method):
    assert wrapper(ranks())(first_row)(method) == ((0, 0), (1, 1))


def launch_in_child(results):
    try:
        wrapper(Platform(device="cpu"))(len)([])
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")


def launch_in_process():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=launch_in_child, args=(results,))
    child.start()
    text = results.get(timeout=PATIENCE_S)
    child.join()
    return text


def test_a_worker_of_a_rank_cannot_launch():
    (text,) = wrapper(ranks(1))(launch_in_process)()
    assert text.startswith("LaunchError: len was launched within rank 0 of 1")


UNGUARDED = """
import multiprocessing
from parawrap import Platform, wrapper
def start():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    return process.exitcode
print(list(wrapper(Platform(device="cpu", n_cpus=1))(start)()))
"""


def test_a_script_without_a_guard(tmp_path):
    """A spawned worker runs the script again, which must not launch again without an end."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "was launched while a process of multiprocessing" in done.stdout + done.stderr
    assert "if __name__ == '__main__':" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[1]"


def test_workers_of_packages_run_with_m(tmp_path):
    """Processes of a package that runs with ``-m`` import the main module by its name, which
    relative imports need.
    """
    (tmp_path / "package").mkdir()
    train = read_script("module_that_spawns")
    for name, text in {"__init__": "", "data": "NAME = 'found'", "train": train}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "package.train"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout == "found\n", done.stderr


# -- what ranks use of the script


def put(queue):
    queue.put(current_rank().global_rank)


def test_a_manager_of_the_script():
    with multiprocessing.get_context("spawn").Manager() as manager:
        queue = manager.Queue()
        wrapper(ranks())(put)(queue)
        assert sorted(queue.get() for _ in range(2)) == [0, 1]


def test_shared_memory_of_the_script(tmp_path):
    """Shared memory of the script stays when a rank that has used it ends, also if ranks were open
    before it was made.
    """
    assert run_script(tmp_path, read_script("shared_block")) == "True\n"


def leave_slowly(path, seconds):
    def upload():
        time.sleep(seconds)
        path.touch()

    atexit.register(upload)


def test_exit_handlers_have_time(tmp_path):
    """Ranks that have returned upload what they have logged, longer than `grace_s`."""
    wrapper(ranks(1, grace_s=0.2))(leave_slowly)(tmp_path / "done", 1.0)
    assert (tmp_path / "done").exists()
    with ranks(1, grace_s=0.2).open() as opened:
        opened(leave_slowly, tmp_path / "opened", 1.0)
    assert (tmp_path / "opened").exists()


def test_exit_handlers_have_a_limit(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(pool, "_EXIT_HANDLERS_S", 0.5)
    with caplog.at_level(logging.WARNING, "parawrap.launch"):
        assert wrapper(ranks(1, grace_s=0.2))(leave_slowly)(tmp_path / "never", 600) == (None,)
    assert "rank(s) 0 had returned, but not exited in time" in caplog.text


def handle_signals():
    received = []
    for number in signal.SIGUSR1, signal.SIGUSR2:
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, lambda number, _: received.append(number))
        os.kill(os.getpid(), number)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return received == [signal.SIGUSR1, signal.SIGUSR2] and not blocked


def test_user_signals_belong_to_the_function():
    assert wrapper(ranks(1))(handle_signals)() == (True,)


# -- variables that look like those of torchrun


def test_a_pod_or_notebook_is_no_torchrun(tmp_path):
    """Ranks start here.

    If another number of processes was started, the message names the variable.
    """
    assert run_script(tmp_path, read_script("variables_of_a_pod")).splitlines() == [
        "(0, '2') (1, '2')",
        "(0, '2') (1, '2')",
        "(0, '1')",
        "PlatformError True True",
        "PlatformError True True",
    ]
