"""The network interfaces of this machine."""

from parawrap.launch._network import interface_of, own_addresses
from parawrap.launch.rank._process_groups import LOOPBACK


def test_addresses_have_interfaces():
    """Loopback is included only if it is the only address."""
    addresses = own_addresses()
    assert addresses
    assert all(interface_of(address) is not None for address in addresses)
    assert addresses == [LOOPBACK] or LOOPBACK not in addresses
    assert interface_of("192.0.2.1") is None
