"""The store that the ranks of a launch meet at, kept by whoever watches them.

The parent keeps it, not rank 0: it outlives every rank, and a rank that dies takes no other rank's store with it. On one
machine it listens on the loopback interface, on a port that the system gave out and that was never free in between.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.ranks._groups import LOOPBACK, Rendezvous, planned_rendezvous

__all__ = ["open_rendezvous"]

_BACKLOG = 4096
_LONGEST_TEMP = 70
_EVERYWHERE = "0.0.0.0"


@contextmanager
def open_rendezvous(platform: Platform, host: str | None = None, path: Path | None = None) -> Iterator[Rendezvous | None]:
    """Keep a store open for the ranks of a launch.

    Args:
        platform: of the launch.
        host: an address by which ranks on other machines reach this one; None where they all run here.
        path: a file that they all see; None for one in a new private folder.

    Raises:
        LaunchError: the address that the platform names cannot be listened on.
    """
    planned = planned_rendezvous(platform, host)
    if planned is None:
        yield None
    elif planned.path is not None and path is not None:
        yield Rendezvous(path=str(path))
    elif planned.path is not None:
        with _private_folder() as folder:
            yield Rendezvous(path=str(folder / "store"))
    else:
        is_one_address = planned.host in (LOOPBACK, platform.master_addr)
        listener = _listening(planned if is_one_address else Rendezvous(_EVERYWHERE, planned.port))
        met = Rendezvous(planned.host, listener.getsockname()[1])
        line = listener.detach()
        store = dist.TCPStore(str(met.host), met.port, is_master=True, wait_for_workers=False, master_listen_fd=line)
        yield met
        del store


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
        msg = f"the ranks cannot meet at {place}: {error}; leave master_addr and master_port out for a free port here"
        raise LaunchError(msg) from error
    return listener


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A new folder that no other user may enter, gone at the end."""
    # Made with mode 0700. The path of a socket within may have a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="parawrap-", dir="/tmp" if len(tempfile.gettempdir()) > _LONGEST_TEMP else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
