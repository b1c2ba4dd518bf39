"""A training step (forward, backward, SGD) of small nets on the CPU: plain torch, and blocks with three plans.

All arms as a user gets them, each in processes of its own.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks._apart import AS_A_USER_GETS_IT, Apart, all_apart, bursts_in_turn
from benchmarks._limits import cores_limit
from benchmarks._measure import Row
from benchmarks.zoo import calls_a_burst
from benchmarks.zoo_nets import ZOO
from parawrap.backends.cpu import usable_cores

__all__ = ["rows"]

_ROWS = {"mlp": 32, "conv": 8, "encoder": 8, "lstm": 32}
_ARMS = ("plain", "default", "auto", "lanes")
_ONE_THREAD = "plain, one thread"
_WARM_CALLS = 60  # after so many, no plan is still trying
_AUTO, _DEFAULT = 0.95, 0.90


def rows() -> list[Row]:
    """One a net; "lanes" is a block that cuts every call."""
    return [_row(net, size) for net, size in _ROWS.items()]


def _row(net: str, size: int) -> Row:
    made, env = f"{__package__}.zoo_arms:Step", AS_A_USER_GETS_IT
    starts = {arm: partial(Apart, made, env, net=net, plan=arm, rows=size) for arm in _ARMS}
    one = {**env, "OMP_NUM_THREADS": "1"}
    starts[_ONE_THREAD] = partial(Apart, made, one, net=net, plan="plain", rows=size)
    with all_apart(starts) as processes:
        took = [sorted(process.ask("burst", calls=_WARM_CALLS))[_WARM_CALLS // 2] for process in processes.values()]
        taken = bursts_in_turn(
            processes, calls=calls_a_burst(took[0]), pairs=dict.fromkeys(_ARMS[1:], "plain"), rounds=(12, 40)
        )
    gains = {arm: taken.gain(arm, "plain") for arm in _ARMS[1:]}
    told = [*(f"{arm} {gain}" for arm, gain in gains.items()), f"plain, itself {taken.itself('plain')}"]
    return Row(
        f"training step: {ZOO[net].title}, {size} rows",
        taken.arms,
        "times as fast as plain: " + ", ".join(told),
        f"auto at least {_AUTO}; default at least {_DEFAULT:.2f}",
        gains["auto"].median >= _AUTO and gains["default"].median >= _DEFAULT,
        peers=f"torch {torch.__version__}, plain",
        extra={"limits": {"cores": cores_limit(taken.median("plain"), taken.median(_ONE_THREAD), usable_cores())}},
    )
