"""The store that the ranks of a launch meet at, kept by the process that watches them.

On one machine it is a file in a folder that no other user may enter: a port would be open to every local user. Ranks on
several machines meet at a TCPStore. The watching process keeps it, not rank 0, so it outlives every rank.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._limits import explained
from parawrap.launch._platform import Platform
from parawrap.launch.ranks._groups import LOOPBACK, Rendezvous, planned_rendezvous

__all__ = ["open_rendezvous"]

_BACKLOG = 4096
_FOLDER = f"parawrap-store-{os.getuid()}-"
_EVERYWHERE = "0.0.0.0"


@contextmanager
def open_rendezvous(platform: Platform, host: str | None = None, path: Path | None = None) -> Iterator[Rendezvous | None]:
    """Keep a store open for the ranks of a launch.

    Args:
        platform: of the launch.
        host: an address by which ranks on other machines reach this one; None if all run here.
        path: a file that all machines see, for ``ipc_protocol="file"``; None is a file in a new private folder.

    Raises:
        LaunchError: If the platform's address cannot be listened on.
    """
    planned = planned_rendezvous(platform, host)
    if planned is None:
        yield None
    elif planned.path is None:
        store, port = _listening_store(planned, platform)
        yield Rendezvous(planned.host, port)
        del store
    elif path is not None and platform.n_nodes > 1:
        yield Rendezvous(path=str(path))
    else:
        with _private_folder() as folder, _reserved_port() as port:
            yield Rendezvous(LOOPBACK, port, str(folder / "store"))


def _listening_store(planned: Rendezvous, platform: Platform) -> tuple[dist.TCPStore, int]:
    """Open a store at the platform's port, or at one that the system chooses and that is never free in between."""
    is_one_address = planned.host in (LOOPBACK, platform.master_addr)
    listener = _listening(planned if is_one_address else Rendezvous(_EVERYWHERE, planned.port))
    host, port = str(planned.host), int(listener.getsockname()[1])
    with listener:
        try:
            store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
            )
        except TypeError:  # torch before 2.8 takes no socket
            listener.close()
            store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    return store, port


def _listening(meeting: Rendezvous) -> socket.socket:
    listener = None
    try:
        family = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((meeting.host, meeting.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        place = f"{meeting.host}:{meeting.port}"
        msg = f"the ranks cannot meet at {place}: {explained(error)}; leave master_addr and master_port out"
        raise LaunchError(msg) from error
    return listener


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a folder that no other user may enter, and remove it at the end.

    This process holds a lock on it. A folder without a lock belonged to a process that was killed, and is removed here.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with contextlib.ExitStack() as cleanup:
        yield _new_folder(cleanup)


def _new_folder(cleanup: contextlib.ExitStack) -> Path:
    """Make a folder and lock it. Try again if another launch took it for a forgotten one before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            cleanup.enter_context(_locked(folder))
        except (FileNotFoundError, BlockingIOError):
            continue
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return folder  # the file system has no locks: folders of killed processes stay there
        if folder.exists():
            return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder.

    Raises:
        OSError: If another process has locked it, or another user owns it.
    """
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a port on the loopback interface, for MASTER_PORT: rank 0 may open a store there.

    A socket that is bound and does not listen keeps the system from giving the port away.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        yield reserved.getsockname()[1]
