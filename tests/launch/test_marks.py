"""What a rank is found by reaches its children of multiprocessing, and no other program or later
code.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from parawrap import PlatformError, current_rank, wrapper
from parawrap.launch import inheritance
from parawrap.launch._world import find_world
from parawrap.processes import pool
from tests.helpers.processes import ranks, write_script
from tests.helpers.scripts import read_script


def test_a_program_of_a_rank_may_launch(monkeypatch):
    """A program of a rank may launch, also if it gets a copy of `os.environ` with the variables of
    the rank in it. This process stands for the program.
    """
    _, copy = wrapper(ranks())(lambda: dict(os.environ))()
    assert (copy["RANK"], copy["WORLD_SIZE"]) == ("1", "2")
    for name, value in copy.items():
        monkeypatch.setenv(name, value)
    assert find_world() is None
    assert wrapper(ranks())(lambda: current_rank().global_rank)() == (0, 1)


def test_programs_see_no_variables_of_ranks():
    """Libraries in the rank see what torchrun sets. Programs see what the script set, so they may
    launch.
    """
    shows = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]

    def start():
        seen = subprocess.run(shows, capture_output=True, text=True, check=True).stdout
        return os.environ["RANK"], os.environ["WORLD_SIZE"], json.loads(seen)

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


# -- workers


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What the workers of each method found, and the lines of each run of their script."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "rows.py").write_text("class Rows(list): pass\nROWS = Rows([1.0, 2.0])")
    path = write_script(folder, read_script("loader_workers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
        patch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
        found = runpy.run_path(str(path), run_name="__main__")["found"]
    return SimpleNamespace(found=found, runs=(folder / "runs").read_text().splitlines())


METHODS = pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])


@METHODS
def test_loader_workers_find_the_rank(workers, method):
    assert workers.found[method]["place"] == (1, "1")


@METHODS
def test_rank_has_loader_workers(workers, method):
    """Loader workers of a rank find datasets of the script and modules of its folder."""
    assert workers.found[method]["rows"] == [1.0, 5.0]


@METHODS
def test_a_worker_of_a_rank_cannot_launch(workers, method):
    error = workers.found[method]["error"]
    assert error.startswith("evaluate was launched within rank 1 of 2")


def test_loader_workers_import_the_script(workers):
    """Workers by spawn and by forkserver run the script again, before they know of the rank, and
    without the guarded part. It has two platforms.
    """
    names = [line.split()[0] for line in workers.runs]
    assert names == ["__main__", "__mp_main__", "__mp_main__"]


def test_a_script_without_a_guard(workers):
    """A script that a worker runs again must not launch again without an end."""
    for line in workers.runs[1:]:
        assert "evaluate was launched while a process of multiprocessing" in line
        assert "if __name__ == '__main__':" in line


def test_workers_of_packages_run_with_m(tmp_path, monkeypatch):
    """Processes of a package that runs with ``-m`` import the main module by its name, which
    relative imports need.
    """
    folder = tmp_path / "package_with_m"
    folder.mkdir()
    train = read_script("module_that_spawns")
    for name, text in {"__init__": "", "data": "NAME = 'found'", "train": train}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    ended = runpy.run_module("package_with_m.train", run_name="__main__", alter_sys=True)
    assert ended["found"] == ("found",)
    del sys.modules["package_with_m"], sys.modules["package_with_m.data"]


# -- what ranks use of the script


def put(queue):
    queue.put(current_rank().global_rank)


def test_a_manager_of_the_script():
    with multiprocessing.get_context("spawn").Manager() as manager:
        queue = manager.Queue()
        wrapper(ranks())(put)(queue)
        assert sorted(queue.get() for _ in range(2)) == [0, 1]


def leave_slowly(path, seconds):
    def upload():
        time.sleep(seconds)
        path.touch()

    atexit.register(upload)


def test_exit_handlers_have_time(tmp_path):
    """Ranks that have returned upload what they have logged, longer than `grace_s`."""
    wrapper(ranks(1, grace_s=0.1))(leave_slowly)(tmp_path / "done", 0.4)
    assert (tmp_path / "done").exists()
    with ranks(1, grace_s=0.1).open() as opened:
        opened(leave_slowly, tmp_path / "opened", 0.4)
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


def place():
    return current_rank().global_rank, os.environ["WORLD_SIZE"]


def test_a_pod_or_notebook_is_no_torchrun(monkeypatch):
    """Ranks start here.

    If another number of processes was started, the message names the variable.
    """
    pod = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (pod | {"MASTER_PORT": "29511"}).items():
        monkeypatch.setenv(name, value)
    assert wrapper(ranks())(place)() == ((0, "2"), (1, "2"))
    with ranks().open() as opened:
        assert opened(place) == ((0, "2"), (1, "2"))
    for launcher, size in ("env", "1"), (None, "3"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(PlatformError, match=f"WORLD_SIZE={size} .*launcher='local'"):
            wrapper(ranks(launcher=launcher))(place)()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_PORT")
    assert wrapper(ranks(1))(place)() == ((0, "1"),)
