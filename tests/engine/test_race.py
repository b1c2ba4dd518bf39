"""The race between ways, driven by a machine that is made up: ways whose true times are known, noise, spikes, spinning."""

from __future__ import annotations

import random

import pytest

from parawrap.engine.plan import PLAIN, Way
from parawrap.engine.plan._race import CAREFUL, QUICK, Race, Times

OTHERS = [Way(count, 1) for count in range(2, 12)]
LANES = OTHERS[0]
BASE_NS = 5e6
SEEDS = range(200)
RULES = pytest.mark.parametrize("rules", [CAREFUL, QUICK], ids=["careful", "quick"])


class Machine:
    """Runs calls: each takes its way's true time, times lognormal noise, and now and then five times that.

    With `spin` a call takes that many times as long in the 5 ms after another way was run.
    """

    def __init__(self, costs, seed, *, base=BASE_NS, spin=1.0):
        self.costs = costs
        self.random = random.Random(seed)
        self.base = base
        self.spin = spin
        self.now = self.quiet_from = self.true = 0.0
        self.last = None
        self.calls = 0

    def run(self, race, calls):
        for _ in range(calls):
            way = race.turn()
            race.note(way, self.took(way))
            self.calls += 1
        return race

    def took(self, way):
        cost = self.costs[way]
        self.true += cost
        took = cost * self.base * self.random.lognormvariate(0, 0.05) * (5 if self.random.random() < 0.05 else 1)
        if way != self.last:
            self.last, self.quiet_from = way, self.now + 5e6
        took *= self.spin if self.now < self.quiet_from else 1
        self.now += took
        return took


def costs_of(*others):
    return dict(zip([PLAIN, *OTHERS], [1.0, *others], strict=False))


def raced(costs, seed, rules=CAREFUL, calls=200, **conditions):
    """The race after some calls, and what they took in truth beyond the best way's time, as a share of that."""
    machine = Machine(costs, seed, **conditions)
    race = machine.run(Race(list(costs), rules), calls)
    return race, machine.true / (calls * min(costs.values())) - 1


SLOWER = {
    "one 9x slower": (9.0,),
    "two 3x slower": (3.0, 3.0),
    "all equal": (1.0,) * 5,
    "eight 1.3x slower": (1.3,) * 8,
    "five 1.06x slower": (1.06,) * 5,
}


@pytest.mark.parametrize("others", SLOWER.values(), ids=SLOWER)
@pytest.mark.parametrize("base", [1e6, BASE_NS, 5e7], ids=["1 ms", "5 ms", "50 ms"])
def test_a_way_that_is_slower_than_plain_is_never_chosen(others, base):
    """Whatever noise there is, the choice is within 5% of plain, and finding that out costs under 5% of 200 calls."""
    lost = []
    for seed in SEEDS:
        race, excess = raced(costs_of(*others), seed, base=base)
        lost.append(excess)
        assert race.choice is None or costs_of(*others)[race.choice] <= 1.05
    assert sum(lost) / len(lost) < 0.05
    assert sorted(lost)[int(0.9 * len(lost))] < 0.05  # a spike of the first call as well: a few are beyond


@RULES
def test_a_slower_way_of_two_is_never_chosen(rules):
    """The two ways of the default plan are told apart though they are close."""
    assert {raced(costs_of(1.08), seed, rules)[0].choice for seed in SEEDS} == {PLAIN}


@RULES
@pytest.mark.parametrize("base", [5e5, BASE_NS, 5e7], ids=["0.5 ms", "5 ms", "50 ms"])
def test_a_faster_way_is_found(rules, base):
    """A way that takes two thirds of the time is chosen within 200 calls in 99 of 100 runs, and by and by in all."""
    within = [raced(costs_of(2 / 3), seed, rules, base=base)[0].choice == LANES for seed in range(1000)]
    assert sum(within) >= 990
    missed = [seed for seed, found in enumerate(within) if not found]
    assert all(raced(costs_of(2 / 3), seed, rules, 4000, base=base)[0].choice == LANES for seed in missed)


@pytest.mark.parametrize("base", [1e6, BASE_NS], ids=["1 ms", "5 ms"])
def test_a_faster_way_is_found_behind_hopeless_ones(base):
    """Ways that cost a lot to try do not keep the others from being tried for ever."""
    costs = costs_of(9.0, 9.0, 9.0, 2 / 3)
    found = [raced(costs, seed, calls=6000, base=base)[0].choice == OTHERS[3] for seed in range(60)]
    assert sum(found) >= 58


@RULES
@pytest.mark.parametrize("base", [5e5, 1e6, BASE_NS], ids=["0.5 ms", "1 ms", "5 ms"])
def test_spinning_threads_do_not_hide_a_faster_way(rules, base):
    """Lanes that are 20% faster win although whatever comes after another way is slowed for five milliseconds."""
    won = [raced(costs_of(0.8), seed, rules, 400, base=base, spin=1.6)[0].choice == LANES for seed in SEEDS]
    assert sum(won) >= 0.95 * len(won)


def test_conditions_that_change_all_the_time_lead_to_few_measurements(monkeypatch):
    """Slow and fast in turn, every 50 calls for 100,000 calls: the choice is looked at again about log2 times at most."""
    begun = []
    begin = Race._begin
    monkeypatch.setattr(Race, "_begin", lambda race, ways: (begun.append(ways), begin(race, ways))[1])
    machine = Machine({}, 0)
    race = Race([PLAIN, LANES])
    for turn in range(2000):
        machine.costs = costs_of(1.2) if turn % 2 else {PLAIN: 3.0, LANES: 3.6}
        machine.run(race, 50)
    assert len(begun) <= 9  # patience 400, 800, ... up to 100,000
    assert race.choice == PLAIN


def test_a_way_that_became_slow_is_left():
    """When the chosen way takes three times as long from one call on, another is chosen within a thousand calls."""
    for seed in range(50):
        machine = Machine(costs_of(0.6), seed)
        race = machine.run(Race([PLAIN, LANES]), 5000)
        assert race.choice == LANES
        machine.costs = costs_of(1.8)
        assert machine.run(race, 1000).choice == PLAIN


def test_a_change_that_all_ways_share_keeps_the_choice():
    """A machine that is twice as slow for everything has the ways measured again, and the same one chosen."""
    machine = Machine(costs_of(0.6), 1)
    race = machine.run(Race([PLAIN, LANES]), 1000)
    before = race.times(LANES)
    machine.costs = {PLAIN: 2.0, LANES: 1.2}
    machine.run(race, 1000)
    assert race.choice == LANES
    assert race.times(LANES).median > 1.5 * before.median


def test_the_plain_way_wins_when_there_is_no_other():
    """With one way there is nothing to find out but what it takes: a few calls."""
    race = Race([PLAIN])
    Machine(costs_of(), 0).run(race, 4)
    assert race.choice == PLAIN
    assert race.times(PLAIN).calls == 3


@RULES
def test_a_way_that_is_hopeless_ends_the_race(rules):
    """When the last other way is given up, the first is chosen at the next call: it need not be tried as often."""
    race = Race([PLAIN, LANES], rules)
    Machine(costs_of(9.0), 0).run(race, 6)
    assert race.choice == PLAIN


@RULES
def test_a_call_that_is_too_short_is_plain(rules):
    """Where the first way takes less than others take to be asked for, they are not tried at all."""
    race = Race([PLAIN, LANES], rules)
    Machine(costs_of(0.1), 0, base=1e5).run(race, 2)
    assert race.choice == PLAIN
    assert race.times(LANES) is None


def test_a_gain_under_what_asking_costs_is_none():
    """A way that saves a few microseconds of a short call is not chosen: looking up the choice takes as long."""
    race = Race([PLAIN, LANES])
    for _ in range(300):
        way = race.turn()
        race.note(way, 40_000 if way == PLAIN else 32_000)
    assert race.choice == PLAIN


def test_ways_that_enter_are_tried_against_the_choice():
    """A further way is run next, and chosen where it gains; what was measured before is not measured again."""
    costs = {**costs_of(0.7), OTHERS[1]: 0.4}
    machine = Machine(costs, 3)
    race = machine.run(Race([PLAIN, LANES]), 100)
    assert race.choice == LANES
    before = race.times(PLAIN), race.times(LANES)
    race.enter([OTHERS[1]])
    assert race.choice is None
    machine.run(race, 40)
    assert race.choice == OTHERS[1]
    assert (race.times(PLAIN), race.times(LANES)) == before


def test_a_slow_way_that_enters_leaves_the_choice():
    """The earlier choice stands when what came in is no faster."""
    machine = Machine({**costs_of(0.7), OTHERS[1]: 1.4}, 3)
    race = machine.run(Race([PLAIN, LANES]), 100)
    race.enter([OTHERS[1]])
    assert machine.run(race, 60).choice == LANES


def test_a_way_that_enters_twice_is_there_once():
    """Entering what is there already loses nothing that was measured."""
    machine = Machine(costs_of(0.7), 3)
    race = machine.run(Race([PLAIN, LANES]), 100)
    race.enter([LANES, LANES])
    assert list(race.ways) == [PLAIN, LANES]
    assert race.times(LANES).calls >= CAREFUL.tries
    assert machine.run(race, 30).choice == LANES


def test_a_way_can_be_settled():
    """Settle chooses a way that nobody measured, and restart measures it with the rest."""
    race = Race([PLAIN])
    race.settle(LANES)
    assert race.turn() == LANES
    assert list(race.ways) == [PLAIN, LANES]
    race.restart()
    assert race.choice is None
    assert Machine(costs_of(0.5), 0).run(race, 60).choice == LANES


def test_a_restart_forgets_what_was_measured():
    """After restart there are the same ways and no times."""
    race = Machine(costs_of(0.5), 0).run(Race([PLAIN, LANES]), 60)
    race.restart()
    assert [race.times(way) for way in race.ways] == [None, None]


def test_what_is_restored_is_chosen_from_the_first_call():
    """A restored race runs the stored choice, shows the stored times, and still notices that it became slow."""
    times = {PLAIN: Times(5e6, 4.9e6, 5.1e6, 9), LANES: Times(3e6, 2.9e6, 3.1e6, 9)}
    race = Race([PLAIN, OTHERS[3]])
    race.restore(LANES, times)
    assert race.turn() == LANES
    assert {way: race.times(way) for way in times} == times
    assert race.times(OTHERS[3]) is None
    machine = Machine({**costs_of(3.0), OTHERS[3]: 2.0}, 0)
    assert machine.run(race, 1000).choice == PLAIN


def test_a_call_in_a_way_that_has_no_turn_tells_nothing():
    """What other ways took meanwhile, from calls that were begun before, changes neither times nor choice."""
    race = Race([PLAIN, LANES])
    race.turn()
    race.note(LANES, 1.0)
    race.note(OTHERS[5], 1.0)
    assert race.times(LANES) is None
    assert race.times(OTHERS[5]) is None


def test_memory_that_is_kept_by_now_stays_so_when_all_is_measured_again():
    """Once a way that keeps memory was chosen, the ways that are measured again all keep it."""
    kept = LANES._replace(memory_kept=True)
    race = Race([PLAIN, kept])
    machine = Machine({PLAIN: 1.0, kept: 0.5}, 0)
    assert machine.run(race, 500).choice == kept
    machine.costs = {PLAIN._replace(memory_kept=True): 1.0, kept: 2.0}
    machine.run(race, 1000)
    assert race.choice == PLAIN._replace(memory_kept=True)
