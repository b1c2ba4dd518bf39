"""Launches of one function on two gloo ranks that follow each other without a pause: parawrap and its peers.

Each turn runs in a fresh process, so no peer prepares a launch while another peer has its turn.
"""

from __future__ import annotations

from functools import partial

from benchmarks._measure import Arm, Row, arm_of, in_turn
from benchmarks.launch_peers import RELAUNCHED
from benchmarks.launching import alone, labelled

PEERS = ("parawrap", "torchrunx", "accelerate debug_launcher", "mp.spawn")
ROUNDS = 2
LAUNCHES = 4  # in one process; the first is not a relaunch
PATIENCE_S = 120


def rows() -> list[Row]:
    """Measure relaunches of an empty function, and of one that trains with DistributedDataParallel."""
    arms = {scenario: _arms(scenario) for scenario in RELAUNCHED}
    ours = {scenario: arms[scenario]["parawrap"].median_us for scenario in RELAUNCHED}
    ratio = ours["ddp"] / ours["empty"]
    return [
        Row(
            "relaunch without a pause: an empty function, 2 ranks",
            arms["empty"],
            f"{ours['empty'] / 1e3:.0f} ms; {_compared(arms['empty'])}",
            "under 100 ms",
            ours["empty"] < 1e5,
        ),
        Row(
            "relaunch without a pause: one step of DistributedDataParallel, 2 ranks",
            arms["ddp"],
            f"{ratio:.1f} times an empty relaunch; {_compared(arms['ddp'])}",
            "at most 3 times an empty relaunch",
            ratio <= 3,
        ),
    ]


def _arms(scenario: str) -> dict[str, Arm]:
    """Return the times of each peer's relaunches. Every second round runs in reverse order."""
    turns = in_turn({peer: partial(_seconds, peer, scenario) for peer in PEERS}, ROUNDS)
    arms: dict[str, Arm] = {}
    for peer, given in turns.items():
        whole = [turn for turn in given if turn]
        if not whole or (peer == "parawrap" and len(whole) < ROUNDS):
            msg = f"{peer} did not finish {LAUNCHES} launches of {scenario!r} in {ROUNDS - len(whole)} of {ROUNDS} turns"
            raise RuntimeError(msg)
        failed = f" ({ROUNDS - len(whole)} of {ROUNDS} turns failed)" if len(whole) < ROUNDS else ""
        arms[labelled(peer) + failed] = arm_of([each * 1e6 for turn in whole for each in turn])
    return arms


def _seconds(peer: str, scenario: str) -> list[float]:
    """Return the seconds of each relaunch of one turn; none if a launch failed or the turn took too long."""
    each: list[float] = alone(peer, scenario, LAUNCHES, PATIENCE_S).get("each", [])
    return each[1:]


def _compared(arms: dict[str, Arm]) -> str:
    ours = arms["parawrap"].median_us
    return ", ".join(
        f"{name} takes {arm.median_us / ours:.1f} times as long" for name, arm in arms.items() if name != "parawrap"
    )
