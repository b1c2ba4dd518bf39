"""Open ranks three times; each time, their call is interrupted, and another one follows."""

import os
import time
from pathlib import Path

import torch.distributed as dist

from parawrap import LaunchError, Platform, current_rank


def waits(how, folder):
    Path(folder, f"{os.getpid()}.pid").touch()
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            Path(folder, f"{current_rank().global_rank}.interrupted").touch()
            if how == "answers":
                raise


if __name__ == "__main__":
    for how, grace_s in ("answers", 60), ("ignores", 600), ("ignores once", 0.5):
        with Platform(device="cpu", n_cpus=2, grace_s=grace_s, verbose=False).open() as ranks:
            pids = ranks(os.getpid)
            try:
                ranks(waits, how, Path(how))
            except KeyboardInterrupt as error:
                print("interrupted", flush=True)
                for note in getattr(error, "__notes__", []):
                    print(note)
            try:
                print(ranks(dist.barrier), ranks(os.getpid) == pids)
            except LaunchError as error:
                print(error)
