"""The network interface that leads to a host."""

from __future__ import annotations

from parawrap.launch._addresses import interface_to


def test_the_way_to_a_host():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("::1") is None
    assert interface_to("no-such-host.invalid") is None
