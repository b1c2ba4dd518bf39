"""Runs: their registry, and how they end with the interpreter."""

from __future__ import annotations

import threading

import pytest

from parawrap import LaunchError, Platform, wrapper
from parawrap.launch import Job, Launch, running
from parawrap.launch.run import FinishedRun, Run, RunOutput
from tests.helpers.processes import ranks, run_script
from tests.helpers.scripts import read_script
from tests.helpers.waiting import PATIENCE_S, eventually


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The lines of a script that leaves runs to the end of the interpreter, and its folder."""
    folder = tmp_path_factory.mktemp("script")
    return run_script(folder, read_script("runs_at_exit")).splitlines(), folder


def test_all_runs_end_with_the_interpreter(script):
    """The interpreter ends launches, those of `map` in other threads, and ranks that stay.

    Later launches are refused.
    """
    lines, _ = script
    assert "launch: 1" in lines
    assert lines[-1] == "late launch: LaunchError True"


def test_a_script_leaves_ranks_open(script):
    """Ranks that a script leaves open end before their server does. Otherwise the server would wait
    10 s for them.
    """
    assert "ranks: ended" in script[0]


def test_exit_drops_pending_launches(script):
    """Pending launches never start, whether the iterator was unused or partly used. Running
    launches are cancelled.
    """
    _, folder = script
    begun = {path.name for path in folder.iterdir()}
    assert "left-0" in begun
    # Two of each sweep run at the same time, and only left-0 ends before the exit
    may_begin = {"left-0", "left-1", "left-2", "unused-0", "unused-1", "thread-0", "thread-1"}
    assert {name for name in begun if "-" in name} <= may_begin


def test_shared_memory_of_the_script(script):
    """Shared memory of the script stays when a rank that has used it ends, also if ranks were open
    before it was made.
    """
    assert "shared memory: True" in script[0]


def test_the_registry_has_what_runs(tmp_path):
    """The registry has a run from its start to its end, `upon_finish` included."""
    seen = []

    def finish():
        seen.append([run.job.name for run in running() if run.job.function is waits])

    def waits(path):
        return eventually(path.exists, "go")

    launch = wrapper(ranks(1, upon_finish=finish))(waits).submit(tmp_path / "go")
    assert len([run for run in running() if run.job.function is waits]) == 1
    (tmp_path / "go").touch()
    launch.results(PATIENCE_S)
    assert seen == [["test_the_registry_has_what_runs.<locals>.waits"]]
    assert not [run for run in running() if run.job.function is waits]


def test_the_first_end_holds():
    """A call of ranks that stay may be ended by several threads."""
    run = Run(Job(Platform(device="cpu"), len), RunOutput())
    errors = [LaunchError(f"{number}") for number in range(8)]
    threads = [threading.Thread(target=run.end, args=(error,)) for error in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.wait(0)
    assert run.how in errors
    first = run.how
    run.end(LaunchError("late"))
    assert run.how is first


def test_a_function_that_has_run_here():
    """The error of a function that has run in this process has the traceback of this process, at
    each call of `results`.
    """
    try:
        raise KeyError("odd")
    except KeyError as error:
        launch = Launch(FinishedRun(Job(Platform(device="cpu"), len), error))
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            launch.results()
        assert any(entry.name == "test_a_function_that_has_run_here" for entry in caught.traceback)
    assert (launch.state, launch.stacks(), launch.logs(0)) == ("failed", {}, "")
    launch.cancel()
    launch.preempt()
