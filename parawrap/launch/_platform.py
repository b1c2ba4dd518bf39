"""`Platform`: the frozen description of where and how a launch runs."""

from __future__ import annotations

from dataclasses import dataclass

from parawrap._public import public
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.ranks import Ranks, open_ranks


@public
@dataclass(frozen=True, repr=False)
class Platform(PlatformFields):
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
            ``rank-0.log``, and so on. Its name has the function, the number of the launch among
            those of ``map``, and the time.
        verbose: True to show the ranks' output, with the rank in front of each line.
        print_ranks: The ranks to show, such as ``(0,)``. None shows all. `Launch.logs` keeps the
            output of every rank.
        upon_finish: Called without arguments in this process after all ranks have returned. Its
            exceptions are logged.
        max_restarts: The number of times that the whole group restarts after a rank fails.
        grace_s: Seconds for ranks to clean up before they are killed, and to save when they are
            preempted.
        hang_timeout_s: End the launch with ``LaunchTimeoutError`` if it is stuck for this many
            seconds: no rank writes output, and either no main thread makes progress in its Python
            code, or some wait in a collective for a rank that computes.
        ipc_timeout_min: Minutes that a collective of the process groups may wait for other ranks
            before it raises. Set it if, for example, rank 0 prepares data for an hour. None leaves
            torch's defaults: 30 with gloo, 10 with NCCL.
        device_ids: The accelerators of this machine to use, by their numbers in this process, such
            as ``[2, 3]``. A launch uses the first `n_gpus` different ones, by default all. ``map``
            shares them out among launches; a number that is there twice may serve two launches at
            the same time. Ranks see only the devices of their launch, and number them from 0, as
            with CUDA_VISIBLE_DEVICES. None allows all visible devices.

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
        return open_ranks(self)
