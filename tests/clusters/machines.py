"""Machines that are namespaces of this one: a hostname, a network, processes and shared memory of their own.

The files are shared, as on a cluster with a network file system. A machine is held by its first process alone, and nothing
of it has a name outside: when that process has ended, the kernel ends all others and takes the network away, and nothing is
left to clean up. The first process ends with the one that started it, however that one ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

NEEDED = ("ip", "nsenter", "setpriv", "unshare")
"""The programs that this takes: of iproute2 and util-linux."""

PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

# The first process of a machine: it stays bash, which waits for orphans as an init must. It says that the namespaces are
# there, and goes on when it is told that the network is, too.
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
    """One machine, from its start until it is cut off, or until the thread that started it ends; for one thread at a time.

    Args:
        name: Its hostname.
        hosts: Its /etc/hosts.
        log: The file that takes all that it says.
        script: What it runs, in bash; the machine ends when this does.
        environment: Variables for all of its processes.
    """

    def __init__(self, name: str, hosts: Path, log: Path, script: str, environment: dict[str, str]) -> None:
        self.name = name
        self._environment = os.environ | {"PATH": PATH} | environment
        self._outside = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--mount-proc", "--fork", "--kill-child",
             "bash", "-c", _BOOT + script, "bash", name, hosts, log],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment,
            start_new_session=True,  # Ctrl-C is for pytest, which then ends this machine
        )  # fmt: skip
        try:
            said = self._outside.stdout.readline()
            if said != "up\n":
                self._outside.stdin.close()  # if it only wrote a warning, it ends now
                msg = f"the machine {name!r} did not come up: {said}{self._outside.stdout.read()}"
                raise RuntimeError(msg)
            self.pid = int(Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children").read_text())
            self._first = os.pidfd_open(self.pid)
        except BaseException:
            self._outside.kill()  # the first process inside ends with it
            self._forget()
            raise

    def go_on(self) -> None:
        """Tell the machine that it has its network: it begins with its script."""
        self._outside.stdin.write("\n")
        self._outside.stdin.close()

    @property
    def is_up(self) -> bool:
        """Whether its first process lives."""
        return self._outside.poll() is None

    def command(self, *command: str | os.PathLike[str]) -> list[str]:
        """This command line, to be run inside."""
        return ["nsenter", "--target", str(self.pid), *_NAMESPACES, "--", *map(os.fspath, command)]

    def link(self, *command: str) -> None:
        """Run an `ip` command in its network, and among the processes of this machine, whose ids it may name."""
        run("nsenter", "--target", str(self.pid), "--net", "--", "ip", *command, environment=self._environment)

    def run(self, *command: str | os.PathLike[str], timeout_s: float = 60.0) -> str:
        """Run a command inside to its end; it must succeed. Gives what it printed."""
        return run(*self.command(*command), environment=self._environment, timeout_s=timeout_s)

    def cut_off(self) -> None:
        """End the machine as a power cut would: nobody hears a word from it, and no process of it gets to do a thing."""
        if self.is_up:
            # Without its link no closing connection says goodbye; a machine that has none yet has nobody to say it to.
            with contextlib.suppress(RuntimeError):
                self.link("link", "del", "eth0")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        os.close(self._first)
        self._forget()

    def _forget(self) -> None:
        self._outside.wait()  # it ends when nothing is left inside
        self._outside.stdin.close()
        self._outside.stdout.close()


def run(*command: str, environment: dict[str, str], timeout_s: float = 60.0) -> str:
    """Run a command to its end; it must succeed. Gives what it printed."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        msg = f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def missing() -> str | None:
    """Why there can be no such machines here; None where there can."""
    if os.geteuid() != 0:
        return "namespaces take root, and this is another user"
    if absent := [program for program in NEEDED if shutil.which(program, path=PATH) is None]:
        return f"not installed: {', '.join(absent)}"
    # What is tried here is gone with the namespaces in which it was.
    probe = ["unshare", *_NAMESPACES, "--mount-proc", "--fork", "bash", "-ec"]
    script = "hostname probe; mount -t tmpfs tmpfs /dev/shm; ip link add one type veth; ip link add two type bridge"
    tried = subprocess.run([*probe, script], env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=False)
    return f"this kernel or container allows no namespaces: {tried.stderr.strip()}" if tried.returncode else None
