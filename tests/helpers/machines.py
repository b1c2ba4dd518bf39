"""Machines made from Linux namespaces: each has its own hostname, network, processes, and shared
memory.

Machines share files, as on a cluster with a network file system. Only the first process of a
machine keeps the namespaces alive. When it ends, the kernel kills all other processes and removes
the network, so no clean-up is needed. The first process ends when the process that started it ends
for any reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

PATIENCE_S = 60.0
"""Upper limit for events that must happen, on a shared machine. It does not measure speed."""

NEEDED = ("ip", "nsenter", "setpriv", "unshare")
"""Required programs, from iproute2 and util-linux."""

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

# The first process of a machine. It stays bash, because bash reaps orphans as an init process must.
# It prints "up" once the namespaces exist, and continues after it reads a line, once the network
# exists.
_BOOT = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo up
read -r
exec >>"$3" 2>&1 </dev/null
"""


class Machine:
    """One machine.

    It runs until `cut_off`, or until the thread that started it ends. Not thread-safe.

    Args:
        name: The hostname.
        hosts: The file mounted as /etc/hosts.
        log: The file for the machine's output.
        script: The bash script that the machine runs. The machine ends with the script.
        environment: Additional variables for the machine's processes.
    """

    def __init__(
        self, name: str, hosts: Path, log: Path, script: str, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._environment = os.environ | {"PATH": PATH} | environment
        self._outside = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--mount-proc", "--fork",
             "--kill-child", "bash", "-c", _BOOT + script, "bash", name, hosts, log],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches pytest only, which then ends this machine
        )  # fmt: skip
        try:
            line = self._outside.stdout.readline()
            if line != "up\n":
                self._outside.stdin.close()  # ends a machine that only printed a warning
                msg = f"the machine {name!r} did not start: {line}{self._outside.stdout.read()}"
                raise RuntimeError(msg)
            self.pid = int(
                Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children").read_text()
            )
            self._first = os.pidfd_open(self.pid)
        except BaseException:
            self._outside.kill()  # the first process inside ends with it
            self._close()
            raise

    def run_script(self) -> None:
        """Let the machine run its script, once its network exists."""
        self._outside.stdin.write("\n")
        self._outside.stdin.close()

    @property
    def is_up(self) -> bool:
        return self._outside.poll() is None

    def link(self, *command: str) -> None:
        """Run an `ip` command in the machine's network.

        Process ids in the command are those of this host.
        """
        run(
            "nsenter",
            "--target",
            str(self.pid),
            "--net",
            "--",
            "ip",
            *command,
            environment=self._environment,
        )

    def cut_off(self) -> None:
        """End the machine like a power cut: its processes send nothing and run no clean-up."""
        if self.is_up:
            # Without the link, closing connections send no packets. A machine without a link has no
            # connections.
            with contextlib.suppress(RuntimeError):
                self.link("link", "del", "eth0")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        os.close(self._first)
        self._close()

    def _close(self) -> None:
        self._outside.wait()  # it ends after the last process inside
        self._outside.stdin.close()
        self._outside.stdout.close()


def run(*command: str, environment: dict[str, str]) -> str:
    """Run a command and return its standard output; raise RuntimeError if it fails."""
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        msg = f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def missing() -> str | None:
    """Return why this host cannot run such machines, or None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if absent := [program for program in NEEDED if shutil.which(program, path=PATH) is None]:
        return f"not installed: {', '.join(absent)}"
    # The probe's changes vanish with its namespaces.
    probe = ["unshare", *_NAMESPACES, "--mount-proc", "--fork", "bash", "-ec"]
    script = (
        "hostname probe; mount -t tmpfs tmpfs /dev/shm; ip link add one type veth; ip link add two "
        "type bridge"
    )
    probed = subprocess.run(
        [*probe, script],
        env=os.environ | {"PATH": PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"this kernel or container allows no namespaces: {probed.stderr.strip()}"
        if probed.returncode
        else None
    )
