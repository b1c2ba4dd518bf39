"""Launches on two gloo ranks of this machine: times, results, and failures of parawrap and its
peers.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._measure import Arm, Result, Row, arm_of, take_turns
from benchmarks.launch_peers import PEERS, SCENARIOS
from parawrap import Platform, functional, wrapper

__all__ = ["PACKAGES", "alone", "labelled", "rows"]

PACKAGES = {"accelerate debug_launcher": "accelerate", "torchrunx": "torchrunx", "ddpw": "ddpw"}
PATIENCE_S = 20
_FAILURES = {"raises": "a rank raises", "killed": "a rank is killed"}

TWO = Platform(device="cpu", n_cpus=2, verbose=False)


def rows() -> list[Row]:
    """Measure second calls, first calls, failures, averages, and large results."""
    return [second_call(), first_call(), failures(), averages(), large_results()]


def labelled(peer: str) -> str:
    package = PACKAGES.get(peer)
    return f"{peer} {importlib.metadata.version(package)}" if package else peer


def second_call() -> Row:
    """Call all peers in turn in one process, after one warm-up call each."""
    peers = {name: PEERS[name] for name in PEERS if name != "ddpw"}  # ddpw does not start CPU ranks
    arms = take_turns(
        {labelled(name): (lambda launch=launch: launch("fine")) for name, launch in peers.items()},
        rounds=7,
    )
    return second_call_row(arms)


def second_call_row(arms: Mapping[str, Arm]) -> Row:
    """Return the row for these times, by the labels of the peers."""
    ours, results = arms["parawrap"].median_us, []
    for name, arm in arms.items():
        ratio = Result(f"time of {name} divided by that of parawrap", arm.median_us / ours, "ratio")
        if name.startswith("accelerate"):  # a plain fork, the fastest start
            ratio = Result(
                f"time of parawrap divided by that of {name}", ours / arm.median_us, "ratio"
            )
            ratio = ratio.held_to("at most", 4)
        if name != "parawrap":
            results.append(ratio.held_to("at least", 8) if name.startswith("torchrunx") else ratio)
    return Row("second call: an all_reduce, 2 ranks", arms, results)


def first_call() -> Row:
    """Time the first call in fresh processes that have imported torch and the peer."""
    times: dict[str, list[float]] = {"parawrap": [], "mp.spawn": []}
    for _ in range(7):
        for name, microseconds in times.items():
            microseconds.append(alone(name, "fine")["seconds"] * 1e6)
    arms = {name: arm_of(microseconds) for name, microseconds in times.items()}
    ratio = arms["parawrap"].median_us / arms["mp.spawn"].median_us
    result = Result("time of parawrap divided by that of mp.spawn", ratio, "ratio").held_to(
        "at most", 1
    )
    return Row("first call of a process", arms, [result])


def failures() -> Row:
    """Tabulate the result of each peer, and its error if a rank raises or is killed while the other
    rank waits.
    """
    lines = [
        "| peer | returns | a rank raises ValueError | a rank is killed |",
        "|---|---|---|---|",
    ]
    waits: dict[str, float] = {}
    for name in PEERS:
        found = {scenario: alone(name, scenario) for scenario in SCENARIOS}
        cells = [_outcome(scenario, found[scenario]) for scenario in SCENARIOS]
        if "raised" in found["fine"]:  # ddpw creates no process group on the CPU
            cells = [f"`{found['fine']['raised'][:70]}...`", "not reached", "not reached"]
        lines.append(f"| {labelled(name)} | {' | '.join(cells)} |")
        if name == "parawrap":
            waits = {scenario: found[scenario]["after"] for scenario in _FAILURES}
    return Row(
        "delay of the parent's exception after a rank fails, the other rank blocked in a "
        "collective",
        {},
        [
            Result(f"delay, {_FAILURES[scenario]}", each, "s").held_to("under", 2)
            for scenario, each in waits.items()
        ],
        extra={"markdown": "\n".join(lines)},
    )


def _outcome(scenario: str, found: dict[str, Any]) -> str:
    if "hung" in found:
        return f"hung: killed after {PATIENCE_S} s with {found['hung']} child processes"
    if "returned" in found:
        return f"`{found['returned'][:60]}`" + (
            "" if scenario == "fine" else ", as if nothing had happened"
        )
    names = (
        "names the signal"
        if re.search("SIGKILL|signal 9|Signal 9", found["text"])
        else "does not name the signal"
    )
    what = (
        ("keeps the type" if found["keeps_type"] else "another type")
        if scenario == "raises"
        else names
    )
    after = f", {found['after']:.1f} s later" if found.get("after") is not None else ""
    return f"`{found['raised'].partition(':')[0]}` ({what}){after}"


def alone(
    peer: str, scenario: str, times: int | None = None, patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Run one launch, or `times` launches, in a fresh process.

    Kill the process and its children after a timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        killed_at = Path(folder) / "killed"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.launch_peers",
                peer,
                scenario,
                *([] if times is None else [str(times)]),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "KILLED_AT": str(killed_at)},
            start_new_session=True,
            text=True,
        )
        try:
            out, _ = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            return {"hung": _kill_tree(process)}
        if times is not None and process.returncode:
            return {"failed": process.returncode}
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        if times is not None:
            return found
        failed_at = (
            killed_at.read_text() if killed_at.exists() else _raised_at(found.get("text", ""))
        )
        found["after"] = found["ended_at"] - float(failed_at) if failed_at else None
        return found


def _raised_at(text: str) -> str | None:
    """Return the time that the failing rank wrote into its exception."""
    times = re.findall(r"\b1\d{9}\.\d+\b", text)
    return times[0] if times else None


def _kill_tree(process: subprocess.Popen[str]) -> int:
    import psutil

    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        member.kill()
    process.communicate()
    return len(family)


def averages() -> Row:
    """Average the gradients of 300 parameters, together and one by one."""
    (ours, theirs, differing), _ = wrapper(TWO)(_average_gradients)()
    return averages_row(ours, theirs, differing)


def averages_row(ours: Arm, theirs: Arm, differing: int) -> Row:
    """Return the row for these times, and for the elements that differ between the ranks."""
    ratio = theirs.median_us / ours.median_us
    return Row(
        "average_params_grads, 300 parameters of 64x64 and 64, 2 ranks",
        {"parawrap": ours, "one all_reduce per parameter": theirs},
        [
            Result(
                "time of one all_reduce per parameter divided by that of parawrap", ratio, "ratio"
            ).held_to("at least", 4),
            Result("averages that differ between the ranks", differing, "count").held_to(
                "exactly", 0
            ),
        ],
    )


def _average_gradients() -> tuple[Arm, Arm, int]:
    shapes = [(64, 64), (64,)] * 150
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in shapes])
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) + dist.get_rank()

    def one_by_one() -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2

    arms = take_turns(
        {"ours": lambda: functional.average_params_grads(module), "theirs": one_by_one}, rounds=21
    )
    functional.average_params_grads(module)
    flat = torch.cat(
        [
            parameter.grad.flatten()
            for parameter in module.parameters()
            if parameter.grad is not None
        ]
    )
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return arms["ours"], arms["theirs"], int((both[0] != both[1]).sum())


def large_results() -> Row:
    """Return a gibibyte from each of two ranks."""
    start = time.perf_counter()
    results = wrapper(TWO)(_gigabyte)()
    seconds = time.perf_counter() - start
    whole = [each.nbytes == 2**30 and bool(each[-1] == rank) for rank, each in enumerate(results)]
    return large_results_row(seconds, sum(whole))


def large_results_row(seconds: float, whole: int) -> Row:
    """Return the row for this time, and for the number of results that arrived complete."""
    return Row(
        "1 GiB from each of 2 ranks, created and returned",
        {},
        [
            Result("time of the launch", seconds, "s"),
            Result("complete results", whole, "count").held_to("exactly", 2),
        ],
    )


def _gigabyte() -> torch.Tensor:
    return torch.full((2**28,), float(dist.get_rank()))
