"""
Whom the scheduler may call, and when again: asked at each delivery, about the address that is then connected to.

A name is no answer. It can point elsewhere a second later, so what is checked is the address that it was resolved to, and that address
is used.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from penstock.core.jobs.types import MINUTE, SECOND, Span

__all__ = ["HTTP_PORTS", "LONGEST_PAUSE", "pause", "refusal"]

#: Below 1024 live the mail, shell and name servers, which must not be spoken to in somebody's words.
HTTP_PORTS: Final = frozenset({80, 443, *range(1_024, 65_536)})

_FIRST: Final[Span] = SECOND
LONGEST_PAUSE: Final[Span] = 5 * MINUTE

#: All that has been given out to anybody in IPv6, and in it what only wraps an IPv4 address (6to4, Teredo).
_UNICAST: Final = IPv6Network("2000::/3")
_WRAPPED: Final = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))
_UNIQUE_LOCAL: Final = IPv6Network("fc00::/7")
_LOOPBACK: Final = IPv6Address("::1")
_NOWHERE: Final = IPv4Network("0.0.0.0/8")


def refusal(address: str, *, private: bool) -> str | None:
    """
    Why this address is not called; None: it may be. With `private` the own machine and the own network are allowed, but never link-local
    addresses: there clouds keep the keys of the machine.
    """
    found = ip_address(address)
    if found.is_link_local:
        return f"{address} is link-local, where clouds keep the keys of a machine"
    if isinstance(found, IPv4Address):
        if found.is_global and not found.is_multicast:
            return None
        near = not (found.is_multicast or found.is_reserved or found in _NOWHERE)
    else:
        if found in _UNICAST and found.is_global and not any(found in net for net in _WRAPPED):
            return None
        near = found == _LOOPBACK or found in _UNIQUE_LOCAL
    if not near:
        return f"{address} is not an address of one machine" + _wrapping(found)
    return None if private else f"{address} is loopback or private"


def _wrapping(found: IPv4Address | IPv6Address) -> str:
    inner = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return "" if inner is None else f": it stands for {inner}"


def pause(tries: int) -> Span:
    """After so many failures in a row."""
    return min(LONGEST_PAUSE, _FIRST << min(tries - 1, 20))
