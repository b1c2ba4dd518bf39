"""Launches that follow each other without a pause: one function on two gloo ranks, by parawrap and
its peers.

Each turn runs in a fresh process, so that no peer prepares a launch during the turn of another.
"""

from __future__ import annotations

from functools import partial

from benchmarks._measure import Arm, Result, Row, arm_of, in_turn
from benchmarks.launch_peers import RELAUNCHED
from benchmarks.launching import alone, labelled

PEERS = ("parawrap", "torchrunx", "accelerate debug_launcher", "mp.spawn")
ROUNDS = 2
LAUNCHES = 4  # in one process; the first is not a relaunch
PATIENCE_S = 120


def rows() -> list[Row]:
    """Measure relaunches of an empty function, and of one that trains with
    DistributedDataParallel.
    """
    arms = {scenario: _arms(scenario) for scenario in RELAUNCHED}
    ours = {scenario: arms[scenario]["parawrap"].median_us for scenario in RELAUNCHED}
    ratio = ours["ddp"] / ours["empty"]
    return [
        Row(
            "relaunch without a pause: an empty function, 2 ranks",
            arms["empty"],
            [
                Result("relaunch, parawrap", ours["empty"] / 1e3, "ms").held_to("under", 100),
                *_compared(arms["empty"]),
            ],
        ),
        Row(
            "relaunch without a pause: one step of DistributedDataParallel, 2 ranks",
            arms["ddp"],
            [
                Result(
                    "time of parawrap divided by that of its empty relaunch", ratio, "ratio"
                ).held_to("at most", 3),
                *_compared(arms["ddp"]),
            ],
        ),
    ]


def _arms(scenario: str) -> dict[str, Arm]:
    """Return the times of each peer's relaunches, without peers that failed.

    Every second round runs in reverse order.
    """
    turns = in_turn({peer: partial(_seconds, peer, scenario) for peer in PEERS}, ROUNDS)
    arms: dict[str, Arm] = {}
    for peer, given in turns.items():
        whole = [turn for turn in given if turn]
        if peer == "parawrap" and len(whole) < ROUNDS:
            msg = (
                f"{peer} did not finish {LAUNCHES} launches of {scenario!r} in "
                f"{ROUNDS - len(whole)} of {ROUNDS} turns"
            )
            raise RuntimeError(msg)
        if not whole:
            print(
                f"{labelled(peer)} finished no {LAUNCHES} launches of {scenario!r}, and is left out"
            )
            continue
        failed = f" ({ROUNDS - len(whole)} of {ROUNDS} turns failed)" if len(whole) < ROUNDS else ""
        arms[labelled(peer) + failed] = arm_of([each * 1e6 for turn in whole for each in turn])
    return arms


def _seconds(peer: str, scenario: str) -> list[float]:
    """Return the seconds of each relaunch of one turn, or nothing if a launch failed or the turn
    timed out.
    """
    each: list[float] = alone(peer, scenario, LAUNCHES, PATIENCE_S).get("each", [])
    return each[1:]


def _compared(arms: dict[str, Arm]) -> list[Result]:
    ours = arms["parawrap"].median_us
    return [
        Result(f"time of {name} divided by that of parawrap", arm.median_us / ours, "ratio")
        for name, arm in arms.items()
        if name != "parawrap"
    ]
