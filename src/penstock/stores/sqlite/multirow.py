"""
Many rows by one statement.

`executemany` takes the statement out of the connection's cache and puts it back for every row, and each time the cache throws
out another one: a batch of a hundred had most statements of the store compiled anew. Few, long statements leave the cache alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

import apsw

from penstock.stores.common.rows import listed
from penstock.stores.sqlite.connection import statements

__all__ = ["insert", "update", "write"]

#: So many rows by one statement.
SIZES: Final = (64, 16, 4, 3, 2, 1)


def insert(con: apsw.Connection, name: str, rows: Sequence[tuple[Any, ...]]) -> None:
    first, left = 0, len(rows)
    for size in SIZES if left > 4 else (left,):
        while left >= size > 0:
            con.execute(_rows_at_once(name, size), tuple(chain.from_iterable(rows[first : first + size])))
            first, left = first + size, left - size


@cache
def _rows_at_once(name: str, size: int) -> str:
    head, _, values = statements()[name].rpartition("VALUES")
    return f"{head}VALUES {', '.join([values] * size)}"


def update(con: apsw.Connection, name: str, groups: dict[Hashable, list[Any]]) -> None:
    """
    `groups`: the keys of the rows that get the same values. Each statement names the state that it leaves. One that finds another would be
    a bug of ours, and must not be committed.
    """
    before, many = con.total_changes(), _keys_at_once(name)
    for values, keys in groups.items():
        if len(keys) == 1:
            con.execute(statements()[name], (*values, keys[0]))  # type: ignore[misc]  # a tuple, whatever is in it
        else:
            con.execute(many, (*values, listed(keys)))  # type: ignore[misc]  # likewise
    _check(con, name, before, sum(map(len, groups.values())))


def write(con: apsw.Connection, name: str, values: tuple[Any, ...], rows: int) -> None:
    """One statement that finds by itself which rows it concerns, and how many these must be."""
    before = con.total_changes()
    con.execute(statements()[name], values)
    _check(con, name, before, rows)


def _check(con: apsw.Connection, name: str, before: int, rows: int) -> None:
    if con.total_changes() - before != rows:
        raise AssertionError(f"{name}: a row was not in the state it was read in")


@cache
def _keys_at_once(name: str) -> str:
    """The key is the last thing a statement asks for."""
    head, _, number = statements()[name].rpartition(" = ?")
    return f"{head} IN (SELECT value FROM json_each(?{number}))"  # noqa: S608 - fixed words
