"""Ranks that stay: each call has the contract of a launch, and the ranks keep their state between
calls.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
import pickle
import random
import re
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    PlatformError,
    UnsendableError,
    current_rank,
    wrapper,
)
from tests.helpers.processes import assert_gone, is_gone, ranks
from tests.helpers.ranks import all_sum, my_rank
from tests.helpers.waiting import PATIENCE_S, eventually

STATE = {}


@pytest.fixture(scope="module")
def world():
    """Two ranks that all tests of this module share. No test ends them."""
    with ranks(seed=0).open() as opened:
        yield opened


def store(name, value):
    STATE[name] = value


def recall(name):
    return STATE.get(name)


# -- calls


def test_a_changed_variable_is_sent(world):
    """A decorated function runs in these ranks, and not in those of its own platform."""
    number = 1
    read = wrapper(ranks(1))(lambda: (number, current_rank().world_size))
    first, number = world(read), 2
    assert (first, world(read)) == (((1, 2),) * 2, ((2, 2),) * 2)


def test_one_rank_can_be_called(world):
    """An index selects one rank, and the call returns its value.

    The other ranks keep their state.
    """
    assert (len(world), [one(my_rank) for one in world], world[-1](my_rank)) == (2, [0, 1], 1)
    world(store, "value", 0)
    world[1](store, "value", 7)
    assert world(recall, "value") == (0, 7)


def test_calls_that_cannot_work(world):
    """Wrong arguments, generators, other ranks, and values that cannot be sent are refused, with
    the cure.
    """

    def numbers():
        yield 1

    def history():
        return {"history": [1, threading.Lock()]} if my_rank() == 1 else None

    launch = world.submit(my_rank)
    assert launch.results() == (0, 1)
    for fails, says in [
        (lambda: world(store, 1, value=2, wrong=3), "wrong"),
        (lambda: world(3), "ranks cannot run 3, .*Give it a function"),
        (lambda: world(numbers), "Return values instead"),
        (lambda: world[2], "rank=2: there are the ranks 0 to 1"),
        (lambda: world.logs(2), "rank=2: there are the ranks 0 to 1"),
        (
            lambda: world(dict, config=[threading.Lock()]),
            r"^kwargs\['config'\]\[0\] cannot be sent to another process: ",
        ),
        (lambda: world(print, launch), r"args\[0\].*send its results instead"),
        (
            lambda: world(print, world),
            r"args\[0\].*ranks belong to the process that opened them: call them there",
        ),
        (
            lambda: pickle.dumps(world),
            "ranks belong to the process that opened them: call them there",
        ),
        (lambda: world(history), r"the result\['history'\].*\[1\].* cannot be sent .*: lock"),
        (lambda: world(lambda: ranks(1).open()), r"Platform\.open was called within a rank"),
    ]:
        with pytest.raises((LaunchError, TypeError, IndexError), match=says):
            fails()
    assert world(my_rank) == (0, 1)


# -- state


def draw():
    return random.random(), torch.rand(1).item()


def test_random_numbers_go_on():
    expected = wrapper(ranks(seed=1))(lambda: (draw(), draw()))()
    with ranks(seed=1).open() as opened:
        assert list(zip(opened(draw), opened(draw), strict=True)) == list(expected)


def exchange(tensor):
    STATE.setdefault("kept", []).append(tensor)
    return tensor + my_rank(), [[each[0].item(), each[-1].item()] for each in STATE["kept"]]


def test_tensors_outlive_later_calls(world):
    """Later calls do not reuse the memory of arguments that a rank keeps, nor of results."""
    size = 1 << 20
    results = [world(exchange, torch.full((size,), 10.0 * step)) for step in range(3)]
    for step, each in enumerate(results):
        for rank, (tensor, kept) in enumerate(each):
            assert torch.equal(tensor, torch.full((size,), 10.0 * step + rank))
            assert kept == [[10.0 * earlier] * 2 for earlier in range(step + 1)]
    world(STATE.clear)


# -- what the function, the script, and the rank have in common


def test_a_class_with_slots(world):
    """An object of the script's class arrives, and a misspelled attribute is an error in the rank
    too.
    """

    @dataclasses.dataclass(slots=True)
    class Result:
        loss: float = 1.0

    def misspell(result):
        result.los = 2.0

    assert world(lambda: Result(0.5)) == (Result(0.5), Result(0.5))
    with pytest.raises(AttributeError, match="'los'"):
        world(misspell, Result())


def test_functions_of_modules_keep_globals(world, tmp_path):
    """A module that was loaded from a file, and a script with other globals than `__main__`, as
    under a profiler.
    """
    text = "number = 0\ndef count():\n    global number\n    number += 1\n    return number\n"
    (tmp_path / "loaded.py").write_text(text)
    spec = importlib.util.spec_from_file_location("loaded_from_file", tmp_path / "loaded.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    profiled = {"__name__": "__main__"}
    exec(text, profiled)
    for count in module.count, profiled["count"]:
        assert [world(count)[1] for _ in range(3)] == [1, 2, 3]


def test_surroundings_go_with_a_call(world, tmp_path, monkeypatch):
    """The working folder, the environment, and `sys.path`, whatever the ranks did to theirs."""

    def around():
        return str(Path.cwd()), os.environ.get("PARAWRAP_LATE"), sys.path[0]

    before = world(around)
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PARAWRAP_LATE", "yes")
        patch.syspath_prepend(tmp_path)
        assert world(around) == ((str(tmp_path), "yes", str(tmp_path)),) * 2
    assert world(around) == before


def test_default_socket_timeouts_do_no_harm():
    """`socket.setdefaulttimeout` of the script limits no call, and an early end of a rank never
    counts as a result.
    """
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.05)
    try:
        with ranks().open() as opened:
            assert opened(lambda: time.sleep(0.2) or 1) == (1, 1)
    finally:
        socket.setdefaulttimeout(default)


def test_tensors_have_their_own_device(world):
    """A default device of the caller or the rank does not apply to arguments and results."""
    with torch.device("meta"):
        world(torch.set_default_device, "meta")
        assert world(lambda given: given, torch.ones(2, device="cpu"))[0].tolist() == [1.0, 1.0]
    world(torch.set_default_device, None)


# -- output


def speak(word):
    print(f"{word} of {my_rank()}", flush=True)


def test_output_of_a_call(capfd, tmp_path):
    """Output has its rank in front, is shown before the call returns, and is kept by `logs` and in
    files.
    """
    with ranks(verbose=True, console_logs=tmp_path, print_ranks=(1,)).open() as opened:
        opened(speak, "one")
        assert capfd.readouterr().out == "[rank 1] one of 1\n"
        opened[1](speak, "two")
        assert capfd.readouterr().out == "[rank 1] two of 1\n"
        assert (opened.logs(0), opened.logs(1)) == ("one of 0\n", "one of 1\ntwo of 1\n")
    (file,) = tmp_path.rglob("rank-1.log")
    assert file.read_text() == "one of 1\ntwo of 1\n"


# -- handles of calls


def test_a_submitted_call_has_a_handle(world, tmp_path):
    """The handle has the state, stacks, output, and results of its call.

    Later calls wait for it.
    """
    world(speak, "before")
    world(store, "order", [])

    def work(path):
        speak("during")
        eventually(path.exists, "go")
        return my_rank()

    launch = world.submit(work, tmp_path / "go")
    later = [world.submit(lambda step=step: recall("order").append(step)) for step in range(5)]
    eventually(lambda: launch.logs(0) and launch.logs(1), "output of the call")
    assert (launch.done(), launch.state, world.state, later[0].done()) == (
        False,
        "running",
        "running",
        False,
    )
    for stacks in launch.stacks(), world.stacks():
        assert sorted(stacks) == [0, 1]
        assert all("in work" in text for text in stacks.values())
    (tmp_path / "go").touch()
    assert launch.results(PATIENCE_S) == (0, 1)
    assert (launch.done(), launch.state, launch.stacks()) == (True, "finished", {})
    assert [launch.logs(0), launch.logs(1)] == ["during of 0\n", "during of 1\n"]
    assert world(recall, "order") == ([0, 1, 2, 3, 4],) * 2


def test_a_cancel_keeps_the_ranks(world, tmp_path):
    """`cancel` raises KeyboardInterrupt in the function; a call that has not begun never runs."""
    before = world(os.getpid)

    def waits(path):
        speak("waits")
        try:
            eventually(path.exists, "go")
        except KeyboardInterrupt:
            (path.parent / f"{my_rank()}.interrupted").touch()
            raise

    first = world.submit(waits, tmp_path / "go")
    second = world.submit(store, "cancelled", True)
    eventually(lambda: first.logs(0) and first.logs(1), "output of the call")
    second.cancel()
    first.cancel()
    for launch in first, second:
        with pytest.raises(LaunchCancelledError):
            launch.results()
        assert launch.state == "cancelled"
    assert len(list(tmp_path.glob("*.interrupted"))) == 2
    assert world(recall, "cancelled") == (None, None)
    assert (world(os.getpid), world(all_sum)) == (before, (2.0, 2.0))


def test_calls_of_several_threads(world):
    """Each thread gets the results of its calls, in the world that it calls."""
    with ranks(3).open() as other, ThreadPoolExecutor(4) as pool:
        calls = [
            [pool.submit((world, other)[number % 2], all_sum, float(number)) for _ in range(20)]
            for number in range(4)
        ]
        found = [{each.result(PATIENCE_S) for each in several} for several in calls]
        other(store, "world", 3)
        assert world(recall, "world") == (None, None)
    assert found == [{(0.0, 0.0)}, {(3.0,) * 3}, {(4.0, 4.0)}, {(9.0,) * 3}]


def test_a_fork_cannot_use_them(world):
    """A forked child that uses a launch, or calls or closes ranks, gets an error, and leaves them
    to its parent.
    """
    launch = wrapper(ranks(1))(my_rank).submit()
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for use in launch.results, lambda: world(my_rank):
                with pytest.raises(LaunchError) as caught:
                    use()
                os.write(writer, str(caught.value).encode())
            world.close()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as errors:
        text = errors.read()
    os.waitpid(pid, 0)
    assert f"belongs to process {os.getpid()}" in text
    assert (
        f"these ranks belong to process {os.getpid()}: call my_rank there, not in a forked child"
        in text
    )
    assert (launch.results(PATIENCE_S), world(my_rank)) == ((0,), (0, 1))


# -- displays and the end


def test_closed_ranks_refuse_calls():
    """`close` may be called again, ends the processes, and later calls raise."""
    finished = []
    opened = ranks(upon_finish=lambda: finished.append(1)).open()
    pids = opened(os.getpid)
    launch = opened.submit(my_rank)
    opened.close()
    opened.close()
    assert (launch.results(0), finished, opened.stacks()) == ((0, 1), [1], {})
    assert_gone(pids)
    assert repr(opened) == "<2 ranks of cpu: ended>"
    assert "ended" in opened._repr_html_()
    says = "these ranks are closed, and cannot call my_rank. Open new ones: Platform(...).open()"
    for call in (opened, opened.submit, opened[0]):
        with pytest.raises(LaunchError, match=re.escape(says)):
            call(my_rank)


def test_ranks_end_without_close():
    """An exception in the block and the garbage collector end the ranks."""
    pids = []

    def work():
        with ranks().open() as opened:
            pids.extend(opened(os.getpid))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    forgotten = ranks(1).open()
    pids.extend(forgotten(os.getpid))
    del forgotten
    gc.collect()
    assert_gone(pids)


CELLS = {
    "all": "opened(lambda: 1 / 0)",
    "one": "opened[0](lambda: 1 / 0)",
    "unsendable": "opened(print, threading.Lock())",
    "reduced": "opened(print, Unsendable())",
    "submitted": "opened.submit(print, threading.Lock())",
    "no rank": "opened[7]",
    "no logs": "opened.logs(7)",
}


class Unsendable:
    """Raises an error in user code, whose frame leads to the callers of that code."""

    def __reduce__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("line", CELLS.values(), ids=CELLS)
def test_cells_run_again_after_an_error(line):
    """An interactive interpreter keeps the last traceback, and not the ranks of the cell."""
    namespace = {**globals(), "pids": []}
    cell = f"opened = ranks(1).open()\npids.append(opened(os.getpid)[0])\n{line}"
    errors = []
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, UnsendableError, IndexError)) as caught:
            exec(cell, namespace)
        errors.append(caught.value)
    first, second = namespace["pids"]
    eventually(lambda: is_gone(first), "the end of the first ranks")
    assert not is_gone(second)
    namespace.pop("opened").close()


def test_a_lost_handle_ends_its_ranks():
    """Ranks are opened once those of lost handles have ended: they hold the memory of devices."""
    opened = ranks(1).open()
    (pid,) = opened(os.getpid)
    handle = weakref.ref(opened)
    del opened
    assert handle() is None
    with ranks(1).open():
        assert is_gone(pid)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"launcher": "env"}, "launcher='env': .*launcher='local'"),
        (
            {"launcher": "slurm"},
            r"launcher='slurm': .*launcher='local', or decorate the function with @wrapper\(",
        ),
        (
            {"max_restarts": 1},
            "max_restarts=1: .*Leave max_restarts out, and open new ranks after a failure",
        ),
    ],
    ids=["env", "slurm", "restarts"],
)
def test_platforms_that_cannot_stay(fields, text):
    with pytest.raises(PlatformError, match=text):
        ranks(**fields).open()
