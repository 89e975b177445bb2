"""Which network addresses images may be fetched from: public ones alone, however they are written."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# IANA's registries of special-purpose addresses (IPv4 and IPv6), and multicast. What stands for an IPv4 address
# (mapped, compatible, NAT64) is that address.
SPECIAL = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "::/128", "::1/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001:db8::/32", "2002::/16",
        "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
    )
)  # fmt: skip
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
COMPATIBLE = ipaddress.IPv6Network("::/96")  # IPv4 addresses in an old spelling


def is_public(text: str) -> bool:
    """Whether an address belongs to the internet: none of this machine, its network, its provider or a group."""
    try:
        return _is_public(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (inner := _ipv4_within(address)) is not None:
        return _is_public(inner)
    special = any(address in network for network in SPECIAL if network.version == address.version)
    return address.is_global and not special


def _ipv4_within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """What a gateway, or this machine, would connect to in its place."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in COMPATIBLE or address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None
