"""SQL lives in files: one per dialect with the statements by name, and one folder per dialect with the steps of its schema."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def statements(dialect: str) -> dict[str, str]:
    text = (files("penstock.stores") / "sql" / f"{dialect}.sql").read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    return {name: sql.strip().removesuffix(";") for name, sql in zip(parts[::2], parts[1::2], strict=True)}


@cache
def migrations(dialect: str) -> tuple[str, ...]:
    """The first leads from nothing to schema 1, and so on."""
    folder = files("penstock.stores") / "sql" / dialect
    return tuple(step.read_text("utf-8") for step in sorted(folder.iterdir(), key=lambda f: f.name))
