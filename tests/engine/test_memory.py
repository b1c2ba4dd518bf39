"""Memory that the process keeps: counted over all who want it, respected where the user said otherwise, and given back."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from parawrap import Plan, parallel
from parawrap.engine.plan import _memory, _planner, _race
from parawrap.engine.plan._memory import HeldMemory, can_hold_memory, page_faults
from parawrap.engine.plan._race import Race

HELD, USUAL = _memory._HELD, _memory._USUAL
ON_GLIBC = pytest.mark.skipif(not can_hold_memory(), reason="the C library has no such thresholds, or they are set already")


@pytest.fixture
def thresholds(monkeypatch):
    """What the thresholds are set to, in order; the process is left as it is."""
    said = []
    monkeypatch.setattr(_memory, "_set", lambda *values: said.append(values))
    monkeypatch.setattr(_memory, "_glibc", _Library)
    monkeypatch.setattr(_memory, "_holders", 0)
    return said


class _Library:
    """A C library that has nothing to trim."""

    def malloc_trim(self, pad):
        return pad


class _OldLibrary(_Library):
    """One that refuses a threshold beyond 32 MiB, as glibc did until 2.34; what it took, in order."""

    def __init__(self):
        self.taken = []

    def mallopt(self, parameter, value):
        takes = parameter != _memory._MMAP_THRESHOLD or value <= 32 << 20
        if takes:
            self.taken.append((parameter, value))
        return int(takes)


@pytest.fixture
def many_pages(monkeypatch):
    """Calls that take many pages, and are raced though they are short."""
    pages = itertools.count(0, 10**9)
    monkeypatch.setattr(_planner, "page_faults", lambda: next(pages))
    monkeypatch.setattr(_race, "_TOO_SHORT_NS", 0)


def test_the_first_to_hold_and_the_last_to_release_set_the_thresholds(thresholds):
    """In between nothing is set, however often each of them says it."""
    first, second = HeldMemory(), HeldMemory()
    for holder in (first, first, second):
        holder.hold()
    first.release()
    first.release()
    assert (first.held, second.held) == (False, True)
    assert thresholds == [HELD]
    second.release()
    assert thresholds == [HELD, USUAL]


def test_a_release_without_a_hold_is_nothing(thresholds):
    """Who never held lets nobody else's memory go."""
    other = HeldMemory()
    other.hold()
    HeldMemory().release()
    assert thresholds == [HELD]
    other.release()


def test_it_can_be_held_again(thresholds):
    """After the last release the next hold sets the thresholds anew."""
    holder = HeldMemory()
    for _ in range(2):
        holder.hold()
        holder.release()
    assert thresholds == [HELD, USUAL] * 2


def test_a_holder_that_was_ended_holds_no_more(thresholds):
    """Whoever is about to hold, and comes too late, holds nothing that nobody would let go of; others may hold."""
    holder, other = HeldMemory(), HeldMemory()
    holder.hold()
    holder.end()
    holder.hold()
    assert not holder.held
    assert thresholds == [HELD, USUAL]
    holder.end()
    other.hold()
    assert thresholds == [HELD, USUAL, HELD]
    other.release()


def test_a_library_that_refuses_a_large_threshold_is_given_the_largest_that_it_takes(monkeypatch):
    """Memory is held as far as an older glibc goes, and what is usual comes back afterwards."""
    library = _OldLibrary()
    monkeypatch.setattr(_memory, "_glibc", lambda: library)
    monkeypatch.setattr(_memory, "_holders", 0)
    holder = HeldMemory()
    holder.hold()
    assert library.taken == [(_memory._TRIM_THRESHOLD, HELD[0]), (_memory._MMAP_THRESHOLD, 32 << 20)]
    library.taken.clear()
    holder.release()
    assert library.taken == [(_memory._TRIM_THRESHOLD, USUAL[0]), (_memory._MMAP_THRESHOLD, USUAL[1])]


def test_threads_that_hold_and_release_are_all_counted(thresholds):
    """Eight threads with a holder each, and one that they share: in the end nobody holds."""
    shared = HeldMemory()
    begin = threading.Barrier(8)

    def works():
        own = HeldMemory()
        begin.wait(40)
        for _ in range(200):
            own.hold()
            shared.hold()
            shared.release()
            own.release()

    threads = [threading.Thread(target=works) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert _memory._holders == 0
    assert thresholds[::2] == [HELD] * (len(thresholds) // 2)
    assert thresholds[1::2] == [USUAL] * (len(thresholds) // 2)


@pytest.mark.parametrize(
    ("name", "value", "can"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "1000000", False),
        ("MALLOC_TRIM_THRESHOLD_", "1000000", False),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000", False),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7:glibc.malloc.trim_threshold=1000000", False),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7", True),
    ],
)
def test_what_the_user_set_by_the_environment_stands(monkeypatch, name, value, can):
    """Thresholds that the environment names are not touched; other settings of malloc are no hindrance."""
    for known in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setattr(_memory, "_glibc", _Library)
    monkeypatch.setenv(name, value)
    assert can_hold_memory() is can


def test_nothing_is_held_where_the_c_library_is_another(monkeypatch):
    """Elsewhere than on Linux, and on musl, there is nothing to set and nothing is looked for."""
    _memory._glibc.cache_clear()
    try:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert not can_hold_memory()
        _memory._glibc.cache_clear()
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(_memory.ctypes, "CDLL", lambda name: object())
        assert not can_hold_memory()
    finally:
        _memory._glibc.cache_clear()


def test_page_faults_are_counted_from_when_the_process_began():
    """The count never falls; where the kernel does not tell, it is 0."""
    first = page_faults()
    assert 0 <= first <= page_faults()


FAULTS = """
import torch
from parawrap.engine.plan._memory import HeldMemory, page_faults
torch.set_num_threads(1)
model, x = torch.nn.Conv2d(8, 32, 3), torch.randn(16, 8, 200, 200)
holder = HeldMemory()

def faults():
    with torch.no_grad():
        for _ in range(2):
            model(x)
        before = page_faults()
        for _ in range(3):
            model(x)
    return (page_faults() - before) / 3

usual = faults()
holder.hold()
held = faults()
holder.release()
print(usual, held, faults())
"""


@ON_GLIBC
def test_a_convolution_takes_its_pages_once_while_memory_is_held():
    """Held, a call takes a tenth of the pages at most; released, it takes them from the kernel again."""
    script = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=True)
    usual, held, after = map(float, script.stdout.split())
    assert usual > 1000
    assert held < 0.1 * usual
    assert after > 0.5 * usual


AT_EXIT = """
import sys, torch
from parawrap import Plan, parallel
from parawrap.engine.plan import _memory
said = []
_memory._set = lambda *values: (said.append(values), print(values, flush=True))
model = torch.nn.Linear(8, 8).eval()
p = parallel(model, ["cpu", "cpu"], plan=Plan("auto"))
if sys.argv[1] == "entered":
    p.__enter__()
p(torch.randn(4, 8))
planners = [one for one in __import__("gc").get_objects() if type(one).__name__ == "Planner"]
assert planners
planners[0]._candidates._memory.hold()
"""


@ON_GLIBC
@pytest.mark.parametrize("how", ["entered", "called"])
def test_an_interpreter_that_ends_lets_go_once(how):
    """A program that never closes its block ends well, and the thresholds are set back on the way."""
    script = subprocess.run([sys.executable, "-c", AT_EXIT, how], capture_output=True, text=True, timeout=120, check=False)
    assert script.returncode == 0, script.stderr
    assert script.stdout.splitlines() == [str(HELD), str(USUAL)]


def held_by(p):
    """Have the planner of a block hold memory, as it does when that is on trial."""
    p(torch.randn(4, 8))
    memory = p._session._planner._candidates._memory
    memory.hold()
    return memory


def test_a_block_that_ends_by_an_error_lets_go(thresholds):
    """Whatever leaves the block, what was done to the process is undone."""
    p = parallel(nn.Linear(8, 8).eval(), ["cpu", "cpu"], plan=Plan("auto"))
    memory = held_by(p.__enter__())
    with pytest.raises(RuntimeError, match="mat1"), p:
        p(torch.randn(4, 9))
    p.__exit__(None, None, None)
    assert not memory.held
    assert thresholds == [HELD, USUAL]


def test_a_parallel_that_is_dropped_lets_go(thresholds):
    """Without close, the memory is let go of when nobody has the parallel any more."""
    p = parallel(nn.Linear(8, 8).eval(), ["cpu", "cpu"], plan=Plan("auto"))
    memory = held_by(p)
    del p
    gc.collect()
    assert not memory.held
    assert thresholds == [HELD, USUAL]


@ON_GLIBC
@pytest.mark.parametrize(("may", "expected"), [(True, [HELD, USUAL]), (False, [])], ids=["may", "may not"])
@pytest.mark.usefixtures("many_pages")
def test_memory_is_held_only_where_the_plan_allows_it(thresholds, may, expected):
    """Calls that take many pages have it tried to keep memory, until the block ends; with keep_memory=False never."""
    model = nn.Linear(8, 8).eval()
    x = torch.randn(8, 8)
    with torch.no_grad(), parallel(model, ["cpu", "cpu"], plan=Plan("auto", keep_memory=may)):
        for _ in range(300):
            model(x)
    assert thresholds == expected


def test_a_block_that_ended_holds_no_more(thresholds):
    """A call in another thread that finds out only then that memory is worth keeping keeps none."""
    with parallel(nn.Linear(8, 8).eval(), ["cpu", "cpu"], plan=Plan("auto")) as p:
        memory = held_by(p)
    memory.hold()
    assert not memory.held
    assert thresholds == [HELD, USUAL]


@pytest.fixture
def keeping_takes(monkeypatch):
    """A function that has all calls that keep memory take so many milliseconds, and all others one, as the plan sees it."""
    note = Race.note

    def takes(kept_ms):
        def noted(race, way, took_ns):
            note(race, way, kept_ms * 1e6 if way.memory_kept else 1e6)

        monkeypatch.setattr(Race, "note", noted)

    return takes


@ON_GLIBC
@pytest.mark.usefixtures("many_pages")
@pytest.mark.parametrize(("kept_ms", "pays"), [(0.5, True), (1.5, False)], ids=["pays", "does not pay"])
def test_a_trial_that_another_block_ends_is_over_in_both(thresholds, keeping_takes, kept_ms, pays):
    """Two blocks with one plan: each lets go at its next call that asks, or keeps on where it pays."""
    keeping_takes(kept_ms)
    plan = Plan("auto")
    one, other = nn.Linear(8, 8).eval(), nn.Linear(8, 8).eval()
    x = torch.randn(8, 8)
    with torch.no_grad(), parallel(one, ["cpu", "cpu"], plan=plan), parallel(other, ["cpu", "cpu"], plan=plan):
        other(input=x)  # by name: a plain call asks nobody any more where it comes as it is
        while not thresholds:
            one(input=x)
        (contest,) = [contest for book in plan._books.values() for contest in book.contests.values()]
        assert contest.race.choice is None
        while contest.race.choice is None:
            other(input=x)
        assert contest.race.choice.memory_kept is pays
        for _ in range(2):
            one(input=x)
            other(input=x)
        assert thresholds == ([HELD] if pays else [HELD, USUAL])
        assert _memory._holders == 2 * pays
    assert thresholds == [HELD, USUAL]
