"""
Which settings a play follows, and why it does not follow the others. `penstock simulate` names each tried
setting that is not played: a difference between two plays is not its effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

#: Settings that change what is played. A name with `*` stands for a whole section.
PLAYED: Final = frozenset(
    {
        "capacity.units", "capacity.total", "capacity.reserve", "caps.*", "depth.*", "order.*", "retry.*",
        "preemption.*", "leases.start_timeout", "leases.fetch_for", "runner.enabled", "runner.slots",
        "runner.workers", "host.labels", "addons.weight", "addons.concurrent", "addons.budget_day",
        "addons.budget_month",
    }
)  # fmt: skip

_MEASURED: Final = "no machine is measured in a play"
_NOT_ALIVE: Final = "workers never die in a play, and stop at once"
_NO_EFFECT: Final = "it does not change when jobs start"

#: Settings that are played only if the load of the hosts is given (`--host-load`).
BY_LOAD: Final = frozenset({"capacity.curve", "quiet.quiet", "quiet.normal", "quiet.busy", "quiet.margin"})
_NO_LOAD: Final = "every host counts as quiet; give --host-load"

UNPLAYED: Final = {
    "quiet.every": _MEASURED,
    "quiet.fresh_for": _MEASURED,
    "quiet.needed": _MEASURED,
    "leases.ttl": _NOT_ALIVE,
    "leases.grace": _NOT_ALIVE,
    "runner.cancel_grace": _NOT_ALIVE,
    "runner.term_grace": _NOT_ALIVE,
    "retention.*": "a play forgets no job",
    "data_dir": _NO_EFFECT,
    "database": _NO_EFFECT,
    "host.name": _NO_EFFECT,
    "postgres.*": _NO_EFFECT,
    "server.*": _NO_EFFECT,
    "log.*": _NO_EFFECT,
    "alerts.*": _NO_EFFECT,
    "telemetry.*": _NO_EFFECT,
    "runner.functions": _NO_EFFECT,
    "runner.path": _NO_EFFECT,
    "runner.pass_on": _NO_EFFECT,
    "runner.users": _NO_EFFECT,
    "addons.alert_webhook": _NO_EFFECT,
    "addons.webhook": _NO_EFFECT,
}


class UnplayedSetting(NamedTuple):
    """A setting that a play does not follow, and the reason."""

    setting: str
    why: str


def unplayed(
    keys: Iterable[str], *, host_load: bool, fixed: bool, addons: Collection[str] | None = None
) -> list[UnplayedSetting]:
    """
    The settings among `keys` that a play does not follow, with the reason. `host_load`: the load of the hosts
    is given. `fixed`: the capacity is a number, so the load does not matter. `addons`: those that have jobs.
    """
    return [
        UnplayedSetting(key, why)
        for key in keys
        if (why := _why(key, host_load=host_load, fixed=fixed) or _without_jobs(key, addons))
    ]


def _without_jobs(key: str, addons: Collection[str] | None) -> str:
    section, _, rest = key.partition(".")
    name = rest.rpartition(".")[0].strip('"')
    known = addons is None or section != "addons" or name in addons
    return "" if known else f"the load has no job of addon {name}"


def _why(key: str, *, host_load: bool, fixed: bool) -> str:
    general = general_name(key)
    section = f"{general.partition('.')[0]}.*"
    if general in BY_LOAD:
        if fixed:
            return "capacity.units is a number, so the load does not matter"
        return "" if host_load else _NO_LOAD
    if general in PLAYED or section in PLAYED:
        return ""
    return UNPLAYED.get(general) or UNPLAYED.get(section) or "a play does not know it"


def general_name(key: str) -> str:
    """
    The setting without a name in it: `addons.weight` for `addons.mail.weight`, `caps.types` for
    `caps.types.x`.
    """
    parts = key.split(".")
    if parts[0] == "addons":
        return f"addons.{parts[-1]}"
    return ".".join(parts[:2])
