"""Interrupt a sweep once two of its launches run."""

import logging
import os
import pathlib
import signal
import sys
import threading
import time

from parawrap import Platform, wrapper

logging.basicConfig(stream=sys.stdout)


def wait(name):
    pathlib.Path(name).touch()
    time.sleep(600)


def interrupt():
    while not (pathlib.Path("0").exists() and pathlib.Path("1").exists()):
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=interrupt).start()
launchable = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(wait)
try:
    list(launchable.map(["0", "1"], max_parallel=2))
except KeyboardInterrupt:
    print("interrupted")
