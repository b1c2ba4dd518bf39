"""Network interfaces of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from parawrap.processes.groups import LOOPBACK

__all__ = ["interface_of", "list_addresses"]

_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>


def list_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, the one of its hostname first. Return loopback only without other addresses."""
    found = [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    others = [address for address in found if not address.startswith("127.")]
    named = None
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    return sorted(others, key=lambda address: address != named) or [LOOPBACK]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this address."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
