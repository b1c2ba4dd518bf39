"""Open pickle files safely: only if no other user can have written them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from parawrap.errors import LaunchError

__all__ = ["open_private"]


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
        if status.st_mode & 0o022:
            msg = f"other users may write to {path.parent} (mode {status.st_mode & 0o777:o}): {path.name} is not loaded"
            raise LaunchError(msg)
        # Open relative to the checked folder, because its path may lead to another folder by now.
        return open(path.name, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder))
    finally:
        os.close(folder)
