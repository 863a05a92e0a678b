"""The address of this machine that the other processes of a group reach."""

import ipaddress
import os
import socket
from collections.abc import Iterable

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # nothing is sent to it


def chosen_address(target: str) -> str | None:
    """Return the address from which this machine reaches another one.

    IPv4 goes first, so that all processes choose alike.
    """
    return None if os.environ.get(_INTERFACE_VARIABLE) else _address_towards(target)


def reachable_address(address: str | None, other_addresses: Iterable[str | None]) -> str | None:
    """Return the address of this machine that all other processes of a group reach.

    The name of a machine stands for a loopback address in its own ``/etc/hosts`` on Debian. A process that has such an address takes that
    from which it reaches the processes on other machines.

    address: the address that this process has chosen so far; None to leave the choice to gloo.
    """
    if address is None or not _is_loopback(address):
        return address
    for other_address in other_addresses:
        if other_address and not _is_loopback(other_address):
            return _address_towards(other_address)
    return address


def _address_towards(target: str) -> str | None:
    try:
        found = socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, socket_address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(socket_address)  # of a datagram socket: chooses the route, and sends nothing
            except OSError:
                continue
            address: str = probe.getsockname()[0]
            return address
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
