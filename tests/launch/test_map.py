"""`map` of a decorated function: one launch per item, with results and exceptions in the order of the items."""

from __future__ import annotations

import os
import pathlib
import threading
import time
import traceback

import psutil
import pytest

from parawrap import LaunchCancelledError, Platform, RankResults, current_rank, wrapper
from parawrap.errors import UnsendableError
from tests.helpers.processes import run_script
from tests.helpers.waiting import PATIENCE_S, eventually


def train(**options):
    """Return a decorator for launches of one rank without output."""
    return wrapper(Platform(device="cpu", **({"n_cpus": 1, "verbose": False} | options)))


def test_results_come_in_order_and_errors_in_their_places():
    """An item that fails yields its exception and does not end the others."""

    @train(n_cpus=2)
    def inverse(x):
        return 1 / x, current_rank().global_rank

    outcomes = list(inverse.map(iter([1, 0, 2])))
    assert outcomes[0] == RankResults([(1.0, 0), (1.0, 1)])
    assert type(outcomes[1]) is ZeroDivisionError
    assert outcomes[2] == RankResults([(0.5, 0), (0.5, 1)])


@pytest.mark.parametrize("max_parallel", [1, 2])
def test_a_traceback_shows_the_users_lines_only(max_parallel):
    """The exception of a launch is printed without frames of parawrap. Its notes have the traceback in the rank."""

    @train()
    def fails(x):
        raise ValueError(x)

    for error in fails.map([1, 2], max_parallel=max_parallel):
        text = "".join(traceback.format_exception(error))
        assert "parawrap" not in text
        assert "raise ValueError(x)" in text
        with pytest.raises(ValueError, match=str(error)) as caught:
            raise error
        assert [frame.path for frame in caught.traceback] == [pathlib.Path(__file__)]


def test_reading_the_results_again_does_not_lengthen_the_traceback():
    """Each call of `results` raises the error with the same number of frames."""
    launch = train()(lambda: 1 / 0).submit()
    lengths = []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as caught:
            launch.results()
        lengths.append(len(caught.traceback))
    assert lengths == [lengths[0]] * 3


def test_no_items_give_no_launches():
    """An empty iterable gives an empty iterator."""
    assert list(train()(lambda x: x).map([])) == []


def test_an_unsendable_item_yields_an_error():
    """UnsendableError names the item as ``args[0]``, and the other items have results."""
    first, second = train()(lambda x: 1).map([threading.Lock(), 2])
    assert type(first) is UnsendableError
    assert str(first).startswith("args[0] cannot be sent")
    assert second == (1,)


@pytest.mark.parametrize("max_parallel", [1, 2, 5])
def test_max_parallel_limits_the_running_launches(max_parallel, tmp_path):
    """Launches overlap up to the limit, and results have the order of the items."""

    def overlapping(number):
        here = tmp_path / str(number)
        here.touch()
        time.sleep(0.3 if number % 2 else 0.2)
        running = len([each for each in tmp_path.iterdir() if not each.name.startswith("done")])
        here.rename(tmp_path / f"done-{number}")
        return number, running

    outcomes = list(train()(overlapping).map(range(5), max_parallel=max_parallel))
    assert [outcome[0][0] for outcome in outcomes] == list(range(5))
    assert max(outcome[0][1] for outcome in outcomes) <= max_parallel
    if max_parallel == 5:
        assert max(outcome[0][1] for outcome in outcomes) > 1


@pytest.mark.parametrize("max_parallel", [1, 3])
def test_closing_the_iterator_cancels_its_launches(max_parallel, tmp_path):
    """After `close`, no rank runs, and later items are never launched."""

    def waits(number):
        (tmp_path / f"{number}-{os.getpid()}").touch()
        time.sleep(0 if number == 0 else 600)
        return number

    outcomes = train()(waits).map(range(10), max_parallel=max_parallel)
    assert next(outcomes) == (0,)
    if max_parallel > 1:
        eventually(lambda: len(list(tmp_path.iterdir())) >= max_parallel, "overlapping launches")
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < PATIENCE_S
    begun = {path.name for path in tmp_path.iterdir()}
    assert len(begun) <= max_parallel + 1
    assert not any(psutil.pid_exists(int(name.partition("-")[2])) for name in begun)


def test_a_function_with_two_arguments_raises(tmp_path):
    """`map` raises TypeError before any launch if the function does not take one argument."""
    with pytest.raises(TypeError, match="missing a required argument"):
        train()(lambda a, b: (tmp_path / "ran").touch()).map([1])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("max_parallel", [0, -1])
def test_max_parallel_below_one_raises(max_parallel):
    """ValueError names the value and the allowed values."""
    with pytest.raises(ValueError, match=f"max_parallel={max_parallel} is too small"):
        train()(lambda x: x).map([1], max_parallel=max_parallel)


def test_a_method_maps_over_its_object():
    """`map` of a bound method calls the method on its object."""

    class Model:
        scale = 3

        @train()
        def times(self, x):
            return self.scale * x

    assert [outcome[0] for outcome in Model().times.map([1, 2])] == [3, 6]


def test_cancelled_launches_yield_errors(tmp_path):
    """Running and pending launches of a cancelled queue have LaunchCancelledError."""
    from parawrap.api._launch_map import _Queue
    from parawrap.launch import Job

    queue = _Queue([Job(Platform(device="cpu", verbose=False), lambda: time.sleep(600)) for _ in range(3)], 1)
    eventually(lambda: queue._running, "the first launch")
    queue.cancel()
    assert type(queue.futures[0].exception(PATIENCE_S)) is LaunchCancelledError
    assert all(type(future.exception()) is LaunchCancelledError for future in queue.futures[1:])


def test_overlapping_launches_are_cancelled_in_parallel(tmp_path):
    """The clean-up times of the ranks do not add up."""

    def cleans_up(number):
        try:
            (tmp_path / str(number)).touch()
            time.sleep(0 if number == 0 else 600)
        finally:
            time.sleep(0 if number == 0 else 8)

    outcomes = train(grace_s=30)(cleans_up).map(range(5), max_parallel=5)
    next(outcomes)
    eventually(lambda: len(list(tmp_path.iterdir())) == 5, "all launches")
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < 3 * 8  # not 4 * 8


def test_the_interpreter_exits_without_running_pending_launches(tmp_path):
    """Pending launches do not run at exit, whether the iterator was unused or partly used."""
    run_script(
        tmp_path,
        """
        import pathlib, time
        from parawrap import Platform, wrapper

        def touch(name):
            time.sleep(0.2)
            pathlib.Path(name).touch()

        launchable = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(touch)
        unused = launchable.map([f"unused-{i}" for i in range(30)], max_parallel=2)
        left = launchable.map([f"left-{i}" for i in range(30)], max_parallel=2)
        next(left)
        """,
    )
    assert len(list(tmp_path.glob("*-*"))) < 40


@pytest.mark.parametrize(("max_parallel", "n_cpus"), [(1, 1), (2, 2)])
def test_each_line_of_output_has_the_number_of_its_launch(max_parallel, n_cpus, capfd):
    """Lines of launches that run at the same time can be told apart."""
    list(train(n_cpus=n_cpus, verbose=True, ipc_groups=None)(print).map(["a", "b"], max_parallel=max_parallel))
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{number}/rank {rank}] {item}" for number, item in enumerate("ab") for rank in range(n_cpus)]
