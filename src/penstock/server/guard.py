"""
Who may knock at all: checked on every request, whatever its verb and path, before anything looks at it.

A page in a browser on this machine can reach a loopback port, by a form, by a script, or by a name that it points at 127.0.0.1 after the fact.
It cannot choose its Host, its Origin or its Sec-Fetch-Site. These are compared with what is allowed; nothing is compared with what is known to be bad.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.scheduler.private_files import Unsafe
from penstock.server.problems import Forbidden

__all__ = [
    "LOOPBACK",
    "Exposure",
    "check_exposure",
    "check_request",
]

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAME: Final = frozenset({b"same-origin", b"none"})


@dataclass(frozen=True, slots=True)
class Exposure:
    """How the server may be reached. `hosts` are names without a port, as a Host header has them."""

    hosts: frozenset[str] = LOOPBACK
    #: Whole origins, `https://jobs.example.org`, besides those of the hosts themselves.
    origins: frozenset[str] = frozenset()


def check_request(headers: Mapping[bytes, bytes], exposure: Exposure) -> None:
    host = _without_port(headers.get(b"host", b"").decode("latin-1")).lower()
    if host not in exposure.hosts:
        raise Forbidden("the Host header names a host that is not allowed here")
    origin = headers.get(b"origin")
    if origin is not None and not _own(origin.decode("latin-1").lower(), exposure):
        raise Forbidden("the Origin header names a site that is not allowed here")
    if headers.get(b"sec-fetch-site", b"none") not in _SAME:
        raise Forbidden("requests from other sites (Sec-Fetch-Site) are not allowed")


def _own(origin: str, exposure: Exposure) -> bool:
    scheme, found, rest = origin.partition("://")
    return origin in exposure.origins or (
        bool(found) and scheme in {"http", "https"} and _without_port(rest) in exposure.hosts
    )


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) and not host.endswith("]") else host


def check_exposure(
    bind: str, *, tls: bool, trusted_proxies: Collection[str] = (), allowed_hosts: Collection[str] = ()
) -> None:
    """Before anything listens: an address that others can reach needs encryption and a list of names."""
    if _is_loopback(bind):
        return
    if not tls and not trusted_proxies:
        raise Unsafe(
            f"listening on {bind} would send tokens in the clear: give a certificate and its key, "
            "or declare the proxy in front that has them",
            bind=bind,
        )
    if not allowed_hosts:
        raise Unsafe(
            f"listening on {bind} needs a list of the host names it is reached by (allowed_hosts)", bind=bind
        )


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"
