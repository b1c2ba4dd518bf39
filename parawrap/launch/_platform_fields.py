"""The fields of a platform: where and how a launch runs.

This file validates the values. The launchers decide how to start processes.
"""

from __future__ import annotations

import copy
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist

from parawrap._private_names import imports_main
from parawrap.backends import neuron_is_device
from parawrap.errors import PlatformError
from parawrap.launch._devices import (
    Device,
    count_visible,
    is_chosen_by_variable,
    rank_device,
    variables_for,
)
from parawrap.launch._world import World, find_world
from parawrap.launch.inheritance import is_inherited

_DeviceName = Literal["auto", "cpu", "gpu", "cuda", "mps", "neuron", "slurm", "ray"]
_ELSEWHERE = ("ray", "slurm")  # launchers that start ranks on other machines
_CLUSTERS = (Device.SLURM, Device.RAY)  # values of `device` that name a launcher


@dataclass(frozen=True)
class PlatformFields:
    """The values of a `Platform`: all that the code below `Platform.open` reads of it."""

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
    ipc_groups: Sequence[Sequence[int]] | None = ()
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
    device_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        given = str(self.device)
        # The checks below read the values more than once, which an iterator does not allow
        for name in ("device_ids", "ipc_groups", "print_ranks"):
            value = getattr(self, name)
            if isinstance(value, Iterator):
                _set(self, name, tuple(value))
        _set_device(self)
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if not rule.accepts(value):
                _refuse(name, value, rule.allowed)
        _fit_to_launcher(self)
        # A rank and its loader workers import the module of the platform again, and so make the
        # platform again. They may see fewer devices than the launching process, which has checked
        # it. `is_inherited` is not yet true while a spawned worker imports the main script
        is_checked = is_inherited(os.environ) or imports_main()
        if not is_checked:
            _check_visible(self, given)
            _check_device_ids(self)
            _check_ranks(self)
        _set_tuples(self)

    def __repr__(self) -> str:
        shown = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "device":  # always, because it decides what the others mean
                shown.append(f"device={str(value)!r}")
            elif value != each.default:
                shown.append(f"{each.name}={value!r}")
        return f"Platform({', '.join(shown)})"

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        count: int | None = getattr(self, rank_count_field(self.device))
        if count is not None:
            return count
        # None: all that are visible, or that `device_ids` names
        return count_visible(self.device) if self.device_ids is None else len(set(self.device_ids))

    @property
    def own_device_ids(self) -> tuple[int, ...]:
        """The devices of a launch, by local rank, as this process numbers them.

        They are the first different ones of `device_ids`, which `map` shares out among launches.
        """
        if self.device_ids is None:
            return tuple(range(self.ranks_per_node))
        return tuple(dict.fromkeys(self.device_ids))[: self.ranks_per_node]

    def device_of(self, local_rank: int) -> torch.device:
        """Return the device for the tensors of a rank, as this process names it."""
        # Not `own_device_ids` in both cases: `inline` names a device that this machine lacks
        index = local_rank if self.device_ids is None else self.own_device_ids[local_rank]
        return rank_device(self.device, index)

    @property
    def device_variables(self) -> dict[str, str]:
        """The variables with which ranks see only the devices of `device_ids`."""
        if self.device_ids is None:
            return {}
        return variables_for(self.device, self.own_device_ids)

    @property
    def cpus_per_node(self) -> int:
        """The number of CPU cores to reserve per node, for launchers that reserve cores."""
        cores_per_rank = 1 if self.device == Device.CPU else self.n_cpus
        return self.ranks_per_node * cores_per_rank

    @property
    def world_size(self) -> int:
        """The total number of ranks."""
        return self.n_nodes * self.ranks_per_node

    @property
    def leaves_counts_open(self) -> bool:
        """True if the platform adopts the rank count of the world that this process runs in."""
        if self.n_nodes != 1:
            return False
        return self.n_cpus == 1 if self.device == Device.CPU else self.n_gpus is None

    @property
    def requires_ipc(self) -> bool:
        """True if ranks form process groups."""
        return self.ipc_groups is not None

    def as_sent(self) -> Self:
        """Return the platform as ranks see it, without fields that only the launch uses."""
        sent = copy.copy(self)
        _set(sent, "upon_finish", None)
        _set(sent, "slurm_additional_parameters", None)
        if sent.device in (Device.GPU, Device.NEURON):
            # A rank may see only its own device, and could not count those of the others
            _set(sent, "n_gpus", self.ranks_per_node)
        if is_chosen_by_variable(self.device):
            # The rank numbers its devices from 0
            _set(sent, "device_ids", None)
        return sent

    def fitted_to(self, n_nodes: int, ranks_per_node: int) -> Self:
        """Return a copy for a world with these counts, which the platform may not have chosen."""
        fitted = copy.copy(self)
        _set(fitted, "n_nodes", n_nodes)
        _set(fitted, rank_count_field(self.device), ranks_per_node)
        return fitted

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


def _set(platform: PlatformFields, name: str, value: object) -> None:
    """Set a field of a frozen platform that is being made: no other code has it yet."""
    object.__setattr__(platform, name, value)


class _Rule(NamedTuple):
    """The values that a field accepts, in words and as limits."""

    allowed: str
    kinds: tuple[type[int | float], ...] = ()  # of numbers
    least: float = 1
    below: float = math.inf  # which refuses infinity
    others: tuple[str | None, ...] = ()  # accepted besides numbers

    def accepts(self, value: Any) -> bool:
        """True if the field may have this value."""
        if value is None or isinstance(value, str):
            return value in self.others
        # NaN is refused, because each comparison with it is false
        return isinstance(value, self.kinds) and self.least <= value < self.below


_INT = (int,)
_NUMBER = (int, float)
_ABOVE_0 = math.ulp(0.0)  # the smallest float above 0
_MINUTES = _Rule(
    "give a number of minutes above 0, or None", _NUMBER, least=_ABOVE_0, others=(None,)
)

# By the name of the field. Other fields are checked where they are used
_RULES = {
    "n_nodes": _Rule("give a number of machines, at least 1", _INT),
    "n_cpus": _Rule("give a number of ranks or threads, at least 1", _INT),
    "n_gpus": _Rule(
        "give a number of accelerators per node, at least 1, or None for all visible ones",
        _INT,
        others=(None,),
    ),
    "master_port": _Rule(
        "give a port number below 65536, or 0 for any free one", _INT, least=0, below=1 << 16
    ),
    # The numbers that torch.manual_seed takes
    "seed": _Rule(
        "give a whole number of 64 bits, 'script', or None",
        _INT,
        least=-(1 << 63),
        below=1 << 64,
        others=(None, "script"),
    ),
    "max_restarts": _Rule("give a number of restarts, at least 0", _INT, least=0),
    "launcher": _Rule(
        "give env, local, ray or slurm, or None", others=(None, "env", "local", "ray", "slurm")
    ),
    "ipc_protocol": _Rule("give tcp or file, or None", others=(None, "tcp", "file")),
    "timeout_min": _MINUTES,
    "hang_timeout_s": _MINUTES._replace(allowed="give a number of seconds above 0, or None"),
    "ipc_timeout_min": _MINUTES,
    "ram": _MINUTES._replace(allowed="give a number of GB above 0, or None"),
    "grace_s": _Rule("give a number of seconds, at least 0", _NUMBER, least=0),
}


def resolve_device(device: str, launcher: str | None, n_gpus: int | None) -> Device:
    """Return the kind of device that each rank gets, from the fields that decide it."""
    try:
        named = Device.from_str(str(device))
    except ValueError:
        *kinds, last = Device
        _refuse("device", device, f"give {', '.join(kinds)} or {last}")
    if named in _CLUSTERS or (named is Device.AUTO and launcher in _ELSEWHERE):
        return Device.CPU if n_gpus is None else Device.GPU
    if named is Device.AUTO:
        return next(each for each in (Device.GPU, Device.MPS, Device.CPU) if count_visible(each))
    return named


def rank_count_field(kind: str) -> Literal["n_cpus", "n_gpus"]:
    """Return the field with the number of ranks per node, if each rank gets this kind of device."""
    return "n_cpus" if kind == Device.CPU else "n_gpus"


def _set_device(platform: PlatformFields) -> None:
    """Set device and launcher. ``device`` may also name a launcher."""
    kind = resolve_device(platform.device, platform.launcher, platform.n_gpus)
    named = Device.from_str(str(platform.device))
    if named in _CLUSTERS:
        if platform.launcher not in (None, named.value, "local"):
            _refuse(
                "launcher",
                platform.launcher,
                f"device={str(platform.device)!r} names the launcher already: leave one of them "
                "out, or give 'local' to start the ranks on this machine",
            )
        _set(platform, "launcher", platform.launcher or named.value)
    _set(platform, "device", kind)


def _fit_to_launcher(platform: PlatformFields) -> None:
    """Count the ranks of all nodes on this machine if they start here. Refuse what cannot run."""
    if platform.launcher == "local":
        field = rank_count_field(platform.device)
        count = getattr(platform, field)
        if count is not None:
            _set(platform, field, platform.n_nodes * count)
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


def world_of(platform: PlatformFields) -> World | None:
    """Return the world of this process if its processes become the ranks of the platform.

    RANK=0 and WORLD_SIZE=1 alone do not mean torchrun: pods and notebooks have such variables. If
    the platform has more ranks than this process, they start here.
    """
    if platform.launcher not in (None, "env"):
        return None
    world = find_world()
    if world is None or platform.launcher == "env" or world.world_size > 1:
        return world
    # The user may not know that this process is the only rank of a world
    wants_more = platform.world_size > 1
    if world.has_launcher:
        starts_here = wants_more and not platform.leaves_counts_open
    else:
        # Launchers set a port too: without one, the variables are those of a pod or a notebook
        starts_here = wants_more or world.master_port is None
    return None if starts_here else world


def _starts_here(platform: PlatformFields) -> bool:
    """True if this process starts the ranks on this machine."""
    if platform.launcher is None:
        return world_of(platform) is None
    return platform.launcher == "local"


def _set_tuples(platform: PlatformFields) -> None:
    """Keep `device_ids`, `ipc_groups`, and `print_ranks` as tuples."""
    if platform.device_ids is not None:
        _set(platform, "device_ids", _numbers_of(platform.device_ids))
    if platform.ipc_groups is not None:
        _set(platform, "ipc_groups", tuple(tuple(group) for group in platform.ipc_groups))
    if platform.print_ranks is not None:
        _set(platform, "print_ranks", tuple(platform.print_ranks))


def _numbers_of(device_ids: Any) -> tuple[int, ...]:
    """Return device numbers as Python's own, also if numpy made them."""
    try:
        if isinstance(device_ids, str):  # "" has no character that could raise
            raise TypeError
        return tuple(operator.index(each) for each in device_ids)
    except TypeError:
        allowed = "give a list of numbers of visible devices, such as [2, 3], or None"
        _refuse("device_ids", device_ids, allowed)


def _check_ranks(platform: PlatformFields) -> None:
    """Check that the ranks of `ipc_groups` and `print_ranks` exist."""
    size = platform.world_size
    world = world_of(platform)
    if world is not None and platform.leaves_counts_open:
        size = world.world_size
    if platform.ipc_groups is not None:
        _check_groups(platform.ipc_groups, size)
    shown = platform.print_ranks
    if shown is None:
        return
    are_ranks = not isinstance(shown, (str, int)) and set(shown) <= set(range(size))
    if not are_ranks:
        allowed = f"give None, or global ranks from 0 to {size - 1}, such as (0,)"
        _refuse("print_ranks", shown, allowed)


def _check_groups(groups: Sequence[Sequence[int]], size: int) -> None:
    """Check that groups have ranks of a world of this size, and each rank once at most."""
    are_groups = not isinstance(groups, str) and all(map(_is_group, groups))
    if not are_groups:
        allowed = "give None, [] or lists of global ranks, such as [[0, 1], [2, 3]]"
        _refuse("ipc_groups", groups, allowed)
    seen: set[int] = set()
    for rank in chain.from_iterable(groups):
        if rank in seen:
            allowed = f"rank {rank} appears twice: put each rank into one group at most"
            _refuse("ipc_groups", groups, allowed)
        if not 0 <= rank < size:
            allowed = f"rank {rank} does not exist: give ranks from 0 to {size - 1}"
            _refuse("ipc_groups", groups, allowed)
        seen.add(rank)


def _is_group(group: Any) -> bool:
    has_ranks = isinstance(group, Sequence) and len(group) > 0
    return has_ranks and all(isinstance(rank, int) for rank in group)


def _check_device_ids(platform: PlatformFields) -> None:
    """Check `device_ids` against the other fields and this machine's devices."""
    given = platform.device_ids
    if given is None:
        return
    if platform.device == Device.CPU:
        allowed = (
            "the CPU is one device: leave device_ids out. Launches of map(max_parallel=...) divide "
            "its cores"
        )
        _refuse("device_ids", given, allowed)
    if not _starts_here(platform):
        _refuse_device_ids_elsewhere(platform)
    there = count_visible(platform.device)
    numbers = _numbers_of(given)
    if not numbers or not all(0 <= each < there for each in numbers):
        allowed = "0" if there == 1 else f"from 0 to {there - 1}"
        _refuse("device_ids", given, f"give a list of numbers of visible devices, {allowed}")
    different = len(set(numbers))
    if platform.n_gpus is not None and platform.n_gpus > different:
        allowed = (
            f"device_ids={given!r} names {different} different devices: give at most as many ranks"
        )
        _refuse("n_gpus", platform.n_gpus, allowed)


def _refuse_device_ids_elsewhere(platform: PlatformFields) -> NoReturn:
    """Refuse `device_ids`, because another program starts the ranks, and chooses their devices."""
    started_by = platform.launcher
    cure = "leave device_ids out: the cluster gives each rank a device"
    if platform.launcher not in _ELSEWHERE:
        world = world_of(platform)
        started_by = "env" if world is None else world.name
        numbers = _numbers_of(platform.device_ids)
        are_numbers = bool(numbers) and min(numbers) >= 0
        # The same choice, for the launcher of the world: one variable, or none
        chosen = variables_for(platform.device, numbers) if are_numbers else {}
        setting = "".join(f", and set {name}={value}" for name, value in chosen.items())
        cure = f"leave device_ids out{setting} for the launcher"
    _refuse("device_ids", platform.device_ids, f"ranks are started by {started_by}: {cure}")


def _check_visible(platform: PlatformFields, given: str) -> None:
    """Check the counts against this machine's devices.

    `given` is the device as the user named it.
    """
    n_gpus = platform.n_gpus
    if platform.device == Device.CPU:
        if n_gpus is not None:
            cure = "leave n_gpus out, and set n_cpus to the rank count"
            _refuse("n_gpus", n_gpus, f"device={given!r} uses no GPUs: {cure}")
        return
    if not _starts_here(platform):
        if platform.launcher in _ELSEWHERE and n_gpus is None:
            allowed = (
                "this machine cannot count the accelerators of a cluster node: give a number per "
                "node"
            )
            _refuse("n_gpus", None, allowed)
        return
    # Counting devices does not initialize CUDA, so the script can still fork afterwards
    there = count_visible(platform.device)
    if there == 0:
        _refuse_missing_device(platform, given)
    if n_gpus is not None and n_gpus > there:
        verb = "is" if there == 1 else "are"
        together = " on all nodes together" if platform.launcher == "local" else ""
        allowed = f"{there} {verb} visible here: give at most {there}{together}"
        _refuse("n_gpus", n_gpus, allowed)


def _refuse_missing_device(platform: PlatformFields, given: str) -> NoReturn:
    """Refuse a device that this machine does not have, and say how to run without it."""
    counts = ""
    if platform.n_gpus is not None:
        counts = ", with n_cpus as the number of ranks instead of n_gpus"
    local = "--local " if platform.launcher == "local" else ""
    name = str(platform.device)
    cure = f"give device='cpu'{counts} (parawrap run: {local}--device cpu --n 2)"
    if platform.device == Device.NEURON:
        name = "NeuronCore"
        cure = f"set PARAWRAP_NEURON_RUNTIME=host to emulate some, or {cure}"
    _refuse("device", given, f"this machine has no visible {name}: {cure}")
