"""`Platform`: the frozen description of where and how a launch runs.

This file validates the values. The launchers decide how to start processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch.distributed as dist

from parawrap._public import public
from parawrap.backends import neuron_is_device
from parawrap.errors import PlatformError
from parawrap.launch._devices import Device, visible
from parawrap.launch._world import find_world

if TYPE_CHECKING:
    from parawrap.launch.ranks import Ranks

_DeviceName = Literal["auto", "cpu", "gpu", "cuda", "mps", "neuron", "slurm", "ray"]
OPEN_RANKS: list[Callable[[Platform], Ranks]] = []
"""The function that `Platform.open` calls. Its module imports this one, and enters it."""

_ELSEWHERE = ("ray", "slurm")  # launchers that start ranks on other machines


@public
@dataclass(frozen=True)
class Platform:
    """Where and how the ranks of a launch run. Frozen, so launches and threads may share it.

    Args:
        name: The name of the job on a Slurm or Ray cluster.
        device: The kind of device: ``"cpu"``, ``"gpu"`` or ``"cuda"`` (the same), ``"mps"``, or
            ``"neuron"``. Each rank gets one. On NeuronCores without torch devices, its tensors stay
            on the CPU, and it sees its core as nc:0. ``"auto"`` selects the first of GPU, MPS, and
            CPU that this machine has. ``"slurm"`` and ``"ray"`` select that launcher, with GPUs if
            `n_gpus` is given and CPUs otherwise. For type checkers, convert a variable with
            ``Device.from_str(name)``.
        launcher: ``"local"`` starts processes on this machine. ``"slurm"`` submits a batch job.
            ``"ray"`` reserves resources of a Ray cluster. ``"env"`` runs the function in the
            processes that torchrun, srun, or mpirun started. None selects ``"env"`` in such a
            process and ``"local"`` elsewhere.
        partition: The Slurm partition.
        n_nodes: The number of machines. All run the same number of ranks. With
            ``launcher="local"``, the ranks of all nodes run on this machine, to try out a function
            for a cluster.
        n_gpus: The number of accelerators per node, with one rank each. None uses all that are
            visible.
        n_cpus: With ``device="cpu"``, the number of ranks per node. Otherwise the number of CPU
            threads per rank; 1 gives each rank an equal share of the cores.
        ram: Memory per node in GB (1024 MB), for Slurm and Ray.
        ipc_protocol: The store where ranks meet: ``"file"`` (in a private folder) or ``"tcp"`` (on
            a port). None selects ``"tcp"`` with several nodes, on Ray, or if `master_addr` or
            `master_port` is given, and ``"file"`` otherwise. All users of a machine can connect to
            a port.
        master_addr: The address that the TCP store listens on. None selects the loopback interface;
            on a cluster, an address that the other nodes can reach.
        master_port: The port of the TCP store. 0 selects a free port.
        ipc_groups: ``[]`` puts all ranks into one process group. Lists of global ranks make one
            group per list; ``current_rank().group`` is the rank's group, or None if no list
            contains the rank. None makes no group.
        backend: The torch.distributed backend. None selects gloo, and NCCL in addition on GPUs.
        seed: The seed of Python, NumPy, torch, and the accelerators in every rank, so that models
            start equal. ``"script"`` takes the seed of the launching script,
            ``torch.initial_seed()``: the last one that it gave to ``torch.manual_seed``, or else
            the random one that torch drew. None seeds each rank differently.
        timeout_min: Minutes until the launch ends with ``LaunchTimeoutError``, counted from the
            start of its ranks. Time in a queue does not count.
        slurm_additional_parameters: More options of the batch job: submitit's parameters
            (``{"account": "lab"}``), or ``sbatch`` options by their long names.
        console_logs: A folder for log files. Each launch makes a subfolder with one file per rank:
            ``rank-0.log``, and so on.
        verbose: True to show the ranks' output, with the rank in front of each line.
        print_ranks: The ranks to show, such as ``(0,)``. None shows all. `Launch.logs` keeps the
            output of every rank.
        upon_finish: Called without arguments in this process after all ranks have returned. Its
            exceptions are logged.
        max_restarts: The number of times that the whole group restarts after a rank fails.
        grace_s: Seconds for ranks to clean up before they are killed, and to save when they are
            preempted.
        hang_timeout_s: End the launch with ``LaunchTimeoutError`` if, for this many seconds, no
            rank writes output and no main thread makes progress in its Python code.
        ipc_timeout_min: Minutes that a collective of the process groups may wait for other ranks
            before it raises. Set it if, for example, rank 0 prepares data for an hour. None leaves
            torch's defaults: 30 with gloo, 10 with NCCL.

    Raises:
        PlatformError: If a value is not allowed. The message names the field, its value, and the
            allowed values.

    >>> platform = Platform(device="cpu", n_cpus=4)
    >>> platform.world_size
    4
    >>> Platform(device="cpu", n_cpus=0)
    Traceback (most recent call last):
    ...
    parawrap.errors.PlatformError: n_cpus=0: give a number of ranks or threads, at least 1 (...)
    """

    name: str = "parawrap"
    device: Device | _DeviceName = Device.AUTO
    launcher: str | None = None
    partition: str | None = None
    n_nodes: int = 1
    n_gpus: int | None = None
    n_cpus: int = 1
    ram: float | None = None
    ipc_protocol: Literal["tcp", "file"] | None = None
    master_addr: str | None = None
    master_port: int = 0
    ipc_groups: Sequence[Sequence[int]] | None = field(default_factory=tuple)
    backend: str | None = None
    seed: int | Literal["script"] | None = "script"
    timeout_min: float | None = None
    slurm_additional_parameters: Mapping[str, Any] | None = None
    console_logs: str | Path | None = None
    verbose: bool = True
    print_ranks: Sequence[int] | None = None
    upon_finish: Callable[[], object] | None = None
    max_restarts: int = 0
    grace_s: float = 5.0
    hang_timeout_s: float | None = None
    ipc_timeout_min: float | None = None

    def __post_init__(self) -> None:
        given = str(self.device)
        _set_device(self)
        for name, (accepts, allowed) in _RULES.items():
            if not accepts(getattr(self, name)):
                _refuse(name, getattr(self, name), allowed)
        _check_launcher(self)
        _check_visible(self, given)
        _set_ranks(self)

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        ordinary = {
            each.name: () if each.name == "ipc_groups" else each.default for each in fields(self)
        }
        shown = {name: value for name, value in given.items() if value != ordinary[name]} | {
            "device": str(self.device)
        }
        return f"Platform({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        if self.device == Device.CPU:
            return self.n_cpus
        return visible(Device(self.device)) if self.n_gpus is None else self.n_gpus

    @property
    def cpus_per_node(self) -> int:
        """The number of CPU cores to reserve per node, for launchers that reserve cores."""
        return self.ranks_per_node * (1 if self.device == Device.CPU else self.n_cpus)

    @property
    def world_size(self) -> int:
        """The total number of ranks."""
        return self.n_nodes * self.ranks_per_node

    @property
    def leaves_counts_open(self) -> bool:
        """True if the platform adopts the rank count of the world that this process runs in."""
        return self.n_nodes == 1 and (
            self.n_cpus == 1 if self.device == Device.CPU else self.n_gpus is None
        )

    @property
    def requires_ipc(self) -> bool:
        """True if ranks form process groups."""
        return self.ipc_groups is not None

    def open(self) -> Ranks:
        """Start the ranks, and return a handle that calls functions on them any number of times.

        See `Ranks`.

        The fields of the platform hold for all calls: `seed` for the life of the ranks, and
        `timeout_min` and `hang_timeout_s` for each call.

        Raises:
            PlatformError: If the launcher is ``"slurm"`` or ``"env"``, or `max_restarts` is not 0.
            LaunchError: If the ranks cannot be started.

        >>> from parawrap import Platform, current_rank
        >>> with Platform(device="cpu", n_cpus=2).open() as ranks:
        ...     ranks(lambda scale: scale * current_rank().global_rank, 10)
        RankResults(0, 10)
        """
        return OPEN_RANKS[0](self)

    def shows(self, rank: int) -> bool:
        """True if the output of this rank is printed."""
        return self.verbose and (self.print_ranks is None or rank in self.print_ranks)

    @property
    def process_group_backend(self) -> str:
        """The backend to pass to ``torch.distributed.init_process_group``."""
        if self.backend is not None:
            return self.backend
        if self.device == Device.GPU:
            return "cpu:gloo,cuda:nccl"
        offers_neuron = (
            self.device == Device.NEURON
            and neuron_is_device()
            and dist.is_backend_available("neuron")
        )
        return "cpu:gloo,neuron:neuron" if offers_neuron else "gloo"


def _refuse(field_name: str, value: object, allowed: str) -> NoReturn:
    msg = f"{field_name}={value!r}: {allowed}"
    raise PlatformError(msg)


def _set(platform: Platform, name: str, value: object) -> None:
    object.__setattr__(platform, name, value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and 0 < value < math.inf)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n_nodes": (_is_count, "give a number of machines, at least 1"),
    "n_cpus": (_is_count, "give a number of ranks or threads, at least 1"),
    "n_gpus": (
        lambda value: value is None or _is_count(value),
        "give a number of accelerators per node, at least 1, or None for all visible ones",
    ),
    "master_port": (
        lambda value: isinstance(value, int) and 0 <= value < 1 << 16,
        "give a port number below 65536, or 0 for any free one",
    ),
    "seed": (
        lambda value: (
            value in (None, "script") or (type(value) is int and -(1 << 63) <= value < 1 << 64)
        ),
        "give a whole number of 64 bits, 'script', or None",
    ),
    "max_restarts": (
        lambda value: isinstance(value, int) and value >= 0,
        "give a number of restarts, at least 0",
    ),
    "launcher": (
        lambda value: value in (None, "env", "local", "ray", "slurm"),
        "give env, local, ray or slurm, or None",
    ),
    "ipc_protocol": (lambda value: value in (None, "tcp", "file"), "give tcp or file, or None"),
    "timeout_min": (_is_limit, "give a number of minutes above 0, or None"),
    "hang_timeout_s": (_is_limit, "give a number of seconds above 0, or None"),
    "ipc_timeout_min": (_is_limit, "give a number of minutes above 0, or None"),
    "ram": (_is_limit, "give a number of GB above 0, or None"),
    "grace_s": (
        lambda value: isinstance(value, (int, float)) and 0 <= value < math.inf,
        "give a number of seconds, at least 0",
    ),
}
"""The values that a field accepts, as a function and in words.

Other fields are checked where they are used.
"""


def _set_device(platform: Platform) -> None:
    """Set device and launcher. ``device`` may also name a launcher."""
    try:
        kind = Device.from_str(str(platform.device))
    except ValueError:
        *kinds, last = Device
        _refuse("device", platform.device, f"give {', '.join(kinds)} or {last}")
    is_cluster = kind in (Device.SLURM, Device.RAY)
    if is_cluster:
        if platform.launcher not in (None, kind.value, "local"):
            _refuse(
                "launcher",
                platform.launcher,
                f"device={str(platform.device)!r} names the launcher already: leave one of them "
                "out, or give 'local' to start the ranks on this machine",
            )
        _set(platform, "launcher", platform.launcher or kind.value)
    if is_cluster or (kind is Device.AUTO and platform.launcher in _ELSEWHERE):
        kind = Device.CPU if platform.n_gpus is None else Device.GPU
    elif kind is Device.AUTO:
        kind = next(each for each in (Device.GPU, Device.MPS, Device.CPU) if visible(each))
    _set(platform, "device", kind)


def _check_launcher(platform: Platform) -> None:
    if platform.launcher == "local":  # the ranks of all nodes are ranks of this machine
        if platform.device == Device.CPU:
            _set(platform, "n_cpus", platform.n_nodes * platform.n_cpus)
        elif platform.n_gpus is not None:
            _set(platform, "n_gpus", platform.n_nodes * platform.n_gpus)
        _set(platform, "n_nodes", 1)
    if _starts_here(platform) and platform.n_nodes != 1:
        _refuse(
            "n_nodes",
            platform.n_nodes,
            "ranks start on this machine: give 1, or launcher='local' to start those of all "
            "nodes here, or the launcher 'slurm' or 'ray'",
        )
    if platform.ipc_protocol == "file" and platform.launcher == "ray":
        _refuse(
            "ipc_protocol", "file", "the nodes of a Ray cluster do not share a folder: give 'tcp'"
        )


def _starts_here(platform: Platform) -> bool:
    """True if this process starts the ranks on this machine."""
    return platform.launcher == "local" or (platform.launcher is None and find_world() is None)


def _set_ranks(platform: Platform) -> None:
    """Check the ranks of `ipc_groups` and `print_ranks`, and keep them as tuples."""
    groups, shown, size, world = (
        platform.ipc_groups,
        platform.print_ranks,
        platform.world_size,
        find_world(),
    )
    if world is not None and platform.launcher in (None, "env") and platform.leaves_counts_open:
        size = world.world_size
    if groups is not None:
        if isinstance(groups, str) or not all(
            isinstance(group, Sequence) and group and all(isinstance(rank, int) for rank in group)
            for group in groups
        ):
            _refuse(
                "ipc_groups",
                groups,
                "give None, [] or lists of global ranks, such as [[0, 1], [2, 3]]",
            )
        ranks = list(chain.from_iterable(groups))
        if twice := [rank for rank in ranks if ranks.count(rank) > 1]:
            _refuse(
                "ipc_groups",
                groups,
                f"rank {min(twice)} appears twice: put each rank into one group at most",
            )
        if missing := [rank for rank in ranks if not 0 <= rank < size]:
            _refuse(
                "ipc_groups",
                groups,
                f"rank {missing[0]} does not exist: give ranks from 0 to {size - 1}",
            )
        _set(platform, "ipc_groups", tuple(map(tuple, groups)))
    if shown is not None:
        if isinstance(shown, (str, int)) or not set(shown) <= set(range(size)):
            _refuse(
                "print_ranks",
                shown,
                f"give None, or global ranks from 0 to {size - 1}, such as (0,)",
            )
        _set(platform, "print_ranks", tuple(shown))


def _check_visible(platform: Platform, given: str) -> None:
    """Check the counts against this machine's devices.

    `given` is the device as the user named it.
    """
    kind, n_gpus = Device(platform.device), platform.n_gpus
    if kind is Device.CPU and n_gpus is not None:
        _refuse(
            "n_gpus",
            n_gpus,
            f"device={given!r} uses no GPUs: leave n_gpus out, and set n_cpus to the rank count",
        )
    if kind is Device.CPU:
        return
    there = visible(kind)
    if not _starts_here(platform):
        if platform.launcher in _ELSEWHERE and n_gpus is None:
            _refuse(
                "n_gpus",
                None,
                (
                    "this machine cannot count the accelerators of a cluster node: give a number "
                    "per node"
                ),
            )
    elif there == 0:
        cure = "" if n_gpus is None else ", with n_cpus as the number of ranks instead of n_gpus"
        cure = f"give device='cpu'{cure} (parawrap run: --device cpu --n 2)"
        _refuse("device", given, f"this machine has no visible {kind.value}: {cure}")
    elif (n_gpus or 0) > there:
        more = " on all nodes together" if platform.launcher == "local" else ""
        _refuse(
            "n_gpus",
            n_gpus,
            f"{there} {'is' if there == 1 else 'are'} visible here: give at most {there}{more}",
        )
