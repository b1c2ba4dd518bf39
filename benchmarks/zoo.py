"""Inference of small nets on the CPU: plain torch, a block as it comes, and a block with ``plan="auto"``.

Each arm has processes of its own, because what a plan may set (how much memory glibc keeps) and what torch keeps (threads)
is the process's: as a user gets it, and with the memory kept in all arms alike by the environment. One more arm has one
thread, for the limits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks._apart import AS_A_USER_GETS_IT, KEPT, Apart, Process, Taken, all_apart, bursts_in_turn
from benchmarks._limits import cores_limit, faults_limit, interpreter_limit
from benchmarks._measure import Ratio, Row
from benchmarks.zoo_nets import ZOO
from parawrap.backends.cpu import usable_cores

__all__ = ["BATCHES", "Cell", "calls_a_burst", "rows"]

BATCHES = (1, 8, 64)
FIRST_CALLS = 200
_WARM = 60  # first calls of the arms whose first calls are not of interest: more than the default plan looks at
_TO_OPEN = 3  # rows of the call that opens a block's lanes: no cell's size of batch is measured by it
_BURST_US, _FEWEST_CALLS, _MOST_CALLS = 10_000.0, 3, 200
_KEPT = ", memory kept"
_ARMS = ("plain", "default", "auto")
_ENVIRONMENTS = {"": AS_A_USER_GETS_IT, _KEPT: KEPT}
_ONE_THREAD = "plain, memory kept, one thread"
_PEER = f"torch {torch.__version__}, plain"

_AUTO, _DEFAULT, _MEAN, _CONV, _ITSELF, _MEASURING = 0.95, 0.90, 1.10, 1.5, 0.05, 0.05


class Cell(NamedTuple):
    """What was measured of one net with batches of one size: times in us, by arm, of the same rounds."""

    net: str
    rows: int
    cores: int
    taken: Taken
    one_row: float  # in us: one row at one thread
    excess: Mapping[str, float] = {}  # by how much the first calls took longer than as many later, as a share of these
    extra_calls: int = 0
    faults: float = 0.0  # of a plain call, as a user gets it
    plan: str = ""
    opening_us: float = 0.0  # what the block's first call that is cut takes beyond a plain one

    @property
    def name(self) -> str:
        return f"{ZOO[self.net].title}, {self.rows} row{'s' * (self.rows > 1)}"

    def gain(self, arm: str, kept: str = "") -> Ratio:
        """How many times as fast as the plain arm in the same environment."""
        return self.taken.gain(arm + kept, "plain" + kept)

    @property
    def measuring(self) -> float:
        """What finding out costs in a run of so many calls: what the first take longer under the plan, and not plainly."""
        return self.excess["auto"] - self.excess["plain"]

    @property
    def limits(self) -> dict[str, object]:
        """By what stands in the way of being faster than the plain call."""
        plain, one_thread = self.taken.median("plain" + _KEPT), self.taken.median(_ONE_THREAD)
        limits: dict[str, object] = {"cores": cores_limit(plain, one_thread, self.cores)}
        if self.rows > 1:
            limits["interpreter"] = interpreter_limit(plain, one_thread, self.one_row, min(self.cores, self.rows))
        else:
            limits["interpreter"] = "one row is not cut"
        limits["page faults"] = faults_limit(self.taken.median("plain"), plain)
        return limits | {"page faults a call": f"{self.faults:,.0f}"}

    @property
    def limit(self) -> float:
        """How many times as fast a call could be as a user gets it: without page faults, and cut without loss."""
        told = self.limits
        found = {name: value for name, value in told.items() if isinstance(value, float)}
        cut = min(found["cores"], found["interpreter"]) if "interpreter" in found else 1.0
        return max(1.0, found["page faults"]) * max(1.0, cut)

    @property
    def row(self) -> Row:
        """The cell for itself."""
        gains = {arm: [self.gain(arm, kept) for kept in _ENVIRONMENTS] for arm in ("auto", "default")}
        gains["plain, itself"] = [self.taken.itself("plain" + kept) for kept in _ENVIRONMENTS]
        told = "<br>".join(
            f"{kept.removeprefix(', ') or 'as a user gets it'}: "
            + ", ".join(f"{arm} {both[at]}" for arm, both in gains.items())
            for at, kept in enumerate(_ENVIRONMENTS)
        )
        return Row(
            f"zoo: {self.name}",
            self.taken.arms,
            f"times as fast as plain<br>{told}",
            f"as a user gets it: auto at least {_AUTO}; default at least {_DEFAULT:.2f} in both",
            gains["auto"][0].median >= _AUTO and min(gain.median for gain in gains["default"]) >= _DEFAULT,
            peers=_PEER,
            extra={
                "limits": self.limits,
                "gains": {arm + kept: gains[arm][at].median for arm in gains for at, kept in enumerate(_ENVIRONMENTS)},
                "excess": dict(self.excess),
                "extra_calls": self.extra_calls,
                "plan": self.plan,
            },
        )


def rows(nets: Sequence[str] = tuple(ZOO), batches: Sequence[int] = BATCHES) -> list[Row]:
    """A row for each net and size of batch, and what they come to together."""
    cells = [cell for net in nets for cell in _measured(net, batches)]
    return [*(cell.row for cell in cells), *together(cells)]


def together(cells: Sequence[Cell]) -> list[Row]:
    """The figures over all cells."""
    found = [_auto(cells), _default(cells), _measuring(cells), _itself(cells)]
    convs = [cell for cell in cells if cell.net == "conv"]
    return [*found, _kept_for(max(convs, key=lambda cell: cell.rows))] if convs else found


def _auto(cells: Sequence[Cell]) -> Row:
    gains = {cell.name: [cell.gain("auto", kept).median for kept in _ENVIRONMENTS] for cell in cells}
    means = [math.exp(statistics.fmean(math.log(both[at]) for both in gains.values())) for at in (0, 1)]
    worst = min(gains, key=lambda name: gains[name][0])
    limit = statistics.geometric_mean(cell.limit for cell in cells)
    least = f"{gains[worst][0]:.2f} ({worst})"
    return Row(
        "zoo: auto, all cells",
        {},
        f"as a user gets it: geometric mean {means[0]:.2f} of at most {limit:.2f}, least {least}<br>"
        f"memory kept: geometric mean {means[1]:.2f}, least {min(both[1] for both in gains.values()):.2f}",
        f"as a user gets it: geometric mean above {_MEAN:.2f}, no cell below {_AUTO}",
        means[0] > _MEAN and gains[worst][0] >= _AUTO,
        peers=_PEER,
        extra={"geometric_means": means, "limit": limit},
    )


def _default(cells: Sequence[Cell]) -> Row:
    gains = {f"{cell.name}{kept}": cell.gain("default", kept).median for cell in cells for kept in _ENVIRONMENTS}
    worst = min(gains, key=lambda name: gains[name])
    told = f"least {gains[worst]:.2f} ({worst})"
    held = gains[worst] >= _DEFAULT
    return Row("zoo: default, all cells", {}, told, f"no cell below {_DEFAULT:.2f}", held, peers=_PEER)


def _measuring(cells: Sequence[Cell]) -> Row:
    """How much of a run goes into finding out."""
    costs = [f"{cell.name}: {cell.excess['auto']:+.1%} ({cell.excess['plain']:+.1%})" for cell in cells]
    worst = max(cells, key=lambda cell: cell.measuring)
    extra_calls = sum(cell.extra_calls for cell in cells)
    opening = {ZOO[cell.net].title: f"{cell.opening_us / 1e3:.1f} ms" for cell in cells}
    return Row(
        f"zoo: what measuring costs, of {FIRST_CALLS} calls",
        {},
        f"most {worst.measuring:+.1%} ({worst.name}); the model was run {extra_calls} times beyond the calls<br>"
        "the first calls with auto (and plainly) took longer than as many took later:<br>"
        + "<br>".join(costs)
        + "<br>beside it, once a block, its lanes are opened (replicas, threads): "
        + ", ".join(f"{net} {took}" for net, took in opening.items()),
        f"under {_MEASURING:.0%} more than plainly, in every cell",
        worst.measuring < _MEASURING,
        peers=_PEER,
        extra={"costs": {cell.name: cell.measuring for cell in cells}},
    )


def _itself(cells: Sequence[Cell]) -> Row:
    """What a figure is worth: 1.00 is where it should lie."""
    off = {cell.name + kept: cell.taken.itself("plain" + kept).median for cell in cells for kept in _ENVIRONMENTS}
    mean = math.exp(statistics.fmean(map(math.log, off.values())))
    beyond = [f"{name}: {ratio:.2f}" for name, ratio in off.items() if abs(ratio - 1) > _ITSELF]
    return Row(
        "zoo: plain against itself, in another process",
        {},
        f"geometric mean {mean:.2f}; {len(off) - len(beyond)} of {len(off)} within {_ITSELF:.0%}"
        + "".join(f"<br>{each}" for each in beyond),
        f"geometric mean within {_ITSELF:.0%} of 1; what a cell is off is its noise",
        abs(mean - 1) <= _ITSELF,
        peers=_PEER,
    )


def _kept_for(cell: Cell) -> Row:
    gain = cell.gain("auto")
    return Row(
        f"zoo: the plan keeps memory for convolutions: {cell.name}",
        {arm: cell.taken.arms[arm] for arm in ("plain", "auto")},
        f"{gain} times as fast",
        f"at least {_CONV} times as fast as torch as a user gets it",
        gain.median >= _CONV,
        peers=_PEER,
        extra={"limits": cell.limits},
    )


def _measured(net: str, batches: Sequence[int]) -> Iterator[Cell]:
    """All processes live through all sizes of batch; smaller ones come first."""
    cores = usable_cores()
    made = f"{__package__}.zoo_arms:Forward"
    starts = {
        arm + kept: partial(Apart, made, env, net=net, plan=arm) for kept, env in _ENVIRONMENTS.items() for arm in _ARMS
    }
    starts[_ONE_THREAD] = partial(Apart, made, {**KEPT, "OMP_NUM_THREADS": "1"}, net=net, plan="plain")
    one_row, known = 0.0, 0
    with all_apart(starts) as processes:
        opening_us = statistics.median(
            [process.ask("open", rows=_TO_OPEN) for (arm, _), process in processes.items() if arm in ("auto", "default")]
        )
        for size in sorted({1, *batches}):
            cell = _cell(net, size, cores, processes)
            one_row = one_row or cell.taken.median(_ONE_THREAD)
            if size in batches:
                yield cell._replace(one_row=one_row, extra_calls=cell.extra_calls - known, opening_us=opening_us)
            known = cell.extra_calls


def _cell(net: str, size: int, cores: int, processes: Mapping[Process, Apart]) -> Cell:
    for process in processes.values():
        process.ask("prepare", rows=size)
    excess: dict[str, list[float]] = {"auto": [], "plain": []}
    call_us = 0.0
    for (arm, _), process in processes.items():
        if arm in excess:
            first, later = (process.ask("first", calls=FIRST_CALLS, warm=warm) for warm in (True, False))
            excess[arm].append(first / later - 1)
            call_us = max(call_us, later / FIRST_CALLS)
        else:
            process.ask("first", calls=FIRST_CALLS if arm.startswith("auto") else _WARM)
    pairs = {arm + kept: "plain" + kept for arm in _ARMS[1:] for kept in _ENVIRONMENTS}
    taken = bursts_in_turn(processes, calls=calls_a_burst(call_us), pairs=pairs)
    told = processes["auto", 1].ask("told")
    faults = processes["plain", 1].ask("faults", calls=10)
    shares = {arm: statistics.fmean(values) for arm, values in excess.items()}
    return Cell(net, size, cores, taken, 0.0, shares, told["extra_calls"], faults, told["plan"])


def calls_a_burst(call_us: float) -> int:
    """So many that a burst is short, and not one call alone."""
    return min(_MOST_CALLS, max(_FEWEST_CALLS, round(_BURST_US / call_us)))
