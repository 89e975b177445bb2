"""Which network addresses images may be fetched from: public ones alone, however they are written."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
COMPATIBLE = ipaddress.IPv6Network("::/96")  # IPv4 addresses in an old spelling


def is_public(text: str) -> bool:
    """Whether an address belongs to the internet: none of this machine, its network, its provider or a group."""
    try:
        return _is_public(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if (inner := _ipv4_within(address)) is not None:
            return _is_public(inner)
        if address.is_site_local:
            return False
    special = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    return address.is_global and not (special or address.is_reserved or address.is_unspecified)


def _ipv4_within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """What a gateway, or this machine, would connect to in its place."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in COMPATIBLE or any(address in network for network in NAT64):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None
