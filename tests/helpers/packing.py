"""Send values as launches do, within this process."""

from __future__ import annotations

import pytest

from parawrap.errors import LaunchError, UnsendableError
from parawrap.processes.pickling import pack, unpack


def sent(value):
    return unpack(pack(value, "value").to_bytes())


def refusal_of(value, address="value"):
    """Return the error of a value that cannot be sent. `address` names the value in the message."""
    with pytest.raises(UnsendableError) as caught:
        pack(value, address)
    assert isinstance(caught.value, LaunchError)
    assert isinstance(caught.value, TypeError)
    return caught.value


def address_of(value, address="value"):
    """Return the address of the part that cannot be sent."""
    return str(refusal_of(value, address)).partition(" cannot be sent to another process: ")[0]
