"""Launch ranks that write more than a pipe holds."""

import os
import time

from parawrap import Platform, wrapper
from parawrap.errors import LaunchTimeoutError


def talk(then_s):
    for _ in range(1200):
        print("x" * 1000, flush=True)
    time.sleep(then_s)


fields = {"device": "cpu", "n_cpus": 2, "ipc_groups": None, "grace_s": 0}
try:
    wrapper(Platform(timeout_min=1 / 60, **fields))(talk)(600)
except LaunchTimeoutError:
    os.write(2, b"timed out")
wrapper(Platform(**fields))(talk)(0)
os.write(2, b", done")
