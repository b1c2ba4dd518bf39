"""Use shared memory in ranks, and leave runs of every kind to the end of the interpreter."""

import atexit
import importlib
import os
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path


def launch_late():
    try:
        launches()
    except Exception as error:
        print("late launch:", type(error).__name__, "while the interpreter exits" in str(error))


atexit.register(launch_late)  # runs after the exit hook of parawrap, which is registered later
from parawrap import Platform, wrapper  # noqa: E402 (the order of exit hooks counts)

two = Platform(device="cpu", n_cpus=2, ipc_groups=None, verbose=False)
one = Platform(device="cpu", n_cpus=1, verbose=False)


# -- shared memory. The resource tracker of this script starts with it: after the ranks


def attach(name):
    block = shared_memory.SharedMemory(name=name)
    block.buf[0] += 1
    block.close()


with two.open() as ranks:
    block = shared_memory.SharedMemory(create=True, size=80)
    ranks[0](attach, block.name)
    wrapper(two)(attach)(block.name)
again = shared_memory.SharedMemory(name=block.name)
print("shared memory:", again.buf[0] > 0)
again.close()
block.close()
block.unlink()


# -- runs at the end


def waits(name):
    Path(name).touch()
    time.sleep(0 if name == "left-0" else 600)


run = importlib.import_module("parawrap.launch.run")
stop_server = run.stop_server
run.stop_server = lambda: (print("ranks:", opened.state), stop_server())
opened = two.open()
opened(os.getpid)
launches = wrapper(one)(lambda: 1)
launchable = wrapper(one)(waits)
unused = launchable.map([f"unused-{i}" for i in range(30)], max_parallel=2)
left = launchable.map([f"left-{i}" for i in range(30)], max_parallel=2)
next(left)
iterator = launchable.map([f"thread-{i}" for i in range(30)], max_parallel=2)
submitted = launchable.submit("submitted")
threading.Thread(target=lambda: next(iterator), daemon=True).start()
print("launch:", *launches())
