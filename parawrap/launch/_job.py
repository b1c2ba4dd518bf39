"""What is to be run, packed once for all ranks; and what a launcher would start for it."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parawrap.launch._devices import Device, rank_device
from parawrap.launch._platform import Platform
from parawrap.launch.parcels._packing import OfMain, packed, unpack
from parawrap.launch.ranks._groups import planned_rendezvous

__all__ = ["Job", "Preview", "preview", "unpacked_call"]

_log = logging.getLogger("parawrap.launch")


@dataclass(frozen=True)
class Job:
    """One call of a function on a platform. Frozen; may be launched any number of times.

    Attributes:
        bound_to: what a method is bound to, its first argument; empty for a function.
        sent_as: what goes to the ranks in the function's place, and is the function once it was unpacked there.
    """

    platform: Platform
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    sent_as: Any = None
    bound_to: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """What to call the function in messages."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    @property
    def sent_platform(self) -> Platform:
        """The platform that ranks see: what the parent calls or hands to a queue stays with the parent."""
        sent = copy.copy(self.platform)
        object.__setattr__(sent, "upon_finish", None)
        object.__setattr__(sent, "slurm_additional_parameters", None)
        if sent.device in (Device.GPU, Device.NEURON):  # what is visible in a rank may be its own alone
            object.__setattr__(sent, "n_gpus", self.platform.ranks_per_node)
        return sent

    def call(self) -> Any:
        """Make the call in this process."""
        return self.function(*self.bound_to, *self.args, **(self.kwargs or {}))

    def packed(self) -> int:
        """A file with all that a rank needs to make the call.

        Raises:
            UnsendableError: the function or an argument cannot be pickled; the message names the part that cannot.
        """
        call = {
            "the platform": self.sent_platform,
            "the function": self.function if self.sent_as is None else self.sent_as,
            "the object": self.bound_to,
            "args": self.args,
            "kwargs": self.kwargs or {},
            "of main": OfMain(),
        }
        return packed(call, "call", "")

    def finish(self) -> None:
        """Call ``upon_finish``, after all ranks have returned. What it raises is told, and costs nobody the results."""
        try:
            if self.platform.upon_finish is not None:
                self.platform.upon_finish()
        except Exception:  # noqa: BLE001 (whatever it raises)
            _log.exception("upon_finish failed after all ranks of %s had returned; their results are there", self.name)


def unpacked_call(file: int) -> Job:
    """The job, in a rank.

    What the user's script defines gets its place in this process's ``__main__``: torch.save, all_gather_object and others
    who know only names look for it there.
    """
    call = unpack(file)
    vars(sys.modules["__main__"]).update(call["of main"])
    return Job(call["the platform"], call["the function"], call["args"], call["kwargs"], bound_to=call["the object"])


@dataclass(frozen=True)
class Preview:
    """What a launch would start, without starting it; ``print`` shows it.

    Attributes:
        launcher: the name of the launcher.
        function: the name of the function.
        command: how the ranks would be started.
        meeting: where the ranks would find each other; None where they form no group.
        groups: which process groups they would form.
        ranks: a line for each rank.
        payload: bytes that each rank would be sent.
        script: what would be handed to the cluster; empty where there is none.

    >>> from parawrap import Platform, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def train(lr):
    ...     return lr
    >>> preview = train.dry_run(0.1)
    >>> preview.launcher, preview.ranks
    ('local', ('rank 0: node 0, local rank 0, cpu', 'rank 1: node 0, local rank 1, cpu'))
    """

    launcher: str
    function: str
    command: str
    meeting: str | None
    groups: str
    ranks: tuple[str, ...]
    payload: int
    script: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.function} on launcher {self.launcher!r}: {self.command}",
            f"meeting at {self.meeting}; {self.groups}" if self.meeting else "no process group",
            f"{self.payload:,} bytes of function and arguments for each of {len(self.ranks)} ranks",
            *self.ranks,
            *([self.script] if self.script else []),
        ]
        return "\n".join(lines)


def preview(job: Job, launcher: str, command: str, *, host: str | None = None, script: str = "") -> Preview:
    """What a launcher would start; packs the call, so that what cannot be sent is found."""
    platform = job.platform
    file = job.packed()
    try:
        payload = os.fstat(file).st_size
    finally:
        os.close(file)
    meeting = planned_rendezvous(platform, host)
    groups = ", ".join(str(list(group)) for group in platform.ipc_groups or ())
    return Preview(
        launcher=launcher,
        function=job.name,
        command=command,
        meeting=None if meeting is None else str(meeting),
        groups=f"process groups {groups}" if groups else "one process group",
        ranks=tuple(f"rank {rank}: {_place(platform, rank)}" for rank in range(platform.world_size)),
        payload=payload,
        script=script,
    )


def _place(platform: Platform, rank: int) -> str:
    node, local_rank = divmod(rank, platform.ranks_per_node)
    return f"node {node}, local rank {local_rank}, {rank_device(Device(platform.device), local_rank)}"
