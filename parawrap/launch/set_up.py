"""Turn a process into a rank: its variables, threads, device, seeds, and process groups."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from parawrap.backends.cores import usable_cores
from parawrap.errors import PlatformError
from parawrap.launch._devices import (
    Device,
    count_visible,
    make_current,
    selects_cores,
    take_core,
)
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch._rank import Rank, become, current_rank
from parawrap.launch._seeds import seed
from parawrap.launch._world import RankPlace
from parawrap.launch.inheritance import show_variables
from parawrap.launch.shares import CoreShare
from parawrap.processes.preemption import Preemption
from parawrap.processes.torch_groups import (
    INTERFACE_VARIABLES,
    LOOPBACK,
    LOOPBACK_INTERFACES,
    Groups,
    StoreAddress,
    break_links,
    leave_groups,
    stay_on_loopback,
)

_SIOCGIFADDR = 0x8915  # get the address of an interface; from <linux/sockios.h>
_ANY_PORT = 9  # nothing is sent there


@dataclass(frozen=True)
class RankSetUp:
    """The set-up of a rank. Frozen, and pickled by plain pickle.

    Attributes:
        platform: The launch's platform, as `as_sent` returns it.
        place: The rank's place.
        store: The store where the ranks meet; None if they form no process groups and run on
            several machines.
        device_variables: The variables with which the process sees only the devices of its launch.
        cores: The cores of the launch; None for all of the rank's machine.
    """

    platform: PlatformFields
    place: RankPlace
    store: StoreAddress | None
    device_variables: Mapping[str, str] = field(default_factory=dict)
    cores: CoreShare | None = None

    def enter(self, preemption: Preemption) -> None:
        """Make this process the rank."""
        place, platform = self.place, self.platform
        logging.basicConfig(level=logging.INFO if place.global_rank == 0 else logging.WARNING)
        # No driver has read the variables yet: the server that forked this process uses no device.
        # Unlike the variables of a rank, they hold for programs that the function starts
        os.environ.update(self.device_variables)
        # Variables choose a NeuronCore before the vendor's package starts. `set_up` chooses other
        # devices by their index
        if selects_cores(platform.device):
            take_core(place.local_rank)
        n_cores = usable_cores()
        if self.cores is not None:
            n_cores = self.cores.count
            self.cores.pin()
        share_cores(platform, n_cores // place.ranks_per_node)
        show_variables(self._variables())
        if place.is_on_one_machine:
            stay_on_loopback()
        elif self.store is not None:
            _leave_loopback(str(self.store.host))
        # Before the groups: an error of the groups names the rank, and libraries may ask for it
        become(set_up(place, platform, preemption))
        if self.store is not None and platform.requires_ipc:
            try:
                self.regroup(0)
            except Exception as error:
                error.add_note(f"raised while the ranks met at the store {self.store}")
                raise

    def regroup(self, generation: int) -> None:
        """Leave all process groups, and join new ones. Each time has another `generation`."""
        assert self.store is not None
        rank = current_rank()
        # The last call may have left ranks in the middle of a collective of the old groups. Its
        # messages must not reach a model that still uses these groups
        break_links()
        leave_groups()
        # The prefix keeps the new groups apart from earlier ones: the store of torch keeps all keys
        prefix = f"{self.place.restart}/{generation}"
        store = dist.PrefixStore(prefix, self.store.open(rank.world_size))
        groups = groups_of(self.platform, is_on_one_machine=self.place.is_on_one_machine)
        group = groups.join(store, rank.global_rank, rank.world_size, rank.device)
        become(replace(rank, group=group))

    def _variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets, because libraries read them."""
        place, store = self.place, self.store
        variables = {
            "TORCHELASTIC_RESTART_COUNT": str(place.restart),
            "RANK": str(place.global_rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(place.ranks_per_node),
            "GROUP_RANK": str(place.node),
        }
        if store is not None:
            variables |= {
                "MASTER_ADDR": store.host or LOOPBACK,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": str(store.is_served),
            }
        return variables


def groups_of(platform: PlatformFields, *, is_on_one_machine: bool) -> Groups:
    """Return the process groups that a platform describes."""
    timeout = None  # torch's own
    if platform.ipc_timeout_min is not None:
        timeout = timedelta(minutes=platform.ipc_timeout_min)
    return Groups(
        platform.process_group_backend, platform.ipc_groups or (), timeout, is_on_one_machine
    )


def set_up(
    place: RankPlace, platform: PlatformFields, preemption: Preemption | None = None
) -> Rank:
    """Set the device and the seeds of this process, and return its rank, without process groups.

    Raises:
        PlatformError: If the rank's device is not on this node.
    """
    device = platform.device_of(place.local_rank)
    if device.index is not None and device.index >= count_visible(platform.device):
        msg = (
            f"rank {place.global_rank} needs {device} of node {place.node} "
            f"({socket.gethostname()}), but torch {torch.__version__} sees "
            f"{count_visible(platform.device)} device(s) there: reduce n_gpus, or install a torch "
            "for such devices"
        )
        raise PlatformError(msg)
    make_current(device)
    # After the device, whose generator gets the seed too
    seed(platform.seed)
    return Rank(
        place.global_rank,
        place.local_rank,
        place.node,
        place.world_size,
        device,
        platform,
        restart=place.restart,
        preemption=preemption,
    )


def share_cores(platform: PlatformFields, n_cores: int) -> None:
    """Use one thread per core of this rank, unless the user set a number.

    OMP_NUM_THREADS holds for libraries loaded later.
    """
    threads = max(1, n_cores)  # ranks share cores if there are fewer
    if platform.device != Device.CPU and platform.n_cpus > 1:
        threads = platform.n_cpus
    elif os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _leave_loopback(host: str) -> None:
    """Have gloo use the interface that leads to a host, unless the user has set another one.

    Variables that name the loopback interface come from a rank of a launch on one machine, which
    has started this launch, for example by `sbatch`. Ranks of several machines cannot use it.
    """
    for name in INTERFACE_VARIABLES:
        if os.environ.get(name) in LOOPBACK_INTERFACES:
            del os.environ[name]
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = _interface_to(host)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def _interface_to(host: str) -> str | None:
    """Return the name of the network interface that leads to a host by IPv4; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system chooses the address of this machine that leads to the host. If
        # none does, the address is 0.0.0.0, which no interface has
        with contextlib.suppress(OSError):
            probe.connect((host, _ANY_PORT))
        own_host, _port = probe.getsockname()
        own_address = socket.inet_aton(own_host)
        for _, name in socket.if_nameindex():
            # `struct ifreq` has the name, of at most 15 bytes, and then a `sockaddr_in`
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                address = answer[20:24]
                if address == own_address:
                    return name
    return None
