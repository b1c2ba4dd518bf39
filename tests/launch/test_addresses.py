"""The network interfaces of this machine."""

from __future__ import annotations

from parawrap.launch._addresses import interface_of, list_addresses
from parawrap.processes.groups import LOOPBACK


def test_other_nodes_get_no_loopback():
    """Each address belongs to an interface; loopback is listed only if it is the only address."""
    addresses = list_addresses()
    assert all(map(interface_of, addresses))
    assert addresses == [LOOPBACK] or (addresses and LOOPBACK not in addresses)
    assert interface_of("192.0.2.1") is None
