"""Sign values in stores that other users can write to.

A store that ranks of several machines reach listens on every interface without authentication. Processes sign each value
that they write, and verify the signature before they unpickle a value. The secret never goes through the store. A Slurm
launch has one in its folder. The ranks of a torchrun, srun, or mpirun world use a file in the home folder, which cluster
nodes usually share, and which only its user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._private_files import make_private

__all__ = ["REFUSAL", "SignedStore", "Signer"]

_VARIABLE = "PARAWRAP_SECRET"
_KEY_BYTES = 32  # of SHA-256
_DIGEST = "sha256"
_DIGEST_BYTES = hashlib.new(_DIGEST).digest_size

REFUSAL = (
    "not signed with this process's key for this use: another program wrote it, or the nodes have different keys. Copy "
    f"~/.parawrap/key to all nodes, or set {_VARIABLE} to the same secret in all ranks"
)
"""What is wrong with a value, for error messages."""


class Signer:
    """Signs and verifies values with a secret.

    Args:
        secret: The secret. None takes this user's key.

    Raises:
        LaunchError: If the key can neither be read nor created, or other users have access to it.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._key = _key() if secret is None else secret

    def signed(self, place: str, value: bytes) -> bytes:
        """Return the signature followed by `value`. The signature is valid only for this place in the store."""
        return self._signature(place, value) + value

    def verified(self, place: str, signed: bytes, source: str) -> bytes:
        """Return the value without its signature.

        Args:
            place: The value's place in the store.
            signed: The bytes from the store.
            source: The expected writer, for the error message.

        Raises:
            LaunchError: If the signature is wrong.
        """
        signature, value = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, self._signature(place, value)):
            msg = f"the value of {source} in the world's store is {REFUSAL}"
            raise LaunchError(msg)
        return value

    def _signature(self, place: str, value: bytes) -> bytes:
        return hmac.digest(self._key, place.encode() + b"\0" + value, _DIGEST)


class SignedStore:
    """The part of a store below a prefix. Its values are signed for their keys. As thread-safe as the store.

    Args:
        store: The store.
        prefix: The prefix of all keys. It must differ in each use of the secret, so that old values are invalid.
        signer: Signs and verifies the values.
    """

    def __init__(self, store: dist.Store, prefix: str, signer: Signer) -> None:
        self._store: Any = store  # accepts bytes, although its stubs declare str
        self._prefix = prefix
        self._signer = signer

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        place = self._place(key)
        self._store.set(place, self._signer.signed(place, value))

    def get(self, key: str, source: str) -> bytes:
        """Wait for a value and return it. Safe to unpickle. `source` is the expected writer, for the error message.

        Raises:
            LaunchError: If the signature is wrong.
        """
        place = self._place(key)
        return self._signer.verified(place, self._store.get(place), source)

    def set_first(self, key: str, value: bytes, source: str) -> bytes:
        """Write a value unless the key has one. Return the key's value.

        Raises:
            LaunchError: If the signature is wrong.
        """
        place = self._place(key)
        return self._signer.verified(place, self._store.compare_set(place, "", self._signer.signed(place, value)), source)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys have values."""
        return bool(self._store.check([self._place(key) for key in keys]))

    def add(self, key: str, number: int) -> int:
        """Add to a counter and return its value. Counters are not signed."""
        return int(self._store.add(self._place(key), number))

    def delete(self, *keys: str) -> None:
        """Delete keys, as far as they exist."""
        for key in keys:
            self._store.delete_key(self._place(key))

    def _place(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _key() -> bytes:
    """Return the key from the environment, the home folder, or, if that is not writable, the temporary folder."""
    if given := os.environ.get(_VARIABLE):
        return given.encode()
    reasons = []
    for folder in (Path("~/.parawrap").expanduser(), Path(tempfile.gettempdir(), f"parawrap-{os.getuid()}")):
        try:
            return _key_in(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error}")
    msg = (
        f"the key that signs the values of this launch can neither be read nor created ({'; '.join(reasons)}): set "
        f"{_VARIABLE} to the same secret in all ranks"
    )
    raise LaunchError(msg)


def _key_in(folder: Path) -> bytes:
    """Read the key in a folder, after creating it if necessary. Ranks that create it at the same time get the same key."""
    make_private(folder)
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
        msg = f"{path} has {len(key)} bytes instead of {_KEY_BYTES}: delete it, and the next launch creates a new key"
        raise LaunchError(msg)
    return key


def _check_private(path: Path, status: os.stat_result) -> None:
    """Refuse a key that other users can read or replace.

    Raises:
        LaunchError: If another user owns the file or its folder, can read or write the file, or can write to the folder.
    """
    for each, found in ((path, status), (path.parent, path.parent.stat())):
        readable = stat.S_IRWXG | stat.S_IRWXO if each == path else stat.S_IWGRP | stat.S_IWOTH
        if found.st_uid != os.getuid() or found.st_mode & readable:
            msg = (
                f"other users have access to {each} (mode {stat.filemode(found.st_mode)}, owner {found.st_uid}), and could "
                f"run code as this user: delete {path} (the next launch creates it with mode 600), run "
                f"`chmod 700 {path.parent}`, or set {_VARIABLE} to a secret"
            )
            raise LaunchError(msg)
