"""Folders that only this user may enter, and pickle files that no other user can have written."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import BinaryIO

from parawrap.errors import LaunchError

__all__ = ["make_private", "open_private"]

_OTHERS = 0o077  # every permission of the group and of other users
_OTHERS_MAY_WRITE = 0o022  # permission to write of the group and of other users


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, and its missing parents, whatever the umask is.

    If the folder exists, belongs to this user, and others may write to it, withdraw the access of others.

    Raises:
        OSError: If the folder cannot be made.
    """
    for each in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            if not each.is_dir():  # mkdir in an existing read-only folder fails with another error
                each.mkdir(mode=0o700)
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS_MAY_WRITE:
        folder.chmod(status.st_mode & ~_OTHERS & 0o777)


def open_private(path: Path) -> BinaryIO:
    """Open a file for reading if only this user can write to its folder. Unpickling can run any code in a file.

    Raises:
        LaunchError: If the folder belongs to another user, or others may write to it.
        OSError: If the file cannot be opened.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            msg = f"{path.parent} belongs to user {status.st_uid}, not to user {os.geteuid()}: {path.name} is not loaded"
            raise LaunchError(msg)
        if status.st_mode & _OTHERS_MAY_WRITE:
            msg = f"other users may write to {path.parent} (mode {status.st_mode & 0o777:o}): {path.name} is not loaded"
            raise LaunchError(msg)
        # Open relative to the checked folder, because its path may lead to another folder by now.
        return open(path.name, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder))
    finally:
        os.close(folder)
