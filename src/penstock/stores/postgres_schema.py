"""
The schema: numbered steps, forward only, each in a transaction, one process at a time.

Daemons are replaced one by one, so a new one brings the schema forward while old ones run. A step therefore only adds; what it
must break is broken by a later step, which says by the mark `needs` from which schema on a Penstock can live with it. An older one
than that is refused, a merely older one is not.
"""

from __future__ import annotations

from typing import Final

from penstock.core.refusals import SchemaNewer, StoreFailed
from penstock.stores.postgres_link import Connection, Link
from penstock.stores.statements import migrations

__all__ = ["migrate"]

#: Any number will do that is the same for all.
LOCK: Final = 0x50454E31


def migrate(link: Link) -> None:
    steps = migrations("postgres")
    with link.failures(), link.connection() as con:
        if _version(con, link, len(steps)) >= len(steps):
            return
        with con.transaction():
            con.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
            for number in range(_version(con, link, len(steps)) + 1, len(steps) + 1):
                con.execute(link.in_schema(steps[number - 1]))
                con.execute(
                    link.in_schema("UPDATE penstock.mark SET value = %s WHERE name = 'schema'"), [number]
                )


def _version(con: Connection, link: Link, known: int) -> int:
    """0: there is nothing yet, and the schema is made."""
    row = con.execute("SELECT to_regnamespace(%s) IS NOT NULL", [link.quoted]).fetchone()
    if row is None or not row[0]:
        con.execute(f"CREATE SCHEMA IF NOT EXISTS {link.quoted}".encode())
        return 0
    marked = con.execute("SELECT to_regclass(%s) IS NOT NULL", [f"{link.quoted}.mark"]).fetchone()
    if marked is None or not marked[0]:
        others = con.execute(
            "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace(%s)", [link.quoted]
        )
        if others.fetchone() != (0,):
            raise StoreFailed(
                f"the schema {link.schema} has tables of another program; choose another schema"
            )
        return 0
    marks: dict[str, int] = dict(
        con.execute(link.in_schema("SELECT name, value FROM penstock.mark")).fetchall()
    )
    if marks["needs"] > known:
        raise SchemaNewer(
            f"the schema {link.schema} is {marks['schema']} and needs a Penstock that knows {marks['needs']}, "
            f"this one knows {known}: upgrade Penstock",
            schema=marks["schema"],
            known=known,
        )
    return int(marks["schema"])
