"""`map` over lanes against the loop that one would write, and against a ThreadPoolExecutor with as many workers.

Batches of 4 of an encoder, traced and not. All arms keep their memory, each is a process of its own.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks._apart import KEPT, Apart, all_apart, bursts_in_turn
from benchmarks._limits import cores_limit
from benchmarks._measure import Row
from benchmarks.zoo_nets import ZOO
from parawrap.backends.cpu import usable_cores

__all__ = ["rows"]

_NET, _ROWS, _BATCHES = "encoder", 4, 32
_WANTED = 1.5
_WARM_CALLS = 5
_ONE, _LOOP, _MAP, _POOL = "loop, one thread", "loop, torch's threads", "map", "ThreadPoolExecutor"
_WAYS = {_ONE: "loop", _LOOP: "loop", _MAP: "map", _POOL: "executor"}


def rows() -> list[Row]:
    """The traced encoder, for which something is wanted, and the one as it is, whose lanes share the interpreter."""
    return [_row("traced", traced=True), _row("not traced", traced=False)]


def _row(name: str, *, traced: bool) -> Row:
    cores = usable_cores()
    given = {"net": _NET, "traced": traced, "rows": _ROWS, "batches": _BATCHES}
    threads = {arm: {**KEPT, "OMP_NUM_THREADS": str(1 if arm == _ONE else cores)} for arm in _WAYS}
    starts = {
        arm: partial(Apart, f"{__package__}.zoo_arms:Stream", threads[arm], way=way, **given) for arm, way in _WAYS.items()
    }
    with all_apart(starts) as processes:
        for process in processes.values():
            process.ask("burst", calls=_WARM_CALLS)
        taken = bursts_in_turn(processes, calls=1, pairs=dict.fromkeys([_ONE, _LOOP, _POOL], _MAP))
    gains = {arm: taken.gain(_MAP, arm) for arm in (_ONE, _LOOP, _POOL)}
    one = taken.median(_ONE)
    return Row(
        f"map: {ZOO[_NET].title}, {name}, {_BATCHES} batches of {_ROWS}, {cores} lanes",
        taken.arms,
        "times as fast as "
        + ", ".join(f"{arm}: {gain}" for arm, gain in gains.items())
        + f"; the loop, itself: {taken.itself(_LOOP)}",
        f"at least {_WANTED} times as fast as the loop at one thread" if traced else "reported",
        not traced or gains[_ONE].median >= _WANTED,
        peers=f"torch {torch.__version__}; concurrent.futures",
        extra={
            "limits": {
                "cores, over one thread": cores_limit(one, one, cores),
                "cores, over torch's threads": cores_limit(taken.median(_LOOP), one, cores),
            },
            "gains": {arm: gain.median for arm, gain in gains.items()},
        },
    )
