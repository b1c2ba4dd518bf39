"""A real Slurm cluster on this machine: a controller and nodes, each a `Machine`.

This process submits the jobs.

The cluster has no accounting, so `sacct` fails, as on many small clusters. `squeue` and `scontrol`
show jobs, including ended jobs. The cluster writes all files into one temporary folder. Each
cluster has its own network, so several can run at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.helpers import machines
from tests.helpers.machines import PATH, PATIENCE_S, Machine

# Maps each program to its Debian package.
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "mungekey": "munge",
}

# Settings that differ from the default:
# - cred_expire: also the delay in seconds before a requeued job restarts; Slurm replaces values
#   below 5 by 120.
# - config_overrides: nodes have the CPUs of this configuration, not those of this machine.
# - MinJobAge: ended jobs stay visible for the whole test run.
# - SlurmdTimeout: a node counts as down after this many seconds of silence.
_CONFIGURATION = """
ClusterName=parawrap
SlurmctldHost=controller({network}.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=86400
KillWait=5
OverTimeLimit=0
InactiveLimit=0
SlurmctldTimeout=60
SlurmdTimeout=20
MessageTimeout=20
JobRequeue=1
EnforcePartLimits=ALL
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldDebug=verbose
SlurmdDebug=verbose
GresTypes=gpu
NodeName=DEFAULT CPUs=16 Sockets=1 CoresPerSocket=16 ThreadsPerCore=1
NodeName=DEFAULT RealMemory=65536 Gres=gpu:2 State=UNKNOWN
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=general Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""

_CONTROLLER = """
munged --foreground --force --num-threads=2 --key-file=munge.key \
    --socket="$PWD/munge.socket" --pid-file="$PWD/munged.pid" \
    --log-file="$PWD/munged.log" --seed-file="$PWD/munge.seed" &
until [ -S munge.socket ]; do kill -0 $!; sleep 0.01; done
slurmctld -D -i &
wait -n
"""
# Stand-ins for GPUs: Slurm only checks that the device files exist.
_DEVICES = ("/dev/null", "/dev/zero")

_NODE = 'slurmd -D -N "$1" & wait -n'


class SlurmCluster:
    """A Slurm cluster of two nodes that runs inside a ``with`` block. Not thread-safe.

    Nodes can have more CPUs than this machine. Their GPUs are only device files. Jobs in partition
    ``urgent`` preempt jobs in partition ``general``, the default: Slurm signals a preempted job at
    once and requeues it 20 seconds later.
    """

    nodes = ("node0", "node1")

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._cleanup as cleanup:
            # Not in TMPDIR: socket paths must be short.
            self.folder = Path(tempfile.mkdtemp(prefix="pw-slurm-", dir="/tmp"))
            cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.link = _take_link()
            cleanup.callback(
                subprocess.run,
                ["ip", "link", "del", self.link],
                env=self._full_environment,
                capture_output=True,
            )
            cleanup.callback(self._cut_off_all)
            self.network = f"10.213.{self.link.removeprefix(_LINK)}"
            self._write()
            self._start("controller", _CONTROLLER)
            for node in self.nodes:
                self._start(node, _NODE)
            self._await_nodes()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *ending: object) -> None:
        self._cleanup.close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a process needs to use this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str) -> str:
        """Run a command such as sbatch on this machine and return its output; raise RuntimeError if
        it fails.
        """
        return machines.run(*command, environment=self._full_environment).rstrip("\n")

    def state_of(self, node: str) -> str:
        """Return the controller's state for a node: IDLE, ALLOCATED, or DOWN, with suffixes such as
        +NOT_RESPONDING.
        """
        fields = ["--noheader", "--partition", "general", "--Format", "StateComplete:99"]
        return self.run("sinfo", "--Node", "--nodes", node, *fields).strip().upper()

    def kill_node(self, node: str) -> None:
        """Cut a node off like a power cut. The controller notices only that the node is silent."""
        self._machines.pop(node).cut_off()

    def declare_down(self, node: str) -> None:
        """Mark a node as down, as an operator would, so that the controller does not wait for
        SlurmdTimeout.
        """
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def hasten(self) -> None:
        """Let requeued jobs start in the next second. Slurm would delay them by 6 seconds."""
        # Not in this second: nodes refuse credentials that were signed in the second of the job's
        # end.
        for line in self._queue("--states", "PENDING", "--Format", "JobID,Reason"):
            number, reason = line.split()
            if reason == "BeginTime":
                # Fails if the job has ended
                self._succeeds("scontrol", "update", f"JobId={number}", "StartTime=now+1")

    def settle(self) -> None:
        """End remaining jobs, restart killed nodes, and wait for both, so that the next test finds
        an idle cluster.
        """
        self._succeeds("scancel", "--user", "root")
        for node in self.nodes:
            if node not in self._machines:
                self._start(node, _NODE)
        self._until(lambda: not self._queue(), "the end of all jobs")
        self._await_nodes()

    def _queue(self, *options: str) -> list[str]:
        return self.run("squeue", "--noheader", *options).splitlines()

    @property
    def _full_environment(self) -> dict[str, str]:
        return os.environ | self.environment

    def _write(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("controller", "spool"):
            (folder / name).mkdir()
        self.run("mungekey", "--create", f"--keyfile={folder}/munge.key")
        addresses = {node: f"{self.network}.{10 + index}" for index, node in enumerate(self.nodes)}
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address}" for node, address in addresses.items()
        )
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, network=self.network, nodes=nodes)
        )
        (folder / "cgroup.conf").write_text(
            f"CgroupPlugin={_cgroup_plugin(self.run('slurmd', '-V'))}\n"
        )
        self._addresses = {"controller": f"{self.network}.2", **addresses}
        known = {
            "localhost": "127.0.0.1",
            socket.gethostname(): f"{self.network}.1",
            **self._addresses,
        }
        (folder / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in known.items())
        )
        lines = ["AutoDetect=off", *(f"Name=gpu File={device}" for device in _DEVICES)]
        (folder / "gres.conf").write_text("\n".join(lines) + "\n")

    def _start(self, name: str, script: str) -> None:
        log = self.folder / f"{name}.log"
        machine = Machine(
            name, self.folder / "hosts", log, f'cd "{self.folder}"\n{script}', self.environment
        )
        self._machines[name] = machine
        controller = self._machines["controller"]
        if machine is controller:
            self._connect_controller(controller)
        else:
            controller.link(
                "link",
                "add",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(machine.pid),
            )
            controller.link("link", "set", name, "master", "eth0", "up")
            # A restored node keeps its hardware address, as a real machine does: the others still
            # have it in their caches.
            machine.link("link", "set", "eth0", "address", _hardware_address(self._addresses[name]))
            machine.link("address", "add", f"{self._addresses[name]}/24", "dev", "eth0")
            machine.link("link", "set", "eth0", "up")
        machine.run_script()

    def _connect_controller(self, controller: Machine) -> None:
        """Connect this host to the controller.

        The controller is the switch, so no host firewall is between nodes.
        """
        controller.link("link", "add", "eth0", "type", "bridge")
        controller.link("address", "add", f"{self._addresses['controller']}/24", "dev", "eth0")
        controller.link("link", "set", "eth0", "up")
        self.run("ip", "link", "set", _far_end(self.link), "netns", str(controller.pid))
        controller.link("link", "set", _far_end(self.link), "master", "eth0", "up")
        self.run("ip", "address", "add", f"{self.network}.1/24", "dev", self.link)
        self.run("ip", "link", "set", self.link, "up")

    def _await_nodes(self) -> None:
        """Wait until every node has run a step, because the controller's state of the nodes can be
        stale.
        """
        self._until(
            lambda: all(self.state_of(node) in _READY for node in self.nodes),
            "nodes that are ready",
        )
        count = str(len(self.nodes))
        step = [
            "srun",
            "--quiet",
            f"--immediate={PATIENCE_S:.0f}",
            "--overcommit",
            "--nodes",
            count,
            "true",
        ]
        self._until(lambda: self.run(*step) == "", "a step on every node")

    def _succeeds(self, *command: str) -> bool:
        try:
            self.run(*command)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False
        return True

    def _until(self, condition: Callable[[], bool], event: str) -> None:
        """Wait for a condition.

        A condition that raises, because the controller does not answer, counts as false.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if condition():
                    return
                failure = ""
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failure = f"; {error}"
            if ended := [machine.name for machine in self._machines.values() if not machine.is_up]:
                failure += f"; these have ended: {', '.join(ended)}"
            if ended or time.monotonic() > deadline:
                logs = "".join(
                    f"\n--- {log.name}\n{log.read_text()[-2000:]}"
                    for log in sorted(self.folder.glob("*.log"))
                )
                msg = f"Slurm did not reach {event} within {PATIENCE_S:.0f} seconds{failure}{logs}"
                raise RuntimeError(msg)
            time.sleep(0.02)

    def _cut_off_all(self) -> None:
        """End the nodes, then the controller, which has the network."""
        while self._machines:
            self._machines.popitem()[1].cut_off()


_LINK = "pwslurm"
_READY = ("IDLE", "MIXED", "ALLOCATED")


def _far_end(link: str) -> str:
    """Return the name of a link's other end before the end moves to the controller."""
    return f"{link}c"


def _hardware_address(address: str) -> str:
    """Return a locally administered hardware address (first byte 02) that belongs to an address of
    a network.
    """
    return "02:00:" + ":".join(f"{int(number):02x}" for number in address.split("."))


def _take_link() -> str:
    """Create a network link that no other cluster uses.

    Its number is also the number of the cluster's network.
    """
    for number in random.sample(range(256), 256):
        link = f"{_LINK}{number}"
        made = ["ip", "link", "add", link, "type", "veth", "peer", "name", _far_end(link)]
        done = subprocess.run(
            made, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return link
        if "File exists" not in done.stderr:
            break
    msg = f"cannot create a network link: {done.stderr}"
    raise RuntimeError(msg)


def _cgroup_plugin(version: str) -> str:
    """Return the slurmd plugin that does not need control groups, which this
    machine may not offer.
    """
    year, month = map(int, re.findall(r"\d+", version)[:2])
    return "disabled" if (year, month) >= (23, 11) else "cgroup/v1"


def missing() -> str | None:
    """Return why this machine cannot run a Slurm cluster, or None if it can."""
    if absent := {
        package
        for program, package in _PROGRAMS.items()
        if shutil.which(program, path=PATH) is None
    }:
        return f"not installed: {', '.join(sorted(absent))}"
    return machines.missing()
