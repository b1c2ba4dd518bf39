"""The store where the ranks of a launch meet. The supervising process keeps it.

On one machine it is a file in a private folder, because any local user could connect to a port. Ranks on several machines
meet at a TCPStore. The supervising process hosts it instead of rank 0, so it outlives every rank.
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
from parawrap.launch._platform import Platform
from parawrap.launch._system_limits import explain_error
from parawrap.launch.rank._process_groups import LOOPBACK, StoreAddress, plan_store

__all__ = ["open_store_host"]

_BACKLOG = 4096  # the most that Linux queues by default: all ranks connect at once
_FOLDER = f"parawrap-store-{os.getuid()}-"
_EVERYWHERE = "0.0.0.0"


@contextmanager
def open_store_host(platform: Platform, host: str | None = None, path: Path | None = None) -> Iterator[StoreAddress | None]:
    """Keep a store open for the ranks of a launch. Without process groups, only reserve an address, if all ranks run here.

    Args:
        platform: The launch's platform.
        host: An address of this machine that ranks on other machines can reach. None if all ranks run here.
        path: A file that all machines can access, for ``ipc_protocol="file"`` on several nodes. None makes a file in a
            new private folder.

    Raises:
        LaunchError: If the store cannot listen on the platform's address.
    """
    planned = plan_store(platform, host)
    if planned is None and host is not None:
        yield None
    elif planned is None:  # no store, but an address for user code
        with _reserve_port() as port:
            yield StoreAddress(platform.master_addr or LOOPBACK, platform.master_port or port)
    elif planned.path is None:
        store, port = _open_store_at_port(planned, platform)
        yield StoreAddress(planned.host, port)
        del store
    elif path is not None and platform.n_nodes > 1:
        yield StoreAddress(path=str(path))
    else:
        with _private_folder() as folder, _reserve_port() as port:
            yield StoreAddress(LOOPBACK, port, str(folder / "store"))


def _open_store_at_port(planned: StoreAddress, platform: Platform) -> tuple[dist.TCPStore, int]:
    """Open a store at the platform's port or a free one. Pass it the bound socket, so no other process gets the port."""
    is_one_address = planned.host in (LOOPBACK, platform.master_addr)
    listener = _listen(planned if is_one_address else StoreAddress(_EVERYWHERE, planned.port))
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


def _listen(meeting: StoreAddress) -> socket.socket:
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
        msg = f"the ranks' store cannot listen on {place}: {explain_error(error)}; leave out master_addr and master_port"
        raise LaunchError(msg) from error
    return listener


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a folder that no other user may enter, and remove it at the end.

    This process locks the folder. Also remove unlocked folders, which killed processes left behind.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError), _lock(left):
            shutil.rmtree(left)
    with contextlib.ExitStack() as cleanup:
        yield _new_folder(cleanup)


def _new_folder(cleanup: contextlib.ExitStack) -> Path:
    """Make a folder and lock it. Retry if another launch removed the folder before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            cleanup.enter_context(_lock(folder))
        except (FileNotFoundError, BlockingIOError):
            continue
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return folder  # the file system does not support locks, so folders of killed processes stay behind
        if folder.exists():
            return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
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
def _reserve_port() -> Iterator[int]:
    """Reserve a loopback port for MASTER_PORT, where user code on rank 0 may open a store.

    A bound socket that does not listen keeps the system from assigning the port to another process.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, 0))
        yield reserved.getsockname()[1]
