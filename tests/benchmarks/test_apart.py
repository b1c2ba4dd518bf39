"""Arms in processes of their own: what the comparison itself is worth, and what becomes of a process that fails."""

from __future__ import annotations

import pytest

from benchmarks._apart import KEPT, Apart, Taken, all_apart, bursts_in_turn

ONE_THREAD = {**KEPT, "OMP_NUM_THREADS": "1"}
CALLS = 40  # a burst is over within a time slice of whatever else runs


def tiny(calls_at_a_time):
    return Apart("benchmarks.zoo_arms:Forward", ONE_THREAD, net="tiny", plan="plain", at_a_time=calls_at_a_time)


@pytest.fixture(scope="module")
def taken():
    """One arm, the same again, and one with a fifth more work; measured as the zoo is."""
    with all_apart({"arm": lambda: tiny(5), "again": lambda: tiny(5), "more": lambda: tiny(6)}) as processes:
        for process in processes.values():
            process.ask("prepare", rows=8)
        return bursts_in_turn(processes, calls=CALLS, pairs={"again": "arm", "more": "arm"}, seconds=20)


def test_an_arm_replaced_by_itself_is_as_fast(taken):
    """1.00 within 5%."""
    assert taken.gain("again", over="arm").median == pytest.approx(1, abs=0.05)


def test_a_fifth_more_work_is_seen(taken):
    """The same machinery tells an arm that is really another."""
    assert taken.gain("more", over="arm").median == pytest.approx(1 / 1.2, abs=0.05)


def test_an_arm_is_the_mean_of_its_processes():
    """Ratios of one round are taken of the means; the second process against the first is the noise."""
    taken = Taken({("plain", 1): [4.0, 4.0], ("plain", 2): [9.0, 9.0], ("auto", 1): [3.0, 6.0], ("auto", 2): [3.0, 6.0]})
    assert taken.of("plain") == pytest.approx([6, 6])
    assert taken.gain("auto", over="plain").median == pytest.approx(1.5)
    assert taken.itself("plain").median == pytest.approx(4 / 9)
    assert taken.arms["auto"].median_us == pytest.approx(4.5)


class Counting:
    """Stands in for a process: each burst takes what the next figure says."""

    def __init__(self, times):
        self.times = iter(times)
        self.asked = 0

    def ask(self, method, calls):
        assert method == "burst"
        self.asked += 1
        return [next(self.times)] * calls


def test_rounds_go_on_until_the_ratio_is_known():
    """As few as are asked for where all rounds agree, and as many as are allowed where they do not."""
    steady = {("plain", 1): Counting([2.0] * 40), ("auto", 1): Counting([1.0] * 40)}
    taken = bursts_in_turn(steady, calls=1, pairs={"auto": "plain"}, rounds=(10, 40))
    assert len(taken.of("plain")) == 10
    noisy = {("plain", 1): Counting([2.0] * 40), ("auto", 1): Counting([1.0, 2.0] * 20)}
    taken = bursts_in_turn(noisy, calls=1, pairs={"auto": "plain"}, rounds=(10, 40), seconds=600)
    assert len(taken.of("plain")) == 40


def test_time_that_is_over_ends_the_rounds():
    """But not before the fewest were had."""
    noisy = {("plain", 1): Counting([2.0] * 40), ("auto", 1): Counting([1.0, 2.0] * 20)}
    taken = bursts_in_turn(noisy, calls=1, pairs={"auto": "plain"}, rounds=(10, 40), seconds=0)
    assert len(taken.of("plain")) == 10


def test_a_failure_in_a_process_is_told_here():
    """With its traceback; the process answers on."""
    with tiny(1) as process:
        with pytest.raises(RuntimeError, match=r"(?s)failed when asked for burst:.*TypeError"):
            process.ask("burst", no_such_word=1)
        assert len(process.ask("burst", calls=3)) == 3


def test_a_process_that_cannot_start_its_arm_says_so():
    """What it raised comes with the first question."""
    with (
        Apart("benchmarks.zoo_arms:Forward", net="no such net", plan="plain") as process,
        pytest.raises(RuntimeError, match=r"(?s)failed when asked for its start:.*no such net"),
    ):
        process.wait_until_ready()


def test_a_process_that_dies_is_told_apart_from_one_that_fails():
    """The message has its exit code."""
    with Apart("os:_exit", status=7) as process, pytest.raises(RuntimeError, match="ended with exit code 7 when asked for"):
        process.wait_until_ready()


def test_a_process_ends_with_its_block():
    """Also where a parallel block is open in it, whose lanes are threads."""
    with Apart("benchmarks.zoo_arms:Forward", ONE_THREAD, net="tiny", plan="lanes") as process:
        process.ask("prepare", rows=8)
        process.ask("burst", calls=2)
        started = process._process
    assert started.poll() is not None


def test_an_environment_is_set_and_taken_away(monkeypatch):
    """None stands for a variable that is not to be there."""
    monkeypatch.setenv("PARAWRAP_B", "there")
    given = {"PARAWRAP_A": "set", "PARAWRAP_B": None}
    with Apart("os:getenv", given, key="PARAWRAP_A") as a, Apart("os:getenv", given, key="PARAWRAP_B", default="gone") as b:
        assert (a.ask("upper"), b.ask("upper")) == ("SET", "GONE")


def test_what_an_arm_prints_is_no_answer():
    """Standard output is the arm's own; answers go another way."""
    with Apart("builtins:print", end="no JSON", flush=True) as process:
        assert process.ask("__bool__") is False
