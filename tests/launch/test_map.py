"""`map` of a decorated function: one launch per item, results in order, exceptions in their places."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest

from parawrap import LaunchCancelledError, Platform, RankResults, current_rank, wrapper
from parawrap.errors import UnsendableError
from tests.launch.processes import SOON_S, eventually, run_script


def train(**options):
    """A decorator for launches of one quiet rank."""
    return wrapper(Platform(device="cpu", **({"n_cpus": 1, "verbose": False} | options)))


def test_results_come_in_order_and_errors_in_their_places():
    """An item that fails does not end the others."""

    @train(n_cpus=2)
    def inverse(x):
        return 1 / x, current_rank().global_rank

    outcomes = list(inverse.map(iter([1, 0, 2])))
    assert outcomes[0] == RankResults([(1.0, 0), (1.0, 1)])
    assert type(outcomes[1]) is ZeroDivisionError
    assert outcomes[2] == RankResults([(0.5, 0), (0.5, 1)])


def test_no_items_give_no_launches():
    """An empty iterable gives an empty iterator."""
    assert list(train()(lambda x: x).map([])) == []


def test_an_item_that_cannot_be_sent_is_an_error_in_its_place():
    """The address is that of the item as the argument."""
    first, second = train()(lambda x: 1).map([threading.Lock(), 2])
    assert type(first) is UnsendableError
    assert str(first).startswith("args[0] cannot be sent")
    assert second == (1,)


@pytest.mark.parametrize("max_parallel", [1, 2, 5])
def test_no_more_launches_run_than_asked_for(max_parallel, tmp_path):
    """Launches overlap up to the limit, and results still come in the order of the items."""

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
def test_an_iterator_that_is_left_early_cancels_its_launches(max_parallel, tmp_path):
    """No rank runs on, and the items after it are never launched."""

    def waits(number):
        (tmp_path / f"{number}-{os.getpid()}").touch()
        time.sleep(0 if number == 0 else 600)
        return number

    outcomes = train()(waits).map(range(10), max_parallel=max_parallel)
    assert next(outcomes) == (0,)
    if max_parallel > 1:
        eventually(lambda: len(list(tmp_path.iterdir())) >= max_parallel, "the launches that overlap")
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < SOON_S
    begun = {path.name for path in tmp_path.iterdir()}
    assert len(begun) <= max_parallel + 1
    assert not any(psutil.pid_exists(int(name.partition("-")[2])) for name in begun)


def test_an_item_that_does_not_fit_is_refused_before_any_launch(tmp_path):
    """The function must take one argument."""
    with pytest.raises(TypeError, match="missing a required argument"):
        train()(lambda a, b: (tmp_path / "ran").touch()).map([1])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("max_parallel", [0, -1])
def test_a_limit_below_one_is_refused(max_parallel):
    """The message has the value and the cure."""
    with pytest.raises(ValueError, match=f"max_parallel={max_parallel}: give a number"):
        train()(lambda x: x).map([1], max_parallel=max_parallel)


def test_a_method_maps_over_its_object():
    """The object goes along with each item."""

    class Model:
        scale = 3

        @train()
        def times(self, x):
            return self.scale * x

    assert [outcome[0] for outcome in Model().times.map([1, 2])] == [3, 6]


def test_cancelled_launches_are_errors_in_their_places(tmp_path):
    """A launch that was cancelled before its turn says so."""
    from parawrap.faces._launch_map import _Queue
    from parawrap.launch import Job

    queue = _Queue([Job(Platform(device="cpu", verbose=False), lambda: time.sleep(600)) for _ in range(3)], 1)
    eventually(lambda: queue._running, "the first launch")
    queue.cancel()
    assert type(queue.futures[0].exception(SOON_S)) is LaunchCancelledError
    assert all(type(future.exception()) is LaunchCancelledError for future in queue.futures[1:])


def test_launches_that_overlap_are_cancelled_at_once(tmp_path):
    """The time that each rank takes to clean up is not added up."""

    def cleans_up(number):
        try:
            (tmp_path / str(number)).touch()
            time.sleep(0 if number == 0 else 600)
        finally:
            time.sleep(0 if number == 0 else 1)

    outcomes = train(grace_s=4)(cleans_up).map(range(5), max_parallel=5)
    next(outcomes)
    eventually(lambda: len(list(tmp_path.iterdir())) == 5, "all launches")
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < 3


def test_an_interpreter_that_ends_does_not_run_the_launches_that_are_left(tmp_path):
    """Neither if the iterator was never used, nor if an exception left its loop."""
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
