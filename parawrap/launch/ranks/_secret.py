"""Signed values for stores that other users can write to.

The store of a torchrun, srun, or mpirun world listens on every interface and has no authentication. A rank signs each
value that it writes, and verifies a signature before it unpickles a value. The key never goes through the store: it is a
file that only this user can read, in the home folder, which the nodes of a cluster usually share.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from parawrap.errors import LaunchError

__all__ = ["Signer"]

_VARIABLE = "PARAWRAP_SECRET"
_KEY_BYTES = 32
_DIGEST = "sha256"
_DIGEST_BYTES = hashlib.new(_DIGEST).digest_size


class Signer:
    """Signs and verifies values with this user's key.

    Raises:
        LaunchError: If there is no key, and no folder to make one in.
    """

    def __init__(self) -> None:
        self._key = _key()

    def signed(self, place: str, value: bytes) -> bytes:
        """Return `value` with a signature in front, valid for this place in the store only."""
        return self._signature(place, value) + value

    def verified(self, place: str, signed: bytes, source: str) -> bytes:
        """Return the value without its signature.

        Args:
            place: the value's place in the store.
            signed: the bytes that the store has there.
            source: the name of the expected writer, for the error.

        Raises:
            LaunchError: If the signature is wrong.
        """
        signature, value = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, self._signature(place, value)):
            msg = (
                f"the value of {source} in the world's store is not signed with this process's key: another program wrote "
                f"it, or the nodes have different keys. Share ~/.parawrap/key between the nodes, or set {_VARIABLE} to the "
                "same secret text in all ranks"
            )
            raise LaunchError(msg)
        return value

    def _signature(self, place: str, value: bytes) -> bytes:
        return hmac.digest(self._key, place.encode() + b"\0" + value, _DIGEST)


def _key() -> bytes:
    """Return the key: of the environment, of the home folder, or, if that cannot be written, of the temporary folder."""
    if given := os.environ.get(_VARIABLE):
        return given.encode()
    reasons = []
    for folder in (Path("~/.parawrap").expanduser(), Path(tempfile.gettempdir(), f"parawrap-{os.getuid()}")):
        try:
            return _key_in(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error}")
    msg = f"no key for the values of this launch can be read or made ({'; '.join(reasons)}): set {_VARIABLE} in all ranks"
    raise LaunchError(msg)


def _key_in(folder: Path) -> bytes:
    """Read the key in a folder. Make it first if there is none; ranks that do so at once agree on one."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "key"
    if not path.exists():
        made = folder / f".key-{secrets.token_hex(8)}"
        made.touch(0o600)
        with made.open("wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(made, path)  # atomic, on network file systems too
        made.unlink()
    with path.open("rb") as file:
        _check_private(path, os.fstat(file.fileno()))
        key = file.read()
    if len(key) != _KEY_BYTES:
        msg = f"{path} has {len(key)} bytes and not {_KEY_BYTES}: delete it, and the next launch makes a new one"
        raise LaunchError(msg)
    return key


def _check_private(path: Path, status: os.stat_result) -> None:
    """Refuse a key that other users can read or replace.

    Raises:
        LaunchError: If the file or its folder has another owner, or others have access.
    """
    for each, found in ((path, status), (path.parent, path.parent.stat())):
        readable = stat.S_IRWXG | stat.S_IRWXO if each == path else stat.S_IWGRP | stat.S_IWOTH
        if found.st_uid != os.getuid() or found.st_mode & readable:
            msg = (
                f"other users have access to {each} (mode {stat.filemode(found.st_mode)}, owner {found.st_uid}), and could "
                f"run code as this user: delete {path} (a new one gets mode 600), `chmod 700 {path.parent}`, or set "
                f"{_VARIABLE}"
            )
            raise LaunchError(msg)
