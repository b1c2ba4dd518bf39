"""Network interfaces of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>
_ANY_PORT = 9  # nothing is sent there


def interface_to(host: str) -> str | None:
    """Return the name of the network interface that leads to a host. None if there is none, or only with IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, _ANY_PORT))
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)
    return None


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
