"""A module of a package that runs with ``python -m``; its rank starts a process.

The process runs this module again, and does not import torch, which takes seconds.
"""

import multiprocessing

from .data import NAME


def child(results):
    results.put(NAME)


def start():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=child, args=(results,))
    process.start()
    name = results.get(timeout=60)
    process.join()
    return name


if __name__ == "__main__":
    from parawrap import Platform, wrapper

    found = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(start)()
