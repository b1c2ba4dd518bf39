"""Send values as launches do, within this process."""

from __future__ import annotations

import os

import pytest

from parawrap.errors import LaunchError, UnsendableError
from parawrap.launch.messages._pickle_values import memory_file, pack, unpack


def sent(value):
    """Return the value after it was packed and unpacked."""
    file = memory_file("test")
    try:
        pack(value, file, "value")
        return unpack(file)
    finally:
        os.close(file)


def refusal_of(value, address="value"):
    """Return the error of a value that cannot be sent. `address` names the value in the message."""
    file = memory_file("test")
    try:
        with pytest.raises(UnsendableError) as caught:
            pack(value, file, address)
    finally:
        os.close(file)
    assert isinstance(caught.value, LaunchError)
    assert isinstance(caught.value, TypeError)
    return caught.value


def address_of(value, address="value"):
    """Return the address of the part that cannot be sent."""
    return str(refusal_of(value, address)).partition(" cannot be sent to another process: ")[0]
