"""
What a shell offers behind TAB where a job, an addon or a host is to be named: those that there are.

Whoever presses TAB has no use for an error, and waits for no answer that does not come: then there is nothing to offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from penstock.client.client import Client

__all__ = ["ADDON", "HOST", "JOB"]

_PATIENCE: Final = 2.0  # seconds


class _Name(click.ParamType[str]):
    def __init__(self, name: str, known: Callable[[Client], Iterator[CompletionItem]]) -> None:
        self.name, self._known = name, known

    def shell_complete(
        self, context: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from penstock.client.client import Client
        from penstock.core.errors import PenstockError

        try:
            with Client(context.find_root().params.get("url"), timeout=_PATIENCE, retry_for=0.0) as client:
                return [item for item in self._known(client) if item.value.startswith(incomplete)]
        except (PenstockError, ValueError, OSError):
            return []


def _jobs(client: Client) -> Iterator[CompletionItem]:
    """As lists show them, newest first."""
    yield CompletionItem("last", help="the newest")
    for job in client.jobs(limit=50, newest_first=True).jobs:
        yield CompletionItem(job.job_id[-8:], help=f"{job.state} {job.job_type} of {job.addon_id}")


def _addons(client: Client) -> Iterator[CompletionItem]:
    for addon in client.addons().addons:
        yield CompletionItem(addon.addon_id)


def _hosts(client: Client) -> Iterator[CompletionItem]:
    for host in client.hosts().hosts:
        yield CompletionItem(host.host, help=host.state)


JOB: Final = _Name("JOB", _jobs)
ADDON: Final = _Name("ADDON", _addons)
HOST: Final = _Name("HOST", _hosts)
