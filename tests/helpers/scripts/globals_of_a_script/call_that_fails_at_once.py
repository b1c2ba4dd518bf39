"""Rank 0 fails at once, and the other one is interrupted before it begins the call, which
brings globals and settings.
"""

import os
import time

from script_checks import error_of, same

from parawrap import Platform, current_rank

platform = Platform(device="cpu", n_cpus=2, verbose=False)


class Slow:  # keeps rank 1 at work after its answer
    def __del__(self):
        time.sleep(0.5 if os.environ.get("RANK") == "1" else 0)


late, TASK = 1, "TASK"


def fail():
    if current_rank().global_rank == 0:
        raise ValueError(late)


with platform.open() as ranks:
    ranks(Slow)
    os.environ[TASK], late = "7", 2
    assert type(error_of(ranks, fail)) is ValueError
    same(ranks(lambda: (os.environ.get(TASK), late)), (("7", 2),) * 2)
