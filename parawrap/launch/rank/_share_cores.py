"""Give each rank of a machine its share of the cores: in torch, in numpy's and scipy's BLAS, and in its subprocesses."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch

from parawrap.backends.cpu_backend import usable_cores
from parawrap.launch._devices import Device
from parawrap.launch._platform import Platform

__all__ = ["share_cores"]

_MAPPED = Path("/proc/self/maps")
# Functions that read and set the number of threads. numpy and scipy rename those of OpenBLAS.
_READ_AND_SET = (
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
)


def share_cores(platform: Platform, ranks_per_node: int) -> None:
    """Limit the threads of this rank. OMP_NUM_THREADS holds for libraries that it loads later, and for its subprocesses."""
    threads = _threads_per_rank(platform, ranks_per_node)
    torch.set_num_threads(threads)
    if "OMP_NUM_THREADS" in os.environ:  # a BLAS that is loaded has read it
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for path in _find_blas():
        _limit_library(path, threads)


def _threads_per_rank(platform: Platform, ranks_per_node: int) -> int:
    """Return the number of threads: the user's setting, or an equal share of the cores."""
    if platform.spawn_method == "fork":  # OpenMP's threads do not survive a fork; waiting for them would block forever
        return 1
    if platform.device != Device.CPU and platform.n_cpus > 1:
        return platform.n_cpus
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, usable_cores() // ranks_per_node)


def _find_blas() -> set[str]:
    """Return the BLAS libraries that this process has loaded. Empty on systems without /proc."""
    with contextlib.suppress(OSError):
        return {line.split()[-1] for line in _MAPPED.read_text().splitlines() if "openblas" in line or "mkl_rt" in line}
    return set()


def _limit_library(path: str, threads: int) -> None:
    with contextlib.suppress(OSError):  # the file was replaced, or its name has a space
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        for read, write in _READ_AND_SET:
            if hasattr(library, read) and hasattr(library, write):
                if getattr(library, read)() != threads:  # OpenBLAS would start its threads, which wait actively at first
                    getattr(library, write)(threads)
                return
