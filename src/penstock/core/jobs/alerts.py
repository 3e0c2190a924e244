"""
Alerts, how often an alert repeats, and which addresses a webhook may call.

An alert is an event in the transaction of its cause, so no alert is lost and none is false. `key` names the
occasion: two deliveries with the same key are one alert.

A delivery checks the address that it connects to, and uses that address: a name may resolve to another
address a second later.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import asdict

from penstock.core.jobs.types import MINUTE, SECOND, AddonId, JobId, Moment, Span


class Alert(Struct, frozen=True, kw_only=True):
    """An alert about a job, or without a job about the whole addon."""

    kind: str
    addon_id: AddonId
    job_id: JobId | None = None
    key: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        fields |= fields.pop("data")
        return fields


class SentAlert(NamedTuple):
    """When an alert was sent, and how many of the same key were held back since."""

    at: Moment
    held: int = 0


class Repeats:
    """Lets one alert per key and window through, and counts those that are held back."""

    MOST: Final = 10_000

    def __init__(self, window: Span, sent: Mapping[str, SentAlert] = MappingProxyType({})) -> None:
        self._window, self.sent = window, dict(sent)

    def record(self, key: str, now: Moment) -> int | None:
        """Record an alert. None: hold it back. Else send it, with the number of those held back before."""
        last = self.sent.get(key)
        if last is not None and last.at <= now < last.at + self._window:
            self.sent[key] = last._replace(held=last.held + 1)
            return None
        self.sent.pop(key, None)  # so that the dict stays in the order of time
        self.sent[key] = SentAlert(now)
        return 0 if last is None else last.held

    def forget(self, now: Moment) -> None:
        """
        Forget keys whose window is over, and the oldest if there are too many: each job may bring a new key.
        """
        self.sent = {k: t for k, t in self.sent.items() if t.held or t.at <= now < t.at + self._window}
        for key in list(self.sent)[: max(0, len(self.sent) - self.MOST)]:
            del self.sent[key]


#: Mail, shell and name servers use ports below 1024; a webhook must not send them words of a job.
HTTP_PORTS: Final = frozenset({80, 443, *range(1_024, 65_536)})

_FIRST: Final[Span] = SECOND
LONGEST_PAUSE: Final[Span] = 5 * MINUTE

#: The IPv6 addresses in public use, and the networks in them that only wrap an IPv4 address (6to4, Teredo).
_UNICAST: Final = IPv6Network("2000::/3")
_WRAPPED: Final = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))
_UNIQUE_LOCAL: Final = IPv6Network("fc00::/7")
_LOOPBACK: Final = IPv6Address("::1")
_NOWHERE: Final = IPv4Network("0.0.0.0/8")


def refusal(address: str, *, private: bool) -> str | None:
    """
    Why a webhook may not call this address; None: it may. `private` allows the own machine and network, but
    never link-local addresses: clouds keep the keys of a machine there.
    """
    ip = ip_address(address)
    if ip.is_link_local:
        return f"{address} is link-local, where clouds keep the keys of a machine"
    if isinstance(ip, IPv4Address):
        if ip.is_global and not ip.is_multicast:
            return None
        near = not (ip.is_multicast or ip.is_reserved or ip in _NOWHERE)
    else:
        if ip in _UNICAST and ip.is_global and not any(ip in net for net in _WRAPPED):
            return None
        near = ip == _LOOPBACK or ip in _UNIQUE_LOCAL
    if not near:
        return f"{address} is not an address of one machine" + _wrapping(ip)
    return None if private else f"{address} is loopback or private"


def _wrapping(ip: IPv4Address | IPv6Address) -> str:
    inner = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return "" if inner is None else f": it stands for {inner}"


def pause(tries: int) -> Span:
    """The pause after so many failures in a row."""
    return min(LONGEST_PAUSE, _FIRST << min(tries - 1, 20))
