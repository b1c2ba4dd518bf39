"""A real Slurm cluster on this machine: a controller and nodes that are `Machine`s, jobs submitted from here.

It has no accounting: `sacct` fails, as it does on many small clusters. `squeue` and `scontrol` tell of a job, also when it
is over. All that the cluster writes lies in one temporary folder. Clusters do not meet: each has a network of its own.
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

import psutil

from tests.clusters import machines
from tests.clusters.machines import PATH, Machine

PATIENCE_S = 60.0
"""For what is bound to happen, on a machine that is shared: no measure of speed."""

# Debian's package of each program.
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
    "mungekey": "munge",
}

# Notes on what is not the default:
# - cred_expire: also the seconds that a requeued job waits for its restart; fewer than 5 are taken for 120.
# - config_overrides: nodes have the CPUs that stand here, not those of this machine.
# - MinJobAge: what became of a job can be asked for as long as the tests run.
# - SlurmdTimeout: a silent node counts as down after so many seconds.
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
KillWait=1
OverTimeLimit=0
InactiveLimit=0
SlurmctldTimeout=60
SlurmdTimeout={silence_s}
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
NodeName=DEFAULT CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=65536 Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=general Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10 PreemptMode=OFF
"""

_CONTROLLER = """
munged --foreground --force --num-threads=2 --key-file=munge.key --socket="$PWD/munge.socket" --pid-file="$PWD/munged.pid" \
    --log-file="$PWD/munged.log" --seed-file="$PWD/munge.seed" &
until [ -S munge.socket ]; do kill -0 $!; sleep 0.01; done
slurmctld -D -i &
wait -n
"""
# Stands for GPUs: Slurm wants device files, and does no more than look at them.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")

_NODE = 'slurmd -D -N "$1" & wait -n'


class SlurmCluster:
    """A controller and nodes, from ``with`` to its end; for one thread at a time.

    Nodes have more CPUs than this machine may have, and GPUs that are device files only. Jobs of the partition ``urgent``
    preempt those of ``general``, the default: these get their signal at once, and 20 seconds later are requeued.

    Args:
        count: How many nodes there are: node0, node1, ...
        cpus: CPUs of each.
        gpus: GPUs of each.
        silence_s: Seconds of silence after which the controller counts a node as down.
    """

    def __init__(self, count: int = 2, *, cpus: int = 4, gpus: int = 2, silence_s: int = 20) -> None:
        self.nodes = tuple(f"node{index}" for index in range(count))
        self._cpus, self._gpus, self._silence_s = cpus, gpus, silence_s
        self._machines: dict[str, Machine] = {}
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._cleanup as cleanup:
            # A socket's path is short, and TMPDIR may be anywhere.
            self.folder = Path(tempfile.mkdtemp(prefix="pw-slurm-", dir="/tmp"))
            cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.link = _take_link()
            cleanup.callback(subprocess.run, ["ip", "link", "del", self.link], env=self._surroundings, capture_output=True)
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
        """What a process is to have in its environment in order to talk to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str, timeout_s: float = PATIENCE_S) -> str:
        """Run a command here, such as sbatch, to its end; it must succeed. Gives what it printed, less the last newline."""
        return machines.run(*command, environment=self._surroundings, timeout_s=timeout_s).rstrip("\n")

    def on(self, node: str, *command: str, timeout_s: float = PATIENCE_S) -> str:
        """Run a command on a node, as one who is logged in there; it must succeed. Gives what it printed."""
        return self._machines[node].run(*command, timeout_s=timeout_s).rstrip("\n")

    def command_on(self, node: str, *command: str) -> list[str]:
        """The command line that runs this command on a node."""
        return self._machines[node].command(*command)

    def job(self, number: str | int) -> dict[str, str]:
        """What the controller knows of a job: JobState, NodeList, Restarts and so on."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", str(number))))

    def state_of(self, node: str) -> str:
        """A node's state in the controller's eyes: IDLE, ALLOCATED, DOWN, with +NOT_RESPONDING and the like."""
        fields = ["--noheader", "--partition", "general", "--Format", "StateComplete:99"]
        return self.run("sinfo", "--Node", "--nodes", node, *fields).strip().upper()

    def kill_node(self, node: str) -> None:
        """Take a node away as a power cut would; the controller learns of it from its silence."""
        self._machines.pop(node).cut_off()

    def declare_down(self, node: str) -> None:
        """Tell the controller that a node is gone, as an operator would who sees it: it need not wait for silence."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def restore_node(self, node: str) -> None:
        """Start a node that was killed, and wait until it takes jobs."""
        self._start(node, _NODE)
        # First its own word: what the controller says of it may be from before.
        self._until(lambda: self.on(node, "scontrol", "show", "slurmd", node) != "", f"a daemon on {node}")
        self._until(lambda: self.state_of(node) in _READY, f"the return of {node}")

    def hasten(self) -> None:
        """Let jobs that have been requeued start with the next second, not as late as Slurm would: 6 seconds."""
        # Not in this second: a node refuses what the controller signed in the second in which the job was ended.
        for line in self._queue("--states", "PENDING", "--Format", "JobID,Reason"):
            number, reason = line.split()
            if reason == "BeginTime":
                self._succeeds("scontrol", "update", f"JobId={number}", "StartTime=now+1")  # unless it is gone by now

    def settle(self) -> None:
        """End what is left of jobs, start what was killed of nodes, and wait for both: as the next test wants it."""
        self._succeeds("scancel", "--state", "PENDING", "--user", "root")
        # Tasks are killed before their jobs are cancelled: where one minds no SIGTERM, cancelling takes 7 seconds.
        self._until(lambda: self._kill_tasks() == 0 and not self._queue("--steps"), "the end of all steps")
        self._succeeds("scancel", "--user", "root")
        for node in self.nodes:
            if node not in self._machines:
                self._start(node, _NODE)
        self._until(lambda: not self._queue(), "the end of all jobs")
        self._await_nodes()

    def _queue(self, *options: str) -> list[str]:
        return self.run("squeue", "--noheader", *options).splitlines()

    def _kill_tasks(self) -> int:
        """Kill whatever runs on nodes beside Slurm; gives how much that was."""
        count = 0
        for node in self._machines.keys() - {"controller"}:
            for process in psutil.Process(self._machines[node].pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() not in _OF_SLURM:
                        process.kill()
                        count += 1
        return count

    @property
    def _surroundings(self) -> dict[str, str]:
        return os.environ | self.environment

    def _write(self) -> None:
        """Lay out the folder: key, configuration and directories."""
        folder = self.folder
        folder.chmod(0o755)
        for name in ("controller", "spool"):
            (folder / name).mkdir()
        self.run("mungekey", "--create", f"--keyfile={folder}/munge.key")
        addresses = {node: f"{self.network}.{10 + index}" for index, node in enumerate(self.nodes)}
        nodes = "\n".join(f"NodeName={node} NodeAddr={address}" for node, address in addresses.items())
        values = {"folder": folder, "network": self.network, "cpus": self._cpus, "gpus": self._gpus}
        text = _CONFIGURATION.format(**values, nodes=nodes, silence_s=self._silence_s)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text(f"CgroupPlugin={_cgroup_plugin(self.run('slurmd', '-V'))}\n")
        self._addresses = {"controller": f"{self.network}.2", **addresses}
        known = {"localhost": "127.0.0.1", socket.gethostname(): f"{self.network}.1", **self._addresses}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        lines = ["AutoDetect=off", *(f"Name=gpu File={device}" for device in _DEVICES[: self._gpus])]
        (folder / "gres.conf").write_text("\n".join(lines) + "\n")

    def _start(self, name: str, script: str) -> None:
        """Start a machine, and plug it in before it runs its daemon."""
        log = self.folder / f"{name}.log"
        machine = Machine(name, self.folder / "hosts", log, f'cd "{self.folder}"\n{script}', self.environment)
        self._machines[name] = machine
        controller = self._machines["controller"]
        if machine is controller:
            self._lay_network(controller)
        else:
            controller.link("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid))
            controller.link("link", "set", name, "master", "eth0", "up")
            machine.link("address", "add", f"{self._addresses[name]}/24", "dev", "eth0")
            machine.link("link", "set", "eth0", "up")
        machine.go_on()

    def _lay_network(self, controller: Machine) -> None:
        """Join this machine and the controller; that one is the switch, so no firewall of this one is between nodes."""
        controller.link("link", "add", "eth0", "type", "bridge")
        controller.link("address", "add", f"{self._addresses['controller']}/24", "dev", "eth0")
        controller.link("link", "set", "eth0", "up")
        self.run("ip", "link", "set", _far_end(self.link), "netns", str(controller.pid))
        controller.link("link", "set", _far_end(self.link), "master", "eth0", "up")
        self.run("ip", "address", "add", f"{self.network}.1/24", "dev", self.link)
        self.run("ip", "link", "set", self.link, "up")

    def _await_nodes(self) -> None:
        """Wait until every node has run a step: what the controller says of them may be from before."""
        self._until(lambda: all(self.state_of(node) in _READY for node in self.nodes), "nodes that are ready")
        count = str(len(self.nodes))
        step = ["srun", "--quiet", f"--immediate={PATIENCE_S:.0f}", "--overcommit", "--nodes", count, "true"]
        self._until(lambda: self.run(*step) == "", "a step on every node")

    def _succeeds(self, *command: str) -> bool:
        try:
            self.run(*command)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False
        return True

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; what the controller is not there to answer does not hold."""
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
                logs = "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))
                msg = f"Slurm did not come to {what} within {PATIENCE_S:.0f} seconds{failure}{logs}"
                raise RuntimeError(msg)
            time.sleep(0.02)

    def _cut_off_all(self) -> None:
        """End the nodes, then the controller: without it, its network is gone."""
        while self._machines:
            self._machines.popitem()[1].cut_off()


_LINK = "pwslurm"
_OF_SLURM = ("slurmd", "slurmstepd", "srun")  # srun ends with its tasks, and tells the controller; without it, that waits
_READY = ("IDLE", "MIXED", "ALLOCATED")


def _far_end(link: str) -> str:
    """The name of the other end of a link, until it is the controller's."""
    return f"{link}c"


def _take_link() -> str:
    """Make a link that no other cluster has; its number is that of the cluster's network."""
    for number in random.sample(range(256), 256):
        link = f"{_LINK}{number}"
        made = ["ip", "link", "add", link, "type", "veth", "peer", "name", _far_end(link)]
        done = subprocess.run(made, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return link
        if "File exists" not in done.stderr:
            break
    msg = f"no link could be made: {done.stderr}"
    raise RuntimeError(msg)


def _cgroup_plugin(version: str) -> str:
    """The plugin with which slurmd asks nothing of control groups: that they can be used here is not said."""
    year, month = map(int, re.findall(r"\d+", version)[:2])
    return "disabled" if (year, month) >= (23, 11) else "cgroup/v1"


def missing() -> str | None:
    """Why there can be no such cluster here; None where there can."""
    if absent := {package for program, package in _PROGRAMS.items() if shutil.which(program, path=PATH) is None}:
        return f"not installed: {', '.join(sorted(absent))}"
    return machines.missing()
