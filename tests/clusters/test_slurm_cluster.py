"""The Slurm cluster of the tests behaves like a real one: nodes share only files, and nodes can be lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import submitit

from tests.helpers.processes import processes_in
from tests.helpers.slurm_cluster import SlurmCluster
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
LISTEN = """
import socket
with socket.create_server(("127.0.0.1", 0)) as inside, socket.create_server(("0.0.0.0", 0)) as outside:
    print(inside.getsockname()[1], outside.getsockname()[1], flush=True)
    input()
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30).close()
except ConnectionRefusedError:
    print("refused")
else:
    print("connected")
"""

OWNER = """
import signal
from tests.helpers.slurm_cluster import SlurmCluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore SIGINT for background processes
try:
    with SlurmCluster() as cluster:
        print(cluster.folder, cluster.link, flush=True)
        input()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def cluster(slurm):
    """The Slurm cluster, settled after the test."""
    yield slurm
    slurm.settle()


def submit(cluster, script, *options):
    """Submit a shell script on both nodes and return the job number and the output file."""
    file = Path.cwd() / f"{len(list(Path.cwd().iterdir()))}.out"
    number = cluster.run(
        "sbatch", "--parsable", "--nodes", "2", "--output", str(file), "--open-mode", "append", *options, "--wrap", script
    )
    return number, file


def wait_for_state(cluster, number, *states):
    """Wait until a job is in one of the states."""
    eventually(lambda: cluster.job(number)["JobState"] in states, f"job {number} in {states}")


def wait_for_output(file, text):
    """Wait until a job has written a text to its output file."""
    eventually(lambda: file.exists() and text in file.read_text(), f"{text!r} in {file}")


def links():
    """Return the names of this machine's network links."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_each_node_has_its_own_hostname(slurm):
    """Each node's hostname is its name, which differs from the hostname of this machine."""
    assert [slurm.on(node, "hostname") for node in slurm.nodes] == ["node0", "node1"]
    assert os.uname().nodename not in slurm.nodes


def test_each_node_has_its_own_localhost(slurm):
    """A server on one node is reachable from the other by the node's name, but not by localhost."""
    with subprocess.Popen(
        slurm.command_on("node0", sys.executable, "-c", LISTEN), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listener:
        inside, outside = listener.stdout.readline().split()
        targets = [("node0", outside), ("node0", inside), ("localhost", inside), ("localhost", outside)]
        answers = [slurm.on("node1", sys.executable, "-c", CONNECT, *target) for target in targets]
        listener.stdin.close()
    assert answers == ["connected", "refused", "refused", "refused"]


def test_nodes_share_files_and_no_memory(slurm, tmp_path):
    """A file in a shared folder is visible on both nodes. A file in /dev/shm is visible only on its own node."""
    slurm.on("node0", "touch", str(tmp_path / "file"), "/dev/shm/pw-slurm-test")
    assert slurm.on("node1", "ls", str(tmp_path)) == "file"
    assert slurm.on("node1", "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/pw-slurm-test").exists()


def test_a_job_runs_on_both_nodes(cluster):
    """A job on both nodes runs one task per node, and each task has its GPUs."""
    number, file = submit(cluster, "srun bash -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'", "--gpus-per-node", "2")
    wait_for_state(cluster, number, "COMPLETED")
    assert sorted(file.read_text().splitlines()) == ["node0 0,1", "node1 0,1"]


def test_a_requeued_job_runs_again(cluster):
    """After `scontrol requeue`, a job starts again without delay and reads its restart count."""
    number, file = submit(cluster, "echo begun ${SLURM_RESTART_COUNT:-0}; sleep 1000")
    wait_for_output(file, "begun 0")
    cluster.run("scontrol", "requeue", number)
    eventually(lambda: cluster.hasten() or "begun 1" in file.read_text(), "the restart")
    assert cluster.job(number)["Restarts"] == "1"


def test_an_urgent_job_preempts(cluster):
    """A job in the urgent partition signals the running job and starts when that job ends."""
    general, file = submit(
        cluster,
        "trap 'echo signalled; exit' USR2; echo begun; while :; do sleep 0.1; done",
        "--exclusive",
        "--signal=B:USR2@60",
    )
    wait_for_output(file, "begun")
    urgent, _ = submit(cluster, "true", "--exclusive", "--partition", "urgent")
    wait_for_state(cluster, urgent, "COMPLETED")
    assert "signalled" in file.read_text()
    assert cluster.job(general)["JobState"] == "COMPLETED"


def test_a_killed_node_can_be_restored(cluster):
    """Killing a node kills its processes and requeues its job; `restore_node` starts the node again."""
    number, file = submit(cluster, "srun bash -c 'echo begun $(hostname) ${SLURM_RESTART_COUNT:-0}; sleep 1000'")
    wait_for_output(file, "begun node1 0")
    (sleeping,) = [each for each in psutil.process_iter() if each.name() == "sleep" and on_node(each, cluster, "node1")]
    cluster.kill_node("node1")
    assert not sleeping.is_running()
    cluster.declare_down("node1")
    assert cluster.state_of("node1").startswith("DOWN")
    cluster.restore_node("node1")
    assert cluster.state_of("node1") in ("IDLE", "ALLOCATED")  # allocated if the requeued job was the first to see it
    try:
        eventually(lambda: cluster.hasten() or "begun node1 1" in file.read_text(), "the restart", 80.0)
    except AssertionError as error:
        error.add_note(f"the job: {cluster.job(number)}\nits output:\n{file.read_text()}")
        raise


def on_node(process, cluster, node):
    """Return True if a process runs on the node."""
    first = psutil.Process(int(cluster.command_on(node)[2]))
    return first in process.parents()


def test_submitit_submits_without_accounting(cluster, tmp_path):
    """A submitit job works without sacct, and its result appears in the log folder."""
    executor = submitit.SlurmExecutor(tmp_path / "logs")
    executor.update_parameters(time=15, nodes=2, ntasks_per_node=1)
    job = executor.submit(os.uname)
    wait_for_state(cluster, job.job_id, "COMPLETED")
    assert job.paths.result_pickle.exists()


def test_two_clusters_are_independent(slurm):
    """A second cluster has its own nodes and network; its end removes them and leaves the first cluster intact."""
    with SlurmCluster(1) as other:
        assert other.run("sinfo", "--noheader", "--Node", "--partition", "general", "--format", "%N") == "node0"
        assert other.on("node0", "hostname", "--all-ip-addresses") != slurm.on("node0", "hostname", "--all-ip-addresses")
        assert processes_in(other.folder)
        assert other.link in links()
    assert not other.folder.exists()
    assert not processes_in(other.folder)
    assert other.link not in links()
    slurm.settle()


def test_a_failed_start_leaves_nothing(monkeypatch):
    """If a daemon does not start, RuntimeError contains the daemon's output, and the cluster is removed."""
    before, folders = links(), set(Path("/tmp").glob("pw-slurm-*"))
    monkeypatch.setattr("tests.helpers.slurm_cluster._NODE", "echo no daemon; false")
    with pytest.raises(RuntimeError, match=r"(?s)have ended: node0.*no daemon"), SlurmCluster():
        pass
    assert links() <= before
    assert set(Path("/tmp").glob("pw-slurm-*")) <= folders


@contextlib.contextmanager
def owner():
    """Start a process that keeps a cluster open; yield the process and the cluster's folder and link."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            folder, link = process.stdout.readline().split()
            yield process, Path(folder), link
        finally:
            process.kill()


def test_killing_the_owner_ends_the_cluster():
    """When the process that started a cluster is killed, the cluster's processes end and its network disappears."""
    with owner() as (process, folder, link):
        assert processes_in(folder)
        process.send_signal(signal.SIGKILL)
        try:
            eventually(lambda: not processes_in(folder), "the end of its processes")
            eventually(lambda: link not in links(), "the end of its network")
        finally:
            shutil.rmtree(folder)


def test_an_interrupt_ends_the_cluster():
    """Ctrl-C in the process that started a cluster ends it like the end of the `with` block."""
    with owner() as (process, folder, link):
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted\n"
        assert not folder.exists()
        assert not processes_in(folder)
        assert link not in links()
